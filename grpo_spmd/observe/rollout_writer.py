"""Writes dumps of rollouts and token scores: one file per node, written by all its ranks.

The run itself does not need dumps: if the disk is full, files are missing, a warning is logged, and
the run goes on. No rank sends its rollouts to another.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.distributed.collectives import all_gather_numbers
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.processes import host_identity
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import write_durably
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    bounded_values,
    dumped_episode_fields,
    dumped_prompt,
    to_line,
)
from grpo_spmd.observe.run_folder import (
    PACKED,
    PLAIN,
    list_dumps,
    node_stem,
    step_of_stem,
    step_stem,
)
from grpo_spmd.observe.token_scores import KeptScores
from grpo_spmd.records import Decision

_log = logging.getLogger("grpo_spmd")
# Level 6 would take four times as long for a tenth fewer bytes.
_GZIP_LEVEL = 1


@dataclass(frozen=True)
class RolloutDump:
    """Dumps the rollouts of each `every_steps`-th step, and of steps that went wrong.

    With `every_steps` 0 only steps that went wrong are dumped.
    """

    writer: RolloutWriter
    every_steps: int
    score_writer: RolloutWriter | None = None
    """Writes the scores of a dump's tokens, beside the dump; None if they are not wanted."""

    def write_if_due(self, step: int, sampled: SampledStep, decision: Decision) -> None:
        """Collective. Writes the step's rollouts if it is a step that is dumped."""
        if self._is_due(step):
            self._write(step, sampled, decision)

    def keep_scores_if_due(self, step: int) -> KeptScores | None:
        """Returns an object that collects the logprobs and entropies of the step's tokens.

        Returns None if the token scores of this step are not written.
        """
        if self.score_writer is None or not self._is_due(step):
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
        """Collective. Writes the token scores after the updates of a step.

        `sums` are this rank's counts of the updates. The rollouts are written too if an update was
        skipped (on all ranks alike) and the step had no dump.
        """
        if scores is not None and self.score_writer is not None:
            # If there was one update, it has scored each token once, with the same weights as the
            # scores: then its own sum must be that of the scores.
            names = ("optim/updates", "optim/skipped_updates")
            counts = [sums[name].value for name in names if name in sums]
            squares = sums["tilt_squares"].value if counts == [1, 0] else None
            self.score_writer.write(step_stem(step), scores.lines(squares))
        if sums["optim/skipped_updates"].value and not self._is_due(step):
            self._write(step, sampled, decision)

    @contextmanager
    def if_refused(self, step: int, sampled: SampledStep) -> Iterator[None]:
        """Collective. Dumps the rollouts if rank 0 refuses the step's rewards in the block.

        The dump has no advantages, since there is no decision. It shows what was wrong with the
        rewards.
        """
        try:
            yield
        except Rank0Error:  # raised on all ranks alike
            self._write(step, sampled, None)
            raise

    def _is_due(self, step: int) -> bool:
        """Returns whether the step is one of the regular ones whose rollouts are dumped."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def _write(self, step: int, sampled: SampledStep, decision: Decision | None) -> None:
        """Collective. Writes this rank's rollouts; None as `decision`: rank 0 refused the step."""
        # each rank's rollouts in the order of the prompt stream, dropped groups among them
        records = sorted(
            rollout_records(sampled, decision), key=lambda record: (record.position, record.sample)
        )
        self.writer.write_step(step, map(to_line, records))


