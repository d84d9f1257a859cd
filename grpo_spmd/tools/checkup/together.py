"""What several ranks found, as one: who differs is named. Pure."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_spmd.tools.checkup.devices import card_of
from grpo_spmd.tools.checkup.results import LEVELS, Result, listed, plural, size_of

_SLOW_GB_S = 1.0  # between nodes of GPUs
_MOST_FACTS = 4
_NO_WAY = "a firewall, or the wrong interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
_SHARE = 0.5  # of a link's figure from which on a measured all-reduce is as it should be


@dataclass(frozen=True)
class Rank:
    """What one rank brings."""

    host: str
    found: list[tuple[str, Result]]  # (group, line)


def as_ranges(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-7, 12"."""
    ordered, parts = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return f"rank{'s' * (len(ordered) != 1)} {listed(texts)}"


def named(ranks: Sequence[int], of: Mapping[int, Rank]) -> str:
    """With their hosts, where there are several."""
    hosts = sorted({of[rank].host for rank in ranks if rank in of})
    several = len({each.host for each in of.values()}) > 1
    return as_ranges(ranks) + (f" on {listed(hosts, 3)}" if several and hosts else "")


def merged(of: Mapping[int, Rank]) -> Iterator[tuple[str, Result]]:
    """One line for what all found alike; where they differ, one a kind, with the ranks. In the order of the checks."""
    order: dict[tuple[str, str], None] = {}
    for each in of.values():
        order |= dict.fromkeys((group, result.name) for group, result in each.found)
    groups = list(dict.fromkeys(group for group, _ in order))
    for group, name in sorted(order, key=lambda key: groups.index(key[0])):
        found = {
            rank: [line for at, line in each.found if (at, line.name) == (group, name)]
            for rank, each in of.items()
        }
        looked = {rank: lines for rank, lines in found.items() if lines}
        yield from ((group, line) for line in _of_one_name(group, looked, of))


def _of_one_name(
    group: str, looked: Mapping[int, Sequence[Result]], of: Mapping[int, Rank]
) -> Iterator[Result]:
    """`looked`: what each rank that looked at this found; each may have several lines."""
    kinds: dict[tuple[str, str], list[tuple[int, Result]]] = {}
    for rank, lines in looked.items():
        for line in lines:
            plain = "" if line.level == "ok" else re.sub(r"[\d.,]+", "#", line.found)
            kinds.setdefault((line.level, plain), []).append((rank, line))
    for (level, _), lines_of in sorted(
        kinds.items(), key=lambda kind: LEVELS.index(kind[0][0]), reverse=True
    ):
        ranks, (_, first) = (
            sorted({rank for rank, _ in lines_of}),
            min(lines_of, key=lambda line: line[0]),
        )
        if level == "ok" and len(kinds) > 1:
            continue  # the others are well: those who are not have been named
        who = f" ({named(ranks, of)})" if len(ranks) < len(looked) else ""
        yield replace(first, found=first.found + who)
    yield from _unlike(group, looked, of)


def _unlike(
    group: str, looked: Mapping[int, Sequence[Result]], of: Mapping[int, Rank]
) -> Iterator[Result]:
    facts = {
        rank: {name: value for line in lines for name, value in line.alike.items()}
        for rank, lines in looked.items()
    }
    first = next(iter(looked.values()))[0].name
    different: list[Result] = []
    for fact in dict.fromkeys(name for own in facts.values() for name in own):
        values: dict[str, list[int]] = {}
        for rank, own in facts.items():
            values.setdefault(own.get(fact, "not set"), []).append(rank)
        if len(values) > 1:
            most = max(values, key=lambda value: len(values[value]))
            odd = [
                f"{value[:80]} on {named(ranks, of)}"
                for value, ranks in values.items()
                if value != most
            ]
            what = f"ranks differ in {fact}: {listed(odd, 3)}, {most[:80]} on {named(values[most], of)}"
            is_version = group == "versions"
            remedy = (
                "one environment and checkout that all nodes see"
                if is_version
                else "set it alike everywhere"
            )
            different.append(Result(first, "bad" if is_version else "warning", what, remedy))
    yield from different[:_MOST_FACTS]
    if more := len(different) - _MOST_FACTS if len(different) > _MOST_FACTS else 0:
        yield replace(different[0], found=f"ranks differ in {more} more of these")


def of_reports(
    reports: Mapping[int, Mapping[str, Any]],
    nodes: Sequence[Sequence[int]],
    of: Mapping[int, Rank],
    seconds: float,
) -> Iterator[Result]:
    """The lines of devices and all-reduces (reduce.py). `nodes`: the ranks of each."""
    ranks = [rank for node in nodes for rank in node]
    silent = [rank for rank in ranks if rank not in reports]
    failed = yield from _of_failures(reports, of)
    stuck = {
        rank: report["at"]
        for rank, report in reports.items()
        if report["at"] != "done" and "failed" not in report
    }
    if silent:
        what = f"{named(silent, of)} gave no answer within {seconds:g} s"
        yield Result("all-reduce", "bad", what, "py-spy dump, or dmesg, on that host")
    elif stuck and not failed:
        waits = "waiting for the devices of the others"
        culprits = {rank: at for rank, at in stuck.items() if at != waits} or stuck
        at = next(iter(culprits.values()))
        what = f"{named([*culprits], of)} did not come through within {seconds:g} s: {at}"
        yield Result("all-reduce", "bad", what, _NO_WAY)
    wrong = [rank for rank, report in reports.items() if "wrong" in report]
    if wrong:
        what = f"the sum of ones came out wrong on {named(wrong, of)}"
        yield Result(
            "all-reduce",
            "bad",
            what,
            "NCCL_P2P_DISABLE=1 for a trial; a link or a GPU is defective",
        )
    if silent or failed or stuck:
        return
    yield from _of_devices(reports, of)
    yield from _of_speeds(reports, nodes)


