"""Replays rewards, advantages and loss of a recorded step, and reports the differences.

The replay runs on the CPU, in one process, without vLLM. The trainer's own code runs over the
dumped rollouts, so breakpoint() works in a reward (which runs in the reward pool, with its
deadlines, as in training), in the advantages and in the loss. Overrides show what another config
would do. The report has notes, the recorded and the replayed metrics side by side, and the rollouts
that differ most or look suspicious.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord, gold_answer
from grpo_spmd.records import Decision, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.scorers import weighted_sum
from grpo_spmd.rewards.trl import TrainerState
from grpo_spmd.tools.replay.read import (
    RecordedStep,
    Replay,
    ReplayedRollout,
    callable_rewards,
    describe_episodes,
    environment_rewards,
    make_completion,
    reward_weights,
    unasked_rewards,
)
from grpo_spmd.tools.terminal import Column, Terminal

if TYPE_CHECKING:
    from grpo_spmd.distributed.session import Session
    from grpo_spmd.learn.sampled_step import SampledStep, StepRules


# Relative differences up to this one come from float32 sums in another order.
_ROUNDING = 1e-6
_MIN_NAME_WIDTH = 34
# A rollout with a number: the larger the number, the more suspicious the rollout.
Ranked = tuple[float, ReplayedRollout]


def replay(recorded: RecordedStep, checkpoint: Path | None = None) -> Replay:
    """Repeats rewards, advantages and update of a step and returns the results.

    The policy is that of `checkpoint`, or of the run's checkpoint before the step.

    Raises ConfigError or CheckpointError for what is missing or damaged, RewardError if the user
    left the debugger.
    """
    with tempfile.NamedTemporaryFile(prefix="rewards_", suffix=".log", delete=False) as log:
        log_file = Path(log.name)
    rewards = callable_rewards(recorded)
    options = recorded.config.reward_pool
    with RewardPool(rewards, options, log_file, columns=recorded.all_columns) as pool:
        # From here on, before torch looks: a reward may have a model on the GPU, the replay has
        # none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from grpo_spmd.distributed.session import end_session, start_session

        session = start_session()
        try:
            result = _replay(recorded, checkpoint, pool, session)
        finally:
            end_session()
    if log_file.stat().st_size:
        result.notes.append(f"what the rewards printed is in {log_file}")
    else:
        log_file.unlink()
    return result


def _replay(
    recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool, session: Session
) -> Replay:
    from grpo_spmd.distributed.exit import Rank0Error
    from grpo_spmd.learn.assemble import assemble_batch
    from grpo_spmd.learn.sampled_step import SampledStep
    from grpo_spmd.tools.replay.update import train

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
    replayed = {
        name: value
        for name, value in update.decision.metrics.items()
        if not name.startswith("batching/")
    }
    metrics = {
        name: (recorded.metrics.get(name), value)
        for name, value in (replayed | update.metrics).items()
        if recorded.metrics
    }
    rollouts = _pair_rollouts(recorded, sampled, update.decision, update.logprobs)
    return Replay(recorded.notes, metrics, rollouts)


def _step_rules(recorded: RecordedStep) -> StepRules:
    """Returns the rules for the step under the replay's config."""
    from grpo_spmd.learn.sampled_step import StepRules

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
    from_environments = environment_rewards(recorded)
    unasked = unasked_rewards(recorded)
    if from_environments:
        notes.append(
            "rewards are those that the run recorded: environments, which are not here, gave "
            f"{', '.join(from_environments)}"
        )
    for reason, names in unasked.items():
        notes.append(f"rewards are those that the run recorded: {reason} {', '.join(names)}")
    is_scored_again = recorded.columns is not None and not from_environments and not unasked
    texts = _RecordedTexts(recorded.rollouts)
    waiting = _make_groups(recorded)
    # the loop runs once, unless dynamic sampling refilled the step
    while sampled.num_missing and waiting:
        num_missing = sampled.num_missing
        groups = waiting[:num_missing]
        waiting = waiting[num_missing:]
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
                {name: [record.statuses[name]] for name in values},
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
    from grpo_spmd.observe.rollout_writer import rollout_records

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


def report(recorded: RecordedStep, replay: Replay, top: int) -> list[str]:
    """Returns the lines of the report, with at most `top` rollouts in each list."""
    rollouts = replay.rollouts
    group_size = recorded.config.rollout.group_size
    return [
        f"step {recorded.step} of {recorded.run_dir}: {len(rollouts)} rollouts in groups of "
        f"{group_size}",
        *(f"  {note}" for note in replay.notes),
        *_metric_lines(replay),
        "",
        *_difference_lines(rollouts, top),
        *_suspicious_lines(rollouts, top),
        *describe_episodes(rollouts, top),
    ]


def _metric_lines(replay: Replay) -> Iterator[str]:
    if replay.metrics:
        # Most metrics are shares that are 0.
        rows = [
            [name, _number(old), _number(new), _difference(old, new)]
            for name, (old, new) in sorted(replay.metrics.items())
            if old or new
        ]
        name_width = max([_MIN_NAME_WIDTH, *(len(row[0]) for row in rows)])
        titles = ("recorded", "replayed", "difference")
        columns = [Column(width=name_width), *(Column(title, ">", 14) for title in titles)]
        yield ""
        yield from (line.plain for line in Terminal().table(columns, rows, gap=0))


