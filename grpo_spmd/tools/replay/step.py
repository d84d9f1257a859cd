"""Repeats a recorded step: its rewards, its advantages and its update, by the trainer's own code.

Imports torch, so that redo.py imports it only after the GPUs are hidden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.rollout_writer import rollout_records
from grpo_spmd.records import Decision, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.scorers import weighted_sum
from grpo_spmd.rewards.trl import TrainerState
from grpo_spmd.tools.replay.read import (
    RecordedStep,
    Replay,
    ReplayedRollout,
    make_completion,
    reward_weights,
    unasked_rewards,
)
from grpo_spmd.tools.replay.update import train


def repeat_step(recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool) -> Replay:
    """Returns the results of the step's repetition, in a session of its own.

    Raises ConfigError or CheckpointError for what is missing or damaged, RewardError if the user
    left the debugger.
    """
    session = start_session()
    try:
        return _repeat(recorded, checkpoint, pool, session)
    finally:
        end_session()


def _repeat(
    recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool, session: Session
) -> Replay:
    # the caller's list of notes stays as it is
    recorded = dataclasses.replace(recorded, notes=list(recorded.notes))
    sampled = SampledStep(_step_rules(recorded))
    try:
        _score(recorded, sampled, pool)
        batch, decision = assemble_batch(sampled, session)
    except Rank0Error as error:
        recorded.notes.append(f"the step is refused: {error}")
        return Replay(recorded.notes, {}, _pair_rollouts(recorded, sampled, None, {}))
    update = train(recorded, checkpoint, batch, decision, session)
    replayed = update.decision.metrics | update.metrics
    metrics = {
        name: (recorded.metrics.get(name), value)
        for name, value in replayed.items()
        if recorded.metrics and not name.startswith("batching/")
    }
    rollouts = _pair_rollouts(recorded, sampled, update.decision, update.logprobs)
    return Replay(recorded.notes, metrics, rollouts)


def _step_rules(recorded: RecordedStep) -> StepRules:
    """Returns the rules for the step under the replay's config."""
    config = recorded.config
    # rewards that only watch teach nothing
    is_measured = not any(reward_weights(recorded).values())
    return StepRules(
        config.rollout,
        config.advantage,
        config.loss,
        config.training,
        config.reward_pool.max_error_frac,
        1,
        discount=None if is_measured else config.environment.discount,
        zero_advantages=is_measured,
    )


def _score(recorded: RecordedStep, sampled: SampledStep, pool: RewardPool) -> None:
    """Adds the recorded groups to `sampled`, scored again or with the recorded rewards."""
    notes = recorded.notes
    num_steps = recorded.config.training.num_steps
    pool.begin_step(TrainerState(recorded.step - 1, num_steps, recorded.epoch))
    unasked = unasked_rewards(recorded)
    for reason, names in unasked.items():
        notes.append(f"rewards are those that the run recorded: {reason} {', '.join(names)}")
    is_scored_again = recorded.columns is not None and not unasked
    texts = _RecordedTexts(recorded.rollouts)
    waiting = _make_groups(recorded)
    # the loop runs once, unless dynamic sampling refilled the step
    while sampled.num_missing and waiting:
        groups = waiting[: sampled.num_missing]
        del waiting[: sampled.num_missing]
        scored = (
            pool.score(groups, texts) if is_scored_again else _recorded_scores(groups, recorded)
        )
        sampled.add(groups, scored, num_groups=len(groups))
    if sampled.num_missing:
        notes.append(
            f"the step would now have drawn {sampled.num_missing} more prompts, "
            "of which there are no rollouts"
        )
    if waiting:
        notes.append(f"{len(waiting)} groups of the dump are not needed now")


class _RecordedTexts:
    """Takes the tokenizer's place: returns the texts that the run scored."""

    def __init__(self, rollouts: Sequence[Sequence[RolloutRecord]]) -> None:
        self._texts = {
            tuple(record.completion_ids): record.completion
            for group in rollouts
            for record in group
        }

    def batch_decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool
    ) -> list[str]:
        assert skip_special_tokens
        return [self._texts[tuple(ids)] for ids in token_ids]


def _make_groups(recorded: RecordedStep) -> list[RolloutGroup]:
    groups = []
    for slot, records in enumerate(recorded.rollouts):
        start = records[0]
        columns = recorded.columns[slot] if recorded.columns is not None else {}
        prompt = Prompt(start.position, start.row, start.prompt_ids, start.prompt, columns)
        completions = [make_completion(record) for record in records]
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def _recorded_scores(groups: Sequence[RolloutGroup], recorded: RecordedStep) -> ScoredRollouts:
    """Returns the rewards that the run recorded, under the weights of the config."""
    weights = reward_weights(recorded)
    scored = ScoredRollouts()
    for record in (record for group in groups for record in recorded.rollouts[group.slot]):
        if weights.keys() != record.rewards.keys():
            raise ConfigError(
                f"rewards: the run recorded {', '.join(record.rewards)}, "
                f"the config names {', '.join(weights)}; without the data set no other reward "
                "can be called: set data.train"
            )
        # the dump has null for both: a reward that does not apply, and one that is unusable (NaN)
        values = {
            name: value if record.statuses[name] in ("ok", "not_applicable") else math.nan
            for name, value in record.rewards.items()
        }
        reward = weighted_sum([(weights[name], value) for name, value in values.items()])
        scored.extend(
            ScoredRollouts(
                [reward],
                {name: [value] for name, value in values.items()},
                {name: [status] for name, status in record.statuses.items()},
                texts=[record.completion],
            )
        )
    return scored


def _pair_rollouts(
    recorded: RecordedStep,
    sampled: SampledStep,
    decision: Decision | None,
    logprobs: dict[int, list[float]],
) -> list[ReplayedRollout]:
    originals = {
        (record.position, record.sample): record for group in recorded.rollouts for record in group
    }
    rollouts = []
    for record in rollout_records(sampled, decision):
        rollout_id = record.rollout_id
        in_loss = decision is not None and rollout_id is not None and decision.in_loss[rollout_id]
        rollouts.append(
            ReplayedRollout(
                recorded=originals[record.position, record.sample],
                replayed=record,
                in_loss=in_loss,
                logprobs=None if rollout_id is None else logprobs.get(rollout_id),
            )
        )
    return rollouts
