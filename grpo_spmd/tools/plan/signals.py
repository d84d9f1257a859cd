"""What models beside the policy add to a plan.

Teachers and a critic wait in host memory while the engine is awake. Reward models are on the
device only while they score, and the engine sleeps meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_spmd.checks.memory import ITEMSIZE, TRAINED_ITEMSIZE
from grpo_spmd.checks.signals import Kind, SideModel, side_models
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import ModelFacts, Shapes, local_folder, shapes_from_config
from grpo_spmd.observe.cards import Card
from grpo_spmd.tools.plan.device import with_fragmentation
from grpo_spmd.tools.plan.dry_run import Pass, Peaks, Usage, parameter_shapes, peaks_of
from grpo_spmd.tools.plan.step_time import (
    ADAMW_BYTES,
    RECOMPUTED,
    Speed,
    StepTime,
    forward_s,
    rollouts_of_step,
)

Lengths = Sequence[tuple[int, int]]  # prompt and completion tokens of rollouts


@dataclass(frozen=True)
class PlannedModel:
    """A side model's bytes on a rank, and the peaks of its passes over the largest micro-batch."""

    side: SideModel
    facts: ModelFacts  # with the head that it has in the run
    num_bytes: int
    gradients: int
    peaks: Peaks
    answers: Usage  # what a teacher says, kept from the phase "logprobs" to the update

    @property
    def name(self) -> str:
        return self.side.name

    @property
    def waits(self) -> bool:
        """Whether it is on the device from a rollout's end to the next weight sync; a reward model
        is there only while it scores."""
        return self.side.kind != "reward model"


def plan_side_models(
    config: Config, num_ranks: int, lengths: tuple[tuple[int, int], ...]
) -> list[PlannedModel]:
    """`lengths`: of the rollouts in the largest micro-batch. Raises ConfigError, also if a model's
    config.json is not here."""
    return [_plan_model(side, config, num_ranks, lengths) for side in side_models(config)]


def _plan_model(
    side: SideModel, config: Config, num_ranks: int, lengths: tuple[tuple[int, int], ...]
) -> PlannedModel:
    folder = local_folder(side.path, side.revision)
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"{side.key}: there is no config.json of {side.path} here; hf download {side.path} "
            "config.json"
        )
    model_config = read_model_config(folder)
    shapes = shapes_from_config(model_config) or parameter_shapes(folder)
    facts = ModelFacts(with_head(side.kind, shapes, model_config), model_config, "config.json")
    trains = side.kind == "critic"
    work = Pass(
        folder=folder,
        model=replace(config.model, offload=False, lora=LoraConfig()),
        loss=config.loss,
        num_ranks=num_ranks,
        lengths=lengths,
        accumulates=trains,
        scores=True,
        on_gpu=True,
    )
    peaks = peaks_of(work)
    if side.kind != "teacher":
        peaks = Peaks(_without_logits(peaks.scoring), _without_logits(peaks.update))
    return PlannedModel(
        side=side,
        facts=facts,
        num_bytes=side.num_bytes(facts.shapes, config, num_ranks),
        gradients=4 * side.shard(facts.shapes, config, num_ranks) if trains else 0,
        peaks=peaks,
        answers=teacher_answers(config, side, facts, num_ranks),
    )


def with_head(kind: Kind, shapes: Shapes, config: dict[str, Any]) -> Shapes:
    """A causal LM's shapes with the head of this kind of model in place of its lm_head."""
    if kind == "teacher":
        return shapes
    num_labels = 1 if kind == "critic" else len(config.get("id2label") or (0, 1))
    layers = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    return layers | {"head.weight": (num_labels, int(config.get("hidden_size") or 0))}


def _without_logits(usage: Usage) -> Usage:
    return Counter({name: size for name, size in usage.items() if name != "logits"})


def teacher_answers(config: Config, side: SideModel, facts: ModelFacts, num_ranks: int) -> Usage:
    """Bytes of what a teacher says about all rollouts of a rank."""
    sizes, name = facts.dimensions, side.name
    if side.kind != "teacher" or sizes is None:
        return Counter()
    # Kept until the update, for all rollouts at once.
    rollouts = rollouts_of_step(config, num_ranks)
    tokens = rollouts * config.rollout.max_completion_tokens
    if config.teacher.loss == "sampled":
        return Counter({f"{name}'s logprobs": 4 * tokens})
    if config.teacher.loss == "topk":
        # A logprob and an int64 token id each.
        return Counter({f"{name}'s likeliest tokens": 12 * config.teacher.top_k * tokens})
    row = sizes.hidden * ITEMSIZE[config.model.dtype]
    hidden_states, head = f"{name}'s hidden states", f"{name}'s lm_head"
    return Counter({hidden_states: tokens * row, head: sizes.vocabulary * row})


