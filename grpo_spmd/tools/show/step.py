"""One step: its metrics in blocks, and its groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.observe.rollout_reader import RolloutRecord
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.dump import (
    Unread,
    largest_differences,
    prompt_text,
    ranges,
    rollouts_of,
    unread_lines,
)
from grpo_spmd.tools.show.overview import time_lines
from grpo_spmd.tools.show.paper import Line, Paper, Span, Value, number

_FIRST = (
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
_OF_MEMORY = ("peak", "allocated", "reserved", "driver_used", "other")
_MOST_GROUPS = 24
_BINS = 8


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, as far as a table tells of them."""

    row: int
    prompt: str
    rewards: list[Value] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    mismatches: list[float] = field(
        default_factory=list
    )  # of each that was trained on, the largest on a token, nats

    def add(self, record: RolloutRecord, mismatch: float | None) -> None:
        self.rewards.append(record.reward)
        self.cut.append(record.finish_reason == "length")
        self.mismatches.extend([mismatch] if mismatch is not None else [])

    @property
    def mismatch(self) -> float | None:
        """A NaN is worse than any number."""
        return max(self.mismatches, key=lambda value: (value != value, value), default=None)

    @property
    def cut_frac(self) -> float:
        return sum(self.cut) / len(self.cut)

    @property
    def known(self) -> list[float]:
        return [
            float(reward) for reward in self.rewards if reward is not None and abs(reward) <= 1e300
        ]

    @property
    def mean(self) -> float | None:
        return math.fsum(self.known) / len(self.known) if self.known else None

    @property
    def spread(self) -> float | None:
        """Of n - 1, as advantages have it."""
        if len(self.known) < 2 or self.mean is None:
            return None
        mean = self.mean
        return math.hypot(*(reward - mean for reward in self.known)) / math.sqrt(
            len(self.known) - 1
        )


def step_lines(run: RecordedRun, step: int, paper: Paper) -> Iterator[Line]:
    metrics = next((line for line in run.steps if line["step"] == step), {})
    evaluation = next((line for line in run.evaluations if line["step"] == step), {})
    of = f" of {run.num_steps}" if run.num_steps else ""
    yield [paper.fitted(f"{run.name}  step {step}{of}", paper.columns, "title")]
    yield from metric_blocks({**metrics, **evaluation}, paper)
    if metrics:
        yield from time_lines([metrics], paper)
    yield from _memory_lines(metrics, paper)
    yield []
    if step in run.dumped_steps:
        yield from _group_lines(run, step, paper)
    else:
        said = f"no completions of step {step} are there; {ranges(run.dumped_steps)}"
        yield [paper.fitted(said, paper.columns, "warning")]


def metric_blocks(metrics: Mapping[str, Any], paper: Paper) -> Iterator[Line]:
    """Names without their first part under that, in as many columns as have room."""
    num = max(1, paper.columns // 40)
    label = (paper.columns - 2) // num - 12
    blocks: dict[str, list[str]] = {name: [] for name in _FIRST}
    for name in metrics:
        block, slash, _ = name.partition("/")
        if slash and block != "memory" and not re.fullmatch(r"time/(?!wall)\w+_s", name):
            blocks.setdefault(block, []).append(name)
    for block, names in blocks.items():
        if not names:
            continue
        yield [paper.fitted(block, paper.columns, "role")]
        texts = [name.partition("/")[2] for name in names]
        num_rows = -(-len(names) // num)
        for row in range(num_rows):
            line = [Span("  ")]
            for place in range(row, len(names), num_rows):
                value = number(metrics[names[place]]).rjust(8)
                line += [paper.padded(texts[place], label, "dim"), Span(f"{value}    ")]
            yield line


def _memory_lines(metrics: Mapping[str, Any], paper: Paper) -> Iterator[Line]:
    """A row a phase, GiB of the fullest rank."""
    phases = [
        found[1] for name in metrics if (found := re.fullmatch(r"memory/(.+)/peak_gib", name))
    ]
    if not phases:
        return
    width = 12 if paper.columns >= 78 else 9
    titles = "".join(title.replace("_used", "")[: width - 1].rjust(width) for title in _OF_MEMORY)
    yield [paper.padded("memory (GiB)", 14, "role"), Span(titles, "dim")]
    for phase in phases:
        values = [metrics.get(f"memory/{phase}/{of}_gib") for of in _OF_MEMORY]
        yield [
            paper.padded(f"  {phase}", 14),
            Span("".join(number(value).rjust(width) for value in values)),
        ]


def groups_of(run: RecordedRun, step: int, unread: Unread) -> list[Group]:
    """In the order of the prompt stream."""
    mismatch, groups = largest_differences(run.folder, step, unread), dict[int, Group]()
    for record in rollouts_of(run.folder, step, unread):
        if record.position not in groups:
            groups[record.position] = Group(record.row, prompt_text(record.prompt)[:400])
        groups[record.position].add(
            record, mismatch.get(-1 if record.rollout_id is None else record.rollout_id)
        )
    return [groups[position] for position in sorted(groups)]


def _group_lines(run: RecordedRun, step: int, paper: Paper) -> Iterator[Line]:
    unread = Unread()
    groups = groups_of(run, step, unread)
    known = [reward for group in groups for reward in group.known]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    num = sum(len(group.rewards) for group in groups)
    said = f"{len(groups)} groups, {num} completions; rewards from {number(low)} to {number(high)}"
    yield [paper.fitted(said + ", least mean first", paper.columns, "role")]
    groups.sort(key=lambda group: (group.mean is None, group.mean or 0.0))
    has_scores = any(group.mismatch is not None for group in groups) and paper.columns >= 76
    titles = f"{'row':>7}{'n':>5}  {'rewards':{_BINS}}{'mean':>8}{'spread':>8}{'cut':>6}"
    yield [Span(titles + f"{'mismatch':>10}" * has_scores + "  prompt", "dim")]
    yield from _table(groups, low, high, has_scores, paper)
    unscored = sum(reward is None for group in groups for reward in group.rewards)
    if unscored:
        yield [paper.fitted(f"{unscored} completions have no reward", paper.columns, "warning")]
    yield from unread_lines(unread, paper)
    yield []
    hint = f"--step {step} --worst 3   --step {step} --best 3   --prompt ROW   --grep TEXT"
    yield [paper.fitted(f"more: {hint}", paper.columns, "dim")]


def _table(
    groups: Sequence[Group], low: float, high: float, has_scores: bool, paper: Paper
) -> Iterator[Line]:
    half = _MOST_GROUPS // 2
    for place, group in enumerate(groups):
        if len(groups) > _MOST_GROUPS and half <= place < len(groups) - half:
            if place == half:
                said = f"{len(groups) - 2 * half} groups between them".center(
                    paper.columns
                ).rstrip()
                yield [paper.fitted(said, paper.columns, "dim")]
            continue
        figures = f"{number(group.mean):>8}{number(group.spread):>8}{group.cut_frac:>6.0%}"
        figures += f"{number(group.mismatch):>10}  " if has_scores else "  "
        begin = f"{number(group.row):>7}{len(group.rewards):>5}  "
        drawn = paper.counts(group.rewards, low, high, _BINS)
        room = paper.columns - len(begin) - _BINS - len(figures)
        yield [Span(begin), Span(drawn, "curve"), Span(figures), paper.fitted(group.prompt, room)]
