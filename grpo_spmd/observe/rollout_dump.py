"""The run's own rollouts on disk, whatever rank made them: rollouts/step_N.jsonl, a line a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from grpo_spmd.distributed.collectives import gather_bytes
from grpo_spmd.distributed.errors import Rank0Error
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.observe.columns import bounded
from grpo_spmd.observe.rollout_files import RolloutFiles
from grpo_spmd.observe.rollout_record import RolloutRecord, to_line
from grpo_spmd.records import Decision


class RolloutDump:
    """Dumps the rollouts of each `every_steps`-th step (0: of none), and of steps that went wrong."""

    def __init__(self, files: RolloutFiles, every_steps: int) -> None:
        self._files, self._every_steps = files, every_steps

    def write_if_due(self, step: int, sampled: SampledStep, decision: Decision) -> None:
        """Collective."""
        if self._is_due(step):
            self._write(step, sampled, decision)

    def write_if_skipped(self, step: int, sampled: SampledStep, decision: Decision, sums: Reductions) -> None:
        """Collective. Where an update was skipped (on all ranks alike), and the file is not there yet."""
        if sums["optim/skipped_updates"].value and not self._is_due(step):
            self._write(step, sampled, decision)

    @contextmanager
    def if_refused(self, step: int, sampled: SampledStep) -> Iterator[None]:
        """Collective, where rank 0 refuses the step's rewards: the file shows what was wrong."""
        try:
            yield
        except Rank0Error:  # on all ranks alike
            self._write(step, sampled, None)
            raise

    def _is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step % self._every_steps == 0

    def _write(self, step: int, sampled: SampledStep, decision: Decision | None) -> None:
        """In the order of the prompt stream; groups that dynamic sampling dropped are there too."""
        size = len(sampled.groups[0].completions) if sampled.groups else 0
        lines = {record.position * size + record.sample: to_line(record) for record in records_of(sampled, decision)}
        write_lines_in_order(lines, partial(self._files.write_step, step))


def records_of(sampled: SampledStep, decision: Decision | None) -> Iterator[RolloutRecord]:
    """This rank's rollouts of a step, in the order in which they were sampled."""
    scored, slots = sampled.scored, decision.slots if decision is not None else {}
    columns = [bounded(group.prompt.columns) for group in sampled.groups]
    own = ((i, n, c) for i, group in enumerate(sampled.groups) for n, c in enumerate(group.completions))
    for number, (i, sample, completion) in enumerate(own):
        group = sampled.groups[i]
        prompt, slot = group.prompt, slots.get(group.prompt.position)
        rollout_id = None if slot is None else slot * len(group.completions) + sample
        yield RolloutRecord(
            rollout_id=rollout_id,
            row=prompt.row,
            position=prompt.position,
            sample=sample,
            prompt=prompt.text,
            columns=columns[i],
            completion=scored.texts[number],
            reward=scored.rewards[number],
            rewards=scored.finite_by_name(number),
            statuses={name: statuses[number] for name, statuses in scored.statuses.items()},
            advantage=None if decision is None or rollout_id is None else decision.advantages[rollout_id],
            finish_reason=completion.finish_reason,
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            rollout_logprobs=[x if math.isfinite(x) else None for x in completion.logprobs],
            extra=scored.notes.get(number, {}).get("extra", {}),
        )


def write_lines_in_order(lines: dict[int, str], write: Callable[[Iterable[bytes]], None]) -> None:
    """Collective. Have rank 0 `write` all ranks' lines, by their numbers."""
    # JSON has no line break of its own. Half a surrogate pair, which a prompt may hold, becomes JSON's escape for it.
    text = "".join(f"{number}\t{line}\n" for number, line in lines.items())
    parts = gather_bytes(text.encode("utf-8", "backslashreplace"))
    if parts is None:
        return
    numbered = [line.split(b"\t", 1) for part in parts for line in part.split(b"\n") if line]
    numbered.sort(key=lambda pair: int(pair[0]))
    write(line for _, line in numbered)
