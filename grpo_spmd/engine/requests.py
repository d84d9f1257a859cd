"""What the engine is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_spmd.records import Completion, Prompt


class EngineStateError(RuntimeError):
    """The engine's state does not allow what it was asked for: it would have answered from stale or missing weights."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int | None  # None: greedy, which draws nothing
    temperature: float | None = None  # 0: greedy; None: `rollout.temperature`
    max_tokens: int | None = None  # at least 1, and at most `rollout.max_completion_tokens`, which None stands for
    is_rollout: bool = True  # False: nobody trains on it; it has no bound but `max_tokens`, and comes without logprobs


@dataclass(frozen=True)
class Later:
    """In the place of a request: what follows in this conversation is not known yet."""


LATER = Later()
Place = tuple[int, int]  # of a conversation: job, number within the job
NextRequest = Callable[[int, int, Sequence[Completion]], Request | Later | None]
Task = tuple[Prompt, Callable[..., int]]  # what to sample for a place, and the seed of a turn of it
Finished = Callable[[int, int, Completion], None]


class Answers(Protocol):
    """What becomes of conversations whose next request comes later. Asked on the first rank of each engine alone."""

    def ready(self, timeout_s: float, /) -> list[tuple[Place, Request | None]]:
        """The requests that are known by now, of conversations that wait, each once; None: it is over. Where there is
        none, waits for the first, at most `timeout_s`."""


class Race(Protocol):
    """Of a generation that need not finish all of its jobs."""

    def is_over(self) -> bool:
        """Whether enough jobs are done, over all engines; once True it stays so. Waits for nobody."""

    def drop(self, num_tokens: Sequence[int], /) -> None:
        """Of each conversation that this engine drops, the tokens that it has."""
