"""What the metrics say of a step's groups, beside numbers that were worked out otherwise."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from grpo_spmd.learn.sampled_step import find_alike, group_metrics, reward_metrics
from grpo_spmd.learn.step_messages import GroupRows, group_dtype

Groups = tuple[GroupRows, list[str]]


def facts(position: int, lengths: list[int], by_name: dict[str, list[float | None]]) -> Groups:
    total: list[Any] = [
        None if None in row else sum(map(float, row)) for row in zip(*by_name.values(), strict=True)
    ]
    record = np.zeros(1, group_dtype(len(by_name), 4))
    record["position"], record["completion_tokens"] = position, lengths
    record["truncated"], record["rewards"] = [n == 100 for n in lengths], np.array(total, float)
    record["by_name"] = np.array(list(by_name.values()), float)
    return record, list(by_name)


def metrics_of(*groups: Groups) -> dict[str, float | None]:
    rows = np.concatenate([record for record, _ in groups])
    metrics = group_metrics(rows, find_alike(rows))
    for number, name in enumerate(groups[0][1]):
        metrics |= reward_metrics(name, rows["by_name"][:, number])
    return metrics


def test_spread_of_each_reward_and_percentiles_of_lengths() -> None:
    result = metrics_of(
        facts(
            0,
            [3, 100, 7, 20],
            {"math": [1.0, 0.0, 0.0, 1.0], "format": [0.5, None, float("nan"), 0.25]},
        ),
        facts(1, [1, 2, 50, 60], {"math": [1.0, 1.0, 1.0, 1.0], "format": [0.5, 0.5, 0.5, 0.5]}),
    )
    assert result["reward/math/mean"] == 6 / 8
    # two of eight are 0: the sum of squares is 6 * 0.25^2 + 2 * 0.75^2 = 1.5, over 7
    assert result["reward/math/std"] == pytest.approx((1.5 / 7) ** 0.5, rel=1e-12)
    expected_names = [0.5, 0.25, 0.5, 0.5, 0.5, 0.5]  # None and NaN are no rewards
    assert result["reward/format/mean"] == pytest.approx(statistics.mean(expected_names))
    assert result["reward/format/std"] == pytest.approx(statistics.stdev(expected_names))
    # in order 1 2 3 7 20 50 60 100: the middle between 7 and 20; 95 % of the way over 7 gaps is
    # 6.65: 60 + 0.65 * 40
    assert result["completion/tokens_p50"] == 13.5
    assert result["completion/tokens_p95"] == pytest.approx(86.0)
    assert result["completion/tokens_max"] == 100
    assert result["completion/tokens_mean"] == 243 / 8


def test_percentiles_are_numpys_over_all_groups_in_any_order() -> None:
    lengths = np.random.default_rng(3).integers(0, 101, (50, 4))
    groups = [
        facts(position, row.tolist(), {"r": [0.0, 1.0, 0.0, 1.0]})
        for position, row in enumerate(lengths)
    ]
    for order in (groups, groups[::-1]):
        result = metrics_of(*order)
        for percent in (50, 95):
            assert result[f"completion/tokens_p{percent}"] == np.percentile(
                lengths.flatten(), percent
            )
        assert result["completion/tokens_max"] == lengths.max()


def test_a_reward_that_nobody_got_has_neither_mean_nor_spread() -> None:
    unknown: list[float | None] = [None] * 4
    result = metrics_of(facts(0, [1, 2, 3, 4], {"math": [1.0, 0.0, 0.0, 0.0], "format": unknown}))
    assert (result["reward/format/mean"], result["reward/format/std"]) == (None, None)
    once = metrics_of(facts(0, [1, 2, 3, 4], {"math": [None, None, 0.5, None]}))
    assert (once["reward/math/mean"], once["reward/math/std"]) == (0.5, 0.0)  # as reward/std has it
