"""Generalized advantage estimation (Schulman et al. 2016), its whitening, and the value loss. Pure.

What is sampled is one sequence of decisions: given tokens between turns are no step, and have no value. Behind a
completion's last token there is nothing, so its value is 0, also where the completion was cut off: a reward was given
for it as it is, and what it might have come to is no part of that."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Array = npt.NDArray[np.float64]  # [C]
_LEAST_VARIANCE = 1e-8


def advantages_of_tokens(
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
    for back in range(int(lengths.max(initial=0))):  # of all sequences the last token, then the one before it
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


def explained_variance(count: float, returns: tuple[float, float], errors: tuple[float, float]) -> float | None:
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
