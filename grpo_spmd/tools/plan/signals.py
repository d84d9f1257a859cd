"""What models beside the policy add to a plan: teachers and a critic, which wait in host memory while the engine is
awake, and reward models, which are on the device only while they score and the engine sleeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.checks import memory
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import ModelFacts, Shapes, local_folder, shapes_from_config
from grpo_spmd.observe.cards import Card
from grpo_spmd.tools.plan.device import FRAGMENTATION
from grpo_spmd.tools.plan.dry_run import Parts, Pass, Peaks, parameter_shapes, peaks_of
from grpo_spmd.tools.plan.step_time import Speed, StepTime, Work, forward_flops

Kind = Literal["teacher", "critic", "reward model"]
_OF_ENGINE = ("engine's", "KV cache")  # what begins so is the engine's


@dataclass(frozen=True)
class Extra:
    """A model beside the policy."""

    name: str
    kind: Kind
    model: ModelFacts  # with the parameters that it has here: of the lm_head of a teacher alone
    folder: Path

    @property
    def has_lm_head(self) -> bool:
        return self.kind == "teacher"

    @property
    def waits(self) -> bool:
        """On the device from the end of a rollout to the next weight sync; else only while it scores."""
        return self.kind != "reward model"

    def shard(self, config: Config, num_ranks: int) -> int:
        """Parameters of a rank."""
        return memory.shard_numel(self.model.shapes, num_ranks // config.model.num_replicas)

    def num_bytes(self, config: Config, num_ranks: int) -> int:
        """Of a rank, between updates."""
        each = (
            memory.TRAINED_ITEMSIZE
            if self.kind == "critic"
            else memory.ITEMSIZE[config.model.dtype]
        )
        return each * self.shard(config, num_ranks)


def extras_of(config: Config) -> list[Extra]:
    """Those that have weights of their own. Raises ConfigError where one's config.json is not here."""
    found = list[Extra]()
    is_shared = (
        config.model.lora.rank > 0 or config.loss.kl_coef > 0
    )  # with the policy's base, or the reference
    for name, path in config.teacher.paths.items():
        if path != config.model.path or not is_shared:
            found.append(_extra(f"teacher {name}".strip(), "teacher", path, "teacher.path"))
    if config.critic.path is not None and not config.critic.is_on_policy:
        found.append(_extra("critic", "critic", config.critic.path, "critic.path"))
    for index, reward in enumerate(config.rewards):
        if reward.model is not None:
            name, key = f"reward model {reward.metric_name}", f"rewards.{index}.model"
            found.append(_extra(name, "reward model", reward.model, key, reward.revision))
    return found


def _extra(name: str, kind: Kind, path: str, key: str, revision: str | None = None) -> Extra:
    folder = local_folder(path, revision)
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: there is no config.json of {path} here; hf download {path} config.json"
        )
    config = read_model_config(folder)
    shapes = with_head_of(kind, shapes_from_config(config) or parameter_shapes(folder), config)
    return Extra(name, kind, ModelFacts(shapes, config, "config.json"), folder)


def with_head_of(kind: Kind, shapes: Shapes, config: dict[str, Any]) -> Shapes:
    """A causal LM's parameters with the head that this kind has in its lm_head's place."""
    if kind == "teacher":
        return shapes
    hidden = int(config.get("hidden_size") or 0)
    labels = 1 if kind == "critic" else len(config.get("id2label") or (0, 1))
    return {name: shape for name, shape in shapes.items() if name != "lm_head.weight"} | {
        "head.weight": (labels, hidden)
    }


@dataclass(frozen=True)
class Beside:
    """What one of them takes of a rank: bytes, and what its passes over the largest micro-batch take beyond them."""

    extra: Extra
    num_bytes: int
    gradients: int
    peaks: Peaks
    kept: Parts  # from the phase "logprobs" to the update: what a teacher has said


def models_beside(
    config: Config, num_ranks: int, lengths: tuple[tuple[int, int], ...]
) -> list[Beside]:
    """`lengths` of the rollouts of the largest micro-batch. Raises ConfigError."""
    found = list[Beside]()
    here = replace(config.model, offload=False, lora=LoraConfig())
    for extra in extras_of(config):
        trains = extra.kind == "critic"
        work = Pass(
            extra.folder,
            here,
            config.loss,
            num_ranks,
            lengths,
            accumulates=trains,
            scores=True,
            on_gpu=True,
        )
        peaks = peaks_of(work)
        if not extra.has_lm_head:
            peaks = Peaks(_without_logits(peaks.scoring), _without_logits(peaks.update))
        gradients = 4 * extra.shard(config, num_ranks) if trains else 0
        num_bytes, kept = extra.num_bytes(config, num_ranks), said_by(config, extra, num_ranks)
        found.append(Beside(extra, num_bytes, gradients, peaks, kept))
    return found


