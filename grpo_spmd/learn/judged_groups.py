"""A step's groups as rank 0 judges them from a few numbers a rollout, and what the metrics say of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, RolloutConfig
from grpo_spmd.learn.advantages import batch_std, compute_advantages, overlong_penalties
from grpo_spmd.learn.facts import Records
from grpo_spmd.rewards.logged import Logged, mean_metrics


@dataclass(frozen=True)
class JudgedGroups:
    """g groups of G completions each, a row each in every array."""

    facts: Records
    ranks: npt.NDArray[np.int64]  # who sampled them, and as which of its groups
    places: npt.NDArray[np.int64]
    overlong: npt.NDArray[np.float64]  # [g, G] what completions lose of their rewards for their length
    penalised: npt.NDArray[np.float64]  # [g, G] rewards as the advantages take them; NaN: unknown
    without_spread: npt.NDArray[np.bool_]  # rewards all alike, before the penalty

    def __len__(self) -> int:
        return len(self.facts)


def judge(
    facts: Records,
    ranks: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    rollout: RolloutConfig,
    advantage: AdvantageConfig,
) -> JudgedGroups:
    buffer, penalty = advantage.overlong_buffer_tokens, advantage.overlong_penalty
    overlong = overlong_penalties(grid(facts["completion_tokens"]), rollout.max_completion_tokens, buffer, penalty)
    rewards = grid(facts["rewards"])
    # Before the penalty, as DAPO has it: four wrong answers, one a little long, have nothing to teach but length.
    _, without_spread = compute_advantages(rewards, "dr_grpo", "none")
    penalised = (rewards - overlong).numpy()
    return JudgedGroups(facts, ranks, places, overlong.numpy(), penalised, without_spread.numpy())


def joined(rounds: Sequence[JudgedGroups]) -> JudgedGroups:
    if len(rounds) == 1:
        return rounds[0]
    columns = zip(*(vars(groups).values() for groups in rounds), strict=True)
    return JudgedGroups(*(np.concatenate(column) for column in columns))


def group_metrics(
    groups: JudgedGroups, names: Sequence[str], logged: Logged, advantage: AdvantageConfig
) -> dict[str, float | None]:
    """Of all groups that were sampled: those that dynamic sampling keeps would say little about the policy."""
    facts, rewards = groups.facts, grid(groups.facts["rewards"])
    lengths, size = facts["completion_tokens"].ravel().astype(np.int64), facts["completion_tokens"].size
    metrics: dict[str, float | None] = {
        "reward/mean": float(rewards[~rewards.isnan()].mean()),
        "reward/std": float(batch_std(rewards)),
        "reward/zero_std_groups_frac": int(groups.without_spread.sum()) / len(groups),
        "reward/unscored_frac": float(rewards.isnan().double().mean()),
        "completion/tokens_mean": int(lengths.sum()) / size,
        "completion/tokens_p50": float(np.percentile(lengths, 50)),
        "completion/tokens_p95": float(np.percentile(lengths, 95)),
        "completion/tokens_max": int(lengths.max()),
        "completion/truncated_frac": int(facts["truncated"].sum()) / size,
    }
    if advantage.overlong_buffer_tokens:
        # One by one, as a plain sum adds them: numpy's adds pairs.
        metrics["reward/overlong_penalty_mean"] = sum(groups.overlong.ravel().data) / size
    metrics |= mean_metrics(logged)
    for number, name in enumerate(names):
        values = grid(facts["by_name"][:, number])
        usable = values[~values.isnan()]
        metrics[f"reward/{name}/mean"] = float(usable.mean()) if len(usable) else None
        metrics[f"reward/{name}/std"] = float(batch_std(values)) if len(usable) else None
    return metrics


def refill_metrics(groups: JudgedGroups, num_rounds: int, num_used: int, wanted: int) -> dict[str, float]:
    """Of dynamic sampling: what it took to find `num_used` groups with a spread of the `wanted` ones."""
    alike = int(groups.without_spread.sum())
    return {
        "dynamic_sampling/rounds": num_rounds,
        "dynamic_sampling/sampled_groups": len(groups),
        "dynamic_sampling/alike_groups": alike,
        "dynamic_sampling/surplus_groups": len(groups) - alike - num_used,
        "dynamic_sampling/missing_groups": wanted - num_used,
    }


def grid(rows: npt.NDArray[Any]) -> Tensor:
    """float64 [groups, G]"""
    return torch.from_numpy(np.array(rows, np.float64, order="C"))  # a copy: torch takes no field of a record
