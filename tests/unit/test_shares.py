"""Which engine samples what, and in which order: it must not lose a group, and all ranks must come
to the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grpo_spmd.engine.requests import deal, share_out
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
