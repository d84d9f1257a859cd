"""What would make a run fit, the cheapest first by the model of the step's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grpo_spmd.config.schema import Config
from grpo_spmd.tools.plan.device import GIB
from grpo_spmd.tools.plan.phases import Plan

Planner = Callable[
    [Sequence[str]], Plan | None
]  # of the config with overrides; None where it would be refused
_LEAST_CHUNK = 256


@dataclass(frozen=True)
class Suggestion:
    """Overrides, as grpo_spmd.train takes them, and what becomes of the plan."""

    overrides: tuple[str, ...]
    plan: Plan


def suggestions(plan: Plan, replan: Planner) -> list[Suggestion]:
    """Nothing where it fits. Else single changes that make it fit, the cheapest first; where none does, changes added
    one by one, each time the one that leaves most room, as one suggestion, which may still not fit."""
    if plan.fits:
        return []
    tried = _tried(plan, (), replan, {phase for phase in plan.phases if plan.margin_of(phase) < 0})
    if fitting := [each for each in tried if each.plan.fits]:
        return sorted(fitting, key=_cost)
    taken, margin, best = tuple[str, ...](), plan.margin_gib, None
    while tried:
        most_room = max(tried, key=lambda each: (each.plan.margin_gib, -each.plan.time.total))
        if most_room.plan.margin_gib <= margin:
            break
        best, taken, margin = most_room, most_room.overrides, most_room.plan.margin_gib
        # What does not help the tightest phase cannot leave more room.
        tried = [] if best.plan.fits else _tried(best.plan, taken, replan, {best.plan.tightest})
    return [] if best is None else [best]


def _cost(suggestion: Suggestion) -> tuple[float, float]:
    return suggestion.plan.time.total, -suggestion.plan.margin_gib


def _tried(
    plan: Plan, taken: tuple[str, ...], replan: Planner, short: set[str]
) -> list[Suggestion]:
    found = []
    for change in _changes(plan.config, plan, short):
        name = change.partition("=")[0]
        overrides = (*(each for each in taken if each.partition("=")[0] != name), change)
        if (changed := replan(overrides)) is not None:
            found.append(Suggestion(overrides, changed))
    return found


def _changes(config: Config, plan: Plan, short: set[str]) -> Iterator[str]:
    """Single overrides that could help a phase that lacks room."""
    model, rollout, longest = config.model, config.rollout, config.max_rollout_tokens
    engine_awake = short & {"weight_sync", "eval", "rollout", "reward"}
    if short & {"update", "logprobs"}:
        if not model.activation_checkpointing and not model.compile:
            yield "model.activation_checkpointing=selective"
        if model.activation_checkpointing is not True:
            yield "model.activation_checkpointing=true"
        # Its dry run is the longest: tried where logits are what lacks, at the last perhaps.
        could = any(plan.phases[phase]["logits"] > -GIB * plan.margin_of(phase) for phase in short)
        if could and model.logprob_chunk_tokens > _LEAST_CHUNK:
            yield f"model.logprob_chunk_tokens={max(_LEAST_CHUNK, model.logprob_chunk_tokens // 4)}"
        budget = config.training.max_tokens_per_micro_batch
        for tokens in sorted(
            {max(longest, budget // 2), max(longest, budget // 4), longest}, reverse=True
        ):
            if tokens < budget:
                yield f"training.max_tokens_per_micro_batch={tokens}"
        if model.num_replicas > 1:
            yield "model.num_replicas=1"
    if engine_awake:
        if model.offload is False:
            yield "model.offload=optimizer"
        if model.offload is not True:
            yield "model.offload=true"
        if rollout.sync_bucket_bytes("cuda") > 16 << 20 and "weight_sync" in short:
            yield "rollout.weight_sync_bucket_mib=16"
    if engine_awake - {"weight_sync"}:
        least = rollout.gpu_memory_utilization + plan.margin_gib / plan.card.gib
        for share in (least, rollout.gpu_memory_utilization / 2):
            if (rounded := int(share * 100) / 100) > 0:
                yield f"rollout.gpu_memory_utilization={rounded:g}"
    if not plan.kv_cache.full_length:
        for share in (0.5, 0.6, 0.7, 0.8, 0.9):
            if share > rollout.gpu_memory_utilization:
                yield f"rollout.gpu_memory_utilization={share:g}"
    if engine_awake or not plan.kv_cache.full_length:
        for size in (2, 4, 8):
            if size > rollout.tensor_parallel_size and plan.num_ranks % size == 0:
                yield f"rollout.tensor_parallel_size={size}"
