"""Where a rank's memory is: a ledger by phase, what the engine leaves behind when it sleeps, what of the trainer waits in host memory.

Engine and trainer take turns on a device. A ledger that only knows torch's tensors does not see most of what can go wrong there: the
engine's pool, NCCL's buffers, another process. So that every figure stands beside what the driver says.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.config import Config

_log = logging.getLogger("grpo_spmd")
_GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one moment, of this rank's process where nothing else is said.

    On a GPU torch's statistics go on counting the engine's sleep pool (weights, KV cache) while the engine sleeps and that memory is
    not there: vLLM hands it to torch through an allocator of its own and takes it away behind torch's back. It is left out of the first
    three, and counted in `other` while it is mapped.
    """

    peak: int  # GPU: most bytes in live tensors since `reset_peak`; CPU: most resident memory since then (VmHWM)
    allocated: int  # GPU: in live tensors; CPU: RssAnon, all that was allocated and touched, by torch or not
    reserved: int  # GPU: what torch took from the driver, its cache included; CPU: VmRSS, so the pages of mapped files too
    driver_used: int  # GPU: all that is in use on the device, by every process; CPU: the host's MemTotal - MemAvailable
    other: int  # driver_used less reserved (CPU: less allocated): engine pool while awake, CUDA context, NCCL, other processes


def measure(device: torch.device, pool_bytes: int = 0) -> MemoryUse:
    """Memory now; `pool_bytes`: the engine's sleep pool (RolloutEngine.pool_bytes). Costs 0.1 ms on a CPU."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        # Not below 0: the pool is counted in whole segments, which its tensors need not fill.
        peak, allocated, reserved = (
            max(0, stats.get(f"{name}_bytes.all.{which}", 0) - pool_bytes)
            for name, which in (("allocated", "peak"), ("allocated", "current"), ("reserved", "current"))
        )
        return MemoryUse(peak, allocated, reserved, total - free, max(0, total - free - reserved))
    own, host = _proc_kib("/proc/self/status"), _proc_kib("/proc/meminfo")
    allocated, used = own["RssAnon"] << 10, (host["MemTotal"] - host["MemAvailable"]) << 10
    return MemoryUse(own["VmHWM"] << 10, allocated, own["VmRSS"] << 10, used, max(0, used - allocated))


def reset_peak(device: torch.device) -> None:
    """`MemoryUse.peak` counts from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from the present size
    except OSError:  # a container may forbid it; the peak is then that of the whole run so far
        return


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _proc_kib(path: str) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in Path(path).read_text().splitlines())
    return {name: int(value.split()[0]) for name, value in pairs if value.endswith(" kB")}


class MemoryLedger:
    """What each phase of a step took on this rank; for the metrics, and for the message of an out-of-memory error."""

    def __init__(self, config: Config, device: torch.device, pool_bytes: Callable[[], int] = lambda: 0) -> None:
        self._config, self._device, self._pool_bytes = config, device, pool_bytes
        self._step: dict[str, MemoryUse] = {}
        self._before: dict[str, MemoryUse] = {}  # of earlier steps, for phases that this step has not come to

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures at the end of the block, and keeps the most where a phase has several blocks in a step.

        An out-of-memory error leaves the block with the ledger, and what may help in that phase, as its note.
        """
        reset_peak(self._device)
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(self.explain(name))
            raise
        now = measure(self._device, self._pool_bytes())
        self._step[name] = _most(self._step.get(name, now), now)

    def metrics(self) -> dict[str, float]:
        """`memory/<phase>/{peak,allocated,reserved,driver_used,other}_gib` of this step so far."""
        return {
            f"memory/{name}/{field}_gib": number / _GIB
            for name, use in self._step.items()
            for field, number in dataclasses.asdict(use).items()
        }

    def end_step(self) -> None:
        self._before |= self._step
        self._step = {}

    def explain(self, name: str) -> str:
        """The ledger as a table, with this moment in its last row, and the keys that may help in phase `name`."""
        fields = [field.name for field in dataclasses.fields(MemoryUse)]
        now = measure(self._device, self._pool_bytes())
        lines = [f"{'GiB':24}" + "".join(f"{field:>12}" for field in fields)]
        for phase, use in [*(self._before | self._step).items(), (f"{name}, when it failed", now)]:
            lines.append(f"{phase:24}" + "".join(f"{number / _GIB:12.2f}" for number in dataclasses.asdict(use).values()))
        rank, where = os.environ.get("RANK", "0"), "the device" if self._device.type == "cuda" else "the host"
        return (
            f"rank {rank} ran out of memory in phase {name}; {where} has {_total_bytes(self._device) / _GIB:.1f} GiB, "
            f"the engine's pool of weights and KV cache is {self._pool_bytes() / _GIB:.1f} GiB:\n  "
            + "\n  ".join(lines)
            + "\nwhat may help, the likeliest first: "
            + "; ".join(remedies(name, self._config))
        )


def _most(one: MemoryUse, other: MemoryUse) -> MemoryUse:
    return MemoryUse(*map(max, dataclasses.astuple(one), dataclasses.astuple(other)))


def is_out_of_memory(error: BaseException) -> bool:
    """torch's error of a GPU or of the CPU, vLLM's when it wakes ("CUDA Error: out of memory"), NCCL's, Python's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ("out of memory", "can't allocate memory"))


