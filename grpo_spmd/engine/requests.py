"""Defines what callers ask of the engines, and deals the work out to them. Imports no vllm.

A conversation is one request, or several in turn, where each prompt contains the completions
before. A job is a group of conversations that one engine samples. If the next request of a
conversation is not known yet when its last completion is finished, for instance because a tool
still runs, it is called a late request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.distributed.collectives import find_differing_ranks, on_first_in_group
from grpo_spmd.records import Completion, Prompt


class EngineStateError(RuntimeError):
    """Raised if going on would give wrong completions: weights are stale or missing, requests still
    run, or the ranks of an engine were given different requests."""


@dataclass(frozen=True)
class Request:
    """Asks an engine for one completion."""

    prompt_ids: list[int]
    seed: int | None
    """None for greedy decoding, which uses no random numbers."""
    temperature: float | None = None
    """0 for greedy decoding. None stands for `rollout.temperature`."""
    max_tokens: int | None = None
    """Upper bound on the completion's tokens, at least 1. None stands for
    `rollout.max_completion_tokens`, which a rollout never exceeds."""
    is_rollout: bool = True
    """True if the policy trains on the completion. False: it gets no logprobs, and `max_tokens` may
    be larger than `rollout.max_completion_tokens`."""
    top_p: float = 1.0
    ends_at_stops: bool = True
    """True if the strings in `rollout.stop` end the completion, as stop tokens always do."""
    prompt_recurs: bool = True
    """False if no later request will have this prompt (of a judge, for instance): then speculative
    decoding need not keep the completion for drafts."""


def policy_request(
    prompt_ids: list[int],
    seed: int | None,
    evaluation: EvalConfig | None,
    max_tokens: int | None = None,
) -> Request:
    """Returns the request for a rollout or, if `evaluation` is given, for an evaluation.

    Evaluations ask for no logprobs."""
    if evaluation is None:
        return Request(prompt_ids, seed, max_tokens=max_tokens)
    temperature, top_p = evaluation.temperature, evaluation.top_p
    return Request(prompt_ids, seed, temperature, max_tokens, is_rollout=False, top_p=top_p)


@dataclass(frozen=True)
class Later:
    """Returned in place of a conversation's next request while that is not known yet."""


LATER = Later()
ConversationId = tuple[int, int]  # (job, number of the conversation within the job)
# The types of GenerationHooks.next_request and .on_completion.
NextRequest = Callable[[int, int, Sequence[Completion]], Request | Later | None]
# (the prompt of a conversation, the function that returns the seed of each of its turns)
EpisodeTask = tuple[Prompt, Callable[..., int]]
OnCompletion = Callable[[int, int, Completion], None]


class LateRequests(Protocol):
    """The source of late requests, those that were not known when their conversation's last
    completion was finished. Only the first rank of each engine calls `ready`."""

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        """Returns the late requests that are known now, each once, as (conversation, request).

        The request is None if the conversation is over. If no request is known, waits up to
        `timeout_s` seconds for the first."""


class EarlyStop(Protocol):
    """Decides when a generation may end before all of its jobs are finished."""

    def is_over(self) -> bool:
        """Returns True once enough jobs are finished over all engines, and from then on.

        Must not wait for other engines."""

    def drop(self, num_tokens: Sequence[int], /) -> None:
        """Called when this engine drops its unfinished conversations, with the number of sampled
        tokens of each."""


@dataclass(frozen=True)
class GenerationHooks:
    """The caller's functions that a generation calls while it runs. In their arguments `job` is
    the number of a job, a group of conversations that one engine samples."""

    next_request: NextRequest
    """Called as next_request(job, number within the job, the conversation's completions so far).
    Returns the conversation's next request, None if it is over, or LATER; the same on all ranks of
    an engine. After LATER the other conversations go on, and `late_requests` brings the request."""
    on_completion: OnCompletion | None = None
    """Called with (job, number within the job, completion) as soon as a completion is finished, on
    all ranks of the engine."""
    late_requests: LateRequests | None = None
    """Given on all ranks of an engine or on none of them."""
    early_stop: EarlyStop | None = None
    """Given on all ranks or on none. Jobs that are unfinished when it ends the generation are
    dropped and not returned."""
    before_step: Callable[[], None] | None = None
    """Called before each step of the engine."""


