"""Brings the results of all ranks to rank 0, merges them, and compares the nodes.

Ranks post values in torch's store, and rank 0 gathers them (`Exchange`). Every wait has a deadline.
Findings are the Results that one rank has. They are merged: one line if all ranks found the same,
else one line for each kind of finding, with the names of its ranks. A Report is what one rank has
measured of its device and of all-reduces (reduce.py). Nodes are compared too: their clocks, and
whether all of them see the same run folder. The *leader* of a node is its first rank.
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.observe.cards import Card
from grpo_spmd.tools.checkup.devices import card_of
from grpo_spmd.tools.checkup.disk import nearest_folder, scratch_in
from grpo_spmd.tools.checkup.file_trial import lock_and_append
from grpo_spmd.tools.checkup.launch import Launch
from grpo_spmd.tools.checkup.results import (
    LEVELS,
    Result,
    Target,
    bad,
    join_items,
    ok,
    plural,
    size_text,
    warning,
)

if TYPE_CHECKING:
    import torch.distributed as dist


# The report of one rank, as reduce.measure fills it.
Report = Mapping[str, Any]
WAITING = "waiting for the devices of the others"
FORMING = "forming the group"
# Bandwidth between nodes of GPUs below which the network is probably the wrong one.
_SLOW_GB_S = 1.0
_MAX_FACTS = 4
_NO_CONNECTION = "a firewall, or the wrong interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
# The fraction of the bandwidth in a card's data sheet that is expected.
_EXPECTED_FRACTION = 0.5
_POLL_S = 0.02
_CLOCK_ROUNDS = 5
_SKEW_S = 0.5
_CLOCK_S = 10.0
# A node waits this long for its turn: rank 0 asks one node's clock after the other.
_TURN_S = 120.0
# Lines that each node appends to the shared file.
_NUM_LINES = 20


@dataclass(frozen=True)
class RankFindings:
    """Holds what one rank has found."""

    host: str
    # Each result with the name of its group of checks.
    results: list[tuple[str, Result]]


# The findings by rank.
Findings = Mapping[int, RankFindings]


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns the ranks as text: "rank 3", or "ranks 0-7, 12"."""
    ordered, ranges = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in ranges]
    return f"rank{'s' * (len(ordered) != 1)} {join_items(texts)}"


def name_ranks(ranks: Sequence[int], findings: Findings) -> str:
    """Returns the ranks as text, with their hosts if there are several hosts."""
    hosts = sorted({findings[rank].host for rank in ranks if rank in findings})
    has_several = len({rank.host for rank in findings.values()}) > 1
    return format_ranks(ranks) + (f" on {join_items(hosts, 3)}" if has_several and hosts else "")


def merge_findings(findings: Findings) -> Iterator[tuple[str, Result]]:
    """Yields (group, line): one line if all ranks found the same, else one for each finding.

    The lines are in the order of the checks, group by group.
    """
    merged: dict[str, dict[str, dict[int, list[Result]]]] = {}
    for rank, rank_findings in findings.items():
        for group, result in rank_findings.results:
            by_rank = merged.setdefault(group, {}).setdefault(result.name, {})
            by_rank.setdefault(rank, []).append(result)
    for group, names in merged.items():
        for results in names.values():
            for line in _merge_results(results, findings):
                yield group, line
            for line in _compare_facts(group, results, findings):
                yield group, line


def _merge_results(results: Mapping[int, Sequence[Result]], findings: Findings) -> Iterator[Result]:
    """Yields the merged lines of one check. `results` has its lines by rank."""
    kinds: dict[tuple[str, str], dict[int, Result]] = defaultdict(dict)
    for rank in sorted(results):
        for line in results[rank]:
            # Numbers may differ between ranks with the same problem.
            text = "" if line.level == "ok" else re.sub(r"[\d.,]+", "#", line.finding)
            kinds[line.level, text].setdefault(rank, line)
    for level in reversed(LEVELS):
        for (kind_level, _), lines in kinds.items():
            # Once the ranks with a problem have been named, the others need no line.
            if kind_level != level or (level == "ok" and len(kinds) > 1):
                continue
            line = next(iter(lines.values()))
            names = f" ({name_ranks([*lines], findings)})" if len(lines) < len(results) else ""
            yield replace(line, finding=line.finding + names)


