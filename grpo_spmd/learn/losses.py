"""The losses as pure functions of logprobs, masks, advantages and denominators. They return a
scalar and the numbers for the metrics.

Every loss is a weighted sum over tokens. The weights (`aggregation_weights`) contain the
denominators, which count over the whole mini-batch on all ranks: the parts of micro-batches add up
to the same loss and gradient however the mini-batch is split.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.reductions import Histogram, Max, Mean, Reductions, Sum
from grpo_spmd.records import TeacherSignal

T = TypeVar("T", float, Tensor)
# One value for each of the C completion tokens of a micro-batch, which holds whole rollouts.
PerToken = Float[Tensor, " C"]
Mask = Bool[Tensor, " C"]
# The index of the rollout that a token belongs to, within its micro-batch.
Index = Int[Tensor, " C"]
# Log ratios d are binned by asinh(d / _HIST_SCALE): even steps of 5 % above the scale, steps of
# 5e-5 nats below it.
_HIST_SCALE, _HIST_LIMIT, _HIST_BINS = 1e-3, 10.0, 401
# The metrics from which proofs/logprob_check.py computes the tilt: the slope of (the policy's
# logprob - the engine's) over (logprob + entropy) of the tokens; see mismatch_sums.
TILT_SUMS = ("tilt_products", "tilt_squares", "tilt_squared_products")


@dataclass(frozen=True)
class LossInputs:
    """The inputs of the policy loss for one micro-batch: one value for each of its C completion
    tokens in every field."""

    logprobs: PerToken
    """The logprobs of the policy that trains, with their autograd graph."""
    entropy: PerToken
    """The entropies of the policy's distributions, with their autograd graph."""
    old_logprobs: PerToken
    """The logprobs of the policy before the update, without a graph. With `loss.old_logprobs:
    engine` they are the engine's."""
    ref_logprobs: PerToken | None
    """The reference's logprobs. None: the loss has no KL term."""
    advantages: PerToken
    loss_mask: Mask
    """True where a token counts in the loss."""
    sequence_index: Index
    weights: PerToken
    """The weights of the tokens in the loss, from `aggregation_weights`."""
    correction: PerToken | None = None
    """Factors of the policy terms, from `rollout_correction`. None: 1."""


