"""Which rewards are called while the engine still samples: those for which that saves more than it takes.

What mostly waits for others (servers, functions under limits of calls) always. Any other function only if it kept a
worker busy for long when it was last called: the engine needs the CPU too, and what is cheap is quickly done behind it.
So in a run's first step such functions are called behind the engine, unless an evaluation has shown what they take.
What a reward gives does not depend on when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_spmd.config.schema import RewardConfig

_SLOW_S = 0.003  # of a worker's time, for a completion


class SlowRewards:
    def __init__(self, always: Sequence[bool]) -> None:
        """By the index of a reward, whether it is slow without having been called."""
        self._always = frozenset(reward for reward, is_slow in enumerate(always) if is_slow)
        self._took = [(0.0, 0) for _ in always]  # since the last scoring: seconds, for so many completions
        self.early = self._always

    def took(self, reward: int, seconds: float, num_completions: int) -> None:
        """A call of it has ended."""
        before_s, before = self._took[reward]
        self._took[reward] = before_s + seconds, before + num_completions

    def end_scoring(self) -> None:
        """From now on those are called early that were slow in this scoring; of the others nothing new is known."""
        known = [(took_s > _SLOW_S * number) if number else None for took_s, number in self._took]
        slow = {reward for reward, is_slow in enumerate(known) if is_slow or (is_slow is None and reward in self.early)}
        self.early = self._always | slow
        self._took = [(0.0, 0) for _ in known]


def waits_for_others(reward: RewardConfig) -> bool:
    return reward.url is not None or reward.max_concurrent is not None or reward.max_per_minute is not None
