"""What a user typed and cannot be used: one line and exit code 2."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import typing
from contextlib import suppress

_SAY_S = 2.0
# What moves a terminal's cursor, colours it or turns its text round: a message may quote a folder or a completion.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class ConfigError(ValueError):
    """Config, command line or data cannot be used. One line, also where it quotes a message or value of several."""

    def __str__(self) -> str:
        return " ".join(printable(super().__str__()).split("\n"))


def refuse(error: ConfigError) -> typing.NoReturn:
    """End this rank with one line and exit code 2. Under torchrun all ranks see the same mistake: the first of a node
    says so, and torchrun then ends the others, who wait for that; one that is left was alone with its mistake (a file
    that only its node lacks), and says it itself."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    say(f"error: {error}")
    raise SystemExit(2)


def say(text: str) -> None:
    """Show the last words of a process on its stderr, or give up after 2 s: their reader may stall (Ctrl-S) or be gone.

    Not through sys.stderr: another thread may be stuck in a write to it, and then holds its lock.
    """
    shown = printable(text)

    def write() -> None:
        left = f"{shown}\n".encode(errors="backslashreplace")
        with suppress(OSError):
            if sys.stderr is not sys.__stderr__:  # somebody who calls main() has put it elsewhere
                print(shown, file=sys.stderr, flush=True)
                return
            while left:
                left = left[os.write(2, left) :]

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_SAY_S)
