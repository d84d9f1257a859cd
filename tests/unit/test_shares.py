"""Which engine samples what, and in which order: it must not lose a group, and all ranks must come
to the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Capacity, GenerationHooks, deal, share_out
from grpo_spmd.records import Completion, Prompt, RolloutGroup
from grpo_spmd.rollout import sample
from grpo_spmd.rollout.sample import ExpectedLengths


def test_the_longest_go_first_and_evenly_by_hand() -> None:
    # The four longest are dealt, 9 7 5 4: 9 to the first engine, 7 and 5 to the second, which has 7
    # after one, and then
    # its two; so that 4 goes to the first. The others are claimed longest first.
    assert deal([1] * 6, [4, 1, 9, 5, 2, 7], 2, 2) == ([[2, 0], [5, 3]], [4, 1])
    # A group of which one completion is missing is begun as early as its length says, and weighs an
    # eighth.
    assert deal([1, 8, 8, 8], [9, 7, 6, 5], 2, 2) == ([[0, 2], [1, 3]], [])


def test_what_is_not_known_stays_in_turn() -> None:
    assert deal([3] * 7, None, 2, 3) == ([[0, 3], [1, 4], [2, 5]], [6])
    assert deal([3] * 7, [5.0] * 7, 2, 3) == deal([3] * 7, None, 2, 3)
    assert deal([], [], 0, 2) == deal([], None, 0, 2) == ([[], []], [])


@pytest.mark.parametrize("seed", range(40))
def test_every_job_is_there_once_and_none_is_longer_than_those_before_it(seed: int) -> None:
    rng = random.Random(seed)
    num_jobs, engines, job_size = rng.randrange(60), rng.randrange(1, 9), rng.randrange(1, 9)
    sizes = [rng.randrange(1, job_size + 1) for _ in range(num_jobs)]
    lengths = [float(rng.randrange(1, 20)) for _ in range(num_jobs)]
    _, num_dealt = share_out(num_jobs, job_size, engines, rng.choice([None, rng.randrange(1, 100)]))
    dealt, queued = deal(sizes, lengths, num_dealt, engines)
    started = [job for jobs in dealt for job in jobs]
    assert sorted([*started, *queued]) == list(range(num_jobs))
    assert (max(map(len, dealt)) <= num_dealt, len(queued)) == (
        True,
        len(deal(sizes, None, num_dealt, engines)[1]),
    )
    for jobs in (*dealt, queued):
        assert [lengths[job] for job in jobs] == sorted(
            (lengths[job] for job in jobs), reverse=True
        )
    assert not queued or not started or min(lengths[job] for job in started) >= lengths[queued[0]]


def test_a_small_cache_leaves_groups_in_the_queue() -> None:
    """128 groups of 8 for 8 engines. Where all run at once, each gets its 16; where 38 do, 4."""
    assert share_out(128, 8, 8, 1024) == (128, 16)
    assert share_out(128, 8, 8, 38) == (38, 4)
    dealt, queued = deal([8] * 128, None, 4, 8)
    assert ([len(jobs) for jobs in dealt], len(queued)) == ([4] * 8, 128 - 8 * 4)
    # A cache of 38 completions of 5,000 tokens, each of which is there by half on average.
    capacity = Capacity(256, 38 * 2500)
    assert capacity.num_requests([5000.0] * 128) == 38
    # The mean counts, not the longest; 2,400 more tokens hold no 39th.
    assert capacity.num_requests([1000.0, 9000.0]) == 38
    assert Capacity(256, 38 * 2500 + 2400).num_requests([5000.0]) == 38
    # Nothing is known, or nothing is to be sampled; vLLM runs no more; one always runs.
    assert [capacity.num_requests(tokens) for tokens in (None, [], [0.0] * 4)] == [256] * 3
    assert capacity.num_requests([100.0]) == 256
    assert capacity.num_requests([1e9]) == 1


@pytest.mark.parametrize(
    ("schedule", "expected_tokens", "in_flight", "num_dealt"),
    [
        ("shared_queue", 5000.0, 38, 4),
        ("shared_queue", 0.0, 128, 16),
        ("static", 5000.0, 128, 16),
    ],
)
def test_the_engine_starts_with_what_its_cache_holds(
    schedule: str, expected_tokens: float, in_flight: int, num_dealt: int
) -> None:
    seen: list[tuple[int, int]] = []

    def generate(batches: Iterator[Any], max_in_flight: int, *_: Any, **__: Any) -> None:
        seen.append((max_in_flight, len(next(batches))))

    engine: Any = object.__new__(RolloutEngine)
    engine._rollout = RolloutConfig(schedule=schedule)  # type: ignore[arg-type]
    engine._capacity = Capacity(256, 38 * 2500)
    engine.num_engines, engine.engine_rank, engine._num_shared_calls = 8, 3, 0
    engine._claim, engine._generate = lambda *_: None, generate
    engine.generate_shared([8] * 128, GenerationHooks(lambda *_: None), 1, [expected_tokens] * 128)
    assert seen == [(in_flight, 8 * num_dealt)]


def prompt(row: int) -> Prompt:
    return Prompt(position=1000 + row, row=row, token_ids=[1], text="", columns={})


def group(row: int, *lengths: int) -> RolloutGroup:
    return RolloutGroup(0, prompt(row), [Completion([7] * n, [0.0] * n, "stop") for n in lengths])


def test_expected_lengths_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    rank0, second = ExpectedLengths(), ExpectedLengths()

    def ask(rows: list[int], finished: list[tuple[int, int]]) -> list[float]:
        report: list[Any] = []

        def of_other(_: Any, local: Any) -> list[float]:
            report.append(local)
            return []

        monkeypatch.setattr(sample, "on_rank0", of_other)
        second.estimate([], [])
        monkeypatch.setattr(sample, "on_rank0", lambda look_up, local: look_up([local, *report]))
        return rank0.estimate([prompt(row) for row in rows], finished)

    assert ask([3, 0], []) == [0.0, 0.0]  # nothing is known
    rank0.record([group(3, 4, 8)])
    second.record([group(0, 1, 2)])
    # row 3: 6, row 0: 1.5; the others, also those beyond the last row seen, as many as these on
    # average
    assert ask([0, 3, 2, 99], []) == [1.5, 6.0, 3.8, 3.8]
    # of the second prompt three are done; what is missing was not when they were
    assert ask([3, 0, 1], [(1, 5), (1, 9), (1, 2)]) == [6.0, 9, 3.8]
    second.record([group(3, 10, 30)])
    assert ask([0, 3, 1], []) == [1.5, 20.0, 20.0]  # the last time counts
