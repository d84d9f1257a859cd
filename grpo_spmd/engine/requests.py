"""What the engine is asked for, and how work is shared out over engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def share_out(num_jobs: int, job_size: int, num_engines: int, max_num_seqs: int | None) -> tuple[int, int]:
    """How many requests an engine has in flight at most, and how many jobs it is dealt at first, one in turn.
    An engine with fewer requests in flight claims one of the jobs that were not dealt; up to `job_size` - 1 of its
    requests then wait, so that it is never short of work. Without `max_num_seqs` all jobs are dealt."""
    fair_share = -(-num_jobs // num_engines)
    if max_num_seqs is None:
        return fair_share * job_size, fair_share
    max_in_flight = min(max_num_seqs, fair_share * job_size)
    return max_in_flight, min(max_in_flight // job_size, num_jobs // num_engines)
