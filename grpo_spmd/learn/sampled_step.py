"""Collects the groups that are sampled in one step; rank 0 decides which of them are trained on.

After each round every rank sends rank 0 a few numbers per rollout (step_messages.py). With dynamic
sampling rank 0 says how many prompts are still missing. At the end it makes the StepDecision: the
groups to train on, their rewards and advantages, and the plan of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed.collectives import on_rank0_bytes, scatter_from_rank0
from grpo_spmd.learn.advantages import (
    ZERO_STD_TOLERANCE,
    batch_std,
    compute_advantages,
    overlong_penalties,
)
from grpo_spmd.learn.balance import StepTokens, plan_step, split_groups
from grpo_spmd.learn.step_messages import (
    GroupRows,
    StepCounts,
    decode_decision,
    decode_groups,
    encode_decisions,
    encode_groups,
)
from grpo_spmd.records import (
    EPISODE_STATUSES,
    FAILED_STATUSES,
    Decision,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
)
from grpo_spmd.rewards.protocol import RewardError, check_error_rate
from grpo_spmd.rewards.trl import mean_metrics, retried_fracs

Metrics = dict[str, float | None]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# The smallest share of groups that dynamic sampling is expected to keep: a refill round draws at
# most 1 / this times the missing prompts. The share kept so far is a poor estimate after one
# unlucky round.
_MIN_KEPT_FRAC = 0.25


@dataclass(frozen=True)
class StepRules:
    """The settings that decide what a step trains on. They are the same for all steps of a run."""

    rollout: RolloutConfig
    advantage: AdvantageConfig
    loss: LossConfig
    training: TrainingConfig
    max_error_frac: float
    """The run stops if this share of the completions has no usable reward."""
    num_ranks: int
    attention_cost_ratio: float = 0.0
    """The cost of attention relative to that of the other layers; see
    balance.attention_cost_ratio."""
    share_prefixes: bool | Literal["auto"] = False
    """`training.share_prefixes`; False if the models cannot share."""
    discount: float | None = None
    """`environment.discount`. None: one reward for all turns."""
    zero_advantages: bool = False
    """True if all rewards have weight 0 and are only logged (a teacher alone trains the policy).
    Then every advantage is 0, and a completion counts in the loss whether its reward is known or
    not."""
    watched_rewards: Collection[str] = ()
    """Names of the rewards whose failures do not stop the run; see protocol.watched_rewards."""
    sequence_ranks: int = 1
    """The number of consecutive ranks that share each row (sequence parallelism)."""


class SampledStep:
    """The groups of one step: one round of prompts, or with dynamic sampling as many rounds as fill
    the step.

    Dynamic sampling (DAPO, Yu et al. 2025) drops groups whose rewards are all alike, since their
    advantages are 0. Of the other groups it takes the first in the prompt stream; taking the first
    to finish would favour short completions.
    """

    def __init__(self, rules: StepRules) -> None:
        """Starts a step without groups. Each rank has an object of its own."""
        self.rules = rules
        # The number of prompts to draw next. 0: the step is complete.
        self.num_missing = rules.rollout.num_prompts_per_step
        # This rank's groups of all rounds, and their scores in the same order.
        self.groups: list[RolloutGroup] = []
        self.scored = ScoredRollouts()
        self._group_size = rules.rollout.group_size
        # The number of groups over all ranks and rounds.
        self._num_groups = 0
        self._rank0_step = _Rank0Step(rules)

    @property
    def num_completions(self) -> int:
        """The number of completions of this step over all ranks, those of the running round
        included."""
        return (self._num_groups + self.num_missing) * self._group_size

    def add(
        self, groups: Sequence[RolloutGroup], scored: ScoredRollouts, num_groups: int | None = None
    ) -> None:
        """Collective. Adds this rank's groups of one round with their scores, and sets
        `num_missing` as rank 0 decides.

        `num_groups` is the number of the round's groups over all ranks. None: `num_missing`."""
        num_expected = self.num_missing if num_groups is None else num_groups
        message = encode_groups(groups, scored, self._group_size)
        self.groups += groups
        self.scored.extend(scored)
        self._num_groups += num_expected
        self.num_missing = on_rank0_bytes(
            lambda messages: self._rank0_step.add_round(messages, num_expected), message
        )

    def decide(self) -> Decision:
        """Collective. Returns the part of rank 0's decision that this rank needs."""
        message = scatter_from_rank0(lambda _: encode_decisions(self._rank0_step.decide()), b"")
        return decode_decision(message, self.groups, self._group_size, self._rank0_step.decision)


