"""Tells `report` and `show` when to look at a run again: when its files have grown.

Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.5
_LOOK_AGAIN_S = 30.0  # yield after this time even without a change
_PAUSE_FACTOR = 10.0  # pause at least so many times as long as the caller worked


def file_sizes(folders: Sequence[Path]) -> list[int]:
    """Returns the sizes of the files in the run folders `folders` that grow while a run goes on."""
    names = ("metrics.jsonl", "launches.jsonl")
    return [file_size(folder / name) for folder in folders for name in names]


def changes(look: Callable[[], object], min_age_s: float) -> Iterator[None]:
    """Yields at once, and again whenever `look` returns something new.

    The caller draws its page at each yield. At least `min_age_s` seconds lie between two yields,
    and at least ten times as long as the caller took for its page, since the machine may be busy
    with training. Without a change it yields after 30 s, since a killed run changes no file.
    """
    while True:
        begin = time.monotonic()
        state = look()
        yield
        earliest = begin + max(min_age_s, _PAUSE_FACTOR * (time.monotonic() - begin))
        while time.monotonic() < earliest or (
            look() == state and time.monotonic() < begin + _LOOK_AGAIN_S
        ):
            time.sleep(_POLL_S)


def file_size(path: Path) -> int:
    """Returns the size of a file in bytes, or 0 if it does not exist."""
    with suppress(OSError):
        return path.stat().st_size
    return 0
