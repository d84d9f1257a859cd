"""Which rollouts of a step are shown with text and tokens, as far as there is room: a function of the step alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_spmd.report.json_text import json_bytes
from grpo_spmd.report.scan import StepScan
from grpo_spmd.report.shown import Shown

_FAILED = ("error", "timeout", "env_error", "env_timeout")  # of a reward; of an environment
_FIRST_FAILED = 4  # before there are tokens of the others
_MOST_SHOWN = 2_000  # of a step
_PACKED = 0.9  # what a rollout takes beside others, of what it takes alone at the quickest level


@dataclass
class Selection:
    """What is shown of a step, by the rollout's place in it."""

    rollouts: dict[int, Shown]
    with_tokens: set[int]
    num_wanted: int = 0  # best, worst, most mismatched and failed ones
    num_wanted_shown: int = 0


def select(scan: StepScan, room: int, make: Callable[[int, str], Shown | None]) -> Selection:
    """`room`: bytes that they may take in the page, compressed; `make(place, why)` reads a rollout.

    The most mismatched, the best, the worst and the failed ones come first, then their tokens; then whole groups, at
    places that move on from step to step; then single ones, spread evenly."""
    found = Selection({}, set())
    wanted = dict[int, str]()
    for place, why in _wanted(scan):
        wanted.setdefault(place, why)
    found.num_wanted = len(wanted)
    first = [place for place, why in wanted.items() if why != "failed"]
    failed = [place for place, why in wanted.items() if why == "failed"]
    left = _Room(room, make, found)
    for place in [*first, *failed[:_FIRST_FAILED]]:
        left.text(place, wanted[place])
    for place in [*first, *failed[:_FIRST_FAILED]]:
        left.tokens(place)
    for place in failed[_FIRST_FAILED:]:
        left.text(place, "failed")
    found.num_wanted_shown = len(found.rollouts)
    for group in _groups(scan):
        if not all(left.text(place, "group") for place in group):
            break
        if not all(left.tokens(place) for place in group):
            break
    for place in _evenly(scan):
        if not left.text(place, "sampled"):
            break
        left.tokens(place)
    return found


class _Room:
    """Hands out the bytes of a step."""

    def __init__(self, room: int, make: Callable[[int, str], Shown | None], into: Selection) -> None:
        self._left, self._make, self._into = float(room), make, into
        self._broken: set[int] = set()

    def text(self, place: int, why: str) -> bool:
        """Whether there is still room; a broken line takes none."""
        if place in self._into.rollouts or place in self._broken:
            return True
        if len(self._into.rollouts) >= _MOST_SHOWN or self._left <= 0:
            return False
        shown = self._make(place, why)
        if shown is None:
            self._broken.add(place)
            return True
        cost = size_of([shown.text, shown.prompt if why != "group" else ""])
        if cost > self._left:
            return False
        self._left -= cost
        self._into.rollouts[place] = shown
        return True

    def tokens(self, place: int) -> bool:
        shown = self._into.rollouts.get(place)
        if shown is None or shown.tokens is None or place in self._into.with_tokens:
            return True
        if self._left <= 0 or (cost := size_of(shown.tokens)) > self._left:
            return False
        self._left -= cost
        self._into.with_tokens.add(place)
        return True


def size_of(value: object) -> float:
    """Bytes of it in the page, compressed."""
    return _PACKED * len(zlib.compress(json_bytes(value), 1))


def _wanted(scan: StepScan) -> Iterator[tuple[int, str]]:
    """Of several that are equal the first."""
    places = range(len(scan))
    known = [place for place in places if scan.rewards[place] is not None]
    if mismatched := [place for place in places if scan.mismatches[place] is not None]:
        yield max(mismatched, key=lambda place: scan.mismatches[place] or 0.0), "mismatched"
    if known:
        rank = [(scan.rewards[place] or 0.0, scan.advantages[place] or 0.0) for place in places]
        yield max(known, key=rank.__getitem__), "best"
        yield min(known, key=rank.__getitem__), "worst"
    yield from ((place, "failed") for place in places if scan.statuses[place] in _FAILED)


def _groups(scan: StepScan) -> Iterator[list[int]]:
    """All groups, from another one on at each step."""
    by_position: dict[int, list[int]] = {}
    for place, position in enumerate(scan.positions):
        by_position.setdefault(position, []).append(place)
    groups = [*by_position.values()]
    number = len(groups)
    for i in range(number):
        yield groups[(scan.step * 7 + i * _stride(number)) % number]


def _evenly(scan: StepScan) -> Iterator[int]:
    number = len(scan)
    for i in range(number):
        yield (scan.step * 7 + i * _stride(number)) % number


def _stride(number: int) -> int:
    """About 0.618 of `number`, and prime to it: multiples of it come to all places, each far from those before."""
    stride = max(1, round(number * 0.618))
    while math.gcd(stride, number) != 1:
        stride += 1
    return stride
