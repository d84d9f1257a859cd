"""The GRPO loss. Pure: logprobs, masks, advantages and a denominator in; a scalar and metric sums out."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def policy_loss(
    logprobs: Float[Tensor, " C"],
    entropy: Float[Tensor, " C"],
    old_logprobs: Float[Tensor, " C"],
    ref_logprobs: Float[Tensor, " C"] | None,
    advantages: Float[Tensor, " C"],
    loss_mask: Bool[Tensor, " C"],
    *,
    num_loss_tokens: int,
    clip_ratio_low: float,
    clip_ratio_high: float,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """This micro-batch's share of the loss of its mini-batch.

    Denominator contract: the sum over tokens with `loss_mask` True, divided by `num_loss_tokens`, which counts those tokens over
    the whole mini-batch on all ranks. Shares therefore add up to the same loss and gradient however the mini-batch is split.

    Returns:
        The share, and sums over tokens for the metrics ("policy", "kl", "entropy", "clipped"), detached and not divided.
    """
    # Masked places may hold anything, also NaN or inf, and 0 * NaN is NaN: choose before the arithmetic, not after.
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    logprobs = torch.where(loss_mask, logprobs, zero)
    entropy = torch.where(loss_mask, entropy, zero)
    old_logprobs = torch.where(loss_mask, old_logprobs, zero)
    advantages = torch.where(loss_mask, advantages, zero)

    # Beyond e^20 a ratio is an accident, and where exp overflows its gradient would be inf * 0 = NaN.
    ratio = torch.exp((logprobs - old_logprobs).clamp(-20.0, 20.0))
    clipped_ratio = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
    per_token = torch.maximum(unclipped, clipped)

    # Sums in float64: advantages of both signs nearly cancel, and a float32 sum would show in which order tokens were added.
    policy_sum, entropy_sum = per_token.double().sum(), entropy.double().sum()
    kl_sum = torch.zeros_like(policy_sum)
    if ref_logprobs is not None:
        kl_sum = kl_estimate(logprobs, torch.where(loss_mask, ref_logprobs, zero), kl_estimator).double().sum()
    total = policy_sum + kl_coef * kl_sum - entropy_coef * entropy_sum
    sums = {
        "policy": policy_sum.detach(),
        "kl": kl_sum.detach(),
        "entropy": entropy_sum.detach(),
        "clipped": (clipped > unclipped).sum(),
    }
    return total / max(num_loss_tokens, 1), sums


def kl_estimate(logprobs: Float[Tensor, " C"], ref_logprobs: Float[Tensor, " C"], estimator: str) -> Float[Tensor, " C"]:
    """Per-token estimates of KL(policy || reference) on tokens drawn from the policy (Schulman, "Approximating KL divergence").

    "k1": log p - log r, unbiased, may be negative; as a loss on fresh samples its expected gradient is 0. "k2": half its square,
    biased, whose gradient is the KL's. "k3": r/p - 1 - log(r/p), unbiased and never negative.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def mismatch_sums(logprobs: Float[Tensor, " C"], rollout_logprobs: Float[Tensor, " C"], loss_mask: Bool[Tensor, " C"]) -> dict[str, Tensor]:
    """How far the engine that sampled is from the policy that trains, on the sampled tokens: sums, and the largest absolute difference.

    "mismatch_kl" sums the k3 estimate of KL(engine || policy), which cannot cancel; with the same weights it is rounding alone.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    difference = torch.where(loss_mask, logprobs.detach() - rollout_logprobs, zero)
    # expm1(d) - d loses all its digits where |d| is near the rounding of float32; in float64 it does not.
    difference = difference.double()
    return {
        "mismatch_kl": (torch.expm1(difference) - difference).sum(),
        "mismatch_abs": difference.abs().sum(),
        "max:mismatch_abs": difference.abs().max() if len(difference) else zero.double(),
    }
