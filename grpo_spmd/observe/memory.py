"""Where a rank's memory is, by phase. Torch's tensors do not show the engine's pool, NCCL's buffers or other processes,
so every figure stands beside what the driver says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_spmd.config.schema import ModelConfig, RolloutConfig, TrainingConfig

_GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one moment, of this rank's process where nothing else is said.
    On a GPU torch counts the engine's sleep pool (weights, KV cache) even while the engine sleeps: vLLM's allocator
    unmaps it behind torch's back. It is left out of the first three, and counted in `other` while it is mapped."""

    peak: int  # GPU: most bytes in live tensors since `reset_peak`; CPU: most resident memory since then (VmHWM)
    allocated: int  # GPU: in live tensors; CPU: RssAnon, all that was allocated and touched, by torch or not
    reserved: int  # GPU: what torch took from the driver, its cache included; CPU: VmRSS, pages of mapped files too
    driver_used: int  # GPU: all that is in use on the device, by every process; CPU: the host's MemTotal - MemAvailable
    other: int  # driver_used less reserved (CPU: allocated): engine pool while awake, CUDA context, NCCL, others


def measure(device: torch.device, pool_bytes: int = 0) -> MemoryUse:
    """Memory now; `pool_bytes`: RolloutEngine.pool_bytes. Takes 0.1 ms on a CPU."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        # Not below 0: the pool is counted in whole segments, which its tensors need not fill.
        peak, allocated, reserved = (
            max(0, stats.get(f"{name}_bytes.all.{which}", 0) - pool_bytes)
            for name, which in (
                ("allocated", "peak"),
                ("allocated", "current"),
                ("reserved", "current"),
            )
        )
        return MemoryUse(peak, allocated, reserved, total - free, max(0, total - free - reserved))
    own, host = _proc_kib("/proc/self/status"), _proc_kib("/proc/meminfo")
    allocated, used = own["RssAnon"] << 10, (host["MemTotal"] - host["MemAvailable"]) << 10
    return MemoryUse(
        own["VmHWM"] << 10, allocated, own["VmRSS"] << 10, used, max(0, used - allocated)
    )


def reset_peak(device: torch.device) -> None:
    """`MemoryUse.peak` counts from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(
        OSError
    ):  # a container may forbid it; the peak is then that of the whole run so far
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # Linux: VmHWM starts again from the present size


def total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _proc_kib(path: str) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in Path(path).read_text().splitlines())
    return {name: int(value.split()[0]) for name, value in pairs if value.endswith(" kB")}


class MemoryLedger:
    """What each phase of a step took on this rank; for the metrics, and for the message of an out-of-memory error."""

    def __init__(
        self, device: torch.device, pool_bytes: Callable[[], int], remedies: dict[str, list[str]]
    ) -> None:
        """`pool_bytes`: the engine's, see MemoryUse. `remedies`: what may help, by phase, the likeliest first."""
        self._device, self._pool_bytes, self._remedies = device, pool_bytes, remedies
        self._step: dict[str, MemoryUse] = {}
        self._before: dict[
            str, MemoryUse
        ] = {}  # of earlier steps, for phases that this step has not come to
        self.last_peak_gib = 0.0  # of the phase that ended last, this time

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure when the block ends, and keep a step's largest figures. An out-of-memory error gets a note."""
        reset_peak(self._device)
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(self.explain(name))
            raise
        now = measure(self._device, self._pool_bytes())
        self.last_peak_gib = now.peak / _GIB
        self._step[name] = MemoryUse(
            *map(max, vars(self._step.get(name, now)).values(), vars(now).values())
        )

    def metrics(self) -> dict[str, float]:
        """`memory/<phase>/{peak,allocated,reserved,driver_used,other}_gib` of this step so far."""
        numbers = (
            (f"{phase}/{field}", n)
            for phase, use in self._step.items()
            for field, n in vars(use).items()
        )
        return {f"memory/{name}_gib": number / _GIB for name, number in numbers}

    def end_step(self) -> None:
        self._before |= self._step
        self._step = {}

    def explain(self, name: str) -> str:
        """The ledger as a table, with this moment in its last row, and the keys that may help in phase `name`."""
        now = measure(self._device, self._pool_bytes())
        lines = [f"{'GiB':24}" + "".join(f"{field:>12}" for field in vars(now))]
        for phase, use in [*(self._before | self._step).items(), (f"{name}, when it failed", now)]:
            lines.append(
                f"{phase:24}" + "".join(f"{number / _GIB:12.2f}" for number in vars(use).values())
            )
        rank, where = (
            os.environ.get("RANK", "0"),
            "the device" if self._device.type == "cuda" else "the host",
        )
        table, may_help = "\n  ".join(lines), "; ".join(self._remedies[name])
        return (
            f"rank {rank} ran out of memory in phase {name}; {where} has {total_bytes(self._device) / _GIB:.1f} GiB, "
            f"the engine's pool of weights and KV cache is {self._pool_bytes() / _GIB:.1f} GiB:\n  {table}\n"
            f"what may help, the likeliest first: {may_help}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """torch's error of a GPU or of the CPU, vLLM's when it wakes ("CUDA Error: out of memory"), NCCL's, Python's."""
    said = isinstance(error, RuntimeError) and re.search(
        "out of memory|can't allocate memory", str(error)
    )
    return bool(said) or isinstance(error, MemoryError | torch.OutOfMemoryError)


def remedies(
    model: ModelConfig,
    rollout: RolloutConfig,
    training: TrainingConfig,
    max_rollout_tokens: int,
    num_workers: int,
) -> dict[str, list[str]]:
    """Config keys that lower the peak of each phase, the likeliest first; without those that are used up."""
    fewer_tokens = (
        f"lower training.max_tokens_per_micro_batch ({training.max_tokens_per_micro_batch})"
    )
    if training.max_tokens_per_micro_batch <= max_rollout_tokens:
        longest = f"rollout.max_completion_tokens ({rollout.max_completion_tokens})"
        fewer_tokens = f"shorter rollouts: {longest}; a micro-batch holds only one"
    recompute = (
        "" if model.activation_checkpointing is True else "model.activation_checkpointing: true"
    )
    smaller_chunks = f"lower model.logprob_chunk_tokens ({model.logprob_chunk_tokens})"
    smaller_engine = f"lower rollout.gpu_memory_utilization ({rollout.gpu_memory_utilization:g})"
    offload = {
        False: "model.offload: optimizer, or true",
        "optimizer": "model.offload: true",
        True: "",
    }[model.offload]
    most = rollout.engine.get("max_num_seqs")
    fewer_requests = "lower rollout.engine.max_num_seqs" + (f" ({most})" if most else "")
    mib = rollout.weight_sync_bucket_mib
    smaller_buckets = "lower rollout.weight_sync_bucket_mib" + (f" ({mib})" if mib else "")
    or_else = (
        "or fewer of model.num_replicas"
        if model.num_replicas > 1
        else "so that each holds less of the model"
    )
    more_ranks = f"more ranks, {or_else}"
    by_phase = {
        "weight_sync": [offload, smaller_engine, smaller_buckets, more_ranks],
        "eval": [smaller_engine, offload, fewer_requests],
        "rollout": [smaller_engine, offload, fewer_requests],
        "reward": [f"lower reward_pool.num_workers ({num_workers})"],
        "logprobs": [fewer_tokens, smaller_chunks, more_ranks],
        "update": [fewer_tokens, recompute, smaller_chunks, more_ranks],
        "checkpoint": [fewer_tokens, more_ranks],
    }
    return {
        phase: [remedy for remedy in of_phase if remedy] for phase, of_phase in by_phase.items()
    }
