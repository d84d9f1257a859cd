"""The terminal, or the file or pipe in its place: its size and colours, and the one way out to it."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from grpo_spmd.config.errors import ConfigError, printable, refuse
from grpo_spmd.tools.show.paper import Line, Paper

_NARROWEST, _WIDEST = 60, 160  # a narrower terminal breaks lines itself
# Of the 16 colours that every terminal has; a theme makes them readable on its ground.
_STYLES = {
    "title": "1",
    "dim": "2",
    "escape": "7",
    "mark": "30;43",
    "good": "32",
    "ok": "32",
    "warning": "33",
    "bad": "31",
    "role": "1;36",
    "curve": "36",
    "near": "33",  # tokens on which engine and policy differ
    "over": "1;31",
    "far": "1;37;41",
}


@dataclass(frozen=True)
class Terminal:
    """What stdout leads to. Where it is no terminal lines are plain text of 80 columns, or COLUMNS."""

    columns: int
    rows: int
    encoding: str
    is_tty: bool
    has_colour: bool

    @property
    def paper(self) -> Paper:
        return Paper(self.columns, self.encoding)

    def painted(self, line: Line) -> str:
        """`line` with its colours, where there are any."""
        parts = []
        for shown, style in line:
            own = printable(shown)  # nothing, whatever went wrong above
            parts.append(
                f"\x1b[{_STYLES[style]}m{own}\x1b[0m" if self.has_colour and style and own else own
            )
        return "".join(parts).rstrip(" ")

    def write(self, lines: Iterable[Line]) -> None:
        """Ends the process where nobody reads any more (| head)."""
        for line in lines:
            self._out(self.painted(line) + "\n")
        self._out("", flush=True)

    def redraw(self, lines: list[Line]) -> None:
        """`lines` in the place of what was there, as many as there are rows for."""
        room = max(1, self.rows - 1)
        shown = lines[:room]
        if len(lines) > room:
            said = f"{len(lines) - room + 1} lines more on a higher terminal, or without --follow"
            shown = [*lines[: room - 1], [self.paper.fitted(said, self.columns, "dim")]]
        # The row is emptied first: behind a full one the cursor is still on its last character.
        self._out(
            "\x1b[H" + "".join(f"\x1b[K{self.painted(line)}\n" for line in shown) + "\x1b[J",
            flush=True,
        )

    def clear(self) -> None:
        self._out("\x1b[H\x1b[J")

    def leave(self) -> None:
        """After Ctrl-C: without colours, on a line of its own."""
        if self.is_tty:
            self._out("\x1b[0m\n" if self.has_colour else "\n", flush=True)

    def _out(self, text: str, flush: bool = False) -> None:
        try:
            sys.stdout.write(text)
            if flush:
                sys.stdout.flush()
        except OSError as error:
            _leave(error)


def _leave(error: OSError) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer
    if not isinstance(error, BrokenPipeError):
        refuse(ConfigError(f"stdout: {error.strerror}"))
    raise SystemExit(0)


def find_terminal() -> Terminal:
    """That of this process, as it is now."""
    columns, rows = shutil.get_terminal_size((80, 24))
    is_tty = sys.stdout.isatty()
    has_escapes = is_tty and os.environ.get("TERM", "dumb") not in ("", "dumb")
    return Terminal(
        columns=min(_WIDEST, max(_NARROWEST, columns)),
        rows=rows if has_escapes else 0,
        encoding=_encoding(),
        is_tty=has_escapes,
        has_colour=has_escapes and not os.environ.get("NO_COLOR"),
    )


def _encoding() -> str:
    """Python writes UTF-8 in the C locale. Whoever asks for that locale by LC_ALL means ASCII; one that is merely not
    set, as in most containers, says nothing of the terminal."""
    if os.environ.get("LC_ALL") in ("C", "POSIX") and "PYTHONIOENCODING" not in os.environ:
        return "ascii"
    return codecs.lookup(sys.stdout.encoding or "ascii").name
