"""The groups of one step, and what rank 0 decides about them from a few numbers a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed.collectives import on_rank0_of_bytes, shares_of_rank0
from grpo_spmd.learn.advantages import compute_advantages
from grpo_spmd.learn.balance import plan_batch, plan_metrics, split_groups
from grpo_spmd.learn.episode_facts import check_environment_errors, episode_metrics
from grpo_spmd.learn.facts import Tally, decode_facts, encode_facts, rollout_tokens
from grpo_spmd.learn.judged_groups import JudgedGroups, group_metrics, joined, judge, refill_metrics
from grpo_spmd.learn.shares import decode_share, encode_shares
from grpo_spmd.records import Decision, RolloutGroup, ScoredRollouts, StepDecision
from grpo_spmd.rewards.protocol import RewardError, check_error_rate
from grpo_spmd.rewards.trl import retried_fracs

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
    discount: float | None = None  # environment.discount, see turn_credit.py
    is_watched: bool = False  # rewards are there to be looked at: all advantages are 0


class SampledStep:
    """The groups of one step: one round of prompts, or with dynamic sampling as many as it takes to fill the step.

    Dynamic sampling (DAPO, Yu et al. 2025) drops groups whose rewards are all alike, since their advantages are 0. Of
    those that stay the first in the prompt stream are taken, never the first to finish: that favours short completions.
    """

    def __init__(self, rules: StepRules) -> None:
        self.rules, self._group_size = rules, rules.rollout.group_size
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
        expected = self.num_missing if num_groups is None else num_groups
        facts = encode_facts(groups, scored, self._group_size)
        self.groups += groups
        self.scored.extend(scored)
        self._num_groups += expected
        self.num_missing = on_rank0_of_bytes(lambda parts: self._rank0.add_round(parts, expected), facts)

    def decide(self) -> Decision:
        """Collective. Rank 0's decision about the step, as much of it as this rank needs."""
        share = shares_of_rank0(lambda _: encode_shares(self._rank0.decide()), b"")
        return decode_share(share, self.groups, self._group_size, self._rank0.decided)


