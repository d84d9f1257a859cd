"""Layout of text for a terminal: escaping, wrapping, tables, charts of one row, colours.

Text from models, data and other people's folders may hold control characters. rich prints ESC
and U+202E raw, so every text passes `characters` before it becomes a `rich.text.Text`, and markup
is never parsed. Widths are our own too: rich counts Indic vowel signs, Hangul vowels and joined
emoji as narrower than many terminals draw them. Where terminals differ the larger width counts: a
line may then end early, but it never breaks.
"""

from __future__ import annotations

import codecs
import functools
import os
import shutil
import sys
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, repeat
from typing import NamedTuple, NoReturn

from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from grpo_spmd.config.errors import ConfigError, refuse

MIN_COLUMNS = 60
MAX_COLUMNS = 160
# Only the 16 colours that every terminal has: the user's theme makes them readable.
STYLES = {
    "title": "bold",
    "dim": "dim",
    "escape": "reverse",
    "mark": "black on yellow",
    "good": "green",
    "ok": "green",
    "warning": "yellow",
    "bad": "red",
    "role": "bold cyan",
    "curve": "cyan",
    "near": "yellow",  # tokens on which engine and policy differ, in three degrees
    "over": "bold red",
    "far": "bold white on red",
}
Line = Text
Styles = Sequence[str] | str  # the style of each character, or one style for all

_MAX_MARKS = 8  # combining marks on one character; more of them would cover the lines around it
_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji need them between two characters
_EMOJI = range(0x1F300, 0x1FB00)
_VARIATION_SELECTORS = range(0xE0100, 0xE01F0)  # invisible, so that text can be hidden in them


class Character(NamedTuple):
    """One character of a source text as a terminal shows it."""

    shown: str
    width: int  # columns; 0 for a mark on the character before it
    is_escape: bool = False


def characters(text: str, encoding: str = "utf-8") -> Iterator[Character]:
    r"""Yields one Character for each character of `text`.

    A character is shown as an escape such as \x1b if it would move the cursor, change colours,
    reverse or hide text, or if `encoding` lacks it.
    """
    if text.isascii() and text.isprintable():
        yield from map(_ascii_character, text)
        return
    # No mark may begin the text: it would stand on the character before the text.
    num_marks = _MAX_MARKS
    for index, char in enumerate(text):
        character = _character(char, encoding)
        following = text[index + 1 : index + 2]
        if character.width == 0:
            joins = _is_joined(text[index - 1 : index]) and _is_joined(following)
            num_marks += 1
            # A joiner that joins nothing is invisible, and could hide a word from a search.
            if num_marks > _MAX_MARKS or (char in _JOINERS and not joins):
                character = _escaped(char)
        else:
            num_marks = _MAX_MARKS if character.is_escape else 0
            if character.width == 1 and following == "\ufe0f":
                # U+FE0F asks for the emoji form of a narrow character, which is wide.
                character = character._replace(width=2)
        yield character


@functools.cache
def _ascii_character(char: str) -> Character:
    return Character(char, 1)


@functools.lru_cache(1 << 14)
def _character(char: str, encoding: str) -> Character:
    code = ord(char)
    category = unicodedata.category(char)
    is_emoji = code in _EMOJI  # Python's tables lack the newest ones
    is_visible = category[0] not in "CZ" or category == "Zs" or is_emoji
    is_allowed = (is_visible and code not in _VARIATION_SELECTORS) or char in _JOINERS
    if not is_allowed or not is_encodable(char, encoding):
        return _escaped(char)
    # Spacing marks (Mc) count one column, though some terminals draw none.
    if category in ("Mn", "Me") or char in _JOINERS:
        return Character(char, 0)
    is_wide = unicodedata.east_asian_width(char) in "WF" or (category == "Cn" and is_emoji)
    return Character(char, 2 if is_wide else 1)


def _escaped(char: str) -> Character:
    escape = ascii(char)[1:-1]
    return Character(escape, len(escape), is_escape=True)


