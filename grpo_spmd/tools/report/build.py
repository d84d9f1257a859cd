"""Builds the page of one or several runs, within limits of size, time and memory.

The page is one HTML file: the HTML, styles and scripts of page/, and the data in chunks of JSON. A
browser opens it without network and without a server. Each chunk is compressed separately, and
unpacked when it is first shown. The page's content security policy (CSP) allows only the scripts
and styles whose hashes it lists, so that nothing that a run recorded can run or load anything.

The limits are needed because the dumps of a long run are larger than a page may be, and take longer
to read than a user would wait. Sizes are bytes after compression unless a comment says otherwise.
"""

from __future__ import annotations

import base64
import functools
import glob
import hashlib
import html
import os
import re
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import grpo_spmd
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.distributed.processes import end_with_parent
from grpo_spmd.files import sync_path
from grpo_spmd.tools.follow import file_size
from grpo_spmd.tools.report.overview import config_differences, overview, summarize_prompts
from grpo_spmd.tools.report.steps import (
    StepPage,
    StepResult,
    StepTask,
    json_bytes,
    make_step,
    open_folder,
    spread_indices,
    spread_out,
)

_INLINE = re.compile(
    r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>'
)
# The first bytes of every page.
PAGE_START = b"<!doctype html>"
# The size of the file; of its scripts and styles; and of a run's table of prompts.
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
_POOL_BYTES = 50_000_000  # dumps of at least this size are worth the start of further processes
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
    # base64 turns 3 bytes into 4.
    num_bytes = _PAGE_BYTES * 3 // 4 - _SHELL_BYTES - _PROMPTS_BYTES * len(runs)
    num_bytes -= sum(len(zlib.compress(json_bytes(content), 1)) for content in overviews)
    for number, (run, content) in enumerate(zip(runs, overviews, strict=True)):
        deadline = begin + seconds * (number + 1) / len(runs)
        plan = make_plan(run, max(0, num_bytes) // len(runs), deadline)
        results = []
        for result in _make_steps(plan):
            if result.counts["read"]:
                yield f"{number}/{result.step}", result.content
            results.append(replace(result, content=b""))
        content |= summarize_prompts(results, max(plan.deadline, time.monotonic() + _TEXTS_S))
        content["rollouts"] = _summarize(run, plan, results)
    main = {
        # The scripts refuse data of another format (page/base.js).
        "format": 1,
        "made_unix_s": round(time.time(), 3),
        "version": grpo_spmd.__version__,
        "runs": overviews,
        "differences": config_differences(runs),
    }
    yield "main", json_bytes(main)


def make_plan(run: RecordedRun, num_bytes: int, deadline: float) -> Plan:
    """Decides which steps of a run are shown, and in how many of `num_bytes` bytes.

    All shown steps get the same room. If the tables and a few texts of all steps are too large,
    only some steps are shown, spread evenly over the run.
    """
    # With --follow, the folder may have new dumps since the last page.
    open_folder.cache_clear()
    folder, _ = open_folder(run.folder)
    steps = sorted(set(run.dumped_steps) & folder.rollout_files.keys())
    if not steps:
        return Plan([], 0, deadline)
    num_dumped_bytes = sum(
        file_size(path)
        for files in (folder.rollout_files, folder.score_files)
        for step in steps
        for path in files.get(step, {}).values()
    )
    if num_dumped_bytes <= _SMALL_BYTES:
        deadline = max(deadline, time.monotonic() + 120.0)
    # The newest and the first step tell how large the table of a step is.
    table = max(StepPage(StepTask(run.folder, steps[i], 0)).table_size for i in (0, -1))
    # A step has a table of all its rollouts, and at least 4 kB of texts.
    num_steps = max(2, int(num_bytes / (table + 4_000)))
    order = spread_out([steps[index] for index in spread_indices(len(steps), num_steps)])
    room = min(num_bytes // len(order), 1_500_000)
    tasks = [StepTask(run.folder, step, room) for step in order]
    return Plan(tasks, num_dumped_bytes, deadline)


def _make_steps(plan: Plan) -> Iterator[StepResult]:
    """Yields the results of the steps for which there is time, and at least of the first.

    Large dumps are read by several processes; the results come in the order in which they are done.
    """
    num_processes = min(len(os.sched_getaffinity(0)), 4)
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
    os.nice(2)


def _summarize(run: RecordedRun, plan: Plan, results: Sequence[StepResult]) -> dict[str, Any]:
    """Returns the steps in the page, the numbers of rollouts, and a note of what is left out."""
    counts = sum((result.counts for result in results), Counter[str]())
    num_read, num_shown = counts["read"], counts["shown"]
    num_dumped = len(run.dumped_steps)
    num_unread = num_dumped - len(results)
    # Assume that steps that were not read have as many rollouts as the others.
    total = num_read + round(num_unread * num_read / max(1, len(results)))
    limit = "time" if len(results) < len(plan.tasks) else "room"
    about = "about " if num_unread else ""
    tables = "all are" if num_read == total else f"{num_read:,} are"
    num_old = len(run.files.rollout_files) - num_dumped
    # Each note behind a number that is 0 if there is no need for it.
    notes = (
        (
            num_unread,
            f"{len(results):,} of {num_dumped:,} dumped steps are in this page, spread evenly: "
            f"there was no {limit} for more",
        ),
        (
            total - num_shown,
            f"of {about}{total:,} rollouts {tables} in the tables, {num_shown:,} with their text",
        ),
        (
            counts["hidden"],
            f"{counts['hidden']:,} of {counts['wanted']:,} best, worst, most mismatched and failed "
            "ones have no text",
        ),
        (
            counts["broken"],
            f"{counts['broken']:,} broken lines or files of dumps are left out",
        ),
        (
            num_old,
            f"{num_old:,} dumps of an earlier attempt are left out: the run has yet to repeat "
            "their steps",
        ),
    )
    note = "; ".join(text for number, text in notes if number)
    steps = sorted(result.step for result in results if result.counts["read"])
    return {"steps": steps, "shown": num_shown, "total": total, "note": note}


# The file


def write_page(out: Path, title: str, chunks: Iterable[tuple[str, bytes]]) -> None:
    """Writes the page to `out`, completely or not at all. A chunk is (name, JSON in ASCII).

    An earlier file is replaced at the end. Only one chunk is in memory at a time. Raises OSError if
    the file cannot be written, and whatever `chunks` raises.
    """
    head, foot = _shell()
    for path in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        with suppress(OSError):
            # An unfinished file of ten minutes was left by a writer that was killed.
            if time.time() - path.lstat().st_mtime > 600.0:
                path.unlink()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        # Mode x creates the file; it would not write through a link of that name.
        with temporary.open("xb") as file:
            # In ASCII: half a surrogate pair becomes a number, which a browser shows as U+FFFD.
            shown_title = html.escape(title).encode("ascii", "xmlcharrefreplace")
            file.write(head.replace(b"{{title}}", shown_title))
            for name, content in chunks:
                file.write(_pack_chunk(name, content))
            file.write(foot)
        # Written to the disk before the rename: a crash of the machine must not leave half a page.
        sync_path(temporary)
        temporary.replace(out)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _pack_chunk(name: str, content: bytes) -> bytes:
    """Returns a chunk as a <script> element of a type that browsers neither run nor show."""
    deflate = zlib.compressobj(level=6, wbits=-15)  # raw: DecompressionStream("deflate-raw")
    packed = deflate.compress(content) + deflate.flush()
    text = base64.b64encode(packed).decode()
    return f'<script type="application/octet-stream" data-chunk="{name}">{text}</script>\n'.encode()


@functools.cache
def _shell() -> tuple[bytes, bytes]:
    """Returns page.html before and after the chunks, with styles, scripts and policy inlined."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(match: re.Match[str]) -> str:
        kind = "style" if match["style"] else "script"
        text = f"\n{_read_asset(match[kind]).strip()}\n"
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    page = _INLINE.sub(inline, _read_asset("page.html"))
    page = page.replace("<!-- uplot.LICENSE -->", html.escape(_read_asset("uplot.LICENSE")))
    # With trusted types, a browser that supports them refuses to parse any text as HTML.
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head, mark, foot = page.replace("<!-- policy -->", meta).partition("<!-- chunks -->")
    assert mark, page[:200]
    return head.encode(), foot.encode()


def _read_asset(name: str) -> str:
    return (Path(__file__).with_name("page") / name).read_text(encoding="utf-8")