def _compare_facts(
    group: str, results: Mapping[int, Sequence[Result]], findings: Findings
) -> Iterator[Result]:
    """Yields a warning for each fact that differs between ranks.

    A fact is a value that must be the same on all ranks, such as a version.
    """
    facts = {
        rank: {name: value for line in lines for name, value in line.facts.items()}
        for rank, lines in results.items()
    }
    name = next(iter(results.values()))[0].name
    make, remedy = warning, "set it alike everywhere"
    if group == "versions":
        make, remedy = bad, "one environment and checkout that all nodes see"
    lines: list[Result] = []
    for fact in dict.fromkeys(fact for rank_facts in facts.values() for fact in rank_facts):
        values: dict[str, list[int]] = defaultdict(list)
        for rank, rank_facts in facts.items():
            values[rank_facts.get(fact, "not set")].append(rank)
        if len(values) > 1:
            # The majority is taken as right.
            common = max(values, key=lambda value: len(values[value]))
            texts = {
                value: f"{value[:80]} on {name_ranks(ranks, findings)}"
                for value, ranks in values.items()
            }
            odd = join_items((text for value, text in texts.items() if value != common), 3)
            lines.append(make(name, f"ranks differ in {fact}: {odd}, {texts[common]}", remedy))
    yield from lines[:_MAX_FACTS]
    if len(lines) > _MAX_FACTS:
        yield make(name, f"ranks differ in {len(lines) - _MAX_FACTS} more of these", remedy)


# Devices and all-reduces (reduce.py measures them)


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
    failures = [*_failure_lines(reports, findings)]
    yield from failures
    stuck = {
        rank: report["at"]
        for rank, report in reports.items()
        if report["at"] != "done" and "failed" not in report
    }
    silent = [rank for node in nodes for rank in node if rank not in reports]
    if silent:
        yield bad(
            name,
            f"{name_ranks(silent, findings)} gave no answer within {seconds:g} s",
            "py-spy dump, or dmesg, on that host",
        )
    elif stuck and not failures:
        # Ranks that wait for the others' devices are not the cause, if another rank is stuck.
        causes = {rank: at for rank, at in stuck.items() if at != WAITING} or stuck
        # The line tells where the first of them is stuck.
        ranks, at = name_ranks([*causes], findings), next(iter(causes.values()))
        yield bad(name, f"{ranks} did not come through within {seconds:g} s: {at}", _NO_CONNECTION)
    wrong_ranks = [rank for rank, report in reports.items() if "wrong" in report]
    if wrong_ranks:
        yield bad(
            name,
            f"the sum of ones came out wrong on {name_ranks(wrong_ranks, findings)}",
            "NCCL_P2P_DISABLE=1 for a trial; a link or a GPU is defective",
        )
    if not silent and not failures and not stuck:
        yield _device_line(reports, findings)
        yield from _pinned_lines(reports, findings)
        for key in ("node", "all"):
            yield from _speed_lines(key, reports, nodes)


def _failure_lines(reports: Mapping[int, Report], findings: Findings) -> Iterator[Result]:
    """Yields a line for each kind of failure, with its ranks.

    A rank without a device fails first. Ranks that wait for it fail later, with a worse reason, so
    they get no line.
    """
    without_device = {
        rank: report["error"] for rank, report in reports.items() if "error" in report
    }
    failed = {
        rank: f"{report['at']}: {report['failed']}"
        for rank, report in reports.items()
        if "failed" in report
    }
    kinds: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, text in (without_device or failed).items():
        # C++ sources, ports and addresses differ between ranks with the same problem.
        text = re.sub(r" *(with )?\[/[^\]]*\]", "", text)
        kinds[re.sub(r"[\d.]+", "#", text)][rank] = text
    for texts in kinds.values():
        rank, text = next(iter(texts.items()))
        finding, _, remedy = text.partition("; ")
        finding += f" ({name_ranks([*texts], findings)})" if len(findings) > 1 else ""
        if without_device:
            yield bad("device", finding, remedy or "look at that rank's host")
        else:
            details = "NCCL_DEBUG=INFO, TORCH_CPP_LOG_LEVEL=INFO say more"
            is_forming = reports[rank]["at"] == FORMING
            yield bad("all-reduce", finding, _NO_CONNECTION if is_forming else details)


