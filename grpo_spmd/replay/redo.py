"""Run reward -> advantage -> loss of a dumped step again, on the CPU, in one process, without vLLM: to look into
yesterday's spike.

    python -m grpo_spmd.replay RUN_DIR --step N [--checkpoint FOLDER] [section.key=value ...]

It is the trainer's own code over the rollouts that the run dumped, so that breakpoint() works in a reward (which is
called in the reward pool, with its deadlines, as in training), in the advantages and in the loss. Overrides ask what
another config would have made of the step. Nothing is written into the run folder.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checkpoint.manifest import checkpoint_path, list_checkpoints, read_trainer, verify_checkpoint
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.replay.read import RecordedStep, Replay, Rollout
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import load_rewards, weighted_sum

if TYPE_CHECKING:
    from grpo_spmd.distributed.session import Session
    from grpo_spmd.learn.sampled_step import SampledStep
    from grpo_spmd.records import Decision, RolloutBatch


class _RecordedTexts:
    """Stands for the tokenizer: the texts that the run scored."""

    def __init__(self, rollouts: Sequence[Sequence[dict[str, Any]]]) -> None:
        self._texts = {tuple(record["completion_ids"]): record["completion"] for group in rollouts for record in group}

    def batch_decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [self._texts[tuple(ids)] for ids in token_ids]


def _groups(recorded: RecordedStep) -> list[RolloutGroup]:
    groups = []
    for slot, records in enumerate(recorded.rollouts):
        first = records[0]
        columns = recorded.columns[slot] if recorded.columns is not None else {}
        prompt = Prompt(first["position"], first["row"], first["prompt_ids"], first["prompt"], columns)
        completions = [
            Completion(
                r["completion_ids"], [math.nan if x is None else x for x in r["rollout_logprobs"]], r["finish_reason"]
            )
            for r in records
        ]
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def _recorded_scores(groups: Sequence[RolloutGroup], recorded: RecordedStep) -> ScoredRollouts:
    """What the run scored, under the weights of the config."""
    weights = {reward.name: reward.weight for reward in load_rewards(recorded.config.rewards)}
    scored = ScoredRollouts()
    for record in (record for group in groups for record in recorded.rollouts[group.slot]):
        if weights.keys() != record["rewards"].keys():
            names = f"the run recorded {', '.join(record['rewards'])}, the config names {', '.join(weights)}"
            raise ConfigError(f"rewards: {names}; without the data set no other reward can be called: set data.train")
        unusable = {name for name, status in record["statuses"].items() if status not in ("ok", "not_applicable")}
        values = {name: math.nan if name in unusable else value for name, value in record["rewards"].items()}
        for name, value in values.items():
            scored.by_name.setdefault(name, []).append(value)
            scored.statuses.setdefault(name, []).append(record["statuses"][name])
        scored.rewards.append(weighted_sum([(weights[name], value) for name, value in values.items()]))
        scored.texts.append(record["completion"])
    return scored


def replay(recorded: RecordedStep, checkpoint: Path | None = None) -> Replay:
    """Score, decide and train once more; on the CPU, in a process group of one.

    Args:
        checkpoint: where the policy is taken from, instead of the checkpoint of this step.

    Raises:
        ConfigError, CheckpointError: what is missing or damaged, and what to do. RewardError: the user left the
        debugger.
    """
    with tempfile.NamedTemporaryFile(prefix="rewards_", suffix=".log", delete=False) as log:
        log_file = Path(log.name)
    config = recorded.config
    with RewardPool(config.rewards, config.reward_pool, log_file, columns=recorded.all_columns) as pool:
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # from here on: a reward may have a model on the GPU, the replay has none
        )
        from grpo_spmd.distributed.session import end_session, start_session

        session = start_session()
        try:
            found = _replay(recorded, checkpoint, pool, session)
        finally:
            end_session()
    if log_file.stat().st_size:
        found.notes.append(f"what the rewards printed is in {log_file}")
    else:
        log_file.unlink()
    return found


def _replay(recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool, session: Session) -> Replay:
    from grpo_spmd.distributed.errors import Rank0Error
    from grpo_spmd.learn.assemble import assemble_batch
    from grpo_spmd.learn.sampled_step import SampledStep

    config, notes = recorded.config, list(recorded.notes)
    sampled = SampledStep(config, session)
    waiting, texts = _groups(recorded), _RecordedTexts(recorded.rollouts)
    try:
        while sampled.num_missing and waiting:  # once, unless dynamic sampling refilled the step
            sampled.num_missing = min(sampled.num_missing, len(waiting))
            groups, waiting = waiting[: sampled.num_missing], waiting[sampled.num_missing :]
            rescored = pool.score(groups, texts) if recorded.columns is not None else _recorded_scores(groups, recorded)
            sampled.add(groups, rescored)
        if sampled.num_missing:
            notes.append(
                f"the step would now have drawn {sampled.num_missing} more prompts, of which there are no rollouts"
            )
        if waiting:
            notes.append(f"{len(waiting)} groups of the dump are not needed now")
        batch, decision = assemble_batch(sampled, config, session)
    except Rank0Error as error:
        notes.append(f"the step is refused: {error}")
        return Replay(notes, {}, _rollouts(recorded, sampled, None, {}))
    of_update, logprobs, decision = _train(recorded, checkpoint, batch, decision, session, notes)
    replayed = {name: value for name, value in decision.metrics.items() if not name.startswith("batching/")} | of_update
    metrics = (
        {name: (recorded.metrics.get(name), value) for name, value in replayed.items()} if recorded.metrics else {}
    )
    return Replay(notes, metrics, _rollouts(recorded, sampled, decision, logprobs))


def _train(
    recorded: RecordedStep,
    checkpoint: Path | None,
    batch: RolloutBatch,
    decision: Decision,
    session: Session,
    notes: list[str],
) -> tuple[dict[str, float | None], dict[int, list[float]], Decision]:
    """The update with the policy of the step, or as much of it as can be had. Returns its metrics, the policy's
    logprobs, the decision."""
    import torch

    from grpo_spmd.checkpoint.restore import load_state
    from grpo_spmd.learn.assemble import penalise_rewards_by_kl
    from grpo_spmd.learn.update import PolicyUpdater, attach_logprobs
    from grpo_spmd.model.policy import build_policy, build_reference
    from grpo_spmd.observe.derive import loss_metrics

    config = recorded.config
    source, has_policy = _policy_source(recorded, checkpoint, notes)
    if not has_policy:
        return {"loss/policy": _loss_on_engine_logprobs(batch, config)}, {}, decision
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        model = config.model
        if source is not None and not model.lora.rank:  # all of its weights: model.path need not be on this machine
            from grpo_spmd.checkpoint.export import export_checkpoint

            export_checkpoint(source, Path(folder, "model"), "float32")
            model = dataclasses.replace(model, path=str(Path(folder, "model")))
        policy = build_policy(model, config.rollout.temperature, session, seed=config.seed)
    reference = build_reference(policy, config.model, config.rollout.temperature, config.loss.kl_coef, session)
    updater = PolicyUpdater(policy, config)
    if source is not None:
        load_state(policy, updater, source, read_trainer(source))
    attach_logprobs(policy, reference, batch, config)
    decision = penalise_rewards_by_kl(batch, decision, config)
    logprobs: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro_batch in (m for mini_batch in batch.mini_batches for m in mini_batch):
            scores, _ = policy(micro_batch)
            for place, rollout_id in enumerate(micro_batch.rollout_ids):
                logprobs[rollout_id] = scores[micro_batch.sequence_index == place].tolist()
    return loss_metrics(updater.update(batch), config.loss), logprobs, decision


def _policy_source(recorded: RecordedStep, checkpoint: Path | None, notes: list[str]) -> tuple[Path | None, bool]:
    """The checkpoint that holds the policy, None for the model that the run started from, and whether either can be
    had."""
    step, model_path = recorded.step, Path(recorded.config.model.path)
    own = checkpoint_path(recorded.run_dir, step)
    source = checkpoint or (own if own.is_dir() else None)
    # A hub id is organisation/name; any other path without a folder is that of another machine.
    has_model = model_path.is_dir() or (
        not model_path.is_absolute() and len(model_path.parts) == 2 and not model_path.parent.exists()
    )
    needs_model = bool(recorded.config.loss.kl_coef) or recorded.config.model.lora.rank > 0
    if source is not None:
        verify_checkpoint(source)
        if needs_model and not has_model:
            raise ConfigError(
                f"model.path: there is no folder {model_path}, and the reference or the adapters need it; set "
                "model.path"
            )
        if (holds := (source / "model" / "adapter_config.json").is_file()) != (recorded.config.model.lora.rank > 0):
            what = "adapters" if holds else "a whole model"
            raise ConfigError(
                f"model.lora.rank: {recorded.config.model.lora.rank} does not go with {source}, which holds {what}"
            )
        saved = int(read_trainer(source)["step"])
        notes.append(f"policy: {source}, after {saved} finished steps")
        if saved != step:
            notes.append(
                f"that is not the policy that sampled step {step}: loss, entropy, gradient and mismatch differ for "
                "that alone"
            )
        return source, True
    if step == 0 and has_model:
        notes.append(f"policy: {model_path}, with which the run started")
        return None, True
    there = ", ".join(path.name for path in list_checkpoints(recorded.run_dir)) or "none"
    why = (
        f"there is no folder {model_path} (model.path)"
        if step == 0
        else f"no {own} (there are: {there}; --checkpoint takes another)"
    )
    notes.append(
        f"policy: {why}, so the engine's recorded logprobs stand in for the policy's: every ratio is 1, and there is "
        "no entropy, KL, "
        "gradient or mismatch"
    )
    return None, False


def _loss_on_engine_logprobs(batch: RolloutBatch, config: Config) -> float | None:
    """The policy's loss where the policy's logprobs are taken to be the engine's."""
    import torch
    from torch import Tensor, nn

    from grpo_spmd.learn.update import PolicyUpdater
    from grpo_spmd.model.policy import Policy
    from grpo_spmd.records import MicroBatch

    class EngineAsPolicy(Policy):
        def __init__(self) -> None:
            nn.Module.__init__(self)  # without a model
            self.nothing = nn.Parameter(torch.zeros(1))  # a backward pass needs something to end at

        def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            return micro_batch.rollout_logprobs + self.nothing, torch.zeros_like(micro_batch.rollout_logprobs)

    updater = PolicyUpdater(EngineAsPolicy(), config)
    total, updates = 0.0, 0
    for mini_batch, tokens, sequences in zip(
        batch.mini_batches, batch.num_loss_tokens, batch.num_loss_sequences, strict=True
    ):
        updates += tokens > 0
        total += sum(
            float(updater.backward(micro_batch, tokens, sequences, True)[0]["policy"].value)
            for micro_batch in mini_batch
        )
    return total / updates if updates else None


def _rollouts(
    recorded: RecordedStep, sampled: SampledStep, decision: Decision | None, logprobs: dict[int, list[float]]
) -> list[Rollout]:
    slots = {position: slot for slot, position in enumerate(decision.positions if decision else [])}
    size, scored = recorded.config.rollout.group_size, sampled.scored
    found = []
    for number, reward in enumerate(scored.rewards):
        group, sample = sampled.groups[number // size], number % size
        own = slots.get(group.prompt.position)
        rollout_id = None if own is None else own * size + sample
        found.append(
            Rollout(
                recorded.rollouts[group.slot][sample],
                reward,
                scored.finite_by_name(number),
                {name: statuses[number] for name, statuses in scored.statuses.items()},
                None if decision is None or rollout_id is None else decision.advantages[rollout_id],
                decision is not None and rollout_id is not None and decision.in_loss[rollout_id],
                None if rollout_id is None else logprobs.get(rollout_id),
            )
        )
    return found
