"""metrics.jsonl: whole lines appended, and the one reader of them."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.files import open_regular, sync_path, write_durably

_log = logging.getLogger("grpo_spmd")
_BLOCK, _LONGEST = 1 << 16, 1 << 24  # bytes that are read at a time; that no line has


class LineFile:
    """Appends whole lines. What a full disk does not take waits in memory for the next line: a run should not end for
    want of a kilobyte while the space may come back. Else the next checkpoint says so."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)
        self._waiting: list[bytes] = []

    def write(self, line: str) -> None:
        self._waiting.append(line.encode() + b"\n")
        self._flush()

    def close(self) -> None:
        self._flush()
        if self._waiting:
            _log.error("%s lacks its last %d lines", self._path, len(self._waiting))
        self._file.close()

    def _flush(self) -> None:
        end, rest = self._file.seek(0, os.SEEK_END), b"".join(self._waiting)
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # half a line would spoil the next one
            _log.warning(
                "%s: %s; %d lines wait in memory", self._path, error.strerror, len(self._waiting)
            )
            return
        if len(self._waiting) > 1:
            _log.warning(
                "%s: written again, all %d lines that waited", self._path, len(self._waiting)
            )
        self._waiting.clear()


class MetricsLine(NamedTuple):
    metrics: dict[str, Any]
    text: bytes
    end: int  # the byte of the file after it: from where a follower reads on


def read_lines(path: Path, start: int = 0) -> Iterator[MetricsLine]:
    """The lines of a metrics.jsonl from byte `start` on; none where there is no file. What is no metrics object is
    passed over: a kill may have cut the last line short, or it is being written."""
    with _opened(path) as file:
        end = file.seek(start)
        while text := file.readline(_LONGEST):
            end += len(text)
            if (metrics := _parsed(text)) is not None:
                yield MetricsLine(metrics, text.rstrip(b"\n"), end)


def _opened(path: Path) -> io.BufferedReader:
    return open_regular(path) if os.path.lexists(path) else open(os.devnull, "rb")


def _parsed(text: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        metrics = json.loads(text)
        if isinstance(metrics, dict) and type(metrics.get("step")) is int:
            return metrics
    return None


def lines_from_end(path: Path) -> Iterator[dict[str, Any]]:
    """The metrics in the lines of a metrics.jsonl, the last first: a month has 100,000 lines of a hundred values."""
    with _opened(path) as file:
        place, rest = file.seek(0, os.SEEK_END), b""
        while place:
            size = min(_BLOCK, place)
            place = file.seek(place - size)
            rest, *lines = (file.read(size) + rest[:_LONGEST]).split(b"\n")
            texts = lines if place else [rest, *lines]
            yield from (metrics for text in texts[::-1] if (metrics := _parsed(text)) is not None)


def is_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Whether a line is of the policy after its step, and not of the step: such a line follows the step's own."""
    return next(islice(metrics, 1, None), "").startswith("eval/")


def ends_with_evaluation(path: Path, step: int) -> bool:
    """Whether the last line of a metrics.jsonl is of the policy after `step`, or a later one."""
    last = next(lines_from_end(path), {"step": -1})
    return is_evaluation(last) and last["step"] >= step


def cut_metrics(path: Path, num_steps: int) -> None:
    """Keep the whole lines up to that of step `num_steps`, and say so where one is missing. The evaluation that follows
    it goes: the run that goes on makes it."""
    if not os.path.lexists(path):
        return
    with _opened(path) as file:  # lines in their order, as a run leaves them, need no parsing
        step, is_plain = 0, True
        while is_plain and step < num_steps:
            line = file.readline(_LONGEST)
            is_plain = line[-2:] == b"}\n"
            if line.startswith(b'{"step": %d,' % (step + 1)):
                step += 1
            else:
                is_plain &= line.startswith(b'{"step": %d, "eval/' % step)
        end, after = file.tell(), _parsed(file.readline(_LONGEST))
        if is_plain and (after is None or after["step"] >= num_steps):
            os.truncate(path, end)
            sync_path(path)
            return
    kept: dict[tuple[int, bool], bytes] = {}
    for metrics, text, _ in read_lines(path):
        place = metrics["step"], is_evaluation(metrics)
        if place <= (num_steps, False) and place != (0, False):
            kept[place] = text + b"\n"
    write_durably(path, b"".join(kept.values()))
    if missing := sorted({(step, False) for step in range(1, num_steps + 1)} - kept.keys()):
        _log.warning(
            "%s lacks %d of the first %d steps, first step %d",
            path,
            len(missing),
            num_steps,
            missing[0][0],
        )
