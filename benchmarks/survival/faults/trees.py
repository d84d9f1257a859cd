"""SIGKILL of a whole tree of processes at once, and SIGSTOP of a rank in odd places."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from benchmarks.support.report import Row
from benchmarks.support.tree import with_descendants
from benchmarks.survival.faults.kills import wait_for_the_moment
from benchmarks.survival.faults.lab import AT_ONCE, Lab, Launch, Run, Strike, wait_until_gone
from benchmarks.survival.faults.rows import row, row_of_strikes
from benchmarks.survival.faults.worker import has_rank

# Each call runs a program in the jail of the `code` reward, where a kill meets it now and then.
_REWARD = """
from grpo_spmd.rewards.sandbox.sandbox import Limits, passes_program_test
def jailed(completions, **_):
    took = passes_program_test("import time; time.sleep(0.2); print(1)", "", "1", Limits(10.0, 512, "required"))
    return [float(took) + len(completion) % 3 for completion in completions]
"""  # noqa: E501
_KILLS_A_RUN, _NUM_STEPS = 5, 12
_TIMEOUT_S = 10.0  # watchdog.timeout_s of runs with a rank that is stopped
# Where it is stopped, in the order of a run, each of a list drawn; the last start finds a run that
# is over.
_ODD_PLACES = (
    ("engine start",),
    ("model build",),
    ("weight_sync", "eval"),
    ("checkpoint", "write: before the shard", "write: in the shard", "write: before the manifest"),
    ("end: before it", "end: in vLLM's", "end: of the session"),
)


def whole_trees(lab: Lab, num: int) -> Iterator[Row]:
    """torchrun, ranks, nurseries, workers and sandboxes: all stopped first, so that none sees
    another die."""
    folder = lab.root / "trees"
    folder.mkdir()
    (folder / "jailed.py").write_text(_REWARD)
    reward = {"function": f"{folder}/jailed.py:jailed"}
    trees = Lab(folder, rewards=[reward], num_steps=_NUM_STEPS, seed=lab.seed)
    assert trees.reference
    count, shared = max(1, num // 4), _shared_memory()
    sizes = [min(_KILLS_A_RUN, count - initial) for initial in range(0, count, _KILLS_A_RUN)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda job: _kill_trees(trees, *job), enumerate(sizes)))
    strikes, kinds = [strike for strikes, _ in outcomes for strike in strikes], Counter[str]()
    for _, seen in outcomes:
        kinds.update(seen)
    remaining = sorted(name for name in _shared_memory() - shared if not _is_mapped(name))
    for strike in strikes[:1] if remaining else []:
        strike.problems.append(f"left in /dev/shm: {remaining}")
    notes = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    yield row_of_strikes("SIGKILL of a whole tree, sandboxes too", strikes, f"killed: {notes}")


def _kill_trees(lab: Lab, number: int, count: int) -> tuple[list[Strike], Counter[str]]:
    """One run from its start to its end, killed `count` times; and of what kinds the processes
    were."""
    run, rng, kinds = (
        lab.run(f"tree_{number}"),
        random.Random(f"tree {lab.seed} {number}"),
        Counter[str](),
    )
    strikes: list[Strike] = []
    launch, num_starts = Launch(run, 2), 0
    while len(strikes) < count:
        while _num_starts(run) <= num_starts and launch.process.poll() is None:
            time.sleep(0.05)
        wait_for_the_moment(
            run, launch, rng, rng.choices(("while starting", "while training"), (1, 3))[0]
        )
        if launch.process.poll() is not None:  # it came to its end before
            run.judge([strike for strike in strikes if run.began <= strike.time], launch)
            run = lab.run(f"tree_{number}_{len(strikes)}_more")
            launch, num_starts = Launch(run, 2), 0
            continue
        killed, pids = _kill_tree(launch)
        kinds.update(killed)
        strike = Strike(time.time(), "tree", gone_s=wait_until_gone(pids))
        if tree := _tree(launch):
            strike.problems.append(f"{len(tree)} processes left")
        strikes.append(strike)
        launch, num_starts = Launch(run, 2, "checkpoint.resume=auto"), _num_starts(run)
    run_values = [strike for strike in strikes if run.began <= strike.time]
    run.judge(run_values, launch)
    for folder in (
        run.temporary()
    ):  # of starts that were killed, too: what nobody could remove may not stay either
        (run_values or strikes)[0].problems.append(f"left: {folder}")
    return strikes, kinds


def _num_starts(run: Run) -> int:
    return sum(event["event"] == "start" for event in run.events())


def _kill_tree(launch: Launch) -> tuple[Counter[str], set[int]]:
    stopped: set[int] = set()
    while more := _tree(launch) - stopped:  # one that was not stopped yet may have started another
        for pid in more:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= more
    kinds = Counter(_kind(pid) for pid in stopped)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launch.process.wait()
    return kinds, stopped


def _tree(launch: Launch) -> set[int]:
    """By descent and by the mark: a sandbox has no environment, an orphan no parent of ours."""
    root = {launch.process.pid} if launch.process.poll() is None else set()
    return with_descendants(root | launch.pids())


def _kind(pid: int) -> str:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        for piece, kind in (
            (b"sandbox", "sandboxes"), (b"pool.worker", "reward workers"), (b"distributed.run", "torchruns"),  # noqa: E501
            (b"faults.worker", "ranks"),
        ):  # fmt: skip
            if piece in command:
                return kind
    return "others"


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _is_mapped(name: str) -> bool:
    """By a process that lives: it is not ours."""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in path.read_text():
                return True
    return False


def odd_stops(lab: Lab, num: int) -> Iterator[Row]:
    """In each run a rank is stopped at an odd place, torchrun starts the ranks again, the next one
    is stopped, and at
    last the run comes to its end. The sleeper is named, all are gone soon after the limit, and
    nothing is lost."""
    (lab.root / "odd").mkdir()
    lab = Lab(lab.root / "odd", num_steps=12, seed=lab.seed)
    assert lab.reference
    runs = 2 * max(
        1, num // 4 // len(_ODD_PLACES)
    )  # each second place in one run, the others in the next
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = [
            outcome
            for result in pool.map(lambda n: _stop_in_odd_places(lab, n), range(runs))
            for outcome in result
        ]
    for group, positions in enumerate(_ODD_PLACES):
        group_values = [(took, problem) for of, took, problem in outcomes if of == group]
        worst = f"gone {max(took for took, _ in group_values):.1f} s after the limit"
        problems = [problem for _, problem in group_values if problem]
        yield row(f"SIGSTOP of a rank, {' / '.join(positions)}", len(group_values), problems, worst)


def _stop_in_odd_places(lab: Lab, number: int) -> list[tuple[int, float, str]]:
    """Of each place: which, seconds from the limit until all were gone and the next start began,
    what was wrong."""
    run, rng = lab.run(f"odd_{number}"), random.Random(f"odd {lab.seed} {number}")
    start_limit_s, outcomes = 15.0 + 1.5 * lab.start_s, list[tuple[int, float, str]]()
    limits = [
        f"watchdog.timeout_s={_TIMEOUT_S}",
        f"watchdog.phase_timeouts_s={{start: {start_limit_s}}}",
    ]
    plans = []
    for group in range(number % 2, len(_ODD_PLACES), 2):
        location = rng.choice(_ODD_PLACES[group])
        rank = rng.randrange(2) if has_rank(location, 1) else 0
        run.plan(group, where=location, rank=rank, do="stop", count=1, moment=rng.random())
        plans.append((group, location, rank))
    launch = Launch(run, 2, *limits, max_restarts=len(plans))
    code, strikes = launch.wait(), run.strikes()
    ended, starts = (
        time.time(),
        [event["time"] for event in run.events() if event["event"] == "start"],
    )
    message = re.findall(r"^rank \d \([^)]*\) [^\n]*", launch.output, re.MULTILINE)
    for i, (group, location, rank) in enumerate(plans):
        if i >= len(strikes):
            outcomes.append(
                (
                    group,
                    0.0,
                    f"{location}: never came to it, exit code {code}: {launch.output[-300:]}",
                )
            )
            continue
        over = min([t for t in starts if t > strikes[i].time], default=ended) - strikes[i].time
        over -= start_limit_s if location in ("engine start", "model build") else _TIMEOUT_S
        headline = message[i] if i < len(message) else ""
        is_named = headline.startswith(f"rank {rank} ") and "its process is stopped" in headline
        # At the end all have met, and the doctor has gone: the kernel kills the one that is
        # stopped, torchrun says so.
        is_good = over < (90 if location.startswith("end") else 30) and (
            is_named or location.startswith("end")
        )
        outcomes.append(
            (
                group,
                over,
                "" if is_good else f"{location}, rank {rank}, {over:.0f} s over: {headline}",
            )
        )
    problems = [f"exit code {code}: {launch.output[-300:]}"] if code else run.differences()
    problems += [f"{len(launch.pids())} processes left"] if launch.pids() else []
    problems += [f"left: {folder}" for folder in run.temporary()]
    if problems:
        outcomes[-1] = *outcomes[-1][:2], "; ".join([outcomes[-1][2], *problems])
    return outcomes
