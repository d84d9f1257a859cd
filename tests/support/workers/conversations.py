"""For workers with a real engine: conversations whose next request comes later, in whatever
order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any
from unittest.mock import patch

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import (
    LATE_REQUESTS_WAIT_S,
    LATER,
    ConversationId,
    EngineStateError,
    GenerationHooks,
    Later,
    Request,
)
from grpo_spmd.records import Completion

JOBS = [2, 3, 1, 2, 2]  # conversations of each
BLOCK = 32  # tokens of a block of the prefix cache on a CPU
# tokens of the longest conversation: room of its last turn, and what was said and given before
_GROWS_BY = 22


def request_of(
    engine: RolloutEngine, job: int, number: int, turns: Sequence[Completion]
) -> Request | None:
    """Conversations of one to four turns: each holds what was said and given before it. The last
    turn may be as long as
    the config says, one of them because it asks for too much; those before it of 3 tokens."""
    num_turns = (job + number) % 4 + 1
    if len(turns) == num_turns:
        return None
    room = engine._engine.vllm_config.model_config.max_model_len
    prompt = [job + 1, number + 5, *range(20, room - _GROWS_BY + 18)]
    inputs = [
        token for turn in turns for token in (*turn.token_ids, *[7] * (len(turn.token_ids) % 3))
    ]
    max_length = 3 if len(turns) < num_turns - 1 else [None, 1000][job % 2]
    return Request(prompt + inputs, 100 * job + 10 * number + len(turns), max_tokens=max_length)


class World:
    """LateRequests each turn after some calls: `how` "random", some at once, in any order, or
    "idle", only when nothing
    runs in the engine and it is asked for the third time."""

    def __init__(self, engine: RolloutEngine, method: str) -> None:
        self._engine, self._how = engine, method
        self._random = random.Random(f"{method} {engine.engine_rank}")
        self._waiting: dict[ConversationId, tuple[int, Request | None]] = {}
        self.came: list[float] = []  # the timeouts of the calls with which something came
        self.num_calls = 0

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Later:
        calls = self._random.randrange(6) if self._how == "random" else 2
        self._waiting[job, number] = (calls, request_of(self._engine, job, number, turns))
        return LATER

    def ready(self, timeout_s: float) -> list[tuple[ConversationId, Request | None]]:
        assert self._engine.tp_rank == 0, "asked on a rank that is not its engine's first"
        assert self._waiting, "asked while nobody waits"
        self.num_calls += 1
        if self._how == "idle" and not timeout_s:
            return []
        come = [
            (position, request)
            for position, (remaining, request) in self._waiting.items()
            if not remaining
        ]
        self._waiting = {
            position: (remaining - 1, request)
            for position, (remaining, request) in self._waiting.items()
            if remaining
        }
        self._random.shuffle(come)
        self.came += [timeout_s] * bool(come)
        return come


def converse_later(engine: RolloutEngine, version: int = 0, *, max_error: float = 0.0) -> list[Any]:
    """[job, the turns of each of its conversations] over all engines. Fails unless these are, in
    each order of answers,
    what each turn is by itself, computed anew from its whole context. Logprobs may be off by
    `max_error`, where a product of vLLM's depends on the number of its rows."""
    orders_values = []
    with uneven(engine):
        for method in ("random", "idle"):
            created = converse(engine, method, version)
            local = [
                [
                    job,
                    [
                        [astuple(replace(turn, routes=None)) for turn in turns]
                        for turns in communicates
                    ],
                ]
                for job, communicates in created.items()
            ]
            orders_values.append(
                on_rank0(lambda pieces: sorted(item for piece in pieces for item in piece), local)
            )
        assert_same(orders_values[0], orders_values[1], max_error)
        assert [job for job, _ in orders_values[0]][:: engine.tp_size] == list(range(len(JOBS)))
        for job, communicates in created.items():
            expected = [alone(engine, version, job, number) for number in range(JOBS[job])]
            assert_same(
                [[astuple(replace(turn, routes=None)) for turn in turns] for turns in communicates],
                [[astuple(replace(turn, routes=None)) for turn in turns] for turns in expected],
                max_error,
            )
    return orders_values[0][:: engine.tp_size]


