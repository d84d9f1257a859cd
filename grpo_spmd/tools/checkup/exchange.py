"""Finds the ranks of a checkup, brings their results to rank 0, and compares the nodes.

The ranks are launched by torchrun or srun, or by `check_links`, which starts a few on this machine.
Ranks post values in torch's store, and rank 0 gathers them (`Exchange`). Every wait has a deadline.
The findings of a rank are the Results of its checks. They are merged: into one line if all ranks
have found the same, else into one line for each kind of finding, which names the ranks that have
it. A Report is what a rank has measured of its device and of all-reduces (reduce.py). Nodes are
compared too: their clocks, and whether all of them see the same run folder. The *leader* of a node
is its first rank.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checks.memory import size_text
from grpo_spmd.config.command_line import number_of_ranks
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.processes import format_ranks, free_port
from grpo_spmd.observe.cards import Card, find_device
from grpo_spmd.tools.checkup.disk import lock_and_append, whole_lines
from grpo_spmd.tools.checkup.results import (
    LEVELS,
    Result,
    Target,
    bad,
    join_items,
    ok,
    rated,
    warning,
)

if TYPE_CHECKING:
    import torch.distributed as dist


# What a rank's Report says while it waits for others (Report.at).
WAITING = "waiting for the devices of the others"
NO_CONNECTION = "a firewall, or the wrong interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
# The fraction of the bandwidth in a card's data sheet that is expected.
EXPECTED_FRACTION = 0.5
# A lower bandwidth between GPU nodes probably means that the wrong network is used.
_SLOW_GB_S = 1.0
_MAX_FACTS = 4  # that a line names
_POLL_S = 0.02
_SKEW_S = 0.5  # clocks of nodes may differ by so much
# How long rank 0 waits for another node's time, and for its trial of the run folder.
_CLOCK_S = 10.0
_FOLDER_S = 20.0
# Lines that each node appends to the shared file.
_NUM_LINES = 20


@dataclass(frozen=True)
class RankFindings:
    """The results of one rank's checks."""

    host: str
    # (group of the check, result)
    results: list[tuple[str, Result]]
    # A text that is the same for the ranks of one node, and different on other nodes.
    node: str = ""


# The findings by rank.
Findings = Mapping[int, RankFindings]


@dataclass
class Report:
    """What one rank has measured of its device and of all-reduces.

    It is filled step by step, so that the report of a rank that hangs shows how far it got.
    """

    at: str = "starting"  # "done", "failed", or what the rank is doing
    lines: list[Result] = field(default_factory=list)
    gpu: tuple[str, float] | None = None  # name and GiB of memory; None on a CPU
    # (bytes, seconds) of all-reduces within its node, if there are several, and over all ranks.
    within_node: list[tuple[int, float]] = field(default_factory=list)
    over_all: list[tuple[int, float]] = field(default_factory=list)

    def begin(self, activity: str) -> None:
        """Notes what the rank is about to do."""
        self.at = activity

    def set_gpu(self, name: str, gib: float) -> None:
        """Notes the rank's GPU and its memory in GiB."""
        self.gpu = (name, gib)

    @property
    def card(self) -> Card | None:
        """The card of the rank's GPU; None if it is unknown or the rank is on a CPU."""
        return find_device(*self.gpu) if self.gpu else None


# The ranks