def _of_failures(
    reports: Mapping[int, Mapping[str, Any]], of: Mapping[int, Rank]
) -> Generator[Result, None, bool]:
    """Whether any failed. Ranks that wait for one without a device fail too, later and with a worse reason."""
    failed: dict[str, list[tuple[int, str]]] = {}
    for rank, report in reports.items():
        if "error" in report or "failed" in report:
            text = re.sub(
                r" *(with )?\[/[^\]]*\]",
                "",
                report.get("error") or f"{report['at']}: {report['failed']}",
            )
            failed.setdefault(re.sub(r"[\d.]+", "#", text), []).append((rank, text))
    at_device = {kind: who for kind, who in failed.items() if "error" in reports[who[0][0]]}
    for who in (at_device or failed).values():
        ranks = [rank for rank, _ in who]
        what, _, told = who[0][1].partition("; ")
        what += f" ({named(ranks, of)})" if len(of) > 1 else ""
        if at_device:
            yield Result("device", "bad", what, told or "look at that rank's host")
        else:
            connects = reports[ranks[0]]["at"] == "forming the group"
            more = "NCCL_DEBUG=INFO, TORCH_CPP_LOG_LEVEL=INFO say more"
            yield Result("all-reduce", "bad", what, _NO_WAY if connects else more)
    return bool(failed)


def _of_devices(
    reports: Mapping[int, Mapping[str, Any]], of: Mapping[int, Rank]
) -> Iterator[Result]:
    kinds: dict[str, list[int]] = {}
    for rank, report in reports.items():
        kinds.setdefault(
            report["device"] if report["device"] == "cpu" else report["name"], []
        ).append(rank)
    if len(kinds) > 1:
        what = "; ".join(f"{kind} on {named(ranks, of)}" for kind, ranks in kinds.items())
        remedy = "nodes of one kind, or look why torch finds no GPU there"
        yield Result(
            "device", "bad" if "cpu" in kinds else "warning", f"ranks differ: {what}", remedy
        )
    else:
        (kind,) = kinds
        yield Result(
            "device",
            "ok",
            f"torch uses {'the CPU' if kind == 'cpu' else kind} on {plural(len(reports), 'rank')}",
        )
    unpinned = {
        rank: report["pinned_error"] for rank, report in reports.items() if "pinned_error" in report
    }
    if unpinned:
        what = f"{next(iter(unpinned.values()))} ({named([*unpinned], of)})"
        yield Result(
            "pinned memory",
            "bad",
            what,
            "a larger memory limit (cgroup, --mem); ulimit -l unlimited",
        )
    elif rates := {
        rank: report["pinned_gb_s"] for rank, report in reports.items() if "pinned_gb_s" in report
    }:
        slowest = min(rates, key=lambda rank: rates[rank])
        report = reports[slowest]
        card = card_of(report["name"], report["gib"] * 1024)
        found = f"{rates[slowest]:.1f} GB/s to the GPU at least"
        if card and rates[slowest] < _SHARE * card.host_gb_s:
            what = f"{found}, on {named([slowest], of)}, of about {card.host_gb_s:g}"
            yield Result(
                "pinned memory",
                "warning",
                what,
                "nvidia-smi -q | grep -A3 'Link Width': a narrow PCIe link",
            )
        else:
            yield Result("pinned memory", "ok", found)


def _of_speeds(
    reports: Mapping[int, Mapping[str, Any]], nodes: Sequence[Sequence[int]]
) -> Iterator[Result]:
    is_gpu = all(report["device"] == "cuda" for report in reports.values())
    where = {
        "all": "within the node" if len(nodes) == 1 else f"over {len(nodes)} nodes",
        "node": "within each node",
    }
    for name in ("node", "all"):
        rows = [report[name] for report in reports.values() if report.get(name)]
        if not rows:
            continue
        slowest = [
            max((row[i] for row in rows if len(row) > i), key=lambda each: each[1])
            for i in range(min(map(len, rows)))
        ]
        size, seconds = slowest[-1]
        count = len(reports) if name == "all" else max(map(len, nodes))
        rate = 2 * (count - 1) / count * size / seconds / 1e9
        times = ", ".join(f"{size_of(size)} {1e3 * took:.3g} ms" for size, took in slowest)
        backend = "NCCL" if is_gpu else "gloo"
        found = f"{backend} {where[name]}, {count} ranks: {times}; {rate:.3g} GB/s (bus)"
        first = next(iter(reports.values()))
        card = card_of(first["name"], first["gib"] * 1024) if is_gpu else None
        is_inner = name == "node" or len(nodes) == 1
        if card and is_inner and rate < _SHARE * card.link_gb_s:
            what = f"{found}, of a link's {card.link_gb_s:g}"
            yield Result(
                "all-reduce",
                "warning",
                what,
                "nvidia-smi topo -m, nvlink -s; NCCL_DEBUG=INFO: P2P, SHM or NET?",
            )
        elif is_gpu and not is_inner and rate < _SLOW_GB_S:
            remedy = (
                "NCCL_DEBUG=INFO: IB, EFA or Socket? NCCL_SOCKET_IFNAME and NCCL_IB_HCA name others"
            )
            yield Result(
                "all-reduce", "warning", f"{found}: the network for control, not for data?", remedy
            )
        else:
            yield Result(
                "all-reduce",
                "ok",
                found + (f", of a link's {card.link_gb_s:g}" if card and is_inner else ""),
            )
