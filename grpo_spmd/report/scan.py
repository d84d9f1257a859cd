"""Reads a step's dumps quickly: a few numbers of every rollout, and where its line is, so that only the lines that are
shown are parsed whole. A broken line costs itself, a broken file what is behind the break."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, TypeVar

import msgspec

from grpo_spmd.observe.rollout_files import PACKED, PLAIN, step_stem
from grpo_spmd.untrusted import UntrustedError, open_regular

_BLOCK, _LONGEST = 1 << 25, 1 << 26  # bytes that are read at a time; that a line has
_MOST_BYTES, _MOST_LINES = 1 << 32, 1 << 18  # of a step: what is behind is left out
_MOST_PARTS = 4096
_FAILURES = "error", "timeout"
Place = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Line = TypeVar("_Line")


class _Rollout(msgspec.Struct, gc=False):
    """What of a rollout's line is wanted of all of them; the rest is skipped over."""

    row: Place
    position: Place
    sample: Place
    rollout_id: Place | None = None
    reward: float | None = None
    advantage: float | None = None
    statuses: dict[str, str] = {}
    finish_reason: str = "stop"
    status: str | None = None
    rollout_logprobs: msgspec.Raw = msgspec.Raw(b"")


class _Score(msgspec.Struct, gc=False):
    rollout_id: Place
    difference_max: float | None = None


_ROLLOUTS, _SCORES = msgspec.json.Decoder(_Rollout), msgspec.json.Decoder(_Score)


@dataclass(frozen=True)
class Line:
    """Where a line is: in which of a step's files, and at which bytes of it when it is unpacked."""

    part: int
    start: int
    length: int


@dataclass(frozen=True)
class StepScan:
    """All rollouts of a step in the order of the prompt stream; a list has an entry a rollout."""

    step: int
    positions: list[int]
    samples: list[int]
    rows: list[int]
    rewards: list[float | None]
    advantages: list[float | None]
    tokens: list[int]
    is_cut: list[bool]  # finish_reason is "length"
    statuses: list[str]  # how an episode ended, or what of a reward failed; "ok"
    mismatches: list[float | None]  # largest |policy - engine| of a token
    lines: list[Line]
    score_lines: list[Line | None]

    def __len__(self) -> int:
        return len(self.positions)


def parts_by_step(folder: Path) -> dict[int, list[Path]]:
    """The files of each dumped step in `folder`, those of the first node first; of two forms of one the newer."""
    found: dict[int, dict[int, Path]] = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            stem, _, ending = entry.name.partition(".")
            if not (stem.startswith("step_") and stem[5:].isdecimal() and len(stem) <= 21) or not ending.isascii():
                continue
            step, node = int(stem[5:]), 0
            if ending.startswith("node_"):
                name, _, ending = ending.partition(".")
                node = int(name[5:]) if name[5:].isdecimal() and len(name) < 15 else -1
            if f".{ending}" not in (PLAIN, PACKED) or node < 0 or stem != step_stem(step):
                continue
            path, other = Path(entry.path), found.setdefault(step, {}).get(node)
            if other is None or _changed(path) > _changed(other):
                found[step][node] = path
    return {step: [parts[node] for node in sorted(parts)][:_MOST_PARTS] for step, parts in sorted(found.items())}


