"""What auto stands for: decided by the planner on GPUs, kept on resume, constant on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.support.tree import with_descendants
from grpo_spmd import parts
from grpo_spmd.checkpoint.run_dir import check_same_run
from grpo_spmd.checks import fit
from grpo_spmd.checks.fit import Decision, decide_for_device, keep_recorded
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import DECIDED_KEYS, ENGINE_RANKS_KEY, MICRO_BATCH_KEY, Config
from grpo_spmd.distributed.processes import read_stat
from grpo_spmd.tools.plan.phases import decide
from tests.support.models import write_config

# Qwen2.5-0.5B's.
_SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}


def _path(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(_SIZES))
    sections = {
        "data": {"max_prompt_tokens": 1024},
        "rollout": {"max_completion_tokens": 4096, "num_prompts_per_step": 128, "group_size": 8},
        "training": None,
        "model": {"path": str(folder), "dtype": "bfloat16"},
    }
    return write_config(folder, folder, **sections)


def _values(config: Config) -> tuple[Any, Any, Any]:
    return (
        config.model.activation_checkpointing,
        config.training.max_tokens_per_micro_batch,
        config.rollout.tensor_parallel_size,
    )


def _by_key(*values: Any) -> dict[str, Any]:
    return dict(zip(DECIDED_KEYS, values, strict=True))


def test_a_cpu_has_the_constants(tmp_path: Path) -> None:
    config, _ = load_config_with_sources(_path(tmp_path), on_cpu=True)
    assert _values(config) == (False, 10240, 1)
    longer = ["rollout.max_completion_tokens=20000"]
    config, _ = load_config_with_sources(_path(tmp_path), longer, on_cpu=True)
    assert _values(config) == (False, 21024, 1)
    chosen = ["model.activation_checkpointing=selective", "training.max_tokens_per_micro_batch=6e3"]
    chosen.append("rollout.tensor_parallel_size=2")
    config, _ = load_config_with_sources(_path(tmp_path), chosen, on_cpu=True)
    assert _values(config) == ("selective", 6000, 2)


@pytest.mark.parametrize(
    ("overrides", "tried"),
    [
        ([], [(False, 16384), ("selective", 16384), (True, 16384), (True, 8192), (True, 5120)]),
        (["model.compile=true"], [(False, 16384), (True, 16384), (True, 8192), (True, 5120)]),
        (
            ["training.max_tokens_per_micro_batch=6000"],
            [(False, 6000), ("selective", 6000), (True, 6000)],
        ),
        (
            ["model.activation_checkpointing=selective"],
            [("selective", 16384), ("selective", 8192), ("selective", 5120)],
        ),
    ],
)
def test_the_cheapest_that_fits_is_chosen(
    overrides: list[str], tried: list[tuple[Any, int]], tmp_path: Path
) -> None:
    config = load_config(_path(tmp_path), overrides)
    for number in range(1, len(tried) + 1):
        asked: list[tuple[Any, int]] = []

        def plan_of(candidate: Config, number: int = number, asked: Any = asked) -> Any:
            asked.append(_values(candidate)[:2])
            return SimpleNamespace(trainer_fits=len(asked) == number, values=asked[-1])

        chosen: Any = decide(config, plan_of)
        assert chosen.values == tried[number - 1]
        assert asked == tried[:number]

    # Where none fits, the one that needs least.
    def none_fits(candidate: Config) -> Any:
        return SimpleNamespace(trainer_fits=False, values=_values(candidate)[:2])

    sparing: Any = decide(config, none_fits)
    assert sparing.values == tried[-1]


def test_the_planner_takes_the_cheapest_on_a_large_device(tmp_path: Path) -> None:
    """The real planner, in its own process, here and in the next two."""
    decision = decide_for_device(load_config(_path(tmp_path)), "NVIDIA H100 80GB HBM3", 79.1, 8)
    assert decision.values == _by_key(False, 16384, 1)
    assert decision.is_certain


def test_the_planner_decides_for_the_memory_of_a_device(tmp_path: Path) -> None:
    smaller = decide_for_device(load_config(_path(tmp_path)), "a card", 20.0, 8)
    # 14 heads do not divide by 4.
    assert smaller.values[ENGINE_RANKS_KEY] in (1, 2)
    assert smaller.values != _by_key(False, 16384, 1)
    assert " of 20.0 GiB in " in smaller.line


def test_the_planner_refuses_what_no_choice_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot fit this GPU: .* of 4\.0 GiB in .* GiB\); "):
        decide_for_device(load_config(_path(tmp_path)), "a card", 4.0, 1)


def test_a_run_that_the_planner_cannot_judge_goes_on(tmp_path: Path) -> None:
    path = _path(tmp_path)
    (tmp_path / "config.json").write_text("{")
    decision = decide_for_device(load_config(path), "a card", 20.0, 1)
    assert decision.values == _by_key(False, 16384, 1)
    assert not decision.is_certain
    assert "the planner cannot say whether it fits: " in decision.line


def _session(monkeypatch: pytest.MonkeyPatch, num_bytes: tuple[int, ...], rank: int) -> Any:
    """Makes the devices of all ranks fake ones; on_rank0 sends its result as JSON."""

    def on_rank0(fn: Callable[[list[Any]], Any], value: Any) -> Any:
        assert value == {"bytes": num_bytes[rank], "name": "a card"}
        rows = [{"bytes": size, "name": "a card"} for size in num_bytes]
        return json.loads(json.dumps(fn(rows)))

    properties = SimpleNamespace(total_memory=num_bytes[rank], name="a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(parts, "on_rank0", on_rank0)
    return SimpleNamespace(device=torch.device("cuda", 0), world_size=len(num_bytes), rank=rank)


def test_all_ranks_have_the_decision_for_the_smallest_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(_path(tmp_path))
    asked = []

    def decide_for(config: Config, name: str, gib: float, num_ranks: int) -> Decision:
        asked.append((gib, num_ranks))
        return Decision(_by_key("selective", 8192, 2), "", is_certain=True)

    monkeypatch.setattr(parts, "decide_for_device", decide_for)
    for rank in (0, 1):
        session = _session(monkeypatch, (3 << 30, 2 << 30), rank)
        assert _values(parts.decide_memory(config, {}, session)) == ("selective", 8192, 2)
    assert asked == [(2.0, 2), (2.0, 2)]
    # On a CPU nobody is asked.
    cpu: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    assert _values(parts.decide_memory(config, {}, cpu)) == (False, 10240, 1)
    assert len(asked) == 2


def test_a_resumed_run_keeps_what_was_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = _by_key(True, 8192, 2)
    config = load_config(_path(tmp_path))
    seen: list[Config] = []

    def run_planner(config: Config, card: str, num_ranks: int) -> Any:
        seen.append(config)
        raise ValueError("no planner")

    monkeypatch.setattr(fit, "run_planner", run_planner)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    session = _session(monkeypatch, (80 << 30, 80 << 30), 0)
    assert _values(parts.decide_memory(config, recorded, session)) == (True, 8192, 2)
    # The planner judged these values when the run began, and takes seconds.
    assert seen == []
    # It judges what is set anew, and what it decides beside kept values.
    changed = load_config(_path(tmp_path), ["model.activation_checkpointing=false"])
    assert _values(parts.decide_memory(changed, recorded, session)) == (False, 8192, 2)
    old = {key: value for key, value in recorded.items() if key != ENGINE_RANKS_KEY}
    assert _values(parts.decide_memory(config, old, session)) == (True, 8192, 1)
    assert list(map(_values, seen)) == [(False, 8192, 2), (True, 8192, "auto")]
    flat = _by_key("auto", "auto", "auto")
    assert check_same_run(tmp_path, {"config": recorded}, flat) == []
    # What the user sets is taken, and told as a change.
    assert _values(keep_recorded(changed, recorded)) == (False, 8192, 2)
    changes = check_same_run(tmp_path, {"config": recorded}, flat | {DECIDED_KEYS[0]: False})
    assert changes == ["model.activation_checkpointing True -> False"]
    # Longer rollouts than the recorded micro-batch holds.
    longer = load_config(_path(tmp_path), ["rollout.max_completion_tokens=9000"])
    assert _values(keep_recorded(longer, recorded)) == (True, "auto", 2)
    # An engine stays on one node, which has 3 ranks now.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert _values(keep_recorded(config, recorded)) == (True, 8192, "auto")


def test_an_engine_gets_the_fewest_ranks_with_which_it_fits(tmp_path: Path) -> None:
    config = load_config(_path(tmp_path), [f"{MICRO_BATCH_KEY}=8192"])

    def decided_with(room: dict[int, float], config: Config = config) -> Any:
        """`room`: the engine's margin by its number of ranks."""

        def plan_of(candidate: Config) -> Any:
            margin = room[candidate.rollout.engine_ranks]
            return SimpleNamespace(
                engine_margin_gib=margin, trainer_fits=True, values=_values(candidate)
            )

        return decide(config, plan_of, tuple(room)).values  # type: ignore[attr-defined]

    assert decided_with({1: 0.1, 2: 30.0, 4: 40.0}) == (False, 8192, 1)
    assert decided_with({1: -12.0, 2: 0.0, 4: 40.0}) == (False, 8192, 2)
    assert decided_with({1: -12.0, 2: -1.0, 4: -0.5, 8: 3.0}) == (False, 8192, 8)
    # None fits: the one with most room, and the fewest where more do not help.
    assert decided_with({1: -12.0, 2: -1.0, 4: -2.0}) == (False, 8192, 2)
    assert decided_with({1: -3.0, 2: -3.0}) == (False, 8192, 1)
    chosen = load_config(_path(tmp_path), [f"{MICRO_BATCH_KEY}=8192", f"{ENGINE_RANKS_KEY}=4"])
    assert decided_with({4: -1.0}, chosen) == (False, 8192, 4)