def assert_same(values: Any, expected: Any, max_error: float) -> None:
    """Fails unless the values, in lists and tuples of any depth, are equal, logprobs within
    `max_error`."""
    if isinstance(values, list | tuple):
        assert len(values) == len(expected)
        for value, other in zip(values, expected, strict=True):
            assert_same(value, other, max_error)
    elif isinstance(values, float):
        assert abs(values - expected) <= max_error
    else:
        assert values == expected


def converse(engine: RolloutEngine, method: str, version: int) -> dict[int, list[list[Completion]]]:
    """What this engine makes of its conversations."""
    report: list[tuple[int, int, Completion]] = []
    world = World(engine, method)
    with watched(engine) as outputs:
        created = engine.generate_shared(
            JOBS,
            GenerationHooks(world.next_request, lambda *f: report.append(f), late_requests=world),
            version,
        )
    for job, communicates in created.items():
        for number, turns in enumerate(communicates):
            assert [c for j, n, c in report if (j, n) == (job, number)] == turns
    if method == "idle":
        assert set(world.came) <= {LATE_REQUESTS_WAIT_S}, world.came
    elif engine.tp_rank == 0 and engine.num_engines == 1:
        assert 0.0 in world.came  # some came while others ran
    check_cached(engine, outputs)
    return created


def alone(engine: RolloutEngine, version: int, job: int, number: int) -> list[Completion]:
    """A conversation turn by turn, each with nothing cached and nothing beside it."""
    turns: list[Completion] = []
    while (request := request_of(engine, job, number, turns)) is not None:
        engine.reset_prefix_cache()
        turns += engine.generate([request], version)
        maximum = engine._rollout.max_completion_tokens
        assert len(turns[-1].token_ids) <= min(request.max_tokens or maximum, maximum)
    return turns


@contextmanager
def uneven(engine: RolloutEngine) -> Iterator[None]:
    """Completions of any length: a fifth of the vocabulary ends one."""
    with patch.object(engine, "_stop_token_ids", list(range(20))):
        yield


@contextmanager
def watched(engine: RolloutEngine) -> Iterator[list[Any]]:
    """vLLM's own outputs, of finished requests."""
    step, outputs = engine._engine.step, list[Any]()

    def stepping() -> Any:
        created = step()
        outputs.extend(output for output in created if output.finished)
        return created

    with patch.object(engine._engine, "step", stepping):
        yield outputs


def check_cached(engine: RolloutEngine, outputs: Sequence[Any]) -> None:
    """Collective. A context re-enters with its prefix cached. Small caches, which hold few
    conversations, are not asked."""
    initial: dict[tuple[int, ...], int] = {}
    for output in outputs:
        talk = tuple(output.prompt_token_ids[:2])
        initial[talk] = min(initial.get(talk, 1 << 30), len(output.prompt_token_ids))
    again = [
        o
        for o in outputs
        if len(o.prompt_token_ids) > initial[tuple(o.prompt_token_ids[:2])] > BLOCK
    ]
    assert all(output.num_cached_tokens >= BLOCK for output in again), [
        o.num_cached_tokens for o in again
    ]
    # One of two engines may have got few of the conversations. An engine's first rank counts for
    # all of its ranks, which have the same outputs.
    is_large = bool(outputs) and max(initial.values()) > BLOCK
    num_again = len(again) if engine.tp_rank == 0 else 0
    counts = on_rank0(list, [num_again, is_large])
    if any(large for _, large in counts):
        assert sum(count for count, _ in counts) >= 8, counts


def end_while_all_wait(engine: RolloutEngine, version: int = 0) -> None:
    """What waits is dropped, though only the engine's last rank has heard that it is to end, and
    the engine can be used
    at once."""
    world, requests = World(engine, "never"), list[int]()
    is_last = engine.tp_rank == engine.tp_size - 1
    world.ready = lambda timeout_s: []  # type: ignore[method-assign]

    def should_abort() -> bool:
        requests.append(0)
        return is_last and len(requests) > 2

    with patch.object(engine, "_should_abort", should_abort):
        assert (
            engine.generate_shared(
                [2] * 4, GenerationHooks(world.next_request, late_requests=world), version
            )
            == {}
        )
    assert not engine._engine.has_unfinished_requests()
    assert len(engine.generate([Request([1], 0)], version)) == 1


