"""What ranks count for the metrics, and how the counts of several ranks are merged.

Each kind of reduction merges with its like. Fields may be torch scalars until `on_host`: a float()
in each micro-batch would wait until the GPU has nothing left to do. They come to rank 0 as bytes,
without losing a bit.
"""

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
Fields = tuple[Any, ...]  # the fields of one reduction


@dataclass(frozen=True)
class Reduction:
    """Base class: fields of several ranks are added up, and the value is the only field."""

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        """Returns the merge of at least one row of fields.

        The rows are added one after the other, because the order shows in the last digit.
        """
        return cls(*(reduce(operator.add, column) for column in zip(*rows, strict=True)))

    def merge(self, reduction: Self) -> Self:
        return self.merged([tuple(vars(self).values()), tuple(vars(reduction).values())])

    @property
    def value(self) -> Any:
        """The metric's value."""
        (value,) = vars(self).values()
        return value

    def on_host(self) -> Self:
        """Returns it with numbers in the place of tensors. Waits for the device."""
        values = vars(self).values()
        return type(self)(*(v.tolist() if isinstance(v, Tensor) else v for v in values))


@dataclass(frozen=True)
class Sum(Reduction):
    total: Number = 0.0


@dataclass(frozen=True)
class Mean(Reduction):
    total: Number = 0.0
    count: Number = 0

    @property
    def value(self) -> Any:
        """The mean; None if nothing was counted (all updates of a step were skipped, say).

        0 would look measured.
        """
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Max(Reduction):
    largest: Number | None = None  # None: nothing was measured

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        numbers = [number for (number,) in rows if number is not None]
        return cls(reduce(_larger, numbers) if numbers else None)


def _larger(number: Any, candidate: Any) -> Any:
    return number.maximum(candidate) if isinstance(number, Tensor) else max(number, candidate)


@dataclass(frozen=True)
class Histogram(Reduction):
    # One count a bin. All reductions that have any bins have equally many.
    counts: Tensor | list[float] = field(default_factory=list)

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        counts = [bins for (bins,) in rows if len(bins)]
        if not counts or isinstance(counts[0], Tensor):
            return cls(reduce(operator.add, counts)) if counts else cls()
        return cls(reduce(np.add, counts, np.zeros(len(counts[0]))).tolist())


@dataclass(frozen=True)
class Ids(Reduction):
    ids: list[int] = field(default_factory=list)

    @classmethod
    def merged(cls, rows: Sequence[Fields]) -> Self:
        return cls([int(number) for (ids,) in rows for number in ids])


Reductions = dict[str, Reduction]  # a name with "/" is the key of the metric
_KINDS = {kind.__name__: kind for kind in (Sum, Mean, Max, Histogram, Ids)}


def merge(batches: Iterable[Reductions]) -> Reductions:
    """Returns all reductions together, added up in their order; a missing name counts nothing."""
    totals: Reductions = {}
    for reductions in batches:
        for name, reduction in reductions.items():
            totals[name] = totals[name].merge(reduction) if name in totals else reduction
    return totals


def to_bytes(reductions: Reductions) -> bytes:
    """Returns reductions, whose numbers are on the host, as bytes for rank 0.

    The header says of each field what it is: null, "int", "float", or how many numbers. Then come
    all numbers as float64; an int is a count, so it is below 2^53. Last come histograms, most of
    whose bins are empty: a bit for each bin, and the counts of the others.
    """
    # Everything that is equal on most ranks is in the header, so that it is parsed only once.
    header = []
    numbers: list[float] = []
    histograms: list[Array] = []
    for name, reduction in reductions.items():
        fields = vars(reduction).values()
        header.append([name, type(reduction).__name__, *map(_field_kind, fields)])
        for value in fields:
            if isinstance(reduction, Histogram):
                bins = np.array(value, np.float64)
                histograms += [np.packbits(bins != 0), bins[bins != 0]]
            elif isinstance(value, list):
                numbers += value
            elif value is not None:
                numbers.append(value)
    return pack(header, [np.array(numbers, np.float64), *histograms])


