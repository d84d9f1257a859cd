"""Parts of learn/ as a run makes them of its config."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from grpo_spmd.config.schema import Config, LossConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Reductions, merge_bytes, to_bytes
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn import losses
from grpo_spmd.learn.losses import LossInputs, taught_loss
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.synthetic import UpdateCheckSettings
from grpo_spmd.records import TeacherSignal


def updater_of(policy: Policy, config: Config) -> PolicyUpdater:
    max_length = config.rollout.max_completion_tokens
    return PolicyUpdater(policy, config.optimizer, config.loss, config.training, max_length)


def sampled_step_of(config: Config, session: Session) -> SampledStep:
    max_error_frac = config.reward_pool.max_error_frac
    sections = config.rollout, config.advantage, config.loss, config.training
    rules = StepRules(
        *sections,
        max_error_frac,
        session.world_size,
        sequence_ranks=session.sequence_ranks,
        # As parts.choose_sharing: ranks that share whole rows have no trees.
        share_prefixes=session.sequence_ranks == 1 and config.training.share_prefixes,
    )
    return SampledStep(rules)


def merged_on_all(local: Reductions) -> Reductions:
    """Collective. What all ranks' sums come to, on every rank."""
    return merge_bytes(bytes.fromhex(piece) for piece in on_rank0(list, to_bytes(local).hex()))


def check_settings_of(config: Config, stop_ids: frozenset[int]) -> UpdateCheckSettings:
    """Settings of an update check that runs at every step."""
    return UpdateCheckSettings(
        is_on=True,
        checks_signals=True,
        bound_factor=1.0,
        every_steps=1,
        model_path=config.model.path,
        dtype=config.model.dtype,
        stop_ids=stop_ids,
        data=config.data,
        rollout=config.rollout,
        advantage=config.advantage,
        loss=config.loss,
        optimizer=config.optimizer,
        training=config.training,
        reward_weights=[reward.weight for reward in config.rewards],
    )


def taught(
    signal: TeacherSignal, advantages: Tensor, old: Tensor, mask: Tensor, **tensors: Tensor
) -> tuple[Tensor, Tensor, Reductions]:
    """The advantages that a teacher makes of these, what it adds to the loss, and its metrics."""
    received: list[Tensor] = []

    def policy_loss(inputs: LossInputs, _: LossConfig) -> tuple[Tensor, Reductions]:
        received.append(inputs.advantages)
        return torch.zeros((), dtype=torch.float64), {}

    inputs = LossInputs(
        logprobs=old,
        entropy=old,
        old_logprobs=old,
        ref_logprobs=None,
        advantages=advantages,
        loss_mask=mask,
        sequence_index=torch.zeros_like(mask, dtype=torch.int64),
        weights=tensors.get("weights", torch.ones_like(old)),
    )
    with patch.object(losses, "policy_loss", policy_loss):
        total, metrics = taught_loss(inputs, LossConfig(), signal, tensors.get("divergence"))
    return received[0], total, metrics
