"""Defines what callers ask of the engines, and deals the work out to them. Imports no vllm.

A conversation is a request, or several in turn, each with the completions before it in its prompt.
A job is a group of conversations that one engine samples. A late request is the next request of a
conversation that is not known yet when the completion before it is finished, as when a tool runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.distributed.collectives import find_differing_ranks, on_first_in_group
from grpo_spmd.records import Completion, Prompt


class EngineStateError(RuntimeError):
    """Says that the engine would have answered from stale or missing weights."""


@dataclass(frozen=True)
class Request:
    """Asks for one completion."""

    prompt_ids: list[int]
    seed: int | None
    """None for greedy decoding, which draws nothing."""
    temperature: float | None = None
    """0 for greedy decoding. None stands for `rollout.temperature`."""
    max_tokens: int | None = None
    """Upper bound, at least 1. None stands for `rollout.max_completion_tokens`, which also bounds
    every rollout."""
    is_rollout: bool = True
    """False if nobody trains on the completion.

    Then only `max_tokens` bounds it, and it has no logprobs."""
    top_p: float = 1.0
    ends_at_stops: bool = True
    """True if `rollout.stop` ends it too."""


def policy_request(
    prompt_ids: list[int],
    seed: int | None,
    evaluation: EvalConfig | None,
    max_tokens: int | None = None,
) -> Request:
    """Returns the request of a rollout, or of an evaluation with these settings.

    Nobody reads the logprobs of an evaluation."""
    if evaluation is None:
        return Request(prompt_ids, seed, max_tokens=max_tokens)
    temperature, top_p = evaluation.temperature, evaluation.top_p
    return Request(prompt_ids, seed, temperature, max_tokens, is_rollout=False, top_p=top_p)


@dataclass(frozen=True)
class Later:
    """Stands for a request while the next request of a conversation is not known."""


LATER = Later()
ConversationId = tuple[int, int]  # job, number within the job
NextRequest = Callable[[int, int, Sequence[Completion]], Request | Later | None]
# The prompt of a conversation, and the function that returns the seed of each of its turns.
EpisodeTask = tuple[Prompt, Callable[..., int]]
OnCompletion = Callable[[int, int, Completion], None]


class LateRequests(Protocol):
    """Brings late requests. Only the first rank of each engine calls it."""

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        """Returns (conversation, request) for the requests that are known now, each once.

        The request is None if the conversation is over. If none is known, it waits at most
        `timeout_s` for the first."""


class EarlyStop(Protocol):
    """Ends a generation before all of its jobs are finished."""

    def is_over(self) -> bool:
        """Returns True once enough jobs are finished over all engines. It stays True.

        It never waits for other engines."""

    def drop(self, num_tokens: Sequence[int], /) -> None:
        """Takes note of the number of tokens of each conversation that this engine drops."""


@dataclass(frozen=True)
class GenerationHooks:
    """Holds the functions that a generation calls while it runs."""

    next_request: NextRequest
    """`next_request(job, number within the job, completions of this conversation so far)` returns
    the next request, None if the conversation is over, or LATER. Equal on all ranks of an engine.
    After LATER the other conversations go on, and `late_requests` brings the request."""
    on_completion: OnCompletion | None = None
    """Called with (job, number within the job, completion) as soon as a completion is finished, on
    all ranks of the engine."""
    late_requests: LateRequests | None = None
    """Given on all ranks of an engine or on none."""
    early_stop: EarlyStop | None = None
    """Given on all ranks or on none. Unfinished jobs are then dropped and not returned."""
    before_step: Callable[[], None] | None = None
    """Called before each step of the engine."""


class JobSchedule(NamedTuple):
    """Says which engine gets which jobs. All ranks compute the same from the same arguments."""

    dealt: list[list[int]]
    """The jobs that each engine gets at the start."""
    queued: list[int]
    """The other jobs, in the order in which engines claim them."""


@dataclass(frozen=True)
class Capacity:
    """Says how much vLLM runs at once in an engine, equal on all ranks."""

    max_num_seqs: int
    kv_cache_tokens: int

    def num_requests(self, expected_tokens: Sequence[float] | None) -> int:
        """Returns how many requests run at once, by the expected tokens of a completion of each
        job.

        While it runs, a completion takes half of its length in the cache, on average: by its whole
        length an engine would start with a batch that is too small. Its prompt is not counted,
        which a group shares. Without lengths `max_num_seqs` alone counts."""
        mean_tokens = fmean(expected_tokens or [0])
        if not mean_tokens:
            return self.max_num_seqs
        return min(self.max_num_seqs, max(1, int(2 * self.kv_cache_tokens / mean_tokens)))


def share_out(
    num_jobs: int, job_size: int, num_engines: int, num_at_once: int | None
) -> tuple[int, int]:
    """Returns two upper bounds for an engine: requests in flight, and jobs at the start.

    `job_size` is the number of conversations of the largest job, `num_at_once` the number of
    requests that vLLM runs at once. An engine with fewer requests in flight claims a queued job. Up
    to `job_size` - 1 of its requests then wait in vLLM, so that it never runs out of work. If
    `num_at_once` is None, all jobs are dealt at the start."""
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
    """Returns which engine starts with which jobs. No engine gets more than `num_dealt` of them.

    Without `expected_tokens` (tokens of one completion, by job) jobs go to engines in turn. With
    it the longest jobs start first, so that no engine starts a long job last. Each goes to the
    engine with the fewest expected tokens so far. Ties keep their order."""
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


# Seconds that an engine with nothing to run waits for a late request. After that it looks whether
# it should stop.
LATE_REQUESTS_WAIT_S = 0.5


class Conversations:
    """Keeps the conversations of one engine in a generation: which run, which wait, which are over.

    Each rank of the engine holds a copy and takes the same steps. Late requests arrive on the
    engine's first rank, which sends them to the others."""

    def __init__(
        self, hooks: GenerationHooks, group: dist.ProcessGroup | None, engine_rank: int
    ) -> None:
        """`group` has the ranks of the engine. It is None if the engine has a single rank."""
        self._hooks = hooks
        self._group = group
        self._engine_rank = engine_rank
        self._request_ids = map(str, itertools.count())
        self.completions: dict[ConversationId, list[Completion]] = {}
        """The completions of each conversation that was started, one a turn."""
        self.running: dict[str, ConversationId] = {}
        """Conversations by request id, in the order in which vLLM got the requests."""
        self._waiting: set[ConversationId] = set()

    @property
    def num_open(self) -> int:
        """Number of conversations that run or wait."""
        return len(self.running) + len(self._waiting)

    def advance(self, ids: Iterable[ConversationId]) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. Returns the next requests of these conversations.

        The conversations are new or have a new completion. Raises EngineStateError on all ranks
        if `next_request` returned different requests on them."""
        answers = [
            (id_, self._hooks.next_request(*id_, self.completions.setdefault(id_, [])))
            for id_ in ids
        ]
        late = self._hooks.late_requests
        # With late requests the end of a conversation (None) must also be equal on all ranks.
        compared = [answer for _, answer in answers if answer is not None or late is not None]
        # Each rank samples by itself: different requests would give garbage, or hang.
        if compared and self._group is not None:
            ranks = find_differing_ranks(repr(compared).encode(), self._group)
            if ranks:
                raise EngineStateError(
                    f"generate: ranks {ranks} of engine {self._engine_rank} were given other "
                    "requests than its first rank"
                )
        self._waiting |= {id_ for id_, answer in answers if isinstance(answer, Later)}
        return self._start((id_, answer) for id_, answer in answers if isinstance(answer, Request))

    def take_late_requests(self) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. Returns the requests that arrived for conversations.

        If no request runs, it waits for the first. Raises EngineStateError on all ranks if one came
        for a conversation that does not wait. Errors of `ready` are raised on all ranks too."""
        if not self._waiting:
            return []
        late = self._hooks.late_requests
        assert late is not None, "next_request returned LATER, and there are no late_requests"
        timeout_s = 0.0 if self.running else LATE_REQUESTS_WAIT_S
        if self._group is None:
            arrived = late.ready(timeout_s)
        else:
            # Requests travel as plain lists, since the collective sends JSON.
            plain_requests: list[Any] = on_first_in_group(
                lambda: [
                    (id_, request and astuple(request)) for id_, request in late.ready(timeout_s)
                ],
                self._group,
            )
            arrived = [
                (tuple(id_), None if fields is None else Request(*fields))
                for id_, fields in plain_requests
            ]
        for id_, _ in arrived:
            if id_ not in self._waiting:
                raise EngineStateError(
                    f"generate: an answer for conversation {id_}, which does not wait for one"
                )
            self._waiting.remove(id_)
        return self._start((id_, request) for id_, request in arrived if request is not None)

    def end_turn(self, request_id: str, completion: Completion) -> ConversationId:
        """Adds the completion to the conversation that asked for it, as the end of the turn, and
        returns that conversation's id."""
        id_ = self.running.pop(request_id)
        self.completions[id_].append(completion)
        return id_

    def finished(self) -> dict[ConversationId, list[Completion]]:
        """Returns the completions of the conversations that are over."""
        unfinished = {*self.running.values(), *self._waiting}
        return {id_: turns for id_, turns in self.completions.items() if id_ not in unfinished}

    def num_tokens(self, num_running: Iterable[int]) -> list[int]:
        """Returns the sampled tokens of each conversation that runs or waits.

        `num_running` has the tokens of the running requests, in their order."""
        totals = {
            id_: sum(len(turn.token_ids) for turn in turns)
            for id_, turns in self.completions.items()
        }
        # vLLM's counts cover the current turn only. The totals have the turns before it.
        running = zip(self.running.values(), num_running, strict=True)
        return [
            *(totals[id_] + tokens for id_, tokens in running),
            *(totals[id_] for id_ in self._waiting),
        ]

    def _start(
        self, requests: Iterable[tuple[ConversationId, Request]]
    ) -> list[tuple[str, Request]]:
        """Returns (request id, request), with a new id for each request, which runs from now on."""
        started = []
        for id_, request in requests:
            request_id = next(self._request_ids)
            self.running[request_id] = id_
            started.append((request_id, request))
        return started
