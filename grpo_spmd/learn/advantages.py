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
# One value for each of C tokens.
Array = npt.NDArray[np.float64]
# One number for all tokens of a completion, or one for each.
Credit = float | npt.NDArray[np.float64]
# Rewards whose standard deviation is below this count as all alike: dividing by it would amplify
# rounding.
ZERO_STD_TOLERANCE = 1e-6
# Added to a variance before it divides. Returns with a smaller variance count as all alike.
_MIN_VARIANCE = 1e-8


def compute_advantages(
    rewards: Grid, estimator: str, normalize_std: str
) -> tuple[Grid, Bool[Tensor, " P"]]:
    """Returns (advantages [P, G], mask [P] of the groups whose rewards have no spread).

    `rewards` [P, G] are those of P groups of G completions. A group has no spread if its rewards
    are all alike, or if fewer than two are known.

    A NaN reward means "unknown": it enters no mean or deviation, and its advantage is 0. The
    advantages of a group without spread are 0 too, except with "reinforce_pp", whose baseline is
    the mean over all groups, and "gae", which returns the rewards. Standard deviations are unbiased
    (n - 1), as in GRPO's reference code.

    Args:
        estimator: "grpo" (reward minus group mean, divided as `normalize_std` says; Shao et al.
            2024), "dr_grpo" (never divided; Liu et al. 2025), "rloo" (reward minus the mean of the
            *other* rewards of the group; Ahmadian et al. 2024), "reinforce_pp" (REINFORCE++, Hu et
            al. 2025: minus the mean of all rewards, divided by their standard deviation) or
            "max_rl" (Tajwar et al. 2026: reward minus group mean, divided by that mean; meant for
            rewards of 0 and 1, and 0 for a group whose mean is not above 0). "gae": the rewards
            themselves, from which the critic makes advantages later.
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
        # Dividing by a negative mean would make the better completions count as the worse ones.
        usable = mean >= ZERO_STD_TOLERANCE
        advantages = torch.where(usable, centered / mean.clamp(min=ZERO_STD_TOLERANCE), 0.0)
    else:
        advantages = centered
    return torch.where(zero_std[:, None], 0.0, advantages).float(), zero_std


def batch_std(rewards: Grid) -> Float[Tensor, ""]:
    """Returns the unbiased standard deviation of all known rewards, or 0 if fewer than two are
    known."""
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


# Advantages of turns. With `environment.discount`, a turn of an episode is judged by its own reward
# and the discounted rewards of the turns after it.


def credited_tokens(
    advantages: Sequence[float],
    rewards: Sequence[float | None],
    completions: Sequence[Completion],
    discount: float | None,
    estimator: str,
    slope: float | None,
) -> Sequence[Credit]:
    """Returns, for each completion of a group, one advantage for all its tokens or one for each.

    `discount` is `environment.discount`. None: all tokens of a completion have the completion's
    advantage. Otherwise the tokens of each turn have the turn's. With the estimator "gae",
    `advantages` are still rewards (see compute_advantages), and the result is the reward of each
    token. `slope` is as in `turn_advantages`."""
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
    """Returns, for each episode of a group, the advantages of its sampled tokens.

    All tokens of a turn have the turn's advantage, which is made from the `advantages` and
    `rewards` of whole episodes. An estimator maps rewards to advantages by a line, A = (reward -
    baseline) / scale. A turn's advantage is on the same line: the turn's return to go takes the
    place of the episode's return, and the group's mean return from that turn on (an episode that
    has ended by then counts 0) takes the place of the group's mean return. So turns are centred as
    episodes are.

    `slope` is 1 / scale. None: it is computed from this group, and is 0 if the rewards are all
    alike. An episode whose reward is unknown, or that has no turns, keeps its one advantage.
    """
    scored = [i for i, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)]
    if slope is None:
        slope = _slope([rewards[i] or 0.0 for i in scored], [advantages[i] for i in scored])
    returns = [
        returns_to_go(episode, discount) if episode is not None else [] for episode in episodes
    ]
    # [episodes, turns]: the return from each turn on (0 after an episode's last turn), minus the
    # return of the whole episode.
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
    """Returns the reward of each sampled token, for the estimator "gae". The rewards of the tokens
    add up to `reward`, the reward of the whole rollout.

    The last token of the rollout gets all of it. With `by_turn`, the last token of each turn gets
    the turn's reward, and the last token of the rollout gets what is left of `reward`."""
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
    """Returns the slope of the least-squares line from rewards to advantages, or 0 if the rewards
    are all alike."""
    center = sum(rewards) / max(len(rewards), 1)
    spread = sum((reward - center) ** 2 for reward in rewards)
    products = sum((reward - center) * a for reward, a in zip(rewards, advantages, strict=True))
    return products / spread if spread > 1e-12 else 0.0


# Generalized advantage estimation (Schulman et al. 2016), its whitening, and the value loss.
#
# The sampled tokens of a rollout are one sequence of decisions; tokens that the environment gives
# between turns are no part of it and have no value. The value after the last token is 0, even if
# the completion was cut off at the length limit: its reward was given for the text as it is.


def gae_advantages(
    rewards: Array, values: Array, lengths: npt.NDArray[np.int64], gamma: float, lam: Array | float
) -> Array:
    """Returns the GAE advantage of each of C tokens: A_t = sum over k of (gamma lam)^k delta_{t+k},
    where delta_t = r_t + gamma V_{t+1} - V_t.

    `rewards` and `values` [C] hold S sequences one after the other; `lengths` [S] are their numbers
    of tokens. `lam` is one number for all sequences, or an array [S] with one for each.
    """
    factors = (gamma * np.broadcast_to(lam, lengths.shape)).tolist()
    advantages: list[float] = []
    # From the last token of the last sequence back to the first, in Python floats: a numpy
    # operation on one token of each sequence would cost more in overhead than in arithmetic.
    steps = zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True)
    for length, factor in zip(reversed(lengths.tolist()), reversed(factors), strict=True):
        advantage = next_value = 0.0
        for reward, value in islice(steps, length):
            advantage = reward + gamma * next_value - value + factor * advantage
            next_value = value
            advantages.append(advantage)
    return np.array(advantages[::-1])


def length_lambda(lengths: npt.NDArray[np.int64], alpha: float) -> Array:
    """Returns GAE's lambda for completions of l tokens: 1 - 1 / (alpha l), at least 0 (VAPO, Yue et
    al. 2025). With it the same share of the reward reaches the first token of long and short
    completions."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(lengths, 1)))


def whitening(count: float, total: float, squares: float) -> tuple[float, float]:
    """Returns (mean, factor) so that the values (A - mean) * factor have mean 0 and unbiased
    variance 1.

    A are `count` advantages with the sum `total` and the sum of squares `squares`. The factor is at
    most 1e4."""
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
    clipped to within `clip` of its old value, as in OpenAI's first code of PPO. A token is clipped
    if the second one is larger. If `clip` is None, no value is clipped.
    """
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    v, old, target = (torch.where(loss_mask, x, zero) for x in (values, old_values, returns))
    errors = (v - target).square()
    if clip is None:
        return 0.5 * errors.sum(), zero
    clipped = (v.clamp(old - clip, old + clip) - target).square()
    return 0.5 * torch.maximum(errors, clipped).sum(), (clipped > errors).sum().to(values.dtype)
