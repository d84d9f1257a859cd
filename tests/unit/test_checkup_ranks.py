"""What ranks bring together in a checkup, without ranks: who differs, lacks something or hangs is
named."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from torch.distributed import HashStore

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.processes import format_ranks, without_launch
from grpo_spmd.tools.checkup import exchange
from grpo_spmd.tools.checkup.exchange import (
    Exchange,
    RankFindings,
    Report,
    check_clocks,
    check_reports,
    find_launch,
    first_host,
    merge_findings,
)
from grpo_spmd.tools.checkup.results import Result

ONE_HOST = {rank: RankFindings("a", []) for rank in range(2)}
TWO_HOSTS = {rank: RankFindings("ab"[rank // 2], []) for rank in range(4)}
NODES = [[0, 1], [2, 3]]


def of_ranks(*results: Result | None, group: str = "memory", hosts: str = "aabb") -> list[str]:
    """ "level: found" of the lines for ranks that found these."""
    of = {
        rank: RankFindings(host, [] if result is None else [(group, result)])
        for rank, (host, result) in enumerate(zip(hosts, results, strict=True))
    }
    return [f"{line.level}: {line.finding}" for _, line in merge_findings(of)]


def ok(found: str = "well", **equal: str) -> Result:
    return Result("x", "ok", found, facts=equal)


def bad(found: str) -> Result:
    return Result("x", "bad", found, "mend it")


def test_what_all_ranks_find_is_one_line() -> None:
    assert of_ranks(ok("1 GiB"), ok("2 GiB"), ok("3 GiB"), ok("4 GiB")) == ["ok: 1 GiB"]
    assert of_ranks(bad("1 GiB"), bad("2 GiB"), bad("3 GiB"), bad("4 GiB")) == ["bad: 1 GiB"]


def test_who_is_not_well_is_named_with_the_host() -> None:
    assert of_ranks(ok(), ok(), bad("7 files"), bad("9 files")) == ["bad: 7 files (ranks 2-3 on b)"]
    assert of_ranks(ok(), bad("A"), bad("B"), ok()) == [
        "bad: A (rank 1 on a)",
        "bad: B (rank 2 on b)",
    ]
    assert of_ranks(ok(), bad("A"), hosts="aa") == ["bad: A (rank 1)"]
    # A machine's first rank alone looks: nobody else is meant.
    assert of_ranks(bad("A"), None, bad("A"), None) == ["bad: A"]


def test_facts_that_must_be_alike_are_named_where_they_are_not() -> None:
    different = [ok(NCCL_DEBUG="INFO"), ok(), ok(), ok()]
    expected = (
        "warning: ranks differ in NCCL_DEBUG: not set on ranks 1-3 on a, b, INFO on rank 0 on a"
    )
    assert of_ranks(*different) == ["ok: well", expected]
    versions = [ok(torch="2.13.0"), ok(torch="2.13.0"), ok(torch="2.12.0"), ok(torch="2.13.0")]
    (_, line) = of_ranks(*versions, group="versions")
    assert (
        line == "bad: ranks differ in torch: 2.13.0 on ranks 0-1, 3 on a, b, 2.12.0 on rank 2 on b"
    )


def test_many_facts_that_differ_are_few_lines() -> None:
    local, present = ({f"package_{i}": version for i in range(20)} for version in ("1", "2"))
    lines_of = of_ranks(ok(**local), ok(**local), ok(**local), ok(**present))
    assert len(lines_of) == 1 + 4 + 1
    assert lines_of[-1] == "warning: ranks differ in 16 more of these"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
     ([*range(0, 40, 2)], "ranks 0, 2, 4, 6, 8, 10, and 14 more")],
)  # fmt: skip
def test_ranks_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


# Devices and all-reduces


CPU = Result("device", "ok", "torch uses the CPU", facts={"device": "cpu"})
GPU = Result("device", "ok", "torch uses NVIDIA H100 80GB HBM3", facts={"device": "cuda"})


def lines(
    reports: dict[int, Report], of: dict[int, RankFindings] = ONE_HOST, nodes: Any = ([0, 1],)
) -> list[Result]:
    return [*check_reports(reports, nodes, of, 9.0)]


def names_and_levels(results: Iterable[Result]) -> list[tuple[str, str]]:
    return [(result.name, result.level) for result in results]


def test_bandwidth_is_that_of_the_slowest_rank() -> None:
    """2 ranks, 64 MiB in 0.5 s on the slower: 2 x 1/2 x 2^26 / 0.5 / 1e9 = 0.134 GB/s."""
    reports = {
        0: Report("done", [CPU], over_all=[(1 << 16, 0.001), (1 << 26, 0.25)]),
        1: Report("done", [CPU], over_all=[(1 << 16, 0.002), (1 << 26, 0.5)]),
    }
    device, speed = lines(reports)
    assert names_and_levels([device, speed]) == [("device", "ok"), ("all-reduce", "ok")]
    assert "64.00 KiB 2 ms, 64.00 MiB 500 ms; 0.134 GB/s" in speed.finding


def on_h100(rate: float, ranks: int, inner_rate: float = 0.0) -> Report:
    """GB/s of the bus, over `ranks` ranks and over the 2 of a node."""

    def times(rate: float, ranks: int) -> list[tuple[int, float]]:
        size = 1 << 28
        return [(size, 2 * (ranks - 1) / ranks * size / rate / 1e9)] if rate else []

    return Report(
        "done",
        [GPU],
        gpu=("NVIDIA H100 80GB HBM3", 79.1),
        within_node=times(inner_rate, 2),
        over_all=times(rate, ranks),
    )


def test_a_link_is_held_against_its_cards_figure() -> None:
    """450 GB/s in one direction; half of it is well."""
    for rate, level in ((300.0, "ok"), (40.0, "warning")):
        result = dict(names_and_levels(lines({rank: on_h100(rate, 2) for rank in range(2)})))
        assert result == {"device": "ok", "all-reduce": level}
    over_nodes = {rank: on_h100(0.1, 4, inner_rate=300.0) for rank in range(4)}
    results = lines(over_nodes, TWO_HOSTS, NODES)
    assert names_and_levels(results)[1:] == [("all-reduce", "ok"), ("all-reduce", "warning")]
    assert "within each node, 2 ranks" in results[1].finding
    assert "over 2 nodes" in results[-1].finding


def test_slow_pinned_memory_of_one_rank_is_named() -> None:
    reports = {rank: on_h100(300.0, 2) for rank in range(2)}
    for report, level, rate in zip(reports.values(), ("ok", "warning"), (50.0, 3.0), strict=True):
        report.lines.append(Result("pinned memory", level, f"{rate} GB/s", "look at the link"))  # type: ignore[arg-type]
    _, pinned, speed = lines(reports)
    assert names_and_levels([pinned, speed]) == [("pinned memory", "warning"), ("all-reduce", "ok")]
    assert pinned.finding == "3.0 GB/s (rank 1)"


def test_a_rank_that_does_not_answer_or_come_through_is_named() -> None:
    (silent,) = lines({0: Report("forming the group")})
    assert (silent.level, silent.finding) == ("bad", "rank 1 gave no answer within 9 s")
    (stuck,) = lines({0: Report(exchange.WAITING), 1: Report("measuring its device")})
    assert stuck.finding == "rank 1 did not finish within 9 s: measuring its device"
    (all_of_them,) = lines({0: Report("forming the group"), 1: Report("forming the group")})
    assert "ranks 0-1" in all_of_them.finding


def failed(text: str) -> Report:
    return Report("failed", [Result("all-reduce", "bad", text, exchange.NO_CONNECTION)])


def test_the_rank_whose_device_fails_is_named_and_not_those_that_wait() -> None:
    no_gpu = Result("device", "bad", "rank 1 of this node has no GPU", "start as many ranks")
    (line,) = lines({0: failed("a peer is gone"), 1: Report("done", [no_gpu])})
    assert (line.name, line.level, line.remedy) == ("device", "bad", "start as many ranks")
    assert line.finding == "rank 1 of this node has no GPU (rank 1)"


def test_ranks_that_find_no_way_to_each_other_are_one_line() -> None:
    text = "forming the group: Gloo timed out connecting: remote=[127.0.0.1]:"
    (line,) = lines(
        {0: Report("forming the group"), 1: failed(f"{text}7"), 2: failed(f"{text}8"), 3: Report()},
        TWO_HOSTS,
        NODES,
    )
    assert line.finding == f"{text}7 (ranks 1-2 on a, b)"
    assert "GLOO_SOCKET_IFNAME" in line.remedy


def test_different_devices_are_bad() -> None:
    reports = {0: on_h100(300.0, 2), 1: Report("done", [CPU])}
    (_, mixed) = lines(reports)
    assert (mixed.level, mixed.finding) == (
        "bad",
        "ranks differ in device: cuda on rank 0, cpu on rank 1",
    )


# Who was launched, and where they meet


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MASTER_ADDR or MASTER_PORT is not"):
        find_launch(environ)
    environ |= {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    launch = find_launch(environ)
    assert launch is not None
    assert (launch.num_ranks, launch.local_ranks, launch.serves_store) == (16, 8, True)
    launch = find_launch(environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert launch is not None
    assert not launch.serves_store
    assert find_launch({}) is None


def test_ranks_of_srun() -> None:
    step = {
        "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "10", "SLURM_PROCID": "9",  # noqa: E501
        "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
        "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    }  # fmt: skip
    launch = find_launch(step)
    assert launch is not None
    assert (launch.rank, launch.num_ranks, launch.local_rank, launch.local_ranks) == (9, 10, 1, 2)
    assert (launch.environ["MASTER_ADDR"], launch.environ["MASTER_PORT"]) == ("gpu03", "20042")
    assert not launch.serves_store
    batch_script = {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "10", "SLURM_PROCID": "0"}
    assert find_launch(batch_script) is None


@pytest.mark.parametrize(
    ("nodes", "initial"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[007-012,20],m1", "n007"),
        ("n[3]-ib", "n3-ib"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, initial: str) -> None:
    assert first_host(nodes) == initial


# What goes over the store


def test_those_who_do_not_speak_in_time_are_missing() -> None:
    store = HashStore()
    ranks = [Exchange(store, rank, 3) for rank in range(3)]
    ranks[0].post("found", {"x": 1})
    ranks[2].post("found", {"x": 3})
    assert ranks[0].gather("found", 0.2) == {0: {"x": 1}, 2: {"x": 3}}
    with pytest.raises(TimeoutError, match="rank 0 did not post 'plan'"):
        ranks[1].wait_for_rank0("plan", 0.1)
    ranks[0].post("plan", [1])
    assert ranks[1].wait_for_rank0("plan", 0.1) == [1]


@pytest.mark.parametrize("skew", [0.0, 7.5, -120.0])
def test_a_clock_that_is_wrong_is_found_by_how_much(skew: float) -> None:
    store = HashStore()
    asked = time.time()
    Exchange(store, 2, 4).post("clock", time.time() + skew)
    (line,) = check_clocks(Exchange(store, 0, 4), [2], TWO_HOSTS, asked)
    if skew:
        assert (line.level, f"b {skew:+.1f} s" in line.finding) == ("warning", True)
    else:
        assert (line.level, "2 nodes agree within" in line.finding) == ("ok", True)


def test_hosts_are_named_only_where_there_are_several() -> None:
    assert exchange.name_ranks([0, 1], ONE_HOST) == "ranks 0-1"
    assert exchange.name_ranks([1, 2], TWO_HOSTS) == "ranks 1-2 on a, b"


def test_a_program_that_is_no_rank_has_nothing_of_torchrun() -> None:
    rank = {"RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    rank |= {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_RANK": "1"}
    remaining = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "SLURM_PROCID": "1"}
    assert without_launch(rank | remaining) == remaining
