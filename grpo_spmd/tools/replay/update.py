"""Repeats the update of a recorded step: the policy of that step, its logprobs, loss and
gradient."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import TO_GO_ON, read_trainer, verify_checkpoint
from grpo_spmd.checkpoint.restore import load_state
from grpo_spmd.checkpoint.run_dir import checkpoint_path, list_checkpoints
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.assemble import penalise_rewards_by_kl
from grpo_spmd.learn.update import PolicyUpdater, ValueHead, attach_logprobs
from grpo_spmd.model.hf_files import load_tokenizer
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from grpo_spmd.observe.log import loss_metrics
from grpo_spmd.records import Decision, MicroBatch, Prompt, RolloutBatch
from grpo_spmd.signals.opening import open_critic, open_teacher
from grpo_spmd.tools.replay.read import RecordedStep, has_model


@dataclass(frozen=True)
class ReplayedUpdate:
    """Holds the results of the repeated update."""

    metrics: dict[str, float | None]
    """The metrics of the update; fewer if there was no policy."""
    decision: Decision
    """The step's decision, with the KL penalty in its rewards if the config has one."""
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """The policy's logprobs by rollout id."""


def train(
    recorded: RecordedStep,
    checkpoint: Path | None,
    batch: RolloutBatch,
    decision: Decision,
    session: Session,
) -> ReplayedUpdate:
    """Collective. Repeats the step's update with the step's policy, or as much of it as can be had.

    Adds to `recorded.notes`. A ConfigError or CheckpointError says what is missing or damaged, and
    the remedy.
    """
    config = recorded.config
    notes = recorded.notes
    source, has_policy = _find_policy(recorded, checkpoint)
    if not has_policy and config.critic.path is not None:
        notes.append(
            "the critic's advantages are not made again: it is as little to be had as the policy"
        )
        return ReplayedUpdate({}, decision)
    if not has_policy:
        if config.teacher.is_on:
            notes.append("the teacher is left out, as the policy is: the loss is that without it")
        return ReplayedUpdate({"loss/policy": _loss_on_engine_logprobs(batch, config)}, decision)
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        model = config.model
        if source is not None and not model.lora.rank:
            # the checkpoint has all weights: model.path need not be on this machine
            export_checkpoint(source, Path(folder, "model"), "float32")
            model = dataclasses.replace(model, path=str(Path(folder, "model")))
        temperature = config.rollout.temperature
        policy = build_policy(
            model,
            temperature,
            session,
            seed=config.seed,
            max_rollout_tokens=config.max_rollout_tokens,
        )
    reference = build_reference(policy, config.model, temperature, config.loss.kl_coef, session)
    critic = open_critic(config, policy, session)
    updater = _make_updater(policy, config, critic.value_head if critic is not None else None)
    if source is not None:
        load_state(policy, updater, source, read_trainer(source, TO_GO_ON), critic)
    attach_logprobs(policy, reference, batch, config.loss, config.training.num_optimizer_steps)
    decision = penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
    if critic is not None:
        decision = critic.attach(batch, decision, lambda _: None)
    if config.teacher.is_on:
        decision = _apply_teacher(recorded, policy, reference, batch, decision, session)
    logprobs = _compute_logprobs(policy, batch)
    is_warming_up = critic is not None and recorded.step <= config.critic.warmup_steps
    sums = updater.measure(batch) if is_warming_up else updater.update(batch)
    if critic is not None:
        sums |= critic.update(batch)
    return ReplayedUpdate(loss_metrics(sums, config.loss), decision, logprobs)


def _compute_logprobs(policy: Policy, batch: RolloutBatch) -> dict[int, list[float]]:
    logprobs: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            scores, _ = policy(micro_batch)
            for index, rollout_id in enumerate(micro_batch.rollout_ids):
                logprobs[rollout_id] = scores[micro_batch.sequence_index == index].tolist()
    return logprobs


def _make_updater(policy: Policy, config: Config, head: ValueHead | None = None) -> PolicyUpdater:
    return PolicyUpdater(
        policy,
        config.optimizer,
        config.loss,
        config.training,
        config.rollout.max_completion_tokens,
        head,
    )


