"""This module computes all rewards of a run in one call: first those of reward functions, then
those of an ordered list of scorers.

Reward functions run in the worker processes of pool/. Environments, judges and reward models are
*scorers*: each computes further rewards for the completions that the functions have scored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts

# RewardPool.score, with the tokenizer already given.
Score = Callable[..., ScoredRollouts]


class Scorer(Protocol):
    """Computes one or several rewards of completions that the reward functions have scored."""

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Returns `by_name`, `statuses`, `first_error` and `notes` for this scorer's rewards only.

        Each list has one entry for each completion of `groups`; episodes without a turn have been
        left out of them. `scored` has the functions' scores. The call may be collective: every rank
        calls every scorer in the same order, even if it has no groups.
        """


class Scorers:
    """Scores groups with all rewards of the run. The call is collective if a scorer's call is."""

    def __init__(
        self,
        score_functions: Score,
        weights: Mapping[str, float],
        scorers: Sequence[Scorer] = (),
    ) -> None:
        """`score_functions` scores by all reward functions (it is RewardPool.score); each of
        `scorers` adds rewards of another kind, such as reward models.

        `weights` has all rewards' weights by name. A rollout's reward is the weighted sum in this
        order, which is also that of the metrics."""
        self.score_functions = score_functions
        self.weights = weights
        self.scorers = scorers

    def __call__(self, groups: Sequence[RolloutGroup], **options: Any) -> ScoredRollouts:
        """Returns the scores of `groups`. `options` are passed to `score_functions`.

        An episode without a turn has no text, so it is not scored and its rewards are unknown. The
        other completions of its group are scored as a smaller group.
        """
        completions = [completion for group in groups for completion in group.completions]
        played = [i for i, completion in enumerate(completions) if _has_turns(completion)]
        # If all completions have turns, the same objects are passed on: RewardPool recognizes a
        # group whose calls it began early by the identity of the object.
        if len(played) < len(completions):
            smaller = [
                dataclasses.replace(group, completions=[*filter(_has_turns, group.completions)])
                for group in groups
            ]
            groups = [group for group in smaller if group.completions]
        scored = self.score_functions(groups, **options)
        results = [scored, *(scorer.score(groups, scored) for scorer in self.scorers)]
        # A rank without completions has no statuses either.
        if not completions:
            return scored

        def spread(values: Sequence[Any], default: Any) -> list[Any]:
            """Returns a list with an entry for each completion: its value, or `default` if it is an
            episode without a turn."""
            by_completion = dict(zip(played, values, strict=True))
            return [by_completion.get(i, default) for i in range(len(completions))]

        merged = merge_results(results)
        # If no episode has a turn, no function was called and by_name is empty.
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
    """The scores of one reward, which a scorer fills in.

    A completion for which it sets nothing has the status "not_applicable".
    """

    def __init__(self, name: str, num_completions: int) -> None:
        self.name = name
        self.values: list[float | None] = [None] * num_completions
        self.statuses = ["not_applicable"] * num_completions
        self.scores = ScoredRollouts(by_name={name: self.values}, statuses={name: self.statuses})

    def give(self, number: int, value: float) -> None:
        """Sets the reward of the completion with index `number`."""
        self.values[number] = value
        self.statuses[number] = "ok"

    def fail(self, number: int, reason: str) -> None:
        """Gives the completion with index `number` the reward NaN and the status "error"."""
        self.values[number] = math.nan
        self.statuses[number] = "error"
        self.scores.first_error = self.scores.first_error or f"reward {self.name!r} {reason}"


def merge_results(results: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """Returns one record of the rewards that several scorers gave to the same completions.

    Its `rewards` (the weighted sums), `texts` and `reward_inputs` are left empty for the caller to
    fill. The notes of a completion are merged by their kind, such as "logged" or "extra".
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
    """Returns for each completion the weighted sum of its rewards, or None if it is unknown.

    `by_name` has each reward's values, one for each completion.
    """
    # A run without rewards learns from a teacher alone.
    if not weights:
        return [0.0] * num_completions
    return [
        weighted_sum([(weight, by_name[name][i]) for name, weight in weights.items()])
        for i in range(num_completions)
    ]


def weighted_sum(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    """Returns the sum of weight * reward over (weight, reward) pairs; a reward of None is left out.

    Returns None if all rewards are None or one is NaN. A reward of weight 0 is only watched and
    ignored here. If all weights are 0 (the policy learns from a teacher), returns the plain sum.
    """
    # Watched rewards (weight 0) are removed: if such a reward were the only one that is known, the
    # sum would be 0.0 instead of unknown.
    pairs = [pair for pair in pairs if pair[0]] or [(1.0, value) for _, value in pairs]
    products = [weight * value for weight, value in pairs if value is not None]
    total = sum(products)
    return total if products and math.isfinite(total) else None


def _has_turns(completion: Completion) -> bool:
    """Returns False only for an episode that failed before its first turn."""
    return completion.episode is None or bool(completion.episode.turns)