def _device_line(reports: Mapping[int, Report], findings: Findings) -> Result:
    """Returns the line about the kinds of devices, which should be the same on all ranks."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for rank, report in reports.items():
        kinds["cpu" if report["device"] == "cpu" else report["name"]].append(rank)
    if len(kinds) > 1:
        text = "; ".join(f"{kind} on {name_ranks(r, findings)}" for kind, r in kinds.items())
        make = bad if "cpu" in kinds else warning
        return make(
            "device",
            f"ranks differ: {text}",
            "nodes of one kind, or look why torch finds no GPU there",
        )
    kind = next(iter(kinds))
    device = "the CPU" if kind == "cpu" else kind
    return ok("device", f"torch uses {device} on {plural(len(reports), 'rank')}")


def _pinned_lines(reports: Mapping[int, Report], findings: Findings) -> Iterator[Result]:
    """Yields the line about copies from pinned host memory to the GPU."""
    name = "pinned memory"
    errors = {
        rank: report["pinned_error"] for rank, report in reports.items() if "pinned_error" in report
    }
    rates = {
        rank: report["pinned_gb_s"] for rank, report in reports.items() if "pinned_gb_s" in report
    }
    if errors:
        yield bad(
            name,
            f"{next(iter(errors.values()))} ({name_ranks([*errors], findings)})",
            "a larger memory limit (cgroup, --mem); ulimit -l unlimited",
        )
    elif rates:
        slowest = min(rates, key=lambda rank: rates[rank])
        card = _card(reports[slowest])
        finding = f"{rates[slowest]:.1f} GB/s to the GPU at least"
        if card and rates[slowest] < _EXPECTED_FRACTION * card.host_gb_s:
            finding += f", on {name_ranks([slowest], findings)}, of about {card.host_gb_s:g}"
            yield warning(
                name, finding, "nvidia-smi -q | grep -A3 'Link Width': a narrow PCIe link"
            )
        else:
            yield ok(name, finding)


def _card(report: Report) -> Card | None:
    """Returns the card of a rank's GPU, or None if it is unknown or the rank is on a CPU."""
    return card_of(report["name"], report["gib"] * 1024) if report["device"] == "cuda" else None


def _speed_lines(
    key: str, reports: Mapping[int, Report], nodes: Sequence[Sequence[int]]
) -> Iterator[Result]:
    """Yields the line about the speed of all-reduces.

    `key` is "node" for all-reduces within each node, or "all" for all-reduces of all ranks.
    """
    # Each row has (bytes, seconds) of the sizes that one rank has measured.
    rows = [report[key] for report in reports.values() if report.get(key)]
    if not rows:
        return
    # A collective is as slow as its slowest rank.
    slowest = [max(sizes, key=lambda row: row[1]) for sizes in zip(*rows, strict=False)]
    size, seconds = slowest[-1]
    # Within a node NVLink or PCIe carries the data, between nodes the network.
    is_inner = key == "node" or len(nodes) == 1
    num_ranks = len(reports) if key == "all" else max(map(len, nodes))
    # Bus bandwidth as nccl-tests counts it: a ring moves 2 (n - 1) / n of the bytes.
    rate = 2 * (num_ranks - 1) / num_ranks * size / seconds / 1e9
    report = next(iter(reports.values()))
    is_gpu, card = report["device"] == "cuda", _card(report)
    scope = f"over {len(nodes)} nodes"
    if is_inner:
        scope = "within each node" if key == "node" else "within the node"
    times = ", ".join(f"{size_text(size)} {1e3 * took:.3g} ms" for size, took in slowest)
    finding = f"{'NCCL' if is_gpu else 'gloo'} {scope}, {num_ranks} ranks: {times}"
    finding += f"; {rate:.3g} GB/s (bus)"
    if card and is_inner:
        finding += f", of a link's {card.link_gb_s:g}"
    if card and is_inner and rate < _EXPECTED_FRACTION * card.link_gb_s:
        yield warning(
            "all-reduce",
            finding,
            "nvidia-smi topo -m, nvlink -s; NCCL_DEBUG=INFO: P2P, SHM or NET?",
        )
    elif is_gpu and not is_inner and rate < _SLOW_GB_S:
        yield warning(
            "all-reduce",
            f"{finding}: the network for control, not for data?",
            "NCCL_DEBUG=INFO: IB, EFA or Socket? NCCL_SOCKET_IFNAME and NCCL_IB_HCA name others",
        )
    else:
        yield ok("all-reduce", finding)