def rollout_records(sampled: SampledStep, decision: Decision | None) -> Iterator[RolloutRecord]:
    """Yields the records of this rank's rollouts of a step, in the order of sampling.

    `decision` is None if rank 0 refused the step. Groups that are not trained on have no slot, and
    their rollouts no id and no advantage.
    """
    scored = sampled.scored
    slots = decision.slots if decision is not None else {}
    # the index of the rollout on this rank, and so in the lists of `scored`
    number = -1
    for group in sampled.groups:
        prompt = group.prompt
        columns = bounded_values(prompt.columns)
        slot = slots.get(prompt.position)
        for sample, completion in enumerate(group.completions):
            number += 1
            rollout_id = None
            advantage = None
            if decision is not None and slot is not None:
                rollout_id = slot * len(group.completions) + sample
                advantage = decision.advantages[rollout_id]
            yield RolloutRecord(
                rollout_id=rollout_id,
                row=prompt.row,
                position=prompt.position,
                sample=sample,
                prompt=dumped_prompt(prompt, completion),
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
                **(dumped_episode_fields(completion.episode) if completion.episode else {}),
            )


class RolloutWriter:
    """Writes the files of one folder of a run: rollouts/, or token_scores/ beside it.

    If a file of rollouts/ is replaced or removed, the file of the same name in token_scores/ is
    removed too: its scores are those of the earlier rollouts.
    """

    def __init__(
        self, run_dir: Path, options: LoggingConfig, session: Session, folder: str = "rollouts"
    ) -> None:
        """Does nothing with the disk yet; `folder` is "rollouts" or "token_scores"."""
        self._folder = run_dir / folder
        self._session = session
        # where files are removed together with those of this folder
        self._folders = {self._folder, run_dir / "token_scores"}
        self._is_packed = options.rollouts_compression == "gzip"
        self._keep = options.rollouts_keep
        # the ranks of each node, and this rank's node; known from the first write on
        self._nodes: list[range] = []
        self._node = 0

    @property
    def _is_first_in_node(self) -> bool:
        """Whether this rank creates its node's file and gives it its name."""
        return self._session.rank == self._nodes[self._node].start

    def write_step(self, step: int, lines: Iterable[bytes]) -> None:
        """Collective. Writes the dump of `step` and keeps the newest `logging.rollouts_keep` dumps.

        A resumed run needs no dumps. Those of later steps, which an earlier launch has left, stay
        until the run makes these steps again.
        """
        self.write(step_stem(step), lines)
        if self._keep is None or not self._is_first_in_node:
            return
        numbers = {step_of_stem(stem) for stem, _, _ in list_dumps(self._folder)}
        earlier = sorted(number for number in numbers if number is not None and number <= step)
        self._remove([step_stem(number) for number in earlier[: -self._keep]])

    def write(self, stem: str, lines: Iterable[bytes]) -> None:
        """Collective. Writes all ranks' lines, in the order of ranks, to one file for each node.

        `stem` is the file's name without node and ending. A file is written whole or not at all. It
        replaces an earlier file of the name, since the step may have run before. Each rank encodes
        and holds only its own lines. An error of the disk is logged and not raised.
        """
        if not self._nodes:
            self._find_nodes()
        path = self._path(stem, self._node)
        temporary = path.with_name(path.name + ".tmp")
        content = b"".join(line + b"\n" for line in lines)
        if self._is_packed:
            # Members one after the other are a gzip file too, so each rank packs its own lines. A
            # member contains no time, so a step that is run again gives the same bytes.
            content = gzip.compress(content, _GZIP_LEVEL, mtime=0)
        error = _error_number(_make_room, temporary) if self._is_first_in_node else 0
        # After this collective the folder exists, and no old temporary file.
        sizes = all_gather_numbers(len(content))
        if not error:
            offset = sum(sizes[self._nodes[self._node].start : self._session.rank])
            error = _error_number(_write_at, temporary, offset, content)
        # After this collective every rank has written.
        errors = all_gather_numbers(error)
        if self._is_first_in_node:
            self._finish(stem, temporary, errors)

    def _finish(self, stem: str, temporary: Path, errors: Sequence[int]) -> None:
        """Renames the node's temporary file to its final name if no rank of the node has failed.

        Called on the first rank of each node; `errors` has an errno or 0 for each rank of the run.
        Earlier files of `stem` are removed before, because not all of them would be replaced: one
        may be packed, or belong to a node that the run no longer has.
        """
        failed = [rank for rank, error in enumerate(errors) if error]
        if failed and self._session.rank == 0:
            path = self._path(stem, self._node_of(failed[0]))
            reason = os.strerror(errors[failed[0]])
            _log.warning("%s is not written: %s (on rank %d)", path, reason, failed[0])
        # Remove before renaming: a kill in between must not leave old scores beside new rollouts.
        self._remove([stem])
        if any(rank in self._nodes[self._node] for rank in failed):
            _unlink([temporary])
        else:
            path = self._path(stem, self._node)
            error = _error_number(temporary.replace, path)
            if error:
                _log.warning("%s is not written: %s", path, os.strerror(error))
        # remove what killed processes had begun, but nothing that another node may be writing now
        _unlink(
            path
            for _, node, path in list_dumps(self._folder, ".tmp")
            if node == self._node or node >= len(self._nodes)
        )

    def _remove(self, stems: Sequence[str]) -> None:
        """Removes the files of `stems` of this node, and of nodes that the run no longer has."""
        _unlink(
            path
            for folder in self._folders
            for stem, node, path in list_dumps(folder)
            if stem in stems and (node == self._node or node >= len(self._nodes))
        )

    def _path(self, stem: str, node: int) -> Path:
        """Returns the path of the file that a node writes for `stem`."""
        return self._folder / f"{node_stem(stem, node)}{PACKED if self._is_packed else PLAIN}"

    def _node_of(self, rank: int) -> int:
        """Returns the number of the node that a rank is on."""
        return next(node for node, ranks in enumerate(self._nodes) if rank in ranks)

    def _find_nodes(self) -> None:
        """Collective. Finds the ranks of each node.

        A node here is a range of consecutive ranks on one host, started by one launcher. They write
        through one kernel, so each can write its part of the same file.
        """
        digest = hashlib.blake2b(host_identity().encode(), digest_size=7).digest()
        # a number that is equal on one host; its lowest bit marks the first rank of a launcher
        hosts = all_gather_numbers(
            2 * int.from_bytes(digest, "big") + (self._session.local_rank == 0)
        )
        begins = [
            rank
            for rank in range(1, len(hosts))
            if hosts[rank] % 2 or hosts[rank] // 2 != hosts[rank - 1] // 2
        ]
        self._nodes = [range(*ends) for ends in pairwise([0, *begins, len(hosts)])]
        self._node = self._node_of(self._session.rank)


