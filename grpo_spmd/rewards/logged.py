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
    """The mean of what was logged under each name, whatever the order of the calls; and `call_metrics`."""
    found: dict[str, float | None] = {}
    for reward, metrics in sorted(logged.items()):
        own = {name: value for name, value in metrics.items() if not name.startswith(".")}
        found |= {f"reward/{reward}/{n}": math.fsum(sums) / number for n, (sums, number) in first_names(own).items()}
        if len(own) < len(metrics):
            found |= {f"reward/{reward}/{name}": value for name, value in call_metrics(metrics).items()}
    return found


def call_metrics(metrics: Mapping[str, tuple[list[float], int]]) -> dict[str, float | None]:
    """Of what pool/call_limits.py measured of calls: percentiles of their seconds, by the straight line; how many
    requests were made again; the share of requests that each status but 2xx answered."""
    seconds, (made, num_calls) = sorted(metrics[".s"][0]), metrics[".requests"]
    found: dict[str, float | None] = {}
    for percent in (50, 95):
        place = (len(seconds) - 1) * percent / 100
        low, high = seconds[math.floor(place)], seconds[math.ceil(place)]
        found[f"call_s_p{percent}"] = low + (high - low) * (place % 1)
    found["retries"] = math.fsum(made) - num_calls
    statuses = {name[1:]: math.fsum(sums) for name, (sums, _) in sorted(metrics.items()) if name.startswith(".http_")}
    return found | {f"{name}_frac": number / math.fsum(made) for name, number in statuses.items()}
