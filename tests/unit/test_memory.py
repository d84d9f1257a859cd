"""Where memory is said to be is where it is; what grows is said."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import PHASES, Config
from grpo_spmd.engine.start import SleepCheck, allocator_settings_kept
from grpo_spmd.observe.memory import (
    MemoryLedger,
    MemoryUse,
    children_bytes,
    is_out_of_memory,
    measure,
    remedies,
    reset_peak,
)
from tests.support.models import make_model, write_config

CPU = torch.device("cpu")
MIB = 1 << 20
FIELDS = ("peak", "allocated", "reserved", "driver_used", "other")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Config:
    return load_config(write_config(tmp_path, model))


# The ledger


def test_what_is_allocated_is_seen_and_what_is_freed_is_not() -> None:
    reset_peak(CPU)
    old = measure(CPU)
    retained = torch.ones(64 * MIB, dtype=torch.uint8)
    passing = torch.ones(200 * MIB, dtype=torch.uint8)
    del passing
    new = measure(CPU)
    assert len(retained) == 64 * MIB
    assert new.allocated - old.allocated == pytest.approx(64 * MIB, abs=8 * MIB)
    assert new.reserved - old.reserved == pytest.approx(64 * MIB, abs=8 * MIB)
    if os.access("/proc/self/clear_refs", os.W_OK):
        assert new.peak - old.reserved == pytest.approx(264 * MIB, abs=16 * MIB)
        reset_peak(CPU)
        assert measure(CPU).peak - old.reserved < 100 * MIB
    assert new.other == new.driver_used - new.allocated
    assert new.allocated < new.reserved <= new.peak < new.driver_used + new.reserved


def test_the_memory_of_children_is_theirs_and_their_childrens_and_not_ours() -> None:
    """As of a nursery of rewards and its workers: 40 MiB in the child, 60 in its child."""
    if not Path("/proc/self/task").joinpath(str(os.getpid()), "children").exists():
        pytest.skip("a kernel without CONFIG_PROC_CHILDREN")
    hold = "import sys; held = b'x' * ({size} << 20); print(len(held), flush=True); "
    inner = hold.format(size=60) + "sys.stdin.read()"
    outer = (
        hold.format(size=40)
        + f"import subprocess; subprocess.run([sys.executable, '-c', {inner!r}])"
    )
    before = children_bytes()
    retained = torch.ones(64 * MIB, dtype=torch.uint8)
    command = [sys.executable, "-c", outer]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for _ in range(2):
            process.stdout.readline()
        added = children_bytes() - before
        process.stdin.close()
    assert len(retained) == 64 * MIB
    assert added == pytest.approx(100 * MIB, abs=24 * MIB)
    assert children_bytes() == pytest.approx(before, abs=MIB)


def test_measuring_costs_less_than_a_phase() -> None:
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        reset_peak(CPU)
        measure(CPU)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 5e-3  # 0.2 ms measured


def test_on_a_gpu_the_engines_pool_is_not_the_trainers_and_is_in_other_only_while_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch counts 40 of pool beside 10 of tensors, awake or asleep; the driver counts the pool
    only while the engine
    is awake."""
    stats = {
        "allocated_bytes.all.current": 50,
        "allocated_bytes.all.peak": 57,
        "reserved_bytes.all.current": 52,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - 55, 100))
    # 40 of pool, 3 of context and NCCL
    assert measure(torch.device("cuda"), pool_bytes=40) == MemoryUse(17, 10, 12, 55, 43)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - 15, 100))
    assert measure(torch.device("cuda"), pool_bytes=40) == MemoryUse(17, 10, 12, 15, 3)


def _remedies(config: Config) -> dict[str, list[str]]:
    num_workers = config.reward_pool.num_workers
    return remedies(
        config.model, config.rollout, config.training, config.max_rollout_tokens, num_workers
    )


def test_the_ledger_keeps_the_most_of_a_phases_blocks(config: Config) -> None:
    ledger = MemoryLedger(CPU, lambda: 0, _remedies(config))
    with ledger.phase("rollout"):
        retained = torch.ones(100 * MIB, dtype=torch.uint8)
    with ledger.phase("rollout"):
        del retained
    with ledger.phase("reward"):
        pass
    result = ledger.metrics()
    assert result.keys() == {
        f"memory/{phase}/{field}_gib" for phase in ("rollout", "reward") for field in FIELDS
    }
    assert result["memory/rollout/allocated_gib"] - result["memory/reward/allocated_gib"] > 0.08
    ledger.end_step()
    assert ledger.metrics() == {}
    # of the step before: it says what an error of this step is measured against
    assert "rollout " in ledger.explain("update")


def test_a_real_failure_to_allocate_says_where_the_memory_was(config: Config) -> None:
    ledger = MemoryLedger(CPU, lambda: 0, _remedies(config))
    with ledger.phase("weight_sync"):
        pass
    with (
        pytest.raises(RuntimeError, match="can't allocate memory") as caught,
        ledger.phase("update"),
    ):
        torch.empty(1 << 50)
    (note,) = caught.value.__notes__
    assert "ran out of memory in phase update" in note
    table = [line.split() for line in note.splitlines() if line.startswith("  ")]
    assert table[0] == ["GiB", *FIELDS]
    assert [row[0] for row in table[1:]] == ["weight_sync", "update,"]
    assert all(float(number) >= 0 for row in table[1:] for number in row[-5:])
    assert (
        "lower training.max_tokens_per_micro_batch (64); model.activation_checkpointing: true; "
        "lower "
        "model.logprob_chunk_tokens" in note
    )


