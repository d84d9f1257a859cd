"""The planner: what it predicts of a CPU's run beside torch's own account, its arithmetic by hand,
its command."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from grpo_spmd.checks.memory import exchanged_bytes, most_sequences
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import exchange_blocks
from grpo_spmd.model import sequence_parallel
from grpo_spmd.model.config_json import ModelFacts, read_model
from grpo_spmd.observe.cards import CARDS, Card, find_card, max_num_seqs, peak_tflops
from grpo_spmd.tools.plan.__main__ import main
from grpo_spmd.tools.plan.dry_run import Pass, Peaks, at_full_depth, parameter_shapes
from grpo_spmd.tools.plan.phases import (
    KvCache,
    Plan,
    kv_cache,
    larger_cache,
    plan_phases,
    suggestions,
)
from grpo_spmd.tools.plan.step_time import (
    CONTEXT,
    GRAPHS_PER_LAYER,
    NCCL,
    TENSOR_PARALLEL,
    WORKSPACES,
    Case,
    engine_activations,
    sampler_tables,
    step_time,
)
from tests.support.models import make_model, write_config
from tests.support.real_memory import lone_rank, measured, predicted

GIB = 2**30


def tiny_config(
    folder: Path, *overrides: str, tied: bool = False, vocabulary: int = 1200
) -> Config:
    model = make_model(
        folder / "model",
        "qwen3",
        tied=tied,
        num_hidden_layers=5,
        intermediate_size=256,
        vocab_size=vocabulary,
    )
    sections = {
        "data": {"max_prompt_tokens": 64},
        "rollout": {"num_prompts_per_step": 8, "group_size": 4, "max_completion_tokens": 192},
        "training": {"max_tokens_per_micro_batch": 512},
        "loss": {"kl_coef": 0.1},
    }
    return load_config(
        write_config(folder, model, **sections), ["model.logprob_chunk_tokens=256", *overrides]
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.offload=true"],
        ["model.offload=optimizer", "optimizer.name=adamw_8bit"],
        [
            "model.dtype=bfloat16",
            "model.lora.rank=4",
            "model.activation_checkpointing=true",
            "model.num_replicas=2",
        ],
        ["model.sequence_parallel_size=2"],
    ],
)
def test_what_a_rank_holds_on_a_cpu_is_predicted_within_three_percent(
    tmp_path: Path, overrides: list[str]
) -> None:
    """Real tensors of real FSDP2 and AdamW, every allocation and free of torch's allocator. One
    layer forgotten of
    five, or gradients of an earlier micro-batch left out, are 10 % and more."""
    config = tiny_config(tmp_path, *overrides)
    expected = predicted(config, 2)
    with lone_rank(2, config.model.num_replicas, config.model.sequence_parallel_size) as session:
        retained = measured(config, session)
    assert retained == pytest.approx(expected, rel=0.03)
    assert expected["update"] > 1.5 * expected["state"]


def test_ranks_that_share_rows_hold_half_the_activations_and_send_what_is_predicted(
    tmp_path: Path,
) -> None:
    """Activations of real tensors, counted by torch's allocator, and the bytes of every exchange of
    blocks, of which one of two stays. With 4 ranks the 2 KV heads are repeated."""
    activations = {}
    for size in (1, 2, 4):
        config = tiny_config(
            tmp_path,
            "training.max_tokens_per_micro_batch=2048",
            f"model.sequence_parallel_size={size}",
        )
        sent: list[int] = []

        def counted(blocks: Any, group: Any, sent: list[int] = sent, size: int = size) -> Any:
            sent.append(blocks.nbytes * (size - 1) // size)
            return exchange_blocks(blocks, group)

        with (
            patch.object(sequence_parallel, "exchange_blocks", counted),
            lone_rank(4, 1, size) as session,
        ):
            retained = measured(config, session)
        activations[size] = retained["update"] - retained["state"]
        assert len(sent) == (0 if size == 1 else 2 * 5 * 7)
        facts = read_model(config.model.path)
        assert facts is not None
        assert facts.dimensions is not None
        # AdamW's first step is of 4 tokens; then there is a pass for scores, and two updates.
        small, row = (exchanged_bytes(facts.dimensions, tokens, size, 4) for tokens in (4, 2048))
        assert sum(sent) == 2 * small + 5 * row
    assert activations[1] >= 1.8 * activations[2] >= 1.8 * 1.8 * activations[4]


@pytest.mark.parametrize(
    ("overrides", "tied"),
    [
        (["model.activation_checkpointing=true"], True),
        (["model.dtype=bfloat16", "loss.entropy_coef=0.01"], False),
    ],
)
def test_what_fake_tensors_do_otherwise_than_real_ones_is_known(
    tmp_path: Path, overrides: list[str], tied: bool
) -> None:
    """Autograd adds real gradients of a tied parameter in place; a CPU casts a bfloat16 product to
    add it. Both are a
    tensor of the lm_head's size."""
    tokens = [
        "data.max_prompt_tokens=8",
        "rollout.max_completion_tokens=24",
        "training.max_tokens_per_micro_batch=32",
    ]
    config = tiny_config(
        tmp_path, "model.logprob_chunk_tokens=16", *tokens, *overrides, tied=tied, vocabulary=4800
    )
    with lone_rank(8, 1) as session:
        retained = measured(config, session)
    assert predicted(config, 8)["update"] == pytest.approx(retained["update"], rel=0.01)


