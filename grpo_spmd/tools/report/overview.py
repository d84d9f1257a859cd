"""Makes what the page shows of a run beside its rollouts.

This is the verdict, curves, timeline, launches and config, and the run's prompts by row of the data
set: which got better, which were never solved.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np

from grpo_spmd.config.describe import flat, flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import FROM_RECIPE, build_config, recipe_of
from grpo_spmd.diagnosis.curves import Metrics
from grpo_spmd.diagnosis.findings import list_checks, list_findings
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.metrics_file import LinePosition
from grpo_spmd.observe.rollout_record import bounded_values, is_shallow
from grpo_spmd.observe.run_folder import LineStore
from grpo_spmd.tools.report.steps import (
    StepResult,
    parse_line,
    prompt_text,
    round_digits,
    shorten,
    spread_indices,
)

# Limits: points of a curve, and numbers in all curves of a page.
_MAX_POINTS = 4_000
_MAX_NUMBERS = 1_500_000
_NUM_DIGITS = 6
# Limits: steps with a timeline, and spans in all timelines of a page.
_NUM_TIMELINES = 200
_NUM_NEWEST_TIMELINES = 20
_MAX_SPANS = 60_000
_MAX_LAUNCHES = 50
_MAX_KEYS = 2_000
_MAX_VALUE_CHARS = 2_000
_RUN_KEYS = ("run_dir",)  # keys that differ in every run, so that a comparison leaves them out
# The keys that have no default, with any valid values, to build a config with all defaults.
_NEEDED = {
    "run_dir": "-run",
    "model": {"path": "-model"},
    "data": {"train": "-data"},
    "rewards": [{"name": "exact"}],
}
# Entries of launches.jsonl that describe the machines of a run.
_HOST_KEYS = ("world_size", "nodes", "hosts", "devices")


_MAX_PROMPTS = 400
_MAX_PROMPTS_PER_KIND = 80
_MAX_PROMPT_POINTS = 100
_MAX_PROMPT_CHARS = 400
_MAX_COLUMNS = 8
_MAX_COLUMN_CHARS = 80
# Fractions of the distance between the lowest and the highest reward; see PromptRow.kind.
_NEAR = 0.05
_MOVED = 0.25


def overview(run: RecordedRun, num_runs: int = 1) -> dict[str, Any]:
    """Returns a run's part of the page's chunk "main", without "prompts" and "rollouts".

    The page shows `num_runs` runs, which share the limits on curves and timelines.
    """
    num_metrics = len({key for line in run.steps for key in line})
    max_points = min(_MAX_POINTS, _MAX_NUMBERS // num_runs // max(1, num_metrics))
    return {
        "name": run.name,
        "subject": run.subject,
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
        "launches": [
            bounded_values(launch) for launch in run.launches[-_MAX_LAUNCHES:] if is_shallow(launch)
        ],
        "versions": _versions(run),
    }


def _curves(lines: Metrics, max_points: int) -> dict[str, Any]:
    """Returns the metrics of `lines` by columns: the steps, and a list of values for each metric.

    Of more than `max_points` lines some are taken, spread evenly."""
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
    """Returns timelines (what each rank did when) of some steps of a run.

    They are those of the newest steps, and of others that are spread evenly over the run, with at
    most about `max_spans` spans together."""
    steps = [line["step"] for line in run.steps]
    wanted = {steps[index] for index in spread_indices(len(steps), _NUM_TIMELINES)}
    wanted.update(steps[-_NUM_NEWEST_TIMELINES:])
    # The file may be missing, a link, or no timeline.
    with suppress(ConfigError, OSError):
        timelines = run.files.timeline(wanted)
        num_spans = sum(len(spans) for timeline in timelines.values() for spans in timeline.spans)
        # With very many ranks fewer steps fit: every n-th, counted back from the newest.
        stride = max(1, -(-num_spans // max_spans))
        shown_steps = sorted(timelines)[::-1][::stride][::-1]
        return {"steps": shown_steps, "spans": [vars(timelines[step]) for step in shown_steps]}
    return {"steps": [], "spans": []}


def config_rows(run: RecordedRun) -> list[list[Any]]:
    """Returns [key, value, source] for each key of the config.

    The source is "default", "command line" (of the newest launch), "from algorithm: NAME", or
    "set" (by a file or for the machine). It is inferred, since config.yaml has the resolved values
    without their sources.
    """
    command = run.launch.get("command")
    words = map(str, command if isinstance(command, list) else ())
    overridden = [word.partition("=")[0] for word in words if "=" in word]
    recipe: Mapping[str, Any] = {}
    with suppress(ConfigError):  # this version may not have the algorithm
        recipe = recipe_of(run.config)
    defaults = _default_values()
    rows = []
    for key, value in list(run.config.items())[:_MAX_KEYS]:
        # All entries of a list have the same defaults, which are known for entry 0:
        # rewards.3.weight has that of rewards.0.weight.
        general = re.sub(r"\.\d+(?=\.|$)", ".0", key)
        source = "set"
        # Checked first, since an override replaces values of the file and the recipe.
        if any(key == name or key.startswith(f"{name}.") for name in overridden):
            source = "command line"
        elif repr(recipe.get(key)) == repr(value) and key in recipe:
            source = f"{FROM_RECIPE} {run.config['algorithm']}"
        elif repr(defaults.get(general)) == repr(value) and general in defaults:
            source = "default"
        rows.append([key, _config_value(value), source])
    return rows


def config_differences(runs: Sequence[RecordedRun]) -> list[list[Any]]:
    """Returns rows [key, value in each run] for the keys whose values differ between the runs.

    The value is None where a run lacks the key."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _RUN_KEYS)
    rows = [[key, *(_config_value(run.config.get(key)) for run in runs)] for key in keys]
    different = [row for row in rows if len(set(map(repr, row[1:]))) > 1]
    return different[:_MAX_KEYS]


