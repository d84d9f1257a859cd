"""How the prompts of a run did, row by row of the data: which got better, which are never solved."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.observe.rollout_record import bounded_values
from grpo_spmd.tools.report.steps import (
    Contents,
    Line,
    StepResult,
    prompt_text,
    shortened,
    whole_line,
)

KINDS = "never", "always", "better", "worse", "mixed"
_MOST_PROMPTS, _OF_A_KIND, _MOST_POINTS = 400, 80, 100
_LONGEST, _LONGEST_COLUMN = 400, 80  # characters
_NEAR, _MOVED = 0.05, 0.25  # of the distance between the lowest and the highest reward


def prompts_of(
    results: Sequence[StepResult], parts: Mapping[int, Sequence[Path]], until: float
) -> dict[str, Any]:
    """ "prompts", "prompts_total" and "prompt_kinds" of the page, from all steps that were read.

    `never`: no group of the prompt had a mean reward above the lowest one of the run, but for 5 % of the distance to
    the highest. `always`: none was below the highest, likewise. `better`, `worse`: the mean of the last third of its
    groups is 25 % of that distance above, or below, that of the first third. `mixed`: the others. `until`: on the
    monotonic clock, after which texts are left out."""
    visits = _Visits(results)
    kinds = [visits.kind(number) for number in range(len(visits))]
    counts = {kind: kinds.count(kind) for kind in KINDS}
    chosen = _chosen(visits, kinds)
    texts = _texts([visits.newest(number) for number in chosen], parts, until)
    prompts = []
    for number, (text, columns) in zip(chosen, texts, strict=True):
        steps, means = visits.points(number)
        prompts.append(
            {"row": visits.rows[number], "prompt": text, "columns": columns, "steps": steps, "means": means,
             "kind": kinds[number]}
        )  # fmt: skip
    return {"prompts": prompts, "prompts_total": len(visits), "prompt_kinds": counts}


class _Visits:
    """The groups of all steps by their row, those of unknown reward left out; ascending rows and steps."""

    def __init__(self, results: Sequence[StepResult]) -> None:
        results = sorted(results, key=lambda result: result.step)
        sizes = [len(result.rows) for result in results]
        rows = np.concatenate([np.zeros(0, np.int64), *(result.rows for result in results)])
        means = np.concatenate([np.zeros(0), *(result.means for result in results)])
        steps = np.repeat(np.array([result.step for result in results], np.int64), sizes)
        lines = np.arange(len(rows))
        known = ~np.isnan(means)
        order = np.argsort(rows[known], kind="stable")
        self._rows, self._means = rows[known][order], means[known][order]
        self._steps, self._lines = steps[known][order], lines[known][order]
        self._begins = np.flatnonzero(np.diff(self._rows, prepend=-1))
        self.rows: list[int] = self._rows[self._begins].tolist()
        self._ends = np.append(self._begins[1:], len(self._rows))
        self._first_lines: list[tuple[int, Line]] = [
            (result.step, line) for result in results for line in result.first_lines
        ]
        lows = [result.lowest for result in results if result.lowest is not None]
        highs = [result.highest for result in results if result.highest is not None]
        # of the most steps: one penalty without an end must not be what all others are measured by
        self.low = float(np.median(lows)) if lows else 0.0
        self.high = float(np.median(highs)) if highs else 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, number: int) -> npt.NDArray[np.float64]:
        means: npt.NDArray[np.float64] = self._means[self._begins[number] : self._ends[number]]
        return means

    def moved(self, number: int) -> float:
        """From the first third of its groups to the last; 0 of a single one."""
        means = self.of(number)
        third = max(1, len(means) // 3)
        return float(means[-third:].mean() - means[:third].mean())

    def kind(self, number: int) -> str:
        means, distance = self.of(number), self.high - self.low
        if means.max() <= self.low + _NEAR * distance:
            return "never"
        if means.min() >= self.high - _NEAR * distance:
            return "always"
        moved = self.moved(number)
        return (
            "better"
            if moved >= _MOVED * distance
            else "worse"
            if moved <= -_MOVED * distance
            else "mixed"
        )

    def newest(self, number: int) -> tuple[int, Line]:
        """Its last step, and a line of its group there."""
        return self._first_lines[int(self._lines[self._ends[number] - 1])]

    def points(self, number: int) -> tuple[list[int], list[float]]:
        low, high = self._begins[number], self._ends[number]
        places = np.unique(np.linspace(low, high - 1, min(high - low, _MOST_POINTS)).astype(int))
        return self._steps[places].tolist(), [
            float(f"{mean:.4g}") for mean in self._means[places].tolist()
        ]


def _chosen(visits: _Visits, kinds: Sequence[str]) -> list[int]:
    """The hopeless ones that were tried most often, those that got worse or better by most, the worst of the others,
    a few of the solved ones; then what is left of these."""
    means = [float(visits.of(number).mean()) for number in range(len(visits))]
    orders: dict[str, list[int]] = {
        kind: [number for number in range(len(visits)) if kinds[number] == kind] for kind in KINDS
    }
    orders["never"].sort(key=lambda number: -len(visits.of(number)))
    orders["worse"].sort(key=visits.moved)
    orders["better"].sort(key=lambda number: -visits.moved(number))
    orders["mixed"].sort(key=lambda number: means[number])
    order = [orders[kind] for kind in ("never", "worse", "better", "mixed", "always")]
    first = [number for numbers in order for number in numbers[:_OF_A_KIND]]
    rest = [number for number in itertools.chain(*order) if number not in set(first)]
    return [*first, *rest][:_MOST_PROMPTS]


def _texts(
    wanted: Sequence[tuple[int, Line]], parts: Mapping[int, Sequence[Path]], until: float
) -> list[tuple[str, dict[str, Any]]]:
    """Prompt and columns of each; "" where its line cannot be read any more, or there is no time. A step's lines are
    read one behind the other: packed files are unpacked from their beginning."""
    found, by_step = [("", dict[str, Any]())] * len(wanted), dict[int, dict[int, Line]]()
    for number, (step, line) in enumerate(wanted):
        if line.part < len(parts.get(step, ())):
            by_step.setdefault(step, {})[number] = line
    for step, lines in by_step.items():
        if time.monotonic() > until:
            break
        for number, text in Contents(parts[step], ()).lines(lines).items():
            if (values := whole_line(text)) is not None:
                columns = {
                    name: _short(value)
                    for name, value in [*bounded_values(values["columns"]).items()][:8]
                }
                found[number] = shortened(prompt_text(values["prompt"]), _LONGEST)[0], columns
    return found


def _short(value: Any) -> Any:
    return value if type(value) in (int, float, bool) else shortened(str(value), _LONGEST_COLUMN)[0]
