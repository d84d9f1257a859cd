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
MAX_FINITE = 1e300  # larger numbers are not drawn: sums and differences of them would be infinite
_MAX_FINDING_LINES = 24
_MAX_CURVES = 8  # at most so many for components of the reward, and as many for evaluations
_REPORT_LINES = 12
_GOOD_STATES = ("done", "running")
_BAD_STATES = ("failed", "killed")
# What stands before a finding, by its level.
_MARKS = {"bad": "!! ", "warning": "!  ", "ok": "ok "}
_FIGURE_WIDTH = 8  # columns of a number and the space before it


def curve(values: Sequence[Value], width: int, is_peak: bool = False) -> str:
    """Returns `values`, such as a metric over the steps, as a text of at most `width` bars.

    The lowest bar is the smallest drawn value, the highest bar the largest. If there are more
    values than columns, a bar is the mean of neighbouring values, or the largest of them if
    `is_peak`. A space means that no value is known.
    """
    drawn = bin_values(values, width, is_peak)
    finite = [value for value in drawn if value is not None]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    return "".join(
        " " if value is None else BARS[min(7, int(fraction(value, low, high) * 8))]
        for value in drawn
    )


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


def bin_values(values: Sequence[Value], width: int, is_peak: bool) -> list[float | None]:
    """Merges neighbouring values, so that at most `width` of them remain.

    Each result is the mean of a bin, or its largest value if `is_peak`; the sizes of the bins
    differ by at most one. The result is None for a bin without a finite value.
    """
    floats = [math.nan if v is None or not is_drawable(v) else float(v) for v in values]
    bins: list[float | None] = []
    for neighbours in np.array_split(np.array(floats), max(1, min(width, len(values)))):
        finite = neighbours[np.isfinite(neighbours)]
        merged = np.max if is_peak else np.mean
        bins.append(float(merged(finite)) if len(finite) else None)
    return bins


def fraction(value: float, low: float, high: float) -> float:
    """Returns the position of `value` between `low` (0) and `high` (1); 0.5 if these are equal."""
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def is_drawable(value: float | int) -> bool:
    """Returns False for NaN, infinity and whole numbers that no float holds."""
    return abs(value) <= MAX_FINITE


def number(value: object) -> str:
    """Returns a number as text of at most 7 characters: with 4 digits, or with an exponent.

    Returns "-" for anything that is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if not is_drawable(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    size = abs(value)
    if value == 0 or (isinstance(value, int) and size < 1_000_000):
        return str(int(value))
    # Beyond these bounds, after rounding to 4 digits, the text would have an eighth character.
    if 0.0009995 <= size < 999_999.5:
        digits = min(4, max(0, 3 - math.floor(math.log10(size))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    short = _short_exponent(f"{value:.1e}")
    return short if len(short) <= 7 else _short_exponent(f"{value:.0e}")


def _short_exponent(text: str) -> str:
    """Returns a number such as 1.5e+09 without the plus sign and leading zeros: 1.5e9."""
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


class CurveRow(NamedTuple):
    """One row of the table of curves: its label and the metric that it draws."""

    label: str
    metric: str
    is_peak: bool = False  # a bar for several steps shows the largest value, not the mean
    is_optional: bool = False  # hidden if it was always 0, as of a feature that is off


_CURVES = (
    CurveRow("teacher KL", "teacher/kl"),
    CurveRow("critic", "critic/explained_variance"),
    CurveRow("spread", "reward/std"),
    CurveRow("groups alike", "reward/zero_std_groups_frac"),
    CurveRow("tokens", "completion/tokens_mean"),
    CurveRow("truncated", "completion/truncated_frac"),
    CurveRow("turns", "episode/turns_mean", is_optional=True),
    CurveRow("entropy", "loss/entropy"),
    CurveRow("KL", "loss/kl", is_optional=True),
    CurveRow("clipped", "loss/clip_frac", is_optional=True),
    CurveRow("grad norm", "optim/grad_norm", is_peak=True),
    CurveRow("mismatch KL", "weight_sync/mismatch_kl", is_peak=True),
    CurveRow("tokens/s", "rollout/tokens_per_s"),
    CurveRow("step time (s)", "time/step_s", is_peak=True),
)


def overview(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of a run: state, findings, curves, time by phase, reports and a hint.

    The reports are those that the doctor writes when ranks hang or fail."""
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
            yield from terminal.excerpt(text, _REPORT_LINES - 6, 6, indent=2)
    if run.steps:
        hint = f"more: --step {run.last_step}"
        if run.dumped_steps:
            hint += "  --worst 3  --best 3  --prompt P  --grep TEXT"
        hint += "  --follow" * (run.state == "running")
        yield Line()
        hint += "; python -m grpo_spmd.report makes a page of it"
        yield from terminal.excerpt(hint, 4, styles="dim")


