"""What happens before a run's first log line: progress lines on the terminal, faster imports.

The progress lines are in no log file. Imports no torch.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Three processes follow each other before the first log line, each with a first line of its own.
_FIRST_LINE_S = 3.0
_LINE_EVERY_S = 7.0


class _Heartbeat:
    """Thread that prints a line when nothing else was printed for a while."""

    is_on = False
    last_line = 0.0
    progress = ""

    def change(self, activity: str) -> None:
        self.progress = ""
        self._activity = activity
        self._start = time.monotonic()

    def print_if_due(self) -> None:
        time_s = time.monotonic()
        if self.is_on and time_s - self.last_line >= _LINE_EVERY_S:
            self.last_line = time_s
            with suppress(OSError, ValueError):  # whoever read it is gone
                text = f"{self._activity}{self.progress} ... {time_s - self._start:.0f} s"
                print(text, flush=True)

    def run(self) -> None:
        while self.is_on:
            time.sleep(0.5)
            self.print_if_due()


_heartbeat = _Heartbeat()


def begin(activity: str) -> None:
    """From now on rank 0 prints from time to time what it is doing: "starting vLLM ... 20 s"."""
    if os.environ.get("RANK", "0") != "0":
        return
    _heartbeat.change(activity)
    if not _heartbeat.is_on:
        _heartbeat.is_on = True
        _heartbeat.last_line = time.monotonic() - _LINE_EVERY_S + _FIRST_LINE_S
        threading.Thread(target=_heartbeat.run, name="heartbeat", daemon=True).start()


def note(progress: str) -> None:
    """Adds how far the activity has come to the next line."""
    _heartbeat.progress = progress


def follow(line: str) -> None:
    """Takes the activity from a log line that is shown; the line of the first step ends it."""
    _heartbeat.last_line = time.monotonic()
    if line.startswith("step"):
        end()
    else:
        is_start = line.startswith("starting")
        _heartbeat.change(line.partition(":")[0] if is_start else "preparing")


def end() -> None:
    """Prints no more lines."""
    _heartbeat.is_on = False


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Turns Python's garbage collector off, and exempts all objects that exist at the end.

    torch, transformers and vLLM create a million objects that stay. Collections that go through all
    of them again and again are half of the import time, and each of vLLM's own collections takes as
    long as importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Libraries report objects that are still exempt at the very end as leaks, at length.
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
