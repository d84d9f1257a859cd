"""Writes dumps of rollouts and token scores: one file per node, written by all its ranks.

Dumps are for people: a full disk costs the files that it hits, and a warning. No rank sends its
rollouts to another.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.distributed.collectives import all_gather_numbers
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import UntrustedError, open_regular, write_durably
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    bounded_values,
    dumped_episode_fields,
    to_line,
)
from grpo_spmd.observe.run_folder import (
    PACKED,
    PLAIN,
    list_dumps,
    list_unfinished,
    node_stem,
    step_of_stem,
    step_stem,
)
from grpo_spmd.observe.token_scores import KeptScores
from grpo_spmd.records import Decision

_log = logging.getLogger("grpo_spmd")
# Level 6 would take four times as long for a tenth fewer bytes.
_GZIP_LEVEL = 1
_BUFFER_BYTES = 1 << 18
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RolloutDump:
    """Dumps the rollouts of each `every_steps`-th step (0: of none), and of steps that went
    wrong."""

    def __init__(
        self, writer: RolloutWriter, every_steps: int, score_writer: RolloutWriter | None = None
    ) -> None:
        """`score_writer` writes the scores of a dump's tokens beside the dump."""
        self._writer = writer
        self._every_steps = every_steps
        self._score_writer = score_writer

    def write_if_due(self, step: int, sampled: SampledStep, decision: Decision) -> None:
        """Collective. Writes the dump if the step has one."""
        if self._is_due(step):
            self._write(step, sampled, decision)

    def keep_scores_if_due(self, step: int) -> KeptScores | None:
        """Returns an object that takes the logprobs and entropies of the step's tokens.

        Returns None if this step's are not written.
        """
        if self._score_writer is None or not self._is_due(step):
            return None
        return KeptScores()

    def write_updated(
        self,
        step: int,
        sampled: SampledStep,
        decision: Decision,
        sums: Reductions,
        scores: KeptScores | None,
    ) -> None:
        """Collective. Writes the `scores` after the updates.

        The rollouts are written too if an update was skipped (on all ranks alike) and the step had
        no dump.
        """
        if scores is not None and self._score_writer is not None:
            self._score_writer.write(step_stem(step), scores.lines())
        if sums["optim/skipped_updates"].value and not self._is_due(step):
            self._write(step, sampled, decision)

    @contextmanager
    def if_refused(self, step: int, sampled: SampledStep) -> Iterator[None]:
        """Collective. Dumps the rollouts if rank 0 refuses the step's rewards, to show what was
        wrong."""
        try:
            yield
        except Rank0Error:  # raised on all ranks alike
            self._write(step, sampled, None)
            raise

    def _is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step % self._every_steps == 0

    def _write(self, step: int, sampled: SampledStep, decision: Decision | None) -> None:
        # each rank's rollouts in the order of the prompt stream, dropped groups among them
        records = sorted(
            rollout_records(sampled, decision), key=lambda record: (record.position, record.sample)
        )
        self._writer.write_step(step, map(to_line, records))


def rollout_records(sampled: SampledStep, decision: Decision | None) -> Iterator[RolloutRecord]:
    """Yields this rank's rollouts of a step in the order in which they were sampled."""
    scored = sampled.scored
    slots = decision.slots if decision is not None else {}
    # counts this rank's rollouts: `scored` has its lists in this order
    number = -1
    for group in sampled.groups:
        prompt = group.prompt
        columns = bounded_values(prompt.columns)
        slot = slots.get(prompt.position)
        for sample, completion in enumerate(group.completions):
            number += 1
            rollout_id = None if slot is None else slot * len(group.completions) + sample
            advantage = None
            if decision is not None and rollout_id is not None:
                advantage = decision.advantages[rollout_id]
            episode_fields: dict[str, Any] = {}
            if completion.episode is not None:
                episode_fields = dumped_episode_fields(completion.episode)
            yield RolloutRecord(
                rollout_id=rollout_id,
                row=prompt.row,
                position=prompt.position,
                sample=sample,
                prompt=prompt.text,
                columns=columns,
                completion=scored.texts[number],
                reward=scored.rewards[number],
                rewards=scored.finite_by_name(number),
                statuses={name: statuses[number] for name, statuses in scored.statuses.items()},
                advantage=advantage,
                finish_reason=completion.finish_reason,
                prompt_ids=prompt.token_ids,
                completion_ids=completion.token_ids,
                rollout_logprobs=completion.logprobs,
                num_rollouts=None if decision is None else sampled.num_completions,
                extra=scored.notes.get(number, {}).get("extra", {}),
                **episode_fields,
            )


