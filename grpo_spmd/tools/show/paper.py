"""Text of others as a terminal may show it: every character visible, none that acts, and how many columns it takes.

Where terminals differ the larger width counts: a line may then end early, and never breaks.
"""

from __future__ import annotations

import codecs
import functools
import math
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

_MOST_MARKS = 8  # on one character; more of them would cover the lines around it
_JOINERS = "\u200c\u200d"  # which Persian, Indic scripts and emoji need between two characters
_EMOJI = range(0x1F300, 0x1FB00)
_UNSEEN_MARKS = range(0xE0100, 0xE01F0)  # variation selectors, in which text can be hidden


class Glyph(NamedTuple):
    """A character of the source as it is shown."""

    shown: str
    width: int  # columns
    is_own: bool  # False: it is shown by an escape


def glyphs(text: str, encoding: str) -> Iterator[Glyph]:
    """One for each character of `text`: itself, or an escape such as \\x1b where it would move, colour, turn round or
    hide something, or is not in `encoding`."""
    if text.isascii() and text.isprintable():
        yield from map(_ascii, text)
        return
    num_marks, before, last = (
        _MOST_MARKS,
        "",
        len(text) - 1,
    )  # no mark at the start: it would stand on what is before
    for place, char in enumerate(text):
        glyph = _glyph(char, encoding)
        if glyph.width == 0 and glyph.is_own:
            joins = char not in _JOINERS or (
                place < last and _is_joined(before) and _is_joined(text[place + 1])
            )
            num_marks += 1
            if num_marks > _MOST_MARKS or not joins:
                glyph = _escaped(char)
        else:
            num_marks = 0 if glyph.is_own else _MOST_MARKS
            if glyph.width == 1 and place < last and text[place + 1] == "\ufe0f":
                glyph = Glyph(
                    glyph.shown, 2, glyph.is_own
                )  # the emoji form of a narrow character is wide
        before = char
        yield glyph


@functools.cache
def _ascii(char: str) -> Glyph:
    return Glyph(char, 1, True)


@functools.lru_cache(1 << 14)
def _glyph(char: str, encoding: str) -> Glyph:
    """Width 0: it stands on the character before it, or joins two."""
    code, kind = ord(char), unicodedata.category(char)
    is_emoji = code in _EMOJI  # newer ones are not in Python's tables
    is_plain = (kind[0] not in "CZ" or kind == "Zs" or is_emoji) and code not in _UNSEEN_MARKS
    if not (is_plain or char in _JOINERS) or not is_in(char, encoding):
        return _escaped(char)
    if kind in ("Mn", "Me") or char in _JOINERS:
        return Glyph(char, 0, True)
    is_wide = unicodedata.east_asian_width(char) in "WF" or (kind == "Cn" and is_emoji)
    return Glyph(char, 2 if is_wide else 1, True)


def _escaped(char: str) -> Glyph:
    shown = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if shown is None:
        code = ord(char)
        shown = (
            f"\\x{code:02x}"
            if code < 0x100
            else f"\\u{code:04x}"
            if code < 0x10000
            else f"\\U{code:08x}"
        )
    return Glyph(shown, len(shown), False)


def _is_joined(char: str) -> bool:
    return bool(char) and unicodedata.category(char) in ("Lo", "So", "Mn", "Mc", "Sk")


