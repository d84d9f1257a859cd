"""What the page shows of a run but for its rollouts: verdict, curves, timeline, config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.timeline import read_timeline
from grpo_spmd.report.run import RecordedRun
from grpo_spmd.report.settings import config_rows, versions_of
from grpo_spmd.report.verdict import checks, findings

_MOST_POINTS, _MOST_NUMBERS = 4_000, 1_500_000  # of a curve; of all curves of a page
_DIGITS = 6
_TIMELINES, _NEWEST_TIMELINES = 200, 20  # steps
_MOST_SPANS = 60_000  # of all timelines of a page
_MOST_LAUNCHES, _MOST_ITEMS, _LONGEST, _DEEPEST = 50, 100, 1_000, 4  # items of a list, characters, of a launch


def overview(run: RecordedRun, num_runs: int = 1) -> dict[str, Any]:
    """The part of one of `num_runs` in the chunk "main", without "prompts" and "rollouts"."""
    most = min(_MOST_POINTS, _MOST_NUMBERS // num_runs // max(1, len({key for line in run.steps for key in line})))
    steps, thinned = _thinned(run.steps, max(2, most))
    return {
        "name": run.name,
        "folder": str(run.folder.absolute()),
        "state": run.state,
        "why": run.why,
        "num_steps": run.num_steps,
        "last_step": run.last_step,
        "reports": run.reports,
        "findings": [asdict(finding) for finding in findings(run)],
        "checks": [asdict(check) for check in checks(run)],
        "checkpoints": run.checkpoints,
        **_curves(steps),
        **({"thinned": thinned} if thinned else {}),
        "evaluations": _curves(_thinned(run.evaluations, max(2, most))[0]),
        "timeline": _timeline(run, _MOST_SPANS // num_runs),
        "config": config_rows(run),
        "launches": _bounded(run.launches[-_MOST_LAUNCHES:]),
        "versions": versions_of(run),
    }


def _thinned(lines: Sequence[Mapping[str, Any]], most: int) -> tuple[Sequence[Mapping[str, Any]], int]:
    """At most `most` of them, evenly, with the first and the last; how many there were, or 0: these are all."""
    if len(lines) <= most:
        return lines, 0
    places = np.unique(np.linspace(0, len(lines) - 1, most).round().astype(int)).tolist()
    return [lines[place] for place in places], len(lines)


def _curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for line in lines for key in line)
    keys.pop("step", None)
    metrics = {key: [_rounded(line.get(key)) for line in lines] for key in keys}
    return {"steps": [line["step"] for line in lines], "metrics": metrics}


def _rounded(value: float | int | None) -> float | int | None:
    if value is None:
        return None
    if value == int(value) and abs(value) < 10**_DIGITS:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def _timeline(run: RecordedRun, most_spans: int) -> dict[str, Any]:
    """Of steps at even distances and the newest; fewer where a step has very many ranks."""
    numbers = [line["step"] for line in run.steps]
    places = np.linspace(0, max(0, len(numbers) - 1), min(len(numbers), _TIMELINES)).round().astype(int).tolist()
    wanted = {numbers[place] for place in places} | set(numbers[-_NEWEST_TIMELINES:])
    with suppress(ConfigError, OSError):  # it is somebody's link, say
        found = read_timeline(run.folder, wanted)
        steps = sorted(found)
        spans = sum(len(of_rank) for timeline in found.values() for of_rank in timeline.spans)
        stride = max(1, -(-spans // most_spans))
        steps = steps[::-1][::stride][::-1]
        return {"steps": steps, "spans": [vars(found[step]) for step in steps]}
    return {"steps": [], "spans": []}


def _bounded(value: Any, depth: int = _DEEPEST) -> Any:
    """JSON that somebody else may have written, of a size that a page can hold."""
    if isinstance(value, dict | list) and depth == 0:
        return "..."
    if isinstance(value, dict):
        return {name[:_LONGEST]: _bounded(inner, depth - 1) for name, inner in [*value.items()][:_MOST_ITEMS]}
    if isinstance(value, list):
        return [_bounded(inner, depth - 1) for inner in value[:_MOST_ITEMS]]
    return value[:_LONGEST] if isinstance(value, str) else value
