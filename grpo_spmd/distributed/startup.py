"""Progress lines on the terminal until the first step ends, and faster imports.

The progress lines go to no log file. Imports no torch.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# The first progress line comes early: up to three processes (grpo-spmd, torchrun, rank 0) run one
# after the other before the first log line, and each begins to count anew.
_FIRST_LINE_S = 3.0
_LINE_EVERY_S = 7.0


class _Heartbeat:
    """A thread that prints a progress line when nothing else was printed for a while."""

    is_on = False
    last_line = 0.0
    progress = ""

    def change(self, activity: str) -> None:
        """Sets what the progress lines name, and restarts their count of seconds."""
        self.progress = ""
        self._activity = activity
        self._start = time.monotonic()

    def print_if_due(self) -> None:
        """Prints a progress line if nothing was printed for seven seconds."""
        time_s = time.monotonic()
        if self.is_on and time_s - self.last_line >= _LINE_EVERY_S:
            self.last_line = time_s
            with suppress(OSError, ValueError):  # nobody reads stdout any more
                text = f"{self._activity}{self.progress} ... {time_s - self._start:.0f} s"
                print(text, flush=True)

    def run(self) -> None:
        """Prints progress lines until `is_on` is False; the body of the thread."""
        while self.is_on:
            time.sleep(0.5)
            self.print_if_due()


_heartbeat = _Heartbeat()


def begin(activity: str) -> None:
    """Makes rank 0 print every few seconds what it is doing, such as "starting vLLM ... 20 s"."""
    if os.environ.get("RANK", "0") != "0":
        return
    _heartbeat.change(activity)
    if not _heartbeat.is_on:
        _heartbeat.is_on = True
        _heartbeat.last_line = time.monotonic() - _LINE_EVERY_S + _FIRST_LINE_S
        threading.Thread(target=_heartbeat.run, name="heartbeat", daemon=True).start()


def note(progress: str) -> None:
    """Sets a text about how far the activity has come; the next progress lines show it."""
    _heartbeat.progress = progress


def follow(line: str) -> None:
    """Sets what the progress lines name, from a log line that was printed.

    A line "starting ...: ..." names the activity; the line of the first step ends the progress
    lines.
    """
    _heartbeat.last_line = time.monotonic()
    if line.startswith("step"):
        end()
    else:
        is_start = line.startswith("starting")
        _heartbeat.change(line.partition(":")[0] if is_start else "preparing")


def end() -> None:
    """Ends the progress lines."""
    _heartbeat.is_on = False


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Turns the garbage collector off in the block, and freezes the objects that exist at its end.

    Importing torch, transformers and vLLM creates a million objects that live until the process
    ends. Half of the import time would be collections that visit them again and again. Later
    collections skip frozen objects (gc.freeze); without that, each of the collections that vLLM
    starts takes as long as importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Otherwise some libraries report the frozen objects as leaks when the interpreter exits.
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
