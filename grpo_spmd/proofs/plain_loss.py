"""Computes the loss plainly, as its papers write it: one sequence at a time and in float64.

learn/losses.py must give the same numbers. This module imports nothing from there, so that both
cannot share a fault, and makes no attempt to be fast. losses.py names the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.records import Rollout


class LossTerm(NamedTuple):
    """One term of the loss: a weighted sum over the tokens that count."""

    value: Tensor
    """[] The sum, with its graph."""
    size: float
    """The sum of the summands' absolute values. Differences are relative to it."""


def plain_terms(
    rollouts: Sequence[Rollout],
    columns: Mapping[str, Tensor],
    loss: LossConfig,
    *,
    num_tokens: int,
    num_sequences: int,
    max_completion_tokens: int,
    teacher_coef: float = 0.0,
) -> dict[str, LossTerm]:
    """Returns the terms "loss", "policy", "kl", "entropy" and "teacher"; "loss" is the total.

    Each rollout must have one advantage for all its tokens. `columns` are float64 [tokens] over the
    completion tokens of all rollouts: "logprobs" and "entropy" (the policy's, with their graph),
    "old" (its logprobs before the update), "engine" (the engine's logprobs), and "ref" (the
    reference's logprobs) if the loss has a KL term. With a teacher there is also "teacher_penalty",
    which is subtracted from each token's advantage, or "divergence" with its graph, which is
    weighted by `teacher_coef`.

    `num_tokens` and `num_sequences` count over the mini-batch on all ranks; they are the
    denominators of `loss.aggregation`, together with `max_completion_tokens` for "constant"."""
    coefs = {
        "policy": 1.0,
        "kl": loss.kl_coef if loss.kl_in == "loss" else 0.0,
        "entropy": -loss.entropy_coef,
        "teacher": 1.0,
    }
    values = {name: torch.zeros((), dtype=torch.float64) for name in coefs}
    sizes = dict.fromkeys(coefs, 0.0)
    begin = 0
    for rollout in rollouts:
        # Masked tokens are left out instead of multiplied by 0: their logprobs may be NaN.
        counted = begin + np.flatnonzero(rollout.loss_mask)
        begin += len(rollout.completion_ids)
        if not len(counted):
            continue
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (num_sequences * len(counted)),
            "constant": 1 / (num_sequences * max_completion_tokens),
        }[loss.aggregation]
        token = {name: column[counted] for name, column in columns.items()}
        penalty = token.get("teacher_penalty", torch.zeros_like(token["old"]))
        advantages = cast(float, rollout.advantages) - penalty
        objective = _objective(token["logprobs"], token["old"], advantages, loss)
        terms = {
            "policy": -objective * _correction(token["old"] - token["engine"], loss),
            "entropy": token["entropy"],
        }
        if "ref" in token:
            terms["kl"] = plain_kl(token["logprobs"], token["ref"], loss.kl_estimator)
        if "divergence" in token:
            terms["teacher"] = teacher_coef * token["divergence"]
        for name, term in terms.items():
            values[name] = values[name].to(term.device) + weight * term.sum()
            sizes[name] += weight * float(term.detach().abs().sum())
    total = sum((coef * values[name] for name, coef in coefs.items()), values["policy"] * 0.0)
    size = sum(abs(coef) * sizes[name] for name, coef in coefs.items())
    terms_by_name = {name: LossTerm(value, sizes[name]) for name, value in values.items()}
    return {"loss": LossTerm(total, size), **terms_by_name}


def _objective(p: Tensor, old: Tensor, advantages: Tensor, loss: LossConfig) -> Tensor:
    """Returns the objective [n], which is maximised, at each token of one sequence. `p` and `old`
    are the policy's logprobs now and before the update."""
    low = 1 - loss.clip_ratio_low
    high = 1 + loss.clip_ratio_high
    ratio = (p - old).exp()
    # cispo: the clipped ratio is a constant factor of the logprob.
    if loss.policy == "cispo":
        return advantages * ratio.detach().clamp(low, high) * p
    # gspo: all tokens have the ratio of the sequence, and each its own part of the gradient.
    if loss.policy == "gspo":
        ratio = (p - p.detach() + (p - old).mean().detach()).exp()
    value = ratio.detach()
    objective = advantages * ratio
    # A clipped objective is a constant and has no gradient.
    objective = torch.where((advantages > 0) & (value > high), advantages * high, objective)
    objective = torch.where((advantages < 0) & (value < low), advantages * low, objective)
    # Dual clip bounds the objective where the ratio of a bad token grows (Ye et al. 2020).
    if loss.dual_clip is not None:
        is_bounded = (advantages < 0) & (value > loss.dual_clip)
        objective = torch.where(is_bounded, advantages * loss.dual_clip, objective)
    return objective


def _correction(log_ratio: Tensor, loss: LossConfig) -> Tensor:
    """Returns the importance weights [n] of the tokens of one completion, or [] one for all
    (sequence_tis). They correct for the mismatch between policy and engine.

    `log_ratio` [n] is the policy's old logprobs minus the engine's."""
    cap = loss.rollout_correction_cap
    ratios = log_ratio.exp()
    return {
        "none": torch.ones_like(ratios),
        "token_tis": ratios.clamp(max=cap),
        "sequence_tis": ratios.prod().clamp(max=cap),
        "icepop": torch.where((1 / cap <= ratios) & (ratios <= cap), ratios, 0.0),
    }[loss.rollout_correction]


def plain_kl(p: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Returns the estimate [n] of KL(policy || reference) at each token, from logprobs [n]."""
    return {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}[
        estimator
    ]
