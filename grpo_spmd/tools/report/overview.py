"""What the page shows of a run beside its rollouts: verdict, curves, timeline, launches, config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import FROM_RECIPE, build_config, recipe_of
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.report.steps import round_digits, spread_indices
from grpo_spmd.tools.report.verdict import Metrics, list_checks, list_findings

# Points of a curve; numbers in all curves of a page.
_MAX_POINTS = 4_000
_MAX_NUMBERS = 1_500_000
_NUM_DIGITS = 6
# Steps with a timeline, and spans of all timelines of a page.
_NUM_TIMELINES = 200
_NUM_NEWEST_TIMELINES = 20
_MAX_SPANS = 60_000
# A launch's JSON: its number in a page, items of a list, characters of a text, depth.
_MAX_LAUNCHES = 50
_MAX_ITEMS = 100
_MAX_CHARS = 1_000
_MAX_DEPTH = 4
_MAX_KEYS = 2_000
_MAX_VALUE_CHARS = 2_000
_RUN_KEYS = ("run_dir",)  # that differ in every run
_PLACEHOLDERS = ("-run", "-model", "-data", "exact")
_HOST_KEYS = ("world_size", "nodes", "hosts", "devices")


def overview(run: RecordedRun, num_runs: int = 1) -> dict[str, Any]:
    """Returns the JSON of one of `num_runs` runs, without "prompts" and "rollouts"."""
    num_metrics = len({key for line in run.steps for key in line})
    max_points = min(_MAX_POINTS, _MAX_NUMBERS // num_runs // max(1, num_metrics))
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
        **_curves(run.steps, max_points),
        **({"thinned": len(run.steps)} if len(run.steps) > max(2, max_points) else {}),
        "evaluations": _curves(run.evaluations, max_points),
        "timeline": _timeline(run, _MAX_SPANS // num_runs),
        "config": config_rows(run),
        "launches": _bounded_json(run.launches[-_MAX_LAUNCHES:]),
        "versions": _versions(run),
    }


def _curves(lines: Metrics, max_points: int) -> dict[str, Any]:
    """Returns steps and metrics as columns, thinned evenly if there are too many points."""
    indices = spread_indices(len(lines), max(2, max_points))
    chosen = [lines[index] for index in indices]
    keys = dict.fromkeys(key for line in chosen for key in line)
    keys.pop("step", None)
    return {
        "steps": [line["step"] for line in chosen],
        "metrics": {
            key: [round_digits(line.get(key), _NUM_DIGITS) for line in chosen] for key in keys
        },
    }


def _timeline(run: RecordedRun, max_spans: int) -> dict[str, Any]:
    """Returns the timelines of the newest steps and of others at even distances."""
    steps = [line["step"] for line in run.steps]
    wanted = {steps[index] for index in spread_indices(len(steps), _NUM_TIMELINES)}
    wanted.update(steps[-_NUM_NEWEST_TIMELINES:])
    # The file may be somebody's link, or no timeline.
    with suppress(ConfigError, OSError):
        timelines = run.files.timeline(wanted)
        num_spans = sum(len(spans) for timeline in timelines.values() for spans in timeline.spans)
        # With very many ranks fewer steps fit, the newest one among them.
        stride = max(1, -(-num_spans // max_spans))
        shown_steps = sorted(timelines)[::-1][::stride][::-1]
        return {"steps": shown_steps, "spans": [vars(timelines[step]) for step in shown_steps]}
    return {"steps": [], "spans": []}


def _bounded_json(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Returns JSON that somebody else may have written in a size that a page can hold."""
    if isinstance(value, dict | list) and depth == 0:
        return "..."
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {name[:_MAX_CHARS]: _bounded_json(inner, depth - 1) for name, inner in items}
    if isinstance(value, list):
        return [_bounded_json(inner, depth - 1) for inner in value[:_MAX_ITEMS]]
    return value[:_MAX_CHARS] if isinstance(value, str) else value


def config_rows(run: RecordedRun) -> list[list[Any]]:
    """Returns [key, value, source] of each key.

    The source is "default", "command line" (of the newest launch), "from algorithm: NAME", or
    "set" (by a file or for the machine). config.yaml is resolved and does not tell it.
    """
    rows = list(run.config.items())[:_MAX_KEYS]
    return [[key, _config_value(value), _config_source(run, key, value)] for key, value in rows]


def config_differences(runs: Sequence[RecordedRun]) -> list[list[Any]]:
    """Returns [key, value in each run] where runs differ; null for a key that a run lacks."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _RUN_KEYS)
    rows = [[key, *(_config_value(run.config.get(key)) for run in runs)] for key in keys]
    different = [row for row in rows if len(set(map(repr, row[1:]))) > 1]
    return different[:_MAX_KEYS]


def _versions(run: RecordedRun) -> dict[str, Any]:
    """Returns the newest launch's versions, commits and machines; {} if they are not known."""
    launch = run.launch
    recorded = launch.get("versions")
    repositories = launch.get("git")
    versions: dict[str, Any] = {}
    for name, version in recorded.items() if isinstance(recorded, dict) else ():
        versions[name] = _config_value(version)
    for name, state in repositories.items() if isinstance(repositories, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("commit"), str):
            suffix = ", changed" if state.get("dirty") else ""
            versions[f"commit of {name}"] = state["commit"][:80] + suffix
    versions.update({key: _config_value(launch[key]) for key in _HOST_KEYS if key in launch})
    return versions


def _config_source(run: RecordedRun, key: str, value: Any) -> str:
    # An override wins over file and recipe, so it is looked at first.
    command = run.launch.get("command")
    for argument in command if isinstance(command, list) else ():
        name, equals, _ = str(argument).partition("=")
        if equals and (key == name or key.startswith(f"{name}.")):
            return "command line"
    recipe: Mapping[str, Any] = {}
    with suppress(ConfigError):  # a recipe of another version
        recipe = recipe_of(run.config)
    if key in recipe and repr(recipe[key]) == repr(value):
        return f"{FROM_RECIPE} {run.config['algorithm']}"
    defaults = _default_values()
    # rewards.3.weight has the default of rewards.0.weight.
    if key.startswith("rewards."):
        general = ".".join("0" if word.isdecimal() else word for word in key.split("."))
        key = key if key in defaults else general
    is_default = key in defaults and repr(defaults[key]) == repr(value)
    return "default" if is_default else "set"


@cache
def _default_values() -> Mapping[str, Any]:
    """Returns all defaults, flat, without the keys that a config must set."""
    run_dir, model, data, reward = _PLACEHOLDERS
    needed = {
        "run_dir": run_dir,
        "model": {"path": model},
        "data": {"train": data},
        "rewards": [{"name": reward}],
    }
    values = flatten_config(build_config(needed))
    return {key: value for key, value in values.items() if value not in _PLACEHOLDERS}


def _config_value(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_MAX_VALUE_CHARS]