def remedies(phase: str, config: Config) -> list[str]:
    """Config keys that lower the peak of `phase`, the likeliest first; without those that are used up."""
    model, rollout, training = config.model, config.rollout, config.training
    fewer_tokens = f"lower training.max_tokens_per_micro_batch ({training.max_tokens_per_micro_batch})"
    if training.max_tokens_per_micro_batch <= config.max_rollout_tokens:
        fewer_tokens = f"shorter rollouts: rollout.max_completion_tokens ({rollout.max_completion_tokens}); a micro-batch holds only one"
    recompute = "" if model.activation_checkpointing is True else "model.activation_checkpointing: true"
    smaller_chunks = f"lower model.logprob_chunk_tokens ({model.logprob_chunk_tokens})"
    smaller_engine = f"lower rollout.gpu_memory_utilization ({rollout.gpu_memory_utilization:g})"
    offload = {False: "model.offload: optimizer, or true", "optimizer": "model.offload: true", True: ""}[model.offload]
    fewer_requests = "lower rollout.engine.max_num_seqs" + (f" ({n})" if (n := rollout.engine.get("max_num_seqs")) else "")
    smaller_buckets = f"lower rollout.weight_sync_bucket_mib ({rollout.weight_sync_bucket_mib})"
    more_ranks = (
        "more ranks, or fewer of model.num_replicas" if model.num_replicas > 1 else "more ranks, so that each holds less of the model"
    )
    by_phase = {
        "weight_sync": [offload, smaller_engine, smaller_buckets, more_ranks],
        "eval": [smaller_engine, offload, fewer_requests],
        "rollout": [smaller_engine, offload, fewer_requests],
        "reward": [f"lower reward_pool.num_workers ({config.reward_pool.num_workers})"],
        "logprobs": [fewer_tokens, smaller_chunks, more_ranks],
        "update": [fewer_tokens, recompute, smaller_chunks, more_ranks],
        "checkpoint": [fewer_tokens, more_ranks],
    }
    return [remedy for remedy in by_phase.get(phase, [fewer_tokens, smaller_engine]) if remedy]


