"""Builds the page of one or several runs, within limits of size, time and memory.

The limits are needed because the dumps of a long run are larger than a page may be, and take longer
to read than a user would wait. Sizes are bytes after compression unless a comment says otherwise.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import grpo_spmd
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.distributed.processes import end_with_parent
from grpo_spmd.tools.follow import file_size
from grpo_spmd.tools.report.overview import config_differences, overview, summarize_prompts
from grpo_spmd.tools.report.page import FORMAT, json_bytes, write_page
from grpo_spmd.tools.report.steps import (
    StepCost,
    StepResult,
    StepTask,
    make_step,
    measure_step,
    open_folder,
    spread_out,
)

# The largest size of the file (in base64), and the room in it for scripts and styles, and for each
# run's table of prompts.
_PAGE_BYTES = 18_500_000
_SHELL_BYTES = 250_000
_PROMPTS_BYTES = 150_000
# Seconds after which no further dump is read. The second is for a process of low priority, since
# nobody waits for it.
_READING_S = 14.0
_PATIENT_S = 20.0
_TEXTS_S = 2.0  # for reading the texts of prompts
# A run whose dumps have at most so many bytes is read in full, however busy the machine is.
_SMALL_BYTES = 8_000_000
_SMALL_S = 120.0
_MIN_TEXT_BYTES = 800.0  # to which a completion may be cut
_NUM_MEASURED = 3  # steps whose cost is measured
_MAX_STEP_BYTES = 1_500_000  # of the rollouts of a step
_MIN_ROLLOUTS = 4  # of a step
# Rollouts that a step with ample room shows, and those of them that have tokens.
_RICH_TEXTS = 12
_RICH_TOKENS = 6
_MAX_PROCESSES = 4
_POOL_BYTES = 50_000_000  # dumps of at least this size are worth the start of further processes
_NICE = 2  # added to the nice value of the processes that this one starts
_LOW_PRIORITY = 10  # a process of at least this nice value uses one core only


class Plan(NamedTuple):
    """The steps of a run to read, and how much of each to show."""

    tasks: list[StepTask]  # in the order in which the steps are read
    num_dumped_bytes: int
    deadline: float  # on the monotonic clock, after which no further step is read


def build_page(runs: Sequence[RecordedRun], out: Path) -> None:
    """Writes the page of `runs`, completely or not at all.

    Raises OSError if it cannot be written.
    """
    names = " and ".join(run.name for run in runs)
    title = f"{names}: {runs[0].subject}" if len(runs) == 1 and runs[0].subject else names
    write_page(out, f"{title} - grpo_spmd", _make_chunks(runs))


def _make_chunks(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, bytes]]:
    """Yields the chunks of the page: (name, JSON).

    There is a chunk for each shown step of each run, in the order in which they are done. The last
    one, "main", has all the rest.
    """
    begin = time.monotonic()
    seconds = _PATIENT_S if os.nice(0) >= _LOW_PRIORITY else _READING_S
    overviews = [overview(run, len(runs)) for run in runs]
    # The bytes that the chunks of all steps may take. base64 turns 3 bytes into 4.
    num_bytes = _PAGE_BYTES * 3 // 4 - _SHELL_BYTES - _PROMPTS_BYTES * len(runs)
    num_bytes -= sum(len(zlib.compress(json_bytes(content), 1)) for content in overviews)
    for number, (run, content) in enumerate(zip(runs, overviews, strict=True)):
        deadline = begin + seconds * (number + 1) / len(runs)
        plan = make_plan(run, max(0, num_bytes) // len(runs), deadline)
        results = []
        for result in _make_steps(plan):
            # A step of which no rollout could be read gets no chunk.
            if result.counts["read"]:
                yield f"{number}/{result.step}", result.content
            # Without the content, which has been yielded and would only take memory.
            results.append(replace(result, content=b""))
        content |= summarize_prompts(results, max(plan.deadline, time.monotonic() + _TEXTS_S))
        content["rollouts"] = _summarize(run, plan, results)
    main = {
        "format": FORMAT,
        "made_unix_s": round(time.time(), 3),
        "version": grpo_spmd.__version__,
        "runs": overviews,
        "differences": config_differences(runs),
    }
    yield "main", json_bytes(main)


def make_plan(run: RecordedRun, num_bytes: int, deadline: float) -> Plan:
    """Returns the plan of a run: which steps are shown, and in how many of `num_bytes` bytes each.

    `deadline` is the time on the monotonic clock after which no further step is read. It is put off
    if the dumps are small.

    All steps get the same room if it suffices for tokens. Otherwise some steps, spread evenly over
    the run, get more than the others. If even the tables and a few texts of all steps are too
    large, some steps are left out.
    """
    begin = time.monotonic()
    # With --follow, the folder may have new dumps since the last page.
    open_folder.cache_clear()
    folder, _ = open_folder(run.folder)
    order = spread_out(set(run.dumped_steps) & folder.rollout_files.keys())
    if not order:
        return Plan([], 0, deadline)
    num_dumped_bytes = sum(
        file_size(path)
        for files in (folder.rollout_files, folder.score_files)
        for step in order
        for path in files.get(step, {}).values()
    )
    if num_dumped_bytes <= _SMALL_BYTES:
        deadline = max(deadline, begin + _SMALL_S)
    # Only a few steps are measured, since reading them takes time.
    costs: list[StepCost] = []
    for step in order[:_NUM_MEASURED]:
        # After the first step, go on only if measuring all of them leaves time to read the dumps.
        if not costs or (time.monotonic() - begin) * _NUM_MEASURED < deadline - begin:
            costs.append(measure_step(StepTask(run.folder, step, _MAX_STEP_BYTES)))
    rooms = _share_room(order, costs, num_bytes)
    tasks = [
        StepTask(run.folder, step, int(min(room, _MAX_STEP_BYTES))) for step, room in rooms.items()
    ]
    return Plan(tasks, num_dumped_bytes, deadline)


def _share_room(
    order: Sequence[int], costs: Sequence[StepCost], num_bytes: int
) -> dict[int, float]:
    """Returns the steps to show, each with the bytes for the texts and tokens of its rollouts.

    `order` has all steps, the most wanted first; `costs` are those of the measured steps."""
    # Assume that every step costs as much as the largest that was measured.
    table, text, tokens = (max(sizes) for sizes in zip(*costs, strict=True))
    # Before steps are left out, completions are cut in their middle, to `bytes_per_text`.
    bytes_per_text = (num_bytes / len(order) - table) / _MIN_ROLLOUTS
    text = min(text, max(_MIN_TEXT_BYTES, bytes_per_text))
    # The bytes of a step that shows few rollouts, and of one that shows many.
    poor = _MIN_ROLLOUTS * text
    rich = _RICH_TEXTS * text + _RICH_TOKENS * tokens
    # If `text` was cut, all steps fit exactly; the small number keeps rounding from losing one.
    max_steps = max(1, int(num_bytes / max(table + poor, 1) + 1e-6))
    order = order[:max_steps]
    room = num_bytes / len(order) - table
    if room >= rich:
        return dict.fromkeys(order, room)
    # What is left after all steps have got `poor` makes the first ones rich.
    num_rich = int((room - poor) * len(order) / max(rich - poor, 1))
    return {step: rich if index < num_rich else poor for index, step in enumerate(order)}


def _make_steps(plan: Plan) -> Iterator[StepResult]:
    """Yields the results of the steps that can be read before the plan's deadline, at least one.

    Large dumps are read by several processes; the results come in the order in which they are done.
    """
    num_processes = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
    if num_processes < 2 or plan.num_dumped_bytes < _POOL_BYTES or os.nice(0) >= _LOW_PRIORITY:
        for number, task in enumerate(plan.tasks):
            if number and time.monotonic() > plan.deadline:
                return
            yield make_step(task)
        return
    # spawn, because a forked process would inherit locks that other threads of this one hold.
    with ProcessPoolExecutor(
        num_processes, get_context("spawn"), _start_worker, (os.getpid(),)
    ) as pool:
        tasks = iter(plan.tasks)
        running: set[Future[StepResult]] = {
            pool.submit(make_step, task) for task in islice(tasks, 2 * num_processes)
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            # A task is added for each that is done, so that few results are in memory at a time.
            if time.monotonic() <= plan.deadline:
                running |= {pool.submit(make_step, task) for task in islice(tasks, len(done))}
            yield from (future.result() for future in done)


def _start_worker(parent: int) -> None:
    """Prepares a process of the pool: it has a lower priority, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent(signal.SIGKILL, parent)
    os.nice(_NICE)


