"""JSON for the page: in ASCII, with null for what is not finite."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()


def json_bytes(value: Any) -> bytes:
    """Half a surrogate pair, which a policy may write, is its escape. Raises nothing for what JSON was read as."""
    try:
        if (text := _ENCODER.encode(value)).isascii():
            return text
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        pass  # what it does not know: half a surrogate pair, or a large number
    try:
        return _dumped(value, allow_nan=False)
    except ValueError:
        return _dumped(json.loads(_dumped(value, allow_nan=True), parse_constant=lambda _: None), allow_nan=False)


def _dumped(value: Any, allow_nan: bool) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=allow_nan).encode("ascii")
