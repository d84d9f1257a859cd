"""Reads a step's dumps quickly: a few numbers of every rollout, and where its line is, so that only the lines that are
shown are parsed whole. A broken line costs itself, a broken file what is behind the break."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import UntrustedError, open_regular
from grpo_spmd.observe.rollout_record import (
    EPISODE_FIELDS,
    bounded_values,
    is_shallow,
    parse_rollout,
)
from grpo_spmd.observe.run_folder import PACKED, PLAIN, step_stem
from grpo_spmd.tools.report.page import json_bytes
from grpo_spmd.tools.report.pieces import TokenPieces, read_pieces

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
            if (
                not (stem.startswith("step_") and stem[5:].isdecimal() and len(stem) <= 21)
                or not ending.isascii()
            ):
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
    return {
        step: [parts[node] for node in sorted(parts)][:_MOST_PARTS]
        for step, parts in sorted(found.items())
    }


def _changed(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return -1


def scan_step(
    step: int, parts: Sequence[Path], score_parts: Sequence[Path]
) -> tuple[StepScan, Contents]:
    """The step, and its files' contents as far as they are held for `Contents.lines`."""
    contents = Contents(parts, score_parts)
    scores: dict[int | None, tuple[float | None, Line]] = {}
    for number in range(len(score_parts)):
        for score, line in contents.decoded(True, number, _SCORES):
            scores.setdefault(score.rollout_id, (_finite(score.difference_max), line))
    found = [
        pair for number in range(len(parts)) for pair in contents.decoded(False, number, _ROLLOUTS)
    ]
    found.sort(key=lambda pair: (pair[0].position, pair[0].sample))
    places = [(rollout.position, rollout.sample) for rollout, _ in found]
    is_new = [i == 0 or place != places[i - 1] for i, place in enumerate(places)]
    contents.count_broken(
        is_new.count(False)
    )  # it is there twice: one of the files is of another run
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

    def decoded(
        self, of_scores: bool, part: int, decoder: msgspec.json.Decoder[_Line]
    ) -> Iterator[tuple[_Line, Line]]:
        """Each good line of a file; the others are counted."""
        first = True
        for start, block in self._blocks(self._parts[of_scores][part]):
            if first:
                self._held[of_scores, part] = block
            else:
                self._held.pop((of_scores, part), None)
            first = False
            self._lines_left[of_scores] -= (
                number := block.count(b"\n") + (not block.endswith(b"\n"))
            )
            if (
                self._lines_left[of_scores] < 0
            ):  # before each takes its time: millions fit into a block
                self.count_broken(number)
                return
            ends = [*_ends(block)]
            starts = [0, *(end + 1 for end in ends[:-1])]
            try:
                values: Sequence[_Line | None] = decoder.decode_lines(block)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                values = []
            if len(values) != len(ends):
                values = [
                    _decoded(block[low:high], decoder)
                    for low, high in zip(starts, ends, strict=True)
                ]
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
            with (
                suppress(OSError, UntrustedError, EOFError, zlib.error),
                _opened(self._parts[of_scores][part]) as file,
            ):
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
        if not is_whole and os.path.lexists(
            path
        ):  # a run that goes on removes old ones (logging.rollouts_keep)
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
    with suppress(
        ValueError, RecursionError, msgspec.MsgspecError
    ):  # half a surrogate pair, which a prompt may hold
        values = json.loads(line)
        if isinstance(values, dict):
            values["rollout_logprobs"] = msgspec.Raw(
                json.dumps(values.get("rollout_logprobs")).encode()
            )
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


# A rollout as the page shows it whole: its text, its tokens with their figures, and the turns of an episode. What a
# policy or a data set wrote is bounded here.


LONGEST_PROMPT = 12_000  # characters
_MOST_TURNS, _MOST_MESSAGES, _LONGEST_MESSAGES = (
    200,
    200,
    40_000,
)  # of an episode; characters of all its messages
_LONGEST_GIVEN, _LEAST_TURN = (
    4_000,
    200,
)  # characters of a turn that was not sampled; of any that is cut


