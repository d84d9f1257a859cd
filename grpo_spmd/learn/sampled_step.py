"""The groups of one step, and what rank 0 decides about them from a few numbers a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.advantages import compute_advantages
from grpo_spmd.learn.balance import plan_batch, plan_metrics, split_groups
from grpo_spmd.learn.judged_groups import JudgedGroup, grid, group_metrics, judge, refill_metrics
from grpo_spmd.records import Decision, GroupFacts, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.protocol import RewardError, check_error_rate
from grpo_spmd.rewards.trl import retried_fracs, without_extra

# A refill round draws at most 1 / this times the missing prompts: what an early, unlucky round kept is a poor estimate.
_LOWEST_KEPT_FRAC = 0.25


@dataclass(frozen=True)
class StepRules:
    """What a step is put together by; the same for all steps of a run."""

    rollout: RolloutConfig
    advantage: AdvantageConfig
    loss: LossConfig
    training: TrainingConfig
    max_error_frac: float  # share of completions without a usable reward at which the run stops
    num_ranks: int
    attention_cost_ratio: float = 0.0  # what a rollout costs beside its tokens, see balance.py


class SampledStep:
    """The groups of one step: one round of prompts, or with dynamic sampling as many as it takes to fill the step.

    Dynamic sampling (DAPO, Yu et al. 2025) drops groups whose rewards are all alike, since their advantages are 0. Of
    those that stay the first in the prompt stream are taken, never the first to finish: that favours short completions.
    """

    def __init__(self, rules: StepRules) -> None:
        self._group_size = rules.rollout.group_size
        self.num_missing = rules.rollout.num_prompts_per_step  # prompts to draw next; 0: the step is complete
        self.groups: list[RolloutGroup] = []  # this rank's, of all rounds
        self.scored = ScoredRollouts()  # aligned with them
        self._num_groups = 0  # over all ranks and rounds
        self._rank0 = _Decider(rules)

    @property
    def num_completions(self) -> int:
        """Of this step over all ranks, those of the round that is under way included."""
        return (self._num_groups + self.num_missing) * self._group_size

    def add(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts, num_groups: int | None = None) -> None:
        """Collective. Add one round's groups of this rank with their scores; rank 0 says how many are still missing.
        `num_groups`: of this round over all ranks, where it is not `num_missing`."""
        facts, expected = [], self.num_missing if num_groups is None else num_groups
        for number, group in enumerate(groups):
            own = slice(number * self._group_size, (number + 1) * self._group_size)
            of_group = GroupFacts(
                position=group.prompt.position,
                prompt_tokens=len(group.prompt.token_ids),
                completion_tokens=[len(c.token_ids) for c in group.completions],
                truncated=[c.finish_reason == "length" for c in group.completions],
                rewards=scored.rewards[own],
                by_name={name: values[own] for name, values in scored.by_name.items()},
                statuses={name: statuses[own] for name, statuses in scored.statuses.items()},
                notes=[without_extra(scored.notes[i]) for i in range(own.start, own.stop) if i in scored.notes],
            )
            facts.append(vars(of_group))
        self.groups += groups
        self.scored.extend(scored)
        self._num_groups += expected
        self.num_missing = on_rank0(lambda parts: self._rank0.add_round(parts, expected), [facts, scored.first_error])

    def decide(self) -> Decision:
        """Collective. Rank 0's decision about the step."""
        return Decision(**on_rank0(lambda _: vars(self._rank0.decide()), None))