def test_four_layers_more_take_what_one_takes_four_times(tmp_path: Path) -> None:
    """What is carried on from three and four layers is what a run of all seven finds."""
    config = tiny_config(tmp_path, "model.activation_checkpointing=selective")
    raw = json.loads((tmp_path / "model/config.json").read_text())
    kinds = ["full_attention"] * 7
    (tmp_path / "model/config.json").write_text(
        json.dumps(raw | {"num_hidden_layers": 7, "layer_types": kinds})
    )
    lengths = ((64, 192), (64, 192))
    work = Pass(
        tmp_path / "model",
        config.model,
        config.loss,
        2,
        lengths,
        accumulates=False,
        scores=False,
        on_gpu=True,
    )
    carried, (full, depth) = at_full_depth(work.run), work.run(7)
    assert depth == 7
    assert {moment: pieces.total() for moment, pieces in carried.items()} == {
        moment: full[moment].total() for moment in carried
    }
    between = {moment for moment in full if moment.endswith("between")}
    assert between == full.keys() - carried.keys()
    assert all(
        full[moment].total() <= max(p.total() for p in carried.values()) for moment in between
    )


# Cards


def test_cards_by_name_and_by_figures() -> None:
    assert find_card("H100-80GB") is find_card("h100") is CARDS["H100-80GB"]
    assert find_card("rtx 4090") is find_card("RTX4090-24GB")
    custom = find_card("80GiB,989TFLOPS,3350GB/s")
    assert (custom.gib, custom.tflops, custom.memory_gb_s) == (80, 989, 3350)
    assert find_card("24 gib, 165.2 tflops, 1008 GB/s, 12GB/s").link_gb_s == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100-80G", "no card 'H100-80G'. Known are .* H100-80GB"),
        ("A100", "no card 'A100'. Known are A100-40GB, A100-80GB"),
        ("80GiB", "or give GiB, TFLOP/s and GB/s"),
        ("80GiB,989GB/s,3350TFLOPS", "or give GiB, TFLOP/s and GB/s"),
        ("0GiB,989TFLOPS,3350GB/s", "all above 0"),
        ("nanGiB,989TFLOPS,3350GB/s", "all above 0"),
        ("xGiB,989TFLOPS,3350GB/s", "all above 0"),
    ],
)
def test_a_card_that_cannot_be_read_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_card(text)
    assert "\n" not in str(caught.value)


def test_the_drivers_names_have_the_figures_of_their_cards() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H800": 989,  # noqa: E501
        "NVIDIA B200": 2250, "NVIDIA GeForce RTX 4090": 165, "NVIDIA L40S": 362, "Tesla T4": None,
    }  # fmt: skip
    assert {name: peak_tflops(name) for name in names} == names


# Phases by hand

