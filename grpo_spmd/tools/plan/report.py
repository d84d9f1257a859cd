"""Prints a plan as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from grpo_spmd.tools.plan.dry_run import Usage
from grpo_spmd.tools.plan.phases import Plan, Suggestion
from grpo_spmd.tools.plan.step_time import FRAGMENTATION, GIB


def text_lines(plan: Plan, proposals: Sequence[Suggestion]) -> Iterator[str]:
    case, card, cache = plan.case, plan.case.card, plan.kv_cache
    verdict = "fits" if plan.fits else "does not fit"
    yield (
        f"{case.config.model.path} ({case.model.num_parameters / 1e9:.2f} B parameters) on "
        f"{case.num_ranks} x {card.name} ({card.gib:g} GiB each): {verdict}"
    )
    yield (
        f"margin {plan.margin_gib:.1f} GiB, least in phase {plan.tightest}; "
        "a prediction: nothing of it has been compared with a real GPU"
    )
    yield ""
    yield f"{'phase':12} {'peak':>7} {'free':>7}  GiB of one rank, of the peak"
    for phase, usage in plan.phases.items():
        yield (
            f"{phase:12} {plan.peak_gib(phase):7.2f} {plan.margin_of(phase):7.2f}  "
            f"{_join_usage(usage)}"
        )
    yield ""
    yield (
        "estimates: CUDA context, NCCL, CUDA graphs and workspaces, engine's activations, layer "
        f"in load, fragmentation ({FRAGMENTATION:.0%} of a phase's own tensors); counted: the rest"
    )
    yield f"host memory of a rank, GiB: {_join_usage(plan.host) or 'nothing'}"
    yield (
        f"KV cache of an engine: {cache.tokens:,} tokens ({max(0, cache.num_bytes) / GIB:.2f} "
        f"GiB) of {cache.needed_tokens:,} for its {cache.sequences} sequences of a step at "
        "full length;"
    )
    # A step may have fewer sequences than fit.
    num_running = min(cache.full_length, cache.sequences)
    yield f"  {num_running} of them of full length run at one time, others wait their turn"
    yield (
        "step, s, every completion at full length (a model: shares of the card's ceilings): "
        f"{plan.time.total:.1f}"
    )
    seconds = ", ".join(f"{phase} {s:.1f}" for phase, s in plan.time.phases.items())
    yield f"  {seconds}; rewards, evaluation and checkpoints not counted"
    if plan.fits:
        return
    yield ""
    has_fitting = any(suggestion.plan.fits for suggestion in proposals)
    yield "what would make it fit, the cheapest first:" if has_fitting else "nothing tried fits:"
    for suggestion in proposals:
        yield (
            f"  {' '.join(suggestion.overrides)}  margin {suggestion.plan.margin_gib:.1f} GiB, "
            f"step {suggestion.plan.time.total:.1f} s"
        )


def as_json(plan: Plan, proposals: Sequence[Suggestion]) -> dict[str, Any]:
    cache = plan.kv_cache
    return {
        "fits": plan.fits,
        "margin_gib": plan.margin_gib,
        "tightest_phase": plan.tightest,
        "is_prediction": True,  # never compared with a GPU
        "gpu": asdict(plan.case.card),
        "num_ranks": plan.case.num_ranks,
        "num_parameters": plan.case.model.num_parameters,
        "phases": {
            phase: {
                "peak_gib": plan.peak_gib(phase),
                "free_gib": plan.margin_of(phase),
                "live_gib": _gib_by_name(usage),
            }
            for phase, usage in plan.phases.items()
        },
        "host_gib": _gib_by_name(plan.host),
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
                "overrides": list(suggestion.overrides),
                "fits": suggestion.plan.fits,
                "margin_gib": suggestion.plan.margin_gib,
                "step_s": suggestion.plan.time.total,
            }
            for suggestion in proposals
        ],
    }


def _gib_by_name(usage: Usage) -> dict[str, float]:
    """Returns the GiB of each purpose, the largest first."""
    return {name: size / GIB for name, size in usage.most_common() if size > 0}


def _join_usage(usage: Usage) -> str:
    return ", ".join(f"{name} {gib:.2f}" for name, gib in _gib_by_name(usage).items())