class _Decider:
    """Rank 0's side of a step: the facts of all ranks' groups, and what follows from them."""

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        self._groups: list[JudgedGroup] = []
        self._kept: list[int] = []  # positions
        self._num_rounds = 0
        self._first_errors: list[str | None] = []
        self._error_rates: dict[str, float] = {}

    def add_round(self, parts: list[tuple[list[dict[str, Any]], str | None]], num_groups: int) -> int:
        """How many prompts are still missing."""
        rollout = self._rules.rollout
        facts = sorted((GroupFacts(**each) for of_rank, _ in parts for each in of_rank), key=lambda f: f.position)
        assert [len(f.rewards) for f in facts] == [rollout.group_size] * num_groups, (len(facts), num_groups)
        assert len({f.position for f in facts}) == len(facts), "a group was sampled twice, and another not at all"
        judged = judge(facts, rollout, self._rules.advantage)
        self._num_rounds += 1
        self._groups += judged
        self._first_errors += [first_error for _, first_error in parts]
        statuses = [group.statuses for group in self._groups]
        self._error_rates = check_error_rate(statuses, self._first_errors, self._rules.max_error_frac)
        self._error_rates |= retried_fracs(self._groups, self._first_errors)
        self._kept += [g.position for g in judged if not (rollout.dynamic_sampling and g.without_spread)]
        missing = rollout.num_prompts_per_step - len(self._kept)
        if missing <= 0 or not rollout.dynamic_sampling or self._num_rounds == rollout.dynamic_sampling_max_rounds:
            return 0
        kept_frac = len(self._kept) / len(self._groups)
        return min(rollout.num_prompts_per_step, math.ceil(missing / max(kept_frac, _LOWEST_KEPT_FRAC)))

    def decide(self) -> Decision:
        rules, group_size = self._rules, self._rules.rollout.group_size
        if all(reward is None for group in self._groups for reward in group.rewards):
            raise RewardError(
                f"none of the {len(self._groups) * group_size} completions of this step has a usable reward: every "
                "value was None, NaN or not a number; see the module docstring of grpo_spmd.rewards for what these mean"
            )
        positions = sorted(self._kept)[: rules.rollout.num_prompts_per_step]
        by_position = {group.position: group for group in self._groups}
        used = [by_position[position] for position in positions]
        rewards = grid([group.penalised for group in used], group_size)
        completion_tokens = [n for group in used for n in group.completion_tokens]
        masked = [cut_off and rules.loss.mask_truncated for group in used for cut_off in group.truncated]
        in_loss = [not (math.isnan(r) or out) for r, out in zip(rewards.flatten().tolist(), masked, strict=True)]
        loss_tokens = [tokens if counts else 0 for tokens, counts in zip(completion_tokens, in_loss, strict=True)]
        num_tokens = [group.prompt_tokens + n for group in used for n in group.completion_tokens]
        costs = [n + rules.attention_cost_ratio * n * n for n in num_tokens]
        sizes = [n * group_size for n in split_groups(len(used), rules.training.num_mini_batches)]
        ranks, longest = rules.num_ranks, rules.training.max_tokens_per_micro_batch
        plan = plan_batch(num_tokens, num_ranks=ranks, mini_batch_sizes=sizes, max_tokens=longest, costs=costs)
        metrics = group_metrics(self._groups, rules.rollout, rules.advantage) | self._error_rates
        if rules.rollout.dynamic_sampling:
            metrics |= refill_metrics(self._groups, self._num_rounds, len(used), rules.rollout.num_prompts_per_step)
        metrics |= {f"batching/{name}": value for name, value in plan_metrics(plan, num_tokens, costs).items()}
        blocks = [loss_tokens[start:end] for start, end in pairwise(np.cumsum([0, *sizes]).tolist())]
        return Decision(
            positions=positions,
            rewards=rewards.flatten().tolist(),
            advantages=advantages_of(rewards, rules.advantage),
            in_loss=in_loss,
            plan=plan,
            num_loss_tokens=[sum(block) for block in blocks],
            num_loss_sequences=[sum(tokens > 0 for tokens in block) for block in blocks],
            num_tokens=sum(num_tokens),
            num_sampled_tokens=sum(sum(group.completion_tokens) for group in self._groups),
            metrics=metrics,
        )


def advantages_of(rewards: Tensor, advantage: AdvantageConfig) -> list[float]:
    """The advantages of rewards [P, G], in the order of rollout ids."""
    advantages, _ = compute_advantages(rewards, advantage.estimator, advantage.normalize_std)
    values: list[float] = advantages.flatten().tolist()
    return values
