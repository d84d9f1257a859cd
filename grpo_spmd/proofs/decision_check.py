"""Rank 0's side of the batch check: its decision beside what the ranks have found by themselves. Plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_spmd.records import StepDecision


def misplaced(of_ranks: list[list[Any]], of_all: StepDecision | None, wanted: float) -> list[str]:
    """On rank 0: what it decided, the ranks that sampled say, and those that train."""
    assert of_all is not None
    sampled, trained, dropped = ([each for part in of_ranks for each in part[which]] for which in (0, 1, 2))
    found, used = list[str](), of_all.positions.tolist()
    for position in dropped:
        if not (len(used) == wanted and position > max(used)):
            found.append(f"the group at position {position} is not trained on")
    for i, _, reward in sampled:
        if not same(there := float(of_all.rewards[i]), reward):
            found.append(f"rollout {i} has the reward {there:.6g}, here {reward:.6g}")
    if sorted(i for i, _, _ in sampled) != list(range(len(of_all.rewards))):
        found.append("not each rollout of the step was sampled once")
    planned = Counter(i for ranks in of_all.plan for rows in ranks for row in rows for i in row)
    if planned != Counter(range(len(of_all.rewards))):
        found.append("the plan does not have each rollout once")
    twice = [i for i, count in Counter(i for i, _ in trained).items() if count > 1]
    known: Mapping[int, int] = dict(trained)
    other = [i for i, name, _ in sampled if known.get(i, name) != name]
    missing = [i for i, _, _ in sampled if i not in known]
    for what, ids in (("twice", twice), ("with other tokens, logprobs or advantages", other), ("not", missing)):
        if ids:
            found.append(f"rollouts {sorted(ids)[:5]} are trained on {what}")
    return found


def moments_of_all(of_ranks: Sequence[Sequence[float]]) -> tuple[float, float]:
    return moments([value for values in of_ranks for value in values])


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased deviation; 0 where there are too few."""
    mean = math.fsum(values) / max(len(values), 1)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
