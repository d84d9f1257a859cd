"""Recorded completions of a run, read one after the other.

A step may hold more than the memory of a login node. The files of a killed or running run may be
half written, and other people's folders may hold anything: what cannot be read is counted, and the
rest is shown.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import open_regular
from grpo_spmd.observe.rollout_record import RolloutRecord, parse_rollout
from grpo_spmd.observe.run_folder import RunFolder
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.terminal import Line, Terminal

_MAX_LINE_BYTES = 1 << 25  # a completion of 64k tokens takes 2 MiB
_MAX_BROKEN_LINES = 1000
# Bounds of one unpacked file: some megabytes of gzip can hold very much more.
_MAX_LINES = 1 << 18
_MAX_BYTES = 1 << 32
_MAX_LISTED_STEPS = 8  # at each end of a list
LineFilter = Callable[[bytes], bool]


@dataclass
class ReadErrors:
    """What could not be read from a run folder: how much, and the first error in words."""

    num: int = 0
    first: str = ""
    num_missing: int = 0  # rollouts that a step had, but that its files lack

    def add(self, error: str) -> None:
        self.num += 1
        self.first = self.first or error

    def lines(self, terminal: Terminal) -> Iterator[Line]:
        """Yields warnings; nothing if all was read."""
        if self.num_missing:
            warning = f"{self.num_missing} rollouts of the step are not in its files"
            warning += "; each node wrote one file"
            yield from terminal.excerpt(warning, 2, styles="warning")
        if self.num:
            more = f" (and {self.num - 1} more)" if self.num > 1 else ""
            yield from terminal.excerpt(f"not read{more}: {self.first}", 3, styles="warning")


def read_rollouts(
    run_dir: Path, step: int, errors: ReadErrors, is_wanted: LineFilter | None = None
) -> Iterator[RolloutRecord]:
    """Yields the rollouts of a step from the files of all nodes, in the order of the files.

    `is_wanted` looks at a raw line and says if the line is worth parsing.
    """
    num_read = 0
    num_recorded: set[int] = set()
    try:
        paths = RunFolder(run_dir).rollout_files.get(step, {}).values()
    except OSError as error:
        errors.add(f"{run_dir}/rollouts: {error.strerror or error}")
        return
    for path in paths:
        num_broken = errors.num
        try:
            for line_number, line in enumerate(_read_lines(path), start=1):
                if is_wanted is not None and not is_wanted(line):
                    continue
                try:
                    record = parse_rollout(line, f"{path}:{line_number}")
                except ConfigError as error:
                    errors.add(str(error))
                    if errors.num - num_broken > _MAX_BROKEN_LINES:
                        errors.add(f"{path}: more than {_MAX_BROKEN_LINES} lines are broken")
                        break
                    continue
                num_read += 1
                if record.num_rollouts is not None:
                    num_recorded.add(record.num_rollouts)
                yield record
        except ConfigError as error:
            errors.add(str(error))
        except (OSError, EOFError, zlib.error) as error:
            errors.add(f"{path}: {getattr(error, 'strerror', None) or error}")
    if is_wanted is None and len(num_recorded) == 1:
        errors.num_missing += max(0, num_recorded.pop() - num_read)


def _read_lines(path: Path) -> Iterator[bytes]:
    with open_regular(path, follow=True) as file:
        source = cast(BinaryIO, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file)
        num_lines = 0
        num_bytes = 0
        while line := source.readline(_MAX_LINE_BYTES):
            num_lines += 1
            num_bytes += len(line)
            if num_lines > _MAX_LINES or num_bytes > _MAX_BYTES:
                bound = f"{_MAX_LINES:,} lines or {_MAX_BYTES >> 30} GiB"
                raise ConfigError(f"{path}: more than {bound}; this is no rollout dump")
            if len(line) == _MAX_LINE_BYTES:
                bound = f"{_MAX_LINE_BYTES >> 20} MiB"
                raise ConfigError(f"{path}: a line is longer than {bound}; this is no rollout dump")
            yield line


def contains_text(text: str) -> LineFilter | None:
    """Returns a filter for raw lines that may contain `text` in upper or lower case.

    Returns None if raw bytes cannot tell, because JSON may escape the text's characters.
    """
    if not text.isascii():
        return None
    needle = json.dumps(text)[1:-1].lower().encode()
    return lambda line: needle in line.lower()


def text_pattern(text: str) -> re.Pattern[str]:
    """Returns a pattern for `text` in upper or lower case; ASCII text matches ASCII only."""
    return re.compile(re.escape(text), re.IGNORECASE | (re.ASCII if text.isascii() else 0))


def has_row(row: int) -> LineFilter:
    """Returns a filter for raw lines from that row of the data set."""
    pattern = re.compile(rb'"row": ?%d[,}\s]' % row)
    return lambda line: pattern.search(line) is not None


def prompt_text(prompt: str | Sequence[Any]) -> str:
    """Returns a prompt as one text: a string, or the contents of its chat messages."""
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))


def message_text(message: object) -> str:
    """Returns the content of a chat message as text; as JSON if it is no text."""
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content):
        return "".join(as_text(part["text"]) for part in content)
    return "" if content is None else as_text(content)


def as_text(value: object) -> str:
    """Returns a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    """Returns JSON of a value from a dump."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):  # nested more deeply than JSON can be written
        return "..."


def read_scores(
    run_dir: Path, step: int, rollout_ids: Collection[int | None], errors: ReadErrors
) -> dict[int, TokenScores]:
    """Returns the token scores of these rollouts by rollout id; {} if the run recorded none."""
    scores = _each_scores(run_dir, step, errors)
    return {rollout_id: entry for rollout_id, entry in scores if rollout_id in rollout_ids}


def read_max_differences(run_dir: Path, step: int, errors: ReadErrors) -> dict[int, float]:
    """Returns the largest |policy - engine| of each rollout's tokens in nats, by rollout id.

    NaN means that a difference was not finite.
    """
    return {
        rollout_id: math.nan if scores.difference_max is None else float(scores.difference_max)
        for rollout_id, scores in _each_scores(run_dir, step, errors)
    }


def _each_scores(run_dir: Path, step: int, errors: ReadErrors) -> Iterator[tuple[int, TokenScores]]:
    try:
        for scores in RunFolder(run_dir).scores(step):
            yield scores.rollout_id, scores
    except ConfigError as error:
        errors.add(str(error))


def describe_steps(steps: Sequence[int]) -> str:
    """Returns in words which steps have completions."""
    if not steps:
        return "there are none of any step (logging.rollouts_every_steps)"
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(steps) > 3 and len(set(gaps)) == 1:
        every = "" if gaps[0] == 1 else f", every {gaps[0]}"
        return f"there are those of steps {steps[0]} to {steps[-1]}{every}"
    listed = [str(step) for step in steps]
    if len(listed) > 2 * _MAX_LISTED_STEPS:
        listed = [*listed[:_MAX_LISTED_STEPS], "...", *listed[-_MAX_LISTED_STEPS:]]
    return f"there are those of step{'s' * (len(steps) > 1)} {', '.join(listed)}"


def find_dumped_step(run: RecordedRun, step: int | None) -> int:
    """Returns `step`, or the newest step with completions if `step` is None.

    Raises ConfigError if that step has no completions.
    """
    if step is None and run.dumped_steps:
        return run.dumped_steps[-1]
    if step is None or step not in run.dumped_steps:
        problem = "no completions are in"
        if step is not None:
            problem = f"--step {step}: no completions of it are in"
        raise ConfigError(f"{problem} {run.folder}/rollouts; {describe_steps(run.dumped_steps)}")
    return step