def _summarize(run: RecordedRun, plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    """Returns a run's "rollouts" in the chunk "main".

    It has the steps in the page, the numbers of rollouts, and a note that says what is left out."""
    counts = sum((result.counts for result in results), Counter[str]())
    num_read = counts["read"]
    num_shown = counts["shown"]
    # Dumps of steps that the run made before it resumed from an earlier checkpoint.
    num_old = len(run.files.rollout_files) - len(run.dumped_steps)
    total = num_read  # of all dumped steps; estimated if some steps were not read
    about = ""
    notes = []
    unread_steps = set(run.dumped_steps) - {result.step for result in results}
    if unread_steps:
        limit = "time" if len(results) < len(plan.tasks) else "room"
        notes.append(
            f"{len(results):,} of {len(run.dumped_steps):,} dumped steps are in this page, spread "
            f"evenly: there was no {limit} for more"
        )
        # Assume that steps that were not read have as many rollouts as the others.
        total += round(len(unread_steps) * num_read / max(1, len(results)))
        about = "about "
    if num_shown < total:
        tables = "all are" if num_read == total else f"{num_read:,} are"
        notes.append(
            f"of {about}{total:,} rollouts {tables} in the tables, {num_shown:,} with their text"
        )
    for number, text in (
        (
            counts["hidden"],
            f"of {counts['wanted']:,} best, worst, most mismatched and failed ones have no text",
        ),
        (counts["broken"], "broken lines or files of dumps are left out"),
        (
            num_old,
            "dumps of an earlier attempt are left out: the run has yet to repeat their steps",
        ),
    ):
        if number:
            notes.append(f"{number:,} {text}")
    steps = sorted(result.step for result in results if result.counts["read"])
    return {"steps": steps, "shown": num_shown, "total": total, "note": "; ".join(notes)}