# Qwen3-32B's.
_LARGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def test_a_model_larger_than_a_gpu_runs_with_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 weights of 32.8 B parameters are 61.0 GiB: an H100 has no room for them and the
    trainer's share. Two ranks hold 30.5 GiB each."""
    path = _path(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(_SIZES | _LARGE))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    decision = decide_for_device(load_config(path), "NVIDIA H100 80GB HBM3", 79.1, 16)
    assert decision.is_certain
    assert decision.values == _by_key(True, 16384, 2)
    assert "tensor_parallel_size: 2: " in decision.line
    # On nodes with one GPU, or of unknown size, an engine has one rank: none of this model fits.
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.raises(ConfigError, match=r"cannot fit .*, tensor_parallel_size: 1: "):
        decide_for_device(load_config(path), "NVIDIA H100 80GB HBM3", 79.1, 16)


def test_the_planner_ends_with_the_rank_that_asks(tmp_path: Path) -> None:
    program = (
        "import sys; from grpo_spmd.checks import fit; "
        "from grpo_spmd.config.load import load_config; "
        "fit.run_planner(load_config(sys.argv[1]), 'H100-80GB', 1)"
    )
    rank = subprocess.Popen([sys.executable, "-c", program, str(_path(tmp_path))])

    def planner_with_torch() -> int:
        for pid in with_descendants([rank.pid]) - {rank.pid}:
            with suppress(OSError):
                if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                    return pid
        return 0

    try:
        planner = _wait_for(planner_with_torch)
        # A stopped process does not come to its end by itself.
        os.kill(planner, signal.SIGSTOP)
        rank.kill()
        rank.wait()
        _wait_for(lambda: read_stat(planner)[0] in ("", "Z"))
    finally:
        rank.kill()
        rank.wait()


def _wait_for(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Returns the first true value of `condition`."""
    end = time.monotonic() + limit_s
    value = condition()
    while not value:
        assert time.monotonic() < end
        time.sleep(0.01)
        value = condition()
    return value
