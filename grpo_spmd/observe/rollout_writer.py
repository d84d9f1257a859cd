"""Writes dumps of rollouts: one file a node, into which each rank of the node puts its own lines itself."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.distributed.collectives import all_gather_numbers
from grpo_spmd.distributed.session import Session
from grpo_spmd.observe.run_folder import (
    PACKED,
    PLAIN,
    list_dumps,
    list_unfinished,
    node_stem,
    step_of_stem,
    step_stem,
)

_log = logging.getLogger("grpo_spmd")
_LEVEL = 1  # of gzip: 6 takes four times as long for a tenth less
_BUFFER = 1 << 18
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Nodes:
    """The ranks that write into one file, for each file, and whose place this rank has among them."""

    ranks: list[range]
    rank: int
    own: int  # the node of `rank`

    @property
    def is_first(self) -> bool:
        """Whether this rank begins its node's file, and ends it."""
        return self.rank == self.ranks[self.own].start


class RolloutWriter:
    """Writes the dumps of a run. They are for people: a full disk costs the files that it hits, and a warning.
    With a file of rollouts/ goes what token_scores/ has of the same name: it is of another attempt."""

    def __init__(
        self, run_dir: Path, options: LoggingConfig, session: Session, folder: str = "rollouts"
    ) -> None:
        self._folder, self._session = run_dir / folder, session
        self._scores = run_dir / "token_scores" if folder == "rollouts" else self._folder
        self._is_packed, self._keep = options.rollouts_compression == "gzip", options.rollouts_keep
        self._ending, self._other_ending = (PACKED, PLAIN) if self._is_packed else (PLAIN, PACKED)
        self._known_nodes: _Nodes | None = None
        self._there: dict[str, set[int]] | None = (
            None  # on a node's first rank: the nodes of each stem's files
        )

    def write_step(self, step: int, lines: Iterable[bytes]) -> None:
        """Collective. `write` as the dump of `step`, and remove those before it, but for the newest
        `logging.rollouts_keep`. A run that goes on needs none of them; of steps that it will do again the files stay
        until then."""
        self.write(step_stem(step), lines)
        if self._keep is None or self._there is None:
            return
        upto = {
            number: stem
            for stem in self._there
            if (number := step_of_stem(stem)) is not None and number <= step
        }
        for number in sorted(upto)[: -self._keep]:
            self._remove(upto[number], also=self._nodes().own)
            del self._there[upto[number]]

    def write(self, stem: str, lines: Iterable[bytes]) -> None:
        """Collective. Put all ranks' lines into the files of `stem`, rank by rank, each file whole or not at all, in
        the place of what was there: the same step may have been run before. A rank holds its own lines, encoded, and
        nothing of others'; what a disk does to it raises nothing."""
        nodes = self._nodes()
        path = self._path(stem, nodes.own)
        temporary = path.with_name(path.name + ".tmp")
        chunks = _packed(lines) if self._is_packed else [line + b"\n" for line in lines]
        error = _error_of(_make_room, temporary) if nodes.is_first else 0
        sizes = all_gather_numbers(
            sum(map(len, chunks))
        )  # behind it there is room, and no file of that name
        if not error and (chunks or nodes.is_first):
            error = _error_of(
                _write_at, temporary, sum(sizes[nodes.ranks[nodes.own].start : nodes.rank]), chunks
            )
        errors = all_gather_numbers(error)  # behind it all is written
        if nodes.is_first:
            self._finish(stem, temporary, errors)

    def _finish(self, stem: str, temporary: Path, errors: Sequence[int]) -> None:
        """On a node's first rank: the file gets its name where no rank of the node failed. What earlier processes left
        of `stem` goes, in the other form or of another number of nodes: it may say something else."""
        nodes, path = self._nodes(), self._path(stem, self._nodes().own)
        written = {
            node
            for node, ranks in enumerate(nodes.ranks)
            if not any(errors[rank] for rank in ranks)
        }
        if nodes.rank == 0 and len(written) < len(nodes.ranks):
            failed, rank = (
                set(range(len(nodes.ranks))) - written,
                next(rank for rank, e in enumerate(errors) if e),
            )
            more = f", nor are the files of {len(failed) - 1} more nodes" if len(failed) > 1 else ""
            why = f"{os.strerror(errors[rank])} (on rank {rank})"
            _log.warning("%s is not written%s: %s", self._path(stem, min(failed)), more, why)
        if (
            self._scores != self._folder
        ):  # first: a kill in between must not leave them beside another's rollouts
            _unlink(
                [
                    self._scores / f"{node_stem(stem, nodes.own)}{ending}"
                    for ending in (PLAIN, PACKED)
                ]
            )
        if nodes.own in written and (error := _error_of(temporary.replace, path)):
            written.remove(nodes.own)
            _log.warning("%s is not written: %s", path, os.strerror(error))
        other = path.with_name(node_stem(stem, nodes.own) + self._other_ending)
        _unlink([other] if nodes.own in written else [temporary, path, other])
        if self._there is None:  # read once: a run may come to have very many
            self._there = {}
            with suppress(OSError):
                for known, node, _ in list_dumps(self._folder):
                    self._there.setdefault(known, set()).add(node)
                self._sweep()
        self._remove(stem)
        self._there.pop(stem, None)
        if written:
            self._there[stem] = written

    def _sweep(self) -> None:
        """Remove what killed processes had begun, as far as none of another node can be at it now."""
        for path, node in [*list_unfinished(self._folder)]:
            if node == self._nodes().own or node >= len(self._nodes().ranks):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _remove(self, stem: str, also: int | None = None) -> None:
        """Files of `stem`: those of nodes that there are no more, and of the node `also`."""
        nodes = {
            node for node in (self._there or {}).get(stem, ()) if node >= len(self._nodes().ranks)
        }
        for node in sorted(nodes | ({also} if also is not None else set())):
            for folder, ending in product({self._folder, self._scores}, (PLAIN, PACKED)):
                path = folder / f"{node_stem(stem, node)}{ending}"
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    _log.warning("could not remove %s: %s", path, error.strerror)

    def _path(self, stem: str, node: int) -> Path:
        return self._folder / f"{node_stem(stem, node)}{self._ending}"

    def _nodes(self) -> _Nodes:
        """Collective at the first call, which `write` makes. Consecutive ranks of one host and one launcher: what they
        write into a file meets in one kernel."""
        if self._known_nodes is None:
            host = socket.gethostname().encode() + (_BOOT.read_bytes() if _BOOT.exists() else b"")
            number = int.from_bytes(hashlib.blake2b(host, digest_size=7).digest(), "big")
            hosts = all_gather_numbers(2 * number + (self._session.local_rank == 0))
            changes = [
                rank
                for rank in range(1, len(hosts))
                if hosts[rank] % 2 or hosts[rank] // 2 != hosts[rank - 1] // 2
            ]
            ranks = [range(*ends) for ends in pairwise([0, *changes, len(hosts)])]
            own = next(node for node, of_node in enumerate(ranks) if self._session.rank in of_node)
            self._known_nodes = _Nodes(ranks, self._session.rank, own)
        return self._known_nodes


def _packed(lines: Iterable[bytes]) -> list[bytes]:
    """A member of a gzip file, without the time: a step run again gives the same bytes. Members one behind the other
    are a gzip file too."""
    packer = zlib.compressobj(_LEVEL, wbits=16 + zlib.MAX_WBITS)
    pieces = [packer.compress(line + b"\n") for line in lines]
    return [piece for piece in (*pieces, packer.flush()) if piece]


def _make_room(temporary: Path) -> None:
    temporary.parent.mkdir(exist_ok=True)
    temporary.unlink(
        missing_ok=True
    )  # of a process that was killed: it may be longer than what comes


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _write_at(path: Path, offset: int, chunks: Sequence[bytes]) -> None:
    """Whichever rank comes first makes the file; only ours have this name, and none that leads elsewhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "wb", _BUFFER) as file:
        file.seek(offset)
        file.writelines(chunks)


def _error_of(act: Callable[..., object], *arguments: object) -> int:
    """The error number of what the disk refused; 0: nothing."""
    try:
        act(*arguments)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