def save_tokenizer(run_dir: Path, tokenizer: Any) -> None:
    """Writes tokenizer.json, so that token ids can be shown on machines that lack the model.

    Only fast tokenizers of transformers have such a file. An error of the disk is logged and not
    raised.
    """
    if getattr(tokenizer, "is_fast", False):
        path = run_dir / "tokenizer.json"
        content = tokenizer.backend_tokenizer.to_str().encode("utf-8", "surrogatepass")
        try:
            write_durably(path, content)
        except OSError as error:
            _log.warning("%s is not written: %s", path, error.strerror)


def _make_room(temporary: Path) -> None:
    """Creates the folder of a temporary file, and removes an older file of that name."""
    temporary.parent.mkdir(exist_ok=True)
    # a killed process may have left a longer file, whose end would remain
    temporary.unlink(missing_ok=True)


def _unlink(paths: Iterable[Path]) -> None:
    """Removes files. Errors of the disk are ignored: the run does not need the removal."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _write_at(path: Path, offset: int, content: bytes) -> None:
    """Writes `content` at byte `offset` of a file. Other ranks write at other offsets."""
    # The rank that comes first creates the file. O_NOFOLLOW and O_NONBLOCK: a link or a fifo of
    # that name gives an error.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o666), "wb") as file:
        file.seek(offset)
        file.write(content)


def _error_number(act: Callable[..., object], *arguments: object) -> int:
    """Calls `act` and returns the errno of the OSError that it raises, or 0 if it raises none."""
    try:
        act(*arguments)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
