"""The planner with models beside the policy: bytes by phase and seconds by hand, and what real ones
hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from grpo_spmd.checks.memory import engine_backup
from grpo_spmd.checks.signals import Kind, SideModel, side_models
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import Shapes
from grpo_spmd.model.policy import build_policy
from grpo_spmd.model.values import build_value_model
from grpo_spmd.observe.cards import CARDS
from grpo_spmd.tools.plan.dry_run import Peaks
from grpo_spmd.tools.plan.phases import (
    Plan,
    PlannedModel,
    add_time,
    facts_from_config,
    kv_cache,
    make_plan,
    merge_peaks,
    plan_phases,
    plan_side_models,
    teacher_answers,
    with_head,
)
from grpo_spmd.tools.plan.step_time import Case, Speed
from tests.support.models import make_model
from tests.support.real_memory import lone_rank
from tests.unit.test_plan import CARD, MODEL, SHARD, by_hand, tiny_config

TEACHER = "teacher.path={0}"
CRITIC = ("critic.path={0}", "advantage.estimator=gae", "advantage.normalize_std=batch")


def made_up(
    kind: Kind,
    num_bytes: int,
    *,
    scoring: int = 0,
    update: int = 0,
    retained: int = 0,
    gradients: int = 0,
) -> PlannedModel:
    peaks = Peaks(Counter(activations=scoring), Counter(activations=update))
    answers = Counter({"said": retained} if retained else {})
    return PlannedModel(side_model(kind), MODEL, num_bytes, gradients, peaks, answers)


def side_model(kind: Kind) -> SideModel:
    return SideModel(kind, kind, "x", f"{kind}.path")


def phases_with(tmp_path: Path, models: Sequence[PlannedModel]) -> dict[str, Counter[str]]:
    case = Case(by_hand(tmp_path), MODEL, CARD, 4)
    return plan_phases(case, Peaks(Counter(), Counter()), kv_cache(case), models)


def test_teacher_and_critic_are_held_while_the_engine_sleeps(tmp_path: Path) -> None:
    old = phases_with(tmp_path, [])
    result = phases_with(tmp_path, [made_up("teacher", 70), made_up("critic", 500)])
    added = {name: result[name] - old[name] for name in old}
    held = Counter({"teacher": 70, "critic": 500})
    names = ("logprobs", "update", "checkpoint")
    assert added == {name: held if name in names else Counter() for name in result}
    assert all(not old[name] - result[name] for name in old)


def test_what_waits_is_in_host_memory_and_a_critic_is_copied_too(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "loss.kl_coef=0")
    second = make_model(tmp_path / "other", "qwen3", tied=False, num_hidden_layers=4)
    overrides = [text.format(second) for text in (TEACHER, *CRITIC)]
    config = load_config(tmp_path / "config.yaml", ["loss.kl_coef=0", *overrides])
    facts = facts_from_config(Path(config.model.path))
    plan = make_plan(Case(config, facts, CARDS["H100-80GB"], 2), Path(config.model.path))
    teacher, critic = (plan.host[f"{name}, waiting"] for name in ("teacher", "critic"))
    assert plan.phases["update"]["teacher"] == teacher > 0
    assert plan.phases["update"]["critic"] == critic > 0
    policy = plan.phases["update"]["policy"] + plan.phases["update"]["moments"]
    assert plan.host["checkpoint's copy"] == policy + critic


QWEN3_8B: Shapes = {
    "model.embed_tokens.weight": (151936, 4096),
    "model.layers.0.self_attn.q_proj.weight": (4096, 4096),
    "model.layers.0.self_attn.k_proj.weight": (1024, 4096),
    "model.layers.0.self_attn.v_proj.weight": (1024, 4096),
    "model.layers.0.self_attn.o_proj.weight": (4096, 4096),
    "model.layers.0.self_attn.q_norm.weight": (128,),
    "model.layers.0.mlp.gate_proj.weight": (12288, 4096),
    "model.layers.0.mlp.up_proj.weight": (12288, 4096),
    "model.layers.0.mlp.down_proj.weight": (4096, 12288),
    "lm_head.weight": (151936, 4096),
}  # with one of its 36 layers
SCORES = "rewards=[{model: x, name: scores}]"


@pytest.mark.parametrize(
    ("overrides", "expected_mib"),
    [
        ([], 0),  # level 2 drops the weights
        # qkv 6144 x 4096 x 2 bytes = 48 MiB, o 32, gate and up 192, down 96: pinned are 64, 32, 256
        # and 128. The embedding and the lm_head have 1,187 MiB each: 2,048. The norm is in a block
        # of 2.
        (["rollout.sleep_level=1"], 480 + 2 * 2048 + 2),
        ([SCORES], 480 + 2 * 2048 + 2),  # rests are at level 1
        # Halves of 594 MiB are 1,024; qkv 24 is 32, o 16, gate and up 128, down 64.
        ([SCORES, "rollout.tensor_parallel_size=2"], 240 + 2 * 1024 + 2),
        # Room for rank 8, 16 bytes for each row or column: below 1 MiB all of them. A has 6 x 4,096
        # and 12,288, B 4,096 + 2 x 1,024 + 4,096 + 2 x 12,288 + 4,096, so 1.2 MiB with the norm,
        # which still is one block of 2.
        (["model.lora.rank=4", "model.lora.sync=adapter"], 480 + 2 * 2048 + 2),
    ],
)
def test_what_a_sleeping_engine_pins_is_in_powers_of_two(
    tmp_path: Path, overrides: list[str], expected_mib: int
) -> None:
    config = by_hand(tmp_path, "model.dtype=bfloat16", *overrides)
    assert engine_backup(config, replace(MODEL, shapes=QWEN3_8B)) == expected_mib << 20


def test_tensors_of_some_mib_share_blocks_of_twenty(tmp_path: Path) -> None:
    """3 of 8 MiB are 24 in two blocks of 20, of which each is pinned as 32."""
    shapes: Shapes = {f"model.layers.{n}.mlp.down_proj.weight": (1024, 4096) for n in range(3)}
    config = by_hand(tmp_path, "model.dtype=bfloat16", "rollout.sleep_level=1")
    assert engine_backup(config, replace(MODEL, shapes=shapes)) == 64 << 20
    # The sampler's tables are one tensor more: 1,024 x 151,936 x 4 bytes are pinned as 1 GiB.
    with_tables = engine_backup(config, replace(MODEL, shapes=shapes), 1024 * 151_936 * 4)
    assert with_tables == (64 << 20) + (1 << 30)


def test_a_reward_model_has_the_engines_place_while_it_scores(tmp_path: Path) -> None:
    """Of two the larger counts; where the engine's own peak is higher, that does."""
    old = phases_with(tmp_path, [])["reward"]
    asleep = Counter(
        {k: n for k, n in old.items() if k != "KV cache" and not k.startswith("engine's")}
    )
    assert asleep["policy"] == 4 * SHARD
    models = [made_up("reward model", 600), made_up("reward model", 2 << 30, scoring=1000)]
    result = phases_with(tmp_path, models)
    assert result["reward"] == asleep + Counter(
        {"reward model": 2 << 30, "activations": 1000, "fragmentation": 50}
    )
    assert phases_with(tmp_path, models[:1])["reward"] == old


