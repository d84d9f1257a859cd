"""Parts of learn/ as a run makes them of its config."""

from __future__ import annotations

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Reductions, merge_bytes, to_bytes
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.gradient_check import UpdateCheckSettings


def updater_of(policy: Policy, config: Config) -> PolicyUpdater:
    max_length = config.rollout.max_completion_tokens
    return PolicyUpdater(policy, config.optimizer, config.loss, config.training, max_length)


def sampled_step_of(config: Config, session: Session) -> SampledStep:
    max_error_frac = config.reward_pool.max_error_frac
    sections = config.rollout, config.advantage, config.loss, config.training
    return SampledStep(StepRules(*sections, max_error_frac, session.world_size))


def merged_on_all(local: Reductions) -> Reductions:
    """Collective. What all ranks' sums come to, on every rank."""
    return merge_bytes(bytes.fromhex(piece) for piece in on_rank0(list, to_bytes(local).hex()))


def check_settings_of(config: Config, stop_ids: frozenset[int]) -> UpdateCheckSettings:
    """Settings of an update check that runs at every step."""
    return UpdateCheckSettings(
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
