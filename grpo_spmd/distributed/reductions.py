"""Reductions: what each rank counts for the metrics, and how the counts of all ranks are merged.

A reduction merges with others of its class. Its fields may be torch scalars until `on_host` is
called: a float() in each micro-batch would wait for the GPU every time. Reductions are sent to rank
0 as bytes, without rounding.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import msgspec
import numpy as np
from torch import Tensor

Number = float | Tensor
Fields = tuple[Any, ...]  # the fields of one reduction


@dataclass(frozen=True)
class Reduction:
    """The base class of all reductions.

    Its merge adds up each field, and its value is its only field. Subclasses change that.
    """

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        """Returns one reduction made from `rows`, the fields of one or more reductions.

        The rows are added in their order, because another order can change a sum's last digit.
        """
        return cls(*(reduce(operator.add, column) for column in zip(*rows, strict=True)))

    def merge(self, reduction: Self) -> Self:
        """Returns the merge of this reduction and another one."""
        return self.merged([tuple(vars(self).values()), tuple(vars(reduction).values())])

    @property
    def value(self) -> Any:
        """The metric's value."""
        (value,) = vars(self).values()
        return value

    def on_host(self) -> Self:
        """Returns a copy with Python numbers in the place of tensors. Waits for the device."""
        values = vars(self).values()
        return type(self)(*(v.tolist() if isinstance(v, Tensor) else v for v in values))


@dataclass(frozen=True)
class Sum(Reduction):
    """Adds up numbers."""

    total: Number = 0.0


@dataclass(frozen=True)
class Mean(Reduction):
    """Adds up values and their number; its value is the mean."""

    total: Number = 0.0
    count: Number = 0

    @property
    def value(self) -> Any:
        """The mean; None if nothing was counted (all updates of a step were skipped, say).

        It is not 0 then, because 0 would look like a measured value.
        """
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Max(Reduction):
    """Keeps the largest number."""

    largest: Number | None = None  # None: nothing was measured

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        """Returns the largest of the numbers in `rows`; rows without a number are skipped."""
        numbers = [number for (number,) in rows if number is not None]
        return cls(reduce(_larger, numbers) if numbers else None)


def _larger(number: Any, candidate: Any) -> Any:
    """Returns the larger one of two numbers, or of two tensors."""
    return number.maximum(candidate) if isinstance(number, Tensor) else max(number, candidate)


@dataclass(frozen=True)
class Histogram(Reduction):
    """Adds up counts bin by bin."""

    # One count per bin. Histograms that are merged have equally many bins, or none.
    counts: Tensor | list[float] = field(default_factory=list)

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        """Returns the sum of the counts in `rows`, bin by bin; rows without bins are skipped."""
        counts = [bins for (bins,) in rows if len(bins)]
        if not counts or isinstance(counts[0], Tensor):
            return cls(reduce(operator.add, counts)) if counts else cls()
        return cls(reduce(np.add, counts, np.zeros(len(counts[0]))).tolist())


@dataclass(frozen=True)
class Ids(Reduction):
    """Collects numbers, such as ids of rollouts."""

    ids: list[int] = field(default_factory=list)

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        """Returns all ids in `rows`, in their order."""
        return cls([int(number) for (ids,) in rows for number in ids])


Reductions = dict[str, Reduction]  # by name; a name with "/" is the name of a metric
_KINDS = {kind.__name__: kind for kind in (Sum, Mean, Max, Histogram, Ids)}


def merge(batches: Iterable[Reductions]) -> Reductions:
    """Returns the reductions of all `batches`, merged by name. A batch may lack some names."""
    totals: Reductions = {}
    for reductions in batches:
        for name, reduction in reductions.items():
            totals[name] = totals[name].merge(reduction) if name in totals else reduction
    return totals


def without_counts(reductions: Reductions) -> Reductions:
    """Returns reductions of the same names and classes in which nothing is counted.

    They are for a rank whose tokens another rank counts. Maxima are kept, because it does no harm
    to take them twice.
    """
    return {
        name: reduction if isinstance(reduction, Max) else type(reduction)()
        for name, reduction in reductions.items()
    }


def to_bytes(reductions: Reductions) -> bytes:
    """Returns reductions as bytes for rank 0. Their numbers must be on the host (`on_host`)."""
    rows = [
        (name, type(reduction).__name__, *vars(reduction).values())
        for name, reduction in reductions.items()
    ]
    # msgspec does not know NumPy's numbers, and converts them by enc_hook.
    payload = msgspec.msgpack.encode(rows, enc_hook=float)
    # Most bins of a histogram are empty, and with thousands of ranks rank 0 receives megabytes.
    return zlib.compress(payload, level=1)


def merge_bytes(payloads: Iterable[bytes]) -> Reductions:
    """Returns the merged reductions of all ranks from what `to_bytes` returned on each.

    Each name is merged once, over all ranks: merging rank by rank would take rank 0 several times
    as long. `payloads` must be in rank order, because another order can change a sum's last digit.
    """
    kinds: dict[str, str] = {}
    rows: dict[str, list[Fields]] = {}
    for payload in payloads:
        for name, kind, *fields in msgspec.msgpack.decode(zlib.decompress(payload)):
            kinds[name] = kind
            rows.setdefault(name, []).append(tuple(fields))
    return {name: _KINDS[kind].merged(rows[name]) for name, kind in kinds.items()}


def metric_values(reductions: Reductions) -> dict[str, float | None]:
    """Returns the values of those reductions that are metrics: their names contain "/"."""
    return {name: reduction.value for name, reduction in reductions.items() if "/" in name}
