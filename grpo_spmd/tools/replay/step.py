"""Repeats a recorded step with the trainer's code: rewards, advantages, logprobs, loss, gradient.

This module imports torch; __main__.py therefore hides the GPUs before it imports this module.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import TO_GO_ON, read_trainer, verify_checkpoint
from grpo_spmd.checkpoint.run_dir import checkpoint_path, list_checkpoints
from grpo_spmd.checkpoint.state import load_state
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import POLICY, Config, TeacherConfig
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import assemble_batch, penalise_rewards_by_kl
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import attach_logprobs
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from grpo_spmd.observe.log import loss_metrics
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.rollout_writer import rollout_records
from grpo_spmd.parts import make_step_rules, open_updater
from grpo_spmd.records import (
    Decision,
    MicroBatch,
    Prompt,
    RolloutBatch,
    RolloutGroup,
    ScoredRollouts,
)
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.scorers import weighted_sum
from grpo_spmd.rewards.trl import TrainerState
from grpo_spmd.signals.opening import open_signals
from grpo_spmd.tools.replay.read import (
    RecordedStep,
    Replay,
    ReplayedRollout,
    has_model,
    make_completion,
    reward_weights,
    unasked_rewards,
)


def repeat_step(recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool) -> Replay:
    """Starts torch's process group, repeats the step, ends the group, and returns the results.

    `checkpoint` has the policy; for None see `_find_policy`. `pool` computes the rewards.

    Raises ConfigError or CheckpointError if something is missing or damaged, and RewardError if the
    user has quit the debugger (breakpoint() in a reward).
    """
    session = start_session()
    try:
        return _repeat(recorded, checkpoint, pool, session)
    finally:
        end_session()


def _repeat(
    recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool, session: Session
) -> Replay:
    """Repeats the step in the process group of `session` and returns the results."""
    # Notes are added to a copy of the caller's list.
    recorded = dataclasses.replace(recorded, notes=list(recorded.notes))
    weights = reward_weights(recorded)
    # One rank; the cost ratio, which balances rollouts over ranks, does not matter.
    sampled = SampledStep(make_step_rules(recorded.config, 1, 0.0, weights))
    try:
        _score(recorded, sampled, pool)
        batch, decision = assemble_batch(sampled, session)
    except Rank0Error as error:
        recorded.notes.append(f"the step is refused: {error}")
        return Replay(recorded.notes, {}, _pair_rollouts(recorded, sampled, None, {}))
    update = train(recorded, checkpoint, batch, decision, session, sampled)
    replayed = update.decision.metrics | update.metrics
    # Metrics of batching are left out, since the run may have divided its rollouts over more ranks.
    metrics = {
        name: (recorded.metrics.get(name), value)
        for name, value in replayed.items()
        if recorded.metrics and not name.startswith("batching/")
    }
    rollouts = _pair_rollouts(recorded, sampled, update.decision, update.logprobs)
    return Replay(recorded.notes, metrics, rollouts)


def _score(recorded: RecordedStep, sampled: SampledStep, pool: RewardPool) -> None:
    """Adds the recorded groups to `sampled`, either scored again or with their recorded rewards.

    All rewards are computed again by `pool`, or none. Adds to `recorded.notes`."""
    notes = recorded.notes
    num_steps = recorded.config.training.num_steps
    pool.begin_step(TrainerState(recorded.step - 1, num_steps, recorded.epoch))
    unasked = unasked_rewards(recorded)
    for reason, names in unasked.items():
        notes.append(f"rewards are those that the run recorded: {reason} {', '.join(names)}")
    is_scored_again = recorded.columns is not None and not unasked
    tokenizer = _recorded_tokenizer(recorded.rollouts)
    waiting = _make_groups(recorded)
    # Dynamic sampling drops groups whose rewards are all equal, and the run then sampled further
    # groups in another round. The replay takes as many recorded groups as it needs.
    while sampled.num_missing and waiting:
        groups = waiting[: sampled.num_missing]
        del waiting[: sampled.num_missing]
        scored = (
            pool.score(groups, tokenizer) if is_scored_again else _recorded_scores(groups, recorded)
        )
        sampled.add(groups, scored, num_groups=len(groups))
    if sampled.num_missing:
        notes.append(
            f"the step would now have drawn {sampled.num_missing} more prompts, "
            "of which there are no rollouts"
        )
    if waiting:
        notes.append(f"{len(waiting)} groups of the dump are not needed now")


def _recorded_tokenizer(rollouts: Sequence[Sequence[RolloutRecord]]) -> Any:
    """Returns an object in place of the tokenizer, which decodes to the texts that the run scored.

    So the replay needs no tokenizer, and rewards see the same texts."""
    texts = {
        tuple(record.completion_ids): record.completion for group in rollouts for record in group
    }

    def batch_decode(token_ids: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [texts[tuple(ids)] for ids in token_ids]

    return SimpleNamespace(batch_decode=batch_decode)


def _make_groups(recorded: RecordedStep) -> list[RolloutGroup]:
    """Returns the recorded rollouts as the groups that the run's engine had sampled.

    The slot of a group is its place in the step."""
    groups = []
    for slot, records in enumerate(recorded.rollouts):
        start = records[0]
        columns = recorded.columns[slot] if recorded.columns is not None else {}
        prompt = Prompt(start.position, start.row, start.prompt_ids, start.prompt, columns)
        completions = [make_completion(record) for record in records]
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def _recorded_scores(groups: Sequence[RolloutGroup], recorded: RecordedStep) -> ScoredRollouts:
    """Returns the rewards that the run recorded for `groups`.

    They are summed by the weights of the replay's config. Raises ConfigError if the config has
    other rewards than the run."""
    weights = reward_weights(recorded)
    scored = ScoredRollouts()
    for record in (record for group in groups for record in recorded.rollouts[group.slot]):
        if weights.keys() != record.rewards.keys():
            raise ConfigError(
                f"rewards: the run recorded {', '.join(record.rewards)}, "
                f"the config names {', '.join(weights)}; without the data set no other reward "
                "can be called: set data.train"
            )
        # The dump has null for a reward that does not apply (None) and for one that failed (NaN).
        values = {
            name: value if record.statuses[name] in ("ok", "not_applicable") else math.nan
            for name, value in record.rewards.items()
        }
        reward = weighted_sum([(weights[name], value) for name, value in values.items()])
        # The scores of one rollout, in the form that `pool.score` returns for many.
        scored.extend(
            ScoredRollouts(
                [reward],
                {name: [value] for name, value in values.items()},
                {name: [status] for name, status in record.statuses.items()},
                texts=[record.completion],
                notes={0: {"extra": record.extra}},
            )
        )
    return scored


def _pair_rollouts(
    recorded: RecordedStep,
    sampled: SampledStep,
    decision: Decision | None,
    logprobs: dict[int, list[float]],
) -> list[ReplayedRollout]:
    """Returns the rollouts of the replay, each with what the run recorded of it.

    `decision` is None if the step was refused, because no completion has a usable reward.
    `logprobs` are those of the policy for the sampled tokens, by rollout id.
    """
    originals = {
        (record.position, record.sample): record for group in recorded.rollouts for record in group
    }
    rollouts = []
    for record in rollout_records(sampled, decision):
        rollout_id = record.rollout_id
        in_loss = decision is not None and rollout_id is not None and decision.in_loss[rollout_id]
        rollouts.append(
            ReplayedRollout(
                recorded=originals[record.position, record.sample],
                replayed=record,
                in_loss=in_loss,
                logprobs=None if rollout_id is None else logprobs.get(rollout_id),
            )
        )
    return rollouts


@dataclass(frozen=True)
class ReplayedUpdate:
    """The results of the repeated update."""

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
    sampled: SampledStep,
) -> ReplayedUpdate:
    """Collective. Repeats the step's update, with the policy as it was before the step.

    If that policy is not on this machine, only the loss is computed, with the engine's logprobs in
    place of the policy's. If the config has a critic model, not even the loss is computed.

    Adds to `recorded.notes`. Raises ConfigError or CheckpointError if something is missing or
    damaged.
    """
    config = recorded.config
    notes = recorded.notes
    source, has_policy = _find_policy(recorded, checkpoint)
    if not has_policy:
        if config.teacher.is_on:
            notes.append("the teacher is left out, as the policy is: the loss is that without it")
        if config.critic.path is None:
            sums = open_updater(config, _EngineAsPolicy()).measure(batch)
            loss = loss_metrics(sums, config.loss)["loss/policy"]
            return ReplayedUpdate({"loss/policy": loss}, decision)
        notes.append("the critic's advantages are not recomputed: the critic is not here either")
        return ReplayedUpdate({}, decision)
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        model = config.model
        if source is not None and not model.lora.rank:
            # The checkpoint has all weights. The model at model.path is needed only for a reference
            # model and for the tokenizer of a teacher's prompts.
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
    if policy.num_routers and config.model.router_replay:
        notes.append(
            "the dump has no routes: the policy takes its own, without loss.router_aux_coef's term"
        )
    # Routes are the experts that an MoE's router chose for each token.
    reference = build_reference(policy, config.model, temperature, config.loss.kl_coef, session)
    config = dataclasses.replace(config, teacher=_teacher_at_hand(recorded))
    prompts = {group.prompt.position: group.prompt for group in _make_groups(recorded)}
    tokenizer = None
    if config.teacher.sees_other_prompt:
        tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    signals = open_signals(config, policy, session, reference, prompts.__getitem__, tokenizer)
    updater = open_updater(config, policy, signals.value_head)
    if source is not None:
        load_state(policy, updater, source, read_trainer(source, TO_GO_ON), signals.critic)
    attach_logprobs(policy, reference, batch, config.loss, config.training.num_optimizer_steps)
    decision = penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
    # The third argument would check whether the run has been asked to stop.
    decision = signals.attach(batch, decision, lambda _: None, sampled)
    logprobs = _compute_logprobs(policy, batch)
    # In the warm-up of a critic the policy is not updated, so its loss is only measured.
    update = updater.measure if signals.freezes_policy(recorded.step) else updater.update
    sums = update(batch) | signals.update(batch)
    return ReplayedUpdate(loss_metrics(sums, config.loss), decision, logprobs)


def _compute_logprobs(policy: Policy, batch: RolloutBatch) -> dict[int, list[float]]:
    """Collective. Returns the policy's logprobs of the sampled tokens, by rollout id."""
    logprobs: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            scores, _ = policy(micro_batch)
            for index, rollout_id in enumerate(micro_batch.rollout_ids):
                logprobs[rollout_id] = scores[micro_batch.sequence_index == index].tolist()
    return logprobs


