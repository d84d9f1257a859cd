"""Writes and reads timeline.jsonl, which tells when each rank was in which phase of a step.

A span is the time from entering a phase to leaving it (config.schema.PHASES lists the phases). A
line of the file is one step: {"step", "unix_s", "world_size", "ranks", "spans"}; spans[i] are those
of ranks[i]. A resumed run appends to the file, so a step may be in it twice: then the last line
counts. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from grpo_spmd.files import UntrustedError, open_regular
from grpo_spmd.observe.metrics_file import LineFile, read_lines

_log = logging.getLogger("grpo_spmd")
_NAME = "timeline.jsonl"
# The most ranks in a line, and the most spans that a rank sends: so a line has at most 0.3 MB.
_MAX_RANKS = 64
_MAX_SPANS = 64
# The step of a raw line, so that lines of other steps need not be parsed.
_STEP = re.compile(rb'{"step": ?(\d{1,15}),')


class Span(NamedTuple):
    """One stay of a rank in a phase; times are in seconds since the step began on this rank."""

    phase: str
    start_s: float
    end_s: float
    peak_gib: float | None
    """The peak of memory, the same as memory/PHASE/peak_gib in the metrics."""
    busy_s: float | None
    """How long this rank's engine generated, in a rollout phase; None if it did not generate."""


@dataclass(frozen=True)
class Timeline:
    """A line of timeline.jsonl: when some ranks were in which phase of one step.

    In the file each span is a JSON list.
    """

    step: int
    unix_s: float
    """When the step began on rank 0."""
    world_size: int
    ranks: list[int]
    """The ranks whose spans are in the line."""
    spans: list[list[Span]]
    """The spans of each rank in `ranks`, in time order."""


def timed_spans(spans: Sequence[Span], generation_s: Sequence[float]) -> list[Span]:
    """Returns a rank's spans as rank 0 gets them: rounded to milliseconds, and with `busy_s`.

    `generation_s` has the seconds of the step's generations, one for each rollout span but the
    last, in order: in the last rollout span the engine goes to sleep. If there are more than 64
    spans (dynamic sampling refilled the step often), the first 32 and the last 32 are returned.
    """
    busy = iter(generation_s)
    timed = []
    for span in spans:
        busy_s = next(busy, None) if span.phase == "rollout" else None
        numbers = [None if n is None else round(n, 3) for n in (*span[1:4], busy_s)]
        timed.append(Span(span.phase, *numbers))  # type: ignore[arg-type]
    if len(timed) > _MAX_SPANS:
        timed = timed[: _MAX_SPANS // 2] + timed[-_MAX_SPANS // 2 :]
    return timed


class TimelineFile:
    """Writes timeline.jsonl on rank 0.

    The run does not need the file, so an error of the disk is logged and not raised.
    """

    def __init__(self, run_dir: Path) -> None:
        """Opens timeline.jsonl for appending."""
        path = run_dir / _NAME
        self._file: LineFile | None = None
        try:
            end = b""
            if os.path.lexists(path):
                # not opened for writing before the check: opening a fifo would wait for a reader
                with open_regular(path) as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                    end = file.read()
            self._file = LineFile(path)
            if end not in (b"", b"\n"):
                # a kill has cut the last line short: end it, or the next line would continue it
                self._file.write("")
        except (OSError, UntrustedError) as error:
            _log.warning("%s is not written: %s", path, error)

    def write(
        self, step: int, unix_s: float, world_size: int, rank_spans: Sequence[list[Span]]
    ) -> None:
        """Writes the line of `step`, from what `timed_spans` returned on each rank."""
        if self._file is None:
            return
        ranks = shown_ranks([sum(span.busy_s or 0.0 for span in spans) for spans in rank_spans])
        shown_spans = [rank_spans[rank] for rank in ranks]
        timeline = Timeline(step, round(unix_s, 3), world_size, ranks=ranks, spans=shown_spans)
        self._file.write(msgspec.json.encode(timeline).decode())

    def close(self) -> None:
        """Closes the file, if it could be opened."""
        if self._file is not None:
            self._file.close()


def shown_ranks(busy_s: Sequence[float]) -> list[int]:
    """Returns the ranks whose spans a line has: all of up to 64 ranks, else at most 64 of them.

    `busy_s` has the seconds that each rank's engine generated. Ranks are chosen at even distances
    from the first to the last, with the two that generated for the shortest and the longest time.
    """
    if len(busy_s) <= _MAX_RANKS:
        return list(range(len(busy_s)))
    spread = {round(rank) for rank in np.linspace(0, len(busy_s) - 1, _MAX_RANKS - 2).tolist()}
    return sorted(spread | {int(np.argmin(busy_s)), int(np.argmax(busy_s))})


def read_timeline(run_dir: Path, steps: Collection[int] | None = None) -> dict[int, Timeline]:
    """Returns the timelines by step, in the order of the file; {} if there is no file.

    If `steps` is given, only these steps are read. Lines of steps beyond the newest checkpoint,
    which a resumed run will make again, are returned too. Broken lines are skipped, because a kill
    may have cut a line. Raises ConfigError for a file that cannot be read.
    """
    path = run_dir / _NAME
    timelines: dict[int, Timeline] = {}
    for line in read_lines(path) if os.path.lexists(path) else ():
        step = _STEP.match(line.text)
        if step is not None and (steps is None or int(step[1]) in steps):
            with suppress(ValueError, RecursionError):
                timeline = msgspec.json.decode(line.text, type=Timeline)
                timelines[timeline.step] = timeline
    return timelines