@dataclass(frozen=True)
class _Scores:
    difference: str
    entropy: str
    advantages: str | None = None
    loss_mask: str | None = None


@dataclass(frozen=True)
class _Whole:
    """A line of a dump that is no episode, checked as it is decoded."""

    row: int
    position: int
    sample: int
    prompt: str | list[Any]
    completion: str
    finish_reason: str
    completion_ids: list[int]
    rollout_logprobs: str
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    advantage: float | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    status: str | None = None


_FIELDS = tuple(_Whole.__dataclass_fields__)
_WHOLE, _SCORES_shown = msgspec.json.Decoder(_Whole), msgspec.json.Decoder(_Scores)


@dataclass
class Shown:
    """Its JSON in two parts, so that the second can be left out."""

    text: dict[str, Any]
    prompt: str
    make_tokens: Callable[[], dict[str, Any] | None]

    @cached_property
    def tokens(self) -> dict[str, Any] | None:
        return self.make_tokens()


def shown(
    line: bytes, scores: bytes | None, pieces: TokenPieces | None, longest: int, why: str
) -> Shown | None:
    """None where the line is broken; `scores`: its line of token scores; `longest`: characters of a completion, in
    whose middle further ones are left out."""
    values = whole_line(line)
    if values is None:
        return None
    completion, cut = shortened(values["completion"], longest)
    text = {
        **{name: values[name] for name in ("position", "sample")},
        "why": why,
        "completion": completion,
        "cut": cut,
        **{
            name: values[name]
            for name in ("reward", "rewards", "statuses", "advantage", "finish_reason")
        },
        "columns": bounded_values(values["columns"]),
        "extra": bounded_values(values["extra"]),
        "tokens": None,
    }
    if values["status"] is not None:
        text |= _episode(values, pieces, longest, cut)

    def make_tokens() -> dict[str, Any] | None:
        if cut and (values["status"] is not None or pieces is None):
            return None  # turns count on all of them; without their texts nobody sees where the middle is
        texts = pieces.decode(values["completion_ids"]) if pieces is not None else None
        tokens = _tokens(values["completion_ids"], texts, values["rollout_logprobs"], scores)
        return _without_middle(tokens, texts, longest) if cut and texts is not None else tokens

    return Shown(text, prompt_text(values["prompt"]), make_tokens)


def whole_line(line: bytes) -> dict[str, Any] | None:
    """Its fields, checked, with logprobs as an array; None where it is broken."""
    with suppress(msgspec.MsgspecError, RecursionError, ValueError):
        found = _WHOLE.decode(line)
        logprobs = np.frombuffer(base64.b64decode(found.rollout_logprobs, validate=True), "<f4")
        if (
            found.status is None
            and len(logprobs) == len(found.completion_ids)
            and is_shallow([found.columns, found.prompt])
        ):
            return {
                **{name: getattr(found, name) for name in _FIELDS},
                "rollout_logprobs": logprobs,
            }  # vars: no defaults
    with suppress(
        ConfigError, RecursionError, OverflowError
    ):  # an episode, another version's, or broken
        record = parse_rollout(line, "")
        if is_shallow([record.columns, record.prompt, record.extra, record.environment]):
            logprobs = np.array(record.rollout_logprobs, np.float32)
            return {**vars(record), "rollout_logprobs": logprobs}
    return None


