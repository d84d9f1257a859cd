"""What a run was started with: its config with where each value is from, its versions, and what sets runs apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from grpo_spmd.config.algorithm import FROM_RECIPE, recipe_of
from grpo_spmd.config.dump import flat_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import config_of
from grpo_spmd.report.run import RecordedRun

_MOST_KEYS, _LONGEST = 2_000, 2_000  # characters of a value
_OWN = ("run_dir",)  # that are another one in each run


def config_rows(run: RecordedRun) -> list[list[Any]]:
    """[key, value, source] of each key: "default", "command line" (of the newest launch), "from algorithm: NAME", or
    "set", by a file or for the machine. config.yaml is resolved, and does not say it."""
    return [[key, _shown(value), _source(run, key, value)] for key, value in [*run.config.items()][:_MOST_KEYS]]


def config_differences(runs: Sequence[RecordedRun]) -> list[list[Any]]:
    """[key, value in each run]; a key that a run does not have is null there."""
    if len(runs) < 2:
        return []
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OWN)
    rows = [[key, *(_shown(run.config.get(key)) for run in runs)] for key in keys]
    return [row for row in rows if any(repr(value) != repr(row[1]) for value in row[2:])][:_MOST_KEYS]


def versions_of(run: RecordedRun) -> dict[str, Any]:
    """Of the newest launch, with what it ran on and which commit; {} where nothing tells."""
    launch = run.launches[-1] if run.launches else {}
    versions = launch.get("versions")
    found = {str(name): _shown(value) for name, value in versions.items()} if isinstance(versions, dict) else {}
    git = launch.get("git")
    for name, state in git.items() if isinstance(git, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("commit"), str):
            found[f"commit of {name}"] = state["commit"][:80] + (", changed" if state.get("dirty") else "")
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
    return "default" if is_known and repr(defaults.get(key, defaults.get(general))) == repr(value) else "set"


def _recipe(run: RecordedRun) -> Mapping[str, Any]:
    try:
        return recipe_of(run.config)
    except ConfigError:  # of another version
        return {}


@cache
def _defaults() -> Mapping[str, Any]:
    """Flat, without the keys that a config must set."""
    needed = {"run_dir": "-r", "model": {"path": "-m"}, "data": {"train": "-d"}, "rewards": [{"name": "exact"}]}
    found = flat_config(config_of(needed))
    return {key: value for key, value in found.items() if value not in ("-r", "-m", "-d", "exact")}


def _shown(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_LONGEST]
