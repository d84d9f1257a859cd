"""What a terminal is given of texts that others wrote, and how wide it is; curves and numbers by
hand."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable

import pytest

from grpo_spmd.tools.show.overview import bar, curve, histogram, number
from grpo_spmd.tools.terminal import Cell, Column, Line, Terminal, characters, join_cells, width_of

TERMINAL = Terminal()
# Each: the text, what of it a terminal is given, and its columns by the tables of Unicode.
SHOWN = [
    ("plain", "plain", 5),
    ("\u4f60\u597d", "\u4f60\u597d", 4),  # CJK: two columns each
    ("\uff21", "\uff21", 2),  # a full-width letter
    ("\uff76", "\uff76", 1),  # a half-width one
    ("e\u0301", "e\u0301", 1),  # a mark on its letter
    ("\u0301e", "\\u0301e", 7),  # one without: it would stand on what is before
    ("\U0001f600", "\U0001f600", 2),
    (
        "\U0001f468\u200d\U0001f469",
        "\U0001f468\u200d\U0001f469",
        4,
    ),  # at most, where a terminal does not join them
    ("\u2764\ufe0f", "\u2764\ufe0f", 2),  # the emoji form of a narrow sign
    ("\u2764", "\u2764", 1),
    ("\U0001fae8", "\U0001fae8", 2),  # newer than Python 3.11's tables
    ("a\u200db", "a\\u200db", 8),  # a joiner that joins nothing hides
    ("\u0646\u200c\u0647", "\u0646\u200c\u0647", 2),  # Persian needs it
    ("\x1b[31m", "\\x1b[31m", 8),
    ("a\rb\tc\nd", "a\\rb\\tc\\nd", 10),
    ("\x9b31m\x85\x7f\x00", "\\x9b31m\\x85\\x7f\\x00", 19),
    ("\u202etxt.exe\u2066", "\\u202etxt.exe\\u2066", 19),
    ("\u200b\ufeff\u00ad\u2028", "\\u200b\\ufeff\\xad\\u2028", 22),
    ("\ud800x\udfff", "\\ud800x\\udfff", 13),
    ("\U000e0041", "\\U000e0041", 10),  # a tag: letters that nobody sees
    ("x\U000e0100", "x\\U000e0100", 11),  # a variation selector in which text is hidden
    ("\ue000\U0010ffff", "\\ue000\\U0010ffff", 16),  # of private use, and no character
]


@pytest.mark.parametrize(("text", "shown", "width"), SHOWN)
def test_what_is_shown_and_how_wide(text: str, shown: str, width: int) -> None:
    assert "".join(character.shown for character in characters(text, "utf-8")) == shown
    assert sum(character.width for character in characters(text, "utf-8")) == width
    assert len(list(characters(text, "utf-8"))) == len(
        text
    )  # one each: colours of tokens rely on it


def test_no_character_of_unicode_acts() -> None:
    """Each by itself: nothing that a terminal takes for a command, that hides or that turns text
    round."""
    for code in (
        *range(0x20000),
        *range(0xE0000, 0xE1100),
        *range(0x10FF00, 0x110000),
    ):  # between them: CJK, nothing
        for character in characters(chr(code), "utf-8"):
            kinds = {unicodedata.category(char) for char in character.shown}
            assert not kinds & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}, hex(code)
            assert character.width > 0


def test_many_marks_do_not_cover_the_lines_around() -> None:
    displayed = TERMINAL.text("a" + "\u0301" * 100).plain
    assert displayed == "a" + "\u0301" * 8 + "\\u0301" * 92


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1"])
def test_only_characters_of_the_encoding_are_written(encoding: str) -> None:
    terminal = Terminal(40, encoding=encoding)
    text = "".join(map(chr, range(0x3000)))
    lines = [
        *terminal.excerpt(text, 5, 5),
        terminal.fit(text, 20),
        terminal.pad(text, 20),
        terminal.text(curve([1, 2], 9)),
    ]
    assert b"".join(line.plain.encode(encoding) for line in lines)
    assert terminal.text(curve([0, 1, 2, 3, 4, 5, 6, 7], 8)).plain == "_.:-=+*#"


def test_cells_have_their_width_whatever_is_in_them() -> None:
    assert TERMINAL.fit("abcdef", 4).plain == "abc\u2026"
    assert TERMINAL.fit("abcd", 4).plain == "abcd"
    assert TERMINAL.pad("ab", 4).plain == "ab  "
    assert (
        TERMINAL.pad("\u4f60\u597d\u4f60", 4).plain == "\u4f60\u2026 "
    )  # a wide one is not cut in half
    assert TERMINAL.fit("\x1b\x1b", 5).plain == "\\x1b\u2026"  # nor is an escape
    assert Terminal(80, encoding="ascii").fit("abcdef", 5).plain == "ab..."
    assert TERMINAL.fit("abc", 0).plain == ""


def _texts(lines: Iterable[list[Cell]], indent: int = 0) -> list[str]:
    return [join_cells(cells, indent).plain for cells in lines]


def test_lines_break_at_spaces_and_no_character_is_lost() -> None:
    terminal = Terminal()
    assert _texts(terminal.wrap("one two three\nfour", 10), 2) == [
        "  one two ",
        "  three",
        "  four",
    ]
    assert _texts(terminal.wrap("a" * 25, 12)) == ["a" * 12, "a" * 12, "a"]
    assert _texts(terminal.wrap("\u4f60" * 7, 12)) == ["\u4f60" * 6, "\u4f60"]
    assert _texts(terminal.wrap("e\u0301" * 13, 12)) == [
        "e\u0301" * 12,
        "e\u0301",
    ]  # a mark stays with its letter
    assert _texts(terminal.wrap("\u2764\ufe0f" * 7, 12)) == ["\u2764\ufe0f" * 6, "\u2764\ufe0f"]
    # a joiner at the end of a line joins nothing: it is left out, and is no escape
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    for cells in terminal.wrap(4 * family, 8):
        assert width_of(TERMINAL.paint(join_cells(cells))) <= 8
    assert width_of(TERMINAL.paint(TERMINAL.fit(4 * family, 5))) <= 5
    assert _texts(terminal.wrap("\n\n", 12)) == ["", "", ""]
    text = "word \x1b \u4f60\u597d " * 500 + "\n" * 7 + "x" * 300
    assert sum(map(len, terminal.wrap(text, 12))) == len(text)


def test_an_excerpt_says_how_much_it_leaves_out() -> None:
    lines = [line.plain for line in Terminal(60).excerpt("x" * 100_000, 2, 1)]
    note = "\u2026 99,820 of 100,000 characters left out (--full shows them)"
    assert lines == ["x" * 60, "x" * 60, note, "x" * 60]
    full = Terminal(60, is_full=True).excerpt("x" * 100_000, 2, 1)
    assert "".join(line.plain for line in full) == "x" * 100_000
    assert (
        len(list(TERMINAL.excerpt("a\n" * 3, 4, 0))) == 4
    )  # three lines, and the empty one behind the last newline
    numbered = "\n".join(f"line {n}" for n in range(100))
    lines = [line.plain for line in TERMINAL.excerpt(numbered, 2, 2)]
    left_out = len("\n".join(f"line {n}" for n in range(2, 98))) + 1
    assert lines == [
        "line 0",
        "line 1",
        f"\u2026 {left_out} of {len(numbered)} characters left out (--full shows them)",
        "line 98",
        "line 99",
    ]


def test_styles_belong_to_their_characters() -> None:
    line = join_cells(next(TERMINAL.wrap("ab\x1bc", 80, ["x", "y", "y", ""])))
    assert _pieces(line) == [("a", "x"), ("b\\x1b", "y")]
    line = join_cells(next(TERMINAL.wrap("a\x1b", 80)))
    assert (line.plain, _pieces(line)) == ("a\\x1b", [("\\x1b", "escape")])


def _pieces(line: Line) -> list[tuple[str, str]]:
    return [(line.plain[span.start : span.end], str(span.style)) for span in line.spans]


def test_styles_reach_a_terminal_with_colours_only() -> None:
    line = Line.assemble("plain ", ("bad", "bad"), (" [bold]", ""))  # markup is text
    assert Terminal(has_colour=True).paint(line) == "plain \x1b[31mbad\x1b[0m [bold]"
    assert Terminal().paint(line) == "plain bad [bold]"
    # a base style counts without spans, below spans, and not at all if it is empty
    assert Terminal(has_colour=True).paint(Line("bad", "bad")) == "\x1b[31mbad\x1b[0m"
    mixed = Line("ab", "bad")
    mixed.append("c", "good")
    assert Terminal(has_colour=True).paint(mixed) == "\x1b[31mab\x1b[0m\x1b[32mc\x1b[0m"
    assert Terminal(has_colour=True).paint(Line("ab")) == "ab"
    assert Terminal().paint(Line("bad", "bad")) == "bad"
    raw = Line("\x1b[2J\u202e")  # of a caller that forgot to escape
    assert Terminal(has_colour=True).paint(raw) == "\\x1b[2J\\u202e"


def test_a_table_has_the_widths_of_its_cells() -> None:
    columns = [Column("row", 3), Column(" n", 5, "<"), Column("text", align="<")]
    rows = [["10", " \u4f60", "a\x1bb"], ["3", " x", "y" * 90]]
    lines = [line.plain for line in TERMINAL.table(columns, rows)]
    assert lines[:2] == ["row n   text", " 10 \u4f60  a\\x1bb"]
    assert lines[2] == "  3 x   " + "y" * 71 + "\u2026"
    untitled = [Column("", 2, "<"), Column("", 1)]
    assert [line.plain for line in TERMINAL.table(untitled, [["a", "b"]])] == ["a b"]


def test_words_and_labels_hang() -> None:
    lines = [line.plain for line in Terminal(12).words("one two three " + "x" * 20, "-> ", "   ")]
    assert lines == ["-> one two", "   three", "   " + "x" * 20]
    lines = [line.plain for line in Terminal(12).hang(Line("bad "), "one two three")]
    assert lines == ["bad one two ", "    three"]


def test_curves_by_hand() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert curve([7, 0], 8) == "█▁"
    # four bins of two: means 0, 1, 2, 7 of 0..7 are the eighths 0, 1.14, 2.29, 8
    assert curve([0, 0, 0, 2, 2, 2, 6, 8], 4) == "▁▂▃█"
    # the largest of each: 0, 2, 2, 8
    assert curve([0, 0, 0, 2, 2, 2, 6, 8], 4, is_peak=True) == "▁▃▃█"
    assert curve([3, 3, 3], 8) == "▅▅▅"  # flat: in the middle
    assert curve([1, None, math.nan, math.inf, 10**400, 2], 8) == "▁    █"
    assert curve([None], 8) == " "
    assert curve([], 8) == " "
    assert curve([-1.7e308, 1.7e308], 8) == "  "  # beyond what is drawn, and no error


def test_counts_and_bars_by_hand() -> None:
    # bins of an eighth: 0 and 0.1 in the first, 1 in the last; the fullest is whole, half of it
    # half as high
    assert histogram([0, 0.1, 1], 0, 1) == "█      ▄"
    assert histogram([1, 1], 1, 1) == "    █   "  # all alike: in the middle
    assert histogram([], 0, 1) == " " * 8
    assert [bar(frac, 10) for frac in (0, 0.5, 1, 1.7)] == ["", "█" * 5, "█" * 10, "█" * 10]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (0.0, "0"), (1.0, "1"), (-0.5, "-0.5"), (0.12345, "0.1235"), (12.345, "12.35"), (1234.5, "1234"),  # noqa: E501
        (99999.9, "100000"), (16_400_000, "1.6e7"), (999_999, "999999"), (1e-14, "1.0e-14"), (-1.61e-14, "-2e-14"),  # noqa: E501
        (5e-5, "5.0e-5"), (math.nan, "nan"), (-math.inf, "-inf"), (10**400, "inf"), (None, "-"), (True, "-"),  # noqa: E501
        ("x", "-"),
    ],
)  # fmt: skip
def test_numbers_by_hand(value: object, shown: str) -> None:
    assert number(value) == shown


def test_numbers_fit_their_column() -> None:
    for power in range(-300, 300):
        for digits in (1.0, 1.23456, 9.9996, 9.96):
            for sign in (1, -1):
                assert len(number(sign * digits * 10.0**power)) <= 7
