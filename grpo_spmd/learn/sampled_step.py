"""The groups of one step, and what rank 0 decides about them from a few numbers a rollout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.advantages import batch_std, compute_advantages, overlong_penalties
from grpo_spmd.learn.balance import plan_batch, plan_metrics, split_groups
from grpo_spmd.records import Decision, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.protocol import RewardError, check_error_rate

# A refill round draws at most 1 / this times the prompts that are missing: what an early, unlucky round kept is a poor
# estimate.
_LOWEST_KEPT_FRAC = 0.25


class SampledStep:
    """The groups of one step: one round of prompts, or with dynamic sampling as many rounds as it takes to fill the
    step.

    Dynamic sampling (DAPO, Yu et al. 2025) drops groups whose rewards are all alike, since their advantages are 0. Of
    the groups that stay the first in the order of the prompt stream are taken, never the first to finish, which would
    favour short completions.
    """

    def __init__(self, config: Config, session: Session, attention_cost_ratio: float = 0.0) -> None:
        """`attention_cost_ratio`: what a rollout costs beside its tokens, see `batching.attention_cost_ratio`."""
        self._config, self._session, self._attention_cost_ratio = config, session, attention_cost_ratio
        # prompts to draw for the next round; 0: the step is complete
        self.num_missing = config.rollout.num_prompts_per_step
        self.groups: list[RolloutGroup] = []  # this rank's, of all rounds
        self.scored = ScoredRollouts()  # aligned with them
        self._num_groups = 0  # over all ranks and rounds
        self._rank0_facts: list[
            dict[str, Any]
        ] = []  # of all ranks' groups: as `add` sends them, and what `_with_rewards` adds
        self._rank0_kept: list[int] = []  # positions
        self._rank0_rounds = 0
        self._rank0_first_errors: list[str | None] = []
        self._rank0_error_rates: dict[str, float] = {}

    @property
    def num_completions(self) -> int:
        """Of this step over all ranks, those of the round that is under way included."""
        return (self._num_groups + self.num_missing) * self._config.rollout.group_size

    def add(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> None:
        """Collective. Add one round's groups of this rank with their scores; rank 0 says how many prompts are still
        missing."""
        size = self._config.rollout.group_size
        facts = []
        for number, group in enumerate(groups):
            own = slice(number * size, (number + 1) * size)
            facts.append(
                {
                    "position": group.prompt.position,
                    "prompt_tokens": len(group.prompt.token_ids),
                    "completion_tokens": [len(c.token_ids) for c in group.completions],
                    "truncated": [c.finish_reason == "length" for c in group.completions],
                    "rewards": scored.rewards[own],
                    "by_name": {name: values[own] for name, values in scored.by_name.items()},
                    "statuses": {name: statuses[own] for name, statuses in scored.statuses.items()},
                }
            )
        self.groups += groups
        self.scored.extend(scored)
        self._num_groups += self.num_missing
        self.num_missing = on_rank0(self._rank0_judge, {"groups": facts, "first_error": scored.first_error})

    def decide(self) -> Decision:
        """Collective. Rank 0's decision about the step."""
        return Decision(**on_rank0(lambda _: dataclasses.asdict(self._rank0_decide()), None))

    def _rank0_judge(self, parts: list[dict[str, Any]]) -> int:
        facts = sorted((group for part in parts for group in part["groups"]), key=lambda group: group["position"])
        assert [len(f["rewards"]) for f in facts] == [self._config.rollout.group_size] * self.num_missing, (
            len(facts),
            self.num_missing,
        )
        assert len({f["position"] for f in facts}) == len(facts), "a group was sampled twice, and another not at all"
        facts = _with_rewards(facts, self._config)
        self._rank0_facts += facts
        self._rank0_first_errors += [part["first_error"] for part in parts]
        self._rank0_rounds += 1
        statuses = [f["statuses"] for f in self._rank0_facts]
        self._rank0_error_rates = check_error_rate(
            statuses, self._rank0_first_errors, self._config.reward_pool.max_error_frac
        )
        wanted, rollout = self._config.rollout.num_prompts_per_step, self._config.rollout
        if not rollout.dynamic_sampling:
            self._rank0_kept = [f["position"] for f in facts]
            return 0
        self._rank0_kept += [f["position"] for f in facts if not f["without_spread"]]
        missing = wanted - len(self._rank0_kept)
        if missing <= 0 or self._rank0_rounds == rollout.dynamic_sampling_max_rounds:
            return 0
        kept_frac = len(self._rank0_kept) / len(self._rank0_facts)
        return min(wanted, math.ceil(missing / max(kept_frac, _LOWEST_KEPT_FRAC)))

    def _rank0_decide(self) -> Decision:
        """Everything about the step that needs to know all rollouts."""
        config, group_size = self._config, self._config.rollout.group_size
        if all(reward is None for f in self._rank0_facts for reward in f["rewards"]):
            raise RewardError(
                f"none of the {len(self._rank0_facts) * group_size} completions of this step has a usable reward: "
                "every value was None, "
                "NaN or not a number; see the module docstring of grpo_spmd.rewards for what these mean"
            )
        positions = sorted(self._rank0_kept)[: config.rollout.num_prompts_per_step]
        by_position = {f["position"]: f for f in self._rank0_facts}
        used = [by_position[position] for position in positions]
        rewards = _grid([f["penalised"] for f in used], group_size)
        completion_tokens = [n for f in used for n in f["completion_tokens"]]
        truncated = [t for f in used for t in f["truncated"]]
        in_loss = [
            not math.isnan(reward) and not (cut_off and config.loss.mask_truncated)
            for reward, cut_off in zip(rewards.flatten().tolist(), truncated, strict=True)
        ]
        counted = [tokens if in_loss[i] else 0 for i, tokens in enumerate(completion_tokens)]
        num_tokens = [f["prompt_tokens"] + n for f in used for n in f["completion_tokens"]]
        costs = [n + self._attention_cost_ratio * n * n for n in num_tokens]
        sizes = [n * group_size for n in split_groups(len(used), config.training.num_mini_batches)]
        plan = plan_batch(
            num_tokens,
            num_ranks=self._session.world_size,
            mini_batch_sizes=sizes,
            max_tokens=config.training.max_tokens_per_micro_batch,
            costs=costs,
        )
        ends = np.cumsum([0, *sizes]).tolist()
        blocks = [counted[start:end] for start, end in pairwise(ends)]
        return Decision(
            positions=positions,
            rewards=rewards.flatten().tolist(),
            advantages=advantages_of(rewards, config),
            in_loss=in_loss,
            plan=plan,
            num_loss_tokens=[sum(block) for block in blocks],
            num_loss_sequences=[sum(tokens > 0 for tokens in block) for block in blocks],
            num_tokens=sum(num_tokens),
            num_sampled_tokens=sum(n for f in self._rank0_facts for n in f["completion_tokens"]),
            metrics=self._rank0_metrics(len(positions))
            | {f"batching/{n}": v for n, v in plan_metrics(plan, num_tokens, costs).items()},
        )

    def _rank0_metrics(self, num_used: int) -> dict[str, float | None]:
        """Of all groups that were sampled: a mean over those that dynamic sampling keeps would say little about the
        policy."""
        config, facts = self._config, self._rank0_facts
        size = len(facts) * config.rollout.group_size
        scored = _grid([_known(f["rewards"]) for f in facts], config.rollout.group_size)
        num_without_spread = sum(f["without_spread"] for f in facts)
        metrics: dict[str, float | None] = {
            "reward/mean": float(scored[~scored.isnan()].mean()),
            "reward/std": float(batch_std(scored)),
            "reward/zero_std_groups_frac": num_without_spread / len(facts),
            "reward/unscored_frac": float(scored.isnan().double().mean()),
            "completion/tokens_mean": sum(n for f in facts for n in f["completion_tokens"]) / size,
            "completion/truncated_frac": sum(t for f in facts for t in f["truncated"]) / size,
            **self._rank0_error_rates,
        }
        if config.advantage.overlong_buffer_tokens:
            metrics["reward/overlong_penalty_mean"] = sum(p for f in facts for p in f["overlong"]) / size
        if config.rollout.dynamic_sampling:
            metrics["dynamic_sampling/rounds"] = self._rank0_rounds
            metrics["dynamic_sampling/sampled_groups"] = len(facts)
            metrics["dynamic_sampling/alike_groups"] = num_without_spread
            metrics["dynamic_sampling/surplus_groups"] = len(facts) - num_without_spread - num_used
            metrics["dynamic_sampling/missing_groups"] = config.rollout.num_prompts_per_step - num_used
        for name in facts[0]["by_name"]:
            values = [value for f in facts for value in f["by_name"][name]]
            usable = [value for value in values if value is not None and not math.isnan(value)]
            metrics[f"reward/{name}/mean"] = sum(usable) / len(usable) if usable else None
        return metrics


def advantages_of(rewards: Tensor, config: Config) -> list[float]:
    advantages, _ = compute_advantages(rewards, config.advantage.estimator, config.advantage.normalize_std)
    values: list[float] = advantages.flatten().tolist()
    return values


def _with_rewards(facts: list[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
    """Adds to each group "overlong", "penalised" (its rewards as the advantages take them) and "without_spread" (they have no
    spread)."""
    size, longest, advantage = config.rollout.group_size, config.rollout.max_completion_tokens, config.advantage
    lengths = _grid([f["completion_tokens"] for f in facts], size)
    overlong = overlong_penalties(lengths, longest, advantage.overlong_buffer_tokens, advantage.overlong_penalty)
    penalised = _grid([_known(f["rewards"]) for f in facts], size) - overlong
    _, without_spread = compute_advantages(penalised, "dr_grpo", "none")
    added = zip(overlong.tolist(), penalised.tolist(), without_spread.tolist(), strict=True)
    return [f | {"overlong": o, "penalised": p, "without_spread": a} for f, (o, p, a) in zip(facts, added, strict=True)]


def _known(rewards: list[float | None]) -> list[float]:
    return [math.nan if reward is None else reward for reward in rewards]


def _grid(rows: list[list[float]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).view(-1, width)
