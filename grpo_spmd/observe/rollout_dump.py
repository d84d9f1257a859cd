"""The run's own rollouts on disk, whatever rank made them: rollouts/step_N.jsonl, a line a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    bounded_values,
    dumped_episode_fields,
    to_line,
)
from grpo_spmd.observe.rollout_writer import RolloutWriter
from grpo_spmd.observe.run_folder import step_stem
from grpo_spmd.records import Decision

if TYPE_CHECKING:  # of the steps that are dumped; and until then not even imported
    from grpo_spmd.observe.token_scores import KeptScores


class RolloutDump:
    """Dumps the rollouts of each `every_steps`-th step (0: of none), and of steps that went wrong."""

    def __init__(
        self, writer: RolloutWriter, every_steps: int, of_scores: RolloutWriter | None = None
    ) -> None:
        """`of_scores` writes the scores of a dump's tokens beside it."""
        self._writer, self._every_steps, self._of_scores = writer, every_steps, of_scores

    def write_if_due(self, step: int, sampled: SampledStep, decision: Decision) -> None:
        """Collective."""
        if self._is_due(step):
            self._write(step, sampled, decision)

    def keep_scores_if_due(self, step: int) -> KeptScores | None:
        """What takes the scores of the step's tokens; None where nobody is to see them."""
        if self._of_scores is None or not self._is_due(step):
            return None
        from grpo_spmd.observe.token_scores import KeptScores

        return KeptScores()

    def write_updated(
        self,
        step: int,
        sampled: SampledStep,
        decision: Decision,
        sums: Reductions,
        scores: KeptScores | None,
    ) -> None:
        """Collective. After the updates: the `scores`; and the rollouts, where an update was skipped (on all ranks
        alike) and the file is not there yet."""
        if scores is not None and self._of_scores is not None:
            self._of_scores.write(step_stem(step), scores.lines())
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
        """Each rank's in the order of the prompt stream; groups that dynamic sampling dropped are there too."""
        records = sorted(
            records_of(sampled, decision), key=lambda record: (record.position, record.sample)
        )
        self._writer.write_step(step, map(to_line, records))


def records_of(sampled: SampledStep, decision: Decision | None) -> Iterator[RolloutRecord]:
    """This rank's rollouts of a step, in the order in which they were sampled."""
    scored, slots = sampled.scored, decision.slots if decision is not None else {}
    columns = [bounded_values(group.prompt.columns) for group in sampled.groups]
    own = (
        (i, n, c) for i, group in enumerate(sampled.groups) for n, c in enumerate(group.completions)
    )
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
            advantage=None
            if decision is None or rollout_id is None
            else decision.advantages[rollout_id],
            finish_reason=completion.finish_reason,
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            num_rollouts=None if decision is None else sampled.num_completions,
            extra=scored.notes.get(number, {}).get("extra", {}),
            **(dumped_episode_fields(completion.episode) if completion.episode is not None else {}),
        )
