"""Plans a config: predicts the memory of one rank in each phase of a step, and suggests changes.

`make_plan` returns a Plan: the device memory in each phase, the host memory, and the time of a
step. `suggestions` searches for config overrides with which a plan that does not fit would fit.

A *phase* is a part of a step (rollout, update, ...; PHASES in config/schema.py). A *usage* maps
purposes, such as "gradients", to bytes. A *peak* is the usage at the moment with the most bytes. A
*side model* is a teacher, critic or reward model (checks/signals.py). Teachers and a critic wait in
host memory while the engine is awake. Reward models are on the device only while they score, and
the engine sleeps meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_spmd.checks.memory import (
    engine_backup,
    engine_tokens,
    engine_weights,
    extra_passes,
    is_shared_teacher,
    kv_itemsize,
    micro_batch_tokens,
    micro_batches_per_step,
    replica_ranks,
    route_bytes,
    sequences_of_engine,
    shard_numel,
    sync_buffers,
    trained_bytes,
)
from grpo_spmd.checks.model_folder import folder_with_config
from grpo_spmd.checks.signals import Kind, SideModel, head_shapes, side_models
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import decided
from grpo_spmd.config.schema import (
    ENGINE_RANKS_KEY,
    MICRO_BATCH_KEY,
    PHASES,
    RECOMPUTE_KEY,
    Config,
    LoraConfig,
)
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import (
    ModelFacts,
    Shapes,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    shapes_from_config,
    text_config,
)
from grpo_spmd.tools.plan.dry_run import Pass, Peaks, Usage, parameter_shapes, peaks_of
from grpo_spmd.tools.plan.step_time import (
    ADAMW_BYTES,
    CONTEXT,
    GIB,
    RECOMPUTED,
    STEP_BYTES,
    Case,
    engine_activations,
    engine_places,
    forward_s,
    graph_bytes,
    layer_in_reload,
    nccl_bytes,
    sampler_tables,
    step_time,
    with_fragmentation,
)

# (prompt tokens, completion tokens) of each rollout.
Lengths = Sequence[tuple[int, int]]
# Tokens in one block of vLLM's KV cache on a GPU.
_BLOCK = 16
# The smallest chunk of logits that is suggested.
_MIN_CHUNK = 256
# The override that trains LoRA adapters, which is suggested if nothing else fits.
_LORA = "model.lora.rank=16"
# Purposes whose bytes are estimated (step_time.py). The bytes of all others are counted.
_ESTIMATED = frozenset(
    {
        "CUDA context",
        "NCCL",
        "CUDA graphs, workspaces",
        "engine's activations",
        "engine's sampler tables",
        "layer in load",
        "fragmentation",
    }
)


# Side models


@dataclass(frozen=True)
class PlannedModel:
    """The memory that a side model takes on one rank."""

    side: SideModel
    # The model's shapes, with the head that the run gives it.
    facts: ModelFacts
    num_bytes: int
    # Bytes of the gradients; 0 for a frozen model.
    gradients: int
    # Its peaks in passes over the largest micro-batch.
    peaks: Peaks
    # A teacher's scores, which stay on the device from the phase "logprobs" to the update.
    answers: Usage

    @property
    def waits(self) -> bool:
        """True for a teacher or critic, which is on the device from the end of the rollout to the
        next weight sync; False for a reward model, which is there only while it scores."""
        return self.side.kind != "reward model"


def plan_side_models(case: Case) -> list[PlannedModel]:
    """Returns the memory that each side model of the config takes on one rank.

    Raises ConfigError, for example if the config.json of a model is not on this machine.
    """
    return [_plan_model(side, case) for side in side_models(case.config)]


def _plan_model(side: SideModel, case: Case) -> PlannedModel:
    """Returns the memory that a teacher, critic or reward model takes on one rank: weights,
    gradients, the peaks of its passes over the largest micro-batch, and a teacher's scores. Raises
    ConfigError."""
    folder, config = folder_with_config(side.path, side.key, side.revision), case.config
    facts = facts_from_config(folder)
    facts = replace(facts, shapes=with_head(side.kind, facts.shapes, facts.config))
    # Teachers and reward models are frozen.
    trains = side.kind == "critic"
    work = trainer_pass(config, folder, case.num_ranks)
    model = replace(work.model, lora=LoraConfig())
    peaks = peaks_of(replace(work, model=model, accumulates=trains, scores=True))
    if side.kind != "teacher":
        # The dry run always has an lm_head, but these models have none.
        scoring, update = peaks.scoring.copy(), peaks.update.copy()
        del scoring["logits"], update["logits"]
        peaks = Peaks(scoring, update)
    ranks = replica_ranks(config, case.num_ranks)
    return PlannedModel(
        side=side,
        facts=facts,
        num_bytes=side.num_bytes(config, facts.shapes, ranks),
        gradients=4 * shard_numel(facts.shapes, ranks) * trains,
        peaks=peaks,
        answers=teacher_answers(replace(case, model=facts), side),
    )


def facts_from_config(folder: Path) -> ModelFacts:
    """Returns a model's sizes according to its config.json alone, since weights in the same folder
    may be incomplete or another model's. Raises ConfigError or OSError."""
    config = text_config(read_model_config(folder))
    shapes = shapes_from_config(config) or parameter_shapes(folder)
    return ModelFacts(shapes, config, "config.json")