class SleepContract:
    """The engine gives back what it took: what is in use after a sleep must not grow over the run."""

    def __init__(self, device: torch.device, growth_bytes: int | None = None) -> None:
        """`growth_bytes`: what is alarmed; 5 % of the device, but not less than 1 GiB, where it is None."""
        self._device = device
        self._growth = max(_GIB, _total_bytes(device) // 20) if growth_bytes is None else growth_bytes
        self._least: int | None = None
        self._alarmed = 0

    def check(self, before: MemoryUse, after: MemoryUse, held_bytes: int) -> dict[str, float]:
        """Judge one sleep, measured before and after it; warns where too much is left, and again for each further growth as large.

        Args:
            held_bytes: what policy, reference and optimizer themselves hold (HostOffload.held_bytes), which changes for good reasons, as
                when the first update makes the optimizer's state.

        Returns:
            `memory/sleep/freed_gib`, and `memory/sleep/left_gib`: in use after the sleep, less `held_bytes`.
        """
        freed, left = self._used(before) - self._used(after), self._used(after) - held_bytes
        self._least = left if self._least is None else min(self._least, left)
        if left - max(self._least, self._alarmed) > self._growth:
            self._alarmed = left
            _log.warning(
                "memory grows: %.2f GiB in use after the engine's sleep, beyond what policy, reference and optimizer hold, where it was "
                "%.2f GiB at the least (alarm at +%.2f GiB); the sleep freed %.2f GiB. %s",
                left / _GIB, self._least / _GIB, self._growth / _GIB, freed / _GIB, self._parts(after, held_bytes),
            )  # fmt: skip
        return {"memory/sleep/freed_gib": freed / _GIB, "memory/sleep/left_gib": left / _GIB}

    def _used(self, use: MemoryUse) -> int:
        return use.driver_used if self._device.type == "cuda" else use.allocated

    def _parts(self, after: MemoryUse, held_bytes: int) -> str:
        if self._device.type != "cuda":
            return "Likely something keeps tensors or texts of earlier steps alive"
        own, cached = (after.allocated - held_bytes) / _GIB, (after.reserved - after.allocated) / _GIB
        return (
            f"Tensors of torch: {own:.2f} GiB (weights that the engine keeps outside its pool, or tensors of earlier steps kept alive); "
            f"cached by torch: {cached:.2f} GiB (fragmentation: try PYTORCH_ALLOC_CONF=expandable_segments:True); outside torch: "
            f"{after.other / _GIB:.2f} GiB (a pool not given back: try another version of vLLM; CUDA graphs, NCCL, another process)"
        )


class HostOffload:
    """What of the trainer waits in (pinned) host memory while the engine is awake: nothing, the optimizer's state, or all of it.

    A shard's storage is copied out and resized to 0 in place, so that FSDP's flat views of it and the optimizer's references stay what
    they are. Reading a tensor whose storage is empty ends the process with SIGSEGV on a CPU: forward passes and optimizer steps raise
    before that, and so does policy.hf_named_parameters.
    """

    def __init__(
        self, what: bool | Literal["optimizer"], policy: nn.Module, reference: object | None, optimizer: torch.optim.Optimizer
    ) -> None:
        self._what, self._policy, self._optimizer = what, policy, optimizer
        # With LoRA the reference is the policy with its adapters off, and no model of its own.
        self._reference = reference if isinstance(reference, nn.Module) else None
        self._host: dict[str, Tensor] = {}  # allocated once, since pinning is slow
        self._away: dict[str, torch.UntypedStorage] = {}
        if what is not False:
            for model in (policy, self._reference):
                if model is not None:  # before FSDP's own hook, which would gather from the empty storage
                    model.register_forward_pre_hook(lambda *_: self._refuse_if_away(), prepend=True)
            optimizer.register_step_pre_hook(lambda *_: self._refuse_if_away())

    def before_sync(self) -> None:
        """What the weight sync does not read makes room for the engine's weights: the optimizer's state, the reference."""
        if self._what is not False:
            self._move_out("optimizer", self._optimizer_state())
        if self._what is True and self._reference is not None:
            self._move_out("reference", list(self._reference.parameters()))

    def after_sync(self) -> None:
        """The policy has been gathered, and makes room for the KV cache."""
        if self._what is True:
            self._move_out("policy", list(self._policy.parameters()))

    def to_device(self) -> dict[str, float]:
        """The engine sleeps: everything comes back. Returns `memory/host/offloaded_gib`, what had been away."""
        moved = 0
        for name, storage in self._away.items():
            host = self._host[name]
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)  # in the order of the stream: whatever reads it comes later
            moved += host.nbytes
        self._away.clear()
        return {"memory/host/offloaded_gib": moved / _GIB}

    @property
    def held_bytes(self) -> int:
        """What policy, reference and optimizer take on the device now; on a CPU, which is its own host, with the copies."""
        tensors = [
            *self._policy.parameters(),
            *(self._reference.parameters() if self._reference is not None else ()),
            *self._optimizer_state(),
        ]
        storages = {storage._cdata: storage for storage in map(_storage, tensors)}
        copies = self._host.values() if tensors[0].device.type == "cpu" else ()
        return sum(storage.nbytes() for storage in storages.values()) + sum(copy.nbytes for copy in copies)

    def _optimizer_state(self) -> list[Tensor]:
        """Moments, in one order; none before the first step. Step counts, which are scalars, stay where they are."""
        return [value for state in self._optimizer.state.values() for value in state.values() if isinstance(value, Tensor) and value.ndim]

    def _move_out(self, owner: str, tensors: list[Tensor]) -> None:
        leaving: dict[str, torch.UntypedStorage] = {}
        for number, tensor in enumerate(tensors):
            name, storage = f"{owner}.{number}", _storage(tensor)
            if name in self._away or not storage.nbytes():  # a rank may have no row of a small tensor
                continue
            if name not in self._host:
                self._host[name] = _host_buffer(storage)
            self._host[name].copy_(_bytes_of(storage), non_blocking=True)
            leaving[name] = storage
        if any(storage.device.type == "cuda" for storage in leaving.values()):
            torch.cuda.synchronize()  # the copies read what is freed next
        for storage in leaving.values():
            storage.resize_(0)
        self._away |= leaving

    def _refuse_if_away(self) -> None:
        if self._away:
            raise RuntimeError(
                f"{len(self._away)} tensors of policy, reference or optimizer are in host memory (model.offload: {self._what}); "
                "HostOffload.to_device comes first"
            )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() would make a view for autograd
    storage: torch.UntypedStorage = local.untyped_storage()
    return storage


def _host_buffer(storage: torch.UntypedStorage) -> Tensor:
    """Host memory of the size of `storage`, pinned beside a GPU: in place, since torch's own pinned memory comes in powers of two."""
    host = torch.empty(storage.nbytes(), dtype=torch.uint8)
    if storage.device.type == "cuda":
        failure = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 1))  # 1: cudaHostRegisterPortable
        if failure:
            raise RuntimeError(f"cannot pin {host.nbytes / _GIB:.2f} GiB of host memory for model.offload (CUDA error {failure})")
    return host


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