class JobSchedule(NamedTuple):
    """Says which engine gets which jobs. All ranks compute the same schedule."""

    dealt: list[list[int]]
    """The jobs with which each engine starts, by engine."""
    queued: list[int]
    """The remaining jobs, in the order in which engines claim them."""


@dataclass(frozen=True)
class Capacity:
    """Says how many requests and tokens one engine can run at a time.

    The numbers are the minimum over all engines, so that they are equal on all ranks."""

    max_num_seqs: int
    """The most requests that vLLM runs at a time."""
    kv_cache_tokens: int
    """The number of tokens for which the KV cache has room."""

    def num_requests(self, expected_tokens: Sequence[float] | None) -> int:
        """Returns how many requests an engine can run at a time.

        `expected_tokens` has the expected length of a completion of each job. On average over the
        time that it runs, a completion takes cache room for half of its length; counting the whole
        length would make the first batch too small. The prompt is not counted, since the requests
        of a group share it. Without `expected_tokens` the result is `max_num_seqs`."""
        mean_tokens = fmean(expected_tokens or [0])
        if not mean_tokens:
            return self.max_num_seqs
        return min(self.max_num_seqs, max(1, int(2 * self.kv_cache_tokens / mean_tokens)))


def share_out(
    num_jobs: int, job_size: int, num_engines: int, num_at_once: int | None
) -> tuple[int, int]:
    """Returns (max_in_flight, num_dealt), two bounds that hold for each engine.

    An engine with fewer than `max_in_flight` open conversations claims a queued job. It starts with
    at most `num_dealt` jobs.

    `job_size` is the number of conversations of the largest job, `num_at_once` the number of
    requests that vLLM runs at a time. An engine that has just claimed a job may have up to
    `job_size` - 1 requests waiting in vLLM, so that it does not run out of work. If `num_at_once`
    is None, all jobs are dealt at the start."""
    fair_share = -(-num_jobs // num_engines)
    if num_at_once is None:
        return fair_share * job_size, fair_share
    max_in_flight = min(num_at_once, fair_share * job_size)
    return max_in_flight, min(max_in_flight // job_size, num_jobs // num_engines)


def deal(
    job_sizes: Sequence[int],
    expected_tokens: Sequence[float] | None,
    num_dealt: int,
    num_engines: int,
) -> JobSchedule:
    """Returns which engine starts with which jobs (at most `num_dealt` each), and the queue of the
    others.

    Without `expected_tokens` (the expected length of a completion, by job) jobs go to the engines
    in turn. With it the jobs with the longest completions come first, so that no engine starts a
    long job at the end. Each dealt job goes to the engine with the fewest expected tokens so far.
    Equally long jobs keep their order."""
    num_jobs = len(job_sizes)
    num_first = min(num_dealt * num_engines, num_jobs)
    expected = expected_tokens or [0.0] * num_jobs
    longest_first = sorted(range(num_jobs), key=lambda job: -expected[job])  # stable
    dealt: list[list[int]] = [[] for _ in range(num_engines)]
    # Entries (expected tokens, jobs so far, engine): the head is the least loaded engine.
    loads = [(0.0, 0, engine) for engine in range(num_engines)]
    for job in longest_first[:num_first]:
        tokens, num_jobs_so_far, engine = heapq.heappop(loads)
        dealt[engine].append(job)
        if num_jobs_so_far + 1 < num_dealt:
            tokens += job_sizes[job] * expected[job]
            heapq.heappush(loads, (tokens, num_jobs_so_far + 1, engine))
    return JobSchedule(dealt, longest_first[num_first:])


# Seconds that an engine without running requests waits for a late request before it checks again
# whether to abort or to end early.
LATE_REQUESTS_WAIT_S = 0.5


class Conversations:
    """The state of one engine's conversations in a generation.

    A conversation runs while vLLM works on its request, waits while its next request is late, or is
    over. Each rank of the engine holds a copy of this state and makes the same changes to it. Late
    requests arrive on the engine's first rank, which sends them to the others."""

    def __init__(
        self, hooks: GenerationHooks, group: dist.ProcessGroup | None, engine_rank: int
    ) -> None:
        """`group` has the ranks of the engine; None if the engine has a single rank."""
        self._hooks = hooks
        self._group = group
        self._engine_rank = engine_rank
        self._request_ids = map(str, itertools.count())
        self.completions: dict[ConversationId, list[Completion]] = {}
        """The completions so far of each started conversation, one for each turn."""
        self.running: dict[str, ConversationId] = {}
        """The running conversations by request id, in the order in which vLLM got the requests."""
        # The conversations whose next request is late.
        self._waiting: set[ConversationId] = set()

    @property
    def num_open(self) -> int:
        """Number of conversations that run or wait."""
        return len(self.running) + len(self._waiting)

    def advance(self, ids: Iterable[ConversationId]) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. Asks the hook for the next requests of conversations
        that are new or have a new completion.

        Returns (request id, request) pairs for vLLM; a conversation that is over or must wait has
        none. Raises EngineStateError on all ranks of the engine if `next_request` returned
        different requests on them."""
        next_requests = [
            (id_, self._hooks.next_request(*id_, self.completions.setdefault(id_, [])))
            for id_ in ids
        ]
        late = self._hooks.late_requests
        # With late requests, ranks that disagree about a conversation's end (None) would hang: then
        # compare the Nones too.
        compared = [
            request for _, request in next_requests if request is not None or late is not None
        ]
        # Each rank adds requests to its own scheduler: different requests would make the ranks
        # compute garbage, or hang.
        if compared and self._group is not None:
            ranks = find_differing_ranks(repr(compared).encode(), self._group)
            if ranks:
                raise EngineStateError(
                    f"generate: ranks {ranks} of engine {self._engine_rank} were given other "
                    "requests than its first rank"
                )
        self._waiting |= {id_ for id_, request in next_requests if isinstance(request, Later)}
        return self._start(
            (id_, request) for id_, request in next_requests if isinstance(request, Request)
        )

    def take_late_requests(self) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. Returns the late requests that have arrived, as
        (request id, request) pairs.

        If no request runs, waits up to LATE_REQUESTS_WAIT_S for the first. Raises EngineStateError
        on all ranks if a request came for a conversation that does not wait for one. An error that
        `LateRequests.ready` raises is raised on all ranks too."""
        if not self._waiting:
            return []
        late = self._hooks.late_requests
        assert late is not None, "next_request returned LATER, and there are no late_requests"
        timeout_s = 0.0 if self.running else LATE_REQUESTS_WAIT_S
        # Requests travel as their fields, since the collective sends JSON.
        arrived: list[Any] = on_first_in_group(
            lambda: [(id_, request and vars(request)) for id_, request in late.ready(timeout_s)],
            self._group,
        )
        requests = []
        for (job, number), fields in arrived:
            if (job, number) not in self._waiting:
                raise EngineStateError(
                    f"generate: a request for conversation {(job, number)}, which does not wait "
                    "for one"
                )
            self._waiting.remove((job, number))
            if fields is not None:
                requests.append(((job, number), Request(**fields)))
        return self._start(requests)

    def end_turn(self, request_id: str, completion: Completion) -> ConversationId:
        """Adds the completion of a finished request to its conversation. Returns the
        conversation's id."""
        id_ = self.running.pop(request_id)
        self.completions[id_].append(completion)
        return id_

    def finished(self) -> dict[ConversationId, list[Completion]]:
        """Returns the completions of the conversations that are over."""
        unfinished = {*self.running.values(), *self._waiting}
        return {id_: turns for id_, turns in self.completions.items() if id_ not in unfinished}

    def num_tokens(self, num_running: Iterable[int]) -> list[int]:
        """Returns the number of sampled tokens of each conversation that runs or waits.

        `num_running` has the number of tokens sampled so far for each running request, in the order
        of `running`."""
        totals = {
            id_: sum(len(turn.token_ids) for turn in turns)
            for id_, turns in self.completions.items()
        }
        # vLLM's counts cover the current turn only; `totals` has the turns before it.
        running = zip(self.running.values(), num_running, strict=True)
        return [
            *(totals[id_] + tokens for id_, tokens in running),
            *(totals[id_] for id_ in self._waiting),
        ]

    def _start(
        self, requests: Iterable[tuple[ConversationId, Request]]
    ) -> list[tuple[str, Request]]:
        """Gives each request a new id, and lists it in `running`. Returns (request id, request)
        pairs."""
        started = []
        for id_, request in requests:
            request_id = next(self._request_ids)
            self.running[request_id] = id_
            started.append((request_id, request))
        return started