def _tokens(
    ids: list[int], texts: list[str] | None, logprobs: npt.NDArray[np.float32], line: bytes | None
) -> dict[str, Any]:
    """An entry a sampled token; null: not known, and for `advantage` and `mask`: as the rollout's, all count."""
    found: dict[str, Any] = {
        "pieces": texts,
        "ids": ids,
        "logprob": _clean(np.round(logprobs.astype(np.float64), 3)),
        **dict.fromkeys(("difference", "entropy", "advantage", "mask")),
    }
    with suppress(msgspec.MsgspecError, ValueError):
        scores = _SCORES_shown.decode(line or b"")
        for name, packed in (
            ("difference", scores.difference), ("entropy", scores.entropy), ("advantage", scores.advantages)
        ):  # fmt: skip
            halves = np.frombuffer(base64.b64decode(packed or "", validate=True), np.uint16)
            if len(halves) == len(ids) and packed is not None:
                found[name] = _clean(_three_digits()[halves])
        mask = np.frombuffer(base64.b64decode(scores.loss_mask or "", validate=True), np.uint8)
        if scores.loss_mask is not None and len(mask) == len(ids):
            found["mask"] = mask.tolist()
    return found


@cache
def _three_digits() -> npt.NDArray[np.float64]:
    """Of each float16, by its bits, the number of three digits that is nearest."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64).tolist()
    return np.array([float(f"{value:.3g}") for value in values])


def _clean(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    """With None for what is not finite."""
    is_finite = np.isfinite(values)
    found: list[float | None] = values.tolist()
    return (
        found
        if is_finite.all()
        else [value if ok else None for value, ok in zip(found, is_finite, strict=True)]
    )


def _without_middle(tokens: dict[str, Any], texts: Sequence[str], longest: int) -> dict[str, Any]:
    """The tokens at both ends that have `longest` characters, around one that says what is missing, without figures."""
    lengths = np.cumsum([len(text) for text in texts])
    first = int(np.searchsorted(lengths, longest // 2))
    last = int(np.searchsorted(lengths, int(lengths[-1]) - longest // 2)) + 1
    if first >= last:
        return tokens
    gone = int(lengths[last - 1] - (lengths[first - 1] if first else 0))
    found = {}
    for name, values in tokens.items():
        marker = [_marker(gone)] if name == "pieces" else [None]
        found[name] = None if values is None else [*values[:first], *marker, *values[last:]]
    return found


def _episode(
    values: dict[str, Any], pieces: TokenPieces | None, longest: int, cut: int
) -> dict[str, Any]:
    """All given turns have a third of `longest` characters, and so have sampled ones where the completion is `cut`, and
    messages: each says again what the completion says."""
    longest //= 3
    turns, places = [], values["turns"][:_MOST_TURNS]
    num_sampled = sum(turn["sampled"] for turn in places)
    given = min(_LONGEST_GIVEN, max(_LEAST_TURN, longest // max(1, len(places) - num_sampled)))
    for turn in places:
        is_sampled, ids = turn["sampled"], turn["token_ids"]
        texts = pieces.decode(ids) if pieces is not None else None
        one = {
            "sampled": is_sampled,
            "segment": turn["segment"],
            "reward": turn.get("reward"),
            "num_tokens": len(ids),
        }
        if texts is not None and is_sampled and not cut:
            one["pieces"] = texts
        elif texts is not None:
            most = max(_LEAST_TURN, longest // max(1, num_sampled)) if is_sampled else given
            one["pieces"] = [shortened("".join(texts), most)[0]]
        turns.append(one)
    messages, left = [], min(_LONGEST_MESSAGES, longest)
    for message in values["messages"][:_MOST_MESSAGES]:
        said = json.dumps(message)
        left -= len(said)
        if left < 0:
            messages.append({"role": "", "content": "further messages are not in this page"})
            break
        messages.append(message)
    environment = bounded_values(values["environment"])
    return {name: values[name] for name in EPISODE_FIELDS} | {
        "turns": turns,
        "messages": messages,
        "environment": environment,
    }


def prompt_text(prompt: str | list[Any]) -> str:
    """Of chat messages role and content, one below the other."""
    parts = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            parts.append(f"{message.get('role', '')}: {message['content']}")
        else:
            parts.append(message if isinstance(message, str) else json.dumps(message))
    return shortened("\n\n".join(parts), LONGEST_PROMPT)[0]


def shortened(text: str, longest: int) -> tuple[str, int]:
    """`text`, in whose middle is left out what is beyond `longest` characters, and how many these are."""
    if len(text) <= longest + 100:  # the mark has some itself
        return text, 0
    gone = len(text) - longest
    return text[: longest // 2] + _marker(gone) + text[longest // 2 + gone :], gone


def _marker(gone: int) -> str:
    return f"\n[... {gone:,} characters ...]\n"


# Which rollouts of a step are shown with text and tokens, as far as there is room: a function of the step alone.


_FAILED = ("error", "timeout", "env_error", "env_timeout")  # of a reward; of an environment
_FIRST_FAILED = 4  # before there are tokens of the others
_MOST_SHOWN = 2_000  # of a step
_PACKED = 0.9  # what a rollout takes beside others, of what it takes alone at the quickest level


@dataclass
class Selection:
    """What is shown of a step, by the rollout's place in it."""

    rollouts: dict[int, Shown]
    with_tokens: set[int]
    num_wanted: int = 0  # best, worst, most mismatched and failed ones
    num_wanted_shown: int = 0