def policy_loss(inputs: LossInputs, options: LossConfig) -> tuple[Float[Tensor, ""], Reductions]:
    """Returns (the amount [] that a micro-batch adds to the loss of its mini-batch, its metrics).

    The metrics, detached, are the sums "loss", "policy", "kl" and "entropy", weighted as in the
    loss, "loss_tokens", and means over tokens under their metric keys.

    `options.policy` is "clip" (PPO, Schulman et al. 2017; dual clip, Ye et al. 2020), "gspo" (Zheng
    et al. 2025: the ratio is the geometric mean over the sequence) or "cispo" (MiniMax-M1, 2025:
    the clipped ratio is a constant factor of the logprob's gradient).
    """
    mask = inputs.loss_mask
    correction = inputs.correction
    # Masked tokens may have any value, also NaN or inf, and 0 * NaN is NaN: their values must be
    # replaced before the arithmetic, not multiplied by 0 after it.
    zero = torch.zeros((), dtype=inputs.logprobs.dtype, device=mask.device)

    def counted(values: PerToken) -> PerToken:
        """Returns the values with 0 in place of those of masked tokens."""
        return torch.where(mask, values, zero)

    logprobs = counted(inputs.logprobs)
    # Without an entropy bonus the entropy is detached: a gradient of zeros would still cost the
    # time of its backward pass.
    entropy = counted(inputs.entropy if options.entropy_coef else inputs.entropy.detach())
    log_ratio = logprobs - counted(inputs.old_logprobs)
    if options.policy == "gspo":
        index = inputs.sequence_index
        mean = _sequence_mean(log_ratio.detach(), mask, index)[index]
        # Each token has the value of its sequence's mean and the gradient of its own logprob; with
        # weights of 1/length that is the gradient of the geometric mean. The brackets keep the
        # value exact: GSPO clips at about 1 +- 1e-4, and (mean + logprob) - logprob would be off by
        # the rounding of the logprob.
        log_ratio = counted(mean + (logprobs - logprobs.detach()))
    per_token, clipped = _policy_terms(logprobs, log_ratio, counted(inputs.advantages), options)
    if correction is not None:
        per_token = per_token * counted(correction)
    # Sums in float64: terms of both signs nearly cancel, and in float32 the result would depend on
    # the order of the tokens.
    weights = torch.where(mask, inputs.weights, 0.0).double()
    policy_sum = (weights * per_token.double()).sum()
    entropy_sum = (weights * entropy.double()).sum()
    kl_sum = torch.zeros_like(policy_sum)
    if inputs.ref_logprobs is not None:
        kl = kl_estimate(logprobs, counted(inputs.ref_logprobs), options.kl_estimator)
        kl_sum = (weights * kl.double()).sum()
    total = total_loss(policy_sum, kl_sum, entropy_sum, options)
    num_tokens = mask.sum()
    metrics: Reductions = {
        "loss": Sum(total.detach()),
        "policy": Sum(policy_sum.detach()),
        "kl": Sum(kl_sum.detach()),
        "entropy": Sum(entropy_sum.detach()),
        "loss_tokens": Sum(num_tokens),
        "loss/clip_frac": Mean((mask & clipped).sum(), num_tokens),
    }
    if correction is not None:
        is_capped = mask & ((correction >= options.rollout_correction_cap) | (correction == 0))
        correction_sum = torch.where(mask, correction, 0.0).double().sum()
        metrics["rollout_correction/weight_mean"] = Mean(correction_sum, num_tokens)
        metrics["rollout_correction/capped_frac"] = Mean(is_capped.sum(), num_tokens)
    return total, metrics


def _policy_terms(
    logprobs: PerToken, log_ratio: PerToken, advantages: PerToken, options: LossConfig
) -> tuple[PerToken, Mask]:
    """Returns (the policy term of the loss at each token, a mask of the clipped tokens)."""
    # A ratio beyond e^20 can only be a fault. Without the clamp exp may overflow, and its gradient
    # would be inf * 0 = NaN.
    ratio = torch.exp(log_ratio.clamp(-20.0, 20.0))
    clipped_ratio = ratio.clamp(1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high)
    if options.policy == "cispo":
        return -advantages * clipped_ratio.detach() * logprobs, clipped_ratio != ratio
    per_token = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if options.dual_clip is not None:
        # Dual clip: with a negative advantage the term would grow with the ratio without bound.
        bounded = torch.minimum(per_token, -advantages * options.dual_clip)
        per_token = torch.where(advantages < 0, bounded, per_token)
    return per_token, per_token != -advantages * ratio


def total_loss(policy: T, kl: T, entropy: T, options: LossConfig) -> T:
    """Returns the loss, given the weighted sums of its terms over tokens."""
    kl_coef = options.kl_coef if options.kl_in == "loss" else 0.0
    total: T = policy + kl_coef * kl - options.entropy_coef * entropy
    return total


def aggregation_weights(
    mode: str,
    mask: Mask,
    index: Index,
    num_loss_tokens: int,
    num_loss_sequences: int,
    max_completion_tokens: int,
) -> PerToken:
    """Returns the weight of each token in the loss, float64; 0 where `mask` is False.

    "token": 1 / tokens (DAPO). "sequence": 1 / (sequences * tokens of this sequence) (the papers of
    GRPO and GSPO). "constant": 1 / (sequences * max_completion_tokens), so that no length is
    favoured (Dr. GRPO). `num_loss_tokens` and `num_loss_sequences` (those with a token that counts)
    are those of the whole mini-batch on all ranks.
    """
    counts = mask.double()
    if mode == "token":
        return counts / max(num_loss_tokens, 1)
    if mode == "constant":
        return counts / (max(num_loss_sequences, 1) * max_completion_tokens)
    assert mode == "sequence", mode
    lengths = _sequence_sum(counts, index)
    return counts / (lengths.clamp(min=1)[index] * max(num_loss_sequences, 1))


