"""Teachers in one process: the divergence against TRL's own numbers and plain autograd, advantages
by hand, whose
rollouts are shown to whom, and what of a config is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.checks.explain import explain
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import (
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    TeacherConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.reductions import Mean
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.config_json import read_model
from grpo_spmd.model.logprobs import Divergence, TopTeacher, WholeTeacher, top_outcomes
from grpo_spmd.model.policy import Policy, build_policy, hf_named_shards
from grpo_spmd.records import Decision, MicroBatch, Rollout, RolloutBatch, TeacherSignal
from grpo_spmd.signals import opening as signal_rewards
from grpo_spmd.signals.teacher import Teacher, TeacherModel, TeacherRequest, select_teacher_row
from tests.support import trl_distillation
from tests.support.learn import taught
from tests.support.models import make_model, write_config

CPU = torch.device("cpu")
TRL = json.loads(Path(trl_distillation.__file__).with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two models with one vocabulary; the second is wider."""
    folder = tmp_path_factory.mktemp("teacher")
    wide = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    return [
        make_model(folder / "a", "qwen3", tied=True),
        make_model(folder / "b", "qwen3", tied=False, seed=1, **wide),
    ]


def build(
    path: Path, session: Session, dtype: Any = "float32", *, trainable: bool = True, **changes: Any
) -> Policy:
    config = ModelConfig(path=str(path), dtype=dtype, **changes)
    return build_policy(config, trl_distillation.TEMPERATURE, session, trainable=trainable)


def attached(teacher: Teacher, *rows: MicroBatch) -> list[MicroBatch]:
    teacher.attach(RolloutBatch([list(rows)], [1], [1]), cast(Decision, None), lambda _: None)
    return list(rows)


def updater_of(policy: Policy) -> PolicyUpdater:
    return PolicyUpdater(policy, OptimizerConfig(), LossConfig(), TrainingConfig(), 8)


