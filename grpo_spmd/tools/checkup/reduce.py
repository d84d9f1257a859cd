"""Measures devices and all-reduces: the part of the checkup that uses torch.

`LocalRanks` (launch.py) runs this file as children of a checkup without launched ranks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_spmd.config.errors import ConfigError, within
from grpo_spmd.distributed.collectives import any_rank, sum_in_place
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.distributed.machine import rank_device
from grpo_spmd.model.offload import host_buffer
from grpo_spmd.tools.checkup.exchange import EXPECTED_FRACTION, NO_CONNECTION, WAITING, Report
from grpo_spmd.tools.checkup.launch import ANSWER
from grpo_spmd.tools.checkup.results import Result, bad, ok, rated

_SIZES = (1 << 16, 1 << 20, 16 << 20, 64 << 20)  # bytes
_GPU_SIZES = (*_SIZES, 256 << 20)
_NUM_TIMES = 4
_SLOW_S = 1.0
_PINNED_BYTES = 256 << 20
# For torch's own waits: the deadline is kept outside of them.
_NEVER = timedelta(hours=1)


class Measurement(Report):
    """A Report that fills itself, step by step."""

    def measure(
        self, store: dist.Store, rank: int, nodes: Sequence[Sequence[int]], local_rank: int
    ) -> None:
        """Collective. `nodes` has the ranks of each node."""
        ranks = sorted(rank for node in nodes for rank in node)
        self.at = "its device"
        kind = ""
        try:
            device = rank_device(local_rank)
            name = "the CPU"
            if device.type == "cuda":
                torch.cuda.set_device(device)
                name = torch.cuda.get_device_name()
                self.gpu = name, torch.cuda.mem_get_info()[1] / 2**20
                self.lines.append(self._check_pinned(device))
            kind = device.type
            self.lines.append(ok("device", f"torch uses {name}", {"device": kind}))
        except (ConfigError, RuntimeError) as error:
            finding, _, remedy = _first_line(error).partition("; ")
            self.lines.append(bad("device", finding, remedy or "look at that rank's host"))
        # A group forms only if all ranks have a device of the same kind.
        store.set(f"device/{rank}", kind)
        self.at = WAITING
        kinds = {store.get(f"device/{peer}").decode() for peer in ranks}
        if kind and len(ranks) > 1 and kinds == {kind}:
            self._measure_groups(dist.PrefixStore("group", store), rank, nodes, device)
        self.at = "done"

    def _measure_groups(
        self,
        store: dist.Store,
        rank: int,
        nodes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        """Collective. Measures within each node, if there are several, then over all ranks."""
        self.at = "forming the group"
        num_ranks = sum(map(len, nodes))
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(
            backends, store=store, rank=rank, world_size=num_ranks, timeout=_NEVER
        )
        # Every rank creates the groups of all nodes, in the same order.
        groups = [dist.new_group([*node]) for node in nodes] if len(nodes) > 1 else []
        for node, group in zip(nodes, groups, strict=False):
            if rank in node and len(node) > 1:
                self._measure_sums(self.within_node, device, group)
        self._measure_sums(self.over_all, device, None)

    def _measure_sums(
        self, times: list[tuple[int, float]], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        """Collective in `group`. Appends (bytes, seconds) for each size; stops after a slow one."""
        num_ranks = dist.get_world_size(group)
        for size in _GPU_SIZES if device.type == "cuda" else _SIZES:
            self.at = f"the all-reduce of {size >> 10} KiB over {num_ranks} ranks"
            # A sum of ones is exact in float32: another result is a broken link or GPU.
            values = torch.ones(size // 4, device=device)
            sum_in_place(values, group)
            # The first sum also warms up the connections.
            if bool((values != num_ranks).any()):
                remedy = "NCCL_P2P_DISABLE=1 for a trial; a link or a GPU is defective"
                finding = f"a sum of ones came out wrong, in {self.at}"
                self.lines.append(bad("all-reduce", finding, remedy))
            start = time.monotonic()
            for _ in range(_NUM_TIMES):
                sum_in_place(values, group)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = (time.monotonic() - start) / _NUM_TIMES
            times.append((size, seconds))
            # All ranks must stop together.
            if any_rank(seconds > _SLOW_S, group):
                break

    def _check_pinned(self, device: torch.device) -> Result:
        """Measures copies from pinned host memory to the device."""
        name = "pinned memory"
        try:
            host = host_buffer(_PINNED_BYTES, device)
        except RuntimeError as error:
            remedy = "a larger memory limit (cgroup, --mem); ulimit -l unlimited"
            return bad(name, _first_line(error), remedy)
        buffer = torch.empty_like(host, device=device)
        seconds = 0.0
        # The first copy is a warm-up.
        for _ in range(2):
            start = time.monotonic()
            buffer.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            seconds = time.monotonic() - start
        rate = _PINNED_BYTES / seconds / 1e9
        expected = EXPECTED_FRACTION * self.card.host_gb_s if self.card else 0.0
        remedy = "nvidia-smi -q | grep -A3 'Link Width': a narrow PCIe link"
        finding = f"{rate:.1f} GB/s to the GPU, at least {expected:g} are expected"
        return rated(name, finding, remedy, value=rate, wanted=expected)

    def measure_within(
        self,
        seconds: float,
        store: dist.Store,
        rank: int,
        nodes: Sequence[Sequence[int]],
        local_rank: int,
    ) -> dict[str, Any]:
        """Collective. Calls `measure` with a deadline, and returns the fields of the report.

        NCCL's and gloo's own limits are later, or end the process.
        """
        # A connection serves one call at a time: the caller keeps its own if the thread hangs.
        clone = store.clone()  # type: ignore[attr-defined]
        try:
            within(seconds, lambda: self.measure(clone, rank, nodes, local_rank))
        except TimeoutError:
            pass
        except Exception as error:  # torch raises many kinds: rank 0 shows the text
            # C++ sources differ between ranks with the same problem.
            text = re.sub(r" *(with )?\[/[^\]]*\]", "", _first_line(error))
            finding = f"{self.at}: {type(error).__name__}: {text}"
            self.lines.append(bad("all-reduce", finding, f"{NO_CONNECTION}; NCCL_DEBUG=INFO"))
            self.at = "failed"
        return asdict(self)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def open_store(environ: Mapping[str, str], deadline_s: float, *, serves: bool) -> dist.Store:
    """Returns the store at MASTER_ADDR and MASTER_PORT, without waiting for other ranks.

    Raises RuntimeError.
    """
    store = dist.TCPStore(
        environ.get("MASTER_ADDR", "127.0.0.1"),
        int(environ["MASTER_PORT"]),
        int(environ["WORLD_SIZE"]),
        is_master=serves,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
    )
    store.set_timeout(_NEVER)
    return store


def main() -> None:
    """Runs one child of `LocalRanks`."""
    deadline_s = float(sys.argv[1])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(os.environ, deadline_s, serves=rank == 0)
    report = Measurement().measure_within(deadline_s, store, rank, [range(num_ranks)], rank)
    print(f"\n{ANSWER}{json.dumps(report)}", flush=True)
    store.set(f"reported/{rank}", "")
    # Rank 0 serves the store: it stays until all have reported.
    for peer in range(num_ranks) if rank == 0 else ():
        with suppress(RuntimeError):
            store.get(f"reported/{peer}")
    exit_process(0)


if __name__ == "__main__":
    main()
