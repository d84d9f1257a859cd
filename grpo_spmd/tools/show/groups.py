"""Pages about groups: those of one step, one prompt over the steps, and a search for a text.

A group is the completions of one prompt at one step; a prompt is a row of the data set. The page of
a step also has the step's metrics and its memory by phase. A search shows matches of the newest
steps first, and counts the matches at each step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.diagnosis.curves import matching_metrics
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.show.completions import (
    TokenDifferences,
    completion_lines,
    contains_text,
    describe_steps,
    error_lines,
    find_dumped_step,
    has_row,
    message_text,
    prompt_lines,
    prompt_text,
    text_lines,
    text_pattern,
)
from grpo_spmd.tools.show.overview import (
    curve,
    histogram,
    is_drawable,
    label_width,
    number,
    time_lines,
)
from grpo_spmd.tools.terminal import Column, Line, Styles, Terminal

# The first parts of metric names, in the order in which a page shows the metrics.
_FIRST_BLOCKS = (
    "reward",
    "dynamic_sampling",
    "completion",
    "episode",
    "environment",
    "loss",
    "optim",
    "weight_sync",
    "rollout",
)
# The metrics of each phase's memory, memory/PHASE/KIND_gib, which are columns of a table.
_MEMORY_KINDS = ("peak", "allocated", "reserved", "driver_used", "other")
_NUM_GROUPS = 12  # how many of the worst and of the best groups of a step are shown
GROUP_COLUMNS = (
    Column("n", 5),
    Column("mean", 8),
    Column("spread", 8),
    Column("cut", 6),
    Column("  rewards", 10, "<", style="curve"),
)
PROMPT_COLUMN = Column("  prompt", align="<")
_MAX_ROWS = 200  # a search for prompts stops at so many rows of the data set
_NUM_ROWS = 12  # of these, so many are listed
_NUM_STEPS = 12  # the newest steps of a prompt that its table lists
_MAX_PROMPT_CHARS = 400  # in a list
_MAX_SHOWN = 20  # matches of a search for completions
_MAX_SHOWN_PER_STEP = 5
_CONTEXT_CHARS = 100  # on each side of a match
_MAX_MARKED = 1000  # marked matches in one text


@dataclass
class PromptGroup:
    """Statistics of the completions of one prompt at one step."""

    row: int
    prompt: str
    num: int = 0  # completions
    rewards: list[float] = field(default_factory=list)  # of completions that have one
    num_cut: int = 0  # completions that were cut off at a limit of length
    mismatch: float | None = None  # the largest |policy - engine| of a trained token, in nats

    def add(self, record: RolloutRecord, mismatch: float | None = None) -> None:
        """Counts a completion; `mismatch` is its largest |policy - engine| if it is known."""
        self.num += 1
        if record.reward is not None and is_drawable(record.reward):
            self.rewards.append(record.reward)
        self.num_cut += record.finish_reason == "length"
        if mismatch is not None:
            self.mismatch = max(self.mismatch or 0.0, mismatch)

    @property
    def mean(self) -> float | None:
        """The mean reward; None if no completion has a reward."""
        return statistics.fmean(self.rewards) if self.rewards else None

    def cells(self, scale: tuple[float, float]) -> list[str]:
        """Returns this group's cells in a table with the columns GROUP_COLUMNS.

        `scale` is (lowest, highest): the rewards at the two ends of the histogram.
        """
        # The standard deviation is that of n - 1, as in advantages.
        spread = statistics.stdev(self.rewards) if len(self.rewards) > 1 else None
        figures = [str(self.num), number(self.mean), number(spread)]
        return [*figures, f"{self.num_cut / self.num:.0%}", f"  {histogram(self.rewards, *scale)}"]


def reward_scale(groups: Iterable[PromptGroup]) -> tuple[float, float]:
    """Returns (lowest, highest reward) over all groups, which is the scale of their histograms."""
    rewards = [reward for group in groups for reward in group.rewards]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def step_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of one step: its metrics, its time and memory by phase, and its groups."""
    # {} for a step that did not finish, or had no evaluation.
    metrics = next((line for line in run.steps if line["step"] == step), {})
    evaluation = next((line for line in run.evaluations if line["step"] == step), {})
    total = f" of {run.num_steps}" if run.num_steps else ""
    yield terminal.line(f"{run.name}  step {step}{total}", "title")
    yield from metric_blocks({**metrics, **evaluation}, terminal)
    if metrics:
        yield from time_lines([metrics], terminal)
    phases = matching_metrics([metrics], r"memory/(.+)/peak_gib")
    if phases:
        # A row for each phase; a figure is that of the rank that has the most.
        width = 12 if terminal.columns >= 78 else 9
        titles = [kind.replace("_used", "")[: width - 1] for kind in _MEMORY_KINDS]
        columns = [Column("memory (GiB)", 14, "<"), *(Column(title, width) for title in titles)]
        rows = []
        for phase in phases:
            values = [metrics.get(f"memory/{phase}/{kind}_gib") for kind in _MEMORY_KINDS]
            rows.append([f"  {phase}", *map(number, values)])
        yield from terminal.table(columns, rows)
    yield Line()
    if step in run.dumped_steps:
        yield from _group_lines(run, step, terminal)
    else:
        warning = f"no completions of step {step} were recorded; {describe_steps(run.dumped_steps)}"
        yield terminal.line(warning, "warning")