def with_head(kind: Kind, shapes: Shapes, config: dict[str, Any]) -> Shapes:
    """Returns the parameter shapes of a side model of this kind: those of a causal LM (`shapes`),
    for a critic or reward model with its own head in place of the lm_head."""
    if kind == "teacher":
        return shapes
    num_labels = 1 if kind == "critic" else len(config.get("id2label") or (0, 1))
    head = {"head.weight": (num_labels, int(config.get("hidden_size") or 0))}
    return {name: shape for name, shape in shapes.items() if name != "lm_head.weight"} | head


def teacher_answers(case: Case, side: SideModel) -> Usage:
    """Returns the bytes of a teacher's scores of all rollouts of a rank; an empty usage for other
    side models. `case.model` is the teacher."""
    if side.kind != "teacher" or case.model.dimensions is None:
        return Usage()
    teacher, sizes = case.config.teacher, case.sizes
    # The scores of all rollouts are kept until the update.
    tokens = case.num_rollouts * case.config.rollout.max_completion_tokens
    row = sizes.hidden * case.itemsize
    results = {
        "sampled": {"logprobs": 4 * tokens},
        # For each token a float32 logprob and an int64 id.
        "topk": {"likeliest tokens": 12 * teacher.top_k * tokens},
        "full": {"hidden states": tokens * row, "lm_head": sizes.vocabulary * row},
    }
    return Usage({f"{side.name}'s {name}": n for name, n in results[teacher.loss].items()})


def shared_answers(case: Case) -> Usage:
    """Returns the bytes of the scores of teachers without weights of their own.

    These teachers use the weights of the policy or the reference."""
    answers = Usage()
    for name, path in case.config.teacher.paths.items():
        if is_shared_teacher(case.config, path):
            side = SideModel(f"teacher {name}".strip(), "teacher", path, "teacher.path")
            answers += teacher_answers(case, side)
    return answers


def merge_peaks(peaks: Peaks, models: Sequence[PlannedModel], answers: Usage) -> Peaks:
    """Returns the peaks of the phases "logprobs" and "update" over the policy and the side models.

    `peaks` are those of the policy alone. The models run one after the other, so the largest peak
    counts. The scores of all teachers are added to it; `answers` has the scores of teachers without
    weights of their own."""
    scoring, update = [peaks.scoring], [peaks.update]
    for model in models:
        if model.waits:
            answers = answers + model.answers
            scoring.append(model.peaks.scoring)
        if model.side.kind == "critic":
            # The optimizer step needs all gradients at the same time.
            update += [model.peaks.update, Usage(gradients=model.gradients)]
    largest = (max(usages, key=Usage.total) for usages in (scoring, update))
    return Peaks(*(usage + answers for usage in largest))


