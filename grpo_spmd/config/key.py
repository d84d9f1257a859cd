"""What a line of the table of config keys is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

_SIGNS = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}


def key(default: Any, doc: str, **bounds: float) -> Any:
    """A config key: its default, its sentence for `--help`, bounds of every number in it by the names of _SIGNS."""
    metadata = {"doc": doc, "required": False, "bounds": {_SIGNS[name]: bound for name, bound in bounds.items()}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(doc: str) -> Any:
    """A key without a default; where it is text, the text must not be empty."""
    return dataclasses.field(metadata={"doc": doc, "required": True, "bounds": {}})
