"""What a teacher's word does to the update of one micro-batch. Pure."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.reductions import Mean, Reductions, Sum, merge
from grpo_spmd.learn.losses import LossInputs, policy_loss
from grpo_spmd.records import Lesson


def taught_advantages(
    lesson: Lesson, advantages: Tensor, old_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Reductions]:
    """With a lesson by logprobs: A_t - coef * (log pi_old - log pi_teacher) at each sampled token [C], which on average
    over samples gives the gradient of coef * KL(policy || teacher) of that token (Thinking Machines, "On-Policy
    Distillation", 2025); and its metrics. Else the advantages as they are."""
    if lesson.logprobs is None:
        return advantages, {}
    mask = _answered(lesson, mask)
    apart = torch.where(mask, old_logprobs.detach() - lesson.logprobs, 0.0)
    return advantages - lesson.coef * apart, _metrics(lesson, apart, mask)


def taught_loss(
    inputs: LossInputs, options: LossConfig, lesson: Lesson, divergence: Tensor | None = None
) -> tuple[Tensor, Reductions]:
    """As `policy_loss`, with what the teacher says in it. `divergence` [C], where the lesson is one."""
    mask = inputs.loss_mask
    advantages, of_lesson = taught_advantages(lesson, inputs.advantages, inputs.old_logprobs, mask)
    share, sums = policy_loss(dataclasses.replace(inputs, advantages=advantages), options)
    if divergence is not None:
        term, of_lesson = divergence_loss(lesson, divergence, inputs.weights, mask)
        share, of_lesson["loss"] = share + term, of_lesson["teacher"]
    return share, merge([sums, of_lesson])


def divergence_loss(lesson: Lesson, divergence: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Reductions]:
    """This micro-batch's share of coef * divergence [C] in the loss, weighted as the policy's term, and its metrics."""
    mask = _answered(lesson, mask)
    apart = torch.where(mask, divergence, 0.0)
    share = lesson.coef * (torch.where(mask, weights, 0.0).double() * apart.double()).sum()
    return share, {"teacher": Sum(share.detach()), **_metrics(lesson, apart.detach(), mask)}


def _answered(lesson: Lesson, mask: Tensor) -> Tensor:
    """Without the tokens of which its teacher has said nothing."""
    return mask if lesson.answered is None else mask & lesson.answered


def _metrics(lesson: Lesson, apart: Tensor, mask: Tensor) -> Reductions:
    found: Reductions = {"teacher/kl": Mean(apart.double().sum(), mask.sum())}
    for name, own in lesson.by_name.items():
        found[f"teacher/{name}/kl"] = Mean(torch.where(own, apart, 0.0).double().sum(), (mask & own).sum())
    return found