def merge_peaks(peaks: Peaks, models: Sequence[PlannedModel]) -> Peaks:
    """The policy's peaks merged with those of models that run in the same phases, one after the
    other: the largest counts, beside the teachers' answers."""
    waiting = [model for model in models if model.waits]
    answers = sum((model.answers for model in waiting), Counter[str]())
    scoring, update = [peaks.scoring], [peaks.update]
    for model in waiting:
        scoring.append(model.peaks.scoring)
        if model.side.kind == "critic":
            # AdamW needs all gradients at one time.
            update += [model.peaks.update, Counter({"gradients": model.gradients})]
    return Peaks(
        scoring=max(scoring, key=Counter.total) + answers,
        update=max(update, key=Counter.total) + answers,
    )


def with_value_head(peaks: Peaks, config: Config, hidden: int, lengths: Lengths) -> Peaks:
    """Adds the head of a critic on the policy's layers: its state and gradient, and its float32
    inputs for the completions of the largest micro-batch."""
    if not config.critic.is_on_policy:
        return peaks
    num_tokens = sum(completion for _, completion in lengths)
    num_bytes = (TRAINED_ITEMSIZE + 4) * (hidden + 1) + 4 * hidden * num_tokens
    head = Counter({"value head": num_bytes})
    return Peaks(peaks.scoring + head, peaks.update + head)


def with_side_models(phases: dict[str, Usage], models: Sequence[PlannedModel]) -> dict[str, Usage]:
    """`phases` with what the models hold in each."""
    waiting = Counter({model.name: model.num_bytes for model in models if model.waits})
    with_waiting = ("logprobs", "update", "checkpoint")
    phases = {
        name: usage + waiting if name in with_waiting else usage for name, usage in phases.items()
    }
    # The engine sleeps while reward models score, one after the other.
    asleep = Counter(
        {
            name: size
            for name, size in phases["reward"].items()
            if not name.startswith(("engine's", "KV cache"))
        }
    )
    for model in models:
        if not model.waits:
            scoring = with_fragmentation(model.peaks.scoring)
            scoring += asleep + Counter({model.name: model.num_bytes})
            phases["reward"] = max(phases["reward"], scoring, key=Counter.total)
    return phases


def host_bytes(models: Sequence[PlannedModel]) -> Usage:
    """Host memory of a rank: models that wait there, and a checkpoint's copy of the critic."""
    copies = sum(model.num_bytes for model in models if model.side.kind == "critic")
    waiting = Counter({f"{model.name}, waiting": model.num_bytes for model in models})
    return waiting + Counter({"checkpoint's copy": copies})


def add_time(
    time: StepTime, config: Config, models: Sequence[PlannedModel], card: Card, num_ranks: int
) -> StepTime:
    """Adds a forward pass of each model over the rollouts (several teachers share them), the
    critic's update, and the copies to and from host memory."""
    seconds = dict(time.phases)
    speed = Speed(card, num_ranks // config.model.num_replicas)
    training = config.training
    for model in models:
        kind = model.side.kind
        forward = forward_s(config, model.facts, speed, num_ranks, has_lm_head=kind == "teacher")
        copy = model.num_bytes / (card.host_gb_s * 1e9)
        if kind == "reward model":
            seconds["reward"] = seconds.get("reward", 0.0) + forward + 2 * copy
            continue
        num_sharing = max(1, len(config.teacher.paths)) if kind == "teacher" else 1
        seconds["logprobs"] += forward / num_sharing
        seconds["weight_sync"] += copy
        seconds["update"] += copy
        if kind == "critic":
            passes = 3 + RECOMPUTED[config.model.activation_checkpointing]
            adamw = ADAMW_BYTES * model.gradients / 4 / speed.memory
            seconds["update"] += training.num_epochs * passes * forward
            seconds["update"] += training.num_optimizer_steps * adamw
    return StepTime(seconds)
