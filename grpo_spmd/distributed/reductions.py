"""What ranks count for the metrics, and how the counts of several ranks come together: each kind merges with its like.
Fields may be torch scalars until `on_host`: a float() a micro-batch would wait until the GPU has run dry. They come to
rank 0 as bytes, without losing a bit."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import numpy as np
from torch import Tensor

from grpo_spmd.distributed.packed import Array, PackedReader, pack

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
        return type(self)(
            *(v.tolist() if isinstance(v, Tensor) else v for v in vars(self).values())
        )


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
    counts: Tensor | list[float] = field(
        default_factory=list
    )  # a bin each; equally many in all parts that have any

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
    float, or how many numbers), then all numbers as float64: an int is a count, so below 2^53. Last come histograms,
    most of whose bins are empty: a bit for each bin, and the numbers of those that are not."""
    layout, numbers, sparse = [], list[float](), list[Array]()
    for name, reduction in reductions.items():
        fields = vars(reduction).values()
        layout.append([name, type(reduction).__name__, *map(_kind_of, fields)])
        for value in fields:
            if isinstance(reduction, Histogram):
                bins = np.array(value, np.float64)
                sparse += np.packbits(bins != 0), bins[bins != 0]
            else:
                numbers += value if isinstance(value, list) else () if value is None else (value,)
    return pack(layout, [np.array(numbers, np.float64), *sparse])


def _kind_of(value: Any) -> str | int | None:
    if value is None or isinstance(value, list):
        return None if value is None else len(value)
    return "int" if isinstance(value, int) else "float"


def merge_bytes(parts: Iterable[bytes]) -> Reductions:
    """What the ranks sent by `to_bytes`, in rank order, merged. Ranks with one header, mostly all, are read as one
    table: thousands of them, field by field, took rank 0 four times as long."""
    alike: dict[bytes, list[tuple[int, PackedReader]]] = {}
    for rank, part in enumerate(parts):
        packed = PackedReader(part)
        alike.setdefault(packed.header_text, []).append((rank, packed))
    found: dict[str, tuple[str, list[tuple[int, Fields]]]] = {}
    for of_ranks in alike.values():
        ranks, header = [rank for rank, _ in of_ranks], of_ranks[0][1].header
        width = sum(
            _width(kind)
            for _, reduction, *kinds in header
            for kind in kinds
            if reduction != "Histogram"
        )
        table = b"".join(packed.array(np.float64, width).tobytes() for _, packed in of_ranks)
        numbers, at = np.frombuffer(table, np.float64).reshape(len(ranks), width), 0
        for name, reduction, *kinds in header:
            columns = []
            for kind in kinds:
                if reduction == "Histogram":
                    columns.append(_bins([packed for _, packed in of_ranks], kind))
                else:
                    columns.append(_column(kind, numbers[:, at : at + _width(kind)]))
                    at += _width(kind)
            fields = zip(ranks, zip(*columns, strict=True), strict=True)
            found.setdefault(name, (reduction, []))[1].extend(fields)
        assert not any(packed.rest() for _, packed in of_ranks), header
    return {
        name: _KINDS[kind].merged(
            [fields for _, fields in sorted(of_name, key=operator.itemgetter(0))]
        )
        for name, (kind, of_name) in found.items()
    }


def _width(kind: str | int | None) -> int:
    return kind if isinstance(kind, int) else int(kind is not None)


def _bins(parts: Sequence[PackedReader], number: int) -> list[Any]:
    """A histogram of many ranks."""
    bits = b"".join(packed.array(np.uint8, -(-number // 8)).tobytes() for packed in parts)
    there = np.unpackbits(
        np.frombuffer(bits, np.uint8).reshape(len(parts), -(-number // 8)), axis=1, count=number
    )
    bins, counts = np.zeros(there.shape), zip(parts, there.sum(axis=1).tolist(), strict=True)
    bins[there > 0] = np.frombuffer(
        b"".join(packed.array(np.float64, count).tobytes() for packed, count in counts)
    )
    return list(bins)


def _column(kind: str | int | None, numbers: Array) -> list[Any]:
    """A field of many ranks; `numbers`: a row each."""
    if kind is None or isinstance(kind, int):
        return [None] * len(numbers) if kind is None else list(numbers)
    values = numbers[:, 0].tolist()
    return list(map(int, values)) if kind == "int" else values


def metric_values(reductions: Reductions) -> dict[str, float | None]:
    return {name: reduction.value for name, reduction in reductions.items() if "/" in name}
