"""Recorded completions, one after the other: what can be read of them, whatever else is in the folder.

A step may have more than a login node's memory; of a killed run, or one that is going, it may be half written.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import open_regular
from grpo_spmd.observe.rollout_reader import RolloutRecord, read_rollout, rollouts_parts
from grpo_spmd.observe.token_scores import TokenScores, each_token_scores
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.tools.report.pieces import Pieces, read_pieces
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.paper import Line, Paper, number

_LONGEST = 1 << 25  # bytes of a line; 64k tokens take 2 MiB
_MOST_BROKEN = 1000
_MOST_LINES, _MOST_BYTES = (
    1 << 18,
    1 << 32,
)  # of a file, unpacked: some megabytes of gzip can hold very much more
Choice = Callable[[bytes], bool]


@dataclass
class Unread:
    """What of a dump could not be read: how much, and the first of it in words."""

    num: int = 0
    first: str = ""
    missing: int = 0  # rollouts that a step had and its files lack

    def add(self, why: str) -> None:
        self.num, self.first = self.num + 1, self.first or why


@dataclass
class Tally:
    """How many rollouts a step's files hold, beside how many it had."""

    num_read: int = 0
    num_had: set[int] = field(default_factory=set)

    def add(self, record: RolloutRecord) -> None:
        self.num_read += 1
        if record.num_rollouts is not None:
            self.num_had.add(record.num_rollouts)


def rollouts_of(
    run_dir: Path, step: int, unread: Unread, is_wanted: Choice | None = None
) -> Iterator[RolloutRecord]:
    """As they stand in the files of all nodes. `is_wanted` says by its raw line whether one is worth reading."""
    tally = Tally()
    try:
        paths = rollouts_parts(run_dir, step).values()
    except OSError as error:
        unread.add(f"{run_dir}/rollouts: {error.strerror or error}")
        return
    for path in paths:
        before = unread.num
        try:
            for number, line in enumerate(_lines(path), start=1):
                if unread.num - before > _MOST_BROKEN:
                    raise ConfigError(
                        f"{path}: more than {_MOST_BROKEN} lines are broken; this is no rollout dump"
                    )
                if is_wanted is None or is_wanted(line):
                    try:
                        record = read_rollout(line, f"{path}:{number}")
                    except ConfigError as error:
                        unread.add(str(error))
                        continue
                    tally.add(record)
                    yield record
        except ConfigError as error:
            unread.add(str(error))
        except (OSError, EOFError, zlib.error) as error:
            unread.add(f"{path}: {getattr(error, 'strerror', None) or error}")
    if is_wanted is None and len(tally.num_had) == 1:
        unread.missing += max(0, tally.num_had.pop() - tally.num_read)


