"""Computes the loss plainly, as its papers write it: one sequence at a time and in float64.

learn/losses.py must give the same numbers. Nothing is imported from there, so that both cannot
have the same fault, and nothing is made fast. The sources are named in losses.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig


class LossTerm(NamedTuple):
    """A term is a weighted sum over the tokens that count."""

    value: Tensor
    """[] The sum, with its graph."""
    size: float
    """The sum of the summands' absolute values. Differences are relative to it."""


@dataclass(frozen=True)
class PlainSequence:
    """One completion of n tokens. Its tensors are float64 [n], but for `counts`."""

    advantage: float
    """One advantage for all tokens."""
    counts: Tensor
    """bool [n]: True if the token counts in the loss."""
    logprobs: Tensor
    """The policy's logprobs, with their graph."""
    entropy: Tensor
    """The entropy of the policy's distribution at each token, with its graph."""
    old: Tensor
    """The policy's logprobs before the update."""
    engine: Tensor
    """The engine's logprobs."""
    ref: Tensor | None = None
    """The reference's logprobs. None: the loss has no KL term."""
    teacher_penalty: Tensor | None = None
    """The amount that a teacher subtracts from the advantage of each token. None: 0."""
    divergence: Tensor | None = None
    """The divergence from a teacher at each token, with its graph. None: the loss has none."""


def plain_terms(
    sequences: Sequence[PlainSequence],
    loss: LossConfig,
    num_tokens: int,
    num_sequences: int,
    max_completion_tokens: int,
    teacher_coef: float = 0.0,
) -> dict[str, LossTerm]:
    """Returns the terms "loss", "policy", "kl", "entropy" and "teacher"; "loss" is the total.

    `num_tokens` and `num_sequences` count over the mini-batch on all ranks; they are the
    denominators of `loss.aggregation`. `max_completion_tokens` is that of "constant".
    `teacher_coef` is the weight of the divergence."""
    values = {
        name: torch.zeros((), dtype=torch.float64)
        for name in ("policy", "kl", "entropy", "teacher")
    }
    sizes = dict.fromkeys(values, 0.0)
    for sequence in sequences:
        # Masked tokens are left out instead of multiplied by 0: their logprobs may be NaN.
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
            terms["kl"] = plain_kl(logprobs, sequence.ref[counted], loss.kl_estimator)
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
    """Returns the objective [n], which is maximised, at each token of one sequence. `p` are the
    policy's logprobs."""
    low = 1 - loss.clip_ratio_low
    high = 1 + loss.clip_ratio_high
    ratio = (p - old).exp()
    # cispo: the clipped ratio is a constant factor of the logprob.
    if loss.policy == "cispo":
        factors = [
            advantage * min(max(value, low), high)
            for advantage, value in zip(advantages, ratio.tolist(), strict=True)
        ]
        return torch.tensor(factors, dtype=p.dtype, device=p.device) * p
    # gspo: the sequence has one ratio, and each token has its part of the gradient.
    if loss.policy == "gspo":
        ratio = (p - p.detach() + (p - old).mean().detach()).exp()
    objectives = []
    for advantage, token_ratio in zip(advantages, ratio, strict=True):
        value = float(token_ratio.detach())
        objective = advantage * token_ratio
        # A clipped objective is a constant: 0 * ratio keeps it in the graph.
        if (advantage > 0 and value > high) or (advantage < 0 and value < low):
            objective = advantage * (high if value > high else low) + 0 * token_ratio
        # Dual clip bounds the objective where the ratio of a bad token grows (Ye et al. 2020).
        if loss.dual_clip is not None and advantage < 0 and value > loss.dual_clip:
            objective = advantage * loss.dual_clip + 0 * token_ratio
        objectives.append(objective)
    return torch.stack(objectives)


def _correction(log_ratio: Tensor, loss: LossConfig) -> Tensor:
    """Returns the weight [n] of each token that corrects the mismatch of policy and engine.

    `log_ratio` [n] is the policy's old logprobs minus the engine's."""
    cap = loss.rollout_correction_cap
    ratios = [math.exp(x) for x in log_ratio.tolist()]
    weights = {
        "none": [1.0] * len(ratios),
        "token_tis": [min(ratio, cap) for ratio in ratios],
        "sequence_tis": [min(math.prod(ratios), cap)] * len(ratios),
        "icepop": [ratio if 1 / cap <= ratio <= cap else 0.0 for ratio in ratios],
    }[loss.rollout_correction]
    return torch.tensor(weights, dtype=torch.float64, device=log_ratio.device)


def plain_kl(p: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Returns the estimate [n] of KL(policy || reference) at each token, from logprobs [n]."""
    return {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}[
        estimator
    ]
