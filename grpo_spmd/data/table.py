"""Rows of a data set that stay in a file of the cache: each is decoded when it is asked for, from its line, or from
JSON where it never was a line."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.cache import Entry, Maker, obtain

_BATCH = 256  # rows that are decoded together
Found = tuple[int, dict[str, Any], bytes | None]  # number of the line or row, the row, and its line if it has one


@dataclass(frozen=True)
class PromptRow:
    """One usable row: its prompt (text or chat messages), its other columns, and where it stands, for messages."""

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Source:
    """A data set that was found, and not read yet."""

    prefix: str  # of where a row stands; its number follows
    read: Callable[[], Iterator[Found]]  # raises ConfigError
    inputs: Any  # what tells its content from others', for a fingerprint; None: nothing does
    size: int  # in bytes


@dataclass
class Overview:
    """What the checks ask of all rows together."""

    columns: dict[str, None] = field(default_factory=dict)  # their names, in the order in which they come up
    sizes: Sequence[int] = field(default_factory=lambda: array("q"))  # characters of each prompt
    first_chat: int | None = None  # the first row whose prompt is messages

    def add(self, row: PromptRow) -> None:
        assert isinstance(self.sizes, array)
        if self.first_chat is None and not isinstance(row.prompt, str):
            self.first_chat = len(self.sizes)
        self.sizes.append(_characters(row.prompt))
        if not row.columns.keys() <= self.columns.keys():
            self.columns |= dict.fromkeys(row.columns)


class Rows(Sequence[PromptRow]):
    def __init__(self, entry: Entry, source: Source, usable: Callable[[dict[str, Any], str], PromptRow]) -> None:
        self._entry, self._usable, self.prefix = entry, usable, source.prefix
        self._ends, self._numbers = entry.array("ends"), entry.array("numbers")
        self.inputs: Any = None
        """What their content is a function of; None: of nothing that could be named."""
        self.size = source.size
        facts = entry.facts
        self.overview = Overview(dict.fromkeys(facts["columns"]), entry.array("sizes"), facts["first_chat"])
        self.first_odd: int | None = facts["first_odd"]
        """The first row that `look` refused."""

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if not isinstance(index, slice):
            number = range(len(self))[index]
            return self._read(number, number + 1)[0]
        numbers = range(len(self))[index]
        if numbers.step != 1:
            return [self[number] for number in numbers]
        return self._read(numbers.start, numbers.stop)

    def __iter__(self) -> Iterator[PromptRow]:
        for start in range(0, len(self), _BATCH):
            yield from self[start : start + _BATCH]

    def _read(self, start: int, stop: int) -> list[PromptRow]:
        """Rows side by side: as one JSON list, in half the time."""
        if start >= stop:
            return []
        ends = [self._ends[start - 1] if start else 0, *self._ends[start:stop]]
        text = b",".join([self._entry.blob[begin:end] for begin, end in itertools.pairwise(ends)])
        records, numbers = json.loads(f"[{str(text, 'utf-8')}]"), self._numbers[start:stop]
        prefix, usable = self.prefix, self._usable
        return [usable(record, f"{prefix}{number}") for record, number in zip(records, numbers, strict=True)]


def rows_of(
    source: Source,
    usable: Callable[[dict[str, Any], str], PromptRow],
    row_keys: list[Any],
    look: Callable[[PromptRow], None],
) -> Sequence[PromptRow]:
    """Each row as `usable` makes it, which decides by `row_keys`. Read once on a node. Raises ConfigError; what `look`
    raises in the same pass waits until it is asked for."""

    def make(maker: Maker) -> None:
        ends, numbers, overview = array("q"), array("q"), Overview()
        end, first_odd, maker.facts["is_json"] = 0, None, True
        for number, record, line in source.read():
            overview.add(row := usable(record, f"{source.prefix}{number}"))
            if first_odd is None:
                try:
                    look(row)
                except ConfigError:
                    first_odd = len(numbers)
            if line is None:
                if not _is_json(record):  # a date, bytes, an image: JSON would bring back something else
                    maker.facts["is_json"] = False
                    return
                line = json.dumps(record).encode()
            maker.add(line)
            end += len(line)
            ends.append(end)
            numbers.append(number)
        assert isinstance(overview.sizes, array)
        maker.arrays.update(ends=ends, numbers=numbers, sizes=overview.sizes)
        maker.facts.update(columns=list(overview.columns), first_chat=overview.first_chat, first_odd=first_odd)

    inputs = None if source.inputs is None else [source.inputs, row_keys]
    entry = obtain("rows", inputs, source.size, make, source.prefix)
    if not entry.facts["is_json"]:
        return [usable(record, f"{source.prefix}{number}") for number, record, _ in source.read()]
    rows = Rows(entry, source, usable)
    rows.inputs = inputs
    return rows


def _is_json(value: Any) -> bool:
    """Whether JSON brings it back as it was, by type too."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str for name in value) and all(map(_is_json, value.values()))
    return all(map(_is_json, value)) if kind is list else kind in (str, int, float, bool, type(None))


def overview_of(rows: Sequence[PromptRow]) -> Overview:
    if isinstance(rows, Rows):
        return rows.overview
    found = Overview()
    for row in rows:
        found.add(row)
    return found


def once(kind: str, rows: Sequence[PromptRow], inputs: Any, look: Callable[[], Any]) -> Any:
    """What `look` says of the rows, which survives JSON and is a function of them and of `inputs`: asked once on a
    node, until one of them changes. What it raises is raised."""

    def make(maker: Maker) -> None:
        maker.facts["said"] = look()

    if not isinstance(rows, Rows) or rows.inputs is None:
        return look()
    return obtain(kind, [rows.inputs, inputs], rows.size, make, rows.prefix).facts["said"]


def _characters(prompt: str | list[dict[str, Any]]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content"))) for message in prompt)
