"""What reward functions logged by `log_metric` (trl.py), brought together over calls and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_spmd.rewards.trl import first_names

# By reward and metric: the sums of the calls, and how many values they are of.
Logged = dict[str, dict[str, tuple[list[float], int]]]


def logged_in(notes: Iterable[Mapping[str, Any]]) -> Logged:
    """What notes of ScoredRollouts say of `log_metric`."""
    found: Logged = {}
    for note in notes:
        of_call = {r: {n: ([pair[0]], pair[1]) for n, pair in m.items()} for r, m in note.get("logged", {}).items()}
        merge_logged(found, of_call)
    return found


def merge_logged(into: Logged, more: Logged) -> None:
    for reward, metrics in more.items():
        mine = into.setdefault(reward, {})
        for name, (sums, number) in metrics.items():
            known, count = mine.get(name, ([], 0))
            known.extend(sums)
            mine[name] = known, count + number


def mean_metrics(logged: Logged) -> dict[str, float | None]:
    """The mean of what was logged under each name, whatever the order of the calls."""
    return {
        f"reward/{reward}/{name}": math.fsum(sums) / number
        for reward, metrics in sorted(logged.items())
        for name, (sums, number) in first_names(metrics).items()
    }