# The exchange of values over torch's store


class Exchange:
    """Exchanges values between ranks: each rank posts under a key, and rank 0 gathers.

    All ranks can hear what rank 0 has posted. Reads poll the store, because a wait inside the store
    would not notice signals.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks

    def post(self, key: str, value: Any) -> None:
        """Stores this rank's value, which must be plain JSON."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def gather(
        self, key: str, seconds: float, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Returns the values of the ranks (default: all) that have posted within `seconds`."""
        deadline = time.monotonic() + seconds
        values: dict[int, Any] = {}
        for rank in range(self.num_ranks) if ranks is None else ranks:
            name = f"{key}/{rank}"
            # After the deadline each rank is still asked once.
            while not (is_there := self.store.check([name])) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if is_there:
                values[rank] = json.loads(self.store.get(name))
        return values

    def hear(self, key: str, seconds: float) -> Any:
        """Returns what rank 0 has posted. Raises TimeoutError after `seconds`."""
        values = self.gather(key, seconds, [0])
        if not values:
            raise TimeoutError(f"rank 0 said nothing of {key!r} within {seconds:g} s")
        return values[0]


# Clocks


def answer_clock(store: dist.Store, rank: int, clock: Callable[[], float] = time.time) -> None:
    """Tells rank 0 this node's time. Raises RuntimeError if rank 0 does not ask."""
    for number in range(_CLOCK_ROUNDS):
        # Only the first question may be late: rank 0 asks the other nodes before.
        limit = timedelta(seconds=_CLOCK_S if number else _TURN_S)
        store.wait([f"clock/{rank}/{number}/ask"], limit)
        store.set(f"clock/{rank}/{number}/answer", repr(clock()))


