"""Python's garbage collector, kept out of the way while modules are imported. Imports no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect no garbage within, and never look again at what there is at its end.

    torch, transformers and vLLM make a million objects that stay. Collections that go through all of them again and
    again are half of the time of the imports, and each of vLLM's own at its start and end takes as long as importing
    torch. What a process leaves at its end without ending in `leave` is not collected then either."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
