"""Shows a run on one screen: its state, findings, curves, and where the time goes.

The first part of the file has pure functions that all pages share: charts that are one row high,
and numbers of at most seven characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_spmd.diagnosis.curves import matching_metrics
from grpo_spmd.diagnosis.findings import list_checks, list_findings
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.console import Console
from grpo_spmd.tools.terminal import BARS, Column, Line, Terminal

Value = float | int | None
_MAX_CURVES = 8  # at most so many for components of the reward, and as many for evaluations
LABEL_COLUMNS = 18  # left of curves and bars
_GOOD_STATES = ("done", "running")
_BAD_STATES = ("failed", "killed")
_MARKS = {"bad": "!! ", "warning": "!  ", "ok": "ok "}
_FIGURE_WIDTH = 8  # columns of a number and the space before it


def curve(values: Sequence[Value], width: int, is_peak: bool = False) -> str:
    """Returns `values` as a row of bars, of at most `width` characters.

    The lowest bar is the smallest drawn value, the highest bar the largest. If there are more
    values than columns, a bar is the mean of neighbouring values, or the largest of them if
    `is_peak`; the sizes of these bins differ by at most one. A space means that no value is known.
    """
    floats = [math.nan if v is None or not is_drawable(v) else float(v) for v in values]
    merge = np.max if is_peak else np.mean
    drawn: list[float] = []
    for neighbours in np.array_split(np.array(floats), max(1, min(width, len(values)))):
        numbers = neighbours[np.isfinite(neighbours)]
        drawn.append(float(merge(numbers)) if len(numbers) else math.nan)
    finite = [value for value in drawn if math.isfinite(value)]
    low = min(finite, default=0.0)
    spread = max(finite, default=0.0) - low
    text = ""
    for value in drawn:
        # If all values are equal, their bars have half the height.
        height = (value - low) / spread * 8 if spread else value - low + 4
        text += " " if math.isnan(height) else BARS[min(7, int(height))]
    return text


def bar(frac: float, width: int) -> str:
    """Returns a horizontal bar that fills the fraction `frac` of `width` columns."""
    return BARS[-1] * round(min(1.0, max(0.0, frac)) * width)


def histogram(values: Sequence[float], low: float, high: float, width: int = 8) -> str:
    """Returns a histogram as a row of bars, one for each of `width` bins from `low` to `high`.

    A space means that the bin is empty.
    """
    counts, _ = np.histogram(values, bins=width, range=(low, high))
    # The fullest bin has the full height, and a bin with one value is visible.
    peak = max(1, counts.max())
    return "".join(" " if not n else BARS[min(7, (n * 8 - 1) // peak)] for n in counts)


def is_drawable(value: float | int) -> bool:
    """Returns False for NaN, infinity and whole numbers that no float holds."""
    # Larger numbers are not drawn: sums and differences of them would be infinite.
    return abs(value) <= 1e300


def number(value: object) -> str:
    """Returns a number as text of at most 7 characters: with 4 digits or more, or an exponent.

    Returns "-" for anything that is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if not is_drawable(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    size = abs(value)
    if value == 0 or (isinstance(value, int) and size < 1_000_000):
        return str(int(value))
    texts = (f"{value:.0f}" if size >= 1000 else f"{value:.4g}", f"{value:.1e}", f"{value:.0e}")
    return next(text for text in texts if len(text) <= 7)


class CurveRow(NamedTuple):
    """One row of the table of curves: its label and the metric that it draws."""

    label: str
    metric: str
    is_peak: bool = False  # a bar for several steps shows the largest value, not the mean


_CURVES = (
    CurveRow("teacher KL", "teacher/kl"),
    CurveRow("critic", "critic/explained_variance"),
    CurveRow("spread", "reward/std"),
    CurveRow("groups alike", "reward/zero_std_groups_frac"),
    CurveRow("tokens", "completion/tokens_mean"),
    CurveRow("truncated", "completion/truncated_frac"),
    CurveRow("turns", "episode/turns_mean"),
    CurveRow("entropy", "loss/entropy"),
    CurveRow("KL", "loss/kl"),
    CurveRow("clipped", "loss/clip_frac"),
    CurveRow("grad norm", "optim/grad_norm", is_peak=True),
    CurveRow("mismatch KL", "weight_sync/mismatch_kl", is_peak=True),
    CurveRow("tokens/s", "rollout/tokens_per_s"),
    CurveRow("step time (s)", "time/step_s", is_peak=True),
)


def overview(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of a run: state, findings, curves, time by phase, reports and a hint."""
    yield from state_lines(run, terminal)
    yield from _finding_lines(run, terminal)
    if run.steps:
        yield Line()
        yield from curve_lines(run, terminal)
        yield Line()
        yield from time_lines(run.steps, terminal)
        yield from newest_lines(run, terminal)
    if run.state in _BAD_STATES or not run.steps:
        # The reports of the doctor on a failed or hanging run.
        for name, text in run.reports.items():
            yield Line()
            yield terminal.line(f"logs/{name}", "bad")
            # The end of a report says what stopped the ranks, so it is shown too.
            yield from terminal.excerpt(text, 6, 6, indent=2)
    if run.steps:
        hint = f"more: --step {run.last_step}"
        if run.dumped_steps:
            hint += "  --worst 3  --best 3  --prompt P  --grep TEXT"
        hint += "  --follow" * (run.state == "running")
        yield Line()
        hint += "; python -m grpo_spmd.report makes a page of it"
        yield from terminal.excerpt(hint, 4, styles="dim")


def state_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the state of a run, its model, its ranks and devices, and its start."""
    # A run may be neither good nor bad, such as a preempted or silent one.
    style = "good" if run.state in _GOOD_STATES else "warning"
    if run.state in _BAD_STATES:
        style = "bad"
    name = terminal.fit(run.name, terminal.columns // 3, "title")
    yield from terminal.hang(Line.assemble(name, "  "), run.why, style)
    devices = run.launch.get("devices")
    facts = {
        "model": run.config.get("model.path"),
        "ranks": run.launch.get("world_size"),
        # Another version may have written launches.jsonl, with devices of another type.
        "on": ", ".join(map(str, devices)) if isinstance(devices, Mapping) else None,
        "started": run.launch.get("start"),
        "launches": len(run.launches),
    }
    text = ", ".join(f"{title} {value}" for title, value in facts.items() if value)
    yield from terminal.excerpt(text, 2, styles="dim")


def _finding_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the findings of the diagnosis, then the run's checks of itself."""
    entries: list[tuple[str, str]] = []  # level and text
    for finding in list_findings(run):
        # `state_lines` has already said why the run ended.
        if finding.text != run.why:
            entries.append((finding.level, f"{finding.title}{finding.suffix}: {finding.text}"))
    # A check that has failed or is near its bound gets a line; those that hold share one line.
    names = []
    for check in list_checks(run):
        if check.level == "ok":
            names.append(check.name)
        else:
            text = f"{check.name}: {check.value}, bound {check.bound}: {check.text}"
            entries.append((check.level, text))
    if names:
        entries.append(("ok", f"checks that hold: {'; '.join(names)}"))
    lines: list[Line] = []
    for level, text in entries:
        lines += terminal.hang(Line(_MARKS[level], level), text)
    yield from terminal.elide(lines, 24)


def curve_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields a row for each metric: its label, its curve over the steps, and four numbers."""
    width = terminal.columns - LABEL_COLUMNS - 4 * _FIGURE_WIDTH
    steps = f"step {run.steps[0]['step']}..{run.last_step}"
    titles = ("first", "last", "min", "max")
    columns = [Column("", LABEL_COLUMNS, "<"), Column(steps, width, "<", style="curve")]
    columns += [Column(title, _FIGURE_WIDTH) for title in titles]
    components = sorted(matching_metrics(run.steps, r"reward/(.+)/mean"))
    curves = [CurveRow("reward", "reward/mean")]
    curves += [CurveRow(f"  {name}", f"reward/{name}/mean") for name in components[:_MAX_CURVES]]
    sets = sorted(matching_metrics(run.evaluations, r"eval/(.+)/mean"))[:_MAX_CURVES]
    curves += [*_CURVES, *(CurveRow(f"eval {name}", f"eval/{name}/mean") for name in sets)]
    rows = []
    for label, metric, is_peak in curves:
        lines = run.evaluations if metric.startswith("eval/") else run.steps
        values: list[Value] = [line.get(metric) for line in lines]
        # A metric that no step has gets no row, nor one of a feature that is off and was always 0.
        numbers = [value for value in values if value is not None]
        if any(numbers) or (numbers and metric.startswith(("reward/", "eval/"))):
            drawn = curve(values, width - 1, is_peak)
            figures = (numbers[0], numbers[-1], min(numbers), max(numbers))
            rows.append([label, drawn, *map(number, figures)])
    yield from terminal.table(columns, rows)


def time_lines(lines: Sequence[Mapping[str, Any]], terminal: Terminal) -> Iterator[Line]:
    """Yields a bar for each phase's share of the time of all `lines`, the longest first.

    `lines` are steps of metrics.jsonl. Phases of less than 0.5 % are left out.
    """
    seconds: dict[str, float] = {}
    # time/wall_s and time/unix_s are clocks, not phases.
    for name in {*matching_metrics(lines, r"time/(\w+)_s")} - {"wall", "unix"}:
        values = (line.get(f"time/{name}_s") or 0.0 for line in lines)
        # Values that cannot be a time are left out.
        seconds[name] = math.fsum(value for value in values if 0 <= value < 1e12)
    total = seconds.pop("step", 0.0)
    if not total:
        return
    seconds["between them"] = max(0.0, total - math.fsum(seconds.values()))
    mean = number(total / len(lines))
    title = f"where the time goes: {mean} s a step, each phase as its slowest rank took it"
    yield terminal.line(title, "role")
    width = terminal.columns - LABEL_COLUMNS - 18
    columns = [Column("", LABEL_COLUMNS, "<"), Column("", width, "<", style="curve")]
    rows = []
    for name, phase_s in sorted(seconds.items(), key=lambda item: (-item[1], item[0])):
        frac = phase_s / total
        if frac >= 0.005:
            mean = number(phase_s / len(lines))
            rows.append([name, bar(frac, width), f"{min(99.0, frac):.0%}", f"{mean} s"])
    yield from terminal.table([*columns, Column("", 6), Column("", 11)], rows)


def newest_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the last step as the run's own console prints it; nothing if it is too wide."""
    # The console needs these two metrics, which early versions did not write.
    metrics = {"optim/updates": None, "optim/skipped_updates": None, **run.steps[-1]}
    header, line = Console(run.num_steps or run.last_step).lines(metrics)
    if len(header) <= terminal.columns:
        yield Line()
        yield terminal.line(header, "dim")
        yield terminal.line(line)
