"""Ranks that raise or sleep, and signals to torchrun."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.support.report import Row
from benchmarks.survival.faults.kills import wait_for_the_moment
from benchmarks.survival.faults.lab import AT_ONCE, Lab, Launch, Strike
from benchmarks.survival.faults.rows import row
from benchmarks.survival.faults.worker import PHASES

_TIMEOUT_S = 10.0  # watchdog.timeout_s of runs with a rank that sleeps


def raises(lab: Lab, num: int) -> Iterator[Row]:
    """On either rank in each phase: all ranks out within 10 s, not as a success, and the first
    traceback is there."""

    def is_named(output: str, rank: int, phase: str) -> bool:
        headline = (
            rf"^rank {rank} \([^)]*\) failed first, in phase {phase}, [^\n]*PlannedError: planned"
        )
        return (
            re.search(headline, output, re.MULTILINE) is not None
            and 'raise PlannedError("planned")' in output
        )

    yield from _stop_in_each_phase(lab, num, "a raise", "raise", 10.0, is_named)


def hang(lab: Lab, num: int) -> Iterator[Row]:
    """On either rank in each phase: stopped within the watchdog's limit and 5 s, and the report
    names the rank and its
    phase."""

    def is_named(output: str, rank: int, phase: str) -> bool:
        return (
            re.search(rf"^rank {rank} \([^)]*\) hangs in phase {phase}, ", output, re.MULTILINE)
            is not None
        )

    limits = [f"watchdog.timeout_s={_TIMEOUT_S}", "watchdog.phase_timeouts_s={start: 300}"]
    yield from _stop_in_each_phase(
        lab, num, "a rank asleep", "sleep", _TIMEOUT_S + 5, is_named, *limits
    )


def _stop_in_each_phase(
    lab: Lab,
    num: int,
    fault: str,
    do: str,
    limit_s: float,
    says: Callable[[str, int, str], bool],
    *overrides: str,
) -> Iterator[Row]:
    assert lab.reference

    def stop(case: tuple[str, int]) -> tuple[float, str]:
        phase, rank = case
        run = lab.run(f"{do}_{phase}_{rank}")
        run.plan(0, where=phase, rank=rank, count=3, do=do)
        launch = Launch(run, 2, *overrides)
        code = launch.wait()
        struck = run.strikes()
        took = time.time() - struck[0].time if struck else float("inf")
        remaining = launch.pids()
        good = (
            code > 0
            and struck
            and took < limit_s
            and not remaining
            and says(launch.output, rank, phase)
        )
        return (
            took,
            ""
            if good
            else f"{phase}, rank {rank}: exit code {code} after {took:.1f} s, {len(remaining)} "
            f"left: {launch.output[-200:]}",
        )

    cases = [(phase, rank) for phase in PHASES for rank in (0, 1)]
    cases = random.Random(0).sample(cases, min(len(cases), max(2, num // 5)))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(stop, cases))
    problems = [problem for _, problem in outcomes if problem]
    yield row(
        f"{fault}, each rank in each phase",
        len(cases),
        problems,
        f"all out after {max(t for t, _ in outcomes):.1f} s",
    )


def signals(lab: Lab, num: int) -> Iterator[Row]:
    """To torchrun, at a random time of the training: saved and gone within 30 s, and the run goes
    on to the same
    end."""
    assert lab.reference
    for number in (signal.SIGTERM, signal.SIGUSR1):

        def preempt(i: int, number: signal.Signals = number) -> tuple[float, str]:
            run, rng = lab.run(f"{number.name.lower()}_{i}"), random.Random(f"{number.name} {i}")
            launch = Launch(run, 2)
            wait_for_the_moment(run, launch, rng, "while training")
            start = time.monotonic()
            launch.process.send_signal(number)
            code, took = launch.wait(60), time.monotonic() - start
            marked, remaining = (run.run_dir / "preempted.json").exists(), launch.pids()
            if not marked or remaining or took > 30:
                return (
                    took,
                    f"exit code {code} after {took:.1f} s, marker {marked}, {len(remaining)} "
                    f"left: {launch.output[-200:]}",
                )
            launch = Launch(run, 2, "checkpoint.resume=auto")
            problems = run.judge([Strike(0.0, "")], launch)[0].problems
            return took, "; ".join(problems)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(preempt, range(max(1, num // 20))))
        problems = [problem for _, problem in outcomes if problem]
        worst = f"out after {max(t for t, _ in outcomes):.1f} s"
        yield row(
            f"{number.name} to torchrun",
            len(outcomes),
            problems,
            worst,
            "marker, no orphans, went on to the bit",
        )
