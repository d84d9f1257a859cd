"""Completions that contain a text, the newest step first, as they are found; then how many there were at each step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, pairwise

from grpo_spmd.observe.rollout_reader import RolloutRecord
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.completions import Look
from grpo_spmd.tools.show.dump import (
    Unread,
    content_of,
    dumped_step,
    holds,
    pattern_of,
    rollouts_of,
    unread_lines,
)
from grpo_spmd.tools.show.overview import label_width
from grpo_spmd.tools.show.paper import Line, Span, number

_MOST_SHOWN, _MOST_OF_STEP = 20, 5
_AROUND = 100  # characters on each side of a match
_MOST_MARKED = 1000


def search_lines(run: RecordedRun, text: str, step: int | None, look: Look) -> Iterator[Line]:
    """`text` as it is, whatever the case of its letters; of an episode also in what was answered to the policy. Raises
    ConfigError where the step has no completions."""
    unread, paper, pattern = Unread(), look.paper, pattern_of(text)
    steps = (
        [dumped_step(run, step)]
        if step is not None
        else run.dumped_steps[::-1] or [dumped_step(run, None)]
    )
    found = dict[int, int]()
    num_shown, most = 0, (1 << 60 if look.is_full else _MOST_SHOWN)
    for own in steps:
        found[own] = 0
        for record in rollouts_of(run.folder, own, unread, holds(text)):
            where = _where(record, pattern)
            if where is None:
                continue
            found[own] += 1
            if num_shown < most and (
                look.is_full or step is not None or found[own] <= _MOST_OF_STEP
            ):
                num_shown += 1
                yield from _match_lines(record, own, where, pattern, look)
    yield from _summary(found, text, num_shown, look)
    yield from unread_lines(unread, paper)


def _where(record: RolloutRecord, pattern: re.Pattern[str]) -> str | None:
    """The text in which it stands."""
    texts = [record.completion, *map(content_of, record.messages)]
    return next((text for text in texts if pattern.search(text)), None)


def _match_lines(
    record: RolloutRecord, step: int, text: str, pattern: re.Pattern[str], look: Look
) -> Iterator[Line]:
    """Which completion, and the text around its first match."""
    first = pattern.search(text)
    assert first is not None
    paper = look.paper
    title = f"step {step}, row {number(record.row)}, sample {number(record.sample)}, reward {number(record.reward)}"
    yield [paper.fitted(title, paper.columns, "title")]
    begin, end = (
        (0, len(text)) if look.is_full else (max(0, first.start() - _AROUND), first.end() + _AROUND)
    )
    part = text[begin:end]
    before, after = (paper.ellipsis if begin else ""), (paper.ellipsis if end < len(text) else "")
    places = [match.span() for match in islice(pattern.finditer(part), _MOST_MARKED)]
    yield from look.text(
        *_marked(
            f"{before}{part}{after}", [len(before) + at for span in places for at in span], look
        )
    )


def _marked(text: str, edges: list[int], look: Look) -> tuple[str, list[str]]:
    """`text` with every second stretch between `edges` marked: by colour, or by signs that are none of its own."""
    stretches = [text[begin:end] for begin, end in pairwise([0, *edges, len(text)])]
    if look.has_colour:
        return text, [
            style
            for place, own in enumerate(stretches)
            for style in [("", "mark")[place % 2]] * len(own)
        ]
    return "".join(f">>{own}<<" if place % 2 else own for place, own in enumerate(stretches)), []


def _summary(found: dict[int, int], text: str, num_shown: int, look: Look) -> Iterator[Line]:
    paper = look.paper
    total, where = sum(found.values()), [step for step in sorted(found) if found[step]]
    searched = f"{len(found)} steps" if len(found) != 1 else f"step {next(iter(found))}"
    if num_shown:
        yield []
    if not total:
        yield [
            paper.fitted(f"no completion of {searched} contains {text!r}", paper.columns, "title")
        ]
        return
    said = (
        f"{total} completions of {len(where)} of {searched}"
        if len(found) > 1
        else f"{total} completions of {searched}"
    )
    said += f", {num_shown} of them shown" if num_shown < total else ""
    said += f"; first step {where[0]}, last {where[-1]}" if len(found) > 1 else ""
    yield from paper.excerpt(said, 3, 0, 0, "title")
    if len(found) > 1:
        counts = [found[step] for step in sorted(found)]
        label = label_width(paper)
        drawn = paper.curve(counts, paper.columns - label - 16, largest=True)
        yield [
            paper.padded("of each step", label),
            Span(drawn, "curve"),
            Span(f"  most {max(counts)}"),
        ]
    if num_shown < total and not look.is_full:
        yield [
            paper.fitted(
                "--step N shows those of one step, --full all of them in full", paper.columns, "dim"
            )
        ]