class _Rank0Step:
    """Rank 0's side of a step: collects a few numbers of all ranks' groups, and decides which of
    the groups are trained on, and where. On other ranks the object stays empty."""

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        # The groups of each round, in the order of the prompt stream.
        self._rows: list[GroupRows] = []
        # For all groups in the order of arrival: their positions in the prompt stream, and the
        # ranks that sampled them.
        self._positions = np.empty(0, np.int64)
        self._ranks = np.empty(0, np.int64)
        # The positions of the groups that dynamic sampling has not dropped.
        self._kept_positions = np.empty(0, np.int64)
        self._reward_names: list[str] = []
        self._counts = StepCounts()
        self._error_rates: dict[str, float] = {}
        self.decision: StepDecision | None = None

    def add_round(self, messages: list[bytes], num_expected: int) -> int:
        """Adds the groups of one round, from the messages of all ranks (`encode_groups`).

        Returns the number of prompts to draw for the next round, 0 if the step is complete. Raises
        RewardError if too many rewards failed."""
        rollout = self._rules.rollout
        rows = self._read_round(messages, num_expected)
        self._check_errors(rows)
        is_dropped = find_alike(rows) & rollout.dynamic_sampling
        self._kept_positions = np.append(self._kept_positions, rows["position"][~is_dropped])
        num_missing = rollout.num_prompts_per_step - len(self._kept_positions)
        is_last_round = len(self._rows) == rollout.dynamic_sampling_max_rounds
        if num_missing <= 0 or not rollout.dynamic_sampling or is_last_round:
            return 0
        kept_frac = max(len(self._kept_positions) / len(self._positions), _MIN_KEPT_FRAC)
        return min(rollout.num_prompts_per_step, math.ceil(num_missing / kept_frac))

    def _read_round(self, messages: list[bytes], num_expected: int) -> GroupRows:
        """Decodes the groups of one round, adds them to the step, and returns them in the order of
        the prompt stream."""
        sampled = decode_groups(messages, self._rules.rollout.group_size)
        assert len(sampled.rows) == num_expected, (sampled.num_groups, num_expected)
        self._reward_names = sampled.reward_names
        self._counts.add(sampled.counts)
        self._positions = np.append(self._positions, sampled.rows["position"])
        ranks = np.repeat(np.arange(len(messages)), sampled.num_groups)
        self._ranks = np.append(self._ranks, ranks)
        # Sorted, since results must not depend on which rank sampled which group.
        rows = sampled.rows[np.argsort(sampled.rows["position"])]
        is_sorted = (np.diff(rows["position"]) > 0).all()
        assert is_sorted, "a group was sampled twice, and another not at all"
        self._rows.append(rows)
        return rows

    def _check_errors(self, rows: GroupRows) -> None:
        """Raises RewardError if too many environments failed in this round, or too many rewards in
        the rounds of the step so far. Otherwise notes the error rates as metrics."""
        counts = self._counts
        max_error_frac = self._rules.max_error_frac
        check_environment_errors(rows, counts.first_errors, max_error_frac)
        self._error_rates = check_error_rate(
            [counts.status_counts],
            counts.first_errors,
            max_error_frac,
            watched=self._rules.watched_rewards,
        )
        self._error_rates |= retried_fracs(
            counts.status_counts,
            counts.retried,
            len(self._positions),
            counts.first_errors,
            watched=self._rules.watched_rewards,
        )

    def decide(self) -> StepDecision:
        """Returns the decision about the step: the groups to train on, their rewards and
        advantages, and the plan of which rank trains on which rollouts.

        Raises RewardError if no completion has a usable reward."""
        rules = self._rules
        group_size = rules.rollout.group_size
        rows = np.concatenate(self._rows)
        if np.isnan(rows["rewards"]).all() and not rules.zero_advantages:
            # Only an agent's episode can be idle: with tools or in a gym, an episode that has no
            # room for a turn has another status.
            is_idle = (rows["turns"] == 0) & (rows["status"] == EPISODE_STATUSES.index("ok"))
            if is_idle.any():
                raise RewardError(
                    f"the agent made no request in {is_idle.sum()} of {is_idle.size} episodes, so "
                    "that there is nothing to train on; ask for turns at the base_url that "
                    "rollout() is given"
                )
            raise RewardError.about(
                next(iter(self._counts.first_errors), None),
                f"none of the {rows['rewards'].size} completions of this step has a usable reward: "
                "every value was None, NaN or not a number; see the module docstring of "
                "grpo_spmd.rewards for what these mean",
            )
        # The first kept groups in the prompt stream are trained on; later ones are surplus.
        positions = np.sort(self._kept_positions)[: rules.rollout.num_prompts_per_step]
        order = np.argsort(rows["position"])
        used = order[np.searchsorted(rows["position"], positions, sorter=order)]
        # The positions of rank 0's groups, then those of rank 1's, and so on.
        held_positions = self._positions[np.argsort(self._ranks, kind="stable")]
        # A group's slot is its place among the groups that are trained on; -1: it is not.
        slots = np.searchsorted(positions, held_positions)
        slots = np.where(np.isin(held_positions, positions), slots, -1)
        overlong = overlong_penalties(
            _float_grid(rows["completion_tokens"]),
            rules.rollout.max_completion_tokens,
            rules.advantage.overlong_buffer_tokens,
            rules.advantage.overlong_penalty,
        ).numpy()
        metrics = self._metrics(rows, overlong, len(used))
        num_sampled_tokens = int(rows["completion_tokens"].sum(dtype=np.int64))
        rewards = (rows["rewards"] - overlong)[used]
        # Free the rows: 100,000 rollouts have 6 MB of them, and this object lives through the step.
        self._rows.clear()
        rows = rows[used]
        step_tokens = StepTokens(
            tokens=rows["tokens"].astype(np.int64).ravel(),
            tree_tokens=rows["tree_tokens"].astype(np.int64).ravel(),
            prefix_tokens=rows["prefix_tokens"].astype(np.int64),
        )
        # Rollouts that do not count in the loss keep their place in the plan. An unknown reward
        # takes a rollout out of the loss, unless rewards are only logged and a teacher teaches.
        is_unknown = np.isnan(rewards) & (not rules.zero_advantages)
        in_loss = ~(is_unknown | (rows["truncated"] & rules.loss.mask_truncated))
        num_mini_batches = rules.training.num_mini_batches
        sizes = [n * group_size for n in split_groups(len(used), num_mini_batches)]
        loss_tokens = np.where(in_loss, rows["completion_tokens"].astype(np.int64), 0).ravel()
        # One block of rollouts for each mini-batch.
        blocks = np.split(loss_tokens, np.cumsum(sizes)[:-1])
        num_loss_tokens = [int(block.sum()) for block in blocks]
        num_loss_sequences = [int((block > 0).sum()) for block in blocks]
        # Free these before the plan is made: they and the plan take the most memory of a step.
        del rows, overlong, loss_tokens, blocks
        step_plan = plan_step(
            step_tokens,
            rules.share_prefixes,
            rules.attention_cost_ratio,
            # Ranks that share their rows train as one.
            num_ranks=rules.num_ranks // rules.sequence_ranks,
            mini_batch_sizes=sizes,
            max_tokens=rules.training.micro_batch_tokens,
        )
        num_tokens = int(step_tokens.tokens.sum())
        for name, value in step_plan.metrics.items():
            metrics[f"batching/{name}"] = value
        advantages = rollout_advantages(rewards, rules.advantage)
        slope = None
        # REINFORCE++ has the same slope in all groups. It is sent to the ranks because a group
        # whose rewards are all alike does not show it.
        if rules.advantage.estimator == "reinforce_pp":
            deviation = float(batch_std(torch.from_numpy(rewards)))
            slope = 1 / deviation if deviation >= ZERO_STD_TOLERANCE else 0.0
        self.decision = StepDecision(
            positions=positions,
            rewards=rewards.ravel(),
            advantages=advantages * np.float32(not rules.zero_advantages),
            in_loss=in_loss.ravel(),
            plan=step_plan.plan,
            num_groups=np.bincount(self._ranks, minlength=rules.num_ranks),
            slots=slots.astype(np.int32),
            num_loss_tokens=num_loss_tokens,
            num_loss_sequences=num_loss_sequences,
            num_tokens=num_tokens,
            num_sampled_tokens=num_sampled_tokens,
            metrics=metrics,
            advantage_slope=slope,
            shares_prefixes=step_plan.shares_prefixes,
        )
        return self.decision

    def _metrics(self, rows: GroupRows, overlong: Floats, num_used: int) -> Metrics:
        """Returns the metrics over all sampled groups, also those that are dropped: the groups that
        dynamic sampling keeps would say little about the policy. `overlong` are the penalties for
        overlong completions, `num_used` is the number of groups that are trained on."""
        is_alike = find_alike(rows)
        metrics = group_metrics(rows, is_alike)
        if self._rules.advantage.overlong_buffer_tokens:
            # Python's sum adds values in their order; np.sum adds them pairwise.
            metrics["reward/overlong_penalty_mean"] = sum(overlong.ravel().data) / overlong.size
        metrics |= mean_metrics(self._counts.logged)
        for number, name in enumerate(self._reward_names):
            metrics |= reward_metrics(name, rows["by_name"][:, number])
        metrics |= self._error_rates
        metrics |= episode_metrics(
            rows, self._counts.calls_s, self._counts.tools, num_ranks=self._rules.num_ranks
        )
        if self._rules.rollout.dynamic_sampling:
            num_alike = int(is_alike.sum())
            num_missing = self._rules.rollout.num_prompts_per_step - num_used
            metrics |= {
                "dynamic_sampling/rounds": len(self._rows),
                "dynamic_sampling/sampled_groups": len(rows),
                "dynamic_sampling/alike_groups": num_alike,
                "dynamic_sampling/surplus_groups": len(rows) - num_alike - num_used,
                "dynamic_sampling/missing_groups": num_missing,
            }
        return metrics


