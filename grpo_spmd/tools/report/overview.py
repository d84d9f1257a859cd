"""What the page shows of a run but for its rollouts: verdict, curves, timeline, config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import FROM_RECIPE, build_config, recipe_of
from grpo_spmd.observe.timeline import read_timeline
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.report.verdict import list_checks, list_findings

_MOST_POINTS, _MOST_NUMBERS = 4_000, 1_500_000  # of a curve; of all curves of a page
_DIGITS = 6
_TIMELINES, _NEWEST_TIMELINES = 200, 20  # steps
_MOST_SPANS = 60_000  # of all timelines of a page
_MOST_LAUNCHES, _MOST_ITEMS, _LONGEST, _DEEPEST = (
    50,
    100,
    1_000,
    4,
)  # items of a list, characters, of a launch


def overview(run: RecordedRun, num_runs: int = 1) -> dict[str, Any]:
    """The part of one of `num_runs` in the chunk "main", without "prompts" and "rollouts"."""
    most = min(
        _MOST_POINTS,
        _MOST_NUMBERS // num_runs // max(1, len({key for line in run.steps for key in line})),
    )
    steps, thinned = _thinned(run.steps, max(2, most))
    return {
        "name": run.name,
        "folder": str(run.folder.absolute()),
        "state": run.state,
        "why": run.why,
        "num_steps": run.num_steps,
        "last_step": run.last_step,
        "reports": run.reports,
        "findings": [asdict(finding) for finding in list_findings(run)],
        "checks": [asdict(check) for check in list_checks(run)],
        "checkpoints": run.checkpoints,
        **_curves(steps),
        **({"thinned": thinned} if thinned else {}),
        "evaluations": _curves(_thinned(run.evaluations, max(2, most))[0]),
        "timeline": _timeline(run, _MOST_SPANS // num_runs),
        "config": config_rows(run),
        "launches": _bounded(run.launches[-_MOST_LAUNCHES:]),
        "versions": versions_of(run),
    }


def _thinned(
    lines: Sequence[Mapping[str, Any]], most: int
) -> tuple[Sequence[Mapping[str, Any]], int]:
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
    places = (
        np.linspace(0, max(0, len(numbers) - 1), min(len(numbers), _TIMELINES))
        .round()
        .astype(int)
        .tolist()
    )
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
        return {
            name[:_LONGEST]: _bounded(inner, depth - 1)
            for name, inner in [*value.items()][:_MOST_ITEMS]
        }
    if isinstance(value, list):
        return [_bounded(inner, depth - 1) for inner in value[:_MOST_ITEMS]]
    return value[:_LONGEST] if isinstance(value, str) else value


# What a run was started with: its config with where each value is from, its versions, and what sets runs apart.


_MOST_KEYS, _LONGEST_settings = 2_000, 2_000  # characters of a value
_OWN = ("run_dir",)  # that are another one in each run


def config_rows(run: RecordedRun) -> list[list[Any]]:
    """[key, value, source] of each key: "default", "command line" (of the newest launch), "from algorithm: NAME", or
    "set", by a file or for the machine. config.yaml is resolved, and does not say it."""
    return [
        [key, _shown(value), _source(run, key, value)]
        for key, value in [*run.config.items()][:_MOST_KEYS]
    ]


def config_differences(runs: Sequence[RecordedRun]) -> list[list[Any]]:
    """[key, value in each run]; a key that a run does not have is null there."""
    if len(runs) < 2:
        return []
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OWN)
    rows = [[key, *(_shown(run.config.get(key)) for run in runs)] for key in keys]
    return [row for row in rows if any(repr(value) != repr(row[1]) for value in row[2:])][
        :_MOST_KEYS
    ]


def versions_of(run: RecordedRun) -> dict[str, Any]:
    """Of the newest launch, with what it ran on and which commit; {} where nothing tells."""
    launch = run.launches[-1] if run.launches else {}
    versions = launch.get("versions")
    found = (
        {str(name): _shown(value) for name, value in versions.items()}
        if isinstance(versions, dict)
        else {}
    )
    git = launch.get("git")
    for name, state in git.items() if isinstance(git, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("commit"), str):
            found[f"commit of {name}"] = state["commit"][:80] + (
                ", changed" if state.get("dirty") else ""
            )
    for name in ("world_size", "nodes", "hosts", "devices"):
        if name in launch:
            found[name] = _shown(launch[name])
    return found


def _source(run: RecordedRun, key: str, value: Any) -> str:
    command = run.launches[-1].get("command") if run.launches else None
    for argument in reversed(command) if isinstance(command, list) else ():
        name, is_given, _ = str(argument).partition("=")
        if is_given and (key == name or key.startswith(f"{name}.")):
            return "command line"
    recipe = _recipe(run)
    if key in recipe and repr(recipe[key]) == repr(value):
        return f"{FROM_RECIPE} {run.config['algorithm']}"
    defaults = _defaults()
    general = ".".join("0" if part.isdecimal() else part for part in key.split("."))
    is_known = key in defaults or (key.startswith("rewards.") and general in defaults)
    return (
        "default"
        if is_known and repr(defaults.get(key, defaults.get(general))) == repr(value)
        else "set"
    )


def _recipe(run: RecordedRun) -> Mapping[str, Any]:
    try:
        return recipe_of(run.config)
    except ConfigError:  # of another version
        return {}


@cache
def _defaults() -> Mapping[str, Any]:
    """Flat, without the keys that a config must set."""
    needed = {
        "run_dir": "-r",
        "model": {"path": "-m"},
        "data": {"train": "-d"},
        "rewards": [{"name": "exact"}],
    }
    found = flatten_config(build_config(needed))
    return {key: value for key, value in found.items() if value not in ("-r", "-m", "-d", "exact")}


def _shown(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_LONGEST_settings]
