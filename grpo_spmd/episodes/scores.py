"""Rewards of episodes: what their environments gave, beside what the reward functions give."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.protocol import weighted_sum


class EpisodeScores:
    """Scores groups of episodes. One without a turn, as where its environment failed, is given to no function: it has
    no completion, and no reward. Its group's others are scored as a smaller group."""

    def __init__(
        self,
        score: Callable[..., ScoredRollouts],
        weights: Mapping[str, float],
        of_environment: Collection[str],
    ) -> None:
        """`score` is RewardPool's, but for the tokenizer; `weights` are those of all rewards, in the order in which
        they are to be; `of_environment`: which of them environments give (EnvironmentFacts)."""
        self._score, self._weights, self._given = score, weights, of_environment

    def __call__(
        self,
        groups: Sequence[RolloutGroup],
        *,
        num_step_completions: int | None = None,
        **more: Any,
    ) -> ScoredRollouts:
        """As RewardPool.score."""
        completions = [completion for group in groups for completion in group.completions]
        places = [i for i, completion in enumerate(completions) if _has_turns(completion)]
        whole = [_with_turns(group) for group in groups]
        found = self._score(
            [group for group in whole if group.completions],
            num_step_completions=num_step_completions,
            **more,
        )
        if not (number := len(completions)):
            return found
        of_failed = [
            one.episode.error
            for one in completions
            if one.episode is not None and one.episode.error
        ]
        of_functions = [found.first_error] if found.first_error else []
        by_name: dict[str, list[float | None]] = {}
        statuses: dict[str, list[str]] = {}
        for name in self._weights:
            if name in self._given:
                given = [_given(completion, name) for completion in completions]
                by_name[name] = [math.nan if isinstance(value, str) else value for value in given]
                statuses[name] = [_status(value) for value in given]
                of_functions += [
                    f"reward {name!r} {value}" for value in given if isinstance(value, str)
                ]
            else:  # where no episode has a turn, no function has said anything
                by_name[name] = _spread(found.by_name.get(name, ()), places, number, None)
                statuses[name] = _spread(
                    found.statuses.get(name, ()), places, number, "not_applicable"
                )
        parts = [
            [(weight, by_name[name][i]) for name, weight in self._weights.items()]
            for i in range(number)
        ]
        return ScoredRollouts(
            # Without any a teacher teaches alone.
            rewards=[
                weighted_sum(of_completion) if of_completion else 0.0 for of_completion in parts
            ],
            by_name=by_name,
            statuses=statuses,
            first_error="\n".join([*of_failed[:1], *of_functions[:1]]) or None,
            texts=_spread(found.texts, places, number, ""),
            reward_inputs=_spread(found.reward_inputs, places, number, {}),
            notes={places[i]: note for i, note in found.notes.items()},
        )


def _has_turns(completion: Completion) -> bool:
    return completion.episode is None or bool(completion.episode.turns)


def _with_turns(group: RolloutGroup) -> RolloutGroup:
    return RolloutGroup(
        group.slot, group.prompt, [one for one in group.completions if _has_turns(one)]
    )


def _given(completion: Completion, name: str) -> float | str | None:
    episode = completion.episode
    return episode.rewards.get(name) if episode is not None and episode.turns else None


def _status(value: float | str | None) -> str:
    return "error" if isinstance(value, str) else "not_applicable" if value is None else "ok"


def _spread(values: Sequence[Any], places: Sequence[int], number: int, otherwise: Any) -> list[Any]:
    spread = [otherwise] * number
    for place, value in zip(places, values, strict=True):
        spread[place] = value
    return spread