def rollouts() -> list[Rollout]:
    return [
        Rollout(i, 0.0, True, prompt, message, [0.0] * len(message))
        for i, (prompt, message) in enumerate(trl_distillation.ROWS)
    ]


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {
        name: cast(DTensor, p.grad).full_tensor()
        for name, p in policy.model.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize("beta", trl_distillation.BETAS)
@pytest.mark.parametrize("family", trl_distillation.FAMILIES)
def test_loss_and_gradients_of_the_whole_divergence_are_trls(
    tmp_path: Path, session: Session, family: str, beta: float
) -> None:
    """Untied, and tied with capped logits; the teacher is wider. In chunks of less than a row."""
    for name, model in zip(
        ("student", "teacher"), trl_distillation.made_models(family), strict=True
    ):
        model.save_pretrained(tmp_path / name)
    policy = build(tmp_path / "student", session, logprob_chunk_tokens=16)
    model = TeacherModel(build(tmp_path / "teacher", session, trainable=False))
    teacher = Teacher(TeacherConfig(path="x", loss="full", beta=beta), {"": model}, policy)
    (row,) = attached(teacher, pack_rollouts(rollouts(), CPU))
    sums, _ = updater_of(policy).backward(row, int(row.loss_mask.sum()), len(row.rollout_ids), True)
    expected = TRL[family][str(beta)]
    for key in ("teacher", "loss", "teacher/kl"):
        assert float(sums[key].value) == pytest.approx(expected["loss"], rel=1e-5)
    result = gradients(policy)
    assert result.keys() == expected["gradients"].keys()
    for name, (norm, *products) in expected["gradients"].items():
        own_norm, *local = trl_distillation.sketch(result[name])
        assert own_norm == pytest.approx(norm, rel=1e-5), name
        # A product with a wave adds up terms of both signs, of which there are as many as the
        # gradient has.
        assert local == pytest.approx(
            products, abs=1e-5 * norm * math.sqrt(result[name].numel())
        ), name


def test_a_teacher_with_padding_rows_has_one_softmax_for_all_losses(
    tmp_path: Path, session: Session, folders: list[Path]
) -> None:
    """31 rows more than the policy's 97: whatever the loss, the teacher's probabilities are over
    the 97, as plain transformers gives them."""
    large = make_model(tmp_path / "large", "qwen3", tied=True, vocab_size=128)
    plain = transformers.AutoModelForCausalLM.from_pretrained(large, dtype=torch.float32)
    log_p = []
    for prompt, message in trl_distillation.ROWS:
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *message]])).logits[0, len(prompt) - 1 : -1]
        log_p.append((logits / trl_distillation.TEMPERATURE)[:, :97].log_softmax(-1))
    expected = torch.cat(log_p)
    policy = build(folders[0], session)
    model = TeacherModel(build(large, session, trainable=False))
    rows = {}
    for loss in ("sampled", "topk", "full"):
        teacher = Teacher(TeacherConfig(path="x", loss=loss, top_k=5), {"": model}, policy)
        (rows[loss],) = attached(teacher, pack_rollouts(rollouts(), CPU))
    signals = {loss: row.teacher_signal for loss, row in rows.items()}
    targets = rows["sampled"].target_ids
    assert signals["sampled"] is not None
    assert signals["sampled"].logprobs is not None
    sampled = expected.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(signals["sampled"].logprobs, sampled, rtol=1e-4, atol=1e-5)
    for loss, wanted in (("topk", expected.topk(5).values), ("full", expected)):
        divergence = cast(Any, signals[loss]).divergence
        ((_, scores),) = divergence.parts
        result = scores.logprobs_of(slice(0, len(targets)))[:, : wanted.shape[1]]
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_divergence_over_the_top_tokens_is_plain_autograds(
    beta: float, softcap: float | None
) -> None:
    """Of the K likeliest and a bucket of all others; with all but one token by itself it is the
    whole one."""
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, generator=draw, requires_grad=True) for n in (11, 13))
    local, theirs, upstream = (
        torch.randn(*shape, generator=draw) for shape in ((11, 6), (13, 6), (11,))
    )

    def logprobs(x: Tensor, w: Tensor) -> Tensor:
        logits = x.double() @ w.double().T
        return ((logits / softcap).tanh() * softcap if softcap else logits).div(0.7).log_softmax(-1)

    def by(teacher: WholeTeacher | TopTeacher) -> list[Tensor]:
        value: Tensor = Divergence.apply(hidden, head, teacher, beta, 0.7, 12, softcap)
        return [value, *torch.autograd.grad(value, (hidden, head), upstream)]

    for k in (1, 4, 12):
        top = TopTeacher(*top_outcomes(local, theirs, k, 0.7, 12, softcap))
        s, t = (
            torch.cat([p, p.exp().scatter(-1, top.ids, 0).sum(-1, keepdim=True).log()], -1).gather(
                -1, torch.cat([top.ids, torch.full((11, 1), 13)], -1)
            )
            for p in (logprobs(hidden, head), logprobs(local, theirs))
        )
        if 0 < beta < 1:
            m = torch.logaddexp(t + math.log(beta), s + math.log(1 - beta))
            terms = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
        else:
            terms = t.exp() * (t - s) if beta == 0 else s.exp() * (s - t)
        plain = terms.sum(-1)
        expected = [plain, *torch.autograd.grad(plain, (hidden, head), upstream.double())]
        for single, second in zip(by(top), expected, strict=True):
            torch.testing.assert_close(single.double(), second.double(), atol=5e-6, rtol=1e-5)
    for single, second in zip(by(top), by(WholeTeacher(local, theirs, 0.7, softcap)), strict=True):
        torch.testing.assert_close(single, second, atol=5e-6, rtol=1e-5)