def _find_policy(recorded: RecordedStep, checkpoint: Path | None) -> tuple[Path | None, bool]:
    """Returns (checkpoint, has_policy), and adds a note that says which policy the replay takes.

    It is that of `checkpoint` or, if this is None, of the run's checkpoint before the step. For
    step 1 it may be the model at model.path; then the returned checkpoint is None. Without any of
    these, (None, False) is returned.
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
                "loss, entropy, gradient and mismatch differ for this reason alone"
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
    """Raises ConfigError or CheckpointError if a checkpoint is damaged or does not fit the config.

    `is_model_here` says whether the model at model.path is on this machine."""
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
    """A Policy without a model, which returns the engine's recorded logprobs as its own.

    It is used to compute the loss if the run's policy is not on this machine."""

    def __init__(self) -> None:
        # Policy.__init__ is skipped, since there is no model.
        nn.Module.__init__(self)
        self.sequence_group = None  # no other rank shares its rows
        # An optimizer needs at least one parameter.
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, batch: MicroBatch, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the (logprobs, entropies) of the batch's sampled tokens; the entropies are 0."""
        return batch.rollout_logprobs, torch.zeros_like(batch.rollout_logprobs)

    def reshard(self) -> None:
        """Does nothing, since there are no gathered weights to free."""


def _teacher_at_hand(recorded: RecordedStep) -> TeacherConfig:
    """Returns the run's TeacherConfig, or one without teachers if a teacher cannot be used here.

    In that case a note says why: the teacher's model is missing, it is a server that is not asked,
    or the data rows that it needs cannot be read.
    """
    teacher = recorded.config.teacher
    missing = [path for path in teacher.paths.values() if path != POLICY and not has_model(path)]
    # With several teachers, a column of the data row names the teacher of a rollout. (A single one
    # has the name "".)
    needs_columns = "" not in teacher.names or teacher.sees_other_prompt
    if not teacher.is_on:
        return teacher
    if teacher.url and not recorded.asks_servers:
        reason = "it is a server, which was not asked (--ask-servers)"
    elif missing:
        reason = f"there is no folder {missing[0]}"
    elif needs_columns and recorded.columns is None:
        reason = "the data rows that it needs cannot be read as they were"
    else:
        return teacher
    recorded.notes.append(
        f"the teacher is left out: {reason}; loss and gradient are those without it"
    )
    return TeacherConfig()