def rollout_correction(
    mode: str,
    cap: float,
    policy_logprobs: PerToken,
    rollout_logprobs: PerToken,
    mask: Mask,
    index: Index,
) -> PerToken | None:
    """Returns importance weights, without a graph, that correct for the difference between the
    engine that sampled the tokens and the policy that trains on them. None for mode "none".

    With r = p(policy before the update) / p(engine) of a token, "token_tis" is min(r, cap)
    (truncated importance sampling, Yao et al. 2025), "sequence_tis" is min(product of r over the
    sequence, cap), and "icepop" is r if it lies in [1/cap, cap], else 0 (Ring-1T, 2025, with one
    bound for two). The weights of masked tokens are finite and mean nothing.
    """
    if mode == "none":
        return None
    log_ratio = torch.where(mask, policy_logprobs.detach() - rollout_logprobs, 0.0)
    if mode == "sequence_tis":
        log_ratio = _sequence_sum(log_ratio.double(), index)[index].to(log_ratio.dtype)
    ratio = torch.exp(log_ratio.clamp(-20.0, 20.0))
    if mode == "icepop":
        return torch.where((ratio >= 1.0 / cap) & (ratio <= cap), ratio, 0.0)
    assert mode in ("token_tis", "sequence_tis"), mode
    return ratio.clamp(max=cap)


def kl_estimate(logprobs: PerToken, ref_logprobs: PerToken, estimator: str) -> PerToken:
    """Returns estimates of KL(policy || reference) on tokens drawn from the policy (Schulman,
    "Approximating KL divergence").

    "k1": log p - log r, unbiased, may be negative; as a loss on fresh samples its expected gradient
    is 0. "k2": half its square, biased, with the gradient of the KL. "k3": r/p - 1 - log(r/p),
    unbiased and never negative.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def mismatch_sums(
    logprobs: PerToken, rollout_logprobs: PerToken, loss_mask: Mask, entropy: PerToken | None = None
) -> Reductions:
    """Returns metrics of how far the engine's logprobs are from the policy's on the sampled tokens.

    "weight_sync/mismatch_kl" is the k3 estimate of KL(engine || policy), whose summands are never
    negative and so cannot cancel; with equal weights it is rounding noise. "mismatch_ratios" [401]
    counts tokens by their log ratio, for `ratio_percentiles`. If `entropy` is given, TILT_SUMS are
    the sums of a d, a^2 and (a d)^2 for the slope of d over a, where d is the policy's logprob
    minus the engine's, and a is the mean of both logprobs plus the entropy.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    # In float64: expm1(d) - d loses all its digits where |d| is near the rounding of float32.
    difference = torch.where(loss_mask, logprobs.detach() - rollout_logprobs, zero).double()
    # NaN would have no bin, and is counted in the last one. An index out of range would raise here
    # (on a GPU it would break the CUDA context), but the update is only to be skipped.
    scaled = torch.asinh(difference / _HIST_SCALE).nan_to_num(nan=_HIST_LIMIT)
    scaled = scaled.clamp(-_HIST_LIMIT, _HIST_LIMIT)
    bins = ((scaled + _HIST_LIMIT) / (2 * _HIST_LIMIT) * (_HIST_BINS - 1)).round().long()
    histogram = torch.zeros(_HIST_BINS, dtype=torch.float64, device=bins.device)
    num_tokens = loss_mask.sum()
    size = difference.abs()
    tilt: Reductions = {}
    if entropy is not None:
        surprise = (logprobs + rollout_logprobs).detach() / 2 + entropy.detach()
        surprise = torch.where(loss_mask, surprise, zero).double()
        product = surprise * difference
        sums = (product.sum(), surprise.square().sum(), product.square().sum())
        tilt = {name: Sum(total) for name, total in zip(TILT_SUMS, sums, strict=True)}
    return tilt | {
        "weight_sync/mismatch_kl": Mean((torch.expm1(difference) - difference).sum(), num_tokens),
        "weight_sync/mismatch_abs_mean": Mean(size.sum(), num_tokens),
        "weight_sync/mismatch_abs_max": Max(size.max() if len(size) else zero.double()),
        "mismatch_ratios": Histogram(histogram.index_add_(0, bins, loss_mask.double())),
    }