def rollout_advantages(rewards: Floats, advantage: AdvantageConfig) -> npt.NDArray[np.float32]:
    """Returns the advantages [P * G] of rewards [P, G], in the order of rollout ids."""
    advantages, _ = compute_advantages(
        torch.from_numpy(rewards), advantage.estimator, advantage.normalize_std
    )
    return np.asarray(advantages.flatten())


def find_alike(rows: GroupRows) -> Bools:
    """Returns a mask of the groups whose rewards are all alike, which dynamic sampling drops.

    The rewards are those before the penalty for overlong completions, as in DAPO: a group of wrong
    answers, one of them a little long, would teach nothing but length."""
    _, is_alike = compute_advantages(_float_grid(rows["rewards"]), "dr_grpo", "none")
    return np.asarray(is_alike)


def group_metrics(rows: GroupRows, is_alike: Bools) -> Metrics:
    """Returns the metrics of rewards and completion lengths."""
    rewards = _float_grid(rows["rewards"])
    lengths = rows["completion_tokens"].ravel().astype(np.int64)
    known_rewards = rewards[~rewards.isnan()]
    return {
        "reward/mean": float(known_rewards.mean()) if len(known_rewards) else None,
        "reward/std": float(batch_std(rewards)),
        "reward/zero_std_groups_frac": int(is_alike.sum()) / len(rows),
        "reward/unscored_frac": float(rewards.isnan().double().mean()),
        "completion/tokens_mean": int(lengths.sum()) / lengths.size,
        "completion/tokens_p50": float(np.percentile(lengths, 50)),
        "completion/tokens_p95": float(np.percentile(lengths, 95)),
        "completion/tokens_max": int(lengths.max()),
        "completion/truncated_frac": int(rows["truncated"].sum()) / lengths.size,
    }


