"""Measures time and memory of each phase of a step on this rank.

The "ledger" keeps the memory figures of each phase. The "pool" is the memory of the engine (vLLM):
its weights and KV cache. torch's counters do not show the engine's pool, NCCL's buffers or other
processes, so every figure of memory is reported beside the driver's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from grpo_spmd.config.schema import PHASES, ModelConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.observe.timeline import Span

_GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """The memory in use at one moment, in bytes; of this rank's process, where nothing else is
    said.

    On a GPU torch counts the engine's pool (weights, KV cache) even while the engine sleeps,
    because vLLM's allocator unmaps it without telling torch. So the pool is left out of the first
    three fields, and counted in `other` while it is mapped.
    """

    peak: int
    """GPU: the most bytes in live tensors since `reset_peak`. CPU: the most resident memory since
    then (VmHWM)."""
    allocated: int
    """GPU: bytes in live tensors. CPU: RssAnon, everything allocated and touched, by torch or
    not."""
    reserved: int
    """GPU: the bytes that torch took from the driver, with its cache. CPU: VmRSS, with pages of
    mapped files."""
    driver_used: int
    """GPU: the bytes that all processes use on the device. CPU: the host's MemTotal -
    MemAvailable."""
    other: int
    """driver_used - reserved (CPU: - allocated): the engine's mapped pool, CUDA context, NCCL,
    other processes."""


def measure(device: torch.device, pool_bytes: int = 0) -> MemoryUse:
    """Returns the memory in use now. Takes 0.1 ms on a CPU.

    `pool_bytes` is the size of the engine's pool (RolloutEngine.pool_bytes).
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()

        def without_pool(name: str) -> int:
            """Returns a figure of torch's allocator in bytes, without the engine's pool."""
            # not below 0: `pool_bytes` counts whole segments, which their tensors need not fill
            return max(0, int(stats.get(name, 0)) - pool_bytes)

        reserved = without_pool("reserved_bytes.all.current")
        return MemoryUse(
            peak=without_pool("allocated_bytes.all.peak"),
            allocated=without_pool("allocated_bytes.all.current"),
            reserved=reserved,
            driver_used=total - free,
            other=max(0, total - free - reserved),
        )
    process = _read_proc_bytes("/proc/self/status")
    host = _read_proc_bytes("/proc/meminfo")
    host_used = host["MemTotal"] - host["MemAvailable"]
    return MemoryUse(
        peak=process["VmHWM"],
        allocated=process["RssAnon"],
        reserved=process["VmRSS"],
        driver_used=host_used,
        other=max(0, host_used - process["RssAnon"]),
    )


def reset_peak(device: torch.device) -> None:
    """Resets `MemoryUse.peak` to what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    # a container may forbid this: then the peak is that of the whole run so far
    with suppress(OSError):
        # writing 5 there makes Linux set VmHWM back to the present size
        Path("/proc/self/clear_refs").write_text("5")


def total_bytes(device: torch.device) -> int:
    """Returns the size of the device's memory in bytes; for a CPU that of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def children_bytes(pid: int | str = "self") -> int:
    """Returns the memory (RssAnon, in bytes) of all descendants of a process.

    For a rank they are the workers of rewards and environments. Returns 0 where the kernel has no
    lists of children (CONFIG_PROC_CHILDREN).
    """
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A process may end at any moment.
        with suppress(OSError):
            for child in path.read_text().split():
                total += _read_proc_bytes(f"/proc/{child}/status").get("RssAnon", 0)
                total += children_bytes(child)
    return total


def _read_proc_bytes(path: str) -> dict[str, int]:
    """Returns the sizes that a file of /proc lists in kB, in bytes by name, such as "VmRSS"."""
    pairs = (line.split(":", 1) for line in Path(path).read_text().splitlines())
    return {name: int(value.split()[0]) << 10 for name, value in pairs if value.endswith(" kB")}


