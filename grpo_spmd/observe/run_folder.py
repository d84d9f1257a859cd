"""Reads a run folder: metrics, rollouts, token scores, timeline, launches.

The folder that a command opens may be somebody else's: links, fifos, huge lines and broken JSON are
each reported in one line, never by a traceback. Imports no torch.

A dump is a file in rollouts/ with the rollouts of one step that one node (machine) sampled. For
step 12 the first node writes rollouts/step_000012.jsonl and the second one
step_000012.node_1.jsonl, or the same with .gz. token_scores/ has the same names. The "stem" is the
name without node and ending: "step_000012", or for an evaluation "eval_SET_step_000012".
"""

from __future__ import annotations

import io
import os
import re
import reprlib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.launches import read_launches
from grpo_spmd.observe.metrics_file import (
    FileLine,
    JsonLine,
    LinePosition,
    open_lines,
    read_lines,
    read_metrics,
)
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    parse_rollout,
    parse_rollout_fields,
)
from grpo_spmd.observe.timeline import Timeline, read_timeline
from grpo_spmd.observe.token_scores import TokenScores, parse_scores

PLAIN, PACKED = ".jsonl", ".jsonl.gz"
# A dump's name is STEM.jsonl or STEM.node_N.jsonl; the groups are stem and node.
_FILE_NAME = re.compile(r"(.+?)(?:\.node_([1-9]\d{0,8}))?\.jsonl(?:\.gz)?")
# A file with more broken lines than this is not read any further.
_MAX_BROKEN = 1000
# A packed file of at most this many bytes, unpacked, is kept in memory.
_HELD_BYTES = 1 << 25
# A LineStore keeps at most this many files open.
_MAX_OPEN = 64
T = TypeVar("T")


def step_stem(step: int) -> str:
    """Returns the stem of a step's dumps, such as "step_000012"."""
    return f"step_{step:06d}"


def step_of_stem(stem: str) -> int | None:
    """Returns the step of "step_000012"; None for an evaluation's stem."""
    match = re.fullmatch(r"step_(\d{6,15})", stem)
    return int(match[1]) if match else None


def node_stem(stem: str, node: int) -> str:
    """Returns the name of a node's file without .jsonl, such as "step_000012.node_1"."""
    return f"{stem}.node_{node}" if node else stem


