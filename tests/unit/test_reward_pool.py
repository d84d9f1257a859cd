"""Error rates over all ranks, and when they stop the run."""

from __future__ import annotations

from collections import Counter

import pytest

from grpo_spmd.records import ScoredRollouts
from grpo_spmd.rewards.protocol import RewardError, check_error_rate

# The error rate


def _counted(ranks: list[dict[str, list[str]]]) -> list[dict[str, Counter[str]]]:
    return [ScoredRollouts(statuses=statuses).num_statuses() for statuses in ranks]


def test_error_rates_are_shares_over_all_ranks() -> None:
    ranks = [
        {"f": ["ok", "error", "timeout", "not_applicable"], "g": ["ok"] * 4},
        {},
        {"f": ["ok"] * 4, "g": ["not_applicable"] * 4},
    ]
    assert check_error_rate(_counted(ranks), [None, None, None], 0.3) == {
        "reward/f/error_frac": 1 / 8,
        "reward/f/timeout_frac": 1 / 8,
        "reward/f/not_applicable_frac": 1 / 8,
        "reward/g/error_frac": 0.0,
        "reward/g/timeout_frac": 0.0,
        "reward/g/not_applicable_frac": 4 / 8,
    }


@pytest.mark.parametrize("max_error_frac", [0.25, 0.2, 1e-9])
def test_the_error_rate_that_is_reached_stops_with_everything_one_needs(
    max_error_frac: float,
) -> None:
    ranks = [
        {"f": ["ok", "error", "timeout", "not_applicable"], "g": ["ok"] * 4},
        {"f": ["ok"] * 4, "g": ["ok", "error", "ok", "ok"]},
    ]
    errors = [
        "reward 'g' raised IndexError\nTraceback of g",
        "reward 'f' raised KeyError: 'x'\nTraceback of f",
    ]
    with pytest.raises(RewardError) as caught:
        check_error_rate(_counted(ranks), errors, max_error_frac)
    # The user's own error comes first, its traceback last.
    assert str(caught.value) == (
        "reward 'f' raised KeyError: 'x'; reward 'f' gave no usable value for 2 of 8 completions "
        "(1 error, 1 timeout): 0.25 is not under "
        f"reward_pool.max_error_frac={max_error_frac:g}\nTraceback of f"
    )


def test_no_failure_never_stops() -> None:
    assert (
        check_error_rate(_counted([{"f": ["ok", "not_applicable"]}]), [None], 0.0)[
            "reward/f/error_frac"
        ]
        == 0.0
    )