@dataclass
class MemoryLedger:
    """Keeps this rank's memory figures of each phase, for metrics and out-of-memory messages."""

    device: torch.device
    pool_bytes: Callable[[], int]
    """Returns the present size of the engine's pool; see MemoryUse."""
    remedies: dict[str, list[str]]
    """Texts for each phase, the likeliest remedy first."""

    def __post_init__(self) -> None:
        """Begins without figures."""
        self._step: dict[str, MemoryUse] = {}
        # the last figures of each phase in earlier steps, for phases that this step has not reached
        self._earlier: dict[str, MemoryUse] = {}
        self.last_peak_gib = 0.0
        """The peak of the phase that ended last, in GiB."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the memory at the end of the block, which is the phase `name`.

        If a step enters the phase several times, the largest figures are kept. An out-of-memory
        error in the block gets the text of `explain` as a note.
        """
        reset_peak(self.device)
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(self.explain(name))
            raise
        use = measure(self.device, self.pool_bytes())
        self.last_peak_gib = use.peak / _GIB
        # a step can enter a phase several times (dynamic sampling): each figure is the largest
        earlier = self._step.get(name, use)
        self._step[name] = MemoryUse(*map(max, astuple(earlier), astuple(use)))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics memory/PHASE/{peak,allocated,reserved,driver_used,other}_gib of the
        step so far."""
        return {
            f"memory/{phase}/{field}_gib": num_bytes / _GIB
            for phase, use in self._step.items()
            for field, num_bytes in vars(use).items()
        }

    def end_step(self) -> None:
        """Begins a new step. The figures of this one stay for `explain`."""
        self._earlier |= self._step
        self._step = {}

    def explain(self, name: str) -> str:
        """Returns the message for an out-of-memory error in phase `name`.

        It has a table of all phases' memory, whose last row is of this moment, and the remedies for
        the phase.
        """
        use_now = measure(self.device, self.pool_bytes())
        rows = self._earlier | self._step | {f"{name}, when it failed": use_now}
        lines = [f"{'GiB':24}" + "".join(f"{field:>12}" for field in vars(use_now))]
        for phase, use in rows.items():
            lines.append(f"{phase:24}" + "".join(f"{size / _GIB:12.2f}" for size in astuple(use)))
        table = "\n  ".join(lines)
        rank = os.environ.get("RANK", "0")
        device = "the device" if self.device.type == "cuda" else "the host"
        remedies = "; ".join(self.remedies[name])
        return (
            f"rank {rank} ran out of memory in phase {name}; "
            f"{device} has {total_bytes(self.device) / _GIB:.1f} GiB, "
            f"the engine's pool of weights "
            f"and KV cache is {self.pool_bytes() / _GIB:.1f} GiB:\n  {table}\n"
            f"what may help, the likeliest first: {remedies}"
        )


class PhaseTimer:
    """Times the phases of a step on this rank.

    `with timer("rollout"):` adds the block's time to time/rollout_s, and its memory to the ledger.
    """

    def __init__(self, device: torch.device, memory: MemoryLedger, first_step: int) -> None:
        """Begins the step `first_step`. `memory` gets the memory figures of each phase."""
        self._device = device
        self._memory = memory
        self._step = first_step
        self._seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        """The phases of this step so far."""
        self._start_clock()

    def _start_clock(self) -> None:
        """Notes when the step begins, on the performance counter and since 1970."""
        self._step_start = time.perf_counter()
        self.step_unix_s = time.time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as the phase `name`.

        It also tells the doctor, which ends a run that hangs, that this rank is in the phase.
        """
        assert name in PHASES, name
        doctor.enter_phase(name, self._step)
        with self._memory.phase(name):
            start = time.perf_counter()
            yield
            if self._device.type == "cuda":
                # kernels may still be running: otherwise their time would count in a later phase
                torch.cuda.synchronize()
            end = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
        self.spans.append(
            Span(
                phase=name,
                start_s=start - self._step_start,
                end_s=end - self._step_start,
                peak_gib=self._memory.last_peak_gib,
                busy_s=None,
            )
        )
        # the code between phases can hang too, and has a limit of its own
        doctor.enter_phase(f"after {name}", self._step)

    def metrics(self) -> dict[str, float]:
        """Returns the time/ and memory/ metrics of this rank for the step so far."""
        return {
            "time/step_s": time.perf_counter() - self._step_start,
            **{f"time/{name}_s": self._seconds.get(name, 0.0) for name in PHASES},
            "memory/host/workers_gib": children_bytes() / _GIB,
            **self._memory.metrics(),
        }

    def end_step(self) -> None:
        """Begins the next step: forgets the times and spans of this one."""
        self._seconds.clear()
        self.spans.clear()
        self._memory.end_step()
        self._step += 1
        self._start_clock()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of torch, vLLM, NCCL or Python means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # vLLM: "CUDA Error: out of memory"; NCCL: "Cuda failure 2 'out of memory'"
    pattern = "out of memory|can't allocate memory"
    return isinstance(error, RuntimeError) and re.search(pattern, str(error)) is not None


def remedies(
    model: ModelConfig,
    rollout: RolloutConfig,
    training: TrainingConfig,
    max_rollout_tokens: int,
    num_workers: int,
) -> dict[str, list[str]]:
    """Returns, for each phase, texts about changes of the config that lower its peak of memory.

    The likeliest to help comes first. Switches that are on already are left out. The texts are
    shown in the message of an out-of-memory error.
    """
    fewer_tokens = f"lower training.max_tokens_per_micro_batch ({training.micro_batch_tokens})"
    if training.micro_batch_tokens <= max_rollout_tokens:
        length_key = f"rollout.max_completion_tokens ({rollout.max_completion_tokens})"
        fewer_tokens = f"shorter rollouts: {length_key}; a micro-batch holds only one"
    recompute = "" if model.recompute is True else "model.activation_checkpointing: true"
    smaller_chunks = f"lower model.logprob_chunk_tokens ({model.logprob_chunk_tokens})"
    smaller_engine = f"lower rollout.gpu_memory_utilization ({rollout.gpu_memory_utilization:g})"
    offload = {
        False: "model.offload: optimizer, or true",
        "optimizer": "model.offload: true",
        True: "",
    }[model.offload]
    max_num_seqs = rollout.engine.get("max_num_seqs")
    fewer_requests = f"lower rollout.engine.max_num_seqs ({max_num_seqs or 'vLLM chooses'})"
    mib = rollout.weight_sync_bucket_mib or "chosen by the device"
    smaller_buckets = f"lower rollout.weight_sync_bucket_mib ({mib})"
    fewer_replicas = ", or fewer of model.num_replicas" if model.num_replicas > 1 else ""
    more_ranks = f"more ranks{fewer_replicas}, so that each holds less of the model"
    sharing = f"a larger model.sequence_parallel_size ({model.sequence_parallel_size})"
    by_phase = {
        "weight_sync": [offload, smaller_engine, smaller_buckets, more_ranks],
        "eval": [smaller_engine, offload, fewer_requests],
        "rollout": [smaller_engine, offload, fewer_requests],
        "reward": [f"lower reward_pool.num_workers ({num_workers})"],
        "logprobs": [fewer_tokens, smaller_chunks, sharing, more_ranks],
        "update": [fewer_tokens, recompute, smaller_chunks, sharing, more_ranks],
        "checkpoint": [fewer_tokens, more_ranks],
    }
    return {
        phase: [remedy for remedy in phase_remedies if remedy]
        for phase, phase_remedies in by_phase.items()
    }
