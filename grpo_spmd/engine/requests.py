"""What the engine is asked for."""

from __future__ import annotations

import heapq
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
    max_tokens: int | None = (
        None  # at least 1, and at most `rollout.max_completion_tokens`, which None stands for
    )
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


# Which engine samples what: what is dealt at the start, and in which order the rest is claimed. Pure, and called with
# the same arguments on all ranks, which must agree about it.


def share_out(
    num_jobs: int, job_size: int, num_engines: int, max_num_seqs: int | None
) -> tuple[int, int]:
    """How many requests an engine has in flight at most, and how many jobs it is dealt at first.
    An engine with fewer requests in flight claims one of the jobs that were not dealt; up to `job_size` - 1 of its
    requests then wait, so that it is never short of work. Without `max_num_seqs` all jobs are dealt."""
    fair_share = -(-num_jobs // num_engines)
    if max_num_seqs is None:
        return fair_share * job_size, fair_share
    max_in_flight = min(max_num_seqs, fair_share * job_size)
    return max_in_flight, min(max_in_flight // job_size, num_jobs // num_engines)


def deal(
    job_sizes: Sequence[int], expected: Sequence[float] | None, num_dealt: int, num_engines: int
) -> tuple[list[list[int]], list[int]]:
    """The jobs that each engine is dealt, at most `num_dealt`, and the others in the order in which they are claimed.

    Without `expected`, the tokens that a completion of each job may have, jobs go to engines in turn. With it those
    expected to take longest come first: a job that is begun last must not be the one that all wait for. Each goes to
    the engine that has the fewest expected tokens so far. What is expected alike stays in turn.
    """
    num_jobs = len(job_sizes)
    num_first = min(num_dealt * num_engines, num_jobs)
    if expected is None:
        return [list(range(e, num_first, num_engines)) for e in range(num_engines)], list(
            range(num_first, num_jobs)
        )
    order = sorted(range(num_jobs), key=lambda job: -expected[job])  # stable
    dealt: list[list[int]] = [[] for _ in range(num_engines)]
    least_loaded = [(0.0, 0, engine) for engine in range(num_engines)]
    for job in order[:num_first]:
        tokens, number, engine = heapq.heappop(least_loaded)
        dealt[engine].append(job)
        if number + 1 < num_dealt:
            heapq.heappush(
                least_loaded, (tokens + job_sizes[job] * expected[job], number + 1, engine)
            )
    return dealt, order[num_first:]
