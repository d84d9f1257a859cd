"""What auto stands for: decided by the planner on GPUs, kept on resume, constant on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_spmd import parts
from grpo_spmd.checkpoint.run_dir import check_same_run
from grpo_spmd.checks import fit
from grpo_spmd.checks.fit import Decision, decide_for_device, keep_recorded
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import DECIDED_KEYS, Config
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


def _values(config: Config) -> tuple[Any, Any]:
    return config.model.activation_checkpointing, config.training.max_tokens_per_micro_batch


def test_a_cpu_has_the_constants(tmp_path: Path) -> None:
    config, _ = load_config_with_sources(_path(tmp_path), on_cpu=True)
    assert _values(config) == (False, 10240)
    longer = ["rollout.max_completion_tokens=20000"]
    config, _ = load_config_with_sources(_path(tmp_path), longer, on_cpu=True)
    assert _values(config) == (False, 21024)
    chosen = ["model.activation_checkpointing=selective", "training.max_tokens_per_micro_batch=6e3"]
    config, _ = load_config_with_sources(_path(tmp_path), chosen, on_cpu=True)
    assert _values(config) == ("selective", 6000)


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
            asked.append(_values(candidate))
            return SimpleNamespace(trainer_fits=len(asked) == number, values=asked[-1])

        chosen: Any = decide(config, plan_of)
        assert chosen.values == tried[number - 1]
        assert asked == tried[:number]
    # Where none fits, the one that needs least.
    none_fits: Callable[[Config], Any] = lambda candidate: SimpleNamespace(  # noqa: E731
        trainer_fits=False, values=_values(candidate)
    )
    sparing: Any = decide(config, none_fits)
    assert sparing.values == tried[-1]


def test_the_planner_takes_the_cheapest_on_a_large_device(tmp_path: Path) -> None:
    """The real planner, in its own process, here and in the next two."""
    decision = decide_for_device(load_config(_path(tmp_path)), "NVIDIA H100 80GB HBM3", 79.1, 8)
    assert (decision.recompute, decision.tokens, decision.is_certain) == (False, 16384, True)


def test_the_planner_decides_for_the_memory_of_a_device(tmp_path: Path) -> None:
    smaller = decide_for_device(load_config(_path(tmp_path)), "a card", 20.0, 8)
    assert (smaller.recompute, smaller.tokens) != (False, 16384)
    assert " of 20.0 GiB in " in smaller.line


def test_the_planner_refuses_what_no_choice_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot fit this GPU: .* of 4\.0 GiB in .* GiB\); "):
        decide_for_device(load_config(_path(tmp_path)), "a card", 4.0, 1)


def test_a_run_that_the_planner_cannot_judge_goes_on(tmp_path: Path) -> None:
    path = _path(tmp_path)
    (tmp_path / "config.json").write_text("{")
    decision = decide_for_device(load_config(path), "a card", 20.0, 1)
    assert (decision.recompute, decision.tokens, decision.is_certain) == (False, 16384, False)
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
        return Decision("selective", 8192, "", is_certain=True)

    monkeypatch.setattr(parts, "decide_for_device", decide_for)
    for rank in (0, 1):
        session = _session(monkeypatch, (3 << 30, 2 << 30), rank)
        assert _values(parts.decide_memory(config, {}, session)) == ("selective", 8192)
    assert asked == [(2.0, 2), (2.0, 2)]
    # On a CPU nobody is asked.
    cpu = SimpleNamespace(device=torch.device("cpu"))
    assert _values(parts.decide_memory(config, {}, cpu)) == (False, 10240)  # type: ignore[arg-type]
    assert len(asked) == 2


def test_a_resumed_run_keeps_what_was_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = dict(zip(DECIDED_KEYS, (True, 8192), strict=True))
    config = load_config(_path(tmp_path))
    seen: list[Config] = []

    def run_planner(config: Config, card: str, num_ranks: int) -> Any:
        seen.append(config)
        raise ValueError("no planner")

    monkeypatch.setattr(fit, "_run_planner", run_planner)
    session = _session(monkeypatch, (80 << 30,), 0)
    assert _values(parts.decide_memory(config, recorded, session)) == (True, 8192)
    # The planner judges the run as it will be.
    assert _values(seen[0]) == (True, 8192)
    flat = dict(zip(DECIDED_KEYS, ("auto", "auto"), strict=True))
    assert check_same_run(tmp_path, {"config": recorded}, flat) == []
    # What the user sets is taken, and told as a change.
    config = load_config(_path(tmp_path), ["model.activation_checkpointing=false"])
    assert _values(keep_recorded(config, recorded)) == (False, 8192)
    changes = check_same_run(tmp_path, {"config": recorded}, flat | {DECIDED_KEYS[0]: False})
    assert changes == ["model.activation_checkpointing True -> False"]
    # Longer rollouts than the recorded micro-batch holds.
    longer = load_config(_path(tmp_path), ["rollout.max_completion_tokens=9000"])
    assert _values(keep_recorded(longer, recorded)) == (True, "auto")
