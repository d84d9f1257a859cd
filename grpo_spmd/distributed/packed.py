"""A JSON header and arrays as one byte string, for the way between ranks of one job: nothing is pickled or rounded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def pack(header: Any, arrays: Iterable[Array] = ()) -> bytes:
    """`header` must survive JSON. The lengths of `arrays` are for the reader to know."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])


class PackedReader:
    """What `pack` made, read from its beginning."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._end = payload, 4 + int.from_bytes(payload[:4], "little")
        self.header_text = payload[4 : self._end]

    @property
    def header(self) -> Any:
        return json.loads(self.header_text)

    def array(self, dtype: npt.DTypeLike, count: int) -> Array:
        """The next one. It lies in the payload, so nobody can write into it."""
        found: Array = np.frombuffer(self._payload, dtype, count, self._end)
        self._end += found.nbytes
        return found

    def rest(self) -> bytes:
        """What nobody has read yet."""
        return self._payload[self._end :]
