"""A run on one screen: what became of it, what a person should look at, its curves, where the time goes."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_spmd.observe.console import Console
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.report.verdict import checks, findings
from grpo_spmd.tools.show.paper import Line, Paper, Span, Value, number, width_of

_MOST_FINDINGS, _MOST_COMPONENTS, _MOST_SETS, _REPORT_LINES = 8, 8, 4, 12
_GOOD, _BAD = ("done", "going"), ("failed", "killed")
_MARKS = {"bad": "!! ", "warning": "!  ", "ok": "ok "}
_FIGURE = 8  # columns of a number and the space before it


class Curve(NamedTuple):
    """One row: what stands beside it, the metric, and whether of several steps the largest is drawn, not their mean."""

    label: str
    metric: str
    is_peak: bool = False


_CURVES = (
    Curve("spread", "reward/std"),
    Curve("groups alike", "reward/zero_std_groups_frac"),
    Curve("tokens", "completion/tokens_mean"),
    Curve("truncated", "completion/truncated_frac"),
    Curve("turns", "episode/turns_mean"),
    Curve("entropy", "loss/entropy"),
    Curve("KL", "loss/kl"),
    Curve("clipped", "loss/clip_frac"),
    Curve("grad norm", "optim/grad_norm", is_peak=True),
    Curve("mismatch KL", "weight_sync/mismatch_kl", is_peak=True),
)
_SPEED = (
    Curve("tokens/s", "rollout/tokens_per_s"),
    Curve("step time (s)", "time/step_s", is_peak=True),
)
_IDLE = (
    "loss/kl",
    "loss/clip_frac",
    "episode/turns_mean",
)  # shown where they were ever another number than 0


def overview(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    yield from state_lines(run, paper)
    yield from _finding_lines(run, paper)
    if not run.steps:
        yield from _report_lines(run, paper)
        return
    yield []
    yield from curve_lines(run, paper)
    yield []
    yield from time_lines(run.steps, paper)
    yield from newest_line(run, paper)
    if run.state in _BAD:
        yield from _report_lines(run, paper)
    yield from _next_lines(run, paper)


def state_lines(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    style = "good" if run.state in _GOOD else "bad" if run.state in _BAD else "warning"
    name = paper.fitted(run.name, paper.columns // 3, "title")
    said = run.why if run.why.startswith(run.state) else f"{run.state}: {run.why}"
    yield from _hanging(paper, [name, Span("  ")], said, style)
    launch = run.launches[-1] if run.launches else {}
    facts = [str(run.config["model.path"])] if run.config.get("model.path") else []
    if type(ranks := launch.get("world_size")) is int:
        devices = launch.get("devices")
        on = (
            f" on {', '.join(map(str, devices))}"
            if isinstance(devices, Mapping) and devices
            else ""
        )
        facts.append(f"{number(ranks)} rank{'s' * (ranks != 1)}{on}")
    if isinstance(start := launch.get("start"), str):
        facts.append(f"started {start[:16].replace('T', ' ')} UTC")
    if len(run.launches) > 1:
        facts.append(f"{len(run.launches)} launches")
    if facts:
        yield from paper.excerpt(", ".join(facts), 2, 0, 0, "dim")


def _finding_lines(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    found, held = [finding for finding in findings(run) if finding.text != run.why], checks(run)
    for finding in found[:_MOST_FINDINGS]:
        since = f" (from step {finding.step})" if finding.step is not None else ""
        said = f"{finding.title}{since}: {finding.text}"
        yield from _hanging(paper, [Span(_MARKS[finding.level], finding.level)], said, "")
    if len(found) > _MOST_FINDINGS:
        yield [
            paper.fitted(
                f"   and {len(found) - _MOST_FINDINGS} more in the report", paper.columns, "dim"
            )
        ]
    for check in held:
        if check.level != "ok":
            said = f"{check.name}: {check.value}, bound {check.bound}: {check.text}"
            yield from _hanging(paper, [Span(_MARKS[check.level], check.level)], said, "")
    if well := "; ".join(check.name for check in held if check.level == "ok"):
        yield from _hanging(paper, [Span(_MARKS["ok"], "ok")], f"checks that hold: {well}", "dim")


def _hanging(paper: Paper, begin: Sequence[Span], text: str, style: str) -> Iterator[Line]:
    """`begin`, then `text` wrapped beside it, at most four lines."""
    indent = sum(width_of(span.shown) for span in begin)
    wrapped = Paper(paper.columns - indent, paper.encoding).excerpt(text, 4, 0, 0, style)
    for place, line in enumerate(wrapped):
        yield [*(begin if place == 0 else [Span(" " * indent)]), *line]


def curve_lines(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    """A row a metric, under a header: its label, its curve over the steps, then numbers of all steps."""
    components = sorted(
        {name for line in run.steps for name in line if re.fullmatch("reward/.+/mean", name)}
    )
    rows = [Curve("reward", "reward/mean")]
    if len(components) > 1:
        rows += [Curve(f"  {name[7:-5]}", name) for name in components[:_MOST_COMPONENTS]]
    rows += [
        row
        for row in _CURVES
        if row.metric not in _IDLE or any(line.get(row.metric) for line in run.steps)
    ]
    sets = sorted(
        {name for line in run.evaluations for name in line if re.fullmatch("eval/.+/mean", name)}
    )
    own = [(row, run.steps) for row in rows]
    own += [(Curve(f"eval {name[5:-5]}", name), run.evaluations) for name in sets[:_MOST_SETS]]
    own += [(row, run.steps) for row in _SPEED]
    label = label_width(paper)
    width = paper.columns - label - 4 * _FIGURE
    first, last = run.steps[0]["step"], run.last_step
    titles = "".join(title.rjust(_FIGURE) for title in ("first", "last", "min", "max"))
    steps = f"step {first}..{last}" if first != last else f"step {first}"
    yield [paper.padded("", label), paper.padded(steps, width, "dim"), Span(titles, "dim")]
    for row, lines in own:
        values: list[Value] = [line.get(row.metric) for line in lines]
        known = [value for value in values if value is not None]
        if known:
            figures = (known[0], known[-1], min(known), max(known))
            yield [
                paper.padded(row.label, label),
                paper.padded(paper.curve(values, width - 1, row.is_peak), width, "curve"),
                Span("".join(number(figure).rjust(_FIGURE) for figure in figures)),
            ]


def time_lines(lines: Sequence[Mapping[str, Any]], paper: Paper) -> Iterator[Line]:
    """A bar a phase, of the time of all `lines` together, the longest first."""
    total = _sum_of("time/step_s", lines)
    names = {name for line in lines for name in line if re.fullmatch(r"time/\w+_s", name)}
    names -= {"time/step_s", "time/wall_s", "time/unix_s"}
    seconds = {name[5:-2]: _sum_of(name, lines) for name in names}
    rest = total - math.fsum(seconds.values())
    if total <= 0:
        return
    seconds["between them"] = max(0.0, rest)
    title = paper.fitted("where the time goes", paper.columns, "role")
    said = f": {number(total / len(lines))} s a step, each phase as its slowest rank took it"
    yield [title, paper.fitted(said, paper.columns - len(title.shown), "dim")]
    label = label_width(paper)
    width = paper.columns - label - 18
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        if seconds[name] / total >= 0.005:
            share, mean = min(99.0, seconds[name] / total), seconds[name] / len(lines)
            bar = paper.padded(paper.bar(share, width), width, "curve")
            yield [paper.padded(name, label), bar, Span(f"{share:>6.0%}{number(mean):>9} s")]


def _sum_of(name: str, lines: Sequence[Mapping[str, Any]]) -> float:
    values = (line.get(name) or 0.0 for line in lines)
    return math.fsum(value for value in values if 0 <= value < 1e12)  # seconds


def label_width(paper: Paper) -> int:
    return 18 if paper.columns >= 76 else 14


def newest_line(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    """As the run's own console shows its last step; none where there is no room for it."""
    newest = {"optim/updates": None, "optim/skipped_updates": None, **run.steps[-1]}
    header, line = Console(run.num_steps or run.last_step).lines(newest)
    if len(header) <= paper.columns:
        yield []
        yield [paper.fitted(header, paper.columns, "dim")]
        yield [paper.fitted(line, paper.columns)]


def _report_lines(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    """The beginning of what the doctor left."""
    for name, text in run.reports.items():
        yield []
        yield [paper.fitted(f"logs/{name}", paper.columns, "bad")]
        yield from paper.excerpt(text, _REPORT_LINES, 0, 2)


def _next_lines(run: RecordedRun, paper: Paper) -> Iterator[Line]:
    step = run.last_step
    ways = [f"--step {step}"]
    if run.dumped_steps:
        ways += ["--worst 3", "--best 3", "--prompt P", "--grep TEXT"]
    ways += ["--follow"] * (run.state == "going")
    said = f"more: {'  '.join(ways)}; python -m grpo_spmd.report makes a page of it"
    yield []
    for line in textwrap.wrap(said, paper.columns - 1):
        yield [paper.span(line, "dim")]
