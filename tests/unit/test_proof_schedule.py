"""When the running proofs are due, at which rows they look, and what a critic's warm-up may do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_spmd.learn.update import MiniBatch
from grpo_spmd.proofs.gradient_check import UpdateCheckError
from grpo_spmd.proofs.schedule import ProofSchedule, rows_to_check
from grpo_spmd.proofs.update_check import UpdateCheck


@pytest.mark.parametrize(
    ("every", "first", "expected"),
    [
        (0, 1, [1, 3]),
        (50, 1, [1, 3, 50, 100]),
        (2, 1, [1, 2, 3, *range(4, 101, 2)]),
        # A process that resumes after step 48: its first step is 49.
        (50, 49, [49, 50, 51, 100]),
    ],
)
def test_due_in_the_first_and_third_step_of_a_process_and_every_n(
    every: int, first: int, expected: list[int]
) -> None:
    schedule = ProofSchedule(every)
    # A step may be asked about twice, by a training's and an evaluation's scoring.
    assert [s for s in range(first, 101) if schedule.is_due(s) and schedule.is_due(s)] == expected
    assert [s for s in range(first, 101) if schedule.is_early(s)] == [first, first + 2]


@pytest.mark.parametrize(
    ("number", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 8])]
)
def test_rows_of_a_batch_that_are_looked_at(number: int, expected: list[int]) -> None:
    rows: Any = [*range(number)]
    chosen: list[Any] = [*rows_to_check(rows)]
    assert chosen == expected


def check_with(warmup_steps: int) -> UpdateCheck:
    """Of whose parts only those are there that count the policy's updates."""
    check: Any = UpdateCheck.__new__(UpdateCheck)
    check._settings = SimpleNamespace(is_on=True, warmup_steps=warmup_steps)
    check._schedule = SimpleNamespace(is_early=lambda _: False, is_due=lambda _: False)
    check._step = check._seconds = check._num_runs = 0
    check._adamw = SimpleNamespace(window=0, before_backward=lambda _: None)
    check._expects_update = False
    return cast(UpdateCheck, check)


def steps(check: UpdateCheck, updated: str, tokens: int = 5) -> None:
    """Each step with an update of the policy (u), or without one (-)."""
    batch: Any = SimpleNamespace(num_loss_tokens=[tokens])
    nothing: Any = None
    for step, kind in enumerate(updated, start=1):
        check.run_if_due(step, nothing, batch, nothing)
        if kind == "u":
            check.before_backward(MiniBatch([], tokens, 1))


@pytest.mark.parametrize(
    ("warmup_steps", "updated", "message"),
    [
        (0, "uuu", ""),
        (2, "--uu", ""),
        # A step too short, and too long.
        (2, "-uuu", r"step 2: the policy is updated within the first 2 steps"),
        (2, "---uu", r"step 4: the policy was not updated in the step before"),
        (0, "-u", r"step 2: the policy was not updated in the step before"),
    ],
)
def test_a_warm_up_of_another_length_is_seen(warmup_steps: int, updated: str, message: str) -> None:
    if not message:
        steps(check_with(warmup_steps), updated)
        return
    with pytest.raises(UpdateCheckError, match=message):
        steps(check_with(warmup_steps), updated)


def test_a_step_in_which_no_token_counts_makes_no_update() -> None:
    steps(check_with(0), "---", tokens=0)