def with_value_head(peaks: Peaks, config: Config, hidden: int, lengths: Lengths) -> Peaks:
    """Returns the peaks, with the memory of a value head on the policy's model added.

    A value head is a critic there; without one in the config nothing is added. The memory is the
    head's state, its gradient, and its float32 inputs for the completions of the largest
    micro-batch. `hidden` is the size of one input, `lengths` are those of the rollouts."""
    # is_on_policy: the critic is a value head on the policy's own model.
    if not config.critic.is_on_policy:
        return peaks
    num_tokens = sum(completion for _, completion in lengths)
    num_bytes = trained_bytes(head_shapes(hidden), 1, config.optimizer)
    num_bytes += 4 * (hidden + 1) + 4 * hidden * num_tokens
    head = Usage({"value head": num_bytes})
    return Peaks(peaks.scoring + head, peaks.update + head)


def add_time(
    seconds: dict[str, float], case: Case, models: Sequence[PlannedModel]
) -> dict[str, float]:
    """Returns the seconds of each phase with the time of the side models added.

    Each model makes a forward pass over the rollouts, and the critic also an update. All are copied
    to and from host memory. Changes and returns `seconds`.
    """
    training = case.config.training
    for model in models:
        kind = model.side.kind
        forward = 0.0
        # Without known dimensions the time of the passes is not estimated.
        if model.facts.dimensions is not None:
            forward = forward_s(replace(case, model=model.facts), has_lm_head=kind == "teacher")
        copy = model.num_bytes / (case.card.host_gb_s * 1e9)
        if kind == "reward model":
            seconds["reward"] = seconds.get("reward", 0.0) + forward + 2 * copy
            continue
        # Each rollout is scored by one teacher: several teachers divide the rollouts.
        num_sharing = max(1, len(case.config.teacher.paths)) if kind == "teacher" else 1
        seconds["logprobs"] += forward / num_sharing
        seconds["weight_sync"] += copy
        seconds["update"] += copy
        if kind == "critic":
            # A backward pass costs two forward passes.
            passes = 3 + RECOMPUTED[case.config.model.recompute]
            adamw = (
                ADAMW_BYTES[case.config.optimizer.name] * model.gradients / 4 / case.speed.memory
            )
            seconds["update"] += training.num_epochs * passes * forward
            seconds["update"] += training.num_optimizer_steps * adamw
    return seconds


# The plan of a config


@dataclass(frozen=True)
class KvCache:
    """The predicted KV cache of one engine."""

    # Bytes of the cache on one rank.
    num_bytes: int
    # Number of tokens that fit into the cache.
    tokens: int
    # Bytes for the engine's longest sequence: a rollout, or a judge's prompt and reply.
    longest_bytes: int
    # Number of tokens of all the engine's sequences of a step at full length. The sequences of a
    # group share the tokens of their prompt, unless the model has recurrent layers.
    needed_tokens: int
    # Number of sequences of full length that can run at the same time; more than `sequences` if
    # there is room for more.
    full_length: int
    # Number of the engine's sequences of one step.
    sequences: int

    @property
    def num_running(self) -> int:
        """The number of the step's sequences that run at the same time, at full length."""
        return min(self.full_length, self.sequences)


