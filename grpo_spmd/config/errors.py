"""Reports a user's mistakes in one line on stderr and exit code 2.

The *last words* of a process are the line that it prints before it ends.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import typing
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

T = typing.TypeVar("T")
# The time limit for printing a process's last words.
_SAY_S = 2.0
# A rank that does not print waits so long for torchrun to end it.
_REFUSE_DELAY_S = 10.0
# Control characters that move the cursor, change colours or reverse the direction of text. A
# message may quote a folder's name or a completion, which can hold them.
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns `text` with every invisible control character written as an escape such as \\x1b."""
    return _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text)


def cut_middle(text: str, num_chars: int = 40) -> str:
    """Returns the text; if it has more than `num_chars` characters, only its beginning and end."""
    half = num_chars // 2 - 2
    return text if len(text) <= num_chars else f"{text[:half]} ... {text[-half:]}"


class ConfigError(ValueError):
    """Raised if the config, the command line or the data cannot be used. Its text is one line."""

    def __str__(self) -> str:
        """Returns the message as one line without control characters."""
        return " ".join(printable(super().__str__()).split("\n"))


def refuse(error: ConfigError) -> typing.NoReturn:
    """Ends this rank with one line and exit code 2.

    Under torchrun usually all ranks have the same error. The first rank of each node prints it and
    ends, and torchrun then ends the others while they wait. If a rank is still there after the
    wait, only that rank had the error (for example, a file is missing on its node only), so it
    prints the error itself.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_REFUSE_DELAY_S)
    say(f"error: {error}")
    raise SystemExit(2)


def say(text: str) -> None:
    """Prints the last words of a process on stderr. Gives up after 2 s, because the terminal may be
    stopped (Ctrl-S)."""
    line = printable(text)

    def write() -> None:
        """Writes the line to stderr, which may take for ever."""
        # A caller of main() may have replaced sys.stderr (a notebook, a test).
        if sys.stderr is not sys.__stderr__:
            print(line, file=sys.stderr, flush=True)
            return
        # Not through sys.stderr: another thread may be stuck in a write to it and hold its lock.
        unwritten = f"{line}\n".encode(errors="backslashreplace")
        while unwritten:
            # os.write may write only the first part of it.
            unwritten = unwritten[os.write(2, unwritten) :]

    with suppress(OSError, ValueError):  # stderr is closed: there is no other way to report
        within(_SAY_S, write)


def within(seconds: float, work: Callable[[], T]) -> T:
    """Runs `work` with a time limit. Returns what it returns, or raises what it raises; raises
    TimeoutError after `seconds`.

    `work` runs in a daemon thread. After a timeout the thread goes on, and its result is dropped.
    """
    future: Future[T] = Future()

    def run() -> None:
        """Runs `work` in the thread, and keeps its result or exception in `future`."""
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)
