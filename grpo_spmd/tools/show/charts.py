"""Charts of one row, and numbers of at most seven characters. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Value = float | int | None
MAX_FINITE = 1e300  # larger numbers are not drawn: sums and differences of them would be infinite
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"


def curve(
    values: Sequence[Value], width: int, *, is_unicode: bool = True, is_peak: bool = False
) -> str:
    """Returns one character for each value, between the smallest and the largest drawn value.

    If there are more values than columns, a character stands for the mean of neighbours, or for
    the largest of them if `is_peak`. A space means that no value is known.
    """
    drawn = bin_values(values, width, is_peak)
    finite = [value for value in drawn if value is not None]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    bars = _bars(is_unicode)
    return "".join(
        " " if value is None else bars[min(7, int(fraction(value, low, high) * 8))]
        for value in drawn
    )


def bar(frac: float, width: int, *, is_unicode: bool = True) -> str:
    """Returns a bar that fills `frac` of `width` columns, rounded."""
    return _bars(is_unicode)[-1] * round(min(1.0, max(0.0, frac)) * width)


def histogram(
    values: Sequence[Value], low: float, high: float, width: int = 8, *, is_unicode: bool = True
) -> str:
    """Returns the number of values in each of `width` bins of low..high as heights.

    A space means that the bin is empty.
    """
    counts = [0] * width
    for value in values:
        if value is not None and is_drawable(value):
            counts[min(width - 1, int(fraction(value, low, high) * width))] += 1
    bars = _bars(is_unicode)
    # The fullest bin has the full height, and a bin with one value is visible.
    peak = max(1, *counts)
    return "".join(" " if not n else bars[min(7, (n * 8 - 1) // peak)] for n in counts)


def _bars(is_unicode: bool) -> str:
    return _BARS if is_unicode else _ASCII_BARS


def bin_values(values: Sequence[Value], width: int, is_peak: bool) -> list[float | None]:
    """Returns at most `width` values, each from equally many neighbours, or from one more.

    None stands for neighbours without a finite value.
    """
    num = max(1, min(width, len(values)))
    # Whole-number edges: each value is in exactly one bin.
    edges = [index * len(values) // num for index in range(num + 1)]
    bins: list[float | None] = []
    for begin, end in pairwise(edges):
        finite = [float(v) for v in values[begin:end] if v is not None and is_drawable(v)]
        merged = max(finite, default=0.0) if is_peak else math.fsum(finite) / max(1, len(finite))
        bins.append(merged if finite else None)
    return bins


def fraction(value: float, low: float, high: float) -> float:
    """Returns how far `value` is from `low` to `high`, 0 to 1; 0.5 if these are equal."""
    # Halves, because the whole span may be larger than a float holds.
    span = high / 2 - low / 2
    return min(1.0, max(0.0, (value / 2 - low / 2) / span)) if span > 0 else 0.5


def is_drawable(value: float | int) -> bool:
    """Returns False for NaN, infinity and whole numbers that no float holds."""
    return abs(value) <= MAX_FINITE


def number(value: object) -> str:
    """Returns a number in at most 7 characters: 4 digits, or a power of ten."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if not is_drawable(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    size = abs(value)
    if value == 0 or (isinstance(value, int) and size < 1_000_000):
        return str(int(value))
    # These bounds are where rounding to 4 digits would need an eighth character.
    if 0.0009995 <= size < 999_999.5:
        digits = min(4, max(0, 3 - math.floor(math.log10(size))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    short = _short_exponent(f"{value:.1e}")
    return short if len(short) <= 7 else _short_exponent(f"{value:.0e}")


def _short_exponent(text: str) -> str:
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"
