"""Reward -> advantage -> loss of a recorded step again, on the CPU, in one process, without vLLM: the trainer's own
code over the dumped rollouts, so that breakpoint() works in a reward (called in the reward pool, with its deadlines, as
in training), in the advantages and in the loss. Overrides ask what another config would do."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.records import Decision, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.scorers import weighted_sum
from grpo_spmd.rewards.trl import TrainerState
from grpo_spmd.tools.replay.episodes import completion_of, given_rewards, own_rewards, weights_of
from grpo_spmd.tools.replay.read import (
    RecordedStep,
    Replay,
    ReplayedRollout,
    notes_of,
    unasked_rewards,
)

if TYPE_CHECKING:
    from grpo_spmd.distributed.session import Session
    from grpo_spmd.learn.sampled_step import SampledStep


def replay(recorded: RecordedStep, checkpoint: Path | None = None) -> Replay:
    """Score, decide and train once more with the policy of `checkpoint`, else of the step's own. Raises ConfigError or
    CheckpointError for what is missing or damaged, RewardError where the user left the debugger."""
    with tempfile.NamedTemporaryFile(prefix="rewards_", suffix=".log", delete=False) as log:
        log_file = Path(log.name)
    config, columns = recorded.config, recorded.all_columns
    with RewardPool(own_rewards(recorded), config.reward_pool, log_file, columns=columns) as pool:
        # From here on, before torch looks: a reward may have a model on the GPU, the replay has none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from grpo_spmd.distributed.session import end_session, start_session

        session = start_session()
        try:
            found = _replay(recorded, checkpoint, pool, session)
        finally:
            end_session()
    if log_file.stat().st_size:
        found.notes.append(f"what the rewards printed is in {log_file}")
    else:
        log_file.unlink()
    return found


def _replay(
    recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool, session: Session
) -> Replay:
    from grpo_spmd.distributed.exit import Rank0Error
    from grpo_spmd.learn.assemble import assemble_batch
    from grpo_spmd.learn.sampled_step import SampledStep, StepRules
    from grpo_spmd.tools.replay.update import train

    recorded = dataclasses.replace(
        recorded, notes=list(recorded.notes)
    )  # its caller's list stays as it is
    config, notes = recorded.config, recorded.notes
    sections = config.rollout, config.advantage, config.loss, config.training
    is_measured = not any(weights_of(recorded).values())
    discount = None if is_measured else config.environment.discount
    rules = StepRules(
        *sections,
        config.reward_pool.max_error_frac,
        1,
        discount=discount,
        zero_advantages=is_measured,
    )
    sampled = SampledStep(rules)
    pool.begin_step(TrainerState(recorded.step - 1, config.training.num_steps, recorded.epoch))
    waiting, texts = _groups(recorded), _RecordedTexts(recorded.rollouts)
    if given := given_rewards(recorded):
        notes.append(
            f"rewards are those that the run recorded: environments, which are not here, gave {', '.join(given)}"
        )
    unasked = unasked_rewards(recorded)
    notes += notes_of(recorded)
    try:
        while sampled.num_missing and waiting:  # once, unless dynamic sampling refilled the step
            groups, waiting = waiting[: sampled.num_missing], waiting[sampled.num_missing :]
            has_data = recorded.columns is not None and not given and not unasked
            scored = pool.score(groups, texts) if has_data else _recorded_scores(groups, recorded)
            sampled.add(groups, scored, num_groups=len(groups))
        if missing := sampled.num_missing:
            notes.append(
                f"the step would now have drawn {missing} more prompts, of which there are no rollouts"
            )
        if waiting:
            notes.append(f"{len(waiting)} groups of the dump are not needed now")
        batch, decision = assemble_batch(sampled, session)
    except Rank0Error as error:
        notes.append(f"the step is refused: {error}")
        return Replay(notes, {}, _rollouts(recorded, sampled, None, {}))
    of_update, logprobs, decision = train(recorded, checkpoint, batch, decision, session)
    replayed = {
        name: value for name, value in decision.metrics.items() if not name.startswith("batching/")
    } | of_update
    metrics = {
        name: (recorded.metrics.get(name), value)
        for name, value in replayed.items()
        if recorded.metrics
    }
    return Replay(notes, metrics, _rollouts(recorded, sampled, decision, logprobs))


class _RecordedTexts:
    """Stands for the tokenizer: the texts that the run scored."""

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


def _groups(recorded: RecordedStep) -> list[RolloutGroup]:
    groups = []
    for slot, records in enumerate(recorded.rollouts):
        first = records[0]
        columns = recorded.columns[slot] if recorded.columns is not None else {}
        prompt = Prompt(first.position, first.row, first.prompt_ids, first.prompt, columns)
        completions = [completion_of(record) for record in records]
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def _recorded_scores(groups: Sequence[RolloutGroup], recorded: RecordedStep) -> ScoredRollouts:
    """What the run scored, under the weights of the config."""
    weights = weights_of(recorded)
    scored = ScoredRollouts()
    for record in (record for group in groups for record in recorded.rollouts[group.slot]):
        if weights.keys() != record.rewards.keys():
            names = f"the run recorded {', '.join(record.rewards)}, the config names {', '.join(weights)}"
            raise ConfigError(
                f"rewards: {names}; without the data set no other reward can be called: set data.train"
            )
        unusable = {
            name
            for name, status in record.statuses.items()
            if status not in ("ok", "not_applicable")
        }
        values = {
            name: math.nan if name in unusable else value for name, value in record.rewards.items()
        }
        reward = weighted_sum([(weights[name], value) for name, value in values.items()])
        by_name, statuses = (
            {n: [value] for n, value in values.items()},
            {n: [record.statuses[n]] for n in values},
        )
        scored.extend(ScoredRollouts([reward], by_name, statuses, texts=[record.completion]))
    return scored


def _rollouts(
    recorded: RecordedStep,
    sampled: SampledStep,
    decision: Decision | None,
    logprobs: dict[int, list[float]],
) -> list[ReplayedRollout]:
    from grpo_spmd.observe.rollout_writer import rollout_records

    was = {
        (record.position, record.sample): record for group in recorded.rollouts for record in group
    }
    found = []
    for record in rollout_records(sampled, decision):
        number = -1 if record.rollout_id is None else record.rollout_id
        in_loss = decision is not None and number >= 0 and decision.in_loss[number]
        found.append(
            ReplayedRollout(
                was[record.position, record.sample], record, in_loss, logprobs.get(number)
            )
        )
    return found
