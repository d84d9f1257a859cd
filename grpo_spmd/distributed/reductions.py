"""What ranks count for the metrics, and how the counts of several ranks come together: each kind merges with its like.
Fields may be torch scalars until `on_host`: a float() a micro-batch would wait until the GPU has run dry. They come to
rank 0 as bytes, without losing a bit."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import numpy as np
from torch import Tensor

from grpo_spmd.distributed.packed import Unpacked, pack

Number = float | Tensor
Fields = tuple[Any, ...]  # of one part


@dataclass(frozen=True)
class Reduction:
    """Of several parts: field by field they add up, where a kind says nothing else."""

    @classmethod
    def merged(cls, parts: Sequence[Fields]) -> Self:
        """Of one part at least; one after the other, since the order shows in the last digit."""
        return cls(*(reduce(operator.add, column) for column in zip(*parts, strict=True)))

    def merge(self, other: Self) -> Self:
        return self.merged([tuple(vars(self).values()), tuple(vars(other).values())])

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

    @classmethod
    def merged(cls, parts: Sequence[Fields]) -> Self:
        return cls(reduce(_larger, (number for (number,) in parts if number is not None), None))


def _larger(known: Number | None, number: Number) -> Number:
    if known is None:
        return number
    return known.maximum(number) if isinstance(known, Tensor) else max(known, number)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Histogram(Reduction):
    counts: Tensor | list[float] = field(default_factory=list)  # a bin each; equally many in all parts that have any

    @classmethod
    def merged(cls, parts: Sequence[Fields]) -> Self:
        counts = [each for (each,) in parts if len(each)]
        if not counts or isinstance(counts[0], Tensor):
            return cls(reduce(operator.add, counts)) if counts else cls()
        return cls(reduce(np.add, counts, np.zeros(len(counts[0]))).tolist())


@dataclass(frozen=True)
class Ids(Reduction):
    ids: list[int] = field(default_factory=list)

    @classmethod
    def merged(cls, parts: Sequence[Fields]) -> Self:
        return cls([int(i) for (ids,) in parts for i in ids])


Reductions = dict[str, Reduction]  # a "/" in a name: the key of the metric that the value is
_KINDS = {kind.__name__: kind for kind in (Sum, Mean, Max, Histogram, Ids)}


def merge(parts: Iterable[Reductions]) -> Reductions:
    """All parts together, added up in their order; a name missing from a part counts as nothing."""
    merged: Reductions = {}
    for part in parts:
        for name, reduction in part.items():
            merged[name] = merged[name].merge(reduction) if name in merged else reduction
    return merged


def to_bytes(reductions: Reductions) -> bytes:
    """For the way to rank 0; numbers must be on the host. A header that says of each field what it is (None, an int, a
    float, or how many numbers), then as float64 the single numbers and the lists: an int is a count, so below 2^53."""
    values = [value for reduction in reductions.values() for value in vars(reduction).values()]
    kinds = (map(_kind_of, vars(reduction).values()) for reduction in reductions.values())
    of_names = zip(reductions.items(), kinds, strict=True)
    layout = [[name, type(reduction).__name__, *fields] for (name, reduction), fields in of_names]
    lists = [number for value in values if isinstance(value, list) for number in value]
    single = [value for value in values if not isinstance(value, list | None)]
    return pack([len(single), layout], [np.array(single, np.float64), np.array(lists, np.float64)])


def _kind_of(value: Any) -> str | int | None:
    if value is None or isinstance(value, list):
        return None if value is None else len(value)
    return "int" if isinstance(value, int) else "float"


def merge_bytes(parts: Iterable[bytes]) -> Reductions:
    """What the ranks sent by `to_bytes`, in rank order, merged."""
    headers: dict[bytes, Any] = {}  # mostly one for all ranks
    found: dict[str, tuple[str, list[Fields]]] = {}
    for part in parts:
        packed = Unpacked(part)
        if packed.header_text not in headers:
            headers[packed.header_text] = packed.header
        num_single, layout = headers[packed.header_text]
        single = iter(packed.array(np.float64, num_single).tolist())
        for name, reduction, *kinds in layout:
            fields = tuple(_field(kind, single, packed) for kind in kinds)
            found.setdefault(name, (reduction, []))[1].append(fields)
        assert not packed.rest(), (len(part), num_single)
    return {name: _KINDS[kind].merged(of_ranks) for name, (kind, of_ranks) in found.items()}


def _field(kind: str | int | None, single: Iterator[float], packed: Unpacked) -> Any:
    if kind == "float":
        return next(single)
    if kind == "int":
        return int(next(single))
    return None if kind is None else packed.array(np.float64, int(kind))


def metric_values(reductions: Reductions) -> dict[str, float | None]:
    return {name: reduction.value for name, reduction in reductions.items() if "/" in name}
