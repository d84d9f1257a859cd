"""Computes advantages from rewards, as pure functions: for groups of completions, for the turns of
an episode, and for single tokens with a critic (GAE)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, islice, zip_longest

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_spmd.records import Completion, Episode

# One row per group, one column per completion.
Grid = Float[Tensor, "P G"]
# Values of C tokens.
Array = npt.NDArray[np.float64]
# One number for all tokens of a completion, or one for each.
Credit = float | npt.NDArray[np.float64]
# Rewards of a group that differ by less have nothing to teach: dividing by their deviation would
# amplify rounding.
ZERO_STD_TOLERANCE = 1e-6
_MIN_VARIANCE = 1e-8


def compute_advantages(
    rewards: Grid, estimator: str, normalize_std: str
) -> tuple[Grid, Bool[Tensor, " P"]]:
    """Returns (advantages [P, G], mask [P] of the groups whose rewards have no spread).

    `rewards` [P, G] are those of P groups of G completions.

    A group has no spread if its rewards are all alike, or if fewer than two are known.

    A NaN reward means "unknown": it enters no mean or deviation, and its advantage is 0. The
    advantages of a group without spread are 0 too, except with "reinforce_pp", whose baseline is
    not the group's, and "gae", which returns the rewards. Standard deviations are unbiased (n - 1),
    as in GRPO's reference code.

    Args:
        estimator: "grpo" (reward minus group mean, divided as `normalize_std` says; Shao et al.
            2024), "dr_grpo" (never divided; Liu et al. 2025), "rloo" (reward minus the mean of the
            *other* rewards of the group; Ahmadian et al. 2024), "reinforce_pp" (REINFORCE++, Hu et
            al. 2025: minus the mean of all rewards, divided by their standard deviation) or
            "max_rl" (Tajwar et al. 2026: reward minus group mean, divided by that mean; it is made
            for rewards of 0 and 1, and a group whose mean is not above 0 gets 0). "gae": the
            rewards themselves, from which the critic makes advantages later.
        normalize_std: "group", "batch" or "none"; only "grpo" reads it.
    """
    rewards = rewards.double()
    is_known = ~rewards.isnan()
    count = is_known.sum(1, keepdim=True)
    mean = torch.where(is_known, rewards, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    centered = torch.where(is_known, rewards - mean, 0.0)
    std = (centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    zero_std = std.squeeze(1) < ZERO_STD_TOLERANCE
    if estimator == "gae":
        return torch.where(is_known, rewards, 0.0).float(), zero_std
    if estimator == "reinforce_pp":
        std = batch_std(rewards)
        baseline = rewards[is_known].mean() if is_known.any() else 0.0
        usable = is_known & (std >= ZERO_STD_TOLERANCE)
        scaled = (rewards - baseline) / std.clamp(min=ZERO_STD_TOLERANCE)
        return torch.where(usable, scaled, 0.0).float(), zero_std
    if estimator == "rloo":
        # r - mean of the others = (r - mean) * n / (n - 1)
        advantages = centered * count / (count - 1).clamp(min=1)
    elif estimator == "grpo" and normalize_std == "group":
        advantages = centered / std.clamp(min=ZERO_STD_TOLERANCE)
    elif estimator == "grpo" and normalize_std == "batch":
        advantages = centered / batch_std(rewards).clamp(min=ZERO_STD_TOLERANCE)
    elif estimator == "max_rl":
        # Divided by a negative mean, the better completions would count as worse.
        usable = mean >= ZERO_STD_TOLERANCE
        advantages = torch.where(usable, centered / mean.clamp(min=ZERO_STD_TOLERANCE), 0.0)
    else:
        advantages = centered
    return torch.where(zero_std[:, None], 0.0, advantages).float(), zero_std


def batch_std(rewards: Grid) -> Float[Tensor, ""]:
    """Returns the unbiased standard deviation over all known rewards; 0 if fewer than two are."""
    known_rewards = rewards[~rewards.isnan()].double()
    if len(known_rewards) < 2:
        return torch.zeros((), dtype=torch.float64)
    return known_rewards.std()


def overlong_penalties(
    num_tokens: Grid, max_tokens: int, buffer_tokens: int, penalty: float
) -> Grid:
    """Returns the penalties that are subtracted from the rewards of long completions.

    A penalty is 0 up to `max_tokens - buffer_tokens` tokens, then grows linearly to `penalty` at
    `max_tokens` (DAPO's soft overlong punishment, Yu et al. 2025)."""
    if not buffer_tokens:
        return torch.zeros_like(num_tokens)
    return penalty * ((num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens).clamp(0.0, 1.0)


# With `environment.discount` each turn of an episode is judged by the rewards from it on.


def credited_tokens(
    advantages: Sequence[float],
    rewards: Sequence[float | None],
    completions: Sequence[Completion],
    discount: float | None,
    estimator: str,
    slope: float | None,
) -> Sequence[Credit]:
    """Returns the advantages of the tokens of each completion of a group.

    One number stands for all tokens of a completion. With gae `advantages` are still rewards, and
    the result is the rewards of the tokens."""
    if estimator == "gae":
        pairs = zip(advantages, completions, strict=True)
        return [token_rewards(reward, c, by_turn=discount is not None) for reward, c in pairs]
    if discount is None:
        return advantages
    episodes = [completion.episode for completion in completions]
    return turn_advantages(advantages, rewards, episodes, discount, slope)


def turn_advantages(
    advantages: Sequence[float],
    rewards: Sequence[float | None],
    episodes: Sequence[Episode | None],
    discount: float,
    slope: float | None = None,
) -> list[Credit]:
    """Returns the advantages of each token of a group's episodes, from the advantages of whole
    episodes.

    An estimator maps rewards to advantages by a line, A = (reward - baseline) / scale. A turn's
    advantage is on the same line: its return to go takes the place of the whole return, and the
    group's mean of returns from that turn on (0 for an episode that has ended) takes the place of
    the mean of whole returns. So the turns are as centred as the episodes are. `slope` is 1 /
    scale; None: it is found from the group, and a group whose rewards are all alike has none.
    """
    scored = [i for i, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)]
    if slope is None:
        slope = _slope([rewards[i] or 0.0 for i in scored], [advantages[i] for i in scored])
    returns = [
        returns_to_go(episode, discount) if episode is not None else [] for episode in episodes
    ]
    # The return from turn t on, 0 after the last turn, minus the whole return.
    padded = np.array([*zip_longest(*returns, fillvalue=0.0)]).reshape(-1, len(returns)).T
    centred = padded - padded[:, :1]
    if scored:
        centred = centred - centred[scored].mean(0)
    credits: list[Credit] = []
    for i, (advantage, episode) in enumerate(zip(advantages, episodes, strict=True)):
        if episode is None or i not in scored or not episode.turns:
            credits.append(advantage)
            continue
        by_turn = advantage + slope * centred[i, : len(episode.turns)]
        credits.append(np.repeat(by_turn, [turn.num_tokens for turn in episode.turns]))
    return credits


def returns_to_go(episode: Episode, discount: float) -> list[float]:
    """Returns for each turn its reward plus the discounted rewards of the later turns. A turn
    without a reward counts 0."""
    rewards = (turn.reward or 0.0 for turn in reversed(episode.turns))
    return [*accumulate(rewards, lambda total, reward: reward + discount * total)][::-1]


def token_rewards(reward: float, completion: Completion, by_turn: bool) -> Array:
    """Returns the reward of each sampled token for gae: the rollout's reward at the last token;
    with `by_turn` each turn's reward at its end, and the rest of the rollout's at the last
    token."""
    rewards = np.zeros(len(completion.token_ids))
    end = 0
    for turn in completion.episode.turns if by_turn and completion.episode is not None else ():
        end += turn.num_tokens
        if turn.num_tokens and turn.reward is not None:
            rewards[end - 1] += turn.reward
    if len(rewards):
        rewards[-1] += reward - rewards.sum()
    return rewards


def _slope(rewards: Sequence[float], advantages: Sequence[float]) -> float:
    """Returns 1 / scale; 0 if the rewards are all alike, since there is nothing to learn."""
    center = sum(rewards) / max(len(rewards), 1)
    spread = sum((reward - center) ** 2 for reward in rewards)
    products = sum((reward - center) * a for reward, a in zip(rewards, advantages, strict=True))
    return products / spread if spread > 1e-12 else 0.0


# Generalized advantage estimation (Schulman et al. 2016), its whitening, and the value loss.
#
# The sampled tokens of a rollout are one sequence of decisions; tokens that the environment gives
# between turns are no step and have no value. After the last token the value is 0, also if the
# completion was cut off: its reward was given for it as it is.


def gae_advantages(
    rewards: Array, values: Array, lengths: npt.NDArray[np.int64], gamma: float, lam: Array | float
) -> Array:
    """Returns A_t = sum over k of (gamma lam)^k delta_{t+k} of each of C tokens, where delta_t =
    r_t + gamma V_{t+1} - V_t.

    `rewards` and `values` [C] are those of S consecutive sequences with these `lengths` [S]. `lam`
    is one number for all, or one for each sequence [S].
    """
    factors = (gamma * np.broadcast_to(lam, lengths.shape)).tolist()
    advantages: list[float] = []
    # From the last token of the last sequence back to the first, over Python floats: an operation
    # of numpy on one token of each sequence costs more than all its arithmetic.
    steps = zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True)
    for length, factor in zip(reversed(lengths.tolist()), reversed(factors), strict=True):
        advantage = next_value = 0.0
        for reward, value in islice(steps, length):
            advantage = reward + gamma * next_value - value + factor * advantage
            next_value = value
            advantages.append(advantage)
    return np.array(advantages[::-1])


