"""Rewards to advantages. Pure: tensors in, tensors out."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Grid = Float[Tensor, "P G"]  # a row for each group
# A group whose rewards differ by less than this has nothing to teach; dividing by its std would amplify rounding.
ZERO_STD_TOLERANCE = 1e-6


def compute_advantages(rewards: Grid, estimator: str, normalize_std: str) -> tuple[Grid, Bool[Tensor, " P"]]:
    """Advantages of each completion, and which groups have no spread: rewards all alike, or fewer than two known.

    A NaN reward means "not known": it enters no mean or deviation and its advantage is 0. So are those of a group
    without spread, but for "reinforce_pp", whose baseline is not the group's. Standard deviations are unbiased (n - 1),
    as in the GRPO reference code.

    Args:
        estimator: "grpo" (reward minus group mean, divided as `normalize_std` says; Shao et al. 2024), "dr_grpo" (never
            divided; Liu et al. 2025), "rloo" (reward minus the mean of the *other* rewards of the group; Ahmadian et
            al. 2024), "reinforce_pp" (REINFORCE++, Hu et al. 2025: minus the mean of all rewards, divided by their
            standard deviation) or "max_rl" (Tajwar et al. 2026: reward minus group mean, divided by that mean; it is
            made for rewards of 0 and 1, and a group whose mean is not above 0 gets 0). "gae": the rewards themselves,
            of which the critic makes advantages later.
        normalize_std: "group", "batch" or "none"; read by "grpo" alone.
    """
    rewards = rewards.double()
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)
    mean = torch.where(known, rewards, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(known, rewards - mean, 0.0)
    std = (centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    zero_std = std.squeeze(1) < ZERO_STD_TOLERANCE
    if estimator == "gae":
        return torch.where(known, rewards, 0.0).float(), zero_std
    if estimator == "reinforce_pp":
        std = batch_std(rewards)
        baseline = rewards[known].mean() if known.any() else 0.0
        usable = known & (std >= ZERO_STD_TOLERANCE)
        return torch.where(usable, (rewards - baseline) / std.clamp(min=ZERO_STD_TOLERANCE), 0.0).float(), zero_std
    if estimator == "rloo":
        advantages = centered * count / (count - 1).clamp(min=1)  # r - mean of the others = (r - mean) * n / (n - 1)
    elif estimator == "grpo" and normalize_std == "group":
        advantages = centered / std.clamp(min=ZERO_STD_TOLERANCE)
    elif estimator == "grpo" and normalize_std == "batch":
        advantages = centered / batch_std(rewards).clamp(min=ZERO_STD_TOLERANCE)
    elif estimator == "max_rl":  # divided by a mean below 0, what is better than the others would count as worse
        usable = mean >= ZERO_STD_TOLERANCE
        advantages = torch.where(usable, centered / mean.clamp(min=ZERO_STD_TOLERANCE), 0.0)
    else:
        advantages = centered
    return torch.where(zero_std[:, None], 0.0, advantages).float(), zero_std


def batch_std(rewards: Grid) -> Float[Tensor, ""]:
    """Unbiased standard deviation over all known rewards; 0 where there are fewer than two."""
    known = rewards[~rewards.isnan()].double()
    return known.std() if len(known) > 1 else torch.zeros((), dtype=torch.float64)


def overlong_penalties(num_tokens: Grid, max_tokens: int, buffer_tokens: int, penalty: float) -> Grid:
    """What completions lose of their reward for their length: nothing up to `max_tokens - buffer_tokens`, then linearly
    more, and `penalty` at `max_tokens` (DAPO's soft overlong punishment, Yu et al. 2025)."""
    if not buffer_tokens:
        return torch.zeros_like(num_tokens)
    return penalty * ((num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens).clamp(0.0, 1.0)
