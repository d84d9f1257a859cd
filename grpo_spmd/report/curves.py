"""Where a curve begins to be what it should not be. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
LEAST_STEPS = 3  # in a row, more or less, before something is more than a hiccup
_MOST_LEVEL = 20  # steps that a level is the mean of


@dataclass(frozen=True)
class Curve:
    """A metric where it is known: at least one value, at ascending steps."""

    steps: npt.NDArray[np.int64]
    values: Floats

    @property
    def window(self) -> int:
        """Steps that say what a level is: a tenth of the curve."""
        return min(max(len(self.values) // 10, min(3, len(self.values))), _MOST_LEVEL)

    @property
    def start(self) -> float:
        """The level that it began at."""
        return float(np.median(self.values[: self.window]))

    @property
    def now(self) -> float:
        """The level that it has come to."""
        return float(np.median(self.values[-self.window :]))

    @property
    def smooth(self) -> Floats:
        """Means of `window` values around each."""
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        half, number = self.window // 2, len(self.values)
        low = np.maximum(np.arange(number) - half, 0)
        high = np.minimum(np.arange(number) + half + 1, number)
        means: Floats = (sums[high] - sums[low]) / (high - low)
        return means


@dataclass(frozen=True)
class Stretch:
    """Steps at which something held, nearly all of them."""

    first: int
    last: int
    goes_on: bool  # to the end of the curve

    def __str__(self) -> str:
        return f"since step {self.first}" if self.goes_on else f"from step {self.first} to {self.last}"


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> Curve | None:
    """None where no line knows the metric."""
    known = [(line["step"], float(value)) for line in lines if (value := line.get(key)) is not None]
    if not known:
        return None
    return Curve(np.array([step for step, _ in known], np.int64), np.array([value for _, value in known]))


def stretch(steps: npt.NDArray[np.int64], holds: Mask, least: int = LEAST_STEPS) -> Stretch | None:
    """Where `holds` is mostly true: the end of the curve that has most steps with it beyond those without, else such a
    part in the middle; None where that is fewer than `least` steps (or than all, of a short curve)."""
    score = np.where(holds, 1, -1)
    needed = min(least, len(score))
    of_ends = np.cumsum(score[::-1])[::-1]
    best = int(of_ends.max(initial=0))
    if best >= needed > 0:
        first = int(np.flatnonzero(of_ends == best)[-1])  # of two that say the same the shorter one
        return Stretch(int(steps[first]), int(steps[-1]), True)
    sums = np.concatenate([[0], np.cumsum(score)])
    gains = sums[1:] - np.minimum.accumulate(sums[:-1])
    if len(gains) and gains.max() >= max(needed, LEAST_STEPS):
        last = int(np.argmax(gains))
        low = sums[: last + 1]
        first = int(np.flatnonzero(low == low.min())[-1])
        return Stretch(int(steps[first]), int(steps[last]), False)
    return None


def moved(of: Curve, start: float, now: float, part: float = 0.25) -> Stretch | None:
    """Since when it is `part` of the way from `start` to `now`, or further."""
    there = start + part * (now - start)
    return stretch(of.steps, of.values >= there if now > start else of.values <= there)


def spikes(of: Curve, times: float, before: int = 20, least_before: int = 5) -> npt.NDArray[np.int64]:
    """Steps with a value of more than `times` the median of those `before` it."""
    found = [
        int(of.steps[i])
        for i in np.flatnonzero(of.values > times * np.median(of.values))
        if i >= least_before and of.values[i] > times * np.median(of.values[max(0, i - before) : i])
    ]
    return np.array(found, np.int64)