def _suspicious_lines(rollouts: Sequence[ReplayedRollout], top: int) -> Iterator[str]:
    weights = [
        (abs(rollout.replayed.advantage or 0.0) * len(rollout.recorded.rollout_logprobs), rollout)
        for rollout in rollouts
        if rollout.in_loss
    ]
    yield from _ranked_lines("most weight in the loss, |advantage| x tokens", weights, top)
    finite = [rollout for rollout in rollouts if _has_finite_logprobs(rollout)]
    source = "policy" if any(rollout.logprobs is not None for rollout in rollouts) else "engine"
    unlikely = [
        (-min(rollout.logprobs or rollout.recorded.rollout_logprobs, default=0.0), rollout)
        for rollout in finite
    ]
    yield from _ranked_lines(f"least likely token, -logprob of the {source}", unlikely, top)
    mismatches = []
    for rollout in finite:
        if rollout.logprobs:
            pairs = zip(rollout.logprobs, rollout.recorded.rollout_logprobs, strict=True)
            mismatches.append((max(abs(policy - engine) for policy, engine in pairs), rollout))
    title = "furthest from the engine, largest |policy - engine| of a token"
    yield from _ranked_lines(title, mismatches, top)
    broken = [(1.0, rollout) for rollout in rollouts if not _has_finite_logprobs(rollout)]
    title = f"{len(broken)} rollouts with a logprob that is not finite"
    yield from _ranked_lines(title, broken, top)


def _difference_lines(rollouts: Sequence[ReplayedRollout], top: int) -> Iterator[str]:
    """Yields how many rollouts differ in what, and those that differ most."""
    names = dict.fromkeys(
        name
        for rollout in rollouts
        for name in (*rollout.recorded.rewards, *rollout.replayed.rewards)
    )
    # A single reward is the reward itself, and is not listed twice.
    components = list(names) if len(names) > 1 else []
    kinds = ["reward", "statuses", "advantage", *(f"reward {name}" for name in components)]
    counts = dict.fromkeys(kinds, 0)
    ranked: list[tuple[list[float], str]] = []
    for rollout in rollouts:
        old = rollout.recorded
        new = rollout.replayed
        changes: list[str] = []
        if _differ(old.reward, new.reward):
            counts["reward"] += 1
            changes.append(f"reward {_number(old.reward)} -> {_number(new.reward)}")
        for name in names:
            old_reward = old.rewards.get(name)
            new_reward = new.rewards.get(name)
            if name in components and _differ(old_reward, new_reward):
                counts[f"reward {name}"] += 1
                changes.append(f"{name} {_number(old_reward)} -> {_number(new_reward)}")
            old_status = old.statuses.get(name, "-")
            new_status = new.statuses.get(name, "-")
            if old_status != new_status:
                counts["statuses"] += 1
                changes.append(f"{name} {old_status} -> {new_status}")
        if _differ(old.advantage, new.advantage):
            counts["advantage"] += 1
            changes.append(f"advantage {_number(old.advantage)} -> {_number(new.advantage)}")
        if changes:
            distances = [
                abs((old.advantage or 0.0) - (new.advantage or 0.0)),
                abs((old.reward or 0.0) - (new.reward or 0.0)),
            ]
            ranked.append((distances, _rollout_line(rollout, f" {'; '.join(changes)}")))
    totals = ", ".join(f"{kind} {num}" for kind, num in counts.items())
    yield f"of {len(rollouts)} rollouts differ: {totals}"
    if ranked:
        yield "largest differences (position/sample):"
        ranked.sort(key=lambda entry: entry[0], reverse=True)
        yield from (line for _, line in ranked[:top])


def _ranked_lines(title: str, ranked: Sequence[Ranked], top: int) -> Iterator[str]:
    entries = sorted(
        (entry for entry in ranked if entry[0] > 0), key=lambda entry: entry[0], reverse=True
    )
    if entries:
        yield ""
        yield f"{title}:"
    for value, rollout in entries[:top]:
        record = rollout.recorded
        facts = (
            f"{_number(value):>10}",
            f"reward {_number(rollout.replayed.reward)}",
            f"advantage {_number(rollout.replayed.advantage)}",
            f"{len(record.rollout_logprobs)} tokens",
            record.finish_reason,
        )
        yield _rollout_line(rollout, "  ".join(facts))


def _rollout_line(rollout: ReplayedRollout, facts: str) -> str:
    """Returns one line about a rollout, with its completion and the answer of its data row."""
    completion = rollout.recorded.completion
    if len(completion) > 40:
        completion = f"{completion[:18]} ... {completion[-18:]}"
    # Dumps of earlier versions have no columns; then those of the data set are there, if it is.
    gold = gold_answer(rollout.recorded.columns or rollout.replayed.columns)
    return f"  {rollout.name:>9} {facts}  {completion!r}  {gold}".rstrip()


def _has_finite_logprobs(rollout: ReplayedRollout) -> bool:
    logprobs = (*rollout.recorded.rollout_logprobs, *(rollout.logprobs or ()))
    return all(map(math.isfinite, logprobs))


def _differ(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is not new
    return not abs(old - new) <= _ROUNDING * max(1.0, abs(old))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _difference(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "-"
    return "0" if old == new else f"{new - old:+.1e}"
