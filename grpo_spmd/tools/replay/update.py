"""The update of a recorded step once more: the policy of that step, its logprobs, loss and gradient."""

from __future__ import annotations

import dataclasses
import tempfile
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
from grpo_spmd.observe.step_metrics import loss_metrics
from grpo_spmd.records import Decision, MicroBatch, Prompt, RolloutBatch
from grpo_spmd.signals.opening import open_critic, open_teacher
from grpo_spmd.tools.replay.read import RecordedStep, is_there


def train(
    recorded: RecordedStep,
    checkpoint: Path | None,
    batch: RolloutBatch,
    decision: Decision,
    session: Session,
) -> tuple[dict[str, float | None], dict[int, list[float]], Decision]:
    """Collective. The metrics of the update with the policy of the step, or of as much of it as can be had; the
    policy's logprobs by rollout_id; the decision, with the KL penalty in it, if there is one. Adds to `recorded.notes`.
    Raises ConfigError or CheckpointError: what is missing or damaged, and what to do."""
    config = recorded.config
    source, has_policy = _policy_source(recorded, checkpoint)
    if not has_policy and config.critic.path is not None:
        recorded.notes.append(
            "the critic's advantages are not made again: it is as little to be had as the policy"
        )
        return {}, {}, decision
    if not has_policy:
        if config.teacher.is_on:
            recorded.notes.append(
                "the teacher is left out, as the policy is: the loss is that without it"
            )
        return {"loss/policy": _loss_on_engine_logprobs(batch, config)}, {}, decision
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        model = config.model
        if (
            source is not None and not model.lora.rank
        ):  # all of its weights: model.path need not be on this machine
            export_checkpoint(source, Path(folder, "model"), "float32")
            model = dataclasses.replace(model, path=str(Path(folder, "model")))
        longest = config.max_rollout_tokens
        policy = build_policy(
            model, config.rollout.temperature, session, seed=config.seed, longest=longest
        )
    reference = build_reference(
        policy, config.model, config.rollout.temperature, config.loss.kl_coef, session
    )
    critic = open_critic(config, policy, session)
    updater = _updater(policy, config, critic.value_head if critic is not None else None)
    if source is not None:
        load_state(policy, updater, source, read_trainer(source, TO_GO_ON), critic)
    attach_logprobs(policy, reference, batch, config.loss, config.training.num_optimizer_steps)
    decision = penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
    if critic is not None:
        decision = critic.attach(batch, decision, lambda _: None)
    if config.teacher.is_on:
        pass

        decision = teach(recorded, policy, reference, batch, decision, session)
    logprobs: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            scores, _ = policy(micro_batch)
            for place, rollout_id in enumerate(micro_batch.rollout_ids):
                logprobs[rollout_id] = scores[micro_batch.sequence_index == place].tolist()
    is_held = critic is not None and recorded.step <= config.critic.warmup_steps
    update = updater.measure if is_held else updater.update
    sums = update(batch) | (critic.update(batch) if critic is not None else {})
    return loss_metrics(sums, config.loss), logprobs, decision


def _updater(policy: Policy, config: Config, head: ValueHead | None = None) -> PolicyUpdater:
    longest = config.rollout.max_completion_tokens
    return PolicyUpdater(policy, config.optimizer, config.loss, config.training, longest, head)