def test_passes_take_turns_and_what_a_teacher_says_is_kept() -> None:
    policy = Peaks(Counter(logits=100), Counter(activations=900))
    models = [
        made_up("teacher", 0, scoring=250, retained=40),
        made_up("critic", 0, scoring=80, update=700, gradients=1200),
        made_up("reward model", 0, scoring=9999),
    ]
    result = merge_peaks(policy, models, Counter())
    assert result.scoring == Counter(activations=250, said=40)
    assert result.update == Counter(
        gradients=1200, said=40
    )  # AdamW needs all of the critic's gradients at one time
    assert merge_peaks(policy, models[:1], Counter()).update == Counter(activations=900, said=40)
    assert merge_peaks(policy, [], Counter()) == policy


def a_teacher(config: Config, loss: str) -> Counter[str]:
    changed = load_with(config, f"teacher.loss={loss}", "teacher.top_k=8")
    return teacher_answers(Case(changed, MODEL, CARD, 4), side_model("teacher"))


def load_with(config: Config, *overrides: str) -> Config:
    return load_config(Path(config.run_dir).parent / "hand.yaml", ["teacher.path=x", *overrides])


def test_what_a_teacher_says_by_hand(tmp_path: Path) -> None:
    """8 prompts of 4 completions on 4 ranks: 8 rollouts of 48 tokens; D 32, V 100, bfloat16."""
    config, tokens = by_hand(tmp_path), 8 * 48
    assert a_teacher(config, "sampled") == {"teacher's logprobs": 4 * tokens}
    assert a_teacher(config, "topk") == {"teacher's likeliest tokens": 8 * (8 + 4) * tokens}
    assert a_teacher(config, "full") == {
        "teacher's hidden states": 64 * tokens,
        "teacher's lm_head": 6400,
    }
    assert not teacher_answers(Case(load_with(config), MODEL, CARD, 4), side_model("critic"))


def test_heads_by_hand() -> None:
    config: dict[str, Any] = {"hidden_size": 32, "id2label": {"0": "bad", "1": "good", "2": "odd"}}
    shapes = {"model.norm.weight": (32,), "lm_head.weight": (100, 32)}
    assert with_head("teacher", shapes, config) == shapes
    assert with_head("critic", shapes, config) == {
        "model.norm.weight": (32,),
        "head.weight": (1, 32),
    }
    assert with_head("reward model", shapes, config)["head.weight"] == (3, 32)


