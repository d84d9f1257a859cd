"""Text of others as a terminal may show it: every character visible, none that acts, and how many columns it takes.

Where terminals differ the larger width counts: a line may then end early, and never breaks.
"""

from __future__ import annotations

import codecs
import functools
import unicodedata
from collections.abc import Iterator
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
    num_marks, before, last = _MOST_MARKS, "", len(text) - 1  # no mark at the start: it would stand on what is before
    for place, char in enumerate(text):
        glyph = _glyph(char, encoding)
        if glyph.width == 0 and glyph.is_own:
            joins = char not in _JOINERS or (place < last and _is_joined(before) and _is_joined(text[place + 1]))
            num_marks += 1
            if num_marks > _MOST_MARKS or not joins:
                glyph = _escaped(char)
        else:
            num_marks = 0 if glyph.is_own else _MOST_MARKS
            if glyph.width == 1 and place < last and text[place + 1] == "\ufe0f":
                glyph = Glyph(glyph.shown, 2, glyph.is_own)  # the emoji form of a narrow character is wide
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
        shown = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
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
