"""Layout of text for a terminal: escaping, wrapping, tables, colours.

Text from models, data and other people's folders may hold control characters. rich prints ESC
and U+202E raw, so every text passes `characters` before it becomes a `rich.text.Text`, and markup
is never parsed. Widths are also computed here: rich counts Indic vowel signs, Hangul vowels and
joined emoji as narrower than many terminals draw them. Where terminals differ, the larger width is
used: a line may then end early, but no terminal has to wrap it.
"""

from __future__ import annotations

import codecs
import functools
import os
import shutil
import sys
import textwrap
import unicodedata
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice, repeat
from typing import NamedTuple

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text
from rich.theme import Theme

from grpo_spmd.files import show

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
    # Tokens whose logprobs of engine and policy differ, in three degrees.
    "near": "yellow",
    "over": "bold red",
    "far": "bold white on red",
}
Line = Text
Styles = Sequence[str] | str  # the style of each character, or one style for all

# From an eighth of the height to the full height.
BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = dict(zip(BARS, "_.:-=+*#", strict=True))
_MAX_MARKS = 8  # combining marks on one character; more of them would cover the lines around it
_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji need them between two characters
_EMOJI = range(0x1F300, 0x1FB00)
_VARIATION_SELECTORS = range(0xE0100, 0xE01F0)  # invisible, so that text can be hidden in them
# Moves the cursor to the top left corner and clears the screen.
_CLEAR = "\x1b[H\x1b[J"


class Character(NamedTuple):
    """One character of a source text as a terminal shows it."""

    shown: str  # the character itself, or an escape in its place
    width: int  # columns; 0 for a mark on the character before it
    is_escape: bool = False


def characters(text: str, encoding: str = "utf-8") -> Iterator[Character]:
    r"""Yields one Character for each character of `text`.

    A character is shown as an escape such as \x1b if it would move the cursor, change colours,
    reverse or hide text, or if `encoding` lacks it.
    """
    # Start at the limit, so that a mark at the beginning is escaped: a terminal would draw it on
    # whatever stands before the text.
    # `num_marks` counts the combining marks on the present character.
    num_marks = _MAX_MARKS
    for index, char in enumerate(text):
        character = _character(char, encoding)
        following = text[index + 1 : index + 2]
        if character.width == 0:
            joins = _is_joined(text[index - 1 : index]) and _is_joined(following)
            num_marks += 1
            # A joiner between other characters is invisible, and could hide a word from a search.
            if num_marks > _MAX_MARKS or (char in _JOINERS and not joins):
                character = _escaped(char)
        else:
            num_marks = _MAX_MARKS if character.is_escape else 0
            if character.width == 1 and following == "\ufe0f":
                # U+FE0F asks for the emoji form of a narrow character, which is wide.
                character = character._replace(width=2)
        yield character


@functools.lru_cache(1 << 14)
def _character(char: str, encoding: str) -> Character:
    """Returns how `char` is shown, without regard to the characters beside it."""
    code = ord(char)
    category = unicodedata.category(char)
    is_emoji = code in _EMOJI  # Python's tables lack the newest ones
    is_visible = category[0] not in "CZ" or category == "Zs" or is_emoji
    is_allowed = (is_visible and code not in _VARIATION_SELECTORS) or char in _JOINERS
    if not is_allowed or char.encode(encoding, "ignore") == b"":
        return Character(_ASCII_BARS[char], 1) if char in BARS else _escaped(char)
    # Spacing marks (Mc) count one column, though some terminals draw none.
    if category in ("Mn", "Me") or char in _JOINERS:
        return Character(char, 0)
    is_wide = unicodedata.east_asian_width(char) in "WF" or (category == "Cn" and is_emoji)
    return Character(char, 2 if is_wide else 1)


def _escaped(char: str) -> Character:
    r"""Returns the escape that is shown in place of `char`, such as \x1b."""
    escape = ascii(char)[1:-1]
    return Character(escape, len(escape), is_escape=True)


def _is_joined(char: str) -> bool:
    """Returns True if `char` is of a kind that a joiner (_JOINERS) can join to the next character.

    False if `char` is empty."""
    return bool(char) and unicodedata.category(char) in ("Lo", "So", "Mn", "Mc", "Sk")


def width_of(text: str) -> int:
    """Returns the number of columns that a shown text takes."""
    return sum(character.width for character in characters(text))


Cell = tuple[Character, str]  # a character and its style


class Column(NamedTuple):
    """One column of a table.

    Width 0 stands for the rest of the line; only the last column may have it."""

    title: str = ""
    width: int = 0
    align: str = ">"  # "<" or ">"
    style: str = ""