@dataclass(frozen=True)
class Plan:
    """The prediction for one config on one kind of card."""

    case: Case
    # The device memory of one rank at the peak of each phase.
    phases: dict[str, Usage]
    # The host memory of one rank.
    host: Usage
    kv_cache: KvCache
    # The seconds of each phase.
    time: dict[str, float]

    def peak_gib(self, phase: str) -> float:
        """Returns the GiB on the device at the phase's peak."""
        return self.phases[phase].total() / GIB

    def margin_of(self, phase: str) -> float:
        """Returns the GiB that are free at the phase's peak; negative if the phase does not fit."""
        return self.case.card.gib - self.peak_gib(phase)

    @property
    def step_s(self) -> float:
        """The seconds of a step."""
        return sum(self.time.values())

    @property
    def tightest(self) -> str:
        """The phase with the least free memory."""
        return min(self.phases, key=self.margin_of)

    @property
    def margin_gib(self) -> float:
        """The free GiB in the tightest phase, negative if the plan does not fit.

        If the KV cache is too small for its longest sequence, the lesser of that number and the
        cache's spare GiB."""
        spare = self.kv_spare_gib
        return min(self.margin_of(self.tightest), spare if spare < 0 else math.inf)

    @property
    def kv_spare_gib(self) -> float:
        """The GiB that the KV cache has beyond its longest sequence; negative if it has less."""
        return (self.kv_cache.num_bytes - self.kv_cache.longest_bytes) / GIB

    @property
    def engine_margin_gib(self) -> float:
        """The free GiB for the engine: the lesser of what is free in the tightest phase in which it
        is awake, and what its KV cache has beyond its longest sequence."""
        # The engine sleeps in the phases that are left out here.
        awake = [
            self.margin_of(name)
            for name in self.phases
            if name not in ("logprobs", "update", "checkpoint")
        ]
        return min(*awake, self.kv_spare_gib)

    @property
    def fits(self) -> bool:
        """True if all phases fit, and the KV cache holds its longest sequence."""
        return self.margin_gib >= 0

    @property
    def cannot_fit(self) -> bool:
        """True if the counted bytes alone are too many, so that the config cannot fit even if the
        estimates are wrong.

        Too many are more than the card has in a phase, or, for the engine's weights and its longest
        sequence, more than the engine may use."""
        config, size = self.case.config, self.case.card.gib * GIB
        counted = [
            sum(num_bytes for name, num_bytes in usage.items() if name not in _ESTIMATED)
            for usage in self.phases.values()
        ]
        in_engine = 0
        if not isinstance(config.rollout.engine.get("kv_cache_memory_bytes"), int):
            in_engine = engine_weights(config, self.case.model) + self.kv_cache.longest_bytes
        return max(counted) > size or in_engine > config.rollout.gpu_memory_utilization * size

    @property
    def trainer_fits(self) -> bool:
        """True if the phases "logprobs" and "update" fit, in which the engine sleeps."""
        return min(self.margin_of("logprobs"), self.margin_of("update")) >= 0


def make_plan(case: Case, folder: Path) -> Plan:
    """Returns the plan of a case. `folder` holds the config.json of the policy's model. Raises
    ConfigError if the model cannot be built from it."""
    config, state = case.config, case.state
    models = plan_side_models(case)
    work = trainer_pass(config, folder, case.num_ranks)
    peaks = with_value_head(peaks_of(work), config, case.sizes.hidden, work.lengths)
    peaks = merge_peaks(peaks, models, shared_answers(case))
    cache = kv_cache(case)
    copied = [model.num_bytes for model in models if model.side.kind == "critic"]
    host = Usage({"checkpoint's copy": state.saved + sum(copied)})
    host["offloaded"] = state.offloaded(config.model.offload)
    host["engine's weights, asleep"] = engine_backup(config, case.model, sampler_tables(case))
    # Routes are the experts that an MoE's router chose for each token. While rollouts are sent to
    # other ranks, their routes exist as arrays, as bytes and in a message that grows.
    host["routes"] = 4 * route_bytes(config, case.model, case.num_ranks)
    for model in models:
        host[f"{model.side.name}, waiting"] += model.num_bytes
    return Plan(
        case,
        phases=plan_phases(case, peaks, cache, models),
        host=host,
        kv_cache=cache,
        time=add_time(step_time(case, cache.full_length), case, models),
    )


