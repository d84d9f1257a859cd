"""One prompt over the steps: how its reward went, and its completions of one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_reader import RolloutRecord
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.completions import Look, completion_lines, legend_lines, prompt_lines
from grpo_spmd.tools.show.dump import (
    Scored,
    Unread,
    dumped_step,
    has_row,
    holds,
    pattern_of,
    prompt_text,
    rollouts_of,
    unread_lines,
)
from grpo_spmd.tools.show.overview import label_width
from grpo_spmd.tools.show.paper import Line, Span, number
from grpo_spmd.tools.show.step import Group

_MOST_ROWS, _MOST_NAMED, _MOST_STEPS = 200, 12, 12
_LONGEST = 400  # characters of a prompt in a list


@dataclass
class Prompt:
    """A row of the data set: what became of it at each step, and its completions at the one that is shown."""

    row: int
    text: str
    steps: dict[int, Group] = field(default_factory=dict)
    step: int = 0
    records: list[RolloutRecord] = field(default_factory=list)

    def add(self, record: RolloutRecord, step: int, is_wanted: bool) -> None:
        self.steps.setdefault(step, Group(self.row, self.text)).add(record, None)
        if is_wanted:
            if step != self.step:
                self.step, self.records = step, []
            self.records.append(record)


def find_prompts(run: RecordedRun, wanted: str, step: int | None, unread: Unread) -> list[Prompt]:
    """Rows by number, else those whose prompts contain `wanted`, whatever the case of its letters; at most a bounded
    number of them. Completions are those of `step`, else of the newest in which a row was sampled."""
    found: dict[int, Prompt] = {}
    row = int(wanted) if wanted.isascii() and wanted.isdecimal() and len(wanted) < 19 else None
    pattern = pattern_of(wanted)
    for own in run.dumped_steps:
        is_shown = step is None or own == step
        for record in rollouts_of(
            run.folder, own, unread, holds(wanted) if row is None else has_row(row)
        ):
            is_one = (
                record.row == row
                if row is not None
                else pattern.search(prompt_text(record.prompt)) is not None
            )
            if is_one and (record.row in found or len(found) < _MOST_ROWS):
                new = Prompt(record.row, prompt_text(record.prompt)[:_LONGEST])
                found.setdefault(record.row, new).add(record, own, is_shown and len(found) == 1)
    return sorted(found.values(), key=lambda prompt: prompt.row)


def prompt_page(run: RecordedRun, wanted: str, step: int | None, look: Look) -> Iterator[Line]:
    """Raises ConfigError where no dump has such a prompt."""
    unread, paper = Unread(), look.paper
    dumped_step(run, step)
    prompts = find_prompts(run, wanted, step, unread)
    if not prompts and wanted.isdecimal():
        raise ConfigError(
            f"--prompt {wanted}: no such row is in the completions of {len(run.dumped_steps)} steps"
        )
    if not prompts:
        raise ConfigError(
            f"--prompt {wanted!r}: no prompt of {len(run.dumped_steps)} steps contains that text"
        )
    if len(prompts) > 1:
        yield from _choice(prompts, look)
    else:
        yield from _one(run, prompts[0], step, look, unread)
    yield from unread_lines(unread, paper)


def _choice(prompts: list[Prompt], look: Look) -> Iterator[Line]:
    paper = look.paper
    most = len(prompts) if look.is_full else _MOST_NAMED
    least = " or more" if len(prompts) == _MOST_ROWS else ""
    yield [
        paper.fitted(
            f"{len(prompts)}{least} prompts; --prompt ROW shows one", paper.columns, "title"
        )
    ]
    yield [Span(f"{'row':>8}{'steps':>7}{'first':>8}{'last':>8}  prompt", "dim")]
    for prompt in prompts[:most]:
        means = [group.mean for group in prompt.steps.values()]
        begin = (
            f"{number(prompt.row):>8}{len(means):>7}{number(means[0]):>8}{number(means[-1]):>8}  "
        )
        yield [Span(begin), paper.fitted(prompt.text, paper.columns - len(begin))]
    if len(prompts) > most:
        yield [
            paper.fitted(
                f"and {len(prompts) - most} more (--full shows them)", paper.columns, "dim"
            )
        ]


def _one(
    run: RecordedRun, prompt: Prompt, step: int | None, look: Look, unread: Unread
) -> Iterator[Line]:
    paper, label = look.paper, label_width(look.paper)
    means = [group.mean for group in prompt.steps.values()]
    known = [mean for mean in means if mean is not None]
    said = f"row {number(prompt.row)}: sampled at {len(means)} of {len(run.dumped_steps)} steps with completions"
    yield [paper.fitted(said, paper.columns, "title")]
    if prompt.records:
        yield from prompt_lines(prompt.records[0], look)
    yield []
    if known:
        drawn = paper.curve(means, paper.columns - label - 32)
        figures = f"{'first':>8}{number(known[0]):>8}{'last':>8}{number(known[-1]):>8}"
        yield [paper.padded("mean reward", label), Span(drawn, "curve"), Span(figures)]
    yield [Span(f"{'step':>8}{'n':>5}{'mean':>8}{'spread':>8}{'cut':>6}  rewards", "dim")]
    rewards = [reward for group in prompt.steps.values() for reward in group.known]
    low, high = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    rows = list(prompt.steps.items())
    if len(rows) > _MOST_STEPS and not look.is_full:
        said = f"{len(rows) - _MOST_STEPS} earlier ones (--full shows them)"
        yield [paper.fitted(f"        {said}", paper.columns, "dim")]
        rows = rows[-_MOST_STEPS:]
    for number_of, group in rows:
        figures = (
            f"{number_of:>8}{len(group.rewards):>5}{number(group.mean):>8}{number(group.spread):>8}"
        )
        cut = f"{group.cut_frac:>6.0%}  "
        yield [Span(figures + cut), Span(paper.counts(group.rewards, low, high), "curve")]
    if not prompt.records:
        yield [paper.fitted(f"not sampled at step {step}", paper.columns, "warning")]
        return
    records = sorted(prompt.records, key=lambda record: (record.position, record.sample))
    scored = Scored(run, prompt.step, records, unread)
    for record in records:
        yield []
        yield from completion_lines(record, f"step {prompt.step}", scored, look, has_prompt=False)
    yield from legend_lines(scored, look)