@dataclass(frozen=True)
class _Nodes:
    """Which ranks write into which file."""

    ranks: list[range]
    """The ranks of each node."""
    rank: int
    own: int
    """The node of `rank`."""

    @property
    def is_first(self) -> bool:
        """Whether this rank creates its node's file and gives it its name."""
        return self.rank == self.ranks[self.own].start


class RolloutWriter:
    """Writes the files of one folder of a run: rollouts/, or token_scores/ beside it.

    Replacing or removing a file of rollouts/ removes the file of the same name in token_scores/:
    those scores belong to another attempt at the step.
    """

    def __init__(
        self, run_dir: Path, options: LoggingConfig, session: Session, folder: str = "rollouts"
    ) -> None:
        self._folder = run_dir / folder
        self._session = session
        self._scores = run_dir / "token_scores" if folder == "rollouts" else self._folder
        self._is_packed = options.rollouts_compression == "gzip"
        self._keep = options.rollouts_keep
        self._ending = PACKED if self._is_packed else PLAIN
        self._other_ending = PLAIN if self._is_packed else PACKED
        self._known_nodes: _Nodes | None = None
        # On a node's first rank: the nodes that have a file of each stem, listed at the first
        # write.
        self._nodes_by_stem: dict[str, set[int]] | None = None

    def write_step(self, step: int, lines: Iterable[bytes]) -> None:
        """Collective. Writes the dump of `step` and keeps the newest `logging.rollouts_keep` dumps.

        A run that goes on needs no dump. Files of later steps, which it will do again, stay until
        then.
        """
        self.write(step_stem(step), lines)
        if self._keep is None or self._nodes_by_stem is None:
            return
        stems = {}
        for stem in self._nodes_by_stem:
            number = step_of_stem(stem)
            if number is not None and number <= step:
                stems[number] = stem
        for number in sorted(stems)[: -self._keep]:
            self._remove(stems[number], also=self._nodes().own)
            del self._nodes_by_stem[stems[number]]

    def write(self, stem: str, lines: Iterable[bytes]) -> None:
        """Collective. Puts all ranks' lines into the files of `stem`, rank by rank.

        Each file is written whole or not at all, and replaces an earlier one: the step may have run
        before. A rank holds its own encoded lines and nothing of the others. A disk that fails
        raises nothing.
        """
        nodes = self._nodes()
        path = self._path(stem, nodes.own)
        temporary = path.with_name(path.name + ".tmp")
        chunks = _pack(lines) if self._is_packed else [line + b"\n" for line in lines]
        error = _error_number(_make_room, temporary) if nodes.is_first else 0
        # After this collective the folder is there, and no old temporary file.
        sizes = all_gather_numbers(sum(map(len, chunks)))
        if not error and (chunks or nodes.is_first):
            offset = sum(sizes[nodes.ranks[nodes.own].start : nodes.rank])
            error = _error_number(_write_at, temporary, offset, chunks)
        # After this collective every rank has written.
        errors = all_gather_numbers(error)
        if nodes.is_first:
            self._finish(stem, temporary, errors)

    def _finish(self, stem: str, temporary: Path, errors: Sequence[int]) -> None:
        """Gives the node's file its name if no rank of the node failed.

        Earlier files of `stem` are removed: they may be packed, or of another number of nodes,
        and say something else.
        """
        nodes = self._nodes()
        path = self._path(stem, nodes.own)
        written = {
            node
            for node, ranks in enumerate(nodes.ranks)
            if not any(errors[rank] for rank in ranks)
        }
        if nodes.rank == 0:
            self._warn_of_failures(stem, written, errors)
        own_name = node_stem(stem, nodes.own)
        # The scores go first: a kill in between must not leave them beside another attempt's
        # rollouts.
        if self._scores != self._folder:
            _unlink(self._scores / f"{own_name}{ending}" for ending in (PLAIN, PACKED))
        if nodes.own in written:
            error = _error_number(temporary.replace, path)
            if error:
                written.remove(nodes.own)
                _log.warning("%s is not written: %s", path, os.strerror(error))
        stale_path = path.with_name(own_name + self._other_ending)
        _unlink([stale_path] if nodes.own in written else [temporary, path, stale_path])
        # the folder is listed only once, since a run may have very many files
        if self._nodes_by_stem is None:
            self._nodes_by_stem = {}
            for known_stem, node, _ in list_dumps(self._folder):
                self._nodes_by_stem.setdefault(known_stem, set()).add(node)
            self._remove_unfinished()
        self._remove(stem)
        self._nodes_by_stem.pop(stem, None)
        if written:
            self._nodes_by_stem[stem] = written

    def _warn_of_failures(self, stem: str, written: set[int], errors: Sequence[int]) -> None:
        failed = sorted(set(range(len(self._nodes().ranks))) - written)
        if not failed:
            return
        rank = next(rank for rank, error in enumerate(errors) if error)
        more = f", nor are the files of {len(failed) - 1} more nodes" if len(failed) > 1 else ""
        reason = f"{os.strerror(errors[rank])} (on rank {rank})"
        _log.warning("%s is not written%s: %s", self._path(stem, failed[0]), more, reason)

    def _remove_unfinished(self) -> None:
        """Removes what killed processes had begun, but nothing that another node may be writing
        now."""
        nodes = self._nodes()
        _unlink(
            path
            for path, node in list_unfinished(self._folder)
            if node == nodes.own or node >= len(nodes.ranks)
        )

    def _remove(self, stem: str, also: int | None = None) -> None:
        """Removes the files of `stem` of nodes that the run no longer has, and of the node
        `also`."""
        known_nodes = (self._nodes_by_stem or {}).get(stem, ())
        nodes = {node for node in known_nodes if node >= len(self._nodes().ranks)}
        if also is not None:
            nodes.add(also)
        for node in sorted(nodes):
            for folder, ending in product({self._folder, self._scores}, (PLAIN, PACKED)):
                path = folder / f"{node_stem(stem, node)}{ending}"
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    _log.warning("could not remove %s: %s", path, error.strerror)

    def _path(self, stem: str, node: int) -> Path:
        return self._folder / f"{node_stem(stem, node)}{self._ending}"

    def _nodes(self) -> _Nodes:
        """Collective at the first call, which `write` makes.

        A node here is a stretch of consecutive ranks of one host and one launcher: what they write
        into a file meets in one kernel.
        """
        if self._known_nodes is None:
            # the boot id tells two containers of one name apart
            host = socket.gethostname().encode()
            host += _BOOT_ID.read_bytes() if _BOOT_ID.exists() else b""
            number = int.from_bytes(hashlib.blake2b(host, digest_size=7).digest(), "big")
            # the lowest bit marks the first rank of a launcher
            hosts = all_gather_numbers(2 * number + (self._session.local_rank == 0))
            begins = [
                rank
                for rank in range(1, len(hosts))
                if hosts[rank] % 2 or hosts[rank] // 2 != hosts[rank - 1] // 2
            ]
            ranks = [range(*ends) for ends in pairwise([0, *begins, len(hosts)])]
            own_node = next(i for i, node in enumerate(ranks) if self._session.rank in node)
            self._known_nodes = _Nodes(ranks, self._session.rank, own_node)
        return self._known_nodes