def reward_metrics(name: str, rewards: Floats) -> Metrics:
    """Returns the mean and standard deviation of one function's rewards [groups, G] as metrics."""
    values = _float_grid(rewards)
    usable = values[~values.isnan()]
    mean_and_std = (float(usable.mean()), float(batch_std(values))) if len(usable) else (None, None)
    return dict(zip((f"reward/{name}/mean", f"reward/{name}/std"), mean_and_std, strict=True))


def _float_grid(column: npt.NDArray[Any]) -> Tensor:
    """Returns a column of GroupRows as a float64 tensor [groups, G]. It is a copy, because torch
    cannot share the memory of a structured array's field."""
    return torch.from_numpy(np.array(column, np.float64, order="C"))


def count_statuses(rows: GroupRows) -> dict[str, int]:
    """Returns how many episodes ended in each of EPISODE_STATUSES."""
    counts = np.bincount(rows["status"].ravel(), minlength=len(EPISODE_STATUSES))
    # Not strict: a last count may be that of completions without an episode.
    return dict(zip(EPISODE_STATUSES, counts.tolist(), strict=False))


def check_environment_errors(
    rows: GroupRows, first_errors: Sequence[str], max_error_frac: float
) -> None:
    """Raises RewardError if the environment failed, at both tries, in too many episodes of a round:
    in the fraction `max_error_frac` or more.

    The message quotes the first environment error of `first_errors`."""
    counts = count_statuses(rows)
    num_episodes = sum(counts.values())
    num_failed = sum(counts[status] for status in FAILED_STATUSES)
    if num_failed and num_failed / num_episodes >= max_error_frac:
        by_status = ", ".join(f"{counts[status]} {status}" for status in FAILED_STATUSES)
        environment_errors = [error for error in first_errors if error.startswith("environment")]
        raise RewardError.about(
            [*environment_errors, None][0],
            f"the environment failed in {num_failed} of {num_episodes} episodes ({by_status}), "
            f"each tried twice: {num_failed / num_episodes:.3g} is not under "
            f"reward_pool.max_error_frac={max_error_frac:g}",
        )


