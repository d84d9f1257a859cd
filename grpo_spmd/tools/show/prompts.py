"""Shows one prompt over the steps, or the completions that contain a text.

A prompt is a row of the data set. Its page has its mean reward at each step and its completions at
one step. A search shows the newest steps first, and counts the matches at each step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rich.text import Text

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.completions import (
    TokenDifferences,
    View,
    completion_lines,
    contains_text,
    error_lines,
    find_dumped_step,
    has_row,
    legend_lines,
    message_text,
    prompt_lines,
    prompt_text,
    text_pattern,
)
from grpo_spmd.tools.show.overview import curve, label_width, number
from grpo_spmd.tools.show.step import GROUP_COLUMNS, PromptGroup, reward_scale
from grpo_spmd.tools.terminal import Column, Line, Styles

_MAX_ROWS = 200  # that are searched for
_MAX_LISTED_ROWS = 12
_MAX_STEPS = 12
_MAX_PROMPT_CHARS = 400  # in a list
_MAX_SHOWN = 20
_MAX_SHOWN_PER_STEP = 5
_CONTEXT_CHARS = 100  # on each side of a match
_MAX_MARKED = 1000


@dataclass
class PromptHistory:
    """One row of the data set: its group at each step, and its completions at one step."""

    row: int
    text: str
    groups: dict[int, PromptGroup] = field(default_factory=dict)  # by step
    step: int = 0  # of the records
    records: list[RolloutRecord] = field(default_factory=list)

    def add(self, record: RolloutRecord, step: int, keep_record: bool) -> None:
        self.groups.setdefault(step, PromptGroup(self.row, self.text)).add(record, None)
        if keep_record:
            if step != self.step:
                self.step = step
                self.records = []
            self.records.append(record)


def find_prompts(
    run: RecordedRun, wanted: str, step: int | None, errors: ReadErrors
) -> list[PromptHistory]:
    """Returns rows by their number, or those whose prompts contain `wanted` in any case.

    Their number is bounded. Completions are kept for `step`, or else for the newest step at which
    a row was sampled; for several rows only those of the first row are kept.
    """
    # A number of at most 18 digits fits in 64 bits; a longer one is a text.
    row = int(wanted) if wanted.isascii() and wanted.isdecimal() and len(wanted) < 19 else None
    pattern = text_pattern(wanted)
    line_filter = contains_text(wanted) if row is None else has_row(row)
    prompts: dict[int, PromptHistory] = {}
    for dumped_step in run.dumped_steps:
        for _, record in run.files.rollouts(dumped_step, errors=errors, is_wanted=line_filter):
            text = prompt_text(record.prompt)
            is_match = pattern.search(text) is not None if row is None else record.row == row
            # The bound is on rows: of a row that is known, all steps count.
            if is_match and (record.row in prompts or len(prompts) < _MAX_ROWS):
                prompt = prompts.setdefault(
                    record.row, PromptHistory(record.row, text[:_MAX_PROMPT_CHARS])
                )
                # With several rows a list is shown, so no completions are kept.
                is_shown = step is None or dumped_step == step
                prompt.add(record, dumped_step, is_shown and len(prompts) == 1)
    return sorted(prompts.values(), key=lambda prompt: prompt.row)


def prompt_page(run: RecordedRun, wanted: str, step: int | None, view: View) -> Iterator[Line]:
    """Yields the page of one prompt, or a list if several match.

    Raises ConfigError if no dump has such a prompt.
    """
    errors = ReadErrors()
    # Raises for a step without completions, before everything is read.
    find_dumped_step(run, step)
    prompts = find_prompts(run, wanted, step, errors)
    num_steps = len(run.dumped_steps)
    if not prompts and wanted.isdecimal():
        problem = f"no such row is in the completions of {num_steps} steps"
        raise ConfigError(f"--prompt {wanted}: {problem}")
    if not prompts:
        problem = f"no prompt of {num_steps} steps contains that text"
        raise ConfigError(f"--prompt {wanted!r}: {problem}")
    if len(prompts) > 1:
        yield from _prompt_list(prompts, view)
    else:
        yield from _prompt_history(run, prompts[0], step, view, errors)
    yield from error_lines(errors, view.terminal)


def _prompt_list(prompts: Sequence[PromptHistory], view: View) -> Iterator[Line]:
    terminal = view.terminal
    # At the bound the search stopped adding rows.
    more = " or more" if len(prompts) == _MAX_ROWS else ""
    title = f"{len(prompts)}{more} prompts; --prompt ROW shows one"
    yield terminal.fit(title, terminal.columns, "title")
    columns = [Column("row", ">", 8), Column("steps", ">", 7), Column("first", ">", 8)]
    columns += [Column("last", ">", 8), Column("  prompt")]
    rows = []
    for prompt in prompts[: view.limit(_MAX_LISTED_ROWS)]:
        means = [number(group.mean) for group in prompt.groups.values()]
        figures = [number(prompt.row), str(len(means)), means[0], means[-1]]
        rows.append([*figures, f"  {prompt.text}"])
    yield from terminal.table(columns, rows, gap=0)
    if len(rows) < len(prompts):
        hint = f"and {len(prompts) - len(rows)} more (--full shows them)"
        yield terminal.fit(hint, terminal.columns, "dim")


def _prompt_history(
    run: RecordedRun, prompt: PromptHistory, step: int | None, view: View, errors: ReadErrors
) -> Iterator[Line]:
    terminal = view.terminal
    title = f"row {number(prompt.row)}: sampled at {len(prompt.groups)} of "
    title += f"{len(run.dumped_steps)} steps with completions"
    yield terminal.fit(title, terminal.columns, "title")
    if prompt.records:
        yield from prompt_lines(prompt.records[0], view)
    yield Text()
    yield from _group_lines(prompt, view)
    if not prompt.records:
        yield terminal.fit(f"not sampled at step {step}", terminal.columns, "warning")
        return
    records = sorted(prompt.records, key=lambda record: (record.position, record.sample))
    differences = TokenDifferences(run, prompt.step, records, errors)
    for record in records:
        yield Text()
        title = f"step {prompt.step}"
        yield from completion_lines(record, title, differences, view, has_prompt=False)
    yield from legend_lines(differences, view)


def _group_lines(prompt: PromptHistory, view: View) -> Iterator[Line]:
    """Yields the curve of the prompt's mean reward, and a row for each step."""
    terminal = view.terminal
    means = [group.mean for group in prompt.groups.values()]
    known_means = [mean for mean in means if mean is not None]
    if known_means:
        label = label_width(terminal)
        drawn = curve(means, terminal.columns - label - 32, is_unicode=terminal.is_unicode)
        figures = f"{'first':>8}{number(known_means[0]):>8}{'last':>8}{number(known_means[-1]):>8}"
        yield Text.assemble(terminal.pad("mean reward", label), (drawn, "curve"), figures)
    steps = list(prompt.groups)
    if len(steps) > _MAX_STEPS and not view.is_full:
        # The newest steps are what one wants to see.
        hint = f"the newest {_MAX_STEPS} of {len(steps)} steps (--full shows all)"
        yield terminal.fit(hint, terminal.columns, "dim")
        steps = steps[-_MAX_STEPS:]
    scale = reward_scale(prompt.groups.values())
    rows = [[str(step), *prompt.groups[step].cells(scale, terminal)] for step in steps]
    yield from terminal.table([Column("step", ">", 8), *GROUP_COLUMNS], rows, gap=0)


def search_lines(run: RecordedRun, text: str, step: int | None, view: View) -> Iterator[Line]:
    """Yields completions that contain `text` in upper or lower case, then how many each step has.

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
        for _, record in run.files.rollouts(
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
    note = f"{total} completions of {searched}, {num_shown} of them shown; "
    note += f"first step {matching_steps[0]}, last {matching_steps[-1]}"
    yield from terminal.excerpt(note, 3, styles="title")
    if len(steps) > 1:
        values = [counts[step] for step in steps]
        label = label_width(terminal)
        width = terminal.columns - label - 16
        # Peaks, since single matches would vanish in means of many steps.
        drawn = curve(values, width, is_unicode=terminal.is_unicode, is_peak=True)
        label_cell = terminal.pad("of each step", label)
        yield Text.assemble(label_cell, (drawn, "curve"), f"  most {max(values)}")
    if num_shown < total:
        hint = "--step N shows those of one step, --full all of them in full"
        yield terminal.fit(hint, terminal.columns, "dim")
