"""The engine's loop over conversations whose next request comes later: who is asked what, and
when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import (
    LATE_REQUESTS_WAIT_S,
    LATER,
    ConversationId,
    Conversations,
    EngineStateError,
    GenerationHooks,
    Later,
    Request,
)
from grpo_spmd.records import Completion


class StandInVllm:
    """Runs each request for as many steps as its seed says; its tokens are the prompt's last, so
    often."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.scheduler = self
        self.engine_core = SimpleNamespace(engine_core=self)
        self.aborted: list[str] = []

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.requests), 0

    def has_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            del self.requests[name]

    def step(self) -> list[Any]:
        assert self.requests, "a step with nothing to run"
        outputs = []
        for name, request in list(self.requests.items()):
            request.num_output_tokens += 1
            if request.num_output_tokens == request.length:
                del self.requests[name]
                tokens = [request.last] * request.length
                sampled = SimpleNamespace(token_ids=tokens, finish_reason="stop")
                sampled.logprobs = SimpleNamespace(logprobs=[-1.0] * request.length)
                outputs.append(SimpleNamespace(request_id=name, finished=True, outputs=[sampled]))
        return outputs


class Engine:
    """One rank's engine over a vLLM that is none."""

    records_routes = False
    _recorder = None
    _speculation = None

    def __init__(self, rank: int = 0) -> None:
        self._engine = StandInVllm()
        self._session, self._group = SimpleNamespace(rank=rank), None
        self._on_cpu, self.tp_rank, self.engine_rank = True, 0, 0

    def _refuse_unless_ready(self, policy_version: int) -> None:
        pass

    def _end_rest(self) -> None:
        pass

    def _add_requests(self, requests: Iterable[tuple[str, Request]]) -> None:
        for name, request in requests:
            self._engine.requests[name] = SimpleNamespace(
                length=request.seed, last=request.prompt_ids[-1], num_output_tokens=0
            )

    generate = RolloutEngine._generate
    _abort = RolloutEngine._abort
    _with_routes = RolloutEngine._with_routes

    def _is_stopped(self, early_stop: Any, num_steps: int) -> bool:
        return bool(early_stop.is_over())


@dataclasses.dataclass
class World:
    """LateRequests each turn of a conversation after some calls: `delays[place]`, one a turn; then
    it is over."""

    delays: dict[ConversationId, list[int]]
    waiting: dict[ConversationId, int] = dataclasses.field(default_factory=dict)
    asked: list[tuple[float, int]] = dataclasses.field(
        default_factory=list
    )  # timeout, and how many waited
    most_open: int = 0
    turns: dict[ConversationId, int] = dataclasses.field(default_factory=dict)

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Later:
        self.turns[job, number] = len(turns)
        self.waiting[job, number] = ([*self.delays[job, number], 0])[len(turns)]
        return LATER

    def ready(self, timeout_s: float) -> list[tuple[ConversationId, Request | None]]:
        assert self.waiting, "asked while nobody waits"
        self.asked.append((timeout_s, len(self.waiting)))
        come = [position for position, remaining in self.waiting.items() if remaining <= 0]
        self.waiting = {
            position: remaining - 1 for position, remaining in self.waiting.items() if remaining > 0
        }
        return [(position, self._request(position)) for position in come]

    def _request(self, position: ConversationId) -> Request | None:
        turn = self.turns[position]
        return (
            Request([10 * position[0] + position[1], turn], seed=turn + 2)
            if turn < len(self.delays[position])
            else None
        )


def generate(
    engine: Engine,
    batches: list[list[ConversationId]],
    maximum: int,
    world: Any,
    early_stop: Any = None,
    **options: Any,
) -> dict[ConversationId, list[Completion]] | None:
    hooks = GenerationHooks(world.next_request, late_requests=world, early_stop=early_stop)
    return engine.generate(iter(batches), maximum, 0, hooks, **options)  # type: ignore[misc]


def lengths(
    made: dict[ConversationId, list[Completion]] | None,
) -> dict[ConversationId, list[tuple[int, int]]]:
    """Of each turn the tokens and which turn it was."""
    assert made is not None
    return {
        position: [(len(turn.token_ids), turn.token_ids[0]) for turn in turns]
        for position, turns in made.items()
    }


def test_answers_of_any_order_enter_while_others_run() -> None:
    world = World({(0, 0): [0, 3], (0, 1): [5], (1, 0): [], (1, 1): [1, 0, 0]})
    created = generate(Engine(), [[(0, 0), (0, 1)], [(1, 0), (1, 1)]], 9, world)
    # Turn t is of t + 2 tokens, all of them t.
    expected = {
        position: [(turn + 2, turn) for turn in range(len(delays))]
        for position, delays in world.delays.items()
    }
    assert lengths(created) == expected
    assert {timeout_s for timeout_s, _ in world.asked} == {
        0.0,
        LATE_REQUESTS_WAIT_S,
    }  # some came while others ran


