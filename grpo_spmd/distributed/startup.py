"""Lines for whoever waits in front of a terminal while nothing else is said. They are in no log file. No torch."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FIRST_S, _EVERY_S = 3.0, 7.0  # three processes follow each other before the first line of a log
_beat: _Beat | None = None


def begin(what: str) -> None:
    """From here on rank 0 says now and then that it is busy with `what`, and since when: "starting vLLM ... 20 s"."""
    global _beat
    if os.environ.get("RANK", "0") != "0":
        return
    if _beat is None:
        _beat = _Beat()
    _beat.change(what)


def note(more: str) -> None:
    """How far it has come: the next line says so too."""
    if _beat is not None:
        _beat.more = more


def follow(line: str) -> None:
    """A log line is shown: it says what begins, up to that of the first step."""
    if _beat is None:
        return
    _beat.shown = time.monotonic()
    if line.startswith("step"):
        end()
    else:
        _beat.change(line.partition(":")[0] if line.startswith("starting") else "preparing")


def end() -> None:
    """Others speak again."""
    global _beat
    if _beat is not None:
        _beat.stop.set()
    _beat = None


class _Beat:
    def __init__(self) -> None:
        self.stop, self.shown = threading.Event(), time.monotonic() - _EVERY_S + _FIRST_S
        self.change("")
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def change(self, what: str) -> None:
        self._what, self.more, self._since = what, "", time.monotonic()

    def look(self) -> None:
        """Say it, if nothing was shown for so long."""
        if (now := time.monotonic()) - self.shown >= _EVERY_S:
            self.shown = now
            with suppress(OSError, ValueError):  # whoever read it is gone
                print(f"{self._what}{self.more} ... {now - self._since:.0f} s", flush=True)

    def _run(self) -> None:
        while not self.stop.wait(0.5):
            self.look()


# Python's garbage collector, kept out of the way while modules are imported. Imports no torch.


@contextmanager
def garbage_collector_off() -> Iterator[None]:
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
        atexit.register(
            gc.unfreeze
        )  # libraries whose objects are there at the very end call them leaks, at length
        if was_on:
            gc.enable()