class _Decider:
    """Rank 0's side of a step: the facts of all ranks' groups, and what follows from them."""

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        self._rounds: list[JudgedGroups] = []
        self._kept = np.empty(0, np.int64)  # positions
        self._num_groups = np.zeros(rules.num_ranks, np.int64)  # of each rank
        self._names: list[str] = []  # of the reward functions
        self._tally = Tally()
        self._error_rates: dict[str, float] = {}
        self.decided: StepDecision | None = None

    def add_round(self, parts: list[bytes], num_groups: int) -> int:
        """How many prompts are still missing."""
        rollout = self._rules.rollout
        facts, of_ranks, self._names, tally = decode_facts(parts, rollout.group_size)
        assert len(facts) == num_groups, (of_ranks, num_groups)
        ranks = np.repeat(np.arange(len(parts)), of_ranks)
        first = self._num_groups + of_ranks - np.cumsum(of_ranks)  # what the first of a rank's has over its place here
        places = np.arange(num_groups) + np.repeat(first, of_ranks)
        self._num_groups += of_ranks
        in_order = np.argsort(facts["position"])
        judged = judge(facts[in_order], ranks[in_order], places[in_order], rollout, self._rules.advantage)
        positions = judged.facts["position"]
        assert (np.diff(positions) > 0).all(), "a group was sampled twice, and another not at all"
        self._rounds.append(judged)
        self._tally.add(tally)
        so_far = sum(map(len, self._rounds))
        counted, first_errors = self._tally.statuses, self._tally.first_errors
        check_environment_errors(facts, first_errors, self._rules.max_error_frac)
        self._error_rates = check_error_rate([counted], first_errors, self._rules.max_error_frac)
        self._error_rates |= retried_fracs(counted, self._tally.retried, so_far, first_errors)
        dropped = judged.without_spread & rollout.dynamic_sampling
        self._kept = np.append(self._kept, positions[~dropped])
        missing = rollout.num_prompts_per_step - len(self._kept)
        if missing <= 0 or not rollout.dynamic_sampling or len(self._rounds) == rollout.dynamic_sampling_max_rounds:
            return 0
        kept_frac = len(self._kept) / so_far
        return min(rollout.num_prompts_per_step, math.ceil(missing / max(kept_frac, _LOWEST_KEPT_FRAC)))

    def decide(self) -> StepDecision:
        rules, group_size = self._rules, self._rules.rollout.group_size
        num_rounds, groups = len(self._rounds), joined(self._rounds)
        self._rounds.clear()  # a step of 100,000 rollouts has 6 MB of them, and lasts
        if np.isnan(groups.facts["rewards"]).all():
            raise RewardError(
                f"none of the {len(groups) * group_size} completions of this step has a usable reward: every "
                "value was None, NaN or not a number; see the module docstring of grpo_spmd.rewards for what these mean"
            )
        positions = np.sort(self._kept)[: rules.rollout.num_prompts_per_step]
        in_order = np.argsort(groups.facts["position"])
        used = in_order[np.searchsorted(groups.facts["position"], positions, sorter=in_order)]
        facts, rewards = groups.facts[used], groups.penalised[used]
        completion_tokens = facts["completion_tokens"].astype(np.int64)
        num_tokens = rollout_tokens(facts).ravel()
        in_loss = ~(np.isnan(rewards) | (facts["truncated"] & rules.loss.mask_truncated))
        sizes = [n * group_size for n in split_groups(len(used), rules.training.num_mini_batches)]
        blocks = np.split(np.where(in_loss, completion_tokens, 0).ravel(), np.cumsum(sizes)[:-1])
        num_loss_tokens, num_loss_sequences = [int(b.sum()) for b in blocks], [int((b > 0).sum()) for b in blocks]
        metrics = group_metrics(groups, self._names, self._tally.logged, rules.advantage) | self._error_rates
        metrics |= episode_metrics(groups.facts, self._tally.calls_s)
        if rules.rollout.dynamic_sampling:
            wanted = rules.rollout.num_prompts_per_step
            metrics |= refill_metrics(groups, num_rounds, len(used), wanted)
        num_sampled_tokens, slots = int(groups.facts["completion_tokens"].sum(dtype=np.int64)), _slots(groups, used)
        del groups, facts, completion_tokens, blocks  # rank 0 never holds them and a plan in the making
        costs = num_tokens + rules.attention_cost_ratio * num_tokens * num_tokens
        plan = plan_batch(
            num_tokens,
            num_ranks=rules.num_ranks,
            mini_batch_sizes=sizes,
            max_tokens=rules.training.max_tokens_per_micro_batch,
            costs=costs,
        )
        metrics |= {f"batching/{name}": value for name, value in plan_metrics(plan, num_tokens, costs).items()}
        self.decided = StepDecision(
            positions=positions,
            rewards=rewards.ravel(),
            advantages=advantages_of(rewards, rules.advantage) * np.float32(not rules.is_watched),
            in_loss=in_loss.ravel(),
            plan=plan,
            num_groups=self._num_groups,
            slots=slots,
            num_loss_tokens=num_loss_tokens,
            num_loss_sequences=num_loss_sequences,
            num_tokens=int(num_tokens.sum()),
            num_sampled_tokens=num_sampled_tokens,
            metrics=metrics,
        )
        return self.decided


def _slots(groups: JudgedGroups, used: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """As StepDecision has them; `used`: the groups that are trained on."""
    slots = np.full(len(groups), -1, np.int32)
    slots[used] = np.arange(len(used))
    as_sampled: npt.NDArray[np.int32] = slots[np.lexsort((groups.places, groups.ranks))]
    return as_sampled


def advantages_of(rewards: npt.NDArray[np.float64], advantage: AdvantageConfig) -> npt.NDArray[np.float32]:
    """The advantages of rewards [P, G], in the order of rollout ids."""
    advantages, _ = compute_advantages(torch.from_numpy(rewards), advantage.estimator, advantage.normalize_std)
    values: npt.NDArray[np.float32] = advantages.flatten().numpy()
    return values