@dataclass(frozen=True)
class Terminal:
    """The terminal that stdout leads to. The defaults describe a file or pipe: plain text."""

    columns: int = 80
    rows: int = 0
    encoding: str = "utf-8"
    is_tty: bool = False  # knows escape sequences, so that a page can be redrawn
    has_colour: bool = False
    is_full: bool = False  # nothing is left out of texts and lists (--full)

    @property
    def ellipsis(self) -> str:
        """The sign for text that is left out, in the terminal's encoding."""
        return "…" if self.encoding == "utf-8" else "..."

    def resized(self, columns: int) -> Terminal:
        """Returns the same terminal with another number of columns, for a part of the page."""
        return replace(self, columns=columns)

    def limit(self, num: int) -> int | None:
        """Returns how many items of a list to show: `num`, or with --full all of them (None)."""
        return None if self.is_full else num

    def text(self, text: str, style: str = "") -> Line:
        """Returns all of `text` on one line."""
        return Text("".join(escaped for escaped, *_ in characters(text, self.encoding)), style)

    def fit(self, text: str, width: int, style: str = "") -> Line:
        """Returns `text` on one line of at most `width` columns, with an ellipsis if it is cut."""
        # A text may have megabytes, so only as many characters are looked at as can fit. At most
        # 8 marks, which have no width, follow a character.
        shown = list(islice(characters(text, self.encoding), (1 + _MAX_MARKS) * (width + 1)))
        ends = list(accumulate(character.width for character in shown))
        ellipsis = ""
        if ends and ends[-1] > width:
            ellipsis = self.ellipsis[:width]
            # Whole characters only: a wide one or an escape is not cut in half.
            shown = shown[: bisect_right(ends, width - len(ellipsis))]
        fitted = "".join(character.shown for character in shown)
        # A joiner before the ellipsis joins nothing, so it would become an escape.
        return Text(fitted.rstrip(_JOINERS) + ellipsis, style)

    def pad(self, text: str, width: int, style: str = "", align: str = "<") -> Line:
        """Returns `text` on one line of exactly `width` columns, with spaces on the right side.

        `align` ">" puts the spaces on the left side.
        """
        fitted = self.fit(text, width).plain
        spaces = " " * (width - width_of(fitted))
        return Text(spaces + fitted if align == ">" else fitted + spaces, style)

    def line(self, text: str, style: str = "", indent: int = 0) -> Line:
        """Returns `text` on one line of the terminal, behind `indent` spaces."""
        return Text.assemble(" " * indent, self.fit(text, self.columns - indent, style))

    def wrap(self, text: str, width: int, styles: Styles = "") -> Iterator[list[Cell]]:
        """Yields the lines of `text` as lists of cells, broken at newlines and at `width` columns.

        A line breaks after the last space in its second half, else inside a word. A newline of
        `text` is the last cell of its line; nothing is drawn for it. `styles` has a style for each
        character of `text`, or one for all.
        """
        char_styles = repeat(styles) if isinstance(styles, str) else styles
        cells: list[Cell] = []
        num_columns = 0
        after_space = 0  # number of cells up to and including the last space
        shown = characters(text, self.encoding)
        for char, character, style in zip(text, shown, char_styles, strict=False):
            is_newline = char == "\n"
            if is_newline or num_columns + character.width > width:
                # To break after a space early in the line would leave most of the line empty.
                is_word = not is_newline and after_space > len(cells) // 2
                cut = after_space if is_word else len(cells)
                yield cells[:cut] + [(Character("", 0), "")] * is_newline
                cells = cells[cut:]
                num_columns = sum(character.width for character, _ in cells)
                after_space = 0
            if not is_newline:
                cells.append((character, style))
                num_columns += character.width
                if char == " ":
                    after_space = len(cells)
        yield cells

    def excerpt(
        self, text: str, num_head: int, num_tail: int = 0, indent: int = 0, styles: Styles = ""
    ) -> Iterator[Line]:
        """Yields the first `num_head` and the last `num_tail` lines of a text, after wrapping.

        A line between them says how many characters were left out. With --full all is yielded.
        """
        width = max(8, self.columns - indent)
        begin = 0
        for cells in islice(self.wrap(text, width, styles), self.limit(num_head)):
            begin += len(cells)
            yield join_cells(cells, indent)
        if begin >= len(text):
            return
        # The last lines begin after this character: a line has about one for each column.
        rest = max(begin, len(text) - num_tail * self.columns)
        tail_styles = styles if isinstance(styles, str) else styles[rest:]
        # The text before `rest` is not wrapped, since it may have megabytes.
        tail = deque(self.wrap(text[rest:], width, tail_styles), maxlen=num_tail)
        num_left_out = len(text) - begin - sum(map(len, tail))
        if num_left_out:
            note = f"{self.ellipsis} {num_left_out:,} of {len(text):,} characters left out"
            yield self.line(f"{note} (--full shows them)", "dim", indent)
        yield from (join_cells(cells, indent) for cells in tail)

    def elide(self, lines: Iterable[Line], num_head: int, num_tail: int = 0) -> list[Line]:
        """Returns the first and the last lines, with a note instead of those between them.

        With --full, or if no line would be left out, all lines are returned.
        """
        lines = list(lines)
        num_hidden = len(lines) - num_head - num_tail
        if num_hidden > 0 and not self.is_full:
            note = self.line(f"{num_hidden} more (--full shows them)", "dim", 2)
            lines[num_head : num_head + num_hidden] = [note]
        return lines

    def hang(self, label: Line, text: str, style: str = "") -> Iterator[Line]:
        """Yields `text` to the right of `label`; all its lines begin in the same column.

        Of more than four lines only the first three and the last are shown, with a note between.
        """
        indent = width_of(label.plain)
        for index, line in enumerate(self.excerpt(text, 3, 1, indent=indent, styles=style)):
            yield line if index else Text.assemble(label, line[indent:])

    def words(self, text: str, label: str = "", indent: str = "") -> list[Line]:
        """Returns `text` wrapped at its spaces, with `label` before the first line and `indent`
        before the others.

        A word that is longer than a line stays whole, since it may be part of a command to copy.
        """
        lines = textwrap.wrap(
            self.text(" ".join(text.split())).plain,
            self.columns,
            initial_indent=label,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return list(map(Text, lines))

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Iterator[Line]:
        """Yields a table: the titles, if there are any, then a line for each row."""
        titles = [column.title for column in columns]
        rest = max(8, self.columns - sum(column.width for column in columns))
        for row in [titles, *rows] if any(titles) else rows:
            line = Text()
            for column, cell in zip(columns, row, strict=True):
                style = "dim" if row is titles else column.style
                line.append_text(self.pad(cell, column.width or rest, style, column.align))
            line.rstrip()
            yield line

    def paint(self, line: Line) -> str:
        """Returns a line as the text to write, with colour codes if the terminal has colours."""
        # rich 14's Text.render ignores the base style of a Text without spans. A Text that is
        # appended to another one gets a span for its base style.
        segments = Text().append_text(line).render(_styles_console(), end="")
        colours = ColorSystem.STANDARD if self.has_colour else None
        # Escape again, in case a caller built the line from raw text with control characters.
        return "".join(
            (style or Style()).render(self.text(text).plain, color_system=colours)
            for text, style, _ in segments
        ).rstrip(" ")

    def write(self, lines: Iterable[Line]) -> None:
        """Writes lines to stdout. Ends the process if the pipe's reader has ended (| head)."""
        for line in lines:
            self._show(self.paint(line))

    def redraw(self, lines: Sequence[Line], *, is_last: bool = False) -> None:
        """Clears the screen and draws a page, cut to the number of rows of the terminal.

        It is used by --follow. The last page is written in full, since it stays there and the user
        can scroll back.
        """
        page = list(lines)
        num_hidden = len(lines) - max(1, self.rows - 1)
        if num_hidden > 0 and not is_last:
            note = f"{num_hidden + 1} lines more on a higher terminal, or without --follow"
            page[-num_hidden - 1 :] = [self.line(note, "dim")]
        self._show(_CLEAR + "\n".join(map(self.paint, page)))

    def leave(self) -> None:
        """Ends the output after Ctrl-C: without colours, on a line of its own."""
        if self.is_tty:
            self._show("\x1b[0m" if self.has_colour else "")

    def _show(self, text: str) -> None:
        """Writes `text` to stdout. Ends the process, without an error, if nobody reads it."""
        if not show(text):
            raise SystemExit(0)


def find_terminal(is_full: bool = False) -> Terminal:
    """Returns the present size and abilities of the terminal that stdout leads to."""
    columns, rows = shutil.get_terminal_size((80, 24))
    is_tty = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    encoding = codecs.lookup(sys.stdout.encoding or "ascii").name
    # Python writes UTF-8 in the C locale. LC_ALL=C asks for ASCII; a locale that is merely not
    # set, as in most containers, says nothing about the terminal.
    if os.environ.get("LC_ALL") in ("C", "POSIX") and "PYTHONIOENCODING" not in os.environ:
        encoding = "ascii"
    return Terminal(
        # A narrower terminal has to wrap lines itself. Lines of more than 160 columns are hard to
        # read.
        columns=min(160, max(60, columns)),
        rows=rows,
        encoding=encoding,
        is_tty=is_tty,
        has_colour=is_tty and not os.environ.get("NO_COLOR"),
        is_full=is_full,
    )


@functools.cache
def _styles_console() -> Console:
    """Returns a console that resolves the names of STYLES for rich; nothing is printed to it."""
    return Console(theme=Theme(STYLES), markup=False, highlight=False, emoji=False)


def join_cells(cells: Iterable[Cell], indent: int = 0) -> Line:
    """Returns the cells as one line, behind `indent` spaces.

    Escapes that have no style of their own get the style "escape"."""
    line = Text(" " * indent)
    for style, group in groupby(cells, lambda cell: cell[1] or "escape" * cell[0].is_escape):
        line.append("".join(character.shown for character, _ in group), style or None)
    # A joiner at the end of a line joins nothing: `paint` would show it as an escape, which makes
    # the line too wide.
    if line.plain.endswith(tuple(_JOINERS)):
        line.right_crop(1)
    return line
