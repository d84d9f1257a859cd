"""What ranks count for the metrics, and how the counts of several ranks come together: each kind merges with its like.
Fields may be torch scalars until `on_host`: a float() a micro-batch would wait until the GPU has run dry. As JSON they
come to rank 0 without losing a digit."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

Number = float | Tensor


@dataclass(frozen=True)
class Reduction:
    """Of several parts: field by field they add up, where a kind says nothing else."""

    def merge(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def value(self) -> Any:
        """What it comes to: its one field, where a kind says nothing else."""
        (only,) = vars(self).values()
        return only

    def on_host(self) -> Self:
        """With numbers for tensors. Waits for the device."""
        return type(self)(*(v.tolist() if isinstance(v, Tensor) else v for v in vars(self).values()))


@dataclass(frozen=True)
class Sum(Reduction):
    total: Number = 0.0


@dataclass(frozen=True)
class Mean(Reduction):
    total: Number = 0.0
    count: Number = 0

    @property
    def value(self) -> Any:
        """None where nothing was counted (all of a step's updates were skipped, say): 0 would look measured."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Max(Reduction):
    largest: Number | None = None  # None: nothing was measured

    def merge(self, other: Max) -> Max:
        if self.largest is None or other.largest is None:
            return self if other.largest is None else other
        if isinstance(self.largest, Tensor):
            return Max(self.largest.maximum(other.largest))  # type: ignore[arg-type]
        return Max(max(self.largest, other.largest))


@dataclass(frozen=True)
class Histogram(Reduction):
    counts: Tensor | list[float] = field(default_factory=list)  # a bin each; equally many in all parts that have any

    def merge(self, other: Histogram) -> Histogram:
        if not len(self.counts) or not len(other.counts):
            return self if len(self.counts) else other
        if isinstance(self.counts, Tensor):
            return Histogram(self.counts + other.counts)  # type: ignore[operator]
        return Histogram([a + b for a, b in zip(self.counts, other.counts, strict=True)])


@dataclass(frozen=True)
class Ids(Reduction):
    ids: list[int] = field(default_factory=list)


Reductions = dict[str, Reduction]  # a "/" in a name: the key of the metric that the value is
_KINDS = {kind.__name__: kind for kind in (Sum, Mean, Max, Histogram, Ids)}


def merge(parts: Iterable[Reductions]) -> Reductions:
    """All parts together, added up in their order; a name missing from a part counts as nothing."""
    merged: Reductions = {}
    for part in parts:
        for name, reduction in part.items():
            merged[name] = merged[name].merge(reduction) if name in merged else reduction
    return merged


def to_json(reductions: Reductions) -> dict[str, list[Any]]:
    """For the way to rank 0; numbers must be on the host."""
    return {name: [type(reduction).__name__, *vars(reduction).values()] for name, reduction in reductions.items()}


def merge_json(parts: Iterable[Mapping[str, list[Any]]]) -> Reductions:
    """What the ranks sent by `to_json`, in rank order, merged."""
    return merge({name: _KINDS[kind](*fields) for name, (kind, *fields) in part.items()} for part in parts)


def metric_values(reductions: Reductions) -> dict[str, float | None]:
    return {name: reduction.value for name, reduction in reductions.items() if "/" in name}
