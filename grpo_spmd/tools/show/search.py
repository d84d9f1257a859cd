"""Completions that contain a text, the newest step first, and their number at each step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from rich.text import Text

from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.charts import curve, number
from grpo_spmd.tools.show.completions import View
from grpo_spmd.tools.show.dump import (
    contains_text,
    error_lines,
    find_dumped_step,
    message_text,
    text_pattern,
)
from grpo_spmd.tools.show.overview import label_width
from grpo_spmd.tools.terminal import Line, Styles

_MAX_SHOWN = 20
_MAX_SHOWN_PER_STEP = 5
_CONTEXT_CHARS = 100  # on each side of a match
_MAX_MARKED = 1000


def search_lines(run: RecordedRun, text: str, step: int | None, view: View) -> Iterator[Line]:
    """Yields completions that contain `text` in upper or lower case, then their numbers.

    In an episode, what was answered to the policy is searched too. Raises ConfigError if the step
    has no completions.
    """
    errors = ReadErrors()
    pattern = text_pattern(text)
    # The newest step first: the present policy is what matters most.
    steps = [find_dumped_step(run, step)] if step is not None else run.dumped_steps[::-1]
    counts: dict[int, int] = {}
    num_shown = 0
    for searched_step in steps or [find_dumped_step(run, None)]:
        counts[searched_step] = 0
        for record in run.files.rollouts(
            searched_step, errors=errors, is_wanted=contains_text(text)
        ):
            matching_text = _matching_text(record, pattern)
            if matching_text is None:
                continue
            counts[searched_step] += 1
            # Each step shows a few, so that one step does not fill the page.
            has_room = num_shown < _MAX_SHOWN and (
                step is not None or counts[searched_step] <= _MAX_SHOWN_PER_STEP
            )
            if view.is_full or has_room:
                num_shown += 1
                yield from _match_lines(record, searched_step, matching_text, pattern, view)
    yield from _summary(counts, text, num_shown, view)
    yield from error_lines(errors, view.terminal)


def _matching_text(record: RolloutRecord, pattern: re.Pattern[str]) -> str | None:
    # What tools answered is in messages alone.
    texts = [record.completion, *map(message_text, record.messages)]
    return next((text for text in texts if pattern.search(text)), None)


def _match_lines(
    record: RolloutRecord, step: int, text: str, pattern: re.Pattern[str], view: View
) -> Iterator[Line]:
    """Yields the completion's name and the text around its first match."""
    terminal = view.terminal
    title = f"step {step}, row {number(record.row)}, sample {number(record.sample)}"
    title += f", reward {number(record.reward)}"
    yield terminal.fit(title, terminal.columns, "title")
    match = pattern.search(text)
    if match is not None and not view.is_full:
        begin = max(0, match.start() - _CONTEXT_CHARS)
        end = match.end() + _CONTEXT_CHARS
        prefix = terminal.ellipsis if begin else ""
        suffix = terminal.ellipsis if end < len(text) else ""
        text = f"{prefix}{text[begin:end]}{suffix}"
    yield from view.text(*_mark_matches(text, pattern, terminal.has_colour))


def _mark_matches(text: str, pattern: re.Pattern[str], has_colour: bool) -> tuple[str, Styles]:
    """Marks matches by a style, or by >> and << if there are no colours."""
    # A pattern such as a space matches very often in a long text.
    matches = list(islice(pattern.finditer(text), _MAX_MARKED))
    if not has_colour:
        return pattern.sub(r">>\g<0><<", text, count=_MAX_MARKED), ""
    styles = [""] * len(text)
    for match in matches:
        styles[match.start() : match.end()] = ["mark"] * len(match[0])
    return text, styles


def _summary(counts: Mapping[int, int], text: str, num_shown: int, view: View) -> Iterator[Line]:
    terminal = view.terminal
    steps = sorted(counts)
    matching_steps = [step for step in steps if counts[step]]
    total = sum(counts.values())
    searched = f"{len(steps)} steps" if len(steps) > 1 else f"step {steps[0]}"
    if num_shown:
        yield Text()
    if not total:
        note = f"no completion of {searched} contains {text!r}"
        yield terminal.fit(note, terminal.columns, "title")
        return
    note = f"{total} completions of "
    note += f"{len(matching_steps)} of {searched}" if len(steps) > 1 else searched
    if num_shown < total:
        note += f", {num_shown} of them shown"
    if len(steps) > 1:
        note += f"; first step {matching_steps[0]}, last {matching_steps[-1]}"
    yield from terminal.excerpt(note, 3, styles="title")
    if len(steps) > 1:
        values = [counts[step] for step in steps]
        label = label_width(terminal)
        width = terminal.columns - label - 16
        # Peaks, since single matches would vanish in means of many steps.
        drawn = curve(values, width, is_unicode=terminal.is_unicode, is_peak=True)
        label_cell = terminal.pad("of each step", label)
        yield Text.assemble(label_cell, (drawn, "curve"), f"  most {max(values)}")
    if num_shown < total and not view.is_full:
        hint = "--step N shows those of one step, --full all of them in full"
        yield terminal.fit(hint, terminal.columns, "dim")
