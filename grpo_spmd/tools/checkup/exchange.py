"""Finds the ranks of a checkup, brings their results to rank 0, and compares the nodes.

The ranks are launched by torchrun or srun, or by `start_ranks` on this machine alone.
Ranks post values in torch's store, and rank 0 gathers them (`Exchange`). Every wait has a deadline.
The findings of a rank are the Results of its checks. They are merged: into one line if all ranks
have found the same, else into one line for each kind of finding, which names the ranks that have
it. Nodes are compared too: their clocks, and whether all of them see the same run folder. The
*leader* of a node is its first rank.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.config.command_line import number_of_ranks
from grpo_spmd.config.errors import ConfigError, cut_middle
from grpo_spmd.distributed.processes import (
    end_with_parent,
    format_ranks,
    free_port,
    without_launch,
)
from grpo_spmd.tools.checkup.disk import lock_and_append, whole_lines
from grpo_spmd.tools.checkup.results import (
    LEVELS,
    Result,
    Target,
    bad,
    join_items,
    ok,
    warning,
)

if TYPE_CHECKING:
    import torch.distributed as dist


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


# The ranks


@dataclass(frozen=True)
class Launch:
    """This rank's place among the ranks that were launched together."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    environ: Mapping[str, str]
    serves_store: bool  # rank 0, unless torchrun's agent already serves the store


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Returns how torchrun or srun launched this process, or None if it is alone.

    Raises ConfigError if RANK is set but not the address where ranks meet.
    """
    if "RANK" not in environ:
        environ = {**environ, **_torchrun_variables(environ)}
    num_ranks = int(environ.get("WORLD_SIZE", number_of_ranks()))
    # A single rank counts as launched if it has a port, as from start_ranks, but not if torchrun
    # started it: it is then alone.
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
    """Returns the variables that torchrun would set for this task of a Slurm step.

    Returns {} if this process is no such task, or the only one of its step.
    """
    slurm = {
        name.removeprefix("SLURM_"): value
        for name, value in environ.items()
        if name.startswith("SLURM_")
    }
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
    """Returns the first host of Slurm's list: "node[03-05,9],login1" gives node03."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(text or "" for text in match.groups()) if match and nodes else "127.0.0.1"


def start_ranks(target: Target) -> Launch:
    """Starts ranks on this machine that measure its links: one for each GPU, or two on the CPU.

    Returns the launch in which this process is rank 0. The others end with this process.
    """
    num_ranks = target.num_gpus or 2
    launched = {
        **without_launch(target.environ),
        "NCCL_DEBUG": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    command = [sys.executable, "-m", "grpo_spmd.checkup", "--only", "links"]
    command += ["--deadline", f"{target.deadline_s:g}"]
    environs = [
        {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)
    ]
    for environ in environs[1:]:
        subprocess.Popen(command, env=environ, preexec_fn=partial(end_with_parent, signal.SIGKILL))
    launch = find_launch(environs[0])
    assert launch is not None
    return launch


# Findings


def name_ranks(ranks: Sequence[int], findings: Findings) -> str:
    """Returns the ranks as text, with the names of their hosts if the launch has several hosts."""
    hosts = sorted({findings[rank].host for rank in ranks if rank in findings})
    has_several = len({rank.host for rank in findings.values()}) > 1
    return format_ranks(ranks) + (f" on {join_items(hosts, 3)}" if has_several and hosts else "")


def merge_findings(findings: Findings) -> Iterator[tuple[str, Result]]:
    """Yields (group, line): one line if all ranks found the same, else one for each finding.

    The lines are in the order of the checks of rank 0; those that only other ranks have come last.
    """
    by_check: dict[tuple[str, str], dict[int, list[Result]]] = {}
    for rank, rank_findings in findings.items():
        for group, result in rank_findings.results:
            by_rank = by_check.setdefault((group, result.name), {})
            by_rank.setdefault(rank, []).append(result)
    for (group, name), results in by_check.items():
        # Ranks without a line of this name did not run the check, since its scope leaves them out;
        # but links are measured by all ranks.
        num_ranks = len(findings if group == "links" else results)
        for line in _merge_results(results, findings, num_ranks):
            yield group, line
        make = bad if group in ("versions", "links") else warning
        remedy = "give all ranks the same kind of machine, environment, checkout and variables"
        differences = _differences(results, findings)
        if differences:
            finding = cut_middle(f"ranks differ in {'; '.join(differences)}", 1_000)
            yield group, make(name, finding, remedy)


def _merge_results(
    results: Mapping[int, Sequence[Result]], findings: Findings, num_ranks: int
) -> Iterator[Result]:
    """Yields the merged lines of one check, which `num_ranks` ranks have run.

    `results` has the lines of each rank.
    """
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
    """Returns a text for each fact that differs between ranks.

    A fact is a value that must be the same on all ranks, such as a version.
    """
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
    return texts


# The exchange of values over torch's store


class Exchange:
    """Exchanges values between ranks: each rank posts a value under a key, and rank 0 gathers them.

    All ranks can read what rank 0 has posted (`wait_for_rank0`). Reads poll the store, because a
    wait inside the store could not be interrupted by a signal.
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
                time.sleep(0.02)
            # After the deadline every further rank is still looked up once.
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
    """Compares the clocks of all nodes with rank 0's. Only rank 0 calls it.

    `leaders` are the first ranks of the other nodes. Each posts its time under "clock" as soon as
    it has read the plan, which rank 0 posted at `posted_at`.
    """
    bounds = [0.0]
    problems = []
    for rank in leaders:
        clock = exchange.gather("clock", 10.0, [rank]).get(rank)
        # The other clock was read at some time between `posted_at` and now. Assume the middle; half
        # of the interval is then the largest possible error.
        now = time.time()
        uncertainty = (now - posted_at) / 2
        skew = 0.0 if clock is None else clock - posted_at - uncertainty
        bounds.append(abs(skew) + uncertainty)
        if clock is None:
            problems.append(f"{findings[rank].host} gives no answer")
        elif abs(skew) - uncertainty > 0.5:
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
    """Returns the line that a rank appends, long enough for mixed lines to be noticed."""
    return f"rank {rank}{'.' * 100}"


def try_folder(folder: str, rank: int) -> str:
    """Tries locks and appends in rank 0's scratch folder, from another node.

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
    """Checks whether the other nodes see the same run_dir, its locks and its appended lines.

    Only rank 0 calls it. It has made the folder `scratch` in run_dir and holds the folder's lock.
    The `leaders`, the first ranks of the other nodes, have called `try_folder` on it and post the
    results.
    """
    name = "shared run_dir"
    answers = exchange.gather("folder", 20.0, leaders)
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
