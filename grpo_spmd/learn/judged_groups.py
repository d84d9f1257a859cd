"""A step's groups as rank 0 judges them from a few numbers a rollout, and what the metrics say of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, RolloutConfig
from grpo_spmd.learn.advantages import batch_std, compute_advantages, overlong_penalties
from grpo_spmd.records import GroupFacts
from grpo_spmd.rewards.trl import mean_metrics


@dataclass(frozen=True)
class JudgedGroup(GroupFacts):
    overlong: list[float]  # what completions lose of their rewards for their length
    penalised: list[float]  # rewards as the advantages take them; NaN: unknown
    without_spread: bool  # rewards all alike, before the penalty


def judge(facts: Sequence[GroupFacts], rollout: RolloutConfig, advantage: AdvantageConfig) -> list[JudgedGroup]:
    num_tokens = grid([f.completion_tokens for f in facts], rollout.group_size)
    buffer, penalty = advantage.overlong_buffer_tokens, advantage.overlong_penalty
    overlong = overlong_penalties(num_tokens, rollout.max_completion_tokens, buffer, penalty)
    rewards = grid([_or_nan(f.rewards) for f in facts], rollout.group_size)
    # Before the penalty, as DAPO has it: four wrong answers, one a little long, have nothing to teach but length.
    _, without_spread = compute_advantages(rewards, "dr_grpo", "none")
    added = zip(facts, overlong.tolist(), (rewards - overlong).tolist(), without_spread.tolist(), strict=True)
    return [JudgedGroup(**vars(f), overlong=o, penalised=p, without_spread=w) for f, o, p, w in added]


def group_metrics(
    groups: Sequence[JudgedGroup], rollout: RolloutConfig, advantage: AdvantageConfig
) -> dict[str, float | None]:
    """Of all groups that were sampled: those that dynamic sampling keeps would say little about the policy."""
    size = len(groups) * rollout.group_size
    rewards = grid([_or_nan(group.rewards) for group in groups], rollout.group_size)
    lengths = [n for group in groups for n in group.completion_tokens]
    metrics: dict[str, float | None] = {
        "reward/mean": float(rewards[~rewards.isnan()].mean()),
        "reward/std": float(batch_std(rewards)),
        "reward/zero_std_groups_frac": sum(group.without_spread for group in groups) / len(groups),
        "reward/unscored_frac": float(rewards.isnan().double().mean()),
        "completion/tokens_mean": sum(lengths) / size,
        "completion/tokens_p50": float(np.percentile(lengths, 50)),
        "completion/tokens_p95": float(np.percentile(lengths, 95)),
        "completion/tokens_max": max(lengths),
        "completion/truncated_frac": sum(sum(group.truncated) for group in groups) / size,
    }
    if advantage.overlong_buffer_tokens:
        metrics["reward/overlong_penalty_mean"] = sum(p for group in groups for p in group.overlong) / size
    metrics |= mean_metrics(note for group in groups for note in group.notes)
    for name in groups[0].by_name:
        values = grid([_or_nan(group.by_name[name]) for group in groups], rollout.group_size)
        usable = values[~values.isnan()]
        metrics[f"reward/{name}/mean"] = float(usable.mean()) if len(usable) else None
        metrics[f"reward/{name}/std"] = float(batch_std(values)) if len(usable) else None
    return metrics


def refill_metrics(groups: Sequence[JudgedGroup], num_rounds: int, num_used: int, wanted: int) -> dict[str, float]:
    """Of dynamic sampling: what it took to find `num_used` groups with a spread of the `wanted` ones."""
    alike = sum(group.without_spread for group in groups)
    return {
        "dynamic_sampling/rounds": num_rounds,
        "dynamic_sampling/sampled_groups": len(groups),
        "dynamic_sampling/alike_groups": alike,
        "dynamic_sampling/surplus_groups": len(groups) - alike - num_used,
        "dynamic_sampling/missing_groups": wanted - num_used,
    }


def grid(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """float64 [groups, width]"""
    return torch.tensor(rows, dtype=torch.float64).view(-1, width)


def _or_nan(rewards: Sequence[float | None]) -> list[float]:
    return [math.nan if reward is None else reward for reward in rewards]
