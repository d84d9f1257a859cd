"""Python's garbage collector, kept out of the way while modules are imported. Imports no torch."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect no garbage within, and never look again at what there is at its end.

    torch, transformers and vLLM make a million objects that stay. Collections that go through all of them again and
    again are half of the time of the imports, and each of vLLM's own at its start and end takes as long as importing
    torch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries whose objects are there at the very end call them leaks, at length
        if was_on:
            gc.enable()