def length_lambda(lengths: npt.NDArray[np.int64], alpha: float) -> Array:
    """Returns 1 - 1 / (alpha l) for completions of l tokens, at least 0 (VAPO, Yue et al. 2025):
    the same share of the reward reaches the first token of long and short completions."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(lengths, 1)))


def whitening(count: float, total: float, squares: float) -> tuple[float, float]:
    """Returns (mean, factor) so that the values (A - mean) * factor have mean 0 and unbiased
    variance 1.

    `count`, `total` and `squares` are the number of the advantages A, their sum and their sum of
    squares. The factor is at most 1e4."""
    if count < 2:
        return (total / count if count else 0.0), 1.0
    mean = total / count
    variance = max(0.0, squares - count * mean * mean) / (count - 1)
    return mean, 1.0 / math.sqrt(variance + _MIN_VARIANCE)


def explained_variance(
    count: float, returns: tuple[float, float], errors: tuple[float, float]
) -> float | None:
    """Returns 1 - Var(return - value) / Var(return), or None if the returns are all alike.

    `returns` and `errors` (return - value) are each (sum, sum of squares) over `count` tokens."""
    if not count:
        return None
    return_variance = variance(count, *returns)
    if return_variance < _MIN_VARIANCE:
        return None
    return 1.0 - variance(count, *errors) / return_variance


def variance(count: float, total: float, squares: float) -> float:
    """Returns the biased variance of `count` numbers from their sum and their sum of squares."""
    return max(0.0, squares / count - (total / count) ** 2)


def value_loss(
    values: Float[Tensor, " C"],
    old_values: Float[Tensor, " C"],
    returns: Float[Tensor, " C"],
    loss_mask: Bool[Tensor, " C"],
    clip: float | None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Returns (sum of half the squared errors of the tokens that count, number of clipped tokens).

    The squared error of a token is the larger one of two: that of its value V, and that of V
    clipped to within `clip` of its old value, as in PPO's first code. A token is clipped if the
    second one is larger.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    v, old, target = (torch.where(loss_mask, x, zero) for x in (values, old_values, returns))
    errors = (v - target).square()
    if clip is None:
        return 0.5 * errors.sum(), zero
    clipped = (v.clamp(old - clip, old + clip) - target).square()
    return 0.5 * torch.maximum(errors, clipped).sum(), (clipped > errors).sum().to(values.dtype)