def test_advantages_worked_by_hand() -> None:
    """coef 0.5: each nat by which the policy finds the token likelier than the teacher does takes
    off half of one."""
    mask = torch.tensor([True, True, False, True])
    old, teachers = (
        torch.tensor([-1.0, -2.0, -1.0, -0.5]),
        torch.tensor([-3.0, -1.5, math.nan, -0.5]),
    )
    signal = TeacherSignal(
        0.5, teachers, masks_by_teacher={"x": torch.tensor([True, False, True, True])}
    )
    advantages, _, metrics = taught(signal, torch.tensor([1.0, 0.0, 2.0, -1.0]), old, mask)
    assert advantages.tolist() == [0.0, 0.25, 2.0, -1.0]
    assert metrics["teacher/kl"].value == pytest.approx((2.0 - 0.5 + 0.0) / 3)
    assert metrics["teacher/x/kl"] == Mean(torch.tensor(2.0, dtype=torch.float64), torch.tensor(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("loss", "beta"), [("sampled", 1.0), ("topk", 0.5), ("full", 0.0), ("full", 0.5), ("full", 1.0)]
)
def test_a_teacher_that_is_the_policy_gives_no_gradient_at_all(
    folders: list[Path], session: Session, dtype: str, loss: Any, beta: float
) -> None:
    for rank in (0, 4):
        policy, is_base = build(folders[0], session, dtype, lora=LoraConfig(rank=rank)), rank > 0
        model = policy if is_base else build(folders[0], session, dtype, trainable=False)
        teacher = Teacher(
            TeacherConfig(path="x", loss=loss, beta=beta),
            {"": TeacherModel(model, is_base=is_base)},
            policy,
        )
        (row,) = attached(teacher, pack_rollouts(rollouts(), CPU))
        sums, _ = updater_of(policy).backward(row, 11, 3, True)
        assert float(sums["teacher/kl"].value) == 0.0
        for name, gradient in gradients(policy).items():
            assert not gradient.any(), name


def plain_logprobs(folder: Path, prompt: list[int], message: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([prompt + message])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return cast(Tensor, (logits / trl_distillation.TEMPERATURE).log_softmax(-1))


@pytest.mark.parametrize("loss", ["sampled", "topk", "full"])
def test_each_rollout_is_scored_by_its_own_teacher_with_the_prompt_that_it_is_shown(
    folders: list[Path], session: Session, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build(folders[0], session)
    models = {
        name: TeacherModel(build(path, session, trainable=False))
        for name, path in zip("ab", folders, strict=True)
    }
    asks = {
        0: TeacherRequest("b"),
        1: TeacherRequest("a", [4, 4, 9, 1, 2]),
        2: TeacherRequest("b", [6, 30]),
    }
    teacher = Teacher(TeacherConfig(path={"a": "x", "b": "y"}, loss=loss, top_k=5), models, policy)
    monkeypatch.setattr(teacher, "requests", lambda *_: asks)
    empty = Rollout(7, 0.0, True, [3, 3], [], [])
    (row, nothing) = attached(
        teacher,
        pack_rollouts([*rollouts()[:1], empty, *rollouts()[1:]], CPU),
        pack_rollouts([], CPU),
    )
    sums, _ = updater_of(policy).backward(row, 11, 3, True)
    updater_of(policy).backward(nothing, 11, 3, True)
    result, expected = [], dict[str, list[float]](a=[], b=[])
    for rollout in rollouts():
        ask, message = asks[rollout.rollout_id], cast(list[int], rollout.completion_ids)
        plain = plain_logprobs(
            folders["ab".index(ask.teacher)],
            ask.prompt_ids or cast(list[int], rollout.prompt_ids),
            message,
        )
        policys = plain_logprobs(folders[0], cast(list[int], rollout.prompt_ids), message)
        at, targets = torch.arange(len(message)), torch.tensor(message)
        if loss == "sampled":
            result.append(plain[at, targets])
            expected[ask.teacher] += (policys - plain)[at, targets].tolist()
        elif loss == "full":
            expected[ask.teacher] += (policys.exp() * (policys - plain)).sum(-1).tolist()
    assert row.teacher_signal is not None
    if loss == "sampled":
        assert row.teacher_signal.logprobs is not None
        torch.testing.assert_close(
            row.teacher_signal.logprobs, torch.cat(result), atol=1e-5, rtol=0
        )
    for name, values in expected.items():
        if values:
            assert float(sums[f"teacher/{name}/kl"].value) == pytest.approx(
                sum(values) / len(values), abs=1e-5
            )
    assert float(sums["teacher/kl"].value) > 0 or loss == "sampled"


@pytest.mark.parametrize("loss", ["sampled", "topk", "full"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_live_teacher_has_the_weights_before_the_update_and_keeps_its_word_through_it(
    tmp_path: Path,
    folders: list[Path],
    session: Session,
    rank: int,
    loss: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain transformers in float32 over [the teacher's prompt + completion] with the weights that
    the policy has after a first update, exported; a second update, as of another mini-batch, leaves
    what the teacher says of the step as it was; and no second model is in memory."""
    policy = build(folders[0], session, lora=LoraConfig(rank=rank, sync="merged"))
    teacher = Teacher(
        TeacherConfig(path="policy", prompt_key="x", loss=loss, top_k=5),
        {"": TeacherModel(policy, is_own=False)},
        policy,
    )
    prompts = {0: [4, 4, 9, 1, 2], 1: [6, 30], 2: None}
    asks = {i: TeacherRequest("", ids) for i, ids in prompts.items()}
    monkeypatch.setattr(teacher, "requests", lambda *_: asks)
    updater = PolicyUpdater(policy, OptimizerConfig(lr=0.05), LossConfig(), TrainingConfig(), 8)

    def update() -> MicroBatch:
        (row,) = attached(teacher, pack_rollouts(rollouts(), CPU))
        updater.update(RolloutBatch([[row]], [11], [3]))
        return row

    update()  # adapters are no longer zero, and the policy no longer where it started
    export = tmp_path / "export"
    shutil.copytree(folders[0], export)
    # On one rank the shards are whole; adapters are merged into them.
    whole = {shard.name: shard.local_rows().clone() for shard in hf_named_shards(policy)}
    save_file(whole, export / "model.safetensors", {"format": "pt"})
    expected = torch.cat(
        [
            plain_logprobs(
                export,
                prompts[rollout.rollout_id] or cast(list[int], rollout.prompt_ids),
                cast(list[int], rollout.completion_ids),
            )
            for rollout in rollouts()
        ]
    )
    moved = torch.cat(
        [
            plain_logprobs(folders[0], [6, 30], cast(list[int], rollout.completion_ids))
            for rollout in rollouts()
        ]
    )
    assert (expected - moved).abs().max() > 0.1  # the first update is far beyond the bound below
    row = update()
    assert teacher.offloadable_models == []
    targets = row.target_ids
    signal = cast(TeacherSignal, row.teacher_signal)
    if loss == "sampled":
        said, truth = signal.logprobs, expected.gather(-1, targets[:, None])[:, 0]
    else:
        ((_, scores),) = cast(Any, signal.divergence).parts
        said = scores.logprobs_of(slice(0, len(targets)))
        truth = expected.topk(5).values if loss == "topk" else expected
        said = said[:, : truth.shape[1]]
    torch.testing.assert_close(said, truth, rtol=1e-4, atol=2e-5)


def test_rows_for_a_teacher_keep_their_order() -> None:
    row = pack_rollouts(rollouts(), CPU)
    asks = {0: TeacherRequest("x"), 1: TeacherRequest("y"), 2: TeacherRequest("x", [50, 51, 52])}
    local, positions = select_teacher_row(row, asks, "x")
    assert positions.tolist() == [0, 1, 2, 3, 10]
    assert local.rollout_ids == [0, 2]
    assert local.input_ids.tolist() == [5, 9, 2, 7, 1, 30, 4, 50, 51, 52, 3]
    assert local.target_ids.tolist() == row.target_ids[positions].tolist()
    full, everywhere = select_teacher_row(row, {i: TeacherRequest("x") for i in asks}, "x")
    assert everywhere.tolist() == list(range(11))
    for name in ("input_ids", "position_ids", "predict_index", "target_ids"):
        assert torch.equal(getattr(full, name), getattr(row, name)), name


# What is refused, and what is said


def refusal(path: Path, *overrides: str) -> str:
    def check() -> None:
        config, sources = load_config_with_sources(path, overrides)
        check_inputs(config, num_ranks=1, to_run=False, sources=sources)

    with pytest.raises(ConfigError) as caught:
        check()
    return str(caught.value)


def test_refusals_name_key_value_and_remedy(tmp_path: Path, folders: list[Path]) -> None:
    path = write_config(tmp_path, folders[0])
    on, penalised = f"teacher.path={folders[1]}", ("loss.kl_coef=0.1", "loss.kl_in=reward")
    live = "teacher.path=policy"
    check_inputs(
        load_config(path, [live, "teacher.prompt_template='{answer} {prompt}'", "rewards=[]"]),
        num_ranks=1,
        to_run=False,
    )
    check_inputs(load_config(path, [on]), num_ranks=1, to_run=False)
    check_inputs(load_config(path, [on, "rewards=[]"]), num_ranks=1, to_run=False)
    check_inputs(load_config(path, [on, "rewards.0.weight=0"]), num_ranks=1, to_run=False)
    for overrides, message in (
        (["teacher.coef=2"], "teacher.path is not set, so that teacher.coef would do nothing"),
        (["rewards=[]"], "rewards must name at least one reward"),
        ([on, "teacher.coef=0"], "teacher.coef must be a number > 0; got 0"),
        ([on, "teacher.beta=1.5"], "teacher.beta must be a number >= 0 and <= 1; got 1.5"),
        ([on, "teacher.loss=jsd"], "teacher.loss must be sampled|topk|full; got 'jsd'"),
        ([on, "rewards=[]", "rollout.dynamic_sampling=true"], "set dynamic_sampling: false"),
        (
            [on, "teacher.loss=topk", "teacher.top_k=98"],
            "teacher.top_k (98) is more than the tokens that",
        ),
        (
            [on, "rewards.0.weight=0", *penalised, "environment.tools=[python]"],
            "a teacher alone: no reward has a weight",
        ),
        (["rewards=[]", "environment.tools=[python]"], "rewards must name at least one reward"),
        ([on, "teacher.prompt_key=hint"], "no column 'hint' (teacher.prompt_key)"),
        ([on, "teacher.prompt_key=prompt"], "teacher.prompt_key is data.prompt_key itself"),
        (
            [on, "teacher.prompt_key=answer", "environment.tools=[python]"],
            "teacher.prompt_key with an environment",
        ),
        (
            [live, "teacher.prompt_template='{answer} {prompt}'", "environment.tools=[python]"],
            "teacher.prompt_template with an environment",
        ),
        ([live], "teacher.path: policy teaches nothing after the policy's own prompt; set"),
        (
            ["teacher.path={a: policy, b: policy}"],
            "teacher.path: policy teaches nothing after the policy's own prompt; set",
        ),
        (
            [live, "teacher.prompt_key=answer", "teacher.prompt_template='{answer}'"],
            "teacher has prompt_key and prompt_template, and takes one of them",
        ),
        (
            [live, "teacher.prompt_key=answer", "teacher.loss=topk", "teacher.top_k=98"],
            "teacher.top_k (98) is more than the tokens that",
        ),
        (["teacher.path=/not/there"], "teacher.path: there is no folder /not/there"),
        (
            [f"teacher.path={{a: {folders[1]}, b: {folders[0]}}}"],
            "train.jsonl:1: the column teacher must name one of",
        ),
        ([f"teacher.path={{a/b: {folders[1]}}}"], "a name without a slash"),
    ):
        assert message in refusal(path, *overrides), overrides


def test_top_k_is_of_the_tokens_that_both_have(tmp_path: Path, folders: list[Path]) -> None:
    large = make_model(tmp_path / "large", "qwen3", tied=True, vocab_size=128)
    path = write_config(tmp_path, folders[0])
    topk_values = f"teacher.path={large}", "teacher.loss=topk"
    check_inputs(load_config(path, [*topk_values, "teacher.top_k=97"]), num_ranks=1, to_run=False)
    message = refusal(path, *topk_values, "teacher.top_k=98")
    assert "teacher.top_k (98) is more than the tokens that" in message
    assert "share (97); lower it" in message


@pytest.mark.parametrize(
    ("provided", "overrides", "message"),
    [
        ({}, [], ""),
        ({}, ["loss.kl_coef=0.1", "loss.kl_in=reward"], "loss.kl_in: reward with a teacher alone"),
        ({}, ["rollout.dynamic_sampling=true"], "rollout.dynamic_sampling with a teacher alone"),
        (
            {},
            ["teacher.path={}"],
            "rewards: the environment gives none, and no other has a weight; name one",
        ),
        ({}, ["teacher.path={}", "rewards=[]"], "rewards: the environment gives none, and"),
        (
            {"reward": 1.0},
            ["loss.kl_coef=0.1", "loss.kl_in=reward", "rollout.dynamic_sampling=true"],
            "",
        ),
    ],
)
def test_what_an_environment_gives_is_held_against_what_needs_rewards(
    provided: dict[str, float],
    overrides: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the first rank of an engine, before anything is started; its others have started no
    environment."""
    rewards = [{"name": "exact", "weight": 0.0}]
    sections = {"environment": {"factory": "a.py:B"}, "teacher": {"path": "t"}, "rewards": rewards}
    config = load_config(
        write_config(tmp_path, Path("p"), **sections),
        [*overrides, "rollout.tensor_parallel_size=2"],
    )
    monkeypatch.setattr(signal_rewards, "RewardPool", lambda *_, **__: SimpleNamespace(score=print))
    preemption = SimpleNamespace(check_scoring=None, guard=lambda score: score)

    def open_on(rank: int) -> dict[str, float]:
        weights = {reward.metric_name: reward.weight for reward in config.rewards} | provided
        expected_names: Any = SimpleNamespace(
            other_rewards=[], weights=weights if rank == 0 else {}, scorer=None
        )
        session, inputs = SimpleNamespace(rank=rank, world_size=2), SimpleNamespace(columns=())
        pieces: tuple[Any, ...] = config, inputs, None, session, preemption, expected_names
        return dict(signal_rewards.open_rewards(*pieces)[1].weights)

    assert open_on(1) == {}
    if message:
        with pytest.raises(ConfigError) as caught:
            open_on(0)
        assert message in str(caught.value)
    else:
        assert open_on(0) == {"exact": 0.0} | provided


def test_another_vocabulary_is_refused_by_name(tmp_path: Path, folders: list[Path]) -> None:
    second = make_model(tmp_path / "other", "qwen3", tied=True)
    tokens = json.loads((second / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    (second / "tokenizer.json").write_text(json.dumps(tokens))
    path = write_config(tmp_path, folders[0])
    message = refusal(path, f"teacher.path={second}")
    number = min(vocab["3"], vocab["4"])
    assert (
        f"teacher.path: {second} has another vocabulary than {folders[0]}: token {number} is '4' "
        "there" in message
    )
    small = make_model(tmp_path / "small", "qwen3", tied=True, vocab_size=64)
    assert f"{small} knows 64 tokens, and {folders[0]} 97; take a teacher" in refusal(
        path, f"teacher.path={small}"
    )


def test_explain_counts_the_teachers_bytes_and_passes(tmp_path: Path, folders: list[Path]) -> None:
    path = write_config(tmp_path, folders[0])
    config, sources = load_config_with_sources(path, [f"teacher.path={folders[1]}"])
    lines = explain(config, sources, read_model(str(folders[0])), 32, 2)
    model = read_model(str(folders[1]))
    assert model is not None
    (teacher_values,) = [line for line in lines if line.startswith("  teacher ")]
    shard = sum(-(-shape[0] // 2) * math.prod(shape[1:]) for shape in model.shapes.values())
    assert f"{shard:,} parameters of a shard x 4" in teacher_values
    assert any("extra passes of teachers" in line for line in lines)
    local = [f"teacher.path={folders[0]}", "loss.kl_coef=0.1"]
    shared, sources = load_config_with_sources(path, local)
    assert any("is the reference's" in line for line in explain(shared, sources, model, 32, 2))
