"""This module puts all rewards of a run behind one call: reward functions, then an ordered list of
scorers.

Reward functions run in the worker processes of pool/. Environments, judges and reward models are
*scorers*: each gives further rewards for the completions that the functions have scored. The
results are merged once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts

# The signature of RewardPool.score without its tokenizer.
Score = Callable[..., ScoredRollouts]


class Scorer(Protocol):
    """Gives one or several rewards for completions that the reward functions have scored."""

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Returns `by_name`, `statuses`, `first_error` and `notes` of this scorer's rewards alone.

        Each list has one entry for each completion of `groups`, none of which is an episode without
        a turn. `scored` has the functions' scores.
        The call may be collective: every rank calls every scorer in the same order, also without
        groups.
        """


class Scorers:
    """Scores groups with every reward of the run. Collective where one of its scorers is."""

    def __init__(
        self,
        score_functions: Score,
        weights: Mapping[str, float],
        scorers: Sequence[Scorer] = (),
    ) -> None:
        """`weights` has all rewards by name, in the order of metrics and sums."""
        self.score_functions = score_functions
        self.weights = weights
        self.scorers = scorers

    def __call__(self, groups: Sequence[RolloutGroup], **options: Any) -> ScoredRollouts:
        """Returns the scores of `groups`. `options` go to the reward functions' pool.

        An episode without a turn has no text to read. The other completions of its group are
        scored as a smaller group.
        """
        completions = [completion for group in groups for completion in group.completions]
        played = [i for i, completion in enumerate(completions) if _has_turns(completion)]
        # Where all were played, these very objects are passed on: RewardPool identifies an early
        # group by its identity.
        if len(played) < len(completions):
            smaller = [
                dataclasses.replace(group, completions=[*filter(_has_turns, group.completions)])
                for group in groups
            ]
            groups = [group for group in smaller if group.completions]
        scored = self.score_functions(groups, **options)
        results = [scored, *(scorer.score(groups, scored) for scorer in self.scorers)]
        # A rank that has scored nothing has no statuses either.
        if not completions:
            return scored

        def spread(values: Sequence[Any], default: Any) -> list[Any]:
            """Returns one entry for each completion: from `values` if it was played."""
            by_completion = dict(zip(played, values, strict=True))
            return [by_completion.get(i, default) for i in range(len(completions))]

        merged = merge_results(results)
        # Where every episode failed, the functions have said nothing at all.
        by_name = {name: spread(merged.by_name.get(name, ()), None) for name in self.weights}
        episodes = [completion.episode for completion in completions]
        errors = [episode.error for episode in episodes if episode and episode.error][:1]
        errors += filter(None, [merged.first_error])
        return ScoredRollouts(
            rewards=sum_rewards(by_name, self.weights, len(completions)),
            by_name=by_name,
            statuses={
                name: spread(merged.statuses.get(name, ()), "not_applicable")
                for name in self.weights
            },
            first_error="\n".join(errors) or None,
            texts=spread(scored.texts, ""),
            reward_inputs=spread(scored.reward_inputs, {}),
            notes={played[i]: note for i, note in merged.notes.items()},
        )


class RewardColumn:
    """One reward's scores, which a scorer fills in. Where it says nothing, it does not apply."""

    def __init__(self, name: str, num_completions: int) -> None:
        self.name = name
        self.values: list[float | None] = [None] * num_completions
        self.statuses = ["not_applicable"] * num_completions
        self.scores = ScoredRollouts(by_name={name: self.values}, statuses={name: self.statuses})

    def give(self, number: int, value: float) -> None:
        """Sets the reward of a completion."""
        self.values[number] = value
        self.statuses[number] = "ok"

    def fail(self, number: int, reason: str) -> None:
        """Marks the reward of a completion as unusable."""
        self.values[number] = math.nan
        self.statuses[number] = "error"
        self.scores.first_error = self.scores.first_error or f"reward {self.name!r} {reason}"


def merge_results(results: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """Returns the scores of several scorers for the same completions as one record.

    Its `texts` and its weighted sums (`rewards`) are left empty: the caller fills them.
    """
    merged = ScoredRollouts()
    for result in results:
        merged.by_name |= result.by_name
        merged.statuses |= result.statuses
        merged.first_error = merged.first_error or result.first_error
        for number, note in result.notes.items():
            for kind, by_reward in note.items():
                merged.notes.setdefault(number, {}).setdefault(kind, {}).update(by_reward)
    return merged


def sum_rewards(
    by_name: Mapping[str, Sequence[float | None]],
    weights: Mapping[str, float],
    num_completions: int,
) -> list[float | None]:
    """Returns the weighted sum of each completion, None where it is unknown."""
    # Without any reward a teacher teaches alone.
    if not weights:
        return [0.0] * num_completions
    return [
        weighted_sum([(weight, by_name[name][i]) for name, weight in weights.items()])
        for i in range(num_completions)
    ]


def weighted_sum(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    """Returns the sum of (weight, reward) over the rewards that apply.

    None where no reward applies or one is NaN. A reward of weight 0 is only watched: it neither
    applies nor fails here. If all weights are 0 (next to a teacher), it is the plain sum.
    """
    # Else a watched reward that applies would make a 0.0 of a reward that is not known.
    pairs = [pair for pair in pairs if pair[0]] or [(1.0, value) for _, value in pairs]
    products = [weight * value for weight, value in pairs if value is not None]
    total = sum(products)
    return total if products and math.isfinite(total) else None


def _has_turns(completion: Completion) -> bool:
    """Returns False for an episode whose environment failed before the first turn."""
    return completion.episode is None or bool(completion.episode.turns)
