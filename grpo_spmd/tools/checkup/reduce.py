"""Measures devices and all-reduces: the part of the checkup that uses torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from grpo_spmd.checks.memory import size_text
from grpo_spmd.config.errors import ConfigError, within
from grpo_spmd.distributed.collectives import any_rank, sum_in_place
from grpo_spmd.distributed.machine import rank_device
from grpo_spmd.observe.cards import Card, find_device
from grpo_spmd.tools.checkup.exchange import (
    Exchange,
    Findings,
    Launch,
    RankFindings,
    merge_findings,
    name_ranks,
)
from grpo_spmd.tools.checkup.results import Result, bad, ok, rated

WAITING = "waiting for the devices of the others"
NO_CONNECTION = "a firewall, or the wrong interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
# The fraction of the bandwidth in a card's data sheet that is expected.
EXPECTED_FRACTION = 0.5
_SIZES = (1 << 16, 1 << 20, 16 << 20, 64 << 20)  # bytes
_GPU_SIZES = (*_SIZES, 256 << 20)
_NUM_TIMES = 4
_SLOW_S = 1.0  # larger sizes are not tried after an all-reduce that takes longer
# The timeout of torch's own waits. The checkup keeps its deadline, which is shorter, outside torch.
_NEVER = timedelta(hours=1)


@dataclass
class Report:
    """What one rank has measured.

    It is filled step by step, so that the report of a rank that hangs shows how far it got.
    """

    at: str = "starting"  # "done", "failed", or what the rank is doing
    lines: list[Result] = field(default_factory=list)
    gpu: tuple[str, float] | None = None  # name and GiB of memory; None on a CPU
    # (bytes, seconds) of all-reduces within its node, if there are several, and over all ranks.
    within_node: list[tuple[int, float]] = field(default_factory=list)
    over_all: list[tuple[int, float]] = field(default_factory=list)

    @property
    def card(self) -> Card | None:
        """The card of the rank's GPU; None if it is unknown or the rank is on a CPU."""
        return find_device(*self.gpu) if self.gpu else None


class RankExchange(Exchange):
    """An Exchange over the store at MASTER_ADDR:MASTER_PORT, which also measures this rank."""

    def __init__(self, launch: Launch, deadline_s: float) -> None:
        """Serves or opens the store, without waiting for other ranks.

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
        restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"checkup/{environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}"
        super().__init__(dist.PrefixStore(prefix, store), launch.rank, launch.num_ranks)
        self._local_rank, self._deadline_s = launch.local_rank, deadline_s

    def compare(self, nodes: Sequence[Sequence[int]], findings: Findings) -> Iterator[Result]:
        """Collective. Measures as the other ranks do, and returns the lines about all ranks.

        Only rank 0 calls it; the others post what `measure` returns.
        """
        self.post("report", self.measure(nodes))
        reports = msgspec.convert(self.gather("report", 5.0), dict[int, Report])
        return check_reports(reports, nodes, findings, self._deadline_s)

    def measure(self, nodes: Sequence[Sequence[int]]) -> Report:
        """Collective. Returns what this rank has measured until its deadline.

        `nodes` has the ranks of each node. The deadline is kept here, because the timeouts of NCCL
        and gloo come later or end the process.
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
            report.at = "failed"
        return report

    def _measure(self, report: Report, store: dist.Store, nodes: Sequence[Sequence[int]]) -> None:
        """Collective. Measures this rank's device, then all-reduces: within each node, if there are
        several nodes, and over all ranks."""
        report.at = "measuring its device"
        kind = ""
        try:
            device = rank_device(self._local_rank)
            name = "the CPU"
            if device.type == "cuda":
                torch.cuda.set_device(device)
                name = torch.cuda.get_device_name()
                report.gpu = (name, torch.cuda.mem_get_info()[1] / 2**30)
            kind = device.type
            report.lines.append(ok("device", f"torch uses {name}", {"device": kind}))
        except (ConfigError, RuntimeError) as error:
            finding, _, remedy = _first_line(error).partition("; ")
            report.lines.append(bad("device", finding, remedy or "look at that rank's host"))
        # A group is formed only if all ranks have a device, and of the same kind.
        store.set(f"device/{self.rank}", kind)
        report.at = WAITING
        kinds = {store.get(f"device/{rank}").decode() for rank in range(self.num_ranks)}
        if kind and self.num_ranks > 1 and kinds == {kind}:
            report.at = "forming the group"
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
        report.at = "done"


