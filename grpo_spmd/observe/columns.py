"""The columns of a data row in a rollout dump: the gold answer beside the completion, bounded in size. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

LONGEST_VALUE, LONGEST_ROW = 4_000, 16_000  # characters of one value, and of all values of a row
# What data sets call what is right, the commonest name first.
_GOLD = (
    "answer",
    "final_answer",
    "ground_truth",
    "gold",
    "solution",
    "target",
    "label",
    "expected",
    "output",
)


def bounded(columns: Mapping[str, Any]) -> dict[str, Any]:
    """`columns` as JSON holds them. What is no JSON (a date, bytes, NaN) becomes text; a value of more than
    LONGEST_VALUE characters, or what of a row lies beyond LONGEST_ROW, a text that is cut and says how long it was."""
    found: dict[str, Any] = {}
    room = LONGEST_ROW
    for name, value in columns.items():
        (text, is_json), longest = _as_text(value), min(LONGEST_VALUE, room)
        is_whole = len(text) <= longest
        found[name] = (
            (value if is_json else text)
            if is_whole
            else f"{text[:longest]} ... ({len(text)} characters)"
        )
        room -= min(len(text), longest)
    return found


def gold(columns: Mapping[str, Any]) -> str:
    """The column that most likely holds the right answer, else the first, as "name=value" for a line of a report."""
    name = next((name for name in _GOLD if name in columns), next(iter(columns), None))
    if name is None:
        return ""
    text, _ = _as_text(columns[name])
    return f"{name}={text if len(text) <= 40 else f'{text[:18]} ... {text[-18:]}'!r}"


def _as_text(value: Any) -> tuple[str, bool]:
    """A text is itself, anything else JSON; and whether that can be said of `value`, which otherwise is str()."""
    if isinstance(value, str):
        return value, True
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False), True
    except (TypeError, ValueError, RecursionError):
        return str(value), False