def _policy_source(recorded: RecordedStep, checkpoint: Path | None) -> tuple[Path | None, bool]:
    """The checkpoint with the policy, None for the model that the run started from; and whether either can be had."""
    step, rank, model_path = (
        recorded.step,
        recorded.config.model.lora.rank,
        Path(recorded.config.model.path),
    )
    notes = recorded.notes
    own = checkpoint_path(recorded.run_dir, step - 1)
    source = checkpoint or (own if own.is_dir() else None)
    has_model = is_there(recorded.config.model.path)
    if source is not None:
        verify_checkpoint(source)
        if (recorded.config.loss.kl_coef or rank) and not has_model:
            what = "and the reference or the adapters need it; set model.path"
            raise ConfigError(f"model.path: there is no folder {model_path}, {what}")
        if (has_adapters := (source / "model" / "adapter_config.json").is_file()) != (rank > 0):
            what = "adapters" if has_adapters else "a whole model"
            raise ConfigError(
                f"model.lora.rank: {rank} does not go with {source}, which holds {what}"
            )
        saved = int(read_trainer(source)["step"])
        notes.append(f"policy: {source}, after {saved} finished steps")
        if saved != step - 1:
            differ = "loss, entropy, gradient and mismatch differ for that alone"
            notes.append(f"that is not the policy that sampled step {step}: {differ}")
        return source, True
    if step == 1 and has_model:
        notes.append(f"policy: {model_path}, with which the run started")
        return None, True
    there = ", ".join(path.name for path in list_checkpoints(recorded.run_dir)) or "none"
    why = f"no {own} (there are: {there}; --checkpoint takes another)"
    if step == 1:
        why = f"there is no folder {model_path} (model.path)"
    stand_in = "so the engine's recorded logprobs stand in for the policy's"
    notes.append(
        f"policy: {why}, {stand_in}: every ratio is 1, and there is no entropy, KL, gradient or mismatch"
    )
    return None, False


class _EngineAsPolicy(Policy):
    """Stands for the policy: its logprobs are those of the engine."""

    def __init__(self) -> None:
        nn.Module.__init__(self)  # without a model
        self.nothing = nn.Parameter(torch.zeros(1))  # a backward pass needs something to end at

    def forward(self, batch: MicroBatch, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return batch.rollout_logprobs + self.nothing, torch.zeros_like(batch.rollout_logprobs)


def _loss_on_engine_logprobs(batch: RolloutBatch, config: Config) -> float | None:
    updater = _updater(_EngineAsPolicy(), config)
    denominators = zip(batch.num_loss_tokens, batch.num_loss_sequences, strict=True)
    total, updates = 0.0, 0
    for mini_batch, (tokens, sequences) in zip(batch.mini_batches, denominators, strict=True):
        updates += tokens > 0
        total += sum(
            float(updater.backward(m, tokens, sequences, True)[0]["policy"].value)
            for m in mini_batch
        )
    return total / updates if updates else None


# The teachers of a recorded step once more.


def teach(
    recorded: RecordedStep,
    policy: Policy,
    reference: object,
    batch: RolloutBatch,
    decision: Decision,
    session: Session,
) -> Decision:
    """Collective. What the run's teachers say, where they and the rows that name them are here; else a note."""
    config, columns = recorded.config, recorded.columns
    if config.teacher.url and not recorded.asks_servers:
        why = "it is a server, which was not asked (--ask-servers)"
        recorded.notes.append(
            f"the teacher is left out: {why}; loss and gradient are those without it"
        )
        return decision
    missing = [path for path in config.teacher.paths.values() if not is_there(path)]
    asks = "" not in config.teacher.names or config.teacher.prompt_key is not None
    if missing or (asks and columns is None):
        why = (
            f"there is no folder {missing[0]}"
            if missing
            else "the rows that name it cannot be had as they were"
        )
        recorded.notes.append(
            f"the teacher is left out: {why}; loss and gradient are those without it"
        )
        return decision
    first = {
        group[0].position: (group[0], columns[n] if columns else {})
        for n, group in enumerate(recorded.rollouts)
    }

    def prompt_at(position: int) -> Prompt:
        record, own = first[position]
        return Prompt(position, record.row, record.prompt_ids, record.prompt, own)

    tokenizer = load_tokenizer(config.model.path) if config.teacher.prompt_key is not None else None
    teacher = open_teacher(config, policy, session, reference, prompt_at, tokenizer)
    assert teacher is not None, config.teacher
    return teacher.attach(batch, decision, lambda _: None)
