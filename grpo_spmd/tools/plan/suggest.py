"""Config overrides that would make a run fit, the cheapest in time first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grpo_spmd.tools.plan.device import GIB
from grpo_spmd.tools.plan.phases import Plan

# Plans the config with overrides; None if the config would be refused.
Planner = Callable[[Sequence[str]], Plan | None]
_MIN_CHUNK = 256


@dataclass(frozen=True)
class Suggestion:
    """Overrides, as grpo_spmd.train takes them, and the plan with them."""

    overrides: tuple[str, ...]
    plan: Plan


def suggestions(plan: Plan, replan: Planner) -> list[Suggestion]:
    """Nothing for a plan that fits. Else the single overrides that make it fit, the cheapest
    first. If there are none: overrides added one by one, each time the one that leaves most room,
    as one suggestion, which may still not fit."""
    if plan.fits:
        return []
    short = {phase for phase in plan.phases if plan.margin_of(phase) < 0}
    candidates = _try_changes(plan, (), replan, short)
    fitting = [candidate for candidate in candidates if candidate.plan.fits]
    if fitting:
        return sorted(fitting, key=lambda s: (s.plan.time.total, -s.plan.margin_gib))
    best: list[Suggestion] = []
    margin = plan.margin_gib
    while candidates:
        candidate = max(candidates, key=lambda s: (s.plan.margin_gib, -s.plan.time.total))
        if candidate.plan.margin_gib <= margin:
            break
        best, margin = [candidate], candidate.plan.margin_gib
        if candidate.plan.fits:
            break
        # A change that does not help the tightest phase cannot leave more room.
        tightest = {candidate.plan.tightest}
        candidates = _try_changes(candidate.plan, candidate.overrides, replan, tightest)
    return best


def _try_changes(
    plan: Plan, overrides: tuple[str, ...], replan: Planner, short: set[str]
) -> list[Suggestion]:
    """Plans with one more change. `short`: phases that lack room."""
    candidates = []
    for change in _changes(plan, short):
        key = change.partition("=")[0] + "="
        changed = (*(text for text in overrides if not text.startswith(key)), change)
        new_plan = replan(changed)
        if new_plan is not None:
            candidates.append(Suggestion(changed, new_plan))
    return candidates


def _changes(plan: Plan, short: set[str]) -> Iterator[str]:
    """Yields single overrides that could help one of the phases."""
    with_engine = short & {"weight_sync", "eval", "rollout", "reward"}
    if short & {"update", "logprobs"}:
        yield from _trainer_changes(plan, short)
    if with_engine:
        yield from _offload_changes(plan, short)
    yield from _engine_changes(plan, with_engine)


def _trainer_changes(plan: Plan, short: set[str]) -> Iterator[str]:
    model, max_tokens = plan.config.model, plan.config.max_rollout_tokens
    # A compiled layer already keeps about as little as selective checkpointing.
    if not model.activation_checkpointing and not model.compile:
        yield "model.activation_checkpointing=selective"
    if model.activation_checkpointing is not True:
        yield "model.activation_checkpointing=true"
    # Its dry run takes longest: only tried if logits alone are more than what is lacking.
    could_help = any(plan.phases[name]["logits"] > -GIB * plan.margin_of(name) for name in short)
    if could_help and model.logprob_chunk_tokens > _MIN_CHUNK:
        yield f"model.logprob_chunk_tokens={max(_MIN_CHUNK, model.logprob_chunk_tokens // 4)}"
    budget = plan.config.training.max_tokens_per_micro_batch
    budgets = {max(max_tokens, budget // 2), max(max_tokens, budget // 4), max_tokens}
    for tokens in sorted(budgets, reverse=True):
        if tokens < budget:
            yield f"training.max_tokens_per_micro_batch={tokens}"
    if model.num_replicas > 1:
        yield "model.num_replicas=1"


def _offload_changes(plan: Plan, short: set[str]) -> Iterator[str]:
    offload = plan.config.model.offload
    if offload is False:
        yield "model.offload=optimizer"
    if offload is not True:
        yield "model.offload=true"
    if "weight_sync" in short and plan.config.rollout.sync_bucket_bytes("cuda") > 16 << 20:
        yield "rollout.weight_sync_bucket_mib=16"


def _engine_changes(plan: Plan, with_engine: set[str]) -> Iterator[str]:
    """`with_engine`: phases that lack room and in which the engine is awake."""
    rollout, holds_no_rollout = plan.config.rollout, not plan.kv_cache.full_length
    fraction = rollout.gpu_memory_utilization
    key = "rollout.gpu_memory_utilization"
    if with_engine - {"weight_sync"}:
        for smaller in (fraction + plan.margin_gib / plan.card.gib, fraction / 2):
            rounded = int(smaller * 100) / 100
            if rounded > 0:
                yield f"{key}={rounded:g}"
    if holds_no_rollout:
        for larger in (0.5, 0.6, 0.7, 0.8, 0.9):
            if larger > fraction:
                yield f"{key}={larger:g}"
    if with_engine or holds_no_rollout:
        for size in (2, 4, 8):
            if size > rollout.tensor_parallel_size and plan.num_ranks % size == 0:
                yield f"rollout.tensor_parallel_size={size}"