def test_other_errors_get_no_note(config: Config) -> None:
    with (
        pytest.raises(ValueError, match=r"^no$") as caught,
        MemoryLedger(CPU, lambda: 0, _remedies(config)).phase("update"),
    ):
        raise ValueError("no")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"),
            True,
        ),
        (RuntimeError("NCCL Error 1: unhandled cuda error: Cuda failure 2 'out of memory'"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_an_out_of_memory_error_is(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_remedies_fit_the_phase_and_leave_out_what_is_used_up(config: Config) -> None:
    assert all(_remedies(config)[phase] for phase in PHASES)
    assert _remedies(config)["rollout"][:2] == [
        "lower rollout.gpu_memory_utilization (0.6)",
        "model.offload: optimizer, or true",
    ]
    used_up = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, offload=True, activation_checkpointing=True),
        training=dataclasses.replace(
            config.training, max_tokens_per_micro_batch=config.max_rollout_tokens
        ),
    )
    text = "; ".join(_remedies(used_up)["update"] + _remedies(used_up)["rollout"])
    assert "offload" not in text
    assert "activation_checkpointing" not in text
    assert "rollout.max_completion_tokens (12)" in text
    assert "lower training.max_tokens_per_micro_batch" not in text


# What is left after a sleep


def use(gib: float) -> MemoryUse:
    return MemoryUse(0, int(gib * 2**30), 0, 0, 0)


def sleeps(
    check: SleepCheck,
    caplog: pytest.LogCaptureFixture,
    left_gib: list[float],
    held_gib: float = 0.0,
) -> list[int]:
    """Which of the sleeps were alarmed, where each left so much beside what the trainer holds."""
    alarmed = []
    logging.getLogger("grpo_spmd").propagate = True
    for number, remaining in enumerate(left_gib):
        caplog.clear()
        check.check(use(remaining + 20), use(remaining + held_gib), int(held_gib * 2**30))
        alarmed += [number] * len(caplog.records)
    return alarmed


def test_a_growth_is_alarmed_once_and_again_when_it_has_grown_as_much_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    growth = 2 * 2**30
    assert sleeps(SleepCheck(CPU, growth), caplog, [4.0, 11.6, 25.0, 25.0, 25.5]) == [
        1,
        2,
    ]  # NeMo-RL #2619
    assert sleeps(SleepCheck(CPU, growth), caplog, [4.0, 4.5, 5.0, 5.5, 5.9, 4.2]) == []
    # from the least, not the first
    assert sleeps(SleepCheck(CPU, growth), caplog, [6.0, 4.0, 6.1, 6.5, 8.0, 8.2]) == [2, 5]
    slow = [4.0 + 0.1 * step for step in range(60)]
    assert sleeps(SleepCheck(CPU, growth), caplog, slow) == [21, 42]  # a leak of 0.1 GiB a step


def test_what_the_trainer_itself_holds_is_no_growth(caplog: pytest.LogCaptureFixture) -> None:
    check = SleepCheck(CPU, 2**30)
    assert sleeps(check, caplog, [4.0], held_gib=6.0) == []
    assert (
        sleeps(check, caplog, [4.0], held_gib=18.0) == []
    )  # the first update made the optimizer's state
    result = check.check(use(30.0), use(22.0), 18 * 2**30)
    assert result == {"memory/sleep/freed_gib": 8.0, "memory/sleep/left_gib": 4.0}


# The sleep level and the allocator's settings


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 2),
        (["rollout.sleep_level=1"], 1),
        (["model.lora.rank=8"], 2),
        (["model.lora.rank=8", "model.lora.sync=adapter"], 1),
        (["model.lora.rank=0", "model.lora.sync=adapter"], 2),
    ],
)
def test_the_engine_drops_what_the_sync_brings(
    tmp_path: Path, model: Path, overrides: list[str], expected: int
) -> None:
    config = load_config(write_config(tmp_path, model), overrides)
    assert config.rollout.sleep_level_with(config.model.lora) == expected


def test_a_level_that_loses_the_base_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"sleep of level 2 drops the engine's weights",
    ):
        load_config(
            write_config(tmp_path, model),
            ["rollout.sleep_level=2", "model.lora.rank=8", "model.lora.sync=adapter"],
        )


def test_allocator_options_of_the_user_outlive_vllms_start(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = "expandable_segments:True,max_split_size_mb:512"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", inputs)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    old = torch._C._accelerator_getAllocatorSettings()
    try:
        with allocator_settings_kept(torch.device("cuda")):
            assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == inputs  # where vLLM up to 0.30 looks
            torch._C._accelerator_setAllocatorSettings(
                "expandable_segments:True"
            )  # and what it leaves
        assert torch._C._accelerator_getAllocatorSettings() == inputs
    finally:
        torch._C._accelerator_setAllocatorSettings(old)


def test_without_a_gpu_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with allocator_settings_kept(CPU):
        assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
