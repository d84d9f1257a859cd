"""The rows of benchmarks/results/, newest last, and which of them a table is made of.

A column that a row lacks, a file that is no JSON and rows whose age cannot be told are a
RecordError: one line that says where, what and the remedy. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Some rows name commits that were rewritten before they were published, and that no history has.
NOT_IN_HISTORY = frozenset(
    ("1a6e760", "38a8905", "50e69cc", "5177487", "6267901", "74fca5a", "8630702", "869fb3f", "8bba9b8", "a05b1c9",  # noqa: E501
     "c6c2f3c", "fc15645", "fe27887")
)  # fmt: skip
CHANGES = "+changes"  # at the end of a commit: the tree was not clean


class RecordError(Exception):
    """One line for whoever makes the table."""


class RecordedRow(dict[str, Any]):
    """A row that knows where it stands, and says so where a column is not there."""

    def __init__(self, columns: Mapping[str, Any], position: str) -> None:
        super().__init__(columns)
        self.place = position

    def __missing__(self, column: str) -> Any:
        raise RecordError(
            f"{self.place}: {self.get('benchmark', 'a row')} has no column {column!r}; {_REMEDY}"
        )

    def number(self, column: str) -> float:
        """Raises RecordError where it is no finite number."""
        value = self[column]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise RecordError(
                f"{self.place}: column {column!r} of {self['benchmark']} is {value!r}, not a "
                f"number; {_REMEDY}"
            )
        return value


_REMEDY = "take the row again (--json), or change its function in benchmarks/support/measured_*.py"
Rows = list[RecordedRow]


@dataclass(frozen=True)
class Line:
    """What a table says of some rows."""

    what: str
    figures: str
    rows: Sequence[RecordedRow]


class Record:
    """All rows, those of a benchmark in the order in which they were taken: by date, and by line
    within a file."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._rows: dict[str, Rows] = {}
        rows = [row for path in sorted(files) for row in _read(path) if _is_measurement(row)]
        for row in sorted(rows, key=lambda row: str(row["date"])):
            self._rows.setdefault(str(row["benchmark"]), []).append(row)
        for name, benchmark_values in self._rows.items():
            _refuse_unknown_age(name, benchmark_values)

    def all(self, benchmark: str) -> Rows:
        return self._rows.get(benchmark, [])

    def runs(self, benchmark: str, *case: str) -> list[Rows]:
        """Its runs, the newest first: rows of one commit, date and machine, until a case (the
        values of these columns)
        comes again. What a row lacks of them is one more value: older rows had fewer columns."""
        runs: list[tuple[Hashable, set[Hashable], Rows]] = []
        for row in self.all(benchmark):
            selected, row_values = _taken(row), _case(row, case)
            if not runs or runs[-1][0] != selected or row_values in runs[-1][1]:
                runs.append((selected, set(), []))
            runs[-1][1].add(row_values)
            runs[-1][2].append(row)
        return [rows for *_, rows in reversed(runs)]

    def run(
        self, benchmark: str, *case: str, location: Callable[[RecordedRow], bool] = lambda row: True
    ) -> Rows:
        """The newest run that has rows for which `where` is true, these rows; empty where there is
        none."""
        runs = ([row for row in rows if location(row)] for rows in self.runs(benchmark, *case))
        return next((rows for rows in runs if rows), [])

    def newest(self, benchmark: str, *case: str) -> Rows:
        """The newest row of each case, in the order of the cases: for trials that stand each by
        itself."""
        rows: dict[Hashable, RecordedRow] = {}
        for row in self.all(benchmark):
            rows[_case(row, case)] = row
        return list(rows.values())

    def newest_commit(self, benchmark: str, *case: str) -> Rows:
        """All rows of each case that were taken on the commit of its newest: for trials that are
        repeated and add
        up."""
        retained = {_case(row, case): row["commit"] for row in self.all(benchmark)}
        return [row for row in self.all(benchmark) if retained[_case(row, case)] == row["commit"]]


def _read(path: Path) -> Iterator[RecordedRow]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        position = f"{path.parent.name}/{path.name}:{number}"
        try:
            columns = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{position}: no JSON ({error}); take the line out") from None
        if not isinstance(columns, dict):
            raise RecordError(f"{position}: no JSON object; take the line out")
        row = RecordedRow(columns, position)
        for column in ("benchmark", "commit", "date"):
            if not isinstance(row[column], str):
                raise RecordError(
                    f"{position}: column {column!r} is {row[column]!r}, not text; take the row "
                    "again"
                )
        yield row


def _is_measurement(row: RecordedRow) -> bool:
    """Of a day on a GPU: neither its dry form nor a step that did not come to its end."""
    return row.get("form") != "dry" and row.get("status", "done") == "done"


def _refuse_unknown_age(benchmark: str, rows: Rows) -> None:
    """Two files of one date could have been written in either order."""
    file_of: dict[str, str] = {}
    for row in rows:
        file = row.place.partition(":")[0]
        if file_of.setdefault(row["date"], file) != file:
            raise RecordError(
                f"{row.place}: {file_of[row['date']]} has rows of {benchmark} of {row['date']} "
                "too, and which are "
                "newer cannot be told; put them into one file, the newer ones last"
            )


def _taken(row: RecordedRow) -> Hashable:
    return row["commit"], row["date"], row.get("hardware")


def _case(row: RecordedRow, columns: Sequence[str]) -> Hashable:
    return tuple(str(row.get(column)) for column in columns)


def one(rows: Rows, wanted: Mapping[str, Any]) -> RecordedRow:
    """The row with these values. Raises RecordError where there is none."""
    result = next(
        (row for row in rows if all(row.get(name) == value for name, value in wanted.items())), None
    )
    if result is None:
        raise RecordError(
            f"{rows[0].place}: this run of {rows[0]['benchmark']} has no row with "
            f"{dict(wanted)}; {_REMEDY}"
        )
    return result


def taken_on(rows: Iterable[RecordedRow]) -> str:
    """Commits with their dates, for a table; a star where the history does not have the commit."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        mark = "\\*" * (row["commit"].removesuffix(CHANGES) in NOT_IN_HISTORY)
        commits.setdefault(row["date"], {})[f"`{row['commit']}`{mark}"] = None
    return "; ".join(f"{', '.join(date_values)}, {date}" for date, date_values in commits.items())


def figure(value: float) -> str:
    """A measured one: at most three digits, and two below 1."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 0.0995:
        return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    mantissa, _, exponent = f"{value:.2g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def spread(row: RecordedRow, column: str, minimum: str = "min", maximum: str = "max") -> str:
    """The median, with the least and the most of the rounds."""
    return (
        f"{figure(row.number(column))} ({figure(row.number(minimum))} to "
        f"{figure(row.number(maximum))})"
    )


def span(values: Iterable[float]) -> str:
    """From the least to the most."""
    expected_names = list(values)
    ends = [figure(min(expected_names)), figure(max(expected_names))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def listed(pieces: Iterable[object]) -> str:
    """a, b and c"""
    words = [str(piece) for piece in pieces]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
