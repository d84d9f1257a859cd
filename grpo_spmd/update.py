"""One policy update over a step's rollouts, and the logprobs that it needs beforehand."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config import LossConfig
from grpo_spmd.data_types import MicroBatch, RolloutBatch
from grpo_spmd.loss import mismatch_sums, policy_loss
from grpo_spmd.policy import Policy

Sums = dict[str, float]


@torch.no_grad()
def attach_logprobs(policy: Policy, reference: Policy | None, batch: RolloutBatch) -> None:
    """Collective. Fill `old_logprobs` and `ref_logprobs` of every micro-batch where the loss needs them.

    With one optimizer step a rollout the policy that trains is the one that sampled, so that old logprobs are the ones of the update
    itself and no pass is made for them.
    """
    for micro_batch in _micro_batches(batch):
        if len(batch.mini_batches) > 1:
            micro_batch.old_logprobs, _ = policy(micro_batch)
        if reference is not None:
            micro_batch.ref_logprobs, _ = reference(micro_batch)


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batch: RolloutBatch,
    config: LossConfig,
    max_grad_norm: float,
) -> Sums:
    """Collective. One optimizer step for each mini-batch; returns this rank's sums for the metrics.

    Gradients are sums over ranks of token sums over one global denominator, so they do not depend on how rollouts were split over
    ranks and micro-batches. The keys of the result: token sums "policy", "kl", "entropy", "clipped", "mismatch_kl" with
    "loss_tokens" as their denominator; "max:mismatch_abs"; "max:grad_norm" (before clipping) and "max:lr", over mini-batches.
    """
    sums: dict[str, Tensor] = {}
    for mini_batch, num_loss_tokens in zip(batch.mini_batches, batch.num_loss_tokens, strict=True):
        for micro_batch in mini_batch:
            _accumulate(sums, _backward(policy, micro_batch, num_loss_tokens, config))
        sharded_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        assert isinstance(sharded_norm, DTensor)
        grad_norm = float(sharded_norm.full_tensor())
        if not math.isfinite(grad_norm):  # the same number on all ranks, so that all stop here alike
            raise FloatingPointError(f"the gradient norm is {grad_norm}: no update was made; the rollouts of this step show what came in")
        _accumulate(
            sums, {"max:grad_norm": torch.tensor(grad_norm), "max:lr": torch.tensor(schedule.get_last_lr()[0], dtype=torch.float64)}
        )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: float(value) for name, value in sums.items()}


def _backward(policy: Policy, micro_batch: MicroBatch, num_loss_tokens: int, config: LossConfig) -> dict[str, Tensor]:
    logprobs, entropy = policy(micro_batch)
    # Without an earlier pass the old policy is this one: the ratio is exactly 1 and its gradient is that of the logprob.
    old_logprobs = logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs
    loss, sums = policy_loss(
        logprobs,
        entropy,
        old_logprobs,
        micro_batch.ref_logprobs,
        micro_batch.advantages,
        micro_batch.loss_mask,
        num_loss_tokens=num_loss_tokens,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
    )
    loss.backward()
    sums |= mismatch_sums(old_logprobs, micro_batch.rollout_logprobs, micro_batch.loss_mask)
    return sums | {"loss_tokens": micro_batch.loss_mask.sum()}


def _accumulate(sums: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add up on the device: a float() for each micro-batch would wait for the GPU to run dry before the next one is launched."""
    for name, value in more.items():
        if name not in sums:
            sums[name] = value
        else:
            sums[name] = torch.maximum(sums[name], value) if name.startswith("max:") else sums[name] + value


def _micro_batches(batch: RolloutBatch) -> list[MicroBatch]:
    return [micro_batch for mini_batch in batch.mini_batches for micro_batch in mini_batch]