def save_tokenizer(run_dir: Path, tokenizer: Any) -> None:
    """Writes tokenizer.json, so that token ids can be shown where the model is not.

    Only a fast tokenizer of transformers has one. A file that is already there stays; a disk that
    fails raises nothing.
    """
    if not getattr(tokenizer, "is_fast", False):
        return
    path = run_dir / "tokenizer.json"
    content = tokenizer.backend_tokenizer.to_str().encode("utf-8", "surrogatepass")
    try:
        if _read_if_regular(path) != content:
            write_durably(path, content)
    except OSError as error:
        _log.warning("%s is not written: %s", path, error.strerror)


def _read_if_regular(path: Path) -> bytes | None:
    # a link or a fifo is replaced, and what it leads to stays
    with suppress(UntrustedError, FileNotFoundError), open_regular(path) as file:
        return file.read()
    return None


def _pack(lines: Iterable[bytes]) -> list[bytes]:
    """Returns one member of a gzip file.

    It has no time in it, so a step that is run again gives the same bytes.
    Members one after the other are a gzip file too, so each rank packs its own.
    """
    packer = zlib.compressobj(_GZIP_LEVEL, wbits=16 + zlib.MAX_WBITS)
    pieces = [packer.compress(line + b"\n") for line in lines]
    return [piece for piece in (*pieces, packer.flush()) if piece]


def _make_room(temporary: Path) -> None:
    temporary.parent.mkdir(exist_ok=True)
    # a killed process may have left one that is longer than what comes now
    temporary.unlink(missing_ok=True)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _write_at(path: Path, offset: int, chunks: Sequence[bytes]) -> None:
    # Whichever rank comes first creates the file. A link or a fifo of that name is not followed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "wb", _BUFFER_BYTES) as file:
        file.seek(offset)
        file.writelines(chunks)


def _error_number(act: Callable[..., object], *arguments: object) -> int:
    """Returns the error number of what the disk refused; 0 if it refused nothing."""
    try:
        act(*arguments)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
