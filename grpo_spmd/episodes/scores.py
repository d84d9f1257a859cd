"""The rewards that environments gave, as one of the run's scorers (rewards/scorers.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts


class EnvironmentScorer:
    """Reads the rewards of environments out of the episodes. It communicates with nobody."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` of the rewards that the environments give."""
        self._names = names

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Returns the environments' rewards, as a Scorer does."""
        completions = [completion for group in groups for completion in group.completions]
        result = ScoredRollouts()
        for name in self._names:
            values = [_reward(completion, name) for completion in completions]
            result.by_name[name] = [math.nan if isinstance(v, str) else v for v in values]
            result.statuses[name] = [_status(value) for value in values]
            errors = [f"reward {name!r} {value}" for value in values if isinstance(value, str)]
            result.first_error = result.first_error or next(iter(errors), None)
        return result


def _reward(completion: Completion, name: str) -> float | str | None:
    """Returns None for an episode without a turn: its environment failed."""
    episode = completion.episode
    return episode.rewards.get(name) if episode is not None and episode.turns else None


def _status(value: float | str | None) -> str:
    if isinstance(value, str):
        return "error"
    return "not_applicable" if value is None else "ok"
