"""Writes and reads files of JSON lines in a run folder, metrics.jsonl above all.

The run folder may be somebody else's, half written, or on a full disk. Imports no torch.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import open_regular, write_durably

_log = logging.getLogger("grpo_spmd")
# A line with a million tokens takes about 20 MiB; a month of steps is 100,000 lines.
_MAX_LINE_BYTES = 1 << 25
# This bounds unpacked bytes: a few megabytes of gzip can hold very much more.
_MAX_FILE_BYTES = 1 << 32
MAX_LINES = 1 << 20
_END_BYTES = 1 << 22


class LineFile:
    """Appends whole lines to a file.

    A line that a full disk refuses is kept in memory and written with the next one: a run should
    not end for lack of a kilobyte, since the space may come back. If it does not come back, the
    next checkpoint fails with an error.
    """

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending; it is created if it is missing."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []

    def write(self, line: str) -> None:
        """Appends `line` and a line break. Raises RuntimeError if somebody has removed the file."""
        if not os.fstat(self._file.fileno()).st_nlink and not self._path.exists():
            raise RuntimeError(
                f"{self._path} was removed while the run wrote it, and what it writes is lost; "
                "start again in another run_dir"
            )
        self._waiting.append(line.encode() + b"\n")
        self._flush()

    def close(self) -> None:
        """Writes the waiting lines if the disk takes them, and closes the file."""
        self._flush()
        if self._waiting:
            _log.error("%s lacks its last %d lines", self._path, len(self._waiting))
        self._file.close()

    def _flush(self) -> None:
        """Writes all waiting lines, or none of them if the disk refuses some."""
        end = self._file.seek(0, os.SEEK_END)
        rest = b"".join(self._waiting)
        num_waiting = len(self._waiting)
        try:
            # a disk that is nearly full writes only a part of the bytes
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                # half a line would spoil the next one
                self._file.truncate(end)
            _log.warning("%s: %s; %d lines wait in memory", self._path, error.strerror, num_waiting)
            return
        if num_waiting > 1:
            _log.warning("%s: written again, all %d lines that waited", self._path, num_waiting)
        self._waiting.clear()


class LinePosition(NamedTuple):
    """The place of a line: bytes [start, end) of the unpacked file, including the line break."""

    path: Path
    start: int
    end: int


class FileLine(NamedTuple):
    """A line of a file, without its line break, and its place in the file."""

    number: int
    """The number of the line, from 1 on."""
    text: bytes
    position: LinePosition

    @property
    def name(self) -> str:
        """Returns "FILE:NUMBER" for messages."""
        return f"{self.position.path}:{self.number}"


def read_lines(path: Path, start: int = 0, *, follow: bool = False) -> Iterator[FileLine]:
    """Yields the lines of a plain or .gz file from byte `start` on, one in memory at a time.

    `follow` allows a symbolic link in the place of a file. Raises ConfigError, in one line, for a
    path that is missing, not a regular file, not a whole gzip file or larger than any file that a
    run writes. The lines before the damage are yielded first.
    """
    try:
        with open_lines(path, follow=follow) as file:
            end = file.seek(start)
            lines = iter(partial(file.readline, _MAX_LINE_BYTES), b"")
            for number, line in enumerate(lines, start=1):
                begin = end
                end += len(line)
                is_long = len(line) == _MAX_LINE_BYTES
                if is_long or number > MAX_LINES or end > _MAX_FILE_BYTES:
                    raise ConfigError(
                        f"{path}:{number}: no run writes a line of {_MAX_LINE_BYTES >> 20} MiB, "
                        f"nor more than {MAX_LINES:,} lines or {_MAX_FILE_BYTES >> 30} GiB"
                    )
                text = line.removesuffix(b"\n")
                yield FileLine(number, text, LinePosition(path, begin, end))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path}: not a whole gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def open_lines(path: Path, *, follow: bool = False) -> IO[bytes]:
    """Opens a regular file for reading, unpacked if its name ends with .gz."""
    file = open_regular(path, follow=follow)
    if path.suffix != ".gz":
        return file
    # mypy: GzipFile has all methods of IO[bytes] that are used, but is no subclass of it
    return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]


class JsonLine(NamedTuple):
    """One parsed line of JSON, such as a line of metrics.jsonl, and its text."""

    values: dict[str, Any]
    text: bytes
    end: int
    """The byte after the line and its line break, from which a follower reads on."""


def read_metrics(path: Path, start: int = 0) -> Iterator[JsonLine]:
    """Yields the lines of a metrics.jsonl from byte `start` on; nothing if there is no file.

    Lines that are not objects with a step are skipped: the last line may be cut by a kill, or still
    being written.
    """
    return read_objects(path, "step", start)


def read_objects(path: Path, key: str, start: int = 0) -> Iterator[JsonLine]:
    """Yields the lines of a file that are JSON objects with a whole number as `key`.

    Other lines are skipped, as in `read_metrics`. Yields nothing if there is no file.
    """
    if os.path.lexists(path):
        for line in read_lines(path, start):
            values = _parse_object(line.text, key)
            if values is not None:
                yield JsonLine(values, line.text, line.position.end)


def _parse_object(text: bytes, key: str) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None if it is none, or its `key` is no whole number."""
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
        if isinstance(values, dict) and type(values.get(key)) is int:
            return values
    return None


def read_metrics_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a metrics.jsonl from its end, the last line first.

    Reads only the last 4 MiB, which have some hundred lines. Yields nothing if there is no file.
    """
    if os.path.lexists(path):
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            for text in reversed(file.read().split(b"\n")):
                metrics = _parse_object(text, "step")
                if metrics is not None:
                    yield metrics


def is_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Returns whether a line of metrics.jsonl is that of an evaluation.

    An evaluation measures the policy after a step. Its line follows the step's own line and has the
    same `step`.
    """
    # the first name is "step"; an evaluation's other names begin with "eval/"
    return next(islice(metrics, 1, None), "").startswith("eval/")


def ends_with_evaluation(path: Path, step: int) -> bool:
    """Returns whether a metrics.jsonl ends with an evaluation after `step` or a later step."""
    newest = next(read_metrics_backwards(path), {"step": -1})
    return is_evaluation(newest) and newest["step"] >= step


def cut_metrics(path: Path, num_steps: int) -> None:
    """Cuts a metrics.jsonl back to the first `num_steps` steps, for a run that resumes after them.

    The evaluation after the last of these steps is removed too, since the resumed run makes it
    again. If a step is there twice, its last line is kept. Broken lines are removed. Warns if the
    line of a step is missing.
    """
    if not os.path.lexists(path):
        return
    lines: dict[tuple[int, bool], bytes] = {}
    for line in read_metrics(path):
        key = line.values["step"], is_evaluation(line.values)
        # False < True: the step's own line is kept, its evaluation is not
        if key <= (num_steps, False) and key != (0, False):
            lines[key] = line.text + b"\n"
    write_durably(path, b"".join(lines.values()))
    missing = [step for step in range(1, num_steps + 1) if (step, False) not in lines]
    if missing:
        _log.warning(
            "%s lacks %d of the first %d steps, first step %d",
            path,
            len(missing),
            num_steps,
            missing[0],
        )
