"""What callers ask of the engine, and which engine samples what. Imports no torch and no vllm."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from grpo_spmd.records import Completion, Prompt


class EngineStateError(RuntimeError):
    """The engine would have answered from stale or missing weights."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int | None
    """None for greedy decoding, which draws nothing."""
    temperature: float | None = None
    """0 for greedy decoding. None stands for `rollout.temperature`."""
    max_tokens: int | None = None
    """At least 1. A rollout gets at most `rollout.max_completion_tokens`, which None stands for."""
    is_rollout: bool = True
    """False if nobody trains on it: then only `max_tokens` bounds it, and it has no logprobs."""


@dataclass(frozen=True)
class Later:
    """Returned in place of a request while the next request of a conversation is not known."""


LATER = Later()
ConversationId = tuple[int, int]  # job, number within the job
NextRequest = Callable[[int, int, Sequence[Completion]], Request | Later | None]
EpisodeTask = tuple[Prompt, Callable[..., int]]  # prompt of a conversation, and its turns' seeds
OnCompletion = Callable[[int, int, Completion], None]


class LateRequests(Protocol):
    """Source of requests that come later. Only the first rank of each engine calls it."""

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        """Returns the requests that are known now, each once. None means the conversation is over.

        If there are none, it waits at most `timeout_s` for the first."""


class EarlyStop(Protocol):
    """Ends a generation before all of its jobs are finished."""

    def is_over(self) -> bool:
        """Returns True once enough jobs are finished over all engines, and ever after. Never waits."""

    def drop(self, num_tokens: Sequence[int], /) -> None:
        """Gets the number of tokens of each conversation that this engine drops."""


@dataclass(frozen=True)
class GenerationHooks:
    """What a generation calls while it runs."""

    next_request: NextRequest
    """`next_request(job, number within the job, completions of this conversation so far)` returns
    the next request, None if the conversation is over, or LATER. Equal on all ranks of an engine.
    After LATER the other conversations go on, and `late_requests` brings the request."""
    on_completion: OnCompletion | None = None
    """Gets (job, number, completion) at once, on all ranks of the engine."""
    late_requests: LateRequests | None = None
    """Given on all ranks of an engine or on none."""
    early_stop: EarlyStop | None = None
    """Given on all ranks or on none. Unfinished jobs are then dropped and not returned."""
    before_step: Callable[[], None] | None = None
    """Called before each step of the engine."""


class JobSchedule(NamedTuple):
    """How jobs are spread over engines. All ranks compute the same from the same arguments."""

    dealt: list[list[int]]
    """The jobs that each engine gets at the start."""
    queued: list[int]
    """The other jobs, in the order in which engines claim them."""


def share_out(
    num_jobs: int, job_size: int, num_engines: int, max_num_seqs: int | None
) -> tuple[int, int]:
    """Returns the most requests that an engine has in flight, and the jobs that it gets at first.

    An engine with fewer requests in flight claims a queued job. Up to `job_size` - 1 of its
    requests then wait in vLLM, so that it never runs out of work. If `max_num_seqs` is None,
    no job is queued."""
    fair_share = -(-num_jobs // num_engines)
    if max_num_seqs is None:
        return fair_share * job_size, fair_share
    max_in_flight = min(max_num_seqs, fair_share * job_size)
    return max_in_flight, min(max_in_flight // job_size, num_jobs // num_engines)


def deal(
    job_sizes: Sequence[int],
    expected_tokens: Sequence[float] | None,
    num_dealt: int,
    num_engines: int,
) -> JobSchedule:
    """Returns which engine starts with which jobs, at most `num_dealt` an engine.

    Without `expected_tokens` (tokens of one completion, by job) jobs go to engines in turn. With
    it the longest jobs start first, so that no engine starts a long job last. Each goes to the
    engine with the fewest expected tokens so far. Ties keep their order."""
    num_jobs = len(job_sizes)
    num_first = min(num_dealt * num_engines, num_jobs)
    if expected_tokens is None:
        in_turn = [list(range(engine, num_first, num_engines)) for engine in range(num_engines)]
        return JobSchedule(in_turn, list(range(num_first, num_jobs)))
    longest_first = sorted(range(num_jobs), key=lambda job: -expected_tokens[job])  # stable
    dealt: list[list[int]] = [[] for _ in range(num_engines)]
    # Entries (expected tokens, jobs so far, engine): the head is the least loaded engine.
    loads = [(0.0, 0, engine) for engine in range(num_engines)]
    for job in longest_first[:num_first]:
        tokens, num_jobs_so_far, engine = heapq.heappop(loads)
        dealt[engine].append(job)
        if num_jobs_so_far + 1 < num_dealt:
            tokens += job_sizes[job] * expected_tokens[job]
            heapq.heappush(loads, (tokens, num_jobs_so_far + 1, engine))
    return JobSchedule(dealt, longest_first[num_first:])
