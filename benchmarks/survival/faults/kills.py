"""SIGKILL at random times, and at drawn moments of each phase and each step of a save."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row
from benchmarks.survival.faults.lab import AT_ONCE, Lab, Launch, Run, Strike, wait_until_gone
from benchmarks.survival.faults.rows import row_of_strikes
from benchmarks.survival.faults.worker import PHASES, START, WRITE_POINTS, has_rank

_KILLS_A_RUN = 5
_START_LIMIT_S = 180.0  # for a run to come to the next place of a kill


def _side_by_side(jobs: Sequence[Callable[[], list[Strike]]]) -> list[Strike]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [strike for strikes in pool.map(lambda job: job(), jobs) for strike in strikes]


# At random times


class _Budget:
    """Kills that are left, for runs side by side."""

    def __init__(self, num: int) -> None:
        self._left, self._lock, self._num_runs = num, threading.Lock(), 0

    def take(self) -> bool:
        with self._lock:
            if self._left <= 0:
                return False
            self._left -= 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._left += 1

    def next_run(self) -> int | None:
        with self._lock:
            self._num_runs += 1
            return self._num_runs if self._left > 0 else None


def sigkill_random(lab: Lab, num: int) -> Iterator[Row]:
    """Also while starting and inside a save."""
    assert lab.reference
    for fault, everything, count in (
        ("SIGKILL of a random rank, torchrun --max-restarts", False, num),
        ("SIGKILL of torchrun and all ranks, checkpoint.resume: auto", True, max(1, num // 4)),
    ):
        budget = _Budget(count)

        def runs(budget: _Budget = budget, everything: bool = everything) -> list[Strike]:
            strikes: list[Strike] = []
            while (number := budget.next_run()) is not None:
                name = f"random_{'all' if everything else 'rank'}_{number}"
                strikes += _kill_at_random(lab.run(name), random.Random(name), budget, everything)
            return strikes

        strikes = _side_by_side([runs] * AT_ONCE)
        kinds = {label: sum(strike.what == label for strike in strikes) for label in _MANNERS}
        gone = max((strike.gone_s for strike in strikes), default=0.0)
        aims = ", ".join(f"{count} {label}" for label, count in kinds.items())
        yield row_of_strikes(fault, strikes, f"{aims}; all ranks gone within {gone:.1f} s")


_MANNERS = ("while starting", "while training", "aimed at a save")


def _kill_at_random(
    run: Run, rng: random.Random, budget: _Budget, everything: bool
) -> list[Strike]:
    """One run from its start to its end."""
    strikes: list[Strike] = []
    launch, old = Launch(run, 2, max_restarts=1000), set[int]()
    while True:
        ranks: dict[int, int] = {}
        while len(ranks) < 2 and launch.process.poll() is None:
            time.sleep(0.05)
            ranks = {rank: pid for rank, pid in launch.ranks().items() if pid not in old}
        if len(ranks) < 2 or not budget.take():
            return run.judge(strikes, launch)
        manner = rng.choices(_MANNERS, (1, 3, 2))[0]
        wait_for_the_moment(run, launch, rng, manner)
        if launch.process.poll() is not None:  # it came to its end before
            budget.give_back()
            return run.judge(strikes, launch)
        old, killed = launch.pids() - {launch.process.pid}, time.time()
        if everything:
            launch.kill()
        else:
            try:
                os.kill(ranks[rng.randrange(2)], signal.SIGKILL)
            except ProcessLookupError:  # it has just come to its end, and torchrun has not yet
                budget.give_back()
                launch.process.wait()
                return run.judge(strikes, launch)
        strikes.append(Strike(killed, manner, gone_s=wait_until_gone(old)))
        if everything:
            launch = Launch(run, 2, "checkpoint.resume=auto", max_restarts=1000)


def wait_for_the_moment(run: Run, launch: Launch, rng: random.Random, manner: str) -> None:
    limit = time.monotonic() + _START_LIMIT_S

    def wait(is_there: Callable[[], Any], poll_s: float) -> None:
        while launch.process.poll() is None and not is_there():
            if time.monotonic() > limit:
                launch.kill()  # which the judge sees
            time.sleep(poll_s)

    if manner == "while starting":
        end = time.monotonic() + rng.random() * run.lab.start_s
        wait(lambda: time.monotonic() > end, 0.05)
        return
    wait(lambda: run.events()[-1:] and run.events()[-1]["event"] == "resumed", 0.05)
    if manner == "while training":
        end = time.monotonic() + rng.random() * 4
        wait(lambda: time.monotonic() > end, 0.001)
    else:
        for _ in range(rng.randint(1, 3)):
            seen = _half_written(run.run_dir)
            wait(functools.partial(_has_new, run.run_dir, seen), 0.001)
        time.sleep(rng.random() * 0.03)


def _half_written(run_dir: Path) -> set[Path]:
    return set((run_dir / "checkpoints").glob("*.tmp"))


def _has_new(run_dir: Path, seen: set[Path]) -> bool:
    return bool(_half_written(run_dir) - seen)


# At a place


def sigkill_phase(lab: Lab, num: int) -> Iterator[Row]:
    """A kill strikes at a drawn moment of a drawn visit to its place."""
    assert lab.reference
    count = max(1, num // 10)
    sizes = [min(_KILLS_A_RUN, count - initial) for initial in range(0, count, _KILLS_A_RUN)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {
            location: [
                pool.submit(_kill_at, lab, location, number, size)
                for number, size in enumerate(sizes)
            ]
            for location in (START, *PHASES, *WRITE_POINTS)
        }
        for location, runs in jobs.items():
            yield row_of_strikes(
                f"SIGKILL of a rank, {location}",
                [strike for run in runs for strike in run.result()],
            )


def _kill_at(lab: Lab, location: str, number: int, count: int) -> list[Strike]:
    run = lab.run(f"phase_{re.sub('[^a-z]+', '_', location)}_{number}")
    rng = random.Random(run.folder.name)
    most_visits = 6 if location in PHASES else 2 if location in WRITE_POINTS[:-1] else 1
    for i in range(count):
        rank = rng.randrange(2) if has_rank(location, 1) else 0
        run.plan(
            i, where=location, rank=rank, count=rng.randint(1, most_visits), moment=rng.random()
        )
    launch = Launch(run, 2, max_restarts=1000)
    launch.wait()
    return run.judge(run.strikes(), launch)