def said_by(config: Config, extra: Extra, num_ranks: int) -> Parts:
    """Bytes of what a teacher says of all rollouts of a rank."""
    sizes = extra.model.dimensions
    if extra.kind != "teacher" or sizes is None:
        return Counter()
    rollouts = -(-config.rollout.num_prompts_per_step * config.rollout.group_size // num_ranks)
    tokens, itemsize = (
        rollouts * config.rollout.max_completion_tokens,
        memory.ITEMSIZE[config.model.dtype],
    )
    if config.teacher.loss == "sampled":
        return Counter({f"{extra.name}'s logprobs": 4 * tokens})
    if config.teacher.loss == "topk":
        return Counter({f"{extra.name}'s likeliest tokens": 12 * config.teacher.top_k * tokens})
    head = sizes.vocabulary * sizes.hidden * itemsize
    return Counter(
        {
            f"{extra.name}'s hidden states": tokens * sizes.hidden * itemsize,
            f"{extra.name}'s lm_head": head,
        }
    )


def widened(peaks: Peaks, models: Sequence[Beside]) -> Peaks:
    """The policy's peaks with those of models that run in the same phases, in turn: the largest counts, beside what is
    kept from one phase to the other."""
    waiting = [model for model in models if model.extra.waits]
    kept = sum((model.kept for model in waiting), Counter[str]())
    scoring = [peaks.scoring, *(model.peaks.scoring for model in waiting)]
    update = [peaks.update]
    for model in waiting:
        if model.extra.kind == "critic":
            of_gradients = Counter({"gradients": model.gradients})
            update.append(max(model.peaks.update, of_gradients, key=Counter.total))
    return Peaks(max(scoring, key=Counter.total) + kept, max(update, key=Counter.total) + kept)


def with_value_head(
    peaks: Peaks, config: Config, hidden: int, lengths: Sequence[tuple[int, int]]
) -> Peaks:
    """Of a critic on the policy's layers: the head with its moments and gradient on the rank that has its row, and the
    states that it is given in float32, of the completions of the largest micro-batch."""
    if not config.critic.is_on_policy:
        return peaks
    head = (memory.TRAINED_ITEMSIZE + 4) * (hidden + 1) + 4 * hidden * sum(
        completion for _, completion in lengths
    )
    return Peaks(
        peaks.scoring + Counter({"value head": head}), peaks.update + Counter({"value head": head})
    )


def with_models(phases: dict[str, Parts], models: Sequence[Beside]) -> dict[str, Parts]:
    """`phases` with what the models hold in them."""
    held = Counter({model.extra.name: model.num_bytes for model in models if model.extra.waits})
    held_in = "logprobs", "update", "checkpoint"
    found = {name: parts + held if name in held_in else parts for name, parts in phases.items()}
    # The engine sleeps while reward models score, one after the other.
    asleep = Counter(
        {what: size for what, size in phases["reward"].items() if not what.startswith(_OF_ENGINE)}
    )
    for model in models:
        if not model.extra.waits:
            scoring = model.peaks.scoring + Counter(
                {"fragmentation": int(FRAGMENTATION * model.peaks.scoring.total())}
            )
            found["reward"] = max(
                found["reward"],
                asleep + Counter({model.extra.name: model.num_bytes}) + scoring,
                key=Counter.total,
            )
    return found


def host_bytes(models: Sequence[Beside]) -> Parts:
    """In the memory of a rank's host: what waits there, and the copy that a checkpoint makes of a critic."""
    copies = sum(model.num_bytes for model in models if model.extra.kind == "critic")
    waiting = Counter({f"{model.extra.name}, waiting": model.num_bytes for model in models})
    return waiting + Counter({"checkpoint's copy": copies})


def with_time(
    time: StepTime, config: Config, models: Sequence[Beside], card: Card, num_ranks: int
) -> StepTime:
    """With a forward pass of each model over the rollouts, of several teachers each over its share; of a critic its
    update too; and the way to host memory and back."""
    seconds = dict(time.phases)
    num_teachers = max(1, len(config.teacher.paths))
    speed = Speed(card, num_ranks // config.model.num_replicas)
    for model in models:
        forward = _forward_s(config, model.extra, speed, num_ranks)
        moved = model.num_bytes / (card.host_gb_s * 1e9)
        if model.extra.kind == "reward model":
            seconds["reward"] = seconds.get("reward", 0.0) + forward + 2 * moved
            continue
        seconds["logprobs"] += forward / (num_teachers if model.extra.kind == "teacher" else 1)
        seconds["weight_sync"] += moved
        seconds["update"] += moved
        if model.extra.kind == "critic":
            again = {False: 0.0, "selective": 0.1, True: 1.0}[config.model.activation_checkpointing]
            stepped = config.training.num_optimizer_steps * 28 * model.gradients / 4 / speed.memory
            seconds["update"] += config.training.num_epochs * (3 + again) * forward + stepped
    return StepTime(seconds)


def _forward_s(config: Config, extra: Extra, speed: Speed, num_ranks: int) -> float:
    """Of all rollouts of a rank, at full length; or its gathers, where they take longer."""
    sizes = extra.model.dimensions
    if sizes is None:
        return 0.0
    rollouts = -(-config.rollout.num_prompts_per_step * config.rollout.group_size // num_ranks)
    itemsize, embedding = memory.ITEMSIZE[config.model.dtype], sizes.vocabulary * sizes.hidden
    head = embedding if extra.has_lm_head else 0
    tied = head and "lm_head.weight" not in extra.model.shapes
    # The embedding is looked up, not multiplied.
    multiplied = extra.model.num_parameters - embedding + (head if tied else 0)
    lengths = [(config.data.max_prompt_tokens, config.rollout.max_completion_tokens)] * rollouts
    work = Work(sizes, multiplied, head, lengths, itemsize)
    _, rows = memory.micro_batches_per_step(config, num_ranks)
    gathers = rows // config.training.num_epochs * speed.gather_s(extra.model, itemsize)
    return max(forward_flops(work) / speed.flops, gathers)


def _without_logits(parts: Parts) -> Parts:
    return Counter({what: size for what, size in parts.items() if what != "logits"})
