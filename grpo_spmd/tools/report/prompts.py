"""The prompts of a run by row of the data set: which got better, which are never solved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_spmd.observe.metrics_file import LinePosition
from grpo_spmd.observe.rollout_record import bounded_values
from grpo_spmd.observe.run_folder import LineStore
from grpo_spmd.tools.report.steps import (
    StepResult,
    parse_line,
    prompt_text,
    round_digits,
    shorten,
    spread_indices,
)

KINDS = ("never", "always", "better", "worse", "mixed")
# Kinds in the order in which prompts are chosen for the page.
_CHOICE_ORDER = ("never", "worse", "better", "mixed", "always")
_MAX_PROMPTS = 400
_MAX_PROMPTS_PER_KIND = 80
_MAX_POINTS = 100
_MAX_PROMPT_CHARS = 400
_MAX_COLUMNS = 8
_MAX_COLUMN_CHARS = 80
# Fractions of the distance between the lowest and the highest reward.
_NEAR = 0.05
_MOVED = 0.25


@dataclass
class PromptRow:
    """The groups of one row of the data set whose mean reward is known, by ascending step."""

    row: int
    newest_line: LinePosition
    steps: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.means) / len(self.means)

    @property
    def change(self) -> float:
        """The mean of the last third of the groups minus that of the first; 0 for one group."""
        third = max(1, len(self.means) // 3)
        return (sum(self.means[-third:]) - sum(self.means[:third])) / third

    def kind(self, low: float, high: float) -> str:
        """Returns one of KINDS; `low` and `high` are the run's lowest and highest reward.

        `never`: no mean is above the lowest reward, up to 5 % of the distance. `always`: no mean
        is below the highest, likewise. `better`, `worse`: the last third is 25 % of the distance
        above or below the first third. `mixed`: all others.
        """
        distance = high - low
        if max(self.means) <= low + _NEAR * distance:
            return "never"
        if min(self.means) >= high - _NEAR * distance:
            return "always"
        if abs(self.change) >= _MOVED * distance:
            return "better" if self.change > 0 else "worse"
        return "mixed"


def summarize_prompts(results: Sequence[StepResult], deadline: float) -> dict[str, Any]:
    """Returns "prompts", "prompts_total" and "prompt_kinds" of the page, from all read steps.

    After `deadline` on the monotonic clock, texts are left out.
    """
    rows: dict[int, PromptRow] = {}
    # Results come in the order in which processes finished.
    for result in sorted(results, key=lambda result: result.step):
        for group in result.groups:
            if group.mean is not None:
                row = rows.setdefault(group.row, PromptRow(group.row, group.line))
                row.steps.append(result.step)
                row.means.append(group.mean)
                row.newest_line = group.line
    ranges = [result.rewards for result in results if result.rewards is not None]
    # Medians over the steps: one endless penalty must not be the measure for all others.
    low, high = np.median(ranges or [(0.0, 0.0)], axis=0).tolist()
    rows_by_kind: dict[str, list[PromptRow]] = {kind: [] for kind in KINDS}
    for _, row in sorted(rows.items()):
        rows_by_kind[row.kind(low, high)].append(row)
    counts = {kind: len(members) for kind, members in rows_by_kind.items()}
    chosen = _choose_rows(rows_by_kind)
    texts = _read_texts([row for _, row in chosen], deadline)
    prompts = []
    for kind, row in chosen:
        prompt, columns = texts.get(row.row, ("", {}))
        indices = spread_indices(len(row.steps), _MAX_POINTS)
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


def _choose_rows(rows_by_kind: dict[str, list[PromptRow]]) -> list[tuple[str, PromptRow]]:
    """Returns (kind, row) of some rows of each kind, then of what is left of these.

    First come the unsolved ones that were tried most often, then those that changed most, then
    the worst of the others, then solved ones.
    """
    rows_by_kind["never"].sort(key=lambda row: -len(row.means))
    rows_by_kind["worse"].sort(key=lambda row: row.change)
    rows_by_kind["better"].sort(key=lambda row: -row.change)
    rows_by_kind["mixed"].sort(key=lambda row: row.mean)
    chosen: list[tuple[str, PromptRow]] = []
    rest: list[tuple[str, PromptRow]] = []
    for kind in _CHOICE_ORDER:
        rows = [(kind, row) for row in rows_by_kind[kind]]
        chosen += rows[:_MAX_PROMPTS_PER_KIND]
        rest += rows[_MAX_PROMPTS_PER_KIND:]
    return [*chosen, *rest][:_MAX_PROMPTS]


def _read_texts(
    rows: Sequence[PromptRow], deadline: float
) -> dict[int, tuple[str, dict[str, Any]]]:
    """Returns prompt and columns by row; without those whose line is gone, or if time is over."""
    texts = {}
    store = LineStore()
    # In the order of the files: a packed file is unpacked from its beginning.
    path = None
    for position, row in sorted((row.newest_line, row.row) for row in rows):
        # The time is looked at between files.
        if position.path != path and path is not None and time.monotonic() > deadline:
            break
        path = position.path
        record = parse_line(store.read(position))
        if record is not None:
            columns = list(bounded_values(record.columns).items())[:_MAX_COLUMNS]
            prompt = shorten(prompt_text(record.prompt), _MAX_PROMPT_CHARS)[0]
            texts[row] = prompt, {name: _shorten_value(value) for name, value in columns}
    store.close()
    return texts


def _shorten_value(value: Any) -> Any:
    if type(value) in (int, float, bool):
        return value
    return shorten(str(value), _MAX_COLUMN_CHARS)[0]