def metric_blocks(metrics: Mapping[str, Any], terminal: Terminal) -> Iterator[Line]:
    """Yields metrics in blocks by the first part of their names, in as many columns as fit.

    A block, such as "reward", has a title line."""
    num_columns = max(1, terminal.columns // 40)
    label = (terminal.columns - 2) // num_columns - 12
    # The usual blocks have a fixed order; others follow in the order of metrics.jsonl.
    blocks: dict[str, list[str]] = {name: [] for name in _FIRST_BLOCKS}
    for name in metrics:
        block, slash, _ = name.partition("/")
        # Memory and the times of phases are shown in separate tables.
        if slash and block != "memory" and not re.fullmatch(r"time/(?!wall)\w+_s", name):
            blocks.setdefault(block, []).append(name)
    for block, names in blocks.items():
        if names:
            yield terminal.line(block, "role")
        num_rows = -(-len(names) // num_columns)  # rounded up
        for row in range(num_rows):
            line = Line("  ")
            for name in names[row::num_rows]:
                line.append_text(terminal.pad(name.partition("/")[2], label, "dim"))
                line.append(f"{number(metrics[name]):>8}    ")
            yield line


def _group_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    """Yields the table of a step's groups, the lowest mean reward first.

    After it come warnings about what could not be read, and a hint at other pages."""
    errors = ReadErrors()
    # The largest difference of each rollout: one number, so all of a step fit into memory.
    mismatches: dict[int | None, float] = {
        scores.rollout_id: math.inf if scores.difference_max is None else scores.difference_max
        for _, scores in run.files.scores(step, errors)
    }
    # The position of a group is the index of its prompt in the run's stream of prompts.
    groups_by_position: dict[int, PromptGroup] = {}
    for _, record in run.files.rollouts(step, errors=errors):
        if record.position not in groups_by_position:
            prompt = prompt_text(record.prompt)[:_MAX_PROMPT_CHARS]
            groups_by_position[record.position] = PromptGroup(record.row, prompt)
        groups_by_position[record.position].add(record, mismatches.get(record.rollout_id))
    # Groups with a low mean come first, since they need a look; groups without a reward come last.
    groups = [groups_by_position[position] for position in sorted(groups_by_position)]
    groups.sort(key=lambda group: (group.mean is None, group.mean or 0.0))
    scale = reward_scale(groups)
    num_completions = sum(group.num for group in groups)
    title = (
        f"{len(groups)} groups, {num_completions} completions; rewards from {number(scale[0])} to "
    )
    yield terminal.line(f"{title}{number(scale[1])}, least mean first", "role")
    columns = [Column("row", 7), *GROUP_COLUMNS, Column("mismatch", 8), PROMPT_COLUMN]
    rows = [
        [number(group.row), *group.cells(scale), number(group.mismatch), f"  {group.prompt}"]
        for group in groups
    ]
    # Of many groups the worst and the best are shown; the first line of the table is its titles.
    yield from terminal.elide(terminal.table(columns, rows), _NUM_GROUPS + 1, _NUM_GROUPS)
    num_unscored = num_completions - sum(len(group.rewards) for group in groups)
    if num_unscored:
        yield terminal.line(f"{num_unscored} completions have no reward", "warning")
    yield from error_lines(errors, terminal)
    yield Line()
    hint = f"more: --step {step} --worst 3   --step {step} --best 3   --prompt ROW   --grep TEXT"
    yield terminal.line(hint, "dim")


def find_prompts(run: RecordedRun, wanted: str, errors: ReadErrors) -> list[dict[int, PromptGroup]]:
    """Returns a dict {step: group} for each prompt of the run that matches.

    They are at most _MAX_ROWS prompts, in the order of the data set's rows. Counts lines that
    cannot be read in `errors`. A prompt matches if `wanted` is the number of its row, or else if it
    contains the text `wanted`, in upper or lower case."""
    # A number of at most 18 digits fits into 64 bits; a longer one is looked for as a text.
    row = int(wanted) if wanted.isascii() and wanted.isdecimal() and len(wanted) < 19 else None
    pattern = text_pattern(wanted)
    line_filter = contains_text(wanted) if row is None else has_row(row)
    prompts: dict[int, dict[int, PromptGroup]] = {}
    for step in run.dumped_steps:
        for _, record in run.files.rollouts(step, errors=errors, is_wanted=line_filter):
            text = prompt_text(record.prompt)
            is_match = pattern.search(text) is not None if row is None else record.row == row
            # The limit is on the number of rows. Further steps of a row that is in `prompts` are
            # always added.
            if is_match and (record.row in prompts or len(prompts) < _MAX_ROWS):
                groups = prompts.setdefault(record.row, {})
                group = PromptGroup(record.row, text[:_MAX_PROMPT_CHARS])
                groups.setdefault(step, group).add(record)
    return [groups for _, groups in sorted(prompts.items())]


def prompt_page(
    run: RecordedRun, wanted: str, step: int | None, terminal: Terminal
) -> Iterator[Line]:
    """Yields the page of the prompt that `wanted` names, or a list of prompts if several match.

    `wanted` is explained at `find_prompts`. `step` is the step whose completions are shown; None is
    the newest. Raises ConfigError if no dump has such a prompt."""
    errors = ReadErrors()
    # Raises ConfigError if the step has no completions, before all dumps are read.
    find_dumped_step(run, step)
    prompts = find_prompts(run, wanted, errors)
    if not prompts:
        problem = "has that text, and no such row" if wanted.isdecimal() else "contains that text"
        searched = f"no prompt of {len(run.dumped_steps)} steps"
        raise ConfigError(f"--prompt {wanted!r}: {searched} {problem}")
    if len(prompts) == 1:
        yield from _prompt_history(run, prompts[0], step, terminal)
    else:
        # The search stops at this number of rows, so there may be more.
        more = " or more" if len(prompts) == _MAX_ROWS else ""
        yield terminal.line(f"{len(prompts)}{more} prompts; --prompt ROW shows one", "title")
        columns = [Column("row", 8), Column("steps", 7), Column("first", 8), Column("last", 8)]
        rows = []
        for groups in prompts:
            means = [number(group.mean) for group in groups.values()]
            newest = groups[max(groups)]
            figures = [number(newest.row), str(len(means)), means[0], means[-1]]
            rows.append([*figures, f"  {newest.prompt}"])
        yield from terminal.elide(terminal.table([*columns, PROMPT_COLUMN], rows), 1 + _NUM_ROWS)
    yield from error_lines(errors, terminal)


def _prompt_history(
    run: RecordedRun, groups: Mapping[int, PromptGroup], step: int | None, terminal: Terminal
) -> Iterator[Line]:
    """Yields the page of one prompt: its rewards over the steps, and its completions at `step`.

    `groups` has the prompt's group at each step. If `step` is None, the newest of them is taken.
    """
    step = max(groups) if step is None else step
    row = groups[max(groups)].row
    errors = ReadErrors()  # not shown: `prompt_page` shows those of its search
    dump = run.files.rollouts(step, errors=errors, is_wanted=has_row(row))
    records = [record for _, record in dump if record.row == row]
    title = f"row {number(row)}: sampled at {len(groups)} of "
    yield terminal.line(f"{title}{len(run.dumped_steps)} steps with completions", "title")
    if records:
        yield from prompt_lines(records[0], terminal)
    yield Line()
    # The curve of the mean reward, then a row for each of the newest steps.
    label = label_width(terminal)
    means = [group.mean for group in groups.values()]
    drawn = terminal.text(curve(means, terminal.columns - label - 28), "curve")
    figures = f"  first {number(means[0])}  last {number(means[-1])}"
    yield Line.assemble(terminal.pad("mean reward", label), drawn, figures)
    scale = reward_scale(groups.values())
    rows = [[str(group_step), *group.cells(scale)] for group_step, group in groups.items()]
    table = terminal.table([Column("step", 8), *GROUP_COLUMNS], rows)
    yield from terminal.elide(table, 1, _NUM_STEPS)
    if not records:
        yield terminal.line(f"not sampled at step {step}", "warning")
    records.sort(key=lambda record: (record.position, record.sample))
    differences = TokenDifferences(run, step, records, errors)
    for record in records:
        yield Line()
        title = f"step {step}"
        yield from completion_lines(record, title, differences, terminal, has_prompt=False)
    yield from differences.legend_lines(terminal)


def search_lines(
    run: RecordedRun, text: str, step: int | None, terminal: Terminal
) -> Iterator[Line]:
    """Yields completions that contain `text`, ignoring case, then the number of them by step.

    In an episode, the answers of tools and the environment are searched too. Searches all steps if
    `step` is None. Raises ConfigError if the step has no completions."""
    errors = ReadErrors()
    pattern = text_pattern(text)
    # The newest step first, since the present policy matters most.
    steps = [find_dumped_step(run, step)] if step is not None else run.dumped_steps[::-1]
    counts: dict[int, int] = {}
    num_shown = 0
    # If no step has completions, find_dumped_step raises ConfigError.
    for searched_step in steps or [find_dumped_step(run, None)]:
        counts[searched_step] = 0
        for _, record in run.files.rollouts(
            searched_step, errors=errors, is_wanted=contains_text(text)
        ):
            # The answers of tools are in the messages only.
            texts = [record.completion, *map(message_text, record.messages)]
            match = next(filter(None, map(pattern.search, texts)), None)
            if match is None:
                continue
            counts[searched_step] += 1
            # A search of all steps shows a few matches of each, so that one does not fill the page.
            has_room = num_shown < _MAX_SHOWN and (
                step is not None or counts[searched_step] <= _MAX_SHOWN_PER_STEP
            )
            # With --full all matches are shown.
            if terminal.is_full or has_room:
                num_shown += 1
                title = f"step {searched_step}, row {number(record.row)}, sample "
                title += f"{number(record.sample)}, reward {number(record.reward)}"
                yield terminal.line(title, "title")
                yield from _match_lines(match, terminal)
    yield from _summary(counts, text, num_shown, terminal)
    yield from error_lines(errors, terminal)


def _match_lines(match: re.Match[str], terminal: Terminal) -> Iterator[Line]:
    """Returns the lines of the text around `match`, in which all matches are marked.

    With --full they are the whole text. They are marked by a colour, or without colours by >> and
    <<."""
    text = match.string
    if not terminal.is_full:
        begin = max(0, match.start() - _CONTEXT_CHARS)
        end = match.end() + _CONTEXT_CHARS
        prefix = terminal.ellipsis if begin else ""
        suffix = terminal.ellipsis if end < len(text) else ""
        text = f"{prefix}{text[begin:end]}{suffix}"
    styles: Styles = ""
    if terminal.has_colour:
        styles = [""] * len(text)
        # A pattern such as a space matches very often in a long text.
        for marked in islice(match.re.finditer(text), _MAX_MARKED):
            styles[marked.start() : marked.end()] = ["mark"] * len(marked[0])
    else:
        text = match.re.sub(r">>\g<0><<", text, count=_MAX_MARKED)
    return text_lines(text, terminal, styles)


def _summary(
    counts: Mapping[int, int], text: str, num_shown: int, terminal: Terminal
) -> Iterator[Line]:
    """Yields the end of a search's page: how many completions match in all, and at which steps.

    `counts` has the number of matches by step; `num_shown` of them are on the page."""
    steps = sorted(counts)
    matching_steps = [step for step in steps if counts[step]]
    total = sum(counts.values())
    searched = f"{len(steps)} steps" if len(steps) > 1 else f"step {steps[0]}"
    if not total:
        yield terminal.line(f"no completion of {searched} contains {text!r}", "title")
        return
    yield Line()
    note = f"{total} completions of {searched}, {num_shown} of them shown; "
    note += f"first step {matching_steps[0]}, last {matching_steps[-1]}"
    yield from terminal.excerpt(note, 3, styles="title")
    if len(steps) > 1:
        values = [counts[step] for step in steps]
        label = label_width(terminal)
        # Draw the peaks, since single matches would vanish in a mean over many steps.
        drawn = terminal.text(curve(values, terminal.columns - label - 16, is_peak=True), "curve")
        yield Line.assemble(terminal.pad("of each step", label), drawn, f"  most {max(values)}")
    if num_shown < total:
        yield terminal.line("--step N shows those of one step, --full all of them in full", "dim")