LAYER = {
    "q_proj": (64, 32),
    "k_proj": (32, 32),
    "v_proj": (32, 32),
    "o_proj": (32, 64),
    "up_proj": (48, 32),
}
SHAPES: dict[str, tuple[int, ...]] = {
    f"model.layers.{i}.{n}.weight": s for i in range(2) for n, s in LAYER.items()
}
SHAPES["model.embed_tokens.weight"] = (100, 32)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODEL = ModelFacts(
    SHAPES, {**SIZES, "head_dim": 16, "intermediate_size": 48, "vocab_size": 100}, "here"
)
CARD = Card("made up", 2.0, 100, 1000, 100)
EVAL = ["eval.every_steps=1", "eval.num_samples=3", "data.eval=none.jsonl"]
# a layer: 2,048 + 1,024 + 1,024 + 2,048 + 1,536 = 7,680; twice, and 3,200: 18,560; of 4 ranks 4,640
NUMEL, SHARD = 18_560, 4_640


def by_hand(tmp_path: Path, *overrides: str) -> Config:
    sections: dict[str, dict[str, object]] = {
        "model": {"dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"num_prompts_per_step": 8, "group_size": 4, "max_completion_tokens": 48},
        "training": {"max_tokens_per_micro_batch": 128},
    }
    folder = tmp_path / "none"
    text: dict[str, dict[str, object]] = yaml.safe_load(write_config(tmp_path, folder).read_text())
    path = tmp_path / "hand.yaml"
    path.write_text(
        yaml.safe_dump({**text, **{k: {**text.get(k, {}), **v} for k, v in sections.items()}})
    )
    return load_config(path, overrides)


def test_what_is_live_in_each_phase_by_hand(tmp_path: Path) -> None:
    """4 ranks, 2 of an engine; a reference; the moments away while the engine is awake."""
    overrides = ["rollout.tensor_parallel_size=2", "loss.kl_coef=0.1", "model.offload=optimizer"]
    config = by_hand(tmp_path, *overrides, "rollout.gpu_memory_utilization=0.5")
    peaks = Peaks(Counter({"logits": 1000}), Counter({"activations": 100_000, "gradients": 20_000}))
    cache = kv_cache(Case(config, MODEL, CARD, 4))
    phases = plan_phases(Case(config, MODEL, CARD, 4), peaks, cache)
    assert list(phases) == [
        "weight_sync",
        "rollout",
        "reward",
        "logprobs",
        "update",
        "checkpoint",
    ]  # no evaluation
    graphs = 2 * GRAPHS_PER_LAYER + WORKSPACES
    fixed = {
        "CUDA context": CONTEXT,
        "NCCL": NCCL + TENSOR_PARALLEL,
        "CUDA graphs, workspaces": graphs,
    }
    retained = {"policy": 4 * SHARD, "moments": 8 * SHARD, "reference": 2 * SHARD}
    assert phases["checkpoint"] == Counter(fixed) + Counter(retained)
    assert phases["update"] - phases["checkpoint"] == Counter(
        activations=100_000, gradients=20_000, fragmentation=6_000
    )
    assert phases["logprobs"] - phases["checkpoint"] == Counter(logits=1000, fragmentation=50)
    # 8,192 tokens of a batch x 2 bytes x (3 x 48 / 2 + 3 x 32) beside 256 sequences x V 100 x 2
    activations = engine_activations(Case(config, MODEL, CARD, 4))
    assert activations == 8192 * 2 * (72 + 96)
    weights = NUMEL  # 2 bytes, halved
    # for 256 sequences a count of 4 bytes for each of V 100, and 4 words of 32 bits
    tables = 256 * (400 + 16)
    assert cache.num_bytes == GIB - weights - activations - tables - graphs
    # a token of a rank: keys and values x 2 layers x 1 head x 16 x 2 bytes = 128; blocks of 16
    # tokens
    assert cache.tokens == cache.num_bytes // 2048 * 16
    # 2 engines: 4 prompts each, 16 sequences: 4 x 16 + 16 x 48 tokens; 64 tokens are 4 blocks
    assert (cache.sequences, cache.needed_tokens, cache.full_length) == (
        16,
        832,
        256,  # vLLM's places; the cache has room for more
    )
    del retained["moments"]
    sampling = {
        "engine's weights": weights,
        "engine's activations": activations,
        "engine's sampler tables": tables,
        "KV cache": cache.num_bytes,
    }
    assert phases["rollout"] == phases["reward"] == Counter(fixed | retained | sampling)
    # in flight: all of 18,560 x 2 bytes in one bucket, the embedding; vLLM's layer: twice 2 x 32 x
    # V 100
    buffers = {"buckets": 2 * NUMEL, "largest tensor": 6400, "layer in load": 12_800}
    assert phases["weight_sync"] == Counter(
        fixed
        | retained
        | {"engine's weights": weights, "engine's sampler tables": tables}
        | {"fragmentation": int(0.05 * sum(buffers.values()))}
        | buffers
    )


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "num_held_out", "expected"),
    [
        # 2 engines of 2 ranks, 8 prompts of 4: 16 each, and tables for 256 cost little
        (["rollout.tensor_parallel_size=2"], 4, 0, 256),
        # 150 prompts of 4 for one engine, and for two
        (["rollout.num_prompts_per_step=150"], 1, 0, 600),
        (["rollout.num_prompts_per_step=150"], 2, 0, 300),
        # tail batching begins 225; 900 completions
        (["rollout.num_prompts_per_step=150", "rollout.tail_batching=1.5"], 1, 0, 900),
        (["rollout.num_prompts_per_step=1000"], 1, 0, 1024),
        # ceil(267 x 3 / 2 engines) of an evaluation; nobody evaluates; a number that is not known
        ([*EVAL, "rollout.tensor_parallel_size=2"], 4, 267, 401),
        ([], 1, 267, 256),
        (EVAL, 1, math.inf, 1024),
        ([], 1, math.inf, 256),
        # a batch of 300 tokens has no room for more; what a user says is not changed
        (["rollout.num_prompts_per_step=150", "rollout.engine={max_num_batched_tokens: 300}"],
         1, 0, 300),
        ([*EVAL, "rollout.engine={max_num_seqs: 7}"], 1, math.inf, 7),
    ],
)  # fmt: skip
def test_the_engine_runs_what_it_can_get_at_one_time(
    tmp_path: Path, overrides: list[str], num_ranks: int, num_held_out: float, expected: int
) -> None:
    config = by_hand(tmp_path, *overrides)
    most = most_sequences(config, num_ranks, num_held_out)
    limits = [
        max_num_seqs(name, gib, config.rollout.engine, most)
        for name, gib in (("NVIDIA H100", 79.1), ("a card", 24.0), ("NVIDIA A100-SXM4", 79.2))
    ]
    # These GPUs get no more than vLLM itself would take for them.
    assert limits == [expected, min(expected, 256), min(expected, 256)]