def select(scan: StepScan, room: int, make: Callable[[int, str], Shown | None]) -> Selection:
    """`room`: bytes that they may take in the page, compressed; `make(place, why)` reads a rollout.

    The most mismatched, the best, the worst and the failed ones come first, then their tokens; then whole groups, at
    places that move on from step to step; then single ones, spread evenly."""
    found = Selection({}, set())
    wanted = dict[int, str]()
    for place, why in _wanted(scan):
        wanted.setdefault(place, why)
    found.num_wanted = len(wanted)
    first = [place for place, why in wanted.items() if why != "failed"]
    failed = [place for place, why in wanted.items() if why == "failed"]
    left = _Room(room, make, found)
    for place in [*first, *failed[:_FIRST_FAILED]]:
        left.text(place, wanted[place])
    for place in [*first, *failed[:_FIRST_FAILED]]:
        left.tokens(place)
    for place in failed[_FIRST_FAILED:]:
        left.text(place, "failed")
    found.num_wanted_shown = len(found.rollouts)
    for group in _groups(scan):
        if not all(left.text(place, "group") for place in group):
            break
        if not all(left.tokens(place) for place in group):
            break
    for place in _evenly(scan):
        if not left.text(place, "sampled"):
            break
        left.tokens(place)
    return found


class _Room:
    """Hands out the bytes of a step."""

    def __init__(
        self, room: int, make: Callable[[int, str], Shown | None], into: Selection
    ) -> None:
        self._left, self._make, self._into = float(room), make, into
        self._broken: set[int] = set()

    def text(self, place: int, why: str) -> bool:
        """Whether there is still room; a broken line takes none."""
        if place in self._into.rollouts or place in self._broken:
            return True
        if len(self._into.rollouts) >= _MOST_SHOWN or self._left <= 0:
            return False
        shown = self._make(place, why)
        if shown is None:
            self._broken.add(place)
            return True
        cost = size_of([shown.text, shown.prompt if why != "group" else ""])
        if cost > self._left:
            return False
        self._left -= cost
        self._into.rollouts[place] = shown
        return True

    def tokens(self, place: int) -> bool:
        shown = self._into.rollouts.get(place)
        if shown is None or shown.tokens is None or place in self._into.with_tokens:
            return True
        if self._left <= 0 or (cost := size_of(shown.tokens)) > self._left:
            return False
        self._left -= cost
        self._into.with_tokens.add(place)
        return True


def size_of(value: object) -> float:
    """Bytes of it in the page, compressed."""
    return _PACKED * len(zlib.compress(json_bytes(value), 1))