def state_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the state of a run, such as running or failed, with the reason.

    A further line has its model, its ranks and devices, and its start."""
    # A run may be neither good nor bad, such as a preempted or silent one.
    style = "good" if run.state in _GOOD_STATES else "warning"
    if run.state in _BAD_STATES:
        style = "bad"
    name = terminal.fit(run.name, terminal.columns // 3, "title")
    yield from terminal.hang(Line.assemble(name, "  "), run.why, style)
    facts = [str(run.config["model.path"])] if run.config.get("model.path") else []
    num_ranks = run.launch.get("world_size")
    # Another version may have written launches.jsonl: facts of another type are left out.
    if type(num_ranks) is int:
        devices = run.launch.get("devices")
        names = ", ".join(map(str, devices)) if isinstance(devices, Mapping) else ""
        facts.append(f"{number(num_ranks)} ranks {names}".rstrip())
    start = run.launch.get("start")
    if isinstance(start, str):
        facts.append(f"started {start[:16].replace('T', ' ')} UTC")
    if len(run.launches) > 1:
        facts.append(f"{len(run.launches)} launches")
    if facts:
        yield from terminal.excerpt(", ".join(facts), 2, styles="dim")


def _finding_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields what the diagnosis has found, and the results of the run's checks of itself.

    Lines beyond _MAX_FINDING_LINES are left out, except with --full."""
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
    yield from terminal.elide(lines, _MAX_FINDING_LINES)


def curve_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields a table of the run's curves, with a row for each metric.

    A row has the metric's label, its curve over the steps, and its first, last, smallest and
    largest value. There are rows for the reward and its components, the metrics of _CURVES, and
    evaluations."""
    label_columns = label_width(terminal)
    width = terminal.columns - label_columns - 4 * _FIGURE_WIDTH
    steps = f"step {run.steps[0]['step']}..{run.last_step}"
    titles = ("first", "last", "min", "max")
    columns = [Column("", label_columns, "<"), Column(steps, width, "<", style="curve")]
    columns += [Column(title, _FIGURE_WIDTH) for title in titles]
    # A single component is the same curve as the reward.
    components = sorted(matching_metrics(run.steps, r"reward/(.+)/mean"))
    if len(components) == 1:
        components = []
    curves = [CurveRow("reward", "reward/mean")]
    curves += [CurveRow(f"  {name}", f"reward/{name}/mean") for name in components[:_MAX_CURVES]]
    sets = sorted(matching_metrics(run.evaluations, r"eval/(.+)/mean"))[:_MAX_CURVES]
    curves += [*_CURVES, *(CurveRow(f"eval {name}", f"eval/{name}/mean") for name in sets)]
    rows = []
    for label, metric, is_peak, is_optional in curves:
        lines = run.evaluations if metric.startswith("eval/") else run.steps
        values: list[Value] = [line.get(metric) for line in lines]
        # No row for a metric that no step has, or an optional one that was always 0.
        numbers = [value for value in values if value is not None]
        if any(numbers) if is_optional else numbers:
            drawn = curve(values, width - 1, is_peak)
            figures = (numbers[0], numbers[-1], min(numbers), max(numbers))
            rows.append([label, drawn, *map(number, figures)])
    yield from terminal.table(columns, rows)


def time_lines(lines: Sequence[Mapping[str, Any]], terminal: Terminal) -> Iterator[Line]:
    """Yields a table of where the time of the steps `lines` went, the longest phase first.

    It has a bar for each phase, its share and its mean seconds. `lines` are steps of metrics.jsonl.
    Phases of less than 0.5 % are left out."""
    total = _total_seconds("time/step_s", lines)
    if total <= 0:
        return
    # time/step_s, time/wall_s and time/unix_s are a total and clocks, not phases.
    names = set(matching_metrics(lines, r"time/(\w+)_s")) - {"step", "wall", "unix"}
    seconds = {name: _total_seconds(f"time/{name}_s", lines) for name in names}
    # The time of the steps that is in no phase.
    seconds["between them"] = max(0.0, total - math.fsum(seconds.values()))
    mean = number(total / len(lines))
    title = f"where the time goes: {mean} s a step, each phase as its slowest rank took it"
    yield terminal.line(title, "role")
    label = label_width(terminal)
    width = terminal.columns - label - 18
    columns = [Column("", label, "<"), Column("", width, "<", style="curve")]
    rows = []
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        frac = seconds[name] / total
        if frac >= 0.005:
            mean = number(seconds[name] / len(lines))
            rows.append([name, bar(frac, width), f"{min(99.0, frac):.0%}", f"{mean} s"])
    yield from terminal.table([*columns, Column("", 6), Column("", 11)], rows)


def _total_seconds(name: str, lines: Sequence[Mapping[str, Any]]) -> float:
    """Returns the sum of a metric over `lines`, without values that cannot be a time."""
    values = (line.get(name) or 0.0 for line in lines)
    return math.fsum(value for value in values if 0 <= value < 1e12)


def label_width(terminal: Terminal) -> int:
    """Returns the number of columns for the labels left of curves and bars."""
    return 18 if terminal.columns >= 76 else 14


def newest_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the last step as the run's own console prints it; nothing if it is too wide."""
    # The console needs these two metrics, which early versions did not write.
    metrics = {"optim/updates": None, "optim/skipped_updates": None, **run.steps[-1]}
    header, line = Console(run.num_steps or run.last_step).lines(metrics)
    if len(header) <= terminal.columns:
        yield Line()
        yield terminal.line(header, "dim")
        yield terminal.line(line)