def _changed(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return -1


def scan_step(step: int, parts: Sequence[Path], score_parts: Sequence[Path]) -> tuple[StepScan, Contents]:
    """The step, and its files' contents as far as they are held for `Contents.lines`."""
    contents = Contents(parts, score_parts)
    scores: dict[int | None, tuple[float | None, Line]] = {}
    for number in range(len(score_parts)):
        for score, line in contents.decoded(True, number, _SCORES):
            scores.setdefault(score.rollout_id, (_finite(score.difference_max), line))
    found = [pair for number in range(len(parts)) for pair in contents.decoded(False, number, _ROLLOUTS)]
    found.sort(key=lambda pair: (pair[0].position, pair[0].sample))
    places = [(rollout.position, rollout.sample) for rollout, _ in found]
    is_new = [i == 0 or place != places[i - 1] for i, place in enumerate(places)]
    contents.count_broken(is_new.count(False))  # it is there twice: one of the files is of another run
    found = [pair for pair, new in zip(found, is_new, strict=True) if new]
    scored = [scores.get(rollout.rollout_id, (None, None)) for rollout, _ in found]
    scan = StepScan(
        step=step,
        positions=[rollout.position for rollout, _ in found],
        samples=[rollout.sample for rollout, _ in found],
        rows=[rollout.row for rollout, _ in found],
        rewards=[_finite(rollout.reward) for rollout, _ in found],
        advantages=[_finite(rollout.advantage) for rollout, _ in found],
        tokens=[_num_tokens(bytes(rollout.rollout_logprobs)) for rollout, _ in found],
        is_cut=[rollout.finish_reason == "length" for rollout, _ in found],
        statuses=[_status(rollout) for rollout, _ in found],
        mismatches=[mismatch for mismatch, _ in scored],
        lines=[line for _, line in found],
        score_lines=[line for _, line in scored],
    )
    return scan, contents


class Contents:
    """The files of a step, read block by block. What fits into one block is held, so that its lines need not be read
    again."""

    def __init__(self, parts: Sequence[Path], score_parts: Sequence[Path]) -> None:
        self._parts = {False: parts, True: score_parts}
        self._held: dict[tuple[bool, int], bytes] = {}
        self._lines_left = {False: _MOST_LINES, True: _MOST_LINES}
        self.num_broken = 0  # lines, and files whose end is missing

    def count_broken(self, number: int = 1) -> None:
        self.num_broken += number

    def decoded(self, of_scores: bool, part: int, decoder: msgspec.json.Decoder[_Line]) -> Iterator[tuple[_Line, Line]]:
        """Each good line of a file; the others are counted."""
        first = True
        for start, block in self._blocks(self._parts[of_scores][part]):
            if first:
                self._held[of_scores, part] = block
            else:
                self._held.pop((of_scores, part), None)
            first = False
            self._lines_left[of_scores] -= (number := block.count(b"\n") + (not block.endswith(b"\n")))
            if self._lines_left[of_scores] < 0:  # before each takes its time: millions fit into a block
                self.count_broken(number)
                return
            ends = [*_ends(block)]
            starts = [0, *(end + 1 for end in ends[:-1])]
            try:
                values: Sequence[_Line | None] = decoder.decode_lines(block)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                values = []
            if len(values) != len(ends):
                values = [_decoded(block[low:high], decoder) for low, high in zip(starts, ends, strict=True)]
            for low, high, value in zip(starts, ends, values, strict=True):
                if value is None:
                    self.count_broken()
                else:
                    yield value, Line(part, start + low, high - low)

    def lines(self, wanted: Mapping[int, Line], *, of_scores: bool = False) -> dict[int, bytes]:
        """The bytes of each; without those that cannot be read any more."""
        found: dict[int, bytes] = {}
        by_part: dict[int, list[tuple[int, Line]]] = {}
        for key, line in wanted.items():
            if (held := self._held.get((of_scores, line.part))) is not None:
                found[key] = held[line.start : line.start + line.length]
            else:
                by_part.setdefault(line.part, []).append((key, line))
        for part, lines in by_part.items():
            lines.sort(key=lambda pair: pair[1].start)
            with suppress(OSError, UntrustedError, EOFError, zlib.error), _opened(self._parts[of_scores][part]) as file:
                for key, line in lines:
                    file.seek(line.start)
                    found[key] = file.read(line.length)
        return found

    def _blocks(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """(first byte, whole lines) until the file's end, or where it breaks."""
        start, rest, is_whole = 0, b"", False
        with suppress(OSError, UntrustedError, EOFError, zlib.error), _opened(path) as file:
            while start < _MOST_BYTES and len(rest) <= _LONGEST:
                block = b"".join([rest, *_pieces_of(file)] if rest else _pieces_of(file))
                if len(block) == len(rest):
                    is_whole = True
                    break
                end = block.rfind(b"\n") + 1
                if end:
                    yield start, block[:end] if end < len(block) else block
                start, rest = start + end, block[end:]
        if not is_whole and os.path.lexists(path):  # a run that goes on removes old ones (logging.rollouts_keep)
            self.count_broken()
        if rest:
            yield start, rest  # a line without its end: whole all the same, or broken


def _opened(path: Path) -> IO[bytes]:
    file = open_regular(path, follow=True)
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file  # type: ignore[return-value]


def _pieces_of(file: IO[bytes]) -> Iterator[bytes]:
    """A block in one piece, or of a packed file in small ones, so that what lies before a break is had."""
    if not isinstance(file, gzip.GzipFile):
        yield file.read(_BLOCK)
        return
    size = 0
    with suppress(EOFError, zlib.error, gzip.BadGzipFile):  # the next call says it again
        while size < _BLOCK and (piece := file.read1(1 << 17)):
            yield piece
            size += len(piece)


def _ends(block: bytes) -> Iterator[int]:
    """Where its lines end; the last may lack its line break."""
    end = block.find(b"\n")
    while end >= 0:
        yield end
        end = block.find(b"\n", end + 1)
    if not block.endswith(b"\n"):
        yield len(block)


def _decoded(line: bytes, decoder: msgspec.json.Decoder[_Line]) -> _Line | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return decoder.decode(line)
    with suppress(ValueError, RecursionError, msgspec.MsgspecError):  # half a surrogate pair, which a prompt may hold
        values = json.loads(line)
        if isinstance(values, dict):
            values["rollout_logprobs"] = msgspec.Raw(json.dumps(values.get("rollout_logprobs")).encode())
            return msgspec.convert(values, decoder.type)
    return None


def _status(rollout: _Rollout) -> str:
    """A failure before how an episode ended."""
    for status in rollout.statuses.values():
        if status in _FAILURES:
            return status
    return (rollout.status or "ok")[:40]


def _num_tokens(logprobs: bytes) -> int:
    """From base64 of float32 in quotes, or the list of an earlier version."""
    if logprobs[:1] == b'"':
        text = logprobs[1:-1]
        return (len(text) * 3 // 4 - text[-2:].count(b"=")) // 4
    return logprobs.count(b",") + 1 if len(logprobs) > 2 else 0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def spread_out(steps: Iterable[int]) -> list[int]:
    """All of `steps`, the newest and the first ahead, then such that any beginning of the list is spread evenly."""
    ordered = sorted(steps)
    if len(ordered) < 3:
        return ordered[::-1]
    middle = ordered[1:-1]
    bits = max(1, (len(middle) - 1).bit_length())
    places = sorted(range(len(middle)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [ordered[-1], ordered[0], *(middle[i] for i in places)]
