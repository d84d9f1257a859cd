"""Recorded completions, one after the other: what can be read of them, whatever else is in the folder.

A step may have more than a login node's memory; of a killed run, or one that is going, it may be half written.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_files import rollouts_parts
from grpo_spmd.observe.rollout_reader import read_rollout
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.untrusted import open_regular

_LONGEST = 1 << 25  # bytes of a line; 64k tokens take 2 MiB
_MOST_BROKEN = 1000
_MOST_LINES, _MOST_BYTES = 1 << 18, 1 << 32  # of a file, unpacked: some megabytes of gzip can hold very much more
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


def rollouts_of(run_dir: Path, step: int, unread: Unread, is_wanted: Choice | None = None) -> Iterator[RolloutRecord]:
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
                    raise ConfigError(f"{path}: more than {_MOST_BROKEN} lines are broken; this is no rollout dump")
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
                raise ConfigError(f"{path}: a line is longer than {_LONGEST >> 20} MiB; this is no rollout dump")
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
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
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