# What the header says of one field: null, "int", "float", or the length of a list.
FieldKind = str | int | None


def _field_kind(value: Any) -> FieldKind:
    if value is None:
        return None
    if isinstance(value, list):
        return len(value)
    return "int" if isinstance(value, int) else "float"


def merge_bytes(payloads: Iterable[bytes]) -> Reductions:
    """Returns the merge of what the ranks sent by `to_bytes`; `payloads` are in rank order.

    Ranks with the same header (mostly all of them) are read as one table. Field by field, thousands
    of ranks took rank 0 four times as long.
    """
    by_header: dict[bytes, dict[int, PackedReader]] = {}
    for rank, payload in enumerate(payloads):
        reader = PackedReader(payload)
        by_header.setdefault(reader.header_text, {})[rank] = reader
    # By name: the kind of reduction, and the fields of each rank that has it.
    kinds: dict[str, str] = {}
    fields_by_rank: dict[str, dict[int, Fields]] = {}
    for readers in by_header.values():
        for name, kind, rows in _read_table(list(readers.values())):
            kinds.setdefault(name, kind)
            fields_by_rank.setdefault(name, {}).update(zip(readers, rows, strict=True))
    # In the order of ranks, because the order of additions shows in the last digit.
    return {
        name: _KINDS[kinds[name]].merged([fields[rank] for rank in sorted(fields)])
        for name, fields in fields_by_rank.items()
    }


def _read_table(readers: list[PackedReader]) -> list[tuple[str, str, list[Fields]]]:
    """Returns name, kind and each rank's fields of the reductions of ranks with one header."""
    header = readers[0].header
    widths = [
        _width(field_kind)
        for _, kind, *field_kinds in header
        for field_kind in field_kinds
        if kind != "Histogram"
    ]
    payload = b"".join(reader.array(np.float64, sum(widths)).tobytes() for reader in readers)
    numbers = np.frombuffer(payload, np.float64).reshape(len(readers), sum(widths))
    reductions = []
    start = 0
    for name, kind, *field_kinds in header:
        columns = []
        for field_kind in field_kinds:
            if kind == "Histogram":
                columns.append(_read_histograms(readers, field_kind))
            else:
                end = start + _width(field_kind)
                columns.append(_read_column(field_kind, numbers[:, start:end]))
                start = end
        reductions.append((name, kind, list(zip(*columns, strict=True))))
    assert not any(reader.rest() for reader in readers), header
    return reductions


def _width(kind: FieldKind) -> int:
    """Returns how many numbers a field has."""
    return kind if isinstance(kind, int) else int(kind is not None)


def _read_column(kind: FieldKind, numbers: Array) -> list[Any]:
    """Returns one field of each rank; `numbers` [ranks, width]."""
    if kind is None:
        return [None] * len(numbers)
    if isinstance(kind, int):
        return list(numbers)
    values: list[Any] = numbers[:, 0].tolist()
    return list(map(int, values)) if kind == "int" else values


def _read_histograms(readers: Sequence[PackedReader], num_bins: int) -> list[Any]:
    """Returns one histogram of each rank."""
    num_bytes = -(-num_bins // 8)
    payload = b"".join(reader.array(np.uint8, num_bytes).tobytes() for reader in readers)
    bits = np.frombuffer(payload, np.uint8).reshape(len(readers), num_bytes)
    is_filled = np.unpackbits(bits, axis=1, count=num_bins)
    num_filled = is_filled.sum(axis=1).tolist()
    counts = [
        reader.array(np.float64, count).tobytes()
        for reader, count in zip(readers, num_filled, strict=True)
    ]
    bins = np.zeros(is_filled.shape)
    bins[is_filled > 0] = np.frombuffer(b"".join(counts))
    return list(bins)


def metric_values(reductions: Reductions) -> dict[str, float | None]:
    """Returns the metrics' values; reductions whose name has no "/" are no metrics."""
    return {name: reduction.value for name, reduction in reductions.items() if "/" in name}
