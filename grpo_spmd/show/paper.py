"""Lines of styled text that fit a width: cells of tables, wrapped text, curves of one row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

from grpo_spmd.show.text import Glyph, glyphs, is_in

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

    def _broken(self, text: str, width: int, styles: Styles) -> Iterator[tuple[list[tuple[Glyph, str]], int]]:
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
        self, text: str, num_head: int, num_tail: int, indent: int = 0, styles: Styles = "", hint: str = ""
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
        return "".join(" " if not count else bars[min(7, (count * 8 - 1) // most)] for count in found)


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
        own = [float(value) for value in values[begin:end] if value is not None and _is_finite(value)]
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