def test_the_planner_counts_the_sampler_for_as_many(tmp_path: Path) -> None:
    def tables(gib: float, **engine: int) -> int:
        options = {"max_num_batched_tokens": 1000, **engine}
        words = [f"{name}: {value}" for name, value in options.items()]
        overrides = ["rollout.num_prompts_per_step=150", f"rollout.engine={{{', '.join(words)}}}"]
        return sampler_tables(Case(by_hand(tmp_path, *overrides), MODEL, cards[gib], 1))

    cards = {gib: replace(CARD, gib=gib) for gib in (2.0, 80.0)}
    # 150 prompts of 4 on a large card, vLLM's 256 on another
    assert tables(80.0) == tables(80.0, max_num_seqs=600) == 600 * (4 * 100 + 16)
    assert tables(2.0) == tables(2.0, max_num_seqs=256) < tables(80.0)
    assert tables(80.0) < tables(80.0, max_num_seqs=1000)


def test_offload_and_adapters_by_hand(tmp_path: Path) -> None:
    cache = kv_cache(Case(by_hand(tmp_path), MODEL, CARD, 4))
    config = by_hand(tmp_path, "model.offload=true", "loss.kl_coef=0.1")
    phases = plan_phases(Case(config, MODEL, CARD, 4), Peaks(Counter(), Counter()), cache)
    trainer = {"policy", "moments", "reference"}
    assert not trainer & phases["rollout"].keys()
    assert trainer & phases["weight_sync"].keys() == {"policy"}  # the sync reads it
    assert trainer <= phases["update"].keys()
    # AdamW needs all gradients at one time, however little a micro-batch takes
    assert phases["update"]["gradients"] == 4 * SHARD
    config = by_hand(
        tmp_path,
        "model.lora.rank=2",
        "rollout.engine={enforce_eager: true, kv_cache_memory_bytes: 4096}",
    )
    case = Case(config, MODEL, CARD, 4)
    phases = plan_phases(case, Peaks(Counter(), Counter()), kv_cache(case))
    # A and B of a layer over 4 ranks: A has 2 rows (1 a rank) of 32, 32, 32, 64, 32; B a quarter of
    # 64, 32, 32, 32, 48
    adapters = 2 * (192 + 2 * (16 + 8 + 8 + 8 + 12))
    assert (phases["update"]["policy"], phases["update"]["moments"]) == (4 * adapters, 8 * adapters)
    assert phases["update"]["base"] == 2 * SHARD
    assert phases["rollout"]["KV cache"] == 4096
    assert phases["rollout"]["CUDA graphs, workspaces"] == WORKSPACES
    # W + BA of q_proj's 16 rows, and W, in float32, on the way into the one bucket; the embedding
    # out of it; all A
    assert phases["weight_sync"]["largest tensor"] == max(8 * 512, 6400)
    assert phases["weight_sync"]["adapters, whole"] == 4 * 2 * 2 * 192