def _is_joined(char: str) -> bool:
    return bool(char) and unicodedata.category(char) in ("Lo", "So", "Mn", "Mc", "Sk")


def is_encodable(char: str, encoding: str) -> bool:
    """Returns True if `encoding` has the character."""
    try:
        codecs.encode(char, encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def width_of(text: str) -> int:
    """Returns the number of columns that a shown text takes."""
    return sum(character.width for character in characters(text))


Cell = tuple[Character, str]  # a character and its style


class WrappedLine(NamedTuple):
    """One line of a wrapped text."""

    line: Line
    num_chars: int  # of the source text, with the newline that ends the paragraph


class Column(NamedTuple):
    """One column of a table. The width is that of the widest cell unless it is given."""

    title: str = ""
    align: str = "<"  # "<" or ">"
    width: int | None = None
    style: str = ""


@dataclass(frozen=True)
class Terminal:
    """The terminal that stdout leads to. The defaults describe a file or pipe: plain text."""

    columns: int = 80
    rows: int = 0
    encoding: str = "utf-8"
    is_tty: bool = False  # knows escape sequences, so that a page can be redrawn
    has_colour: bool = False

    @property
    def is_unicode(self) -> bool:
        return self.encoding == "utf-8"

    @property
    def ellipsis(self) -> str:
        return "…" if self.is_unicode else "..."

    def resized(self, columns: int) -> Terminal:
        """Returns the same terminal with another number of columns, for a part of the page."""
        return replace(self, columns=columns)

    def text(self, text: str, style: str = "") -> Line:
        """Returns all of `text` on one line."""
        return Text("".join(escaped for escaped, *_ in characters(text, self.encoding)), style)

    def fit(self, text: str, width: int, style: str = "") -> Line:
        """Returns `text` on one line of at most `width` columns, with an ellipsis if it is cut."""
        return Text(self._fit(text, width)[0], style)

    def pad(self, text: str, width: int, style: str = "", align: str = "<") -> Line:
        """Returns `text` on one line of exactly `width` columns, with spaces on the right side.

        `align` ">" puts the spaces on the left side.
        """
        fitted, num_columns = self._fit(text, width)
        spaces = " " * (width - num_columns)
        return Text(spaces + fitted if align == ">" else fitted + spaces, style)

    def _fit(self, text: str, width: int) -> tuple[str, int]:
        """Returns the fitted text and its number of columns."""
        ellipsis = self.ellipsis[: max(0, width)]
        pieces: list[str] = []
        num_columns = 0
        # How much of the text stays if an ellipsis must follow it.
        num_kept = 0
        kept_columns = 0
        for character in characters(text, self.encoding):
            if num_columns + character.width > width:
                # A joiner before the ellipsis joins nothing, so it would become an escape.
                start = "".join(pieces[:num_kept]).rstrip(_JOINERS)
                return start + ellipsis, kept_columns + len(ellipsis)
            pieces.append(character.shown)
            num_columns += character.width
            # Whole characters only: a wide one or an escape is not cut in half.
            if num_columns <= width - len(ellipsis):
                num_kept = len(pieces)
                kept_columns = num_columns
        return "".join(pieces), num_columns

    def wrap(self, text: str, indent: int = 0, styles: Styles = "") -> Iterator[WrappedLine]:
        """Yields the lines of `text`, broken at its newlines and at the terminal's width.

        A line breaks at the last space in its second half, else inside a word.
        """
        width = max(8, self.columns - indent)
        end = 0
        for paragraph in text.split("\n"):
            begin = end
            end = begin + len(paragraph) + 1
            lines = _break_paragraph(
                zip(characters(paragraph, self.encoding), _cut(styles, begin), strict=False), width
            )
            num_chars = 0
            for cells in lines:
                num_chars += len(cells)
                # The last line of a paragraph counts its newline, which the last paragraph lacks.
                has_newline = num_chars == len(paragraph) and end <= len(text)
                yield WrappedLine(_joined(cells, indent), len(cells) + has_newline)

    def excerpt(
        self,
        text: str,
        num_head: int,
        num_tail: int = 0,
        indent: int = 0,
        styles: Styles = "",
        hint: str = "",
    ) -> Iterator[Line]:
        """Yields the first and the last lines of `text`, and how much is left out between them."""
        begin = 0
        for wrapped in islice(self.wrap(text, indent, styles), num_head):
            begin += wrapped.num_chars
            yield wrapped.line
        if begin >= len(text):
            return
        # The tail's lines cannot hold more characters than this.
        rest = max(begin, len(text) - num_tail * self.columns)
        tail_styles = styles if isinstance(styles, str) else styles[rest:]
        # Only the end is wrapped again: a text may have megabytes.
        tail = deque(self.wrap(text[rest:], indent, tail_styles), maxlen=num_tail)
        num_left_out = len(text) - begin - sum(wrapped.num_chars for wrapped in tail)
        if num_left_out:
            note = f"{self.ellipsis} {num_left_out:,} of {len(text):,} characters left out{hint}"
            yield Text.assemble(" " * indent, self.fit(note, self.columns - indent, "dim"))
        yield from (wrapped.line for wrapped in tail)

    def hang(self, label: Line, text: str, style: str = "", max_lines: int = 4) -> Iterator[Line]:
        """Yields `label`, and `text` wrapped beside it with a hanging indent."""
        indent = width_of(label.plain)
        lines = self.resized(self.columns - indent).excerpt(text, max_lines, styles=style)
        for index, line in enumerate(lines):
            yield Text.assemble(" " * indent if index else label, line)

    def words(self, text: str, label: str = "", indent: str = "") -> Iterator[Line]:
        """Yields `text` broken at its spaces; the first line begins with `label`, the others with
        `indent`.

        A word that is longer than a line stays whole, since it may be a command to copy.
        """
        line = label
        is_empty = True
        for word in self.text(text.replace("\n", " ")).plain.split():
            if not is_empty and width_of(f"{line} {word}") > self.columns:
                yield Text(line)
                line = indent
                is_empty = True
            line += word if is_empty else f" {word}"
            is_empty = False
        yield Text(line)

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str | Line]], gap: int = 2
    ) -> Iterator[Line]:
        """Yields a table: the titles, if there are any, then a line for each row.

        A cell may be text or a finished Line. The last column gets the rest of the line.
        """
        titles = [column.title for column in columns]
        widths = [
            column.width or max(width_of(_plain(cell)) for cell in cells)
            for column, *cells in zip(columns, titles, *rows, strict=True)
        ]
        if columns[-1].align == "<":
            widths[-1] = max(8, self.columns - sum(widths[:-1]) - gap * (len(widths) - 1))
        for row in [titles, *rows] if any(titles) else rows:
            line = Text()
            for column, width, cell in zip(columns, widths, row, strict=True):
                if isinstance(cell, str):
                    style = "dim" if row is titles else column.style
                    cell = self.pad(cell, width, style, column.align)
                line.append_text(cell)
                line.append(" " * (gap + width - width_of(cell.plain)))
            line.rstrip()
            yield line

    def paint(self, line: Line) -> str:
        """Returns the characters and, on a terminal, the colour codes of a line."""
        # rich 14's Text.render ignores the base style of a Text without spans. A Text that is
        # appended to another one gets a span for its base style.
        line = Text().append_text(line)
        # Escaped again: nothing may act even if a caller built the line from raw text.
        segments = line.render(_styles_console(), end="")
        painted = [
            (self.text(segment.text).plain, segment.style) for segment in segments if segment.text
        ]
        if not self.has_colour:
            return "".join(escaped for escaped, _ in painted).rstrip(" ")
        return "".join(
            style.render(escaped, color_system=ColorSystem.STANDARD) if style else escaped
            for escaped, style in painted
        ).rstrip(" ")

    def write(self, lines: Iterable[Line]) -> None:
        """Writes lines to stdout. Ends the process if nobody reads any more (| head)."""
        for line in lines:
            self._write(self.paint(line) + "\n")
        self._write("", flush=True)

    def redraw(self, lines: Sequence[Line]) -> None:
        """Draws a page over the one before, with as many lines as the terminal has rows."""
        num_rows = max(1, self.rows - 1)
        page = list(lines[:num_rows])
        if len(lines) > num_rows:
            num_hidden = len(lines) - num_rows + 1
            note = f"{num_hidden} lines more on a higher terminal, or without --follow"
            page[-1] = self.fit(note, self.columns, "dim")
        # Each row is emptied first: after a full row the cursor is still on its last character.
        rows = "".join(f"\x1b[K{self.paint(line)}\n" for line in page)
        self._write(f"\x1b[H{rows}\x1b[J", flush=True)

    def clear(self) -> None:
        self._write("\x1b[H\x1b[J")

    def leave(self) -> None:
        """Ends the output after Ctrl-C: without colours, on a line of its own."""
        if self.is_tty:
            self._write("\x1b[0m\n" if self.has_colour else "\n", flush=True)

    def _write(self, text: str, flush: bool = False) -> None:
        try:
            sys.stdout.write(text)
            if flush:
                sys.stdout.flush()
        except OSError as error:
            _exit_on_write_error(error)


