"""Measures devices and all-reduces: the part of the checkup that uses torch.

Of a GPU it measures the speed of copies from pinned host memory, and of all-reduces the time for
several sizes. All-reduces also check that the ranks reach each other and that sums are right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo_spmd.config.errors import ConfigError, within
from grpo_spmd.distributed.collectives import any_rank, sum_in_place
from grpo_spmd.distributed.machine import rank_device
from grpo_spmd.model.offload import host_buffer
from grpo_spmd.tools.checkup.exchange import (
    EXPECTED_FRACTION,
    NO_CONNECTION,
    WAITING,
    Exchange,
    Launch,
    Report,
)
from grpo_spmd.tools.checkup.results import Result, bad, ok, rated

_SIZES = (1 << 16, 1 << 20, 16 << 20, 64 << 20)  # bytes
_GPU_SIZES = (*_SIZES, 256 << 20)
_NUM_TIMES = 4  # how often an all-reduce is timed
_SLOW_S = 1.0  # larger sizes are not tried after an all-reduce that takes longer
_PINNED_BYTES = 256 << 20  # of the copy to a GPU
# The timeout of torch's own waits. The checkup keeps its deadline, which is shorter, outside torch.
_NEVER = timedelta(hours=1)


class RankExchange(Exchange):
    """An Exchange over the store at MASTER_ADDR:MASTER_PORT, which also measures this rank."""

    def __init__(self, launch: Launch, deadline_s: float) -> None:
        """Serves torch's key-value store, or connects to it, without waiting for other ranks.

        Raises RuntimeError if the store cannot be reached within `deadline_s`.
        """
        environ = launch.environ
        store = dist.TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            launch.num_ranks,
            is_master=launch.serves_store,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
        )
        store.set_timeout(_NEVER)
        # The prefix keeps keys of an earlier attempt of the same torchrun apart.
        restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"checkup/{environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}"
        super().__init__(dist.PrefixStore(prefix, store), launch.rank, launch.num_ranks)
        self._local_rank, self._deadline_s = launch.local_rank, deadline_s

    def measure(self, nodes: Sequence[Sequence[int]]) -> Report:
        """Collective. Returns what this rank has measured of its device and of all-reduces.

        `nodes` has the ranks of each node. A failure is a line of the report, and what is not
        measured by the rank's deadline is missing. The deadline is kept here, because the timeouts
        of NCCL and gloo come later or end the process.
        """
        report = Report()
        # A connection to the store serves one call at a time. The thread has its own, so that
        # self.store is free if the thread hangs.
        store = self.store.clone()  # type: ignore[attr-defined]
        try:
            within(self._deadline_s, lambda: self._measure(report, store, nodes))
        except TimeoutError:
            pass
        except Exception as error:  # torch raises many kinds; rank 0 shows the text
            # Without the place in torch's C++ sources, which may differ between ranks that have the
            # same problem, their lines can be merged.
            text = re.sub(r" *(with )?\[/[^\]]*\]", "", _first_line(error))
            finding = f"{report.at}: {type(error).__name__}: {text}"
            report.lines.append(bad("all-reduce", finding, f"{NO_CONNECTION}; NCCL_DEBUG=INFO"))
            report.begin("failed")
        return report

    def _measure(self, report: Report, store: dist.Store, nodes: Sequence[Sequence[int]]) -> None:
        """Collective. Measures this rank's device, then all-reduces: within each node, if there are
        several nodes, and over all ranks."""
        report.begin("measuring its device")
        kind = ""  # "cuda" or "cpu"; "" if the rank has no device
        try:
            device = rank_device(self._local_rank)
            name = "the CPU"
            if device.type == "cuda":
                torch.cuda.set_device(device)
                name = torch.cuda.get_device_name()
                report.set_gpu(name, torch.cuda.mem_get_info()[1] / 2**30)
                report.lines.append(_check_pinned(device, report))
            kind = device.type
            report.lines.append(ok("device", f"torch uses {name}", {"device": kind}))
        except (ConfigError, RuntimeError) as error:
            finding, _, remedy = _first_line(error).partition("; ")
            report.lines.append(bad("device", finding, remedy or "look at that rank's host"))
        # A process group is formed only if all ranks have a device, and of the same kind. The ranks
        # tell each other over the store.
        store.set(f"device/{self.rank}", kind)
        report.begin(WAITING)
        kinds = {store.get(f"device/{rank}").decode() for rank in range(self.num_ranks)}
        if kind and self.num_ranks > 1 and kinds == {kind}:
            report.begin("forming the group")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo",
                store=dist.PrefixStore("group", store),
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=_NEVER,
            )
            # Every rank creates the groups of all nodes, in the same order.
            groups = [dist.new_group([*node]) for node in nodes] if len(nodes) > 1 else []
            for node, group in zip(nodes, groups, strict=False):
                if self.rank in node and len(node) > 1:
                    report.within_node.extend(_measure_sums(report, device, group))
            report.over_all.extend(_measure_sums(report, device, None))
        report.begin("done")


def _measure_sums(
    report: Report, device: torch.device, group: dist.ProcessGroup | None
) -> list[tuple[int, float]]:
    """Collective in `group` (None: all ranks). Returns (bytes, seconds of an all-reduce) by size.

    A wrong sum is a line of `report`. Stops after a size that took longer than _SLOW_S.
    """
    num_ranks = dist.get_world_size(group)
    times = []
    for size in _GPU_SIZES if device.type == "cuda" else _SIZES:
        report.begin(f"the all-reduce of {size >> 10} KiB over {num_ranks} ranks")
        # A sum of ones is exact in float32: another result is a broken link or GPU.
        values = torch.ones(size // 4, device=device)
        sum_in_place(values, group)
        # The first sum also warms up the connections.
        if bool((values != num_ranks).any()):
            remedy = "NCCL_P2P_DISABLE=1 for a trial; a link or a GPU is defective"
            finding = f"a sum of ones came out wrong, in {report.at}"
            report.lines.append(bad("all-reduce", finding, remedy))
        start = time.monotonic()
        for _ in range(_NUM_TIMES):
            sum_in_place(values, group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.monotonic() - start) / _NUM_TIMES
        times.append((size, seconds))
        # All ranks must stop after the same size.
        if any_rank(seconds > _SLOW_S, group):
            break
    return times


def _check_pinned(device: torch.device, report: Report) -> Result:
    """Returns a line about how fast pinned (page-locked) host memory is copied to the device.

    It is a warning if the speed is far below the card's, and bad if there is no such memory."""
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
    expected = EXPECTED_FRACTION * report.card.host_gb_s if report.card else 0.0
    remedy = "nvidia-smi -q | grep -A3 'Link Width': a narrow PCIe link"
    finding = f"{rate:.1f} GB/s to the GPU, at least {expected:g} are expected"
    return rated(name, finding, remedy, value=rate, wanted=expected)


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's text, shortened if it is very long."""
    return str(error).strip().partition("\n")[0][:300]