# Fit, and what makes it


def made_up_plan(
    config: Config, update_gib: float, rollout_gib: float, step_s: float, full_length: int = 4
) -> Plan:
    phase_values = {
        "rollout": Counter(x=int(rollout_gib * GIB)),
        "update": Counter(x=int(update_gib * GIB)),
    }
    cache = KvCache(GIB, 100, GIB // max(full_length, 1) + (not full_length), 100, full_length, 8)
    return Plan(
        Case(config, MODEL, replace(CARD, gib=80), 8),
        phase_values,
        Counter(),
        cache,
        {"update": step_s},
    )


def test_suggestions_are_the_cheapest_first_and_only_what_the_phase_needs(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []

    def replan(overrides: Sequence[str]) -> Plan:
        seen.append(tuple(overrides))
        config = by_hand(tmp_path, *overrides)
        saved = {"selective": 6.0, True: 30.0, False: 0.0}[config.model.recompute]
        seconds = {"selective": 11.0, True: 14.0, False: 10.0}[config.model.recompute]
        return made_up_plan(config, 85 - saved, 50, seconds)

    result = suggestions(made_up_plan(by_hand(tmp_path), 85, 50, 10), replan)
    assert [item.overrides for item in result] == [
        ("model.activation_checkpointing=selective",),
        ("model.activation_checkpointing=true",),
    ]
    assert not any(
        "offload" in item or "gpu_memory" in item for overrides in seen for item in overrides
    )
    assert suggestions(made_up_plan(by_hand(tmp_path), 79, 50, 10), replan) == []


def test_where_no_single_change_fits_they_are_added_up(tmp_path: Path) -> None:
    def replan(overrides: Sequence[str]) -> Plan:
        config = by_hand(tmp_path, *overrides)
        update = 100 - 15 * (config.model.recompute is True)
        update -= 10 * (config.training.max_tokens_per_micro_batch == 64)
        return made_up_plan(config, update, 95 - 20 * (config.model.offload is True), 10)

    (only,) = suggestions(made_up_plan(by_hand(tmp_path), 100, 95, 10), replan)
    assert set(only.overrides) == {
        "model.activation_checkpointing=true",
        "model.offload=true",
        "training.max_tokens_per_micro_batch=64",
    }
    assert only.plan.fits
    assert len(only.overrides) == 3


def test_a_cache_that_holds_no_whole_rollout_does_not_fit(tmp_path: Path) -> None:
    plan = made_up_plan(by_hand(tmp_path), 10, 10, 10, full_length=0)
    assert not plan.fits
    assert plan.margin_gib == pytest.approx(-1 / GIB)  # a byte of a rollout


def test_at_equal_time_fewer_micro_batches_come_first(tmp_path: Path) -> None:
    def replan(overrides: Sequence[str]) -> Plan:
        config = by_hand(tmp_path, *overrides)
        # The smallest micro-batch leaves most room.
        return made_up_plan(config, config.micro_batch_tokens / 10, 50, 10)

    sizes = ["model.activation_checkpointing=true", "training.max_tokens_per_micro_batch=512"]
    start = made_up_plan(by_hand(tmp_path, *sizes), 90, 50, 10)
    fitting = [
        item.plan.case.config.micro_batch_tokens
        for item in suggestions(start, replan)
        if item.overrides[0].startswith("training.max_tokens_per_micro_batch")
    ]
    assert fitting == [256, 128, 64]


def test_adapters_are_tried_where_nothing_else_fits_and_are_marked(tmp_path: Path) -> None:
    def replan(overrides: Sequence[str]) -> Plan:
        config = by_hand(tmp_path, *overrides)
        update = 200 - 90 * (config.model.lora.rank == 16) - 35 * (config.model.recompute is True)
        return made_up_plan(config, update, 50, 10)

    (only,) = suggestions(made_up_plan(by_hand(tmp_path), 200, 50, 10), replan)
    assert only.plan.fits
    assert only.changes_training
    assert set(only.overrides) == {"model.lora.rank=16", "model.activation_checkpointing=true"}

    def without_remedy(overrides: Sequence[str]) -> Plan:
        return made_up_plan(by_hand(tmp_path, *overrides), 200, 50, 10)

    assert suggestions(without_remedy([]), without_remedy) == []


def test_a_larger_cache_is_advised_where_memory_is_free_and_sequences_wait(tmp_path: Path) -> None:
    """Of 80 GiB 20 are free in rollout: 0.6 + 0.25 - 0.05 of the card may be the engine's."""

    def replan(overrides: Sequence[str]) -> Plan:
        config = by_hand(tmp_path, *overrides)
        more = config.rollout.gpu_memory_utilization - 0.6
        return made_up_plan(config, 79, 60 + 80 * more, 10, full_length=4 + int(20 * more))

    advised = larger_cache(replan([]), replan)
    assert advised is not None
    assert advised.overrides == ("rollout.gpu_memory_utilization=0.8",)
    assert advised.plan.kv_cache.full_length == 8
    # All 8 sequences of a step run together, nothing is free, or the plan does not fit.
    config = by_hand(tmp_path)
    assert larger_cache(made_up_plan(config, 79, 60, 10, full_length=8), replan) is None
    assert larger_cache(made_up_plan(config, 79, 76, 10), replan) is None
    assert larger_cache(made_up_plan(config, 81, 60, 10), replan) is None


# The command


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_needs_config_json_alone_and_its_overrides_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "made", "qwen3", tied=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_bytes((tmp_path / "made/config.json").read_bytes())
    # What lies beside it is not looked at: a download that was cut off, or somebody's pointer to a
    # file.
    (tmp_path / "model/model-00001-of-00004.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1"
    )
    path = write_config(tmp_path, tmp_path / "model", data={"train": "nowhere.jsonl"})
    wanted = [
        "--config",
        str(path),
        "--gpu",
        "H100",
        "--ranks",
        "2",
        "--json",
        str(tmp_path / "plan.json"),
    ]
    assert command(monkeypatch, *wanted) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] is True
    assert plan["suggestions"] == []
    assert plan["margin_gib"] == min(phase["free_gib"] for phase in plan["phases"].values()) > 0
    for phase in plan["phases"].values():
        assert phase["peak_gib"] == pytest.approx(sum(phase["live_gib"].values()))
        assert phase["peak_gib"] + phase["free_gib"] == pytest.approx(79.1)
    assert plan["step_s"] == pytest.approx(sum(plan["step_s_by_phase"].values()))
    assert "fits" in capsys.readouterr().out

    small = ["--config", str(path), "--gpu", "1.6GiB,1TFLOPS,1GB/s", "--ranks", "1", "--suggest"]
    assert command(monkeypatch, *small, "rollout.gpu_memory_utilization=0.9") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert load_config(path, lines).rollout.gpu_memory_utilization < 0.9

    # Without a place for one sequence there is no time of a step.
    tight = [*small[:-1], "rollout.gpu_memory_utilization=0.01"]
    assert command(monkeypatch, *tight) == 1
    text = capsys.readouterr().out
    assert "no time of a step" in text
    assert "step, s" not in text
    assert max(len(line) for line in text.replace(str(tmp_path), "").splitlines()) <= 100

    # A row of the table that is wrapped keeps to the column of its last cell.
    table = text.split("\n\n")[1].splitlines()[1:]
    assert any(line.startswith(" " * 30) for line in table), text
    assert all(not line[:30].strip() or len(line[:28].split()) == 3 for line in table), text

    none = ["--config", str(path), "--gpu", "0.3GiB,1TFLOPS,1GB/s", "--ranks", "1"]
    assert (
        command(monkeypatch, *none) == command(monkeypatch, *none, "--suggest") == 1
    )  # `more=$(...) && torchrun`


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H1000", "--ranks", "8"], "--gpu: no card 'H1000'"),
        (["--gpu", "H100", "--ranks", "0"], "--ranks is a number from 1 to 65,536; got 0"),
        (
            ["--gpu", "H100", "--ranks", "100000000000"],
            "--ranks is a number from 1 to 65,536; got 100,000,000,000",
        ),
        (
            ["--gpu", "H100", "--ranks", "2", "rollout.tensor_parallel_size=3"],
            "must divide the number of ranks (2)",
        ),
        (
            ["--gpu", "H100", "--ranks", "2", "model.path=no/such-model"],
            "there is no config.json of no/such-model",
        ),
        (
            ["--gpu", "H100", "--ranks", "2", "model.path=/no/such/folder"],
            "there is no config.json of /no/such/folder",
        ),
        (
            [
                "--gpu",
                "H100",
                "--ranks",
                "2",
                "data.max_prompt_tokens=5000",
                "training.max_tokens_per_micro_batch=9000",
            ],
            "the model has 256 positions",
        ),
        (
            ["--gpu", "H100", "--ranks", "2", "--json", "/no/such/folder/x.json"],
            "--json: cannot write",
        ),
        (["--gpu", "H100", "--ranks", "2", "--json", "/proc/plan.json"], "--json: cannot write"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = write_config(tmp_path, make_model(tmp_path / "model", "qwen3", tied=True))
    capsys.readouterr()  # transformers' progress bar
    assert command(monkeypatch, "--config", str(path), *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "odd", [{"head_dim": [16, 16]}, {"num_key_value_heads": [2, 2]}, {"num_key_value_heads": 3}]
)
def test_an_odd_config_json_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    odd: dict[str, object],
) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    (model / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | odd)
    )
    path = write_config(tmp_path, model)
    capsys.readouterr()
    assert command(monkeypatch, "--config", str(path), "--gpu", "H100", "--ranks", "2") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_engine_is_as_fast_on_two_nodes_and_no_faster_than_its_places(tmp_path: Path) -> None:
    """Its ranks are on one node, however many the policy's are on; with places for half of its
    sequences it takes two
    rounds, each with half the keys and values to read."""

    def rollout_s(num_ranks: int, prompts: int, *overrides: str) -> float:
        tp = [
            "rollout.tensor_parallel_size=4",
            f"rollout.num_prompts_per_step={prompts}",
            *overrides,
        ]
        case = Case(by_hand(tmp_path, *tp), MODEL, CARD, num_ranks)
        return step_time(case, kv_cache(case).full_length)["rollout"]

    assert rollout_s(16, 16) == pytest.approx(rollout_s(8, 8))
    assert (
        1.5 * rollout_s(8, 8)
        < rollout_s(8, 8, "rollout.engine={max_num_seqs: 8}")
        < 2 * rollout_s(8, 8)
    )
    config = by_hand(tmp_path, "rollout.engine={max_num_seqs: 3}")
    assert kv_cache(Case(config, MODEL, CARD, 4)).full_length == 3