def _wanted(scan: StepScan) -> Iterator[tuple[int, str]]:
    """Of several that are equal the first."""
    places = range(len(scan))
    known = [place for place in places if scan.rewards[place] is not None]
    if mismatched := [place for place in places if scan.mismatches[place] is not None]:
        yield max(mismatched, key=lambda place: scan.mismatches[place] or 0.0), "mismatched"
    if known:
        rank = [(scan.rewards[place] or 0.0, scan.advantages[place] or 0.0) for place in places]
        yield max(known, key=rank.__getitem__), "best"
        yield min(known, key=rank.__getitem__), "worst"
    yield from ((place, "failed") for place in places if scan.statuses[place] in _FAILED)


def _groups(scan: StepScan) -> Iterator[list[int]]:
    """All groups, from another one on at each step."""
    by_position: dict[int, list[int]] = {}
    for place, position in enumerate(scan.positions):
        by_position.setdefault(position, []).append(place)
    groups = [*by_position.values()]
    number = len(groups)
    for i in range(number):
        yield groups[(scan.step * 7 + i * _stride(number)) % number]


def _evenly(scan: StepScan) -> Iterator[int]:
    number = len(scan)
    for i in range(number):
        yield (scan.step * 7 + i * _stride(number)) % number


def _stride(number: int) -> int:
    """About 0.618 of `number`, and prime to it: multiples of it come to all places, each far from those before."""
    stride = max(1, round(number * 0.618))
    while math.gcd(stride, number) != 1:
        stride += 1
    return stride


# A step's part of the page, made in a process of its own where there are many: the figures of all its rollouts, and
# some of them whole.


_LEAST_CUT, _MOST_CUT = 2_000, 60_000  # characters of a completion that is shown whole


@dataclass(frozen=True)
class StepTask:
    """`room`: bytes that rollouts may take, compressed."""

    run_dir: Path
    step: int
    parts: Sequence[Path]
    score_parts: Sequence[Path]
    room: int


@dataclass(frozen=True)
class StepResult:
    step: int
    content: bytes  # JSON of the step's chunk
    num_rollouts: int
    num_shown: int
    num_wanted: int  # best, worst, most mismatched, failed
    num_wanted_shown: int
    num_broken: int
    rows: npt.NDArray[np.int64]  # of the groups
    means: npt.NDArray[np.float64]  # of their rewards; NaN: none is known
    first_lines: list[Line]  # one of each group
    lowest: float | None  # reward of the step
    highest: float | None


@dataclass(frozen=True)
class Cost:
    """Bytes in the page, compressed: of the figures of all rollouts of a step; of one rollout's text; of its tokens."""

    table: float
    text: float
    tokens: float


def cost_of(task: StepTask) -> Cost:
    """Of this step, by some of its rollouts."""
    scan, contents = scan_step(task.step, task.parts, task.score_parts)
    reader = _Reader(scan, contents, _pieces_of_steps(task.run_dir), _MOST_CUT)
    places = (
        {round(place) for place in np.linspace(0, len(scan) - 1, 8).tolist()}
        if len(scan)
        else set()
    )
    some = [made for place in sorted(places) if (made := reader.make(place, "sampled")) is not None]
    texts = [size_of([made.text, made.prompt]) for made in some]
    tokens = [size_of(made.tokens) for made in some]
    table = len(zlib.compress(_chunk(scan, Selection({}, set()))))
    return Cost(table, float(np.mean(texts or [0.0])), float(np.mean(tokens or [0.0])))


def make_step(task: StepTask) -> StepResult:
    """Raises nothing for whatever the files hold."""
    scan, contents = scan_step(task.step, task.parts, task.score_parts)
    reader = _Reader(scan, contents, _pieces_of_steps(task.run_dir), task.room)
    chosen = select(scan, task.room, reader.make)
    rows, means, firsts = _groups_steps(scan)
    known = [reward for reward in scan.rewards if reward is not None]
    return StepResult(
        step=task.step,
        content=_chunk(scan, chosen),
        num_rollouts=len(scan),
        num_shown=len(chosen.rollouts),
        num_wanted=chosen.num_wanted,
        num_wanted_shown=chosen.num_wanted_shown,
        num_broken=contents.num_broken,
        rows=rows,
        means=means,
        first_lines=firsts,
        lowest=min(known, default=None),
        highest=max(known, default=None),
    )