def measure_clocks(
    store: dist.Store, ranks: Sequence[int], clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Returns (skew, uncertainty) in seconds for each rank that answers.

    The skew is the rank's clock minus rank 0's.
    """
    skews: dict[int, tuple[float, float]] = {}
    for rank in ranks:
        rounds: list[tuple[float, float]] = []
        with suppress(RuntimeError):
            for number in range(_CLOCK_ROUNDS):
                key = f"clock/{rank}/{number}"
                start = clock()
                store.set(f"{key}/ask", "")
                store.wait([f"{key}/answer"], timedelta(seconds=_CLOCK_S))
                end = clock()
                # The clock was read at some time between start and end.
                answer = float(store.get(f"{key}/answer"))
                rounds.append((answer - (start + end) / 2, (end - start) / 2))
            skews[rank] = min(rounds, key=lambda measured: measured[1])
    return skews


def check_clocks(store: dist.Store, leaders: Sequence[int], findings: Findings) -> Iterator[Result]:
    """Compares the clocks of all nodes. Rank 0 calls it.

    `leaders` are the first ranks of the other nodes, which call `answer_clock`.
    """
    if not leaders:
        return
    skews = measure_clocks(store, leaders)
    silent = [rank for rank in leaders if rank not in skews]
    if silent:
        yield warning(
            "clocks",
            f"{name_ranks(silent, findings)} did not answer within {_CLOCK_S:g} s",
            "see its output",
        )
    off = [
        f"{findings[rank].host} {skew:+.1f} s"
        for rank, (skew, uncertainty) in skews.items()
        if abs(skew) - uncertainty > _SKEW_S
    ]
    if off:
        yield warning(
            "clocks",
            f"against {findings[0].host}: {join_items(off, 4)}: times of logs, dumps and locks "
            "do not agree",
            "chronyc tracking; systemctl restart chronyd",
        )
    elif skews:
        bound = max(abs(skew) + uncertainty for skew, uncertainty in skews.values())
        yield ok("clocks", f"of {len(skews) + 1} nodes agree within {1e3 * bound:.2g} ms")


# The run folder


def _line_of(rank: int) -> str:
    """Returns the line that a rank appends. It is long enough to show if lines get mixed."""
    return f"rank {rank}{'.' * 100}"


def try_folder(folder: str, rank: int) -> str:
    """Tries rank 0's scratch folder from this node.

    Returns "unseen" if the folder is not visible here, else the result of lock_and_append.
    """
    if not (Path(folder) / "lock").exists():
        return "unseen"
    try:
        return lock_and_append(folder, _line_of(rank), _NUM_LINES)
    except OSError as error:
        return str(error)


def check_shared_folder(
    exchange: Exchange,
    target: Target,
    leaders: Sequence[int],
    findings: Findings,
    seconds: float,
) -> Iterator[Result]:
    """Checks whether the other nodes see the same run_dir, its locks and its appended lines.

    Rank 0 calls it. `leaders` are the first ranks of the other nodes, which call `try_folder`.
    """
    name, folder = "shared run_dir", nearest_folder(target.run_dir)
    try:
        with scratch_in(folder) as scratch, open(scratch / "lock", "w") as lock:
            (scratch / "appended").touch()
            with suppress(OSError):
                # Rank 0 holds the lock until the others have tried to take it.
                fcntl.flock(lock, fcntl.LOCK_EX)
            exchange.post("folder", str(scratch))
            answers = exchange.gather("folder", seconds, leaders)
            lines = (scratch / "appended").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        # The others wait for this answer.
        exchange.post("folder", None)
        yield bad(name, f"rank 0 cannot write in {folder}: {error.strerror}", "see run_dir above")
        return
    blind = [rank for rank in leaders if answers.get(rank, "unseen") == "unseen"]
    if blind:
        verb = "does" if len(blind) == 1 else "do"
        yield bad(
            name,
            f"{name_ranks(blind, findings)} {verb} not see what rank 0 writes in {folder}",
            "a run_dir on a file system that all nodes mount at the same path",
        )
        return
    expected = {_line_of(rank) for rank in leaders}
    num_lines = _NUM_LINES * len(leaders)
    lost = num_lines - sum(line in expected for line in lines)
    if lost:
        yield warning(
            name,
            f"{lost} of {num_lines} lines that nodes appended to one file are lost or mixed",
            "nodes write files of their own; keep other jobs out of run_dir",
        )
    unlocked = [rank for rank, answer in answers.items() if answer != "held"]
    if unlocked:
        yield warning(
            name,
            f"{name_ranks(unlocked, findings)} does not see rank 0's lock: two jobs in one "
            "run_dir would not notice",
            "mount it with locks (NFS: without nolock; Lustre: -o flock)",
        )
    if not lost and not unlocked:
        yield ok(name, f"all {len(leaders) + 1} nodes see it, its locks and its appended lines")


def missing_ranks_result(missing: Sequence[int], seconds: float, launch: Launch) -> Result:
    """Returns the line that names the ranks that did not join within `seconds`."""
    nodes = sorted({rank // max(1, launch.local_ranks) for rank in missing})
    finding = format_ranks(missing)
    if launch.num_ranks > launch.local_ranks:
        finding += f" (node {join_items(nodes)}, counted from 0)"
    return bad(
        "ranks",
        f"{finding} did not come within {seconds:g} s",
        "see its output; does its host reach MASTER_ADDR:MASTER_PORT? --deadline waits longer",
    )