def _lines(path: Path) -> Iterator[bytes]:
    with open_regular(path, follow=True) as file:
        source = cast(BinaryIO, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
        num_lines = num_bytes = 0
        while line := source.readline(_LONGEST):
            num_lines, num_bytes = num_lines + 1, num_bytes + len(line)
            if num_lines > _MOST_LINES or num_bytes > _MOST_BYTES:
                raise ConfigError(
                    f"{path}: more than {_MOST_LINES:,} lines or {_MOST_BYTES >> 30} GiB; this is no rollout dump"
                )
            if len(line) == _LONGEST:
                raise ConfigError(
                    f"{path}: a line is longer than {_LONGEST >> 20} MiB; this is no rollout dump"
                )
            yield line


def holds(text: str) -> Choice | None:
    """Whether `text` may stand in a line, whatever the case of its letters; None where raw bytes cannot tell."""
    if not text.isascii():
        return None
    needle = json.dumps(text)[1:-1].lower().encode()
    return lambda line: needle in line.lower()


def pattern_of(text: str) -> re.Pattern[str]:
    """`text` itself in any case; in ASCII only letters of ASCII have one."""
    return re.compile(re.escape(text), re.IGNORECASE | (re.ASCII if text.isascii() else 0))


def has_row(row: int) -> Choice:
    """Whether a line is of that row of the data set."""
    own = re.compile(rb'"row": ?%d[,}\s]' % row)
    return lambda line: own.search(line) is not None


def prompt_text(prompt: str | Sequence[Any]) -> str:
    """A prompt as one text; of chat messages what was said in them."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content_of(message) for message in prompt)


def content_of(message: object) -> str:
    """What a message says: its text, or what else it holds as JSON."""
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and "text" in part for part in content
    ):
        return "".join(as_text(part["text"]) for part in content)
    return "" if content is None else as_text(content)


def as_text(value: object) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    """Of what a dump holds, as it stands there."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):  # nested as deep as JSON can be read, but not written
        return "..."


# What several pages say of a run folder: which steps have completions, what could not be read, per-token figures.


_MOST_RANGES = 8


def scores_of(
    run_dir: Path, step: int, wanted: Collection[int | None], unread: Unread
) -> dict[int, TokenScores]:
    """Of the rollouts with the `wanted` ids that were trained on; {} where the run recorded none."""
    return {
        rollout_id: scores
        for rollout_id, scores in _each(run_dir, step, unread)
        if rollout_id in wanted
    }


def largest_differences(run_dir: Path, step: int, unread: Unread) -> dict[int, float]:
    """By rollout id, over its tokens, in nats; NaN where one was not finite."""
    return {
        rollout_id: math.nan if scores.difference_max is None else float(scores.difference_max)
        for rollout_id, scores in _each(run_dir, step, unread)
    }


def _each(run_dir: Path, step: int, unread: Unread) -> Iterator[tuple[int, TokenScores]]:
    """As far as they can be read."""
    try:
        for _, rollout_id, scores in each_token_scores(run_dir, step):
            yield rollout_id, scores
    except ConfigError as error:
        unread.add(str(error))


def unread_lines(unread: Unread, paper: Paper) -> Iterator[Line]:
    if unread.missing:
        said = f"{unread.missing} rollouts of the step are not in its files, of which each node wrote one"
        yield from paper.excerpt(said, 2, 0, 0, "warning")
    if unread.num:
        more = f" (and {unread.num - 1} more)" if unread.num > 1 else ""
        said = f"not read{more}: {unread.first}"
        yield from paper.excerpt(said, 3, 0, 0, "warning")


def ranges(steps: Sequence[int]) -> str:
    """Which steps have completions, in words."""
    if not steps:
        return "there are none of any step (logging.rollouts_every_steps)"
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(steps) > 3 and len(set(gaps)) == 1:
        every = "" if gaps[0] == 1 else f", every {gaps[0]}"
        return f"there are those of steps {steps[0]} to {steps[-1]}{every}"
    listed = [str(step) for step in steps]
    if len(listed) > 2 * _MOST_RANGES:
        listed = [*listed[:_MOST_RANGES], "...", *listed[-_MOST_RANGES:]]
    return f"there are those of step{'s' * (len(steps) > 1)} {', '.join(listed)}"


def dumped_step(run: RecordedRun, step: int | None) -> int:
    """`step`, or the newest with completions. Raises ConfigError where there are none."""
    if step is None and run.dumped_steps:
        return run.dumped_steps[-1]
    if step is None or step not in run.dumped_steps:
        of = (
            f"--step {step}: no completions of it are in"
            if step is not None
            else "no completions are in"
        )
        raise ConfigError(f"{of} {run.folder}/rollouts; {ranges(run.dumped_steps)}")
    return step


# How far engine and policy were apart on the tokens of completions: in words, and as colours of the text.


_LONGEST_scored = 1 << 24  # characters that are coloured
_LEVELS = ((100.0, "far"), (10.0, "over"), (1.0, "near"))  # from so many bounds on


class Scored:
    """Rollouts of one step with what was recorded of their tokens."""

    def __init__(
        self, run: RecordedRun, step: int, records: Sequence[RolloutRecord], unread: Unread
    ) -> None:
        dtype = "float32" if run.config.get("model.dtype") == "float32" else "bfloat16"
        self._bound, _ = bounds_of(
            dtype, None, None
        )  # of a step's mean: what of single tokens is little
        self._run, self._records = run, records
        self._scores = scores_of(
            run.folder, step, {record.rollout_id for record in records}, unread
        )

    @property
    def legend(self) -> str:
        """What the colours mean, and whether there are any; "" where nothing was recorded."""
        if not self._scores or not self._pieces:
            return ""
        near, over = number(self._bound), number(10 * self._bound)
        if not any(map(self.is_apart, self._records)):
            return f"policy and engine are nowhere {near} nats apart; tokens would be yellow there"
        return f"tokens in yellow: policy and engine {near} nats apart or more; in red: {over}"

    def is_apart(self, record: RolloutRecord) -> bool:
        """Whether any token has a colour."""
        scores = self._of(record)
        return scores is not None and not bool((np.abs(scores.difference) < self._bound).all())

    @cached_property
    def _pieces(self) -> Pieces | None:
        return read_pieces(self._run.folder)

    def _of(self, record: RolloutRecord) -> TokenScores | None:
        scores = None if record.rollout_id is None else self._scores.get(record.rollout_id)
        return (
            scores
            if scores is not None and len(scores.difference) == len(record.completion_ids)
            else None
        )

    def said_of(self, record: RolloutRecord) -> str:
        """Mean and largest difference, and where that is; "" where nothing was recorded."""
        scores = self._of(record)
        if scores is None or not len(scores.difference):
            return ""
        size = np.where(np.isfinite(scores.difference), np.abs(scores.difference), np.inf)
        place = int(size.argmax())
        pieces = self._pieces.of(record.completion_ids) if self._pieces else []
        text = f" {pieces[place]!r:.40}" if place < len(pieces) and pieces[place] else ""
        mean, largest = (
            math.nan if of is None else of for of in (scores.difference_mean, scores.difference_max)
        )
        return f"policy - engine: mean {number(mean)}, largest {number(largest)} nats (token {place + 1}{text})"

    def coloured(self, record: RolloutRecord) -> tuple[str, list[str]]:
        """The completion as its tokens are, those of no text among them, and the style of each character: by how far
        engine and policy are apart. Of an episode the turns below each other. As the dump has it where tokens do not
        make that text."""
        scores = self._of(record)
        pieces = (
            self._pieces.of(record.completion_ids) if scores is not None and self._pieces else []
        )
        if scores is None or sum(map(len, pieces)) > _LONGEST_scored:
            return record.completion, []
        sizes = np.abs(scores.difference) / self._bound
        styles = [
            style
            for piece, size in zip(pieces, sizes, strict=False)
            for style in [_level(size)] * len(piece)
        ]
        if record.status is not None:
            return _by_turns(record, pieces, styles)
        text = "".join(pieces)
        return (
            (text, styles)
            if text.strip().startswith(record.completion.strip())
            else (record.completion, [])
        )


def _by_turns(
    record: RolloutRecord, pieces: Sequence[str], styles: Sequence[str]
) -> tuple[str, list[str]]:
    """With a newline behind each turn."""
    texts, of_texts, token, place = list[str](), list[str](), 0, 0
    for turn in record.turns:
        if turn["sampled"]:
            text = "".join(pieces[token : token + len(turn["token_ids"])])
            texts.append(text + "\n")
            of_texts += [*styles[place : place + len(text)], ""]
            token, place = token + len(turn["token_ids"]), place + len(text)
    return "".join(texts)[:-1], of_texts[:-1]


def _level(bounds: float) -> str:
    """NaN is beyond all."""
    return next((style for least, style in _LEVELS if not bounds < least), "")