def ratio_percentiles(histogram: list[float], percents: tuple[int, ...]) -> list[float | None]:
    """Returns percentiles of the ratio policy / engine from the histogram "mismatch_ratios"; None
    for each if it is empty."""
    counts = torch.tensor(histogram, dtype=torch.float64)
    if not counts.sum():
        return [None for _ in percents]
    centers = torch.linspace(-_HIST_LIMIT, _HIST_LIMIT, _HIST_BINS, dtype=torch.float64)
    ratios = torch.exp(torch.sinh(centers) * _HIST_SCALE)
    cumulative = counts.cumsum(0) / counts.sum()
    indices = [int((cumulative < p / 100).sum().clamp(max=_HIST_BINS - 1)) for p in percents]
    return [float(ratios[index]) for index in indices]


def _sequence_sum(values: PerToken, sequence_index: Index) -> PerToken:
    """Returns a tensor [C] that has the sum of `values` over sequence s at index s, and 0 at the
    indices beyond the last sequence."""
    # There are at most C sequences; computing their number from the index would wait for the GPU.
    return torch.zeros_like(values).index_add_(0, sequence_index, values)


def _sequence_mean(values: PerToken, loss_mask: Mask, sequence_index: Index) -> PerToken:
    """Returns a tensor [C] that has the mean of `values` over the counted tokens of sequence s at
    index s, and 0 at the indices beyond the last sequence."""
    total = _sequence_sum(torch.where(loss_mask, values, 0.0).double(), sequence_index)
    count = _sequence_sum(loss_mask.double(), sequence_index)
    return (total / count.clamp(min=1)).to(values.dtype)


def taught_loss(
    inputs: LossInputs,
    options: LossConfig,
    signal: TeacherSignal,
    divergence: PerToken | None = None,
) -> tuple[Tensor, Reductions]:
    """Returns the loss and metrics of `policy_loss`, with the teacher's signal added to the loss.

    If the signal is logprobs, A_t - coef * (log pi_old - log pi_teacher) takes the place of the
    advantage at each sampled token. On average over samples that gives the gradient of coef *
    KL(policy || teacher) of that token (Thinking Machines, "On-Policy Distillation", 2025). If the
    signal is a divergence, `divergence` [C] is its value, and coef times the value is added to the
    loss, weighted as the policy's term is.
    """
    mask = inputs.loss_mask
    # Tokens for which the teacher's server gave no answer are left out.
    if signal.answered_mask is not None:
        mask = mask & signal.answered_mask
    if divergence is None:
        assert signal.logprobs is not None
        kl = torch.where(mask, inputs.old_logprobs.detach() - signal.logprobs, 0.0)
        inputs = dataclasses.replace(inputs, advantages=inputs.advantages - signal.coef * kl)
        total, metrics = policy_loss(inputs, options)
    else:
        kl = torch.where(mask, divergence, 0.0)
        weights = torch.where(mask, inputs.weights, 0.0).double()
        term = signal.coef * (weights * kl.double()).sum()
        total, metrics = policy_loss(inputs, options)
        total = total + term
        metrics |= {"loss": Sum(total.detach()), "teacher": Sum(term.detach())}
    # The mean KL over all taught tokens, and over those of each teacher if there are several.
    masks = {"teacher/kl": mask}
    for name, teacher_mask in signal.masks_by_teacher.items():
        masks[f"teacher/{name}/kl"] = mask & teacher_mask
    for name, counted in masks.items():
        total_kl = torch.where(counted, kl.detach(), 0.0).double().sum()
        metrics[name] = Mean(total_kl, counted.sum())
    return total, metrics
