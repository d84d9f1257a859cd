"""Rewards to advantages. Pure: tensors in, tensors out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_spmd.records import Completion, Episode

Grid = Float[Tensor, "P G"]  # a row for each group
# A group whose rewards differ by less than this has nothing to teach; dividing by its std would amplify rounding.
ZERO_STD_TOLERANCE = 1e-6


def compute_advantages(
    rewards: Grid, estimator: str, normalize_std: str
) -> tuple[Grid, Bool[Tensor, " P"]]:
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
        return torch.where(
            usable, (rewards - baseline) / std.clamp(min=ZERO_STD_TOLERANCE), 0.0
        ).float(), zero_std
    if estimator == "rloo":
        advantages = (
            centered * count / (count - 1).clamp(min=1)
        )  # r - mean of the others = (r - mean) * n / (n - 1)
    elif estimator == "grpo" and normalize_std == "group":
        advantages = centered / std.clamp(min=ZERO_STD_TOLERANCE)
    elif estimator == "grpo" and normalize_std == "batch":
        advantages = centered / batch_std(rewards).clamp(min=ZERO_STD_TOLERANCE)
    elif (
        estimator == "max_rl"
    ):  # divided by a mean below 0, what is better than the others would count as worse
        usable = mean >= ZERO_STD_TOLERANCE
        advantages = torch.where(usable, centered / mean.clamp(min=ZERO_STD_TOLERANCE), 0.0)
    else:
        advantages = centered
    return torch.where(zero_std[:, None], 0.0, advantages).float(), zero_std


def batch_std(rewards: Grid) -> Float[Tensor, ""]:
    """Unbiased standard deviation over all known rewards; 0 where there are fewer than two."""
    known = rewards[~rewards.isnan()].double()
    return known.std() if len(known) > 1 else torch.zeros((), dtype=torch.float64)


def overlong_penalties(
    num_tokens: Grid, max_tokens: int, buffer_tokens: int, penalty: float
) -> Grid:
    """What completions lose of their reward for their length: nothing up to `max_tokens - buffer_tokens`, then linearly
    more, and `penalty` at `max_tokens` (DAPO's soft overlong punishment, Yu et al. 2025)."""
    if not buffer_tokens:
        return torch.zeros_like(num_tokens)
    return penalty * ((num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens).clamp(0.0, 1.0)


# Credit of turns: each is judged by the rewards from it on, where `environment.discount` asks for it. Pure.


Credit = float | npt.NDArray[np.float64]  # of all tokens of a completion, or of each


def returns_to_go(episode: Episode, discount: float) -> list[float]:
    """Of each turn its own reward, and the later ones discounted to it; a turn without a reward counts 0."""
    returns, later = list[float](), 0.0
    for turn in reversed(episode.turns):
        later = (turn.reward or 0.0) + discount * later
        returns.append(later)
    return returns[::-1]


def turn_advantages(
    advantages: Sequence[float],
    rewards: Sequence[float | None],
    episodes: Sequence[Episode | None],
    discount: float,
) -> list[Credit]:
    """The advantages of each token of a group's completions, from those of the group's whole returns.

    An estimator makes advantages of rewards by a line, A = (reward - baseline) / scale. A turn's are on the same line:
    its return to go takes the place of the whole return, and the group's mean of returns from that turn on (0 for who
    had ended) that of the mean of whole returns, so that the turns are as centred as the episodes are.
    """
    known = [i for i, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)]
    slope = _slope([rewards[i] or 0.0 for i in known], [advantages[i] for i in known])
    returns = [
        returns_to_go(episode, discount) if episode is not None else [] for episode in episodes
    ]
    longest = max(map(len, returns), default=0)
    # What a return from turn t on has over the whole one.
    over = np.array(
        [
            [(own[t] if t < len(own) else 0.0) - (own or [0.0])[0] for t in range(longest)]
            for own in returns
        ]
    )
    centred = over - over[known].mean(0) if known and longest else over
    found: list[Credit] = []
    for i, (advantage, episode) in enumerate(zip(advantages, episodes, strict=True)):
        if episode is None or i not in known or not episode.turns:
            found.append(advantage)
            continue
        of_turns = advantage + slope * centred[i, : len(episode.turns)]
        found.append(np.repeat(of_turns, [turn.num_tokens for turn in episode.turns]))
    return found


def credited_tokens(
    advantages: Sequence[float],
    rewards: Sequence[float | None],
    completions: Sequence[Completion],
    discount: float | None,
    estimator: str,
) -> Sequence[Credit]:
    """What the tokens of a group's completions are credited with; for gae `advantages` are still rewards."""
    if estimator == "gae":
        pairs = zip(advantages, completions, strict=True)
        return [
            token_rewards(reward, completion, discount is not None) for reward, completion in pairs
        ]
    if discount is None:
        return advantages
    return turn_advantages(
        advantages, rewards, [completion.episode for completion in completions], discount
    )


def token_rewards(reward: float, completion: Completion, by_turn: bool) -> npt.NDArray[np.float64]:
    """What gae puts at each sampled token: the rollout's reward at the last one; `by_turn`: each turn's own at its
    end, and at the last what the rollout has beside them."""
    rewards = np.zeros(len(completion.token_ids))
    turns = completion.episode.turns if by_turn and completion.episode is not None else ()
    end = 0
    for turn in turns:
        end += turn.num_tokens
        if turn.num_tokens and turn.reward is not None:
            rewards[end - 1] += turn.reward
    if len(rewards):
        rewards[-1] += reward - rewards.sum()
    return rewards


def _slope(rewards: Sequence[float], advantages: Sequence[float]) -> float:
    """1 / scale; 0 where the rewards are alike, so that there is nothing to learn."""
    center = sum(rewards) / max(len(rewards), 1)
    spread = sum((reward - center) ** 2 for reward in rewards)
    products = sum((reward - center) * a for reward, a in zip(rewards, advantages, strict=True))
    return products / spread if spread > 1e-12 else 0.0


# Generalized advantage estimation (Schulman et al. 2016), its whitening, and the value loss. Pure.
#
# What is sampled is one sequence of decisions: given tokens between turns are no step, and have no value. Behind a
# completion's last token there is nothing, so its value is 0, also where the completion was cut off: a reward was given
# for it as it is, and what it might have come to is no part of that.


Array = npt.NDArray[np.float64]  # [C]
_LEAST_VARIANCE = 1e-8


def gae_advantages(
    rewards: Array, values: Array, lengths: npt.NDArray[np.int64], gamma: float, lam: Array | float
) -> Array:
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, where delta_t = r_t + gamma V_{t+1} - V_t, of each of C tokens.

    `rewards` and `values` [C] are of S sequences with these `lengths` [S], one behind the other. `lam`: one for all, or
    one for each sequence [S].
    """
    ends, factors = lengths.cumsum(), gamma * np.broadcast_to(lam, lengths.shape)
    following = np.append(values[1:], 0.0)
    following[ends[lengths > 0] - 1] = 0.0
    found = rewards + gamma * following - values
    later = np.zeros(len(lengths))
    for back in range(
        int(lengths.max(initial=0))
    ):  # of all sequences the last token, then the one before it
        there = lengths > back
        places = ends[there] - 1 - back
        found[places] += factors[there] * later[there]
        later[there] = found[places]
    return found


def length_lambda(lengths: npt.NDArray[np.int64], alpha: float) -> Array:
    """1 - 1 / (alpha l) of completions of l tokens, 0 at least (VAPO, Yue et al. 2025): the same share of the reward
    reaches the first token of a long completion and of a short one."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(lengths, 1)))


def whitening(count: float, total: float, squares: float) -> tuple[float, float]:
    """Mean and factor of (A - mean) * factor, by which `count` advantages of this sum and sum of squares get mean 0 and
    unbiased variance 1; no more than 1e4 is made of one that hardly varies."""
    if count < 2:
        return (total / count if count else 0.0), 1.0
    mean = total / count
    variance = max(0.0, squares - count * mean * mean) / (count - 1)
    return mean, 1.0 / math.sqrt(variance + _LEAST_VARIANCE)


def explained_variance(
    count: float, returns: tuple[float, float], errors: tuple[float, float]
) -> float | None:
    """1 - Var(return - value) / Var(return), from sums and sums of squares; None where returns are all alike."""

    def variance(total: float, squares: float) -> float:
        return max(0.0, squares / count - (total / count) ** 2)

    if not count or (of_returns := variance(*returns)) < _LEAST_VARIANCE:
        return None
    return 1.0 - variance(*errors) / of_returns


def value_loss(
    values: Float[Tensor, " C"],
    old_values: Float[Tensor, " C"],
    returns: Float[Tensor, " C"],
    loss_mask: Bool[Tensor, " C"],
    clip: float | None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum over the counted tokens of half the squared error, the larger of that of V and of V clipped to within `clip`
    of its old value (as PPO's first code has it); and how many tokens the clipped one is larger of."""
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    v, old, target = (torch.where(loss_mask, each, zero) for each in (values, old_values, returns))
    errors = (v - target).square()
    if clip is None:
        return 0.5 * errors.sum(), zero
    clipped = (v.clamp(old - clip, old + clip) - target).square()
    return 0.5 * torch.maximum(errors, clipped).sum(), (clipped > errors).sum().to(values.dtype)
