"""Rewards that are given behind the reward functions': put together with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from grpo_spmd.records import ScoredRollouts
from grpo_spmd.rewards.protocol import weighted_sum

Score = Callable[..., ScoredRollouts]


def with_scores(
    scored: ScoredRollouts, found: Sequence[ScoredRollouts], weights: Mapping[str, float]
) -> ScoredRollouts:
    """`scored` with `found`, of the same completions, each of other rewards; `weights` of all, in the order in which
    they are to be."""
    if not scored.texts:  # a rank that has scored nothing has no statuses either
        return scored
    by_name, statuses = dict(scored.by_name), dict(scored.statuses)
    notes = {
        number: {kind: {**of} for kind, of in note.items()} for number, note in scored.notes.items()
    }
    for more in found:
        by_name |= more.by_name
        statuses |= more.statuses
        for number, note in more.notes.items():
            for kind, of in note.items():
                notes.setdefault(number, {}).setdefault(kind, {}).update(of)
    ordered = {name: by_name[name] for name in weights}
    of_rewards = [[(weight, value) for value in ordered[name]] for name, weight in weights.items()]
    errors = (scored.first_error, *(more.first_error for more in found))
    return dataclasses.replace(
        scored,
        rewards=[weighted_sum(of_completion) for of_completion in zip(*of_rewards, strict=True)],
        by_name=ordered,
        statuses={name: statuses[name] for name in weights},
        first_error=next((error for error in errors if error), None),
        notes=notes,
    )