def test_a_step_of_the_engine_takes_the_slower_of_device_and_host(tmp_path: Path) -> None:
    """On the tiny model each of 48 steps waits for the host: 2 ms and 20 us for each of 8 or 16
    sequences. On a card so slow that reading weights and cache takes longer, the
    host's time is hidden and not added: half the bandwidth is then twice the time."""

    def rollout_s(memory_gb_s: float, *overrides: str) -> float:
        card = replace(CARD, memory_gb_s=memory_gb_s, tflops=1e9)
        case = Case(by_hand(tmp_path, *overrides), MODEL, card, 4)
        return step_time(case, num_running=64)["rollout"]

    assert rollout_s(1000) == pytest.approx(48 * (0.002 + 8 * 20e-6))
    groups_of_8 = ("rollout.group_size=8",)
    assert rollout_s(1000, *groups_of_8) == pytest.approx(48 * (0.002 + 16 * 20e-6))
    assert rollout_s(0.001) == pytest.approx(2 * rollout_s(0.002))


def test_a_family_that_arithmetic_does_not_know_is_planned_from_config_json(tmp_path: Path) -> None:
    created = make_model(tmp_path / "made", "glm4", tied=False)
    facts = read_model(str(created))
    assert facts is not None
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_bytes((created / "config.json").read_bytes())
    assert read_model(str(tmp_path / "model")) is None
    assert parameter_shapes(tmp_path / "model") == facts.shapes
