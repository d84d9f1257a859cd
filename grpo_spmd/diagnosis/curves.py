"""Curves of a run's metrics, with the steps at which something holds, and findings about them.

Pure functions: they read no files. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl

_MIN_STEPS = 3  # in a row, more or less, before something is more than a hiccup
_MAX_LEVEL_STEPS = 20


@dataclass(frozen=True)
class Curve:
    """A metric at the steps where it is known, in ascending order.

    A level is the median of several values at the curve's start or end (`window`). A metric that no
    step has gets an empty curve, whose levels are NaN, so that no comparison with them holds.
    """

    key: str
    steps: Steps
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    @property
    def window(self) -> int:
        """Number of steps that make up a level: a tenth of the curve, from 3 to 20."""
        return min(max(len(self) // 10, min(3, len(self))), _MAX_LEVEL_STEPS)

    @property
    def start(self) -> float:
        """The level at the beginning."""
        return float(np.median(self.values[: self.window])) if len(self) else math.nan

    @property
    def end(self) -> float:
        """The level at the end."""
        return float(np.median(self.values[-self.window :])) if len(self) else math.nan

    @property
    def gain(self) -> float:
        """The level at the end minus that at the beginning."""
        return self.end - self.start

    @property
    def smoothed(self) -> Floats:
        """For each value the mean of the `window` values around it; fewer at both ends."""
        if not len(self):
            return self.values
        # The division makes a mean of each sum: at both ends a window has fewer values.
        window = np.ones(self.window)
        sizes = np.convolve(np.ones(len(self)), window, "same")
        means: Floats = np.convolve(self.values, window, "same") / sizes
        return means

    @property
    def noise(self) -> float:
        """The standard error of the difference of two levels, from the scatter around `smoothed`.

        A `gain` of several times this is not due to chance.
        """
        if not len(self):
            return math.nan
        return float(np.std(self.values - self.smoothed)) * math.sqrt(2 / self.window)

    def moved(self, frac: float = 0.25) -> StepRange | None:
        """Returns the steps at which the metric is at least `frac` of its way from start to end.

        None if the metric has not moved, or only at single steps (`find_range`).
        """
        bound = self.start + frac * self.gain
        return find_range(
            self.steps, self.values >= bound if self.gain > 0 else self.values <= bound
        )


class StepRange(NamedTuple):
    """Steps at nearly all of which a condition held."""

    first: int
    last: int
    is_open: bool  # up to the end of the curve

    def __str__(self) -> str:
        end = f"from step {self.first} to {self.last}"
        return f"since step {self.first}" if self.is_open else end


def metric_curve(lines: Metrics, key: str) -> Curve:
    """Returns the curve of the metric `key` in lines of metrics.jsonl."""
    rows = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    points = np.array(rows, np.float64).reshape(-1, 2)
    return Curve(key, points[:, 0].astype(np.int64), points[:, 1])


def find_range(steps: Steps, holds: npt.NDArray[np.bool_]) -> StepRange | None:
    """Returns the range of steps in which `holds` (one value for each step) is mostly true.

    It is the range up to the end of the curve with the largest majority of true over false. If no
    such range has a majority of three, it is the best range in the middle. Returns None if that has
    a smaller one, too. A curve of fewer than three steps must have the majority at all steps.
    """
    # A majority, so that single steps against it do not end the range. `gains` has the largest
    # majority of a range that ends at each step (Kadane's algorithm).
    sums = np.concatenate([[0], np.cumsum(np.where(holds, 1, -1))])
    gains = sums[1:] - np.minimum.accumulate(sums[:-1])
    is_open = bool(gains[-1:].max(initial=0) >= min(_MIN_STEPS, len(gains)) > 0)
    if not is_open and gains.max(initial=0) < _MIN_STEPS:
        return None
    end = len(gains) - 1 if is_open else int(np.argmax(gains))
    # The shorter one of equal ranges.
    begin = int(np.flatnonzero(sums[: end + 1] == sums[: end + 1].min())[-1])
    return StepRange(int(steps[begin]), int(steps[end]), is_open)


def matching_metrics(lines: Metrics, pattern: str) -> list[str]:
    """Returns what the first group of `pattern` matches, for each metric that it matches whole."""
    # The newest lines name all metrics, and a long run has very many lines.
    keys = dict.fromkeys(key for line in lines[-200:] for key in line)
    matches = (re.fullmatch(pattern, key) for key in keys)
    return [match[1] for match in matches if match is not None]


# The two kinds of results of a diagnosis.

Level = Literal["ok", "warning", "bad"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "ok")
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """Something to look at in a run."""

    level: Level
    title: str
    text: str
    step: int | None = None  # where it began
    metric: str | None = None  # the curve that shows it
    explains: tuple[str, ...] = ()
    """A cause names the metrics whose findings are its symptoms; these are told with it alone."""

    @property
    def suffix(self) -> str:
        """Where it began, to stand behind the title."""
        return f" (from step {self.step})" if self.step is not None else ""


@dataclass(frozen=True)
class Check:
    """One of the run's own checks: its result so far, and the bound at which it stops the run."""

    name: str
    level: Level
    value: str
    bound: str
    text: str
