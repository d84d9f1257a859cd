"""A plan as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from grpo_spmd.tools.plan.device import FRAGMENTATION, GIB
from grpo_spmd.tools.plan.dry_run import Parts
from grpo_spmd.tools.plan.phases import Plan
from grpo_spmd.tools.plan.suggest import Suggestion

_UNTRIED = "a prediction: nothing of it has been compared with a real GPU"


def as_text(plan: Plan, found: Sequence[Suggestion]) -> str:
    return "\n".join(_lines(plan, found))


def _lines(plan: Plan, found: Sequence[Suggestion]) -> Iterator[str]:
    card, cache, config = plan.card, plan.kv_cache, plan.config
    verdict = "fits" if plan.fits else "does not fit"
    size = f"{plan.num_parameters / 1e9:.2f} B parameters"
    yield f"{config.model.path} ({size}) on {plan.num_ranks} x {card.name} ({card.gib:g} GiB each): {verdict}"
    yield f"margin {plan.margin_gib:.1f} GiB, least in phase {plan.tightest}; {_UNTRIED}"
    yield ""
    yield f"{'phase':12} {'peak':>7} {'free':>7}  GiB of one rank, of the peak"
    for phase, parts in plan.phases.items():
        what = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _by_size(parts))
        yield f"{phase:12} {plan.peak_gib(phase):7.2f} {plan.margin_of(phase):7.2f}  {what}"
    yield ""
    estimates = (
        "CUDA context, NCCL, CUDA graphs and workspaces, engine's activations, layer in load"
    )
    yield f"estimates: {estimates}, fragmentation ({FRAGMENTATION:.0%} of a phase's own tensors); counted: the rest"
    host = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _by_size(plan.host)) or "nothing"
    yield f"host memory of a rank, GiB: {host}"
    held, needed = (
        f"{cache.tokens:,} tokens ({max(0, cache.num_bytes) / GIB:.2f} GiB)",
        f"{cache.needed_tokens:,}",
    )
    yield f"KV cache of an engine: {held} of {needed} for its {cache.sequences} sequences of a step at full length;"
    yield f"  {min(cache.full_length, cache.sequences)} of them of full length run at one time, others wait their turn"
    seconds = ", ".join(f"{phase} {s:.1f}" for phase, s in plan.time.phases.items())
    yield f"step, s, every completion at full length (a model: shares of the card's ceilings): {plan.time.total:.1f}"
    yield f"  {seconds}; rewards, evaluation and checkpoints not counted"
    if not plan.fits:
        yield ""
        yield (
            "what would make it fit, the cheapest first:"
            if found and found[0].plan.fits
            else "nothing tried fits:"
        )
        for each in found:
            time = f"step {each.plan.time.total:.1f} s"
            yield f"  {' '.join(each.overrides)}  margin {each.plan.margin_gib:.1f} GiB, {time}"


def as_json(plan: Plan, found: Sequence[Suggestion]) -> dict[str, Any]:
    cache, card = plan.kv_cache, plan.card
    return {
        "fits": plan.fits,
        "margin_gib": plan.margin_gib,
        "tightest_phase": plan.tightest,
        "is_prediction": True,  # never compared with a GPU
        "gpu": {
            "name": card.name,
            "gib": card.gib,
            "tflops": card.tflops,
            "memory_gb_s": card.memory_gb_s,
        },
        "num_ranks": plan.num_ranks,
        "num_parameters": plan.num_parameters,
        "phases": {
            phase: {
                "peak_gib": plan.peak_gib(phase),
                "free_gib": plan.margin_of(phase),
                "live_gib": {name: size / GIB for name, size in _by_size(parts)},
            }
            for phase, parts in plan.phases.items()
        },
        "host_gib": {name: size / GIB for name, size in _by_size(plan.host)},
        "kv_cache": {
            "gib": max(0, cache.num_bytes) / GIB,
            "tokens": cache.tokens,
            "needed_tokens": cache.needed_tokens,
            "full_length_at_once": cache.full_length,
            "sequences": cache.sequences,
        },
        "step_s": plan.time.total,
        "step_s_by_phase": plan.time.phases,
        "suggestions": [
            {
                "overrides": list(each.overrides),
                "fits": each.plan.fits,
                "margin_gib": each.plan.margin_gib,
                "step_s": each.plan.time.total,
            }
            for each in found
        ],
    }


def _by_size(parts: Parts) -> list[tuple[str, int]]:
    return [(name, size) for name, size in parts.most_common() if size > 0]