def trainer_pass(config: Config, folder: Path, num_ranks: int, *, on_gpu: bool = True) -> Pass:
    """Returns the description of the policy's passes over the largest micro-batch, as the dry run
    needs it."""
    _, num_micro_batches = micro_batches_per_step(config, num_ranks)
    return Pass(
        folder=folder,
        # Nothing is offloaded during a pass, so one dry run serves all settings of model.offload.
        model=replace(config.model, offload=False),
        loss=config.loss,
        num_ranks=num_ranks,
        lengths=longest_row(config, num_ranks),
        accumulates=num_micro_batches > config.training.num_optimizer_steps,
        scores=sum(extra_passes(config)) > 0,
        on_gpu=on_gpu,
    )


def longest_row(config: Config, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Returns (prompt tokens, completion tokens) of each rollout in the largest micro-batch.

    It has as many rollouts of full length as fit, and a shorter one in the remaining tokens."""
    num_tokens = micro_batch_tokens(config, num_ranks)
    num_full, remaining_tokens = divmod(num_tokens, config.max_rollout_tokens)
    lengths = [(config.data.max_prompt_tokens, config.rollout.max_completion_tokens)] * num_full
    if remaining_tokens > 1:
        # A rollout has at least one prompt token and one completion token.
        lengths.append((1, remaining_tokens - 1))
    return tuple(lengths)


def kv_cache(case: Case) -> KvCache:
    """Returns the predicted KV cache of one engine.

    Unless the config sets its size, vLLM gives it all the memory that the engine may use
    (gpu_memory_utilization), less the engine's weights and buffers."""
    config, rollout = case.config, case.config.rollout
    num_bytes = rollout.engine.get("kv_cache_memory_bytes")
    if not isinstance(num_bytes, int):
        budget = int(rollout.gpu_memory_utilization * case.card.gib * GIB)
        num_bytes = budget - engine_weights(config, case.model)
        num_bytes -= engine_activations(case) + sampler_tables(case) + graph_bytes(case)
    token = kv_bytes_per_token(case.sizes, kv_itemsize(config), rollout.engine_ranks)
    sequences = sequences_of_engine(config, case.num_ranks)
    longest_bytes = _round_to_blocks(engine_tokens(config)) * token
    # Recurrent states take `sequence_bytes` for each sequence, whatever its length. The rest is for
    # tokens: assume the proportion that the longest sequences have.
    sequence_bytes = kv_bytes_per_sequence(case.sizes, rollout.engine_ranks)
    num_bytes_of_tokens = num_bytes * longest_bytes // (longest_bytes + sequence_bytes)
    tokens = max(0, num_bytes_of_tokens // (token * _BLOCK) * _BLOCK)
    # The sequences of a group share the blocks of their prompt, but no recurrent states.
    prompts = sequences if sequence_bytes else sequences // rollout.group_size
    needed = prompts * config.data.max_prompt_tokens + sequences * rollout.max_completion_tokens
    num_running = tokens // _round_to_blocks(config.max_rollout_tokens)
    return KvCache(
        num_bytes=num_bytes,
        tokens=tokens,
        longest_bytes=longest_bytes + sequence_bytes,
        needed_tokens=needed,
        full_length=min(num_running, engine_places(case)),
        sequences=sequences,
    )


def _round_to_blocks(tokens: int) -> int:
    """Returns the number of tokens, rounded up to whole blocks of the KV cache."""
    return -(-tokens // _BLOCK) * _BLOCK


def plan_phases(
    case: Case, peaks: Peaks, cache: KvCache, models: Sequence[PlannedModel] = ()
) -> dict[str, Usage]:
    """Returns the device memory at the peak of each phase, in a step after the first update, when
    the optimizer has its state.

    `peaks` are the result of `merge_peaks`, and `models` are the side models.
    """
    config, state, offload = case.config, case.state, case.config.model.offload
    # Memory outside of tensors, which is there in every phase.
    fixed = Usage({"CUDA context": CONTEXT, "NCCL": nccl_bytes(case)})
    fixed["CUDA graphs, workspaces"] = graph_bytes(case)
    policy = Usage(policy=4 * state.trained, base=state.base)
    reference = Usage(reference=state.reference)
    trainer = policy + Usage(moments=state.moments) + reference
    # The trainer's tensors that are on the device while the engine is awake (`awake`), depending on
    # model.offload, and in the weight sync, which reads the policy (`in_sync`).
    awake = {False: trainer, "optimizer": policy + reference, True: Usage()}[offload]
    in_sync = awake or policy
    engine = Usage({"engine's weights": engine_weights(config, case.model)})
    engine["engine's sampler tables"] = sampler_tables(case)
    buffers = Usage(sync_buffers(config, case.model, case.num_ranks))
    buffers["layer in load"] = layer_in_reload(case)
    sampling = awake + engine + Usage({"KV cache": max(0, cache.num_bytes)})
    sampling["engine's activations"] = engine_activations(case)
    # The optimizer step needs all gradients at the same time. The fused AdamW, which is used on a
    # GPU, allocates nothing itself.
    step = Usage(gradients=state.gradients)
    if config.optimizer.name == "adamw_8bit":
        step["optimizer's chunk"] = STEP_BYTES
    update = max(peaks.update, step, key=Usage.total)
    # For each reward model the device memory while it scores.
    scored = [
        # While reward models score, one after the other, the engine sleeps.
        awake + Usage({model.side.name: model.num_bytes}) + with_fragmentation(model.peaks.scoring)
        for model in models
        if not model.waits
    ]
    # Teachers and a critic, which come to the device with the trainer's tensors.
    waiting = Usage({model.side.name: model.num_bytes for model in models if model.waits})
    whole_trainer = (
        trainer + waiting + Usage(routes=route_bytes(config, case.model, case.num_ranks))
    )
    phases = {
        "weight_sync": in_sync + engine + with_fragmentation(buffers),
        "rollout": sampling,
        "reward": max([sampling, *scored], key=Usage.total),
        "logprobs": whole_trainer + with_fragmentation(peaks.scoring),
        "update": whole_trainer + with_fragmentation(update),
        "checkpoint": whole_trainer,
    }
    if config.eval.every_steps:
        phases["eval"] = sampling
    return {phase: fixed + phases[phase] for phase in PHASES if phase in phases}


# The values for keys that are auto


def decide(
    config: Config, plan_of: Callable[[Config], Plan], engine_sizes: Sequence[int] = (1,)
) -> Plan:
    """Returns the plan of the config with a value chosen for each key that is auto.

    An engine gets the smallest number of ranks in `engine_sizes` (in ascending order) with which
    the phases fit in which it is awake. If none fits, it gets the number that lacks the least.

    For the trainer the values of `_decisions` are tried in their order, until its phases fit; if
    none fit, the last ones are taken.
    """

    def lack(candidate: Config) -> float:
        """Returns the GiB that the engine lacks with this number of ranks; 0.0 if it fits."""
        # Any of the trainer's values will do, since they do not matter in the engine's phases.
        return max(0.0, -plan_of(next(_decisions(candidate))).engine_margin_gib)

    sized = [decided(config, {ENGINE_RANKS_KEY: size}) for size in engine_sizes]
    config = min(sized, key=lack) if len(sized) > 1 else sized[0]
    for candidate in _decisions(config):
        plan = plan_of(candidate)
        if plan.trainer_fits:
            break
    return plan


def _decisions(config: Config) -> Iterator[Config]:
    """Yields copies of the config with values for the trainer's keys that are auto, fastest first.

    Without such keys there is only one copy. In the first copies layers recompute nothing in the
    backward pass, then all but matrix products, then everything; after that the micro-batch is
    halved again and again, down to the longest rollout."""
    recompute, tokens = RECOMPUTE_KEY, MICRO_BATCH_KEY
    num_tokens = config.micro_batch_tokens
    # auto never chooses fewer tokens for a micro-batch (or more, if a rollout needs more).
    smallest = max(1024, config.max_rollout_tokens)
    yield decided(config, {recompute: False, tokens: num_tokens})
    if config.model.activation_checkpointing == "auto":
        # A compiled layer already keeps about as little as selective checkpointing.
        if not config.model.compile:
            yield decided(config, {recompute: "selective", tokens: num_tokens})
        yield decided(config, {recompute: True, tokens: num_tokens})
    if config.training.max_tokens_per_micro_batch == "auto":
        while num_tokens > smallest:
            num_tokens = max(num_tokens // 2, smallest)
            yield decided(config, {recompute: True, tokens: num_tokens})


# Suggestions: config overrides that would make a run fit


# A Planner returns the plan of the config with these overrides, or raises ConfigError if a run
# would refuse them.
Planner = Callable[[Sequence[str]], Plan]


@dataclass(frozen=True)
class Suggestion:
    """Config overrides, as grpo_spmd.train takes them, and the plan of the config with them."""

    overrides: tuple[str, ...]
    plan: Plan

    @property
    def changes_training(self) -> bool:
        """True if the overrides train adapters in place of all parameters."""
        return _LORA in self.overrides


def larger_cache(plan: Plan, replan: Planner) -> Suggestion | None:
    """Returns a suggestion of a larger KV cache, with which more sequences run at the same time.

    It sets gpu_memory_utilization. Returns None if the plan does not fit, if all sequences of a
    step run together already, or if too little memory is free while the engine is awake."""
    cache, rollout = plan.kv_cache, plan.case.config.rollout
    if not plan.fits or cache.full_length >= cache.sequences:
        return None
    with_cache = plan.phases.keys() & {"rollout", "reward", "eval"}
    free = min(plan.margin_of(phase) for phase in with_cache)
    # A twentieth of the card stays free.
    share = rollout.gpu_memory_utilization + free / plan.case.card.gib - 0.05
    override = f"rollout.gpu_memory_utilization={int(share * 100) / 100:g}"
    with suppress(ConfigError):
        advised = Suggestion((override,), replan((override,)))
        if advised.plan.fits and advised.plan.kv_cache.full_length > cache.full_length:
            return advised
    return None


def suggestions(plan: Plan, replan: Planner) -> list[Suggestion]:
    """Returns suggestions for a plan that does not fit.

    The list is empty if the plan fits, or if no override helps. `replan` makes the plan of the
    config with overrides. If single overrides are enough, each of them is a suggestion, the fastest
    first. Otherwise there is one suggestion with several overrides, which are added one by one,
    each time the one that leaves most room. If it does not fit either and one that trains only
    adapters does, that one is returned in its place."""
    if plan.fits:
        return []
    start = Suggestion((), plan)
    fitting = [candidate for candidate in _try_changes(start, replan) if candidate.plan.fits]
    if fitting:
        return sorted(fitting, key=_cost)
    best = _add_up(start, replan)
    if not best.plan.fits and not plan.case.config.model.lora.rank:
        # Not every config can train adapters; then replan raises.
        with suppress(ConfigError):
            adapters = _add_up(Suggestion((_LORA,), replan((_LORA,))), replan)
            best = adapters if adapters.plan.fits else best
    return [best] if best.overrides else []


def _add_up(start: Suggestion, replan: Planner) -> Suggestion:
    """Returns the suggestion `start` with overrides added one by one.

    Each time it is the override that leaves most room, until the plan fits or no override helps."""
    best = start
    while not best.plan.fits:
        candidate = max(
            _try_changes(best, replan),
            key=lambda suggestion: (suggestion.plan.margin_gib, -suggestion.plan.step_s),
            default=best,
        )
        if candidate.plan.margin_gib <= best.plan.margin_gib:
            break
        best = candidate
    return best


def _cost(suggestion: Suggestion) -> tuple[float, int, float]:
    """Returns the key by which suggestions are sorted.

    It is the time of a step, then the number of micro-batches (each costs a little time that the
    estimate leaves out), then the free memory."""
    plan = suggestion.plan
    return plan.step_s, plan.case.num_micro_batches, -plan.margin_gib


def _try_changes(start: Suggestion, replan: Planner) -> list[Suggestion]:
    """Returns copies of the suggestion `start`, each with one override more.

    There is a copy for each override that could help one of the phases that do not fit."""
    candidates = []
    short = {phase for phase in start.plan.phases if start.plan.margin_of(phase) < 0}
    for change in _changes(start.plan, short):
        # A new value of a key replaces an earlier override of the same key.
        key = change.partition("=")[0] + "="
        overrides = (*(text for text in start.overrides if not text.startswith(key)), change)
        # Overrides that the config's rules refuse are left out.
        with suppress(ConfigError):
            candidates.append(Suggestion(overrides, replan(overrides)))
    return candidates


def _changes(plan: Plan, short: set[str]) -> Iterator[str]:
    """Yields single overrides that could help one of the phases `short`, which do not fit."""
    config, rollout = plan.case.config, plan.case.config.rollout
    if short & {"update", "logprobs"}:
        yield from _trainer_changes(plan, short)
    with_engine = short & {"weight_sync", "eval", "rollout", "reward"}
    if with_engine:
        # Offloading leaves fewer of the trainer's tensors on the device.
        if config.model.offload is False:
            yield "model.offload=optimizer"
        if config.model.offload is not True:
            yield "model.offload=true"
        if "weight_sync" in short and rollout.sync_bucket_bytes("cuda") > 16 << 20:
            yield "rollout.weight_sync_bucket_mib=16"
    # With a KV cache that holds no rollout of full length, the engine may need a larger fraction of
    # the card; in a phase that does not fit, a smaller one.
    fraction, holds_no_rollout = rollout.gpu_memory_utilization, not plan.kv_cache.full_length
    fractions: list[float] = []
    # In a weight sync the KV cache is not on the device, so a smaller fraction does not help there.
    if with_engine - {"weight_sync"}:
        smaller = (fraction + plan.margin_gib / plan.case.card.gib, fraction / 2)
        fractions += [value for value in smaller if value >= 0.01]
    if holds_no_rollout:
        fractions += [value for value in (0.5, 0.6, 0.7, 0.8, 0.9) if value > fraction]
    for value in fractions:
        yield f"rollout.gpu_memory_utilization={int(value * 100) / 100:g}"
    if with_engine or holds_no_rollout:
        for size in (2, 4, 8):
            if size > rollout.engine_ranks and plan.case.num_ranks % size == 0:
                yield f"rollout.tensor_parallel_size={size}"


def _trainer_changes(plan: Plan, short: set[str]) -> Iterator[str]:
    """Yields single overrides with which the trainer's passes take less memory.

    `short` has the phases that do not fit."""
    model, max_tokens = plan.case.config.model, plan.case.config.max_rollout_tokens
    # A compiled layer already keeps about as little as selective checkpointing.
    if not model.recompute and not model.compile:
        yield "model.activation_checkpointing=selective"
    if model.recompute is not True:
        yield "model.activation_checkpointing=true"
    # A plan with another chunk size needs the slowest dry run. It is tried only if the logits take
    # more bytes than a phase lacks.
    could_help = any(plan.phases[name]["logits"] > -GIB * plan.margin_of(name) for name in short)
    if could_help and model.logprob_chunk_tokens > _MIN_CHUNK:
        yield f"model.logprob_chunk_tokens={max(_MIN_CHUNK, model.logprob_chunk_tokens // 4)}"
    for size in (2, 4, 8):
        if size > model.sequence_parallel_size:
            yield f"model.sequence_parallel_size={size}"
    budget = plan.case.config.micro_batch_tokens
    budgets = {max_tokens, *(max(max_tokens, budget // share) for share in (2, 4))}
    for tokens in sorted(budgets - {budget}, reverse=True):
        yield f"training.max_tokens_per_micro_batch={tokens}"
    if model.num_replicas > 1:
        yield "model.num_replicas=1"