class _Reader:
    """Makes what is shown of single rollouts, by their place in the step."""

    def __init__(
        self, scan: StepScan, contents: Contents, pieces: TokenPieces | None, room: int
    ) -> None:
        self._scan, self._contents, self._pieces = scan, contents, pieces
        self._longest = min(
            max(room // 3, _LEAST_CUT), _MOST_CUT
        )  # a letter takes less than a byte, compressed

    def make(self, place: int, why: str) -> Shown | None:
        line = self._contents.lines({0: self._scan.lines[place]}).get(0)
        if line is None:
            return None
        where = self._scan.score_lines[place]
        scores = (
            self._contents.lines({0: where}, of_scores=True).get(0) if where is not None else None
        )
        made = shown(line, scores, self._pieces, self._longest, why)
        if made is None:
            self._contents.count_broken()
        return made


@lru_cache(maxsize=1)
def _pieces_of_steps(run_dir: Path) -> TokenPieces | None:
    return read_pieces(run_dir)


def _groups_steps(
    scan: StepScan,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], list[Line]]:
    """Row, mean reward and first line of each group of the step."""
    positions = np.array(scan.positions, np.int64)
    if not len(positions):
        return np.zeros(0, np.int64), np.zeros(0), []
    firsts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 1))
    rewards = np.array([np.nan if reward is None else reward for reward in scan.rewards])
    known = ~np.isnan(rewards)
    sums, counts = (
        np.add.reduceat(np.where(known, rewards, 0.0), firsts),
        np.add.reduceat(known.astype(int), firsts),
    )
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.array(scan.rows, np.int64)[firsts], means, [scan.lines[first] for first in firsts]


def _chunk(scan: StepScan, chosen: Selection) -> bytes:
    order = sorted(chosen.rollouts)
    shown_at = {place: number for number, place in enumerate(order)}
    names = ["ok", *sorted(set(scan.statuses) - {"ok"})]
    numbers = {name: number for number, name in enumerate(names)}
    prompt_of = dict[int, int]()
    for position in scan.positions:
        prompt_of.setdefault(position, len(prompt_of))
    prompts = [""] * len(prompt_of)
    for place in order:
        prompts[prompt_of[scan.positions[place]]] = chosen.rollouts[place].prompt
    table = {
        "position": scan.positions,
        "sample": scan.samples,
        "row": scan.rows,
        "reward": [_rounded(value, 6) for value in scan.rewards],
        "advantage": [_rounded(value, 4) for value in scan.advantages],
        "tokens": scan.tokens,
        "finish": [int(is_cut) for is_cut in scan.is_cut],
        "status": [numbers[status] for status in scan.statuses],
        "mismatch": [_rounded(value, 3) for value in scan.mismatches],
        "shown": [shown_at.get(place, -1) for place in range(len(scan))],
        "prompt": [prompt_of[position] for position in scan.positions],
    }
    rollouts = [_encoded(chosen.rollouts[place], place in chosen.with_tokens) for place in order]
    head = json_bytes(
        {"step": scan.step, "table": table, "status_names": names, "prompts": prompts}
    )
    return head[:-1] + b',"rollouts":[' + b",".join(rollouts) + b"]}"


def _encoded(of: Shown, with_tokens: bool) -> bytes:
    if not with_tokens or of.tokens is None:
        return json_bytes(of.text)
    text = json_bytes({name: value for name, value in of.text.items() if name != "tokens"})
    numbers = {name: msgspec.Raw(json_bytes(value)) for name, value in of.tokens.items()}
    return text[:-1] + b',"tokens":' + msgspec.json.encode(numbers) + b"}"


def _rounded(value: float | None, digits: int) -> float | int | None:
    """To so many digits; a whole number is one."""
    if value is None:
        return None
    if value == int(value) and abs(value) < 10**digits:
        return int(value)
    return float(f"{value:.{digits}g}")