def _find_policy(recorded: RecordedStep, checkpoint: Path | None) -> tuple[Path | None, bool]:
    """Returns (checkpoint, has_policy): where the policy is, and whether there is one.

    The checkpoint is None if the policy is the model at model.path.
    """
    step = recorded.step
    model_path = Path(recorded.config.model.path)
    is_model_here = has_model(recorded.config.model.path)
    notes = recorded.notes
    previous_checkpoint = checkpoint_path(recorded.run_dir, step - 1)
    source = checkpoint or (previous_checkpoint if previous_checkpoint.is_dir() else None)
    if source is not None:
        _check_source(source, recorded.config, is_model_here)
        saved_step = int(read_trainer(source)["step"])
        notes.append(f"policy: {source}, after {saved_step} finished steps")
        if saved_step != step - 1:
            notes.append(
                f"that is not the policy that sampled step {step}: "
                "loss, entropy, gradient and mismatch differ for that alone"
            )
        return source, True
    if step == 1 and is_model_here:
        notes.append(f"policy: {model_path}, with which the run started")
        return None, True
    names = ", ".join(path.name for path in list_checkpoints(recorded.run_dir)) or "none"
    reason = f"no {previous_checkpoint} (there are: {names}; --checkpoint takes another)"
    if step == 1:
        reason = f"there is no folder {model_path} (model.path)"
    notes.append(
        f"policy: {reason}, so the engine's recorded logprobs stand in for the policy's: "
        "every ratio is 1, and there is no entropy, KL, gradient or mismatch"
    )
    return None, False


def _check_source(source: Path, config: Config, is_model_here: bool) -> None:
    """Raises ConfigError or CheckpointError if the checkpoint cannot give the config's policy."""
    verify_checkpoint(source)
    rank = config.model.lora.rank
    if (config.loss.kl_coef or rank) and not is_model_here:
        raise ConfigError(
            f"model.path: there is no folder {config.model.path}, "
            "and the reference or the adapters need it; set model.path"
        )
    has_adapters = (source / "model" / "adapter_config.json").is_file()
    if has_adapters != (rank > 0):
        contents = "adapters" if has_adapters else "a whole model"
        raise ConfigError(
            f"model.lora.rank: {rank} does not go with {source}, which holds {contents}"
        )


class _EngineAsPolicy(Policy):
    """Stands in for a policy that is not there: its logprobs are the engine's."""

    def __init__(self) -> None:
        # Policy.__init__ is skipped, since there is no model
        nn.Module.__init__(self)
        # a backward pass needs a parameter
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, batch: MicroBatch, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return batch.rollout_logprobs + self.zero, torch.zeros_like(batch.rollout_logprobs)


def _loss_on_engine_logprobs(batch: RolloutBatch, config: Config) -> float | None:
    """Returns the policy loss if the policy's logprobs were the engine's; None without tokens."""
    updater = _make_updater(_EngineAsPolicy(), config)
    denominators = zip(batch.num_loss_tokens, batch.num_loss_sequences, strict=True)
    total = 0.0
    num_updates = 0
    for mini_batch, (num_tokens, num_sequences) in zip(
        batch.mini_batches, denominators, strict=True
    ):
        num_updates += num_tokens > 0
        total += sum(
            float(updater.backward(micro_batch, num_tokens, num_sequences, True)[0]["policy"].value)
            for micro_batch in mini_batch
        )
    return total / num_updates if num_updates else None


def _apply_teacher(
    recorded: RecordedStep,
    policy: Policy,
    reference: object,
    batch: RolloutBatch,
    decision: Decision,
    session: Session,
) -> Decision:
    """Collective. Applies the run's teachers, if they and the rows that name them are here; else
    adds a note."""
    config = recorded.config
    columns = recorded.columns
    missing = [path for path in config.teacher.paths.values() if not has_model(path)]
    needs_columns = "" not in config.teacher.names or config.teacher.prompt_key is not None
    reason = None
    if config.teacher.url and not recorded.asks_servers:
        reason = "it is a server, which was not asked (--ask-servers)"
    elif missing:
        reason = f"there is no folder {missing[0]}"
    elif needs_columns and columns is None:
        reason = "the rows that name it cannot be had as they were"
    if reason is not None:
        recorded.notes.append(
            f"the teacher is left out: {reason}; loss and gradient are those without it"
        )
        return decision
    slots = {group[0].position: slot for slot, group in enumerate(recorded.rollouts)}

    def prompt_at(position: int) -> Prompt:
        slot = slots[position]
        record = recorded.rollouts[slot][0]
        row_columns = columns[slot] if columns else {}
        return Prompt(position, record.row, record.prompt_ids, record.prompt, row_columns)

    tokenizer = load_tokenizer(config.model.path) if config.teacher.prompt_key is not None else None
    teacher = open_teacher(config, policy, session, reference, prompt_at, tokenizer)
    assert teacher is not None, config.teacher
    return teacher.attach(batch, decision, lambda _: None)