def _measure_sums(
    report: Report, device: torch.device, group: dist.ProcessGroup | None
) -> list[tuple[int, float]]:
    """Collective in `group`. Times all-reduces: returns (bytes, seconds) for each size.

    Stops after a size that took longer than _SLOW_S.
    """
    num_ranks = dist.get_world_size(group)
    times = []
    for size in _GPU_SIZES if device.type == "cuda" else _SIZES:
        report.at = f"the all-reduce of {size >> 10} KiB over {num_ranks} ranks"
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


def check_reports(
    reports: Mapping[int, Report],
    nodes: Sequence[Sequence[int]],
    findings: Findings,
    seconds: float,
) -> Iterator[Result]:
    """Yields the lines about devices and all-reduces.

    `nodes` has the ranks of each node. `seconds` is the deadline that the ranks had.
    """
    name = "all-reduce"
    measured = {
        rank: RankFindings(
            rank_findings.host, [("links", line) for line in reports.get(rank, Report()).lines]
        )
        for rank, rank_findings in findings.items()
    }
    lines = [line for _, line in merge_findings(measured)]
    failed = {line.name for line in lines if line.level == "bad"} & {"device", name}
    # If a rank has no device, the all-reduces of the others fail as well. Their lines are left out,
    # since they do not tell the cause.
    yield from (line for line in lines if line.name != name or "device" not in failed)
    stuck = {
        rank: report.at for rank, report in reports.items() if report.at not in ("done", "failed")
    }
    silent = [rank for rank in findings if rank not in reports]
    if silent:
        yield bad(
            name,
            f"{name_ranks(silent, findings)} gave no answer within {seconds:g} s",
            "py-spy dump, or dmesg, on that host",
        )
    elif stuck and not failed:
        # Ranks that wait for the devices of others are not the cause if another rank is stuck.
        causes = {rank: at for rank, at in stuck.items() if at != WAITING} or stuck
        # The line says what the first of them was doing.
        ranks, at = name_ranks([*causes], findings), next(iter(causes.values()))
        yield bad(name, f"{ranks} did not finish within {seconds:g} s: {at}", NO_CONNECTION)
    elif not failed:
        card = reports[0].card
        # Within a node NVLink or PCIe carries the data, between nodes the network.
        link = EXPECTED_FRACTION * card.link_gb_s if card else 0.0
        # A lower bandwidth between GPU nodes probably means that the wrong network is used.
        network = 1.0 if reports[0].gpu else 0.0
        inner = [report.within_node for report in reports.values()]
        yield from _speed_line("within each node", inner, max(map(len, nodes)), link)
        outer = [report.over_all for report in reports.values()]
        expected = link if len(nodes) == 1 else network
        yield from _speed_line(f"over {len(nodes)} nodes", outer, len(reports), expected)


def _speed_line(
    scope: str,
    measured: Sequence[Sequence[tuple[int, float]]],
    num_ranks: int,
    expected_gb_s: float,
) -> Iterator[Result]:
    """Yields a line about the speed of all-reduces among `num_ranks` ranks, if any were measured.

    `measured` has a list for each rank, with (bytes, seconds) for each size.
    """
    # An all-reduce is as slow as its slowest rank. A rank that is alone in its node has an empty
    # list.
    slowest = [
        max(sizes, key=lambda row: row[1]) for sizes in zip(*filter(None, measured), strict=False)
    ]
    if not slowest:
        return
    size, seconds = slowest[-1]
    # The bus bandwidth as nccl-tests defines it: a ring moves 2 (n - 1) / n of the bytes.
    rate = 2 * (num_ranks - 1) / num_ranks * size / seconds / 1e9
    times = ", ".join(f"{size_text(size)} {1e3 * took:.3g} ms" for size, took in slowest)
    finding = f"{scope}, {num_ranks} ranks: {times}; {rate:.3g} GB/s (bus)"
    remedy = (
        f"at least {expected_gb_s:g} are expected. NCCL_DEBUG=INFO: P2P, SHM, IB or Socket? "
        "nvidia-smi topo -m and nvlink -s show links, NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose "
        "networks"
    )
    yield rated("all-reduce", finding, remedy, value=rate, wanted=expected_gb_s)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
