"""One prompt over the steps: how its reward went, and its completions at one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.charts import curve, histogram, number
from grpo_spmd.tools.show.completions import View, completion_lines, legend_lines, prompt_lines
from grpo_spmd.tools.show.dump import (
    contains_text,
    error_lines,
    find_dumped_step,
    has_row,
    prompt_text,
    text_pattern,
)
from grpo_spmd.tools.show.overview import label_width
from grpo_spmd.tools.show.step import PromptGroup
from grpo_spmd.tools.show.token_differences import TokenDifferences
from grpo_spmd.tools.terminal import Column, Line

_MAX_ROWS = 200  # that are searched for
_MAX_LISTED_ROWS = 12
_MAX_STEPS = 12
_MAX_PROMPT_CHARS = 400  # in a list


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
        for record in run.files.rollouts(dumped_step, errors=errors, is_wanted=line_filter):
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
    for prompt in prompts if view.is_full else prompts[:_MAX_LISTED_ROWS]:
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
    is_unicode = terminal.is_unicode
    means = [group.mean for group in prompt.groups.values()]
    known_means = [mean for mean in means if mean is not None]
    if known_means:
        label = label_width(terminal)
        drawn = curve(means, terminal.columns - label - 32, is_unicode=is_unicode)
        figures = f"{'first':>8}{number(known_means[0]):>8}{'last':>8}{number(known_means[-1]):>8}"
        yield Text.assemble(terminal.pad("mean reward", label), (drawn, "curve"), figures)
    columns = [Column("step", ">", 8), Column("n", ">", 5), Column("mean", ">", 8)]
    columns += [Column("spread", ">", 8), Column("cut", ">", 6), Column("  rewards", style="curve")]
    rewards = [reward for group in prompt.groups.values() for reward in group.known_rewards]
    # One scale for all steps, so that their histograms can be compared.
    low = min(rewards, default=0.0)
    high = max(rewards, default=0.0)
    steps = list(prompt.groups)
    rows: list[list[str | Line]] = []
    if len(steps) > _MAX_STEPS and not view.is_full:
        hint = f"{len(steps) - _MAX_STEPS} earlier ones (--full shows them)"
        rows.append(["", "", "", "", "", terminal.text(f"  {hint}", "dim")])
        # The newest steps are what one wants to see.
        steps = steps[-_MAX_STEPS:]
    for step in steps:
        group = prompt.groups[step]
        heights = histogram(group.rewards, low, high, is_unicode=is_unicode)
        row = [str(step), str(len(group.rewards)), number(group.mean), number(group.spread)]
        rows.append([*row, f"{group.cut_frac:.0%}", f"  {heights}"])
    yield from terminal.table(columns, rows, gap=0)
