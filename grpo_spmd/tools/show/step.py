"""Shows one step in the terminal, and redraws any page while a run goes on.

The page of a step has its metrics in blocks, memory by phase, and a table of its groups; a group is
the completions of one prompt. `follow` draws a page again whenever metrics.jsonl grows.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.report.run import RecordedRun, file_size, read_run
from grpo_spmd.tools.show.completions import (
    describe_steps,
    error_lines,
    prompt_text,
)
from grpo_spmd.tools.show.overview import (
    Value,
    histogram,
    is_drawable,
    newest_lines,
    number,
    state_lines,
    time_lines,
)
from grpo_spmd.tools.terminal import Column, Line, Terminal, find_terminal

_POLL_S = 0.5  # between two looks at the size of metrics.jsonl
_STATE_S = 10.0  # between two looks at the run's state: it may have been killed
# After reading and drawing, nothing is read for so many times as long as that took.
_PAUSE_FACTOR = 10
_RUNNING_STATES = ("going", "silent")
Draw = Callable[[RecordedRun, Terminal], list[Line]]
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
_MEMORY_KINDS = ("peak", "allocated", "reserved", "driver_used", "other")
_MAX_GROUPS = 24
GROUP_COLUMNS = (
    Column("n", ">", 5),
    Column("mean", ">", 8),
    Column("spread", ">", 8),
    Column("cut", ">", 6),
    Column("  rewards", width=10, style="curve"),
)
_MAX_PROMPT_CHARS = 400


def follow(run_dir: Path, draw: Draw) -> None:
    """Draws the page when metrics.jsonl or the terminal changed, until the run has ended.

    If stdout is no terminal, writes the page once, and then a line for each step. Raises
    ConfigError if there is no run.
    """
    drawn_for: tuple[int, Terminal] | None = None
    is_first = True
    last_step = 0
    next_draw_s = 0.0
    next_state_s = 0.0
    while True:
        begin = time.monotonic()
        terminal = find_terminal()
        current = (file_size(run_dir / "metrics.jsonl"), terminal)
        if (begin >= next_draw_s and current != drawn_for) or begin >= next_state_s:
            run = read_run(run_dir)
            has_ended = run.state not in _RUNNING_STATES
            if terminal.is_tty or is_first:
                page = _draw_page(draw, run, terminal, has_ended)
                _show_page(page, terminal, clear=is_first or has_ended, redraw=not has_ended)
            else:
                if run.last_step != last_step:
                    terminal.write(list(newest_lines(run, terminal))[-1:])
                if has_ended:
                    terminal.write(state_lines(run, terminal))
            if has_ended:
                return
            is_first = False
            drawn_for = current
            last_step = run.last_step
            # A large run takes long to read, and must not keep a core busy all the time.
            end = time.monotonic()
            next_draw_s = end + _PAUSE_FACTOR * (end - begin)
            next_state_s = max(next_draw_s, end + _STATE_S)
        time.sleep(_POLL_S)


def _draw_page(draw: Draw, run: RecordedRun, terminal: Terminal, has_ended: bool) -> list[Line]:
    """Returns the page, or why there is none yet: the first completions may be to come."""
    try:
        return draw(run, terminal)
    except ConfigError as error:
        if has_ended:
            raise
        warning = terminal.excerpt(str(error), 4, styles="warning")
        return [*state_lines(run, terminal), *warning]


def _show_page(lines: list[Line], terminal: Terminal, *, clear: bool, redraw: bool) -> None:
    if terminal.is_tty and clear:
        terminal.clear()
    if terminal.is_tty and redraw:
        terminal.redraw(lines)
    else:
        # The last page stays as a whole, for a user who scrolls back.
        terminal.write(lines)


@dataclass
class PromptGroup:
    """The completions of one prompt at one step, as rows of figures."""

    row: int
    prompt: str
    rewards: list[Value] = field(default_factory=list)
    num_cut: int = 0
    mismatches: list[float] = field(default_factory=list)  # of each trained completion, in nats

    def add(self, record: RolloutRecord, mismatch: float | None) -> None:
        self.rewards.append(record.reward)
        self.num_cut += record.finish_reason == "length"
        if mismatch is not None:
            self.mismatches.append(mismatch)

    @property
    def mismatch(self) -> float | None:
        """The largest |policy - engine| of a trained token; NaN is worse than any number."""
        return max(self.mismatches, key=lambda value: (math.isnan(value), value), default=None)

    @property
    def cut_frac(self) -> float:
        return self.num_cut / len(self.rewards)

    @property
    def known_rewards(self) -> list[float]:
        return [
            float(reward) for reward in self.rewards if reward is not None and is_drawable(reward)
        ]

    @property
    def mean(self) -> float | None:
        rewards = self.known_rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def spread(self) -> float | None:
        """The standard deviation with n - 1, as in advantages."""
        rewards = self.known_rewards
        if len(rewards) < 2 or self.mean is None:
            return None
        mean = self.mean
        return math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)

    def cells(self, scale: tuple[float, float], terminal: Terminal) -> list[str]:
        """Returns what a table has of it below GROUP_COLUMNS; `scale` is low and high."""
        low, high = scale
        heights = histogram(self.rewards, low, high, is_unicode=terminal.is_unicode)
        figures = [str(len(self.rewards)), number(self.mean), number(self.spread)]
        return [*figures, f"{self.cut_frac:.0%}", f"  {heights}"]


def reward_scale(groups: Iterable[PromptGroup]) -> tuple[float, float]:
    """Returns the lowest and the highest reward: one scale, to compare the groups' histograms."""
    rewards = [reward for group in groups for reward in group.known_rewards]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def step_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of one step."""
    metrics = next((line for line in run.steps if line["step"] == step), {})
    evaluation = next((line for line in run.evaluations if line["step"] == step), {})
    total = f" of {run.num_steps}" if run.num_steps else ""
    yield terminal.fit(f"{run.name}  step {step}{total}", terminal.columns, "title")
    yield from metric_blocks({**metrics, **evaluation}, terminal)
    if metrics:
        yield from time_lines([metrics], terminal)
    yield from _memory_lines(metrics, terminal)
    yield Text()
    if step in run.dumped_steps:
        yield from _group_lines(run, step, terminal)
    else:
        warning = f"no completions of step {step} are there; {describe_steps(run.dumped_steps)}"
        yield terminal.fit(warning, terminal.columns, "warning")


def metric_blocks(metrics: Mapping[str, Any], terminal: Terminal) -> Iterator[Line]:
    """Yields metrics below the first part of their names, in as many columns as fit."""
    num_columns = max(1, terminal.columns // 40)
    label = (terminal.columns - 2) // num_columns - 12
    # A fixed order for the usual blocks; other metrics follow as the run wrote them.
    blocks: dict[str, list[str]] = {name: [] for name in _FIRST_BLOCKS}
    for name in metrics:
        block, slash, _ = name.partition("/")
        # Memory and the phases' times have tables of their own.
        if slash and block != "memory" and not re.fullmatch(r"time/(?!wall)\w+_s", name):
            blocks.setdefault(block, []).append(name)
    for block, names in blocks.items():
        if names:
            yield terminal.fit(block, terminal.columns, "role")
        num_rows = -(-len(names) // num_columns)
        for row in range(num_rows):
            line = Text("  ")
            for name in names[row::num_rows]:
                line.append_text(terminal.pad(name.partition("/")[2], label, "dim"))
                line.append(f"{number(metrics[name]):>8}    ")
            yield line


def _memory_lines(metrics: Mapping[str, Any], terminal: Terminal) -> Iterator[Line]:
    """Yields a row for each phase, in GiB of the fullest rank."""
    phases = [
        match[1] for name in metrics if (match := re.fullmatch(r"memory/(.+)/peak_gib", name))
    ]
    if not phases:
        return
    # Five columns of figures beside the phase's name.
    width = 12 if terminal.columns >= 78 else 9
    titles = "".join(kind.replace("_used", "")[: width - 1].rjust(width) for kind in _MEMORY_KINDS)
    yield Text.assemble(terminal.pad("memory (GiB)", 14, "role"), (titles, "dim"))
    for phase in phases:
        values = [number(metrics.get(f"memory/{phase}/{kind}_gib")) for kind in _MEMORY_KINDS]
        figures = "".join(value.rjust(width) for value in values)
        yield Text.assemble(terminal.pad(f"  {phase}", 14), figures)


def read_groups(run: RecordedRun, step: int, errors: ReadErrors) -> list[PromptGroup]:
    """Returns the groups of a step in the order of the prompt stream."""
    # A step's largest differences are one number a rollout, so they fit into memory.
    mismatches: dict[int | None, float] = {
        scores.rollout_id: math.nan if scores.difference_max is None else scores.difference_max
        for _, scores in run.files.scores(step, errors)
    }
    groups: dict[int, PromptGroup] = {}
    for _, record in run.files.rollouts(step, errors=errors):
        if record.position not in groups:
            prompt = prompt_text(record.prompt)[:_MAX_PROMPT_CHARS]
            groups[record.position] = PromptGroup(record.row, prompt)
        groups[record.position].add(record, mismatches.get(record.rollout_id))
    return [groups[position] for position in sorted(groups)]


def _group_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    errors = ReadErrors()
    groups = read_groups(run, step, errors)
    low, high = scale = reward_scale(groups)
    num_completions = sum(len(group.rewards) for group in groups)
    title = f"{len(groups)} groups, {num_completions} completions; "
    title += f"rewards from {number(low)} to {number(high)}, least mean first"
    yield terminal.fit(title, terminal.columns, "role")
    # The prompts that need a look come first; groups without a reward last.
    groups.sort(key=lambda group: (group.mean is None, group.mean or 0.0))
    yield from _group_table(groups, scale, terminal)
    num_unscored = sum(reward is None for group in groups for reward in group.rewards)
    if num_unscored:
        warning = f"{num_unscored} completions have no reward"
        yield terminal.fit(warning, terminal.columns, "warning")
    yield from error_lines(errors, terminal)
    yield Text()
    hint = f"--step {step} --worst 3   --step {step} --best 3   --prompt ROW   --grep TEXT"
    yield terminal.fit(f"more: {hint}", terminal.columns, "dim")


def _group_table(
    groups: Sequence[PromptGroup], scale: tuple[float, float], terminal: Terminal
) -> Iterator[Line]:
    last_columns = [Column("mismatch", ">", 8), Column("  prompt")]
    columns = [Column("row", ">", 7), *GROUP_COLUMNS, *last_columns]
    rows = []
    for group in groups:
        last_cells = [number(group.mismatch), f"  {group.prompt}"]
        rows.append([number(group.row), *group.cells(scale, terminal), *last_cells])
    titles, *lines = terminal.table(columns, rows, gap=0)
    yield titles
    half = _MAX_GROUPS // 2
    num_hidden = len(groups) - 2 * half
    if num_hidden <= 0:
        yield from lines
        return
    # Both ends are interesting: the worst and the best groups.
    yield from lines[:half]
    note = f"{num_hidden} groups between them".center(terminal.columns).rstrip()
    yield terminal.fit(note, terminal.columns, "dim")
    yield from lines[-half:]
