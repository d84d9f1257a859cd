"""Packs a JSON header and NumPy arrays into one byte string, to send it between ranks of one job.

Nothing is pickled or rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_LENGTH_BYTES = 4


def pack(header: Any, arrays: Iterable[Array] = ()) -> bytes:
    """Returns bytes with the header, as JSON, followed by the arrays.

    The bytes do not contain the lengths and dtypes of the arrays: the reader must know them.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    length = len(text).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, text, *(array.tobytes() for array in arrays)])


class PackedReader:
    """Reads what `pack` returned: `header` first, then one array after the other."""

    def __init__(self, payload: bytes) -> None:
        """Reads the header of `payload`, which `pack` returned."""
        self._payload = payload
        self._end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
        self.header: Any = json.loads(payload[_LENGTH_BYTES : self._end])

    def array(self, dtype: npt.DTypeLike, count: int) -> Array:
        """Returns the next array. It is a read-only view of the payload."""
        array: Array = np.frombuffer(self._payload, dtype, count, self._end)
        self._end += array.nbytes
        return array

    def rest(self) -> bytes:
        """Returns the bytes that were not read yet."""
        return self._payload[self._end :]