def list_dumps(folder: Path, ending: str = "") -> Iterator[tuple[str, int, Path]]:
    """Yields (stem, node, path) for each dump in `folder`, in no order.

    A dump that is there both plain and packed (.gz) is yielded twice. With the ending ".tmp" it
    yields the files that a process is still writing, or left when it was killed.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            match = _FILE_NAME.fullmatch(name.removesuffix(ending))
            if match and name.endswith(ending):
                yield match[1], int(match[2] or 0), folder / name


def dump_path(run_dir: Path, step: int) -> Path:
    """Returns the path of the first node's dump of `step`.

    If there is no dump, it is the path that a plain one would have.
    """
    plain = run_dir / "rollouts" / f"{step_stem(step)}{PLAIN}"
    return max(plain, plain.with_name(plain.name + ".gz"), key=_change_time)


def _change_time(path: Path) -> int:
    """Returns when a file was last changed, in nanoseconds; -1 if there is no such file.

    A kill can leave a dump both plain and packed. Then the newer file counts.
    """
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return -1


@dataclass
class ReadErrors:
    """Counts the lines and files that could not be read, and keeps the first error message."""

    num: int = 0
    first: str = ""
    num_missing: int = 0
    """How many rollouts the files lack, since each line tells how many its step had."""

    def add(self, message: str) -> None:
        """Counts a line or file that could not be read."""
        self.num += 1
        self.first = self.first or message


@dataclass(frozen=True)
class RunFolder:
    """Reads the files of a run folder.

    The lists of files are read once: make a new RunFolder to see new files.

    Methods that read files take `errors`. If it is given, what cannot be read is counted there and
    skipped. Otherwise the first such line or file raises ConfigError.
    """

    path: Path

    @cached_property
    def rollout_files(self) -> dict[int, dict[int, Path]]:
        """The paths of dumps by step and node, both in order."""
        return self._dumped_files("rollouts")

    @cached_property
    def score_files(self) -> dict[int, dict[int, Path]]:
        """The paths of token score files by step and node, both in order."""
        return self._dumped_files("token_scores")

    @property
    def dumped_steps(self) -> list[int]:
        """The steps that have at least one dump, in order."""
        return list(self.rollout_files)

    def _dumped_files(self, folder: str) -> dict[int, dict[int, Path]]:
        """Returns the files in `folder` by step and node, both in order.

        If a node has a plain and a packed file of a step, it is the newer one.
        """
        files: dict[int, dict[int, Path]] = {}
        for stem, node, path in list_dumps(self.path / folder):
            step = step_of_stem(stem)
            if step is not None and stem == step_stem(step):
                nodes = files.setdefault(step, {})
                nodes[node] = max(nodes.get(node, path), path, key=_change_time)
        return {step: dict(sorted(nodes.items())) for step, nodes in sorted(files.items())}

    def metrics(self, start: int = 0) -> Iterator[JsonLine]:
        """Yields the lines of metrics.jsonl from byte `start` on."""
        return read_metrics(self.path / "metrics.jsonl", start)

    def launches(self) -> list[dict[str, Any]]:
        """Returns the records of launches.jsonl in order; a launch is one start of the command."""
        return read_launches(self.path)

    def timeline(self, steps: Collection[int] | None = None) -> dict[int, Timeline]:
        """Returns the timelines (each rank's phases) by step; only those of `steps` if given."""
        return read_timeline(self.path, steps)

    def rollouts(
        self,
        step: int,
        fields: tuple[str, ...] = (),
        errors: ReadErrors | None = None,
        is_wanted: Callable[[bytes], bool] | None = None,
    ) -> Iterator[tuple[FileLine, RolloutRecord]]:
        """Yields pairs of a line and its rollout, in the order of the files.

        If `fields` names some fields of RolloutRecord, each object has only these; that is much
        faster, but the fields are not checked against each other (`parse_rollout_fields`).
        `is_wanted` tells from a raw line whether to parse it.
        """

        def parse(line: bytes, name: str) -> RolloutRecord:
            """Returns the rollout in a line, with all fields or only those in `fields`."""
            if fields:
                return parse_rollout_fields(line, name, fields)  # type: ignore[no-any-return]
            return parse_rollout(line, name)

        num_read = 0
        num_rollouts = 0
        paths = self.rollout_files.get(step, {}).values()
        # People link the dumps of other nodes into one folder, so links to dumps are followed.
        for line, record in _parse_files(paths, parse, errors, is_wanted, follow=True):
            num_read += 1
            if not fields:
                num_rollouts = record.num_rollouts or 0
            yield line, record
        if errors is not None and is_wanted is None:
            errors.num_missing += max(0, num_rollouts - num_read)

    def scores(
        self, step: int, errors: ReadErrors | None = None
    ) -> Iterator[tuple[FileLine, TokenScores]]:
        """Yields pairs of a line and a rollout's token scores; nothing if the run recorded none."""
        return _parse_files(self.score_files.get(step, {}).values(), parse_scores, errors)

    def complete_rollouts(self, step: int) -> list[RolloutRecord]:
        """Returns all rollouts of a step in the order of the prompt stream.

        Raises ConfigError if the dump is missing, broken, incomplete or mixed from several runs.
        The error names the file, and in it the broken line or the missing rollouts.
        """
        files = self.rollout_files.get(step)
        if not files:
            raise ConfigError(
                f"{dump_path(self.path, step)}: No such file or directory; there are dumps of the "
                f"steps {reprlib.repr(self.dumped_steps)} "
                "(logging.rollouts_every_steps and rollouts_keep decide which)"
            )
        records = [record for _, record in self.rollouts(step)]
        records.sort(key=lambda record: (record.position, record.sample))
        paths = list(files.values())
        _check_complete(records, f"{paths[0]}" + f" and {len(paths) - 1} more" * (len(paths) > 1))
        return records


def _parse_files(
    paths: Iterable[Path],
    parse: Callable[[bytes, str], T],
    errors: ReadErrors | None,
    is_wanted: Callable[[bytes], bool] | None = None,
    *,
    follow: bool = False,
) -> Iterator[tuple[FileLine, T]]:
    """Yields each line of the files with what `parse(line, name of the line)` returns for it.

    `errors` and `is_wanted` are as in RunFolder.rollouts. `follow` allows symbolic links in the
    place of files.
    """
    for path in paths:
        num_broken = 0
        try:
            for line in read_lines(path, follow=follow):
                if is_wanted is not None and not is_wanted(line.text):
                    continue
                try:
                    value = parse(line.text, line.name)
                except ConfigError as error:
                    if errors is None or num_broken == _MAX_BROKEN:
                        raise
                    errors.add(str(error))
                    num_broken += 1
                else:
                    yield line, value
        except ConfigError as error:
            if errors is None:
                raise
            # a run that is still going may have removed the file meanwhile (logging.rollouts_keep)
            if os.path.lexists(path):
                errors.add(str(error))


def _check_complete(records: Sequence[RolloutRecord], name: str) -> None:
    """Raises ConfigError if rollouts of a step are missing, or are there twice.

    `records` are the rollouts in all files of the step, and `name` begins the message. A line has
    its rollout's id and the step's number of rollouts; the ids of a step have no gaps. Dumps of
    earlier versions have only the ids. Dumps of a step that rank 0 refused have neither.
    """
    numbers = {(record.position, record.sample) for record in records}
    ids = [record.rollout_id for record in records if record.rollout_id is not None]
    sizes = {record.num_rollouts for record in records if record.num_rollouts is not None}
    size = max(sizes, default=len(records))
    is_mixed = len(numbers) < len(records) or len({*ids}) < len(ids) or len(sizes) > 1
    if is_mixed or size < len(records):
        raise ConfigError(
            f"{name}: {len(records)} rollouts of a step that had {size}, or some of them twice; "
            "is one of these files of another run?"
        )
    num_ids = max(ids, default=-1) + 1
    # if every rollout has an id, dynamic sampling dropped none, and there are `size` ids
    if len(ids) == len(records):
        num_ids = max(num_ids, size)
    num_missing = max(size - len(records), num_ids - len(ids))
    if num_missing:
        # a hostile line can have a huge id: look only at a few more ids than there are lines
        missing_ids = sorted(set(range(min(num_ids, len(ids) + 10))).difference(ids))
        raise ConfigError(
            f"{name}: {num_missing} rollouts are missing, among them the ids "
            f"{reprlib.repr(missing_ids)}; each node wrote a file, and all of them must be in one "
            "folder"
        )


class LineStore:
    """Reads single lines again by their position, such as those that a scan chose to show.

    Files stay open. Small packed files stay in memory, unpacked. A large packed file must be
    unpacked again up to the line, so read its lines in order.
    """

    def __init__(self) -> None:
        self._files: dict[Path, IO[bytes]] = {}

    def read(self, position: LinePosition) -> bytes | None:
        """Returns the line at `position` without its line break.

        Returns None if the file is gone, was cut or is damaged."""
        with suppress(OSError, ConfigError, EOFError, zlib.error):
            if position.path not in self._files:
                if len(self._files) >= _MAX_OPEN:
                    self.close()
                self._files[position.path] = self._open(position.path)
            file = self._files[position.path]
            file.seek(position.start)
            return file.read(position.end - position.start).removesuffix(b"\n")
        return None

    def close(self) -> None:
        """Closes all files that are open."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, path: Path) -> IO[bytes]:
        """Opens a file of lines for reading; a small one that is gzipped is read into memory.

        Lines are read at their positions, in any order, and gzip cannot seek backwards cheaply.
        """
        file = open_lines(path, follow=True)
        if path.suffix == ".gz":
            # a packed file cannot be read from its middle, so a small one is kept unpacked
            with suppress(EOFError, zlib.error, OSError):
                content = file.read(_HELD_BYTES + 1)
                if len(content) <= _HELD_BYTES:
                    file.close()
                    return io.BytesIO(content)
            # of a damaged file, the lines before the damage can still be read
            file.seek(0)
        return file