def test_seconds_by_hand(tmp_path: Path) -> None:
    """A forward pass is that of the planner's own extra passes; a critic's update three more; and
    each model moves to
    host memory and back at the card's speed."""
    config = load_with(by_hand(tmp_path), "model.activation_checkpointing=true")
    case = Case(config, MODEL, CARD, 4)
    old = dict.fromkeys(("weight_sync", "rollout", "logprobs", "update"), 0.0)
    moved = 10**6 / (CARD.host_gb_s * 1e9)
    teacher, critic = made_up("teacher", 10**6), made_up("critic", 10**6, gradients=4 * 1000)
    result = add_time(dict(old), case, [teacher])
    forward = result["logprobs"]
    assert forward > 0
    assert result["weight_sync"] == pytest.approx(moved)
    assert result["update"] == pytest.approx(moved)
    result = add_time(dict(old), case, [critic])
    without_head = result["logprobs"]
    assert 0 < without_head <= forward
    stepped = 28 * 1000 / Speed(CARD, 4).memory
    assert result["update"] == pytest.approx(
        moved + 4 * without_head + stepped
    )  # forward, backward twice, recomputed
    result = add_time(dict(old), case, [made_up("reward model", 10**6)])
    assert result["reward"] == pytest.approx(without_head + 2 * moved)
    assert result["logprobs"] == 0


def test_a_model_that_the_run_has_anyway_is_counted_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "loss.kl_coef=0")
    same = f"teacher.path={config.model.path}"
    path = tmp_path / "config.yaml"

    def names(*overrides: str) -> list[str]:
        return [model.name for model in side_models(load_config(path, [same, *overrides]))]

    assert names("loss.kl_coef=0") == ["teacher"]
    assert names("loss.kl_coef=0.1") == []  # the reference
    assert names("loss.kl_coef=0", "model.lora.rank=4") == []  # the policy without its adapters
    assert names("teacher.path=policy", "teacher.prompt_key=answer") == []  # the policy itself
    two = "{a: " + config.model.path + ", b: " + config.model.path + "}"
    assert names("loss.kl_coef=0", f"teacher.path={two}") == ["teacher a", "teacher b"]


def test_a_teacher_that_is_the_policy_costs_a_pass_and_its_answers_alone(tmp_path: Path) -> None:
    """The tiny model has 64 columns, 512 tokens of vocabulary and float32. Hidden states of the
    completions' tokens and the copied lm_head stay until the update; no weights do, anywhere."""
    config = tiny_config(tmp_path, "loss.kl_coef=0")
    facts, folder = facts_from_config(Path(config.model.path)), Path(config.model.path)
    live = ["loss.kl_coef=0", "teacher.path=policy", "teacher.prompt_key=answer"]

    def plan(*overrides: str) -> Plan:
        changed = load_config(tmp_path / "config.yaml", ["loss.kl_coef=0", *overrides])
        return make_plan(Case(changed, facts, CARDS["H100-80GB"], 1), folder)

    without, live_plan = plan(), plan(*live, "teacher.loss=full")
    tokens = Case(config, facts, CARD, 1).num_rollouts * config.rollout.max_completion_tokens
    added = live_plan.phases["update"] - without.phases["update"]
    vocabulary = facts.shapes["model.embed_tokens.weight"][0]
    assert added["teacher's hidden states"] == tokens * 64 * 4
    assert added["teacher's lm_head"] == vocabulary * 64 * 4
    assert "teacher" not in live_plan.phases["update"]
    assert live_plan.host == without.host
    assert live_plan.time["logprobs"] > without.time["logprobs"] == 0


def test_one_that_is_not_here_is_named(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    config = load_config(tmp_path / "config.yaml", ["teacher.path=org/none"])
    expected = r"^teacher.path: there is no config.json of org/none here; hf download"
    with pytest.raises(ConfigError, match=expected):
        plan_side_models(Case(config, MODEL, CARD, 1))


def test_real_ones_hold_what_is_planned(tmp_path: Path) -> None:
    """Of 2 ranks: a teacher in the compute dtype, a critic in float32 with two moments."""
    base = tiny_config(tmp_path, "loss.kl_coef=0")
    second = make_model(
        tmp_path / "other", "qwen3", tied=False, num_hidden_layers=4, vocab_size=1200
    )
    overrides = [text.format(second) for text in (TEACHER, *CRITIC)]
    config = load_config(
        tmp_path / "config.yaml", ["loss.kl_coef=0", "model.dtype=bfloat16", *overrides]
    )
    teacher, critic = plan_side_models(Case(config, MODEL, CARD, 2))
    with lone_rank(2, 1) as session:
        local = build_policy(
            load_with_path(config, str(second)).model, 1.0, session, trainable=False
        )
        values = build_value_model(str(second), config.model, session, 64, 1200)
        retained = [sum(local_bytes(p) for p in model.parameters()) for model in (local, values)]
    # the head's bias, and rows of padding of it, are not planned for
    assert teacher.num_bytes == retained[0]
    assert critic.num_bytes == pytest.approx(3 * retained[1], rel=1e-3)
    assert critic.gradients == pytest.approx(retained[1], rel=1e-3)
    assert critic.peaks.update.total() > 0
    assert teacher.peaks.scoring["logits"] > 0  # of the longer row
    assert "logits" not in critic.peaks.update + critic.peaks.scoring
    assert base.model.dtype == "float32"


def load_with_path(config: Config, path: str) -> Config:
    return load_config(
        Path(config.run_dir).parent / "config.yaml", [f"model.path={path}", "model.dtype=bfloat16"]
    )


def local_bytes(parameter: Any) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return int(local.untyped_storage().nbytes())
