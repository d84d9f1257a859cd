"""The loss written out from its papers, a sequence at a time and in float64: what losses.py must come to. Nothing of it
is imported here, and nothing is fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig


@dataclass(frozen=True)
class PlainSequence:
    """One completion of n tokens: tensors [n], float64; `logprobs` and `entropy` with their graph."""

    advantage: float
    counts: Tensor  # bool
    logprobs: Tensor
    entropy: Tensor
    old: Tensor
    engine: Tensor
    ref: Tensor | None
    taken: Tensor | None = None  # off the advantage of each token, by a teacher
    divergence: Tensor | None = None  # from a teacher, with its graph


def plain_terms(
    sequences: Sequence[PlainSequence],
    loss: LossConfig,
    num_tokens: int,
    num_sequences: int,
    longest: int,
    teacher_coef: float = 0.0,
) -> dict[str, tuple[Tensor, float]]:
    """The weighted sums "loss", "policy", "kl", "entropy" and "teacher", each with the sum of its terms' sizes, by
    which a difference is to be judged. The denominators are of the whole mini-batch."""
    sums = {
        name: torch.zeros((), dtype=torch.float64)
        for name in ("policy", "kl", "entropy", "teacher")
    }
    sizes = dict.fromkeys(sums, 0.0)
    for sequence in sequences:
        kept = sequence.counts.nonzero()[:, 0].to(sequence.logprobs.device)
        if not len(kept):
            continue
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (num_sequences * len(kept)),
            "constant": 1 / (num_sequences * longest),
        }[loss.aggregation]
        p, entropy, old, engine = (
            x[kept] for x in (sequence.logprobs, sequence.entropy, sequence.old, sequence.engine)
        )
        taken = [0.0] * len(kept) if sequence.taken is None else sequence.taken[kept].tolist()
        advantages = [sequence.advantage - of_token for of_token in taken]
        terms = {"policy": -_objective(p, old, advantages, loss) * _factor(old - engine, loss)}
        terms["entropy"] = entropy
        if sequence.ref is not None:
            terms["kl"] = _kl(p, sequence.ref[kept], loss.kl_estimator)
        if sequence.divergence is not None:
            terms["teacher"] = teacher_coef * sequence.divergence[kept]
        for name, term in terms.items():
            sums[name] = sums[name].to(term.device) + weight * term.sum()
            sizes[name] += weight * float(term.detach().abs().sum())
    kl_coef = loss.kl_coef if loss.kl_in == "loss" else 0.0
    total = (
        sums["policy"]
        + kl_coef * sums["kl"]
        - loss.entropy_coef * sums["entropy"]
        + sums["teacher"]
    )
    size = (
        sizes["policy"]
        + kl_coef * sizes["kl"]
        + loss.entropy_coef * sizes["entropy"]
        + sizes["teacher"]
    )
    return {"loss": (total, size), **{name: (sums[name], sizes[name]) for name in sums}}


def _objective(p: Tensor, old: Tensor, advantages: Sequence[float], loss: LossConfig) -> Tensor:
    """What is maximised at each token of one sequence."""
    low, high = 1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high
    if loss.policy == "cispo":  # the clipped ratio is a constant factor of the logprob
        factors = [
            a * min(max(r, low), high)
            for a, r in zip(advantages, (p - old).exp().tolist(), strict=True)
        ]
        return torch.tensor(factors, dtype=p.dtype, device=p.device) * p
    ratio = (p - old).exp()
    if (
        loss.policy == "gspo"
    ):  # one ratio for the sequence; each token has its own share of the gradient
        ratio = (p - p.detach() + (p - old).mean().detach()).exp()
    pieces = []
    for advantage, r in zip(advantages, ratio, strict=True):
        value = float(r.detach())
        clipped = (advantage > 0 and value > high) or (advantage < 0 and value < low)
        piece = advantage * (high if value > high else low) + 0 * r if clipped else advantage * r
        if loss.dual_clip is not None and advantage < 0 and value > loss.dual_clip:
            piece = advantage * loss.dual_clip + 0 * r
        pieces.append(piece)
    return torch.stack(pieces)


def _factor(log_ratio: Tensor, loss: LossConfig) -> Tensor:
    """The weight of each token for the difference of policy and engine; `log_ratio` is policy less engine."""
    cap, ratios = loss.rollout_correction_cap, [math.exp(x) for x in log_ratio.tolist()]
    weights = {
        "none": [1.0] * len(ratios),
        "token_tis": [min(r, cap) for r in ratios],
        "sequence_tis": [min(math.prod(ratios), cap)] * len(ratios),
        "icepop": [r if 1 / cap <= r <= cap else 0.0 for r in ratios],
    }[loss.rollout_correction]
    return torch.tensor(weights, dtype=torch.float64, device=log_ratio.device)


def _kl(p: Tensor, ref: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return p - ref
    if estimator == "k2":
        return (p - ref) ** 2 / 2
    return (ref - p).exp() - 1 - (ref - p)
