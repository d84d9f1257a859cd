"""What the engine is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_spmd.records import Completion


class EngineStateError(RuntimeError):
    """The engine's state does not allow what it was asked for: it would have answered from stale or missing weights."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int
    temperature: float | None = None  # 0: greedy; None: `rollout.temperature`


Place = tuple[int, int]  # of a conversation: job, number within the job
NextRequest = Callable[[int, int, Sequence[Completion]], Request | None]
Finished = Callable[[int, int, Completion], None]


class Race(Protocol):
    """Of a generation that need not finish all of its jobs."""

    def is_over(self) -> bool:
        """Whether enough jobs are done, over all engines; once True it stays so. Waits for nobody."""

    def drop(self, num_tokens: Sequence[int], /) -> None:
        """Of each request that this engine drops, the tokens that it has."""
