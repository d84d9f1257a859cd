"""Merges the results of all ranks: one line for all, or lines that name the ranks that differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_spmd.observe.cards import Card
from grpo_spmd.tools.checkup.devices import card_of
from grpo_spmd.tools.checkup.results import (
    LEVELS,
    Result,
    bad,
    join_items,
    ok,
    plural,
    size_text,
    warning,
)

Report = Mapping[str, Any]  # of one rank, as reduce.measure fills it
WAITING = "waiting for the devices of the others"
FORMING = "forming the group"
_SLOW_GB_S = 1.0  # between nodes of GPUs
_MAX_FACTS = 4
_NO_CONNECTION = "a firewall, or the wrong interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
_EXPECTED_FRACTION = 0.5  # of the bandwidth in the card's data sheet


@dataclass(frozen=True)
class RankFindings:
    """What one rank has found."""

    host: str
    results: list[tuple[str, Result]]  # with their groups


Findings = Mapping[int, RankFindings]  # by rank


def format_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-7, 12"."""
    ordered, ranges = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges]
    return f"rank{'s' * (len(ordered) != 1)} {join_items(texts)}"


def name_ranks(ranks: Sequence[int], findings: Findings) -> str:
    """Ranks with their hosts, if there are several hosts."""
    hosts = sorted({findings[rank].host for rank in ranks if rank in findings})
    has_several = len({rank.host for rank in findings.values()}) > 1
    return format_ranks(ranks) + (f" on {join_items(hosts, 3)}" if has_several and hosts else "")


def merge_findings(findings: Findings) -> Iterator[tuple[str, Result]]:
    """Yields one line for what all ranks found alike; else one for each kind, with its ranks. In
    the order of the checks, by group."""
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
    """`results`: one check's lines, by the ranks that made it."""
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
            texts = {v: f"{v[:80]} on {name_ranks(ranks, findings)}" for v, ranks in values.items()}
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
    """Yields the lines of devices and all-reduces. `nodes`: the ranks of each node."""
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
        # Where the first of them is stuck.
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
    """A rank without a device fails first. Ranks that wait for it fail later, with a worse reason:
    they get no line then."""
    without_device = {rank: r["error"] for rank, r in reports.items() if "error" in r}
    failed = {rank: f"{r['at']}: {r['failed']}" for rank, r in reports.items() if "failed" in r}
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
    name = "pinned memory"
    errors = {rank: r["pinned_error"] for rank, r in reports.items() if "pinned_error" in r}
    rates = {rank: r["pinned_gb_s"] for rank, r in reports.items() if "pinned_gb_s" in r}
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
    return card_of(report["name"], report["gib"] * 1024) if report["device"] == "cuda" else None


def _speed_lines(
    key: str, reports: Mapping[int, Report], nodes: Sequence[Sequence[int]]
) -> Iterator[Result]:
    """`key`: "node" for all-reduces within each node, "all" for those of all ranks."""
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