def find_terminal() -> Terminal:
    """Returns the terminal of this process as it is now."""
    columns, rows = shutil.get_terminal_size((80, 24))
    is_tty = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    return Terminal(
        # A narrower terminal breaks lines itself; a wider one gets unreadable lines.
        columns=min(MAX_COLUMNS, max(MIN_COLUMNS, columns)),
        rows=rows if is_tty else 0,
        encoding=_stdout_encoding(),
        is_tty=is_tty,
        has_colour=is_tty and not os.environ.get("NO_COLOR"),
    )


def _stdout_encoding() -> str:
    # Python writes UTF-8 in the C locale. LC_ALL=C asks for ASCII; a locale that is merely not
    # set, as in most containers, says nothing about the terminal.
    if os.environ.get("LC_ALL") in ("C", "POSIX") and "PYTHONIOENCODING" not in os.environ:
        return "ascii"
    return codecs.lookup(sys.stdout.encoding or "ascii").name


def _exit_on_write_error(error: OSError) -> NoReturn:
    # Python flushes its buffer once more at exit: that goes to the null device.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not isinstance(error, BrokenPipeError):
        refuse(ConfigError(f"stdout: {error.strerror}"))
    raise SystemExit(0)


@functools.cache
def _styles_console() -> Console:
    """Returns a console that only resolves the names of styles; it prints nothing."""
    return Console(theme=Theme(STYLES), markup=False, highlight=False, emoji=False)