def _versions(run: RecordedRun) -> dict[str, Any]:
    """Returns the versions, commits and machines of the newest launch, as far as it has them."""
    launch = run.launch
    recorded = launch.get("versions")
    versions = dict(recorded) if isinstance(recorded, dict) else {}
    repositories = launch.get("git")
    for name, state in repositories.items() if isinstance(repositories, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("commit"), str):
            suffix = ", changed" if state.get("dirty") else ""
            versions[f"commit of {name}"] = state["commit"][:80] + suffix
    versions |= {key: launch[key] for key in _HOST_KEYS if key in launch}
    return {name: _config_value(value) for name, value in versions.items()}


@cache
def _default_values() -> Mapping[str, Any]:
    """Returns the default values of a config by dotted key, without the keys that it must set."""
    values = flatten_config(build_config(_NEEDED))
    return {key: value for key, value in values.items() if key not in flat(_NEEDED)}


def _config_value(value: Any, max_chars: int = _MAX_VALUE_CHARS) -> Any:
    """Returns a number, a bool or None as it is; anything else as text of bounded length."""
    if value is None or type(value) in (bool, int, float):
        return value
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str), max_chars)[
        0
    ]


@dataclass
class PromptRow:
    """The history of one row of the data set: steps and mean rewards of its groups.

    A group is the rollouts of the row's prompt at one step. Groups are in ascending order of steps;
    those without a reward are left out.
    """

    row: int
    newest_line: LinePosition  # of a rollout of the newest group
    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """The mean of the groups' mean rewards."""
        return sum(self.means) / len(self.means)

    @property
    def change(self) -> float:
        """The mean reward of the last third of the groups minus that of the first third."""
        third = max(1, len(self.means) // 3)
        return (sum(self.means[-third:]) - sum(self.means[:third])) / third

    def kind(self, low: float, high: float) -> str:
        """Returns how the prompt fared, one of the names in _KIND_ORDERS.

        `low` and `high` are the run's lowest and highest reward. `never`: every mean is within 5 %
        of their distance above `low`. `always`: every mean is within 5 % below `high`. `better`,
        `worse`: the means have changed by 25 % or more (see `change`). `mixed`: all others.
        """
        distance = high - low
        if max(self.means) <= low + _NEAR * distance:
            return "never"
        if min(self.means) >= high - _NEAR * distance:
            return "always"
        if abs(self.change) >= _MOVED * distance:
            return "better" if self.change > 0 else "worse"
        return "mixed"


# The kinds in the order in which prompts are listed, each with a key that sorts its prompts: those
# never solved by the number of attempts, those that changed by how much, the mixed ones from the
# lowest mean on, those always solved by row.
_KIND_ORDERS: dict[str, Callable[[PromptRow], float]] = {
    "never": lambda row: -len(row.means),
    "worse": lambda row: row.change,
    "better": lambda row: -row.change,
    "mixed": lambda row: row.mean,
    "always": lambda row: row.row,
}


def summarize_prompts(results: Sequence[StepResult], deadline: float) -> dict[str, Any]:
    """Returns "prompts", "prompts_total" and "prompt_kinds" of a run, from all steps read.

    The texts of prompts that are not read by `deadline` (on the monotonic clock) are left out.
    """
    rows: dict[int, PromptRow] = {}
    # Sorted, since results are in the order in which processes have finished.
    for result in sorted(results, key=lambda result: result.step):
        for group in result.groups:
            if group.mean is not None:
                row = rows.setdefault(group.row, PromptRow(group.row, group.line))
                row.steps.append(result.step)
                row.means.append(group.mean)
                row.newest_line = group.line
    ranges = [result.rewards for result in results if result.rewards is not None]
    # The median over the steps, so that a single huge penalty does not set the scale.
    low, high = np.median(ranges or [(0.0, 0.0)], axis=0).tolist()
    counts = {}
    # (True if it is beyond the first ones of its kind, kind, row)
    ranked = []
    for kind, order in _KIND_ORDERS.items():
        members = [row for _, row in sorted(rows.items()) if row.kind(low, high) == kind]
        members.sort(key=order)
        counts[kind] = len(members)
        # The first prompts of each kind come before all others, so that no kind takes all places.
        ranked += [(rank >= _MAX_PROMPTS_PER_KIND, kind, row) for rank, row in enumerate(members)]
    chosen = sorted(ranked, key=lambda entry: entry[0])[:_MAX_PROMPTS]
    texts = _read_texts([row for *_, row in chosen], deadline)
    prompts = []
    for _, kind, row in chosen:
        prompt, columns = texts.get(row.row, ("", {}))
        indices = spread_indices(len(row.steps), _MAX_PROMPT_POINTS)
        prompts.append(
            {
                "row": row.row,
                "prompt": prompt,
                "columns": columns,
                "steps": [row.steps[index] for index in indices],
                "means": [round_digits(row.means[index], 4) for index in indices],
                "kind": kind,
            }
        )
    return {"prompts": prompts, "prompts_total": len(rows), "prompt_kinds": counts}


def _read_texts(
    rows: Sequence[PromptRow], deadline: float
) -> dict[int, tuple[str, dict[str, Any]]]:
    """Returns {row: (prompt, columns)}, without rows whose line is broken, or read too late."""
    texts = {}
    store = LineStore()
    # Read in the order of the files, since a compressed file is unpacked from its beginning.
    path = None
    for position, row in sorted((row.newest_line, row.row) for row in rows):
        # The deadline is checked before each file but the first.
        if position.path != path and path is not None and time.monotonic() > deadline:
            break
        path = position.path
        record = parse_line(store.read(position))
        if record is not None:
            columns = list(bounded_values(record.columns).items())[:_MAX_COLUMNS]
            prompt = shorten(prompt_text(record.prompt), _MAX_PROMPT_CHARS)[0]
            texts[row] = (
                prompt,
                {name: _config_value(value, _MAX_COLUMN_CHARS) for name, value in columns},
            )
    store.close()
    return texts
