"""metrics.jsonl: whole lines appended, and the one reader of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.files import write_durably

_log = logging.getLogger("grpo_spmd")


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
        if self._waiting:
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
            _log.warning("%s: %s; %d lines wait in memory", self._path, error.strerror, len(self._waiting))
            return
        if len(self._waiting) > 1:
            _log.warning("%s: written again, all %d lines that waited", self._path, len(self._waiting))
        self._waiting.clear()


class MetricsLine(NamedTuple):
    metrics: dict[str, Any]
    text: bytes
    end: int  # the byte of the file after it: from where a follower reads on


def read_lines(path: Path, start: int = 0) -> Iterator[MetricsLine]:
    """The lines of a metrics.jsonl from byte `start` on; none where there is no file. What is no metrics object is
    passed over: a kill may have cut the last line short, or it is being written."""
    if path.exists():
        with path.open("rb") as file:
            end = file.seek(start)
            for text in file:
                end += len(text)
                with suppress(ValueError):
                    metrics = json.loads(text)
                    if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
                        yield MetricsLine(metrics, text.rstrip(b"\n"), end)


def last_step(path: Path) -> int:
    """Of a metrics.jsonl; -1 where it has none."""
    return max((line.metrics["step"] for line in read_lines(path)), default=-1)


def cut_metrics(path: Path, start_step: int) -> None:
    """Keep the whole lines of the steps before `start_step`, and say so where one is missing."""
    if not path.exists():
        return
    lines = ((line.metrics["step"], line.text) for line in read_lines(path))
    kept = {step: text + b"\n" for step, text in lines if step < start_step}
    write_durably(path, b"".join(kept.values()))
    if missing := sorted(set(range(start_step)) - kept.keys()):
        _log.warning("%s lacks %d of the steps before %d, first step %d", path, len(missing), start_step, missing[0])
