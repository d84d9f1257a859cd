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
    # By their parts: only texts need the slower way, and beside them are thousands of numbers.
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return b"{%s}" % b",".join(b"%s:%s" % (_dumped(name), json_bytes(inner)) for name, inner in value.items())
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return b"[%s]" % b",".join(map(json_bytes, value))
    try:
        return _dumped(value)
    except ValueError:
        return _dumped(json.loads(json.dumps(value), parse_constant=lambda _: None))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
