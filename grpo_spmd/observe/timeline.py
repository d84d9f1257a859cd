"""timeline.jsonl: in which phase each rank of a step was, and when. Imports no torch.

A line is {"step", "unix_s", "world_size", "ranks", "spans"}; spans[i] are those of ranks[i]. A run
that goes on appends to it: of a step that was made twice the last line counts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import PHASES
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.files import UntrustedError, open_regular, parse_object
from grpo_spmd.observe.metrics_file import LineFile

_log = logging.getLogger("grpo_spmd")
_NAME = "timeline.jsonl"
_MOST_RANKS, _MOST_SPANS = 64, 64  # that a line shows; that a rank sends
_LONGEST = 1 << 22  # bytes; a line of that many has 0.3 MB
_STEP = re.compile(rb'{"step": ?(\d{1,15}),')
_Numbers = npt.NDArray[np.int32]  # [spans, 5] as sent: place in PHASES, ms, ms, MiB, ms; -1: null


class Span(NamedTuple):
    """A phase that a rank was in, in seconds since the step began on that rank, to the ms."""

    phase: str
    start_s: float
    end_s: float
    peak_gib: float | None  # of memory, as memory/PHASE/peak_gib of the metrics
    busy_s: float | None  # of a rollout, in which this rank's engine generated; None: it did not


@dataclass(frozen=True)
class Timeline:
    """Of a step; `spans` become lists of lists in JSON."""

    step: int
    unix_s: float  # when it began on rank 0
    world_size: int
    ranks: list[int]  # that are shown
    spans: list[list[Span]]  # of each, in time order


def pack_spans(spans: Sequence[Span], generation_s: Sequence[float]) -> bytes:
    """A rank's part of a line, 20 bytes a span, and `generation_s` in those of its rollouts, which
    come first: behind them the engine only falls asleep. Of more than 64 spans (a step that was
    refilled) the first and the last."""
    busy, rows = iter(generation_s), list[list[float]]()
    for phase, start, end, peak, _ in spans:
        seconds = next(busy, None) if phase == "rollout" else None
        used, busy_ms = (
            -1 if peak is None else 1024 * peak,
            -1 if seconds is None else 1000 * seconds,
        )
        rows.append([PHASES.index(phase), 1000 * start, 1000 * end, used, busy_ms])
    if len(rows) > _MOST_SPANS:
        rows = rows[: _MOST_SPANS // 2] + rows[-_MOST_SPANS // 2 :]
    return pack(len(rows), [np.array(rows, np.float64).round().astype(np.int32)])


def unpack_spans(part: PackedReader) -> _Numbers:
    """What `pack_spans` made; `part` goes on behind it."""
    return part.array(np.int32, 5 * part.header).reshape(-1, 5)


class TimelineFile:
    """On rank 0. It is for people: what a disk does to it raises nothing."""

    def __init__(self, run_dir: Path) -> None:
        path, self._file = run_dir / _NAME, None
        try:
            cut = b""
            if os.path.lexists(path):
                with open_regular(path) as file:  # or one might wait for the reader of a fifo
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                    cut = file.read()
            self._file = LineFile(path)
            if cut not in (b"", b"\n"):
                self._file.write("")  # a kill has cut the last line short
        except (OSError, UntrustedError) as error:
            _log.warning(
                "%s is not written: %s",
                path,
                error.strerror if isinstance(error, OSError) else error,
            )

    def write(
        self, step: int, unix_s: float, world_size: int, of_ranks: Sequence[_Numbers]
    ) -> None:
        """The line of `step`; `of_ranks`: from rank 0 on, by `unpack_spans`."""
        if self._file is None:
            return
        ranks = shown_ranks([float(numbers[:, 4].clip(0).sum()) for numbers in of_ranks])
        line = Timeline(
            step, round(unix_s, 3), world_size, ranks, [_spans(of_ranks[rank]) for rank in ranks]
        )
        self._file.write(msgspec.json.encode(line).decode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def shown_ranks(busy: Sequence[float]) -> list[int]:
    """All up to 64 ranks; else as many at even distances, the first and the last among them, with
    those that generated for the shortest and for the longest time."""
    if len(busy) <= _MOST_RANKS:
        return list(range(len(busy)))
    evenly = {round(rank) for rank in np.linspace(0, len(busy) - 1, _MOST_RANKS - 2).tolist()}
    return sorted(evenly | {int(np.argmin(busy)), int(np.argmax(busy))})


def _spans(numbers: _Numbers) -> list[Span]:
    rows = (numbers / (1, 1000, 1000, 1024, 1000)).round(3).tolist()
    return [
        Span(PHASES[int(phase)], start, end, None if peak < 0 else peak, None if busy < 0 else busy)
        for phase, start, end, peak, busy in rows
    ]


def read_timeline(run_dir: Path, steps: Collection[int] | None = None) -> dict[int, Timeline]:
    """By step, in the order of the file, of `steps` alone where they are given: only these are held
    and parsed. Steps that a run has made and will make again are there too. What is no line of a
    timeline is passed over; {} where there is no file. Raises ConfigError where it is none that
    could be read."""
    path, found = run_dir / _NAME, dict[int, Timeline]()
    if not os.path.lexists(path):
        return found
    try:
        with open_regular(path) as file:
            while line := file.readline(_LONGEST):
                step = _STEP.match(line)
                is_wanted = step is not None and (steps is None or int(step[1]) in steps)
                if is_wanted and (timeline := _parsed(line, path)) is not None:
                    found[timeline.step] = timeline
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return found


def _parsed(line: bytes, path: Path) -> Timeline | None:
    """None: it is no line of a timeline; it may be half a one, or of somebody who wishes us ill."""
    try:
        values = parse_object(line, path)
        step, unix_s, size, ranks, of_ranks = (values[name] for name in Timeline.__annotations__)
        spans = [[Span(*span) for span in spans] for spans in of_ranks]
        is_sound = (
            type(step) is int
            and _is_number(unix_s)
            and type(size) is int
            and len(ranks) == len(spans)
        )
        is_sound &= all(type(rank) is int and 0 <= rank < size for rank in ranks)
        is_sound &= all(_is_sound(span) for spans in spans for span in spans)
    except (UntrustedError, KeyError, TypeError):
        return None
    return Timeline(step, unix_s, size, ranks, spans) if is_sound else None


def _is_sound(span: Span) -> bool:
    phase, start, end, *rest = span
    is_phase = isinstance(phase, str) and len(phase) <= 100
    is_time = _is_number(start) and _is_number(end) and start <= end
    return is_phase and is_time and all(value is None or _is_number(value) for value in rest)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e12  # NaN is not
