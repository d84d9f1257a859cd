"""Scoring that overlaps generation: slow rewards are called for a group as soon as it is complete, while others are
sampled. Their processes work beside the engine, which is held up for a group's decoding and for microseconds between
two steps. What comes of a group does not depend on when it is scored. Evaluations and episodes are scored behind the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_spmd.records import Completion, RolloutGroup

if TYPE_CHECKING:
    from grpo_spmd.rewards.pool.pool import RewardPool


class EarlyScoring:
    """Of a run, on this rank."""

    def __init__(self, rewards: RewardPool, tokenizer: Any) -> None:
        self._rewards, self._tokenizer = rewards, tokenizer

    @property
    def is_on(self) -> bool:
        """Whether some reward is slow now."""
        return self._rewards.starts_early

    def start(self, group: RolloutGroup) -> None:
        self._rewards.start_early(group, self._tokenizer)

    def go_on(self) -> None:
        self._rewards.go_on()


class Groups:
    """Of one generation, on one rank of an engine: its ranks take turns with the groups as these get complete, which
    they do in the same order on all of them."""

    def __init__(
        self,
        sizes: Sequence[int],
        whole: Callable[[int, Sequence[Completion]], RolloutGroup],
        tp_rank: int,
        num_sharing: int,
        early: EarlyScoring | None,
    ) -> None:
        """`sizes`: the completions to sample of each job; `whole(job, these in their order)` makes its group."""
        self._num_left, self._whole, self._tp_rank, self._num_sharing = list(sizes), whole, tp_rank, num_sharing
        self._early = early if early is not None and early.is_on else None
        self._turns: dict[int, int] = {}  # of complete jobs
        self._done: list[dict[int, Completion]] = [{} for _ in sizes]  # by number within the job
        self._begun: dict[int, RolloutGroup] = {}

    def finish(self, job: int, number: int, completion: Completion, *, is_in_step: bool) -> None:
        """A completion is there; `is_in_step`: if its group is complete now, the step is known to have it."""
        self._num_left[job] -= 1
        self._done[job][number] = completion
        if not self._num_left[job]:
            self._turns[job] = len(self._turns) % self._num_sharing
            if self._early is not None and is_in_step and self.is_own(job):
                self._begun[job] = self._whole(job, [self._done[job][n] for n in sorted(self._done[job])])
                self._early.start(self._begun[job])

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """To be called between two steps of the engine."""
        return None if self._early is None else self._early.go_on

    def is_own(self, job: int) -> bool:
        return self._turns.get(job, 0) == self._tp_rank

    def group(self, job: int, completions: Sequence[Completion]) -> RolloutGroup:
        """Of all its new completions; where scoring has begun, the very object that the rewards were given."""
        return self._begun.get(job) or self._whole(job, completions)
