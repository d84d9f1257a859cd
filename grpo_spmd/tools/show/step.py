"""Shows one step in the terminal, and redraws any page while a run goes on.

The page of a step has its metrics in blocks, memory by phase, and a table of its groups; a group is
the completions of one prompt. `follow` draws a page again whenever metrics.jsonl grows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.report.run import RecordedRun, changes, file_stamps, read_run
from grpo_spmd.tools.report.verdict import matching_metrics
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

_RUNNING_STATES = ("going", "silent")
Draw = Callable[[RecordedRun, Terminal], Iterator[Line]]
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
    Column("n", 5),
    Column("mean", 8),
    Column("spread", 8),
    Column("cut", 6),
    Column("  rewards", 10, "<", style="curve"),
)
PROMPT_COLUMN = Column("  prompt", align="<")
_MAX_PROMPT_CHARS = 400


def follow(run_dir: Path, draw: Draw, is_full: bool) -> None:
    """Draws the page when metrics.jsonl or the terminal changed, until the run has ended.

    If stdout is no terminal, writes the page once, and then a line for each step. Raises
    ConfigError if there is no run.
    """
    last_step: int | None = None

    def look() -> object:
        return file_stamps([run_dir]), find_terminal()

    for _ in changes(look, poll_s=0.5, min_age_s=0.0, state_s=10.0, age_factor=10.0):
        terminal = find_terminal(is_full)
        run = read_run(run_dir)
        has_ended = run.state not in _RUNNING_STATES
        if terminal.is_tty or last_step is None:
            try:
                lines = list(draw(run, terminal))
            except ConfigError as error:
                if has_ended:
                    raise
                # The first completions may be to come.
                warning = terminal.excerpt(str(error), 4, styles="warning")
                lines = [*state_lines(run, terminal), *warning]
            if terminal.is_tty:
                terminal.redraw(lines, is_last=has_ended)
            else:
                terminal.write(lines)
        else:
            if run.last_step != last_step:
                terminal.write(list(newest_lines(run, terminal))[-1:])
            if has_ended:
                terminal.write(state_lines(run, terminal))
        if has_ended:
            return
        last_step = run.last_step


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

    def cells(self, scale: tuple[float, float]) -> list[str]:
        """Returns what a table has of it below GROUP_COLUMNS; `scale` is low and high."""
        figures = [str(len(self.rewards)), number(self.mean), number(self.spread)]
        cut_frac = self.num_cut / len(self.rewards)
        return [*figures, f"{cut_frac:.0%}", f"  {histogram(self.rewards, *scale)}"]


def reward_scale(groups: Iterable[PromptGroup]) -> tuple[float, float]:
    """Returns the lowest and the highest reward: one scale, to compare the groups' histograms."""
    rewards = [reward for group in groups for reward in group.known_rewards]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def step_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of one step."""
    metrics = next((line for line in run.steps if line["step"] == step), {})
    evaluation = next((line for line in run.evaluations if line["step"] == step), {})
    total = f" of {run.num_steps}" if run.num_steps else ""
    yield terminal.line(f"{run.name}  step {step}{total}", "title")
    yield from metric_blocks({**metrics, **evaluation}, terminal)
    if metrics:
        yield from time_lines([metrics], terminal)
    phases = matching_metrics([metrics], r"memory/(.+)/peak_gib")
    if phases:
        # A row for each phase, in GiB of the fullest rank.
        width = 12 if terminal.columns >= 78 else 9
        titles = [kind.replace("_used", "")[: width - 1] for kind in _MEMORY_KINDS]
        columns = [Column("memory (GiB)", 14, "<"), *(Column(title, width) for title in titles)]
        rows = []
        for phase in phases:
            values = [metrics.get(f"memory/{phase}/{kind}_gib") for kind in _MEMORY_KINDS]
            rows.append([f"  {phase}", *map(number, values)])
        yield from terminal.table(columns, rows)
    yield Text()
    if step in run.dumped_steps:
        yield from _group_lines(run, step, terminal)
    else:
        warning = f"no completions of step {step} are there; {describe_steps(run.dumped_steps)}"
        yield terminal.line(warning, "warning")


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
            yield terminal.line(block, "role")
        num_rows = -(-len(names) // num_columns)
        for row in range(num_rows):
            line = Text("  ")
            for name in names[row::num_rows]:
                line.append_text(terminal.pad(name.partition("/")[2], label, "dim"))
                line.append(f"{number(metrics[name]):>8}    ")
            yield line


def _group_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    errors = ReadErrors()
    # A step's largest differences are one number a rollout, so they fit into memory.
    mismatches: dict[int | None, float] = {
        scores.rollout_id: math.nan if scores.difference_max is None else scores.difference_max
        for scores in run.files.scores(step, errors)
    }
    groups_by_position: dict[int, PromptGroup] = {}
    for record in run.files.rollouts(step, errors=errors):
        if record.position not in groups_by_position:
            prompt = prompt_text(record.prompt)[:_MAX_PROMPT_CHARS]
            groups_by_position[record.position] = PromptGroup(record.row, prompt)
        groups_by_position[record.position].add(record, mismatches.get(record.rollout_id))
    # The prompts that need a look come first; groups without a reward last.
    groups = [groups_by_position[position] for position in sorted(groups_by_position)]
    groups.sort(key=lambda group: (group.mean is None, group.mean or 0.0))
    scale = reward_scale(groups)
    rewards = [reward for group in groups for reward in group.rewards]
    title = f"{len(groups)} groups, {len(rewards)} completions; rewards from {number(scale[0])} to "
    yield terminal.line(f"{title}{number(scale[1])}, least mean first", "role")
    columns = [Column("row", 7), *GROUP_COLUMNS, Column("mismatch", 8), PROMPT_COLUMN]
    rows = [
        [number(group.row), *group.cells(scale), number(group.mismatch), f"  {group.prompt}"]
        for group in groups
    ]
    lines = list(terminal.table(columns, rows))
    # Both ends are interesting: the worst and the best groups.
    half = _MAX_GROUPS // 2
    num_hidden = len(groups) - 2 * half
    if num_hidden > 0 and not terminal.is_full:
        note = f"{num_hidden} groups between them (--full shows them)"
        lines[1 + half : -half] = [terminal.line(note, "dim", 8)]
    yield from lines
    num_unscored = rewards.count(None)
    if num_unscored:
        yield terminal.line(f"{num_unscored} completions have no reward", "warning")
    yield from error_lines(errors, terminal)
    yield Text()
    hint = f"more: --step {step} --worst 3   --step {step} --best 3   --prompt ROW   --grep TEXT"
    yield terminal.line(hint, "dim")
