"""Builds the page of one run or several, within bounds of size, time and memory: dumps of a long run are larger than
any page, and than what can be read while somebody waits."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grpo_spmd
from grpo_spmd.tools.report.overview import config_differences, overview
from grpo_spmd.tools.report.page import FORMAT, json_bytes, write_page
from grpo_spmd.tools.report.prompts import prompts_of
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.report.steps import (
    Cost,
    StepResult,
    StepTask,
    cost_of,
    make_step,
    parts_by_step,
    spread_out,
)

_PAGE_BYTES = 18_500_000  # of the file
# After which no further dump is read; in a process that was asked to be nice, for which nobody waits.
_READING_S, _PATIENT_S = 14.0, 20.0
# A run whose dumps have no more bytes, unpacked, is read whole, however busy the machine is; but for what never ends.
_SMALL_BYTES, _SMALL_S, _UNPACKED = 32_000_000, 120.0, 4
_TEXTS_S = 2.0  # for the prompts' texts
_SHELL_BYTES, _PROMPTS_BYTES = 250_000, 150_000
_LEAST_TEXT = 800.0  # bytes of a completion, compressed
_PROBED = 3  # steps, for what rollouts take in the page
_MOST_ROOM = 1_500_000  # bytes of the rollouts of a step, compressed
_WANTED, _RICH_TEXTS, _RICH_TOKENS = (
    4,
    12,
    6,
)  # rollouts: of a step at the least; of a step that has room for groups
_PROCESSES, _POOL_BYTES = (
    4,
    50_000_000,
)  # the most; bytes of dumps from which on they are worth their start
_NICE, _IS_NICE = (
    2,
    10,
)  # of what this process starts; of a process itself, from which on it takes one core alone


@dataclass(frozen=True)
class Plan:
    """Which steps are read, and how much of each is shown."""

    tasks: list[StepTask]  # in the order in which they are made
    parts: Mapping[int, Sequence[Path]]  # of all steps
    num_earlier: int  # steps whose dumps are of an earlier attempt
    until: float  # on the monotonic clock, after which no further step is read


def build_page(runs: Sequence[RecordedRun], out: Path) -> None:
    """Write the page, whole or not at all. Raises OSError where it cannot be written."""
    title = " and ".join(run.name for run in runs) + " - grpo_spmd"
    write_page(out, title, _chunks(runs))


def _chunks(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, bytes]]:
    """The steps of each run as they come, and what is known of all of them last."""
    began, seconds = time.monotonic(), _PATIENT_S if os.nice(0) >= _IS_NICE else _READING_S
    overviews = [overview(run, len(runs)) for run in runs]
    sizes = [len(zlib.compress(json_bytes(of_run), 1)) for of_run in overviews]
    left = _PAGE_BYTES * 3 // 4 - _SHELL_BYTES - sum(sizes) - _PROMPTS_BYTES * len(runs)
    for number, (run, of_run) in enumerate(zip(runs, overviews, strict=True)):
        until = began + seconds * (number + 1) / len(runs)
        plan = plan_of(run, max(0, left) // len(runs), until)
        results = []
        for result in _made(plan.tasks, plan.until):
            if result.num_rollouts:
                yield f"{number}/{result.step}", result.content
            results.append(StepResult(**{**vars(result), "content": b""}))
        of_run |= prompts_of(results, plan.parts, max(plan.until, time.monotonic() + _TEXTS_S))
        of_run["rollouts"] = _summary(run, plan, results)
    main = {
        "format": FORMAT,
        "made_unix_s": round(time.time(), 3),
        "version": grpo_spmd.__version__,
    }
    yield "main", json_bytes({**main, "runs": overviews, "differences": config_differences(runs)})


def plan_of(run: RecordedRun, num_bytes: int, until: float) -> Plan:
    """For `num_bytes` of the page, compressed. All steps get the same room where that is enough for tokens; else some,
    at even distances, get more, and where even the figures of all steps are too much, some are left out."""
    there, scores = (
        parts_by_step(run.folder / "rollouts"),
        parts_by_step(run.folder / "token_scores"),
    )
    own = set(run.dumped_steps)
    parts = {step: paths for step, paths in there.items() if step in own}
    if sum(map(_unpacked_size, chain(*parts.values(), *scores.values()))) <= _SMALL_BYTES:
        until = max(until, time.monotonic() + _SMALL_S)

    def task(step: int, room: float) -> StepTask:
        return StepTask(
            run.folder, step, parts[step], scores.get(step, ()), int(min(room, _MOST_ROOM))
        )

    order = spread_out(parts)
    if not order:
        return Plan([], parts, len(there), until)
    began, costs = time.monotonic(), [cost_of(task(order[0], 0))]
    for step in order[1:_PROBED]:
        if (time.monotonic() - began) * _PROBED < until - began:  # not where steps are very large
            costs.append(cost_of(task(step, 0)))
    table, text, tokens = (
        max(getattr(cost, name) for cost in costs) for name in Cost.__dataclass_fields__
    )
    # Long completions are rather cut in their middle than that whole steps are left out.
    text = min(text, max(_LEAST_TEXT, (num_bytes / len(order) - table) / _WANTED))
    least = _WANTED * text
    most = max(
        1, int(num_bytes / max(table + least, 1) + 1e-6)
    )  # all of them, to a rounding, where `text` was cut
    order = order[:most]
    room = num_bytes / len(order) - table
    rich = _RICH_TEXTS * text + _RICH_TOKENS * tokens
    rooms = dict.fromkeys(order, room)
    if room < rich:
        num_rich = int((room - least) * len(order) / max(rich - least, 1))
        rooms = {step: rich if i < num_rich else least for i, step in enumerate(order)}
    return Plan([task(step, rooms[step]) for step in order], parts, len(there) - len(parts), until)


def _made(tasks: Sequence[StepTask], until: float) -> Iterator[StepResult]:
    """What there is time for, the first task at least, as they are done; `until`: on the monotonic clock."""
    num_processes = min(len(os.sched_getaffinity(0)), _PROCESSES)
    sizes = sum(_size(path) for task in tasks for path in (*task.parts, *task.score_parts))
    if num_processes < 2 or sizes < _POOL_BYTES or os.nice(0) >= _IS_NICE:
        for number, task in enumerate(tasks):
            if number and time.monotonic() > until:
                return
            yield make_step(task)
        return
    with ProcessPoolExecutor(
        num_processes, get_context("spawn"), _be_quiet, (os.getpid(),)
    ) as pool:
        waiting = iter(tasks)
        running: set[Future[StepResult]] = {
            pool.submit(make_step, task) for task in islice(waiting, 2 * num_processes)
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if time.monotonic() <= until:
                running |= {pool.submit(make_step, task) for task in islice(waiting, len(done))}
            yield from (future.result() for future in done)


def _be_quiet(parent: int) -> None:
    """In a process of the pool: Ctrl-C is the parent's, work gives way to others', and it ends with the parent."""
    import ctypes

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.nice(_NICE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _unpacked_size(path: Path) -> int:
    """About, where it is packed."""
    return _size(path) * (_UNPACKED if path.suffix == ".gz" else 1)


def _summary(run: RecordedRun, plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    steps = sorted(result.step for result in results if result.num_rollouts)
    read, shown, wanted, wanted_shown, broken = (
        sum(getattr(result, name) for result in results)
        for name in ("num_rollouts", "num_shown", "num_wanted", "num_wanted_shown", "num_broken")
    )
    total, is_known = read, True
    notes = []
    if unread := plan.parts.keys() - {result.step for result in results}:
        why = "of time" if len(results) < len(plan.tasks) else "of size"
        notes.append(
            f"{len(results):,} of {len(plan.parts):,} dumped steps are in this page, evenly, for want {why}"
        )
        number, is_known = _num_rollouts(run, unread, read / max(1, len(results)))
        total += number
    if shown < total:
        tables = "all are" if read == total else f"{read:,} are"
        about = "" if is_known else "about "
        notes.append(
            f"of {about}{total:,} rollouts {tables} in the tables, {shown:,} with their text"
        )
    if wanted_shown < wanted:
        notes.append(
            f"{wanted - wanted_shown:,} of {wanted:,} best, worst, most mismatched and failed ones are without"
        )
    if broken:
        notes.append(f"{broken:,} broken lines or files of dumps are left out")
    if plan.num_earlier:
        notes.append(
            f"{plan.num_earlier:,} dumps are left out: of an earlier attempt at steps that are still to come"
        )
    return {"steps": steps, "shown": shown, "total": total, "note": "; ".join(notes)}


def _num_rollouts(run: RecordedRun, steps: Collection[int], usual: float) -> tuple[int, bool]:
    """Of steps that are not read, by the metrics, and whether these tell it of all; `usual`: of a step of which they do
    not."""
    counts = {line["step"]: line.get("progress/completions") for line in run.steps}
    counts[0] = 0
    found, is_known = 0.0, True
    for step in steps:
        before, after = counts.get(step - 1), counts.get(step)
        if before is None or after is None or not 0 <= before <= after:
            found, is_known = found + usual, False
        else:
            found += after - before
    return round(found), is_known
