"""Devices and all-reduces of ranks, measured: the part of the checkup that uses torch. Where no ranks are there, this
machine's are children that run this file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

from grpo_spmd.tools.checkup.results import Place

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Report = dict[str, Any]
_SIZES = (1 << 16, 1 << 20, 16 << 20, 64 << 20)  # bytes
_GPU_SIZES = (*_SIZES, 256 << 20)
_TIMES, _SLOW_S = 4, 1.0
_PINNED_BYTES = 256 << 20
_ANSWER = "checkup report: "
_NEVER = timedelta(hours=1)  # of torch's own waits: the deadline is kept outside of them


def measure(
    report: Report, store: dist.Store, rank: int, nodes: Sequence[Sequence[int]], local_rank: int
) -> None:
    """Collective. Fills `report` as it gets on, so that whoever loses patience sees how far it has come. `nodes`: the
    ranks of each."""
    import torch
    import torch.distributed as dist

    from grpo_spmd.config.errors import ConfigError
    from grpo_spmd.distributed.machine import rank_device

    ranks = sorted(rank for node in nodes for rank in node)
    report["at"] = "its device"
    kind = ""
    try:
        device = rank_device(local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            report |= {
                "name": torch.cuda.get_device_name(),
                "gib": torch.cuda.mem_get_info()[1] / 2**30,
            }
            _measure_pinned(report, device)
        report["device"] = kind = device.type
    except (ConfigError, RuntimeError) as error:
        report["error"] = str(error).strip().partition("\n")[0]
    store.set(f"device/{rank}", kind)
    report["at"] = "waiting for the devices of the others"
    kinds = {other: store.get(f"device/{other}").decode() for other in ranks}
    if len(ranks) == 1 or not kind or set(kinds.values()) != {kind}:
        report["at"] = "done"
        return
    report["at"] = "forming the group"
    backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo"
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backends, store=group, rank=rank, world_size=len(ranks), timeout=_NEVER)
    groups = [dist.new_group([*node]) for node in nodes] if len(nodes) > 1 else []
    for name, members, of_ranks in [
        *(("node", nodes[i], each) for i, each in enumerate(groups)),
        ("all", ranks, None),
    ]:
        if rank in members and len(members) > 1:
            report[name] = []
            _measure_sums(report, name, len(members), device, of_ranks)
    report["at"] = "done"


def _measure_sums(
    report: Report, name: str, num_ranks: int, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Collective. Over `group`: appends [bytes, seconds] of each size; larger ones are left out where one is slow."""
    import torch

    from grpo_spmd.distributed.collectives import any_rank, sum_in_place

    for size in _GPU_SIZES if device.type == "cuda" else _SIZES:
        report["at"] = f"the all-reduce of {size >> 10} KiB ({name})"
        values = torch.ones(size // 4, device=device)
        sum_in_place(values, group)
        if bool((values != num_ranks).any()):
            report["wrong"] = f"{size >> 10} KiB"
        start = time.monotonic()
        for _ in range(_TIMES):
            sum_in_place(values, group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = (time.monotonic() - start) / _TIMES
        report[name].append([size, took])
        if any_rank(took > _SLOW_S, group):
            break


def _measure_pinned(report: Report, device: torch.device) -> None:
    """GB/s from pinned host memory to the device, or why there is none."""
    import torch

    from grpo_spmd.model.offload import host_buffer

    try:
        host = host_buffer(_PINNED_BYTES, device)
    except RuntimeError as error:
        report["pinned_error"] = str(error).partition("\n")[0]
        return
    there = torch.empty_like(host, device=device)
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    start = time.monotonic()
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    report["pinned_gb_s"] = _PINNED_BYTES / (time.monotonic() - start) / 1e9


def measure_within(
    seconds: float, store: dist.Store, rank: int, nodes: Sequence[Sequence[int]], local_rank: int
) -> Report:
    """Collective. `measure` until then; NCCL's and gloo's own limits are later, or end the process."""
    report: Report = {"rank": rank, "at": "starting"}
    # One connection serves one call at a time: the thread's may wait for ever, and the caller speaks on over its own.
    own = store.clone()  # type: ignore[attr-defined]

    def run() -> None:
        try:
            measure(report, own, rank, nodes, local_rank)
        except Exception as error:  # torch's many: what it says goes to rank 0
            report["failed"] = (
                f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            )

    thread = threading.Thread(target=run, name="checkup: all-reduce", daemon=True)
    thread.start()
    thread.join(seconds)
    return {**report}


class Children:
    """Ranks of this machine, one a GPU, or two on the CPU: they start while others look at other things."""

    def __init__(self, place: Place, deadline_s: float) -> None:
        self.num_ranks, self._deadline_s = place.num_gpus or 2, deadline_s
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_WORLD_SIZE": self.num_ranks,
            "MASTER_PORT": port,
        }
        self._began = time.monotonic()
        self._children: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        for rank in range(self.num_ranks):
            numbers = {
                name: str(number)
                for name, number in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()
            }
            own = {**place.environ, "TORCH_CPP_LOG_LEVEL": "FATAL", "NCCL_DEBUG": "", **numbers}
            own["OMP_NUM_THREADS"] = "1"
            output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
            command = [sys.executable, "-m", "grpo_spmd.tools.checkup.reduce", str(deadline_s)]
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
            child = subprocess.Popen(
                command, env=own, stdout=output, start_new_session=True, **options
            )
            self._children.append((child, output))

    def reports(self) -> dict[int, Report]:
        """Of those that said something until the deadline; all are gone afterwards."""
        found: dict[int, Report] = {}
        for rank, (child, output) in enumerate(self._children):
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, self._began + self._deadline_s + 5 - time.monotonic()))
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            answers = [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)]
            if answers:
                found[rank] = json.loads(answers[-1])
            elif child.returncode is not None:
                said = lines[-1][:300] if lines else f"exit code {child.returncode}"
                found[rank] = {"rank": rank, "at": "importing torch", "failed": said}
        self.end()
        return found

    def end(self) -> None:
        while self._children:
            child, output = self._children.pop()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            output.close()


def open_store(environ: Mapping[str, str], deadline_s: float, *, serves: bool) -> dist.Store:
    """Where MASTER_ADDR and MASTER_PORT say; does not wait for the other ranks. Raises RuntimeError."""
    from torch.distributed import TCPStore

    host, port, size = (
        environ.get("MASTER_ADDR", "127.0.0.1"),
        int(environ["MASTER_PORT"]),
        int(environ["WORLD_SIZE"]),
    )
    limit = timedelta(seconds=deadline_s)
    store = TCPStore(host, port, size, is_master=serves, timeout=limit, wait_for_workers=False)
    store.set_timeout(_NEVER)
    return store


def main() -> None:
    """One child of `Children`."""
    from grpo_spmd.distributed.exit import exit_process

    deadline_s, rank, size = (
        float(sys.argv[1]),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )
    store = open_store(os.environ, deadline_s, serves=rank == 0)
    report = measure_within(deadline_s, store, rank, [range(size)], rank)
    print(f"\n{_ANSWER}{json.dumps(report)}", flush=True)
    store.set(f"reported/{rank}", "")
    for other in range(size) if rank == 0 else ():  # it keeps the store
        with suppress(RuntimeError):
            store.get(f"reported/{other}")
    exit_process(0)


if __name__ == "__main__":
    main()