def episode_metrics(
    rows: GroupRows, calls_s: Sequence[float], tools: Mapping[str, int], *, num_ranks: int
) -> Metrics:
    """Returns the metrics `episode/...` and `environment/...`; none if rollouts are not episodes.

    `calls_s` and `tools` are as in StepCounts."""
    counts = count_statuses(rows)
    num_episodes = sum(counts.values())
    if not num_episodes:
        return {}
    columns = ("turns", "segments", "tokens", "completion_tokens")
    totals = {name: int(rows[name].sum(dtype=np.int64)) for name in columns}
    num_given_tokens = totals["tokens"] - totals["completion_tokens"]
    metrics: Metrics = {
        "episode/turns_mean": totals["turns"] / num_episodes,
        "episode/segments_mean": totals["segments"] / num_episodes,
        **{f"episode/{status}_frac": number / num_episodes for status, number in counts.items()},
        "episode/given_tokens_mean": num_given_tokens / num_episodes,
    }
    if tools:
        num_calls = tools["calls"]
        metrics["environment/tool_calls_mean"] = num_calls / tools["episodes"]
        metrics["environment/tool_error_frac"] = tools["errors"] / num_calls if num_calls else None
    metrics["environment/calls_s_per_rank"] = math.fsum(calls_s) / num_ranks
    return metrics | seconds_percentiles("environment/call_s", calls_s)


def seconds_percentiles(name: str, seconds: Sequence[float]) -> Metrics:
    """Returns the metrics `name`_p50 and `name`_p95: percentiles of the seconds of calls, or None
    if there were no calls."""
    array = np.array(seconds, np.float32)
    return {
        f"{name}_p{percent}": float(np.percentile(array, percent)) if len(array) else None
        for percent in (50, 95)
    }