@dataclass(frozen=True)
class Launch:
    """This rank's place among the ranks that were launched together."""

    rank: int
    num_ranks: int
    local_rank: int  # within its node
    local_ranks: int  # number of ranks of its node
    environ: Mapping[str, str]
    serves_store: bool  # rank 0, unless torchrun's agent already serves the store


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Returns this rank's place among the ranks that torchrun or srun launched.

    Returns None if this process is the only one. Raises ConfigError if RANK is set but not the
    address where ranks meet."""
    if "RANK" not in environ:
        environ = {**environ, **_torchrun_variables(environ)}
    num_ranks = int(environ.get("WORLD_SIZE", number_of_ranks()))
    # A single rank needs no exchange, so it counts as alone. The exception is the rank that
    # check_links starts for a single GPU: it sets MASTER_PORT, and is not torchrun.
    is_alone = "TORCHELASTIC_RUN_ID" in environ or "MASTER_PORT" not in environ
    if "RANK" not in environ or (num_ranks == 1 and is_alone):
        return None
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT", "").isdecimal():
        raise ConfigError(
            "RANK is set, but MASTER_ADDR or MASTER_PORT is not; torchrun sets all three: unset "
            "RANK, or set the others too"
        )
    rank = int(environ["RANK"])
    return Launch(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        local_ranks=int(environ.get("LOCAL_WORLD_SIZE", num_ranks)),
        environ=environ,
        serves_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that torchrun would set for this process, from those of Slurm.

    Returns {} if this process is no task of a Slurm step (srun), or the only one of its step.
    """
    names = [name for name in environ if name.startswith("SLURM_")]
    slurm = {name.removeprefix("SLURM_"): environ[name] for name in names}
    # A batch script has no step, although SLURM_NTASKS is set in it.
    num_tasks = slurm.get("STEP_NUM_TASKS", "1")
    if num_tasks == "1":
        return {}
    # "4(x2),2": two nodes with 4 tasks, one with 2.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", slurm.get("STEP_TASKS_PER_NODE", num_tasks))
    tasks = [count for count, times in groups for _ in range(int(times or 1))]
    # All ranks derive the same port from the job and the step.
    port = 20000 + (int(slurm.get("JOB_ID", 0)) + int(slurm.get("STEP_ID", 0))) % 20000
    nodes = slurm.get("STEP_NODELIST") or slurm.get("JOB_NODELIST", "")
    return {
        "RANK": slurm["PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": slurm["LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[int(slurm["NODEID"])],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list of nodes: "node[03-05,9],login1" gives node03.

    For an empty list it is this machine, 127.0.0.1."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(text or "" for text in match.groups()) if match and nodes else "127.0.0.1"


def check_links(target: Target) -> Iterator[Result]:
    """Measures all-reduces on this machine, between one rank for each GPU or two on the CPU.

    Each rank is a process that runs `checkup --only links`. Yields the lines that rank 0 of these
    has printed as JSON. A checkup under torchrun or srun measures its own ranks instead.
    """
    if target.is_launched:
        return
    num_ranks = target.num_gpus or 2
    environ = {
        "NCCL_DEBUG": "",
        "TORCHELASTIC_USE_AGENT_STORE": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    command = [sys.executable, "-m", "grpo_spmd.checkup", "--only", "links"]
    command += ["--deadline", f"{target.deadline_s:g}", "--json", "/dev/stdout"]

    def run_rank(rank: int) -> tuple[str, str]:
        """Runs one rank until it ends. Returns what it has written to (stdout, stderr)."""
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        answer = target.run(command, 3 * target.deadline_s + 60, environ | numbers)
        return answer.stdout, answer.stderr.strip()

    with ThreadPoolExecutor(num_ranks) as pool:
        outputs = [*pool.map(run_rank, range(num_ranks))]
    # The lines for the terminal, which are also in the output, are not JSON.
    text = "\n".join(line for line in outputs[0][0].splitlines() if line.startswith("{"))
    for fields in map(json.loads, text.splitlines()):
        if "level" in fields:
            yield Result(fields["name"], fields["level"], fields["found"], fields["remedy"])
    if "verdict" not in text:
        errors = [error for _, error in outputs if error] or ["its ranks ended without a message"]
        yield bad("all-reduce", errors[0].splitlines()[-1][:300], "python -c 'import torch'")


# Findings


def name_ranks(ranks: Sequence[int], findings: Findings) -> str:
    """Returns the ranks as text, with the names of their hosts if the launch has several hosts."""
    hosts = sorted({findings[rank].host for rank in ranks if rank in findings})
    has_several = len({rank.host for rank in findings.values()}) > 1
    return format_ranks(ranks) + (f" on {join_items(hosts, 3)}" if has_several and hosts else "")


def merge_findings(findings: Findings) -> Iterator[tuple[str, Result]]:
    """Yields (group, line) for the findings of all ranks.

    If all ranks found the same in a check, it has one line, else one for each finding, which names
    the ranks. The lines are in the order of the checks, group by group."""
    # By group of checks, name of the line, and rank.
    groups: dict[str, dict[str, dict[int, list[Result]]]] = {}
    for rank, rank_findings in findings.items():
        for group, result in rank_findings.results:
            by_rank = groups.setdefault(group, {}).setdefault(result.name, {})
            by_rank.setdefault(rank, []).append(result)
    for group, names in groups.items():
        for name, results in names.items():
            # Ranks without a line of this name are outside the check's scope (such as one rank for
            # each machine), so they do not count; but links are measured by all ranks.
            num_ranks = len(findings if group == "links" else results)
            for line in _merge_results(results, findings, num_ranks):
                yield group, line
            make = bad if group in ("versions", "links") else warning
            remedy = "give all ranks the same kind of machine, environment, checkout and variables"
            for difference in _differences(results, findings):
                yield group, make(name, f"ranks differ in {difference}", remedy)


def _merge_results(
    results: Mapping[int, Sequence[Result]], findings: Findings, num_ranks: int
) -> Iterator[Result]:
    """Yields the merged lines of one check, which `num_ranks` ranks have run.

    `results` has the lines of each rank. A merged line names its ranks if they are not all ranks.
    """
    # By (level, finding without its numbers): one line of each rank.
    kinds: dict[tuple[int, str], dict[int, Result]] = defaultdict(dict)
    for rank in sorted(results):
        for line in results[rank]:
            # Numbers may differ between ranks with the same problem.
            text = "" if line.level == "ok" else re.sub(r"[\d.,]+", "#", line.finding)
            kinds[LEVELS.index(line.level), text].setdefault(rank, line)
    for level, text in sorted(kinds, key=lambda kind: -kind[0]):
        # Once the ranks with a problem have been named, the others need no line.
        if level or len(kinds) == 1:
            ranks = [*kinds[level, text]]
            line = kinds[level, text][ranks[0]]
            names = f" ({name_ranks(ranks, findings)})" if len(ranks) < num_ranks else ""
            yield replace(line, finding=line.finding + names)


def _differences(results: Mapping[int, Sequence[Result]], findings: Findings) -> list[str]:
    """Returns a text for each fact that differs between ranks, at most _MAX_FACTS.

    If more differ, a last text says how many. A fact is a value that must be the same on all ranks,
    such as a version."""
    facts = {rank: ChainMap(*(line.facts for line in lines)) for rank, lines in results.items()}
    texts: list[str] = []
    for fact in dict.fromkeys(fact for rank_facts in facts.values() for fact in rank_facts):
        values: dict[str, list[int]] = defaultdict(list)
        for rank, rank_facts in facts.items():
            values[rank_facts.get(fact, "not set")].append(rank)
        if len(values) > 1:
            # The majority comes first: it is probably right.
            common_first = sorted(values.items(), key=lambda item: -len(item[1]))
            ranks = [f"{value[:80]} on {name_ranks(r, findings)}" for value, r in common_first]
            texts.append(f"{fact}: {join_items(ranks, 4)}")
    num_more = len(texts) - _MAX_FACTS
    return texts[:_MAX_FACTS] + ([f"{num_more} more of these"] if num_more > 0 else [])


# Devices and all-reduces (reduce.py measures them)


def check_reports(
    reports: Mapping[int, Report],
    nodes: Sequence[Sequence[int]],
    findings: Findings,
    seconds: float,
) -> Iterator[Result]:
    """Yields the lines about devices and all-reduces. Only rank 0 calls it.

    `nodes` has the ranks of each node. `seconds` is the deadline that the ranks had. A rank without
    a report gave no answer.
    """
    name = "all-reduce"
    # The lines of the reports in the form that merge_findings takes.
    measured = {
        rank: replace(
            rank_findings,
            results=[("links", line) for line in reports.get(rank, Report()).lines],
        )
        for rank, rank_findings in findings.items()
    }
    lines = [line for _, line in merge_findings(measured)]
    failed = {line.name for line in lines if line.level == "bad"} & {"device", name}
    # If a rank has no device, the all-reduces of the others fail as well. Their lines are left out,
    # since they do not tell the cause.
    yield from (line for line in lines if line.name != name or "device" not in failed)
    # Ranks that had not finished at the deadline, with what they were doing.
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
        network = _SLOW_GB_S if reports[0].gpu else 0.0
        inner = [report.within_node for report in reports.values()]
        yield from _speed_line("within each node", inner, max(map(len, nodes)), link)
        outer = [report.over_all for report in reports.values()]
        if len(nodes) == 1:
            yield from _speed_line("within the node", outer, len(reports), link)
        else:
            yield from _speed_line(f"over {len(nodes)} nodes", outer, len(reports), network)


def _speed_line(
    scope: str,
    measured: Sequence[Sequence[tuple[int, float]]],
    num_ranks: int,
    expected_gb_s: float,
) -> Iterator[Result]:
    """Yields a line about the speed of all-reduces among `num_ranks` ranks, if any were measured.

    `measured` has a list for each rank, with (bytes, seconds) for each size. `scope` says which
    ranks these are, such as "within each node". A speed below `expected_gb_s` is a warning.
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


# The exchange of values over torch's store


class Exchange:
    """Exchanges values between ranks: each rank posts a value under a key, and rank 0 gathers them.

    It works over torch's key-value store, without a process group. All ranks can read what rank 0
    has posted (`wait_for_rank0`). Reads poll the store, because a wait inside the store could not
    be interrupted by a signal.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks

    def post(self, key: str, value: Any) -> None:
        """Stores this rank's value, which must be plain JSON or a dataclass."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value, default=asdict))

    def gather(
        self, key: str, seconds: float, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Returns the values that `ranks` (default: all) have posted under `key` within `seconds`.

        A rank that has not posted is missing in the result.
        """
        deadline = time.monotonic() + seconds
        values: dict[int, Any] = {}
        for rank in range(self.num_ranks) if ranks is None else ranks:
            name = f"{key}/{rank}"
            while not self.store.check([name]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            # Also after the deadline: every further rank is still looked up once.
            if self.store.check([name]):
                values[rank] = json.loads(self.store.get(name))
        return values

    def wait_for_rank0(self, key: str, seconds: float) -> Any:
        """Waits for what rank 0 posts under `key`. Raises TimeoutError after `seconds`."""
        for value in self.gather(key, seconds, [0]).values():
            return value
        raise TimeoutError(f"rank 0 did not post {key!r} within {seconds:g} s")


# Clocks


def check_clocks(
    exchange: Exchange, leaders: Sequence[int], findings: Findings, posted_at: float
) -> Iterator[Result]:
    """Yields a line about the clocks of all nodes, compared with rank 0's. Only rank 0 calls it.

    `leaders` are the first ranks of the other nodes. Each posts its time under "clock" as soon as
    it has read the plan, which rank 0 posted at `posted_at`.
    """
    bounds = [0.0]
    problems = []
    for rank in leaders:
        clock = exchange.gather("clock", _CLOCK_S, [rank]).get(rank)
        # The other clock was read at some time between `posted_at` and now. Assume the middle; half
        # of the interval is then the largest possible error.
        now = time.time()
        uncertainty = (now - posted_at) / 2
        skew = 0.0 if clock is None else clock - posted_at - uncertainty
        bounds.append(abs(skew) + uncertainty)
        if clock is None:
            problems.append(f"{findings[rank].host} gives no answer")
        elif abs(skew) - uncertainty > _SKEW_S:
            problems.append(f"{findings[rank].host} {skew:+.1f} s")
    if problems:
        yield warning(
            "clocks",
            f"against {findings[0].host}: {join_items(problems, 4)}: times of logs, dumps and "
            "locks do not agree",
            "see its output; chronyc tracking; systemctl restart chronyd",
        )
    elif leaders:
        yield ok("clocks", f"of {len(bounds)} nodes agree within {1e3 * max(bounds):.2g} ms")


# The run folder


def _line_of(rank: int) -> str:
    """Returns the line that a rank appends to the shared file.

    It is so long that lines which were mixed with each other would be noticed."""
    return f"rank {rank}{'.' * 100}"


def try_folder(folder: str, rank: int) -> str:
    """Tries locks and appends in rank 0's scratch folder. The first ranks of other nodes call it.

    Returns "unseen" if this node does not see the folder, else the result of lock_and_append.
    """
    try:
        return lock_and_append(Path(folder), _line_of(rank), _NUM_LINES)
    except FileNotFoundError:
        return "unseen"
    except OSError as error:
        return str(error)


def check_shared_folder(
    exchange: Exchange, scratch: Path, leaders: Sequence[int], findings: Findings
) -> Iterator[Result]:
    """Yields lines on whether the other nodes see the same run_dir, its locks and appended lines.

    Only rank 0 calls it. It has made the folder `scratch` in run_dir and holds the folder's lock.
    The `leaders`, the first ranks of the other nodes, have called `try_folder` on it and post the
    results.
    """
    name = "shared run_dir"
    answers = exchange.gather("folder", _FOLDER_S, leaders)
    num_whole = whole_lines(scratch, [_line_of(rank) for rank in leaders])
    blind = [rank for rank in leaders if answers.get(rank, "unseen") == "unseen"]
    if blind:
        yield bad(
            name,
            f"not seen by {name_ranks(blind, findings)}: what rank 0 writes in {scratch.parent}",
            "a run_dir on a file system that all nodes mount at the same path",
        )
        return
    num_lines = _NUM_LINES * len(leaders)
    if num_whole < num_lines:
        yield warning(
            name,
            f"{num_lines - num_whole} of {num_lines} lines that nodes appended to one file are "
            "lost or mixed",
            "nodes write files of their own; keep other jobs out of run_dir",
        )
    unlocked = [rank for rank, answer in answers.items() if answer != "held"]
    if unlocked:
        yield warning(
            name,
            f"rank 0's lock is not seen by {name_ranks(unlocked, findings)}: two jobs in one "
            "run_dir would not notice",
            "mount it with locks (NFS: without nolock; Lustre: -o flock)",
        )
    if num_whole == num_lines and not unlocked:
        yield ok(name, f"all {len(leaders) + 1} nodes see it, its locks and its appended lines")