def _cut(styles: Styles, begin: int) -> Iterable[str]:
    return repeat(styles) if isinstance(styles, str) else islice(styles, begin, None)


def _break_paragraph(cells: Iterable[Cell], width: int) -> Iterator[list[Cell]]:
    waiting: list[Cell] = []
    num_columns = 0
    after_space = 0  # number of waiting cells up to and including the last space
    for cell in cells:
        character = cell[0]
        if num_columns + character.width > width:
            # A space early in the line would leave most of it empty.
            cut = after_space if after_space > len(waiting) // 2 else len(waiting)
            yield waiting[:cut]
            waiting = waiting[cut:]
            num_columns = sum(character.width for character, _ in waiting)
            after_space = 0
        waiting.append(cell)
        num_columns += character.width
        if character.shown == " ":
            after_space = len(waiting)
    yield waiting


def _joined(cells: Iterable[Cell], indent: int) -> Line:
    """Returns cells as one line in which neighbours of the same style are one piece."""
    line = Text(" " * indent)
    for style, group in groupby(cells, lambda cell: cell[1] or "escape" * cell[0].is_escape):
        line.append("".join(character.shown for character, _ in group), style or None)
    # A joiner at the end of a line joins nothing, so it would become an escape, and too wide.
    if line.plain.endswith(tuple(_JOINERS)):
        line.right_crop(1)
    return line


def _plain(cell: str | Line) -> str:
    return cell.plain if isinstance(cell, Text) else cell