def fail_while_all_wait(engine: RolloutEngine, version: int) -> None:
    """One engine. Its ranks fail together, wherever it begins."""
    world = World(engine, "random")

    def failing(error: Exception) -> Callable[[float], Any]:
        def ready(timeout_s: float) -> Any:
            raise error

        return ready

    def say(next_request: Any) -> None:
        engine.generate_shared([2] * 4, GenerationHooks(next_request, late_requests=world), version)

    world.ready = failing(ValueError("the world ends"))  # type: ignore[method-assign, assignment]
    raises(
        lambda: say(world.next_request),
        Rank0Error if engine.tp_size > 1 else ValueError,
        "the world ends",
    )
    world.ready = lambda timeout_s: [((7, 7), None)]  # type: ignore[method-assign]
    raises(
        lambda: say(world.next_request),
        EngineStateError,
        "conversation (7, 7), which does not wait",
    )
    if engine.tp_size > 1:
        raises(
            lambda: say(lambda *_: LATER if engine.tp_rank else None), EngineStateError, "ranks [1]"
        )
    assert not engine._engine.has_unfinished_requests()
    assert len(engine.generate([Request([1], 0)], version)) == 1


def race_while_some_wait(engine: RolloutEngine, version: int) -> None:
    """One engine of one rank. What runs and waits is dropped, each with all of its tokens; what is
    over is kept."""
    report: list[tuple[int, int, Completion]] = []
    dropped: list[int] = []
    race: Any = type(
        "EarlyStop",
        (),
        {"is_over": lambda self: len(report) > 20, "drop": lambda self, n: dropped.extend(n)},
    )()
    world = World(engine, "random")
    with uneven(engine):
        created = engine.generate_shared(
            [1] * 12,
            GenerationHooks(
                world.next_request,
                lambda *f: report.append(f),
                late_requests=world,
                early_stop=race,
            ),
            version,
        )
        assert created == {job: [alone(engine, version, job, 0)] for job in created}
    assert 0 < len(created) < 12
    assert len(dropped) == 12 - len(created)
    assert sum(dropped) >= sum(len(c.token_ids) for job, _, c in report if job not in created)
    assert not engine._engine.has_unfinished_requests()


def stale_cache_shows(
    engine: RolloutEngine, sync: Callable[[int], Any], disturb: Callable[[], None]
) -> None:
    """A conversation that goes on after new weights came has nothing of the old ones in its
    logprobs; where the cache
    is kept, which is planted here, that shows. `sync(version)`."""
    sync(0)
    [message] = engine.generate([Request([5] * 40, 1, max_tokens=4)], 0)
    goes_on = [Request([5] * 40 + message.token_ids + [7, 7], 2, max_tokens=4)]
    disturb()
    with patch.object(engine, "reset_prefix_cache", lambda: None):
        sync(1)
    with watched(engine) as outputs:
        [stale] = engine.generate(goes_on, 1)
    assert [output.num_cached_tokens for output in outputs] == [BLOCK]
    sync(2)
    with watched(engine) as outputs:
        [fresh] = engine.generate(goes_on, 2)
        assert engine.generate(goes_on, 2) == [fresh]  # from its own cache: to the bit
    assert [output.num_cached_tokens for output in outputs] == [0, BLOCK]
    assert (
        abs(stale.logprobs[0] - fresh.logprobs[0]) > 1e-4
        or stale.token_ids[0] != fresh.token_ids[0]
    )


def raises(call: Callable[[], Any], kind: type[Exception], expected: str) -> None:
    try:
        call()
    except kind as error:
        assert expected in str(error), error  # noqa: PT017
    else:
        raise AssertionError(f"did not raise: {expected}")