def is_in(char: str, encoding: str) -> bool:
    """Whether `encoding` has that character."""
    try:
        codecs.encode(char, encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def width_of(shown: str) -> int:
    """Columns of what `glyphs` made of a text."""
    return sum(glyph.width for glyph in glyphs(shown, "utf-8"))


# Lines of styled text that fit a width: cells of tables, wrapped text, curves of one row.


_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_ESCAPE = "escape"  # the style of what is no character of the text
Value = float | int | None
Styles = Sequence[str] | str


class Span(NamedTuple):
    """Characters that a terminal may be given. Only Paper makes them of text that others wrote."""

    shown: str
    style: str = ""


Line = list[Span]


class Wrapped(NamedTuple):
    line: Line
    num_chars: int  # of the source


@dataclass(frozen=True)
class Paper:
    """What lines are written on: so many columns, characters of `encoding`."""

    columns: int
    encoding: str

    @property
    def is_unicode(self) -> bool:
        return self.encoding == "utf-8"

    @property
    def ellipsis(self) -> str:
        return "…" if self.is_unicode and is_in("…", self.encoding) else "..."

    def span(self, text: str, style: str = "") -> Span:
        """All of `text`, on one line."""
        return Span("".join(glyph.shown for glyph in glyphs(text, self.encoding)), style)

    def fitted(self, text: str, width: int, style: str = "") -> Span:
        """`text` on one line of at most `width` columns, with an ellipsis for what is left out."""
        return Span(self._fitted(text, width)[0], style)

    def padded(self, text: str, width: int, style: str = "") -> Span:
        """`text` on one line of exactly `width` columns."""
        shown, used = self._fitted(text, width)
        return Span(shown + " " * (width - used), style)

    def _fitted(self, text: str, width: int) -> tuple[str, int]:
        ellipsis = self.ellipsis[: max(0, width)]
        kept, used, cut, width_at_cut = list[str](), 0, 0, 0
        for glyph in glyphs(text, self.encoding):
            if used + glyph.width > width:
                return "".join(kept[:cut]) + ellipsis, width_at_cut + len(ellipsis)
            kept.append(glyph.shown)
            used += glyph.width
            if used <= width - len(ellipsis):
                cut, width_at_cut = len(kept), used
        return "".join(kept), used

    def wrapped(self, text: str, indent: int = 0, styles: Styles = "") -> Iterator[Wrapped]:
        """`text` broken at its newlines and at the width, at a space where there is one in the line's second half.
        `styles`: of each of its characters, or one of all."""
        width, margin = max(8, self.columns - indent), Span(" " * indent)
        begin = 0
        for paragraph in text.split("\n"):
            own = styles if isinstance(styles, str) else styles[begin : begin + len(paragraph)]
            begin += len(paragraph) + 1
            waiting = None  # the last line of a paragraph has its newline
            for cells, num_chars in self._broken(paragraph, width, own):
                if waiting is not None:
                    yield waiting
                waiting = Wrapped([margin, *_joined(cells)], num_chars)
            if waiting is not None:
                yield waiting._replace(num_chars=waiting.num_chars + (begin <= len(text)))

    def _broken(
        self, text: str, width: int, styles: Styles
    ) -> Iterator[tuple[list[tuple[Glyph, str]], int]]:
        waiting: list[tuple[Glyph, str]] = []
        same = styles if isinstance(styles, str) else ""
        used, space = 0, 0  # `space`: how many of `waiting` end with the last space
        for place, glyph in enumerate(glyphs(text, self.encoding)):
            if used + glyph.width > width:
                cut = space if space > len(waiting) // 2 else len(waiting)
                yield waiting[:cut], cut
                waiting = waiting[cut:]
                used, space = sum(each.width for each, _ in waiting), 0
            waiting.append((glyph, same if same or not styles else styles[place]))
            used += glyph.width
            if glyph.shown == " ":
                space = len(waiting)
        yield waiting, len(waiting)

    def excerpt(
        self,
        text: str,
        num_head: int,
        num_tail: int,
        indent: int = 0,
        styles: Styles = "",
        hint: str = "",
    ) -> Iterator[Line]:
        """The first and the last lines of `text` as it is wrapped, and between them how much was left out."""
        begin = 0
        for wrapped in islice(self.wrapped(text, indent, styles), num_head):
            begin += wrapped.num_chars
            yield wrapped.line
        if begin >= len(text):
            return
        rest = max(begin, len(text) - num_tail * self.columns)
        own = styles if isinstance(styles, str) else styles[rest:]
        last = deque(self.wrapped(text[rest:], indent, own), maxlen=num_tail)
        if left_out := len(text) - begin - sum(wrapped.num_chars for wrapped in last):
            said = f"{self.ellipsis} {left_out:,} of {len(text):,} characters left out{hint}"
            yield [Span(" " * indent), self.fitted(said, self.columns - indent, "dim")]
        yield from (wrapped.line for wrapped in last)

    def curve(self, values: Sequence[Value], width: int, largest: bool = False) -> str:
        """One character for each value, or for the mean (or `largest`) of several where there is no room; between the
        least and the largest of what is drawn. A space: no value."""
        drawn = binned(values, width, largest)
        known = [value for value in drawn if value is not None]
        low, high = (min(known), max(known)) if known else (0.0, 0.0)
        bars = _BARS if self.is_unicode else _PLAIN_BARS
        heights = [None if value is None else share(value, low, high) for value in drawn]
        return "".join(" " if of is None else bars[min(7, int(of * 8))] for of in heights)

    def bar(self, frac: float, width: int) -> str:
        """`frac` of `width` columns, rounded."""
        num = round(min(1.0, max(0.0, frac)) * width)
        return ("█" if self.is_unicode else "#") * num

    def counts(self, values: Sequence[Value], low: float, high: float, width: int = 8) -> str:
        """How many of `values` are in each of `width` parts of low..high, as heights. A space: none."""
        found = [0] * width
        for value in values:
            if value is not None and _is_finite(value):
                found[min(width - 1, int(share(value, low, high) * width))] += 1
        bars, most = _BARS if self.is_unicode else _PLAIN_BARS, max(1, *found)
        return "".join(
            " " if not count else bars[min(7, (count * 8 - 1) // most)] for count in found
        )


def _joined(cells: Sequence[tuple[Glyph, str]]) -> Line:
    """Neighbours of one style as one span."""
    line = list[Span]()
    texts, style = list[str](), ""
    for glyph, own in cells:
        of = own if glyph.is_own else own or _ESCAPE
        if of != style and texts:
            line.append(Span("".join(texts), style))
            texts = []
        texts.append(glyph.shown)
        style = of
    return [*line, Span("".join(texts), style)] if texts else line


def binned(values: Sequence[Value], width: int, largest: bool) -> list[float | None]:
    """At most `width` of them, each of as many neighbours as the others, or one more. None: no finite value there."""
    num = max(1, min(width, len(values)))
    edges = [place * len(values) // num for place in range(num + 1)]
    found = list[float | None]()
    for begin, end in pairwise(edges):
        own = [
            float(value) for value in values[begin:end] if value is not None and _is_finite(value)
        ]
        found.append((max(own) if largest else math.fsum(own) / len(own)) if own else None)
    return found


def share(value: float, low: float, high: float) -> float:
    """Where `value` is between them, 0 to 1; in the middle where they are one."""
    span = high / 2 - low / 2  # halves: the whole may be beyond what a float holds
    return min(1.0, max(0.0, (value / 2 - low / 2) / span)) if span > 0 else 0.5


def _is_finite(value: float | int) -> bool:
    return abs(value) <= 1e300  # NaN is not, nor a whole number that no float holds


def number(value: object) -> str:
    """In at most 7 characters: 4 digits, or a power of ten."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if not _is_finite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    size = abs(value)
    if isinstance(value, int) and size < 1_000_000:
        return str(value)
    if 0.0009995 <= size < 999_999.5:
        digits = min(4, max(0, 3 - math.floor(math.log10(size))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    text = f"{value:.1e}"
    mantissa, power = text.split("e")
    short = f"{mantissa}e{int(power)}"
    return short if len(short) <= 7 else f"{value:.0e}".split("e")[0] + f"e{int(power)}"