def test_nobody_waits_for_an_answer_while_something_runs() -> None:
    # The second conversation runs for 9 turns of 2 tokens and more; the first answers in 30 calls.
    engine, world = Engine(), World({(0, 0): [30], (0, 1): [0] * 9})
    ready = world.ready

    def watched(timeout_s: float) -> list[tuple[ConversationId, Request | None]]:
        assert (timeout_s > 0) == (not engine._engine.requests)
        return ready(timeout_s)

    world.ready = watched  # type: ignore[method-assign]
    assert len(generate(engine, [[(0, 0), (0, 1)]], 9, world) or {}) == 2


def test_a_conversation_that_waits_keeps_its_room() -> None:
    positions = [[(job, 0)] for job in range(5)]
    world, selected = World({(job, 0): [4, 2] for job in range(5)}), list[int]()

    def batches() -> Iterator[list[ConversationId]]:
        for batch in positions:
            selected.append(sum(world.turns.get((job, 0), -1) < 2 for job in range(len(selected))))
            yield batch

    engine = Engine()
    hooks = GenerationHooks(world.next_request, late_requests=world)
    created = engine.generate(batches(), 2, 0, hooks)  # type: ignore[misc]
    assert lengths(created) == {(job, 0): [(2, 0), (3, 1)] for job in range(5)}
    assert max(selected) == 1  # with two open no third is taken


def test_to_end_is_asked_while_all_wait() -> None:
    engine, requests = Engine(), list[int]()

    def must_abort(num_steps: int) -> bool:
        requests.append(num_steps)
        return len(requests) == 6

    world = World({(0, 0): [99], (0, 1): [99]})
    assert generate(engine, [[(0, 0), (0, 1)]], 9, world, must_abort=must_abort) is None
    assert (
        requests == [0] * 6
    )  # each time: ranks that share an engine ask each other at steps 0, 8, 16, ...
    assert [timeout_s for timeout_s, _ in world.asked] == [LATE_REQUESTS_WAIT_S] * 6


def test_what_waits_is_dropped_with_its_tokens_when_the_race_is_over() -> None:
    # Both begin at once with 2 tokens; (0, 1) then waits, (1, 0) is over, and (2, 0) is in its
    # second turn of 3.
    engine = Engine()
    world = World({(0, 1): [0, 99], (1, 0): [0], (2, 0): [0, 0], (3, 0): [99]})
    dropped: list[list[int]] = []
    early_stop = SimpleNamespace(is_over=lambda: world.turns.get((2, 0)) == 1, drop=dropped.append)
    created = generate(engine, [[(0, 1), (1, 0), (2, 0), (3, 0)]], 9, world, early_stop=early_stop)
    assert lengths(created) == {(1, 0): [(2, 0)]}
    assert [sorted(tokens) for tokens in dropped] == [
        [0, 2, 2]
    ]  # the second turn of (2, 0) has just begun
    assert engine._engine.aborted == ["3"]
    assert not engine._engine.requests


@pytest.mark.parametrize("answer", [(0, 1), (7, 7)])
def test_an_answer_for_one_that_does_not_wait_is_refused(answer: ConversationId) -> None:
    """That of a sibling, or of one that an earlier generation has dropped."""
    message = [(answer, Request([1], 1))]
    conversations = Conversations(
        GenerationHooks(
            lambda job, number, turns: Request([1], 1) if number else LATER,
            late_requests=SimpleNamespace(ready=lambda _: message),
        ),
        None,
        0,
    )
    assert [request for _, request in conversations.advance([(0, 0), (0, 1)])] == [Request([1], 1)]
    with pytest.raises(EngineStateError, match=r"conversation \(\d, \d\), which does not wait"):
        conversations.take_late_requests()


def test_an_answer_that_comes_twice_is_refused() -> None:
    twice = SimpleNamespace(ready=lambda _: [((0, 0), Request([1], 1))] * 2)
    conversations = Conversations(GenerationHooks(lambda *_: LATER, late_requests=twice), None, 0)
    conversations.advance([(0, 0)])
    with pytest.raises(EngineStateError, match="does not wait"):
        conversations.take_late_requests()


def test_an_answer_of_an_engine_of_one_rank_is_not_copied() -> None:
    """Its prompt may have 100,000 tokens."""
    message = Request([1, 2], 1, max_tokens=3, prompt_recurs=False)
    late = SimpleNamespace(ready=lambda _: [((0, 0), message), ((0, 1), None)])
    conversations = Conversations(GenerationHooks(lambda *_: LATER, late_requests=late), None, 0)
    conversations.advance([(0, 0), (0, 1)])
    [(_, request)] = conversations.take_late_requests()
    assert request == message
    assert request.prompt_ids is message.prompt_ids
