"""The loss written out from its papers, one sequence at a time and in float64.

losses.py must give the same. Nothing of it is imported here, and nothing is fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig


class LossTerm(NamedTuple):
    """A weighted sum."""

    value: Tensor
    """[], with its graph."""
    size: float
    """The sum of |summands|: a difference is judged relative to it."""


@dataclass(frozen=True)
class PlainSequence:
    """One completion of n tokens: tensors [n], float64."""

    advantage: float
    counts: Tensor
    """bool: the token counts in the loss."""
    logprobs: Tensor
    """With its graph."""
    entropy: Tensor
    """With its graph."""
    old: Tensor
    engine: Tensor
    ref: Tensor | None = None
    teacher_penalty: Tensor | None = None
    """What a teacher takes off the advantage of each token."""
    divergence: Tensor | None = None
    """Divergence from a teacher, with its graph."""


def plain_terms(
    sequences: Sequence[PlainSequence],
    loss: LossConfig,
    num_tokens: int,
    num_sequences: int,
    max_completion_tokens: int,
    teacher_coef: float = 0.0,
) -> dict[str, LossTerm]:
    """Returns the terms "loss", "policy", "kl", "entropy" and "teacher".

    The denominators are those of the whole mini-batch."""
    values = {
        name: torch.zeros((), dtype=torch.float64)
        for name in ("policy", "kl", "entropy", "teacher")
    }
    sizes = dict.fromkeys(values, 0.0)
    for sequence in sequences:
        counted = sequence.counts.nonzero()[:, 0].to(sequence.logprobs.device)
        if not len(counted):
            continue
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (num_sequences * len(counted)),
            "constant": 1 / (num_sequences * max_completion_tokens),
        }[loss.aggregation]
        logprobs = sequence.logprobs[counted]
        old = sequence.old[counted]
        advantages = [sequence.advantage] * len(counted)
        if sequence.teacher_penalty is not None:
            penalties = sequence.teacher_penalty[counted].tolist()
            advantages = [sequence.advantage - penalty for penalty in penalties]
        correction = _correction(old - sequence.engine[counted], loss)
        terms = {
            "policy": -_objective(logprobs, old, advantages, loss) * correction,
            "entropy": sequence.entropy[counted],
        }
        if sequence.ref is not None:
            terms["kl"] = _kl(logprobs, sequence.ref[counted], loss.kl_estimator)
        if sequence.divergence is not None:
            terms["teacher"] = teacher_coef * sequence.divergence[counted]
        for name, term in terms.items():
            values[name] = values[name].to(term.device) + weight * term.sum()
            sizes[name] += weight * float(term.detach().abs().sum())
    kl_coef = loss.kl_coef if loss.kl_in == "loss" else 0.0
    total = (
        values["policy"]
        + kl_coef * values["kl"]
        - loss.entropy_coef * values["entropy"]
        + values["teacher"]
    )
    size = (
        sizes["policy"]
        + kl_coef * sizes["kl"]
        + loss.entropy_coef * sizes["entropy"]
        + sizes["teacher"]
    )
    return {
        "loss": LossTerm(total, size),
        **{name: LossTerm(value, sizes[name]) for name, value in values.items()},
    }


def _objective(p: Tensor, old: Tensor, advantages: Sequence[float], loss: LossConfig) -> Tensor:
    """Returns what is maximised at each token of one sequence."""
    low = 1 - loss.clip_ratio_low
    high = 1 + loss.clip_ratio_high
    ratio = (p - old).exp()
    if loss.policy == "cispo":  # the clipped ratio is a constant factor of the logprob
        factors = [
            advantage * min(max(value, low), high)
            for advantage, value in zip(advantages, ratio.tolist(), strict=True)
        ]
        return torch.tensor(factors, dtype=p.dtype, device=p.device) * p
    if loss.policy == "gspo":  # one ratio a sequence; each token has its part of the gradient
        ratio = (p - p.detach() + (p - old).mean().detach()).exp()
    pieces = []
    for advantage, token_ratio in zip(advantages, ratio, strict=True):
        value = float(token_ratio.detach())
        piece = advantage * token_ratio
        # A clipped piece is a constant: 0 * ratio keeps it in the graph.
        if (advantage > 0 and value > high) or (advantage < 0 and value < low):
            piece = advantage * (high if value > high else low) + 0 * token_ratio
        if loss.dual_clip is not None and advantage < 0 and value > loss.dual_clip:
            piece = advantage * loss.dual_clip + 0 * token_ratio
        pieces.append(piece)
    return torch.stack(pieces)


def _correction(log_ratio: Tensor, loss: LossConfig) -> Tensor:
    """Returns the weight of each token for the mismatch of policy and engine.

    `log_ratio` is the policy's logprobs minus the engine's."""
    cap = loss.rollout_correction_cap
    ratios = [math.exp(x) for x in log_ratio.tolist()]
    weights = {
        "none": [1.0] * len(ratios),
        "token_tis": [min(ratio, cap) for ratio in ratios],
        "sequence_tis": [min(math.prod(ratios), cap)] * len(ratios),
        "icepop": [ratio if 1 / cap <= ratio <= cap else 0.0 for ratio in ratios],
    }[loss.rollout_correction]
    return torch.tensor(weights, dtype=torch.float64, device=log_ratio.device)


def _kl(p: Tensor, ref: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return p - ref
    if estimator == "k2":
        return (p - ref) ** 2 / 2
    return (ref - p).exp() - 1 - (ref - p)
