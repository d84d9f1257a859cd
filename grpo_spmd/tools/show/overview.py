"""Shows a run on one screen: its state, findings, curves, and where the time goes.

The first part are pure functions that all pages share: charts that are one row high, and numbers of
at most seven characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.text import Text

from grpo_spmd.observe.console import Console
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.report.verdict import list_checks, list_findings, matching_metrics
from grpo_spmd.tools.terminal import Line, Terminal

Value = float | int | None
MAX_FINITE = 1e300  # larger numbers are not drawn: sums and differences of them would be infinite
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.:-=+*#"
_MAX_FINDINGS = 8
_MAX_COMPONENTS = 8
_MAX_SETS = 4
_REPORT_LINES = 12
_GOOD_STATES = ("done", "going")
_BAD_STATES = ("failed", "killed")
_MARKS = {"bad": "!! ", "warning": "!  ", "ok": "ok "}
_FIGURE_WIDTH = 8  # columns of a number and the space before it


def curve(
    values: Sequence[Value], width: int, *, is_unicode: bool = True, is_peak: bool = False
) -> str:
    """Returns one character for each value, between the smallest and the largest drawn value.

    If there are more values than columns, a character stands for the mean of neighbours, or for
    the largest of them if `is_peak`. A space means that no value is known.
    """
    drawn = bin_values(values, width, is_peak)
    finite = [value for value in drawn if value is not None]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    bars = _bars(is_unicode)
    return "".join(
        " " if value is None else bars[min(7, int(fraction(value, low, high) * 8))]
        for value in drawn
    )


def bar(frac: float, width: int, *, is_unicode: bool = True) -> str:
    """Returns a bar that fills `frac` of `width` columns, rounded."""
    return _bars(is_unicode)[-1] * round(min(1.0, max(0.0, frac)) * width)


def histogram(
    values: Sequence[Value], low: float, high: float, width: int = 8, *, is_unicode: bool = True
) -> str:
    """Returns the number of values in each of `width` bins of low..high as heights.

    A space means that the bin is empty.
    """
    counts = [0] * width
    for value in values:
        if value is not None and is_drawable(value):
            counts[min(width - 1, int(fraction(value, low, high) * width))] += 1
    bars = _bars(is_unicode)
    # The fullest bin has the full height, and a bin with one value is visible.
    peak = max(1, *counts)
    return "".join(" " if not n else bars[min(7, (n * 8 - 1) // peak)] for n in counts)


def _bars(is_unicode: bool) -> str:
    return _BARS if is_unicode else _ASCII_BARS


def bin_values(values: Sequence[Value], width: int, is_peak: bool) -> list[float | None]:
    """Returns at most `width` values, each from equally many neighbours, or from one more.

    None stands for neighbours without a finite value.
    """
    num = max(1, min(width, len(values)))
    # Whole-number edges: each value is in exactly one bin.
    edges = [index * len(values) // num for index in range(num + 1)]
    bins: list[float | None] = []
    for begin, end in pairwise(edges):
        finite = [float(v) for v in values[begin:end] if v is not None and is_drawable(v)]
        merged = max(finite, default=0.0) if is_peak else math.fsum(finite) / max(1, len(finite))
        bins.append(merged if finite else None)
    return bins


def fraction(value: float, low: float, high: float) -> float:
    """Returns how far `value` is from `low` to `high`, 0 to 1; 0.5 if these are equal."""
    # Halves, because the whole span may be larger than a float holds.
    span = high / 2 - low / 2
    return min(1.0, max(0.0, (value / 2 - low / 2) / span)) if span > 0 else 0.5


def is_drawable(value: float | int) -> bool:
    """Returns False for NaN, infinity and whole numbers that no float holds."""
    return abs(value) <= MAX_FINITE


def number(value: object) -> str:
    """Returns a number in at most 7 characters: 4 digits, or a power of ten."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if not is_drawable(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    size = abs(value)
    if value == 0 or (isinstance(value, int) and size < 1_000_000):
        return str(int(value))
    # These bounds are where rounding to 4 digits would need an eighth character.
    if 0.0009995 <= size < 999_999.5:
        digits = min(4, max(0, 3 - math.floor(math.log10(size))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    short = _short_exponent(f"{value:.1e}")
    return short if len(short) <= 7 else _short_exponent(f"{value:.0e}")


def _short_exponent(text: str) -> str:
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


class CurveRow(NamedTuple):
    """One row of the curves: its label and its metric."""

    label: str
    metric: str
    is_peak: bool = False  # of several steps the largest value is drawn, not their mean


_CURVES = (
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
)
_SPEED_CURVES = (
    CurveRow("tokens/s", "rollout/tokens_per_s"),
    CurveRow("step time (s)", "time/step_s", is_peak=True),
)
# Hidden if they were always 0, since they belong to features that may be off.
_OPTIONAL_METRICS = ("loss/kl", "loss/clip_frac", "episode/turns_mean")


def overview(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of a run."""
    yield from state_lines(run, terminal)
    yield from _finding_lines(run, terminal)
    if not run.steps:
        yield from _report_lines(run, terminal)
        return
    yield Text()
    yield from curve_lines(run, terminal)
    yield Text()
    yield from time_lines(run.steps, terminal)
    yield from newest_lines(run, terminal)
    if run.state in _BAD_STATES:
        yield from _report_lines(run, terminal)
    commands = [f"--step {run.last_step}"]
    if run.dumped_steps:
        commands += ["--worst 3", "--best 3", "--prompt P", "--grep TEXT"]
    if run.state == "going":
        commands.append("--follow")
    yield Text()
    hint = f"more: {'  '.join(commands)}; python -m grpo_spmd.report makes a page of it"
    yield from terminal.excerpt(hint, 4, styles="dim")


def state_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the state of a run, and what it runs on."""
    # A preempted or silent run is neither.
    style = "good" if run.state in _GOOD_STATES else "warning"
    if run.state in _BAD_STATES:
        style = "bad"
    state = run.why if run.why.startswith(run.state) else f"{run.state}: {run.why}"
    name = terminal.fit(run.name, terminal.columns // 3, "title")
    yield from terminal.hang(Text.assemble(name, "  "), state, style)
    facts = [str(run.config["model.path"])] if run.config.get("model.path") else []
    num_ranks = run.launch.get("world_size")
    # launches.jsonl may be another version's: facts of another type are left out.
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
    # The state's line has told why the run ended.
    findings = [finding for finding in list_findings(run) if finding.text != run.why]
    for finding in findings[:_MAX_FINDINGS]:
        suffix = f" (from step {finding.step})" if finding.step is not None else ""
        label = Text(_MARKS[finding.level], finding.level)
        yield from terminal.hang(label, f"{finding.title}{suffix}: {finding.text}")
    if len(findings) > _MAX_FINDINGS:
        hint = f"   and {len(findings) - _MAX_FINDINGS} more in the report"
        yield terminal.fit(hint, terminal.columns, "dim")
    # Checks that are not well get a line each; all others share one.
    checks = list_checks(run)
    for check in checks:
        if check.level != "ok":
            text = f"{check.name}: {check.value}, bound {check.bound}: {check.text}"
            yield from terminal.hang(Text(_MARKS[check.level], check.level), text)
    names = [check.name for check in checks if check.level == "ok"]
    if names:
        label = Text(_MARKS["ok"], "ok")
        yield from terminal.hang(label, f"checks that hold: {'; '.join(names)}", "dim")


def curve_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields a row for each metric: its label, its curve over the steps, and four numbers."""
    label_columns = label_width(terminal)
    width = terminal.columns - label_columns - 4 * _FIGURE_WIDTH
    first_step = run.steps[0]["step"]
    steps = f"step {first_step}"
    if run.last_step != first_step:
        steps += f"..{run.last_step}"
    titles = "".join(title.rjust(_FIGURE_WIDTH) for title in ("first", "last", "min", "max"))
    yield Text.assemble(" " * label_columns, terminal.pad(steps, width, "dim"), (titles, "dim"))
    for row, lines in _curve_rows(run):
        values: list[Value] = [line.get(row.metric) for line in lines]
        # A metric that no step has gets no row.
        numbers = [value for value in values if value is not None]
        if numbers:
            drawn = curve(values, width - 1, is_unicode=terminal.is_unicode, is_peak=row.is_peak)
            figures = [numbers[0], numbers[-1], min(numbers), max(numbers)]
            yield Text.assemble(
                terminal.pad(row.label, label_columns),
                terminal.pad(drawn, width, "curve"),
                "".join(number(figure).rjust(_FIGURE_WIDTH) for figure in figures),
            )


def _curve_rows(run: RecordedRun) -> Iterator[tuple[CurveRow, Sequence[Mapping[str, Any]]]]:
    """Yields each row with the lines of metrics.jsonl that it is drawn from."""
    yield CurveRow("reward", "reward/mean"), run.steps
    components = sorted(matching_metrics(run.steps, r"reward/(.+)/mean"))
    # A single component is the reward itself.
    for name in components[:_MAX_COMPONENTS] if len(components) > 1 else ():
        yield CurveRow(f"  {name}", f"reward/{name}/mean"), run.steps
    for row in _CURVES:
        if row.metric not in _OPTIONAL_METRICS or any(line.get(row.metric) for line in run.steps):
            yield row, run.steps
    for name in sorted(matching_metrics(run.evaluations, r"eval/(.+)/mean"))[:_MAX_SETS]:
        yield CurveRow(f"eval {name}", f"eval/{name}/mean"), run.evaluations
    for row in _SPEED_CURVES:
        yield row, run.steps


def time_lines(lines: Sequence[Mapping[str, Any]], terminal: Terminal) -> Iterator[Line]:
    """Yields a bar for each phase's time in all `lines` together, the longest first."""
    total = _total_seconds("time/step_s", lines)
    if total <= 0:
        return
    # These are totals and times of day, not phases.
    names = set(matching_metrics(lines, r"time/(\w+)_s")) - {"step", "wall", "unix"}
    seconds = {name: _total_seconds(f"time/{name}_s", lines) for name in names}
    seconds["between them"] = max(0.0, total - math.fsum(seconds.values()))
    title = "where the time goes"
    mean = number(total / len(lines))
    yield Text.assemble(
        (title, "role"),
        terminal.fit(
            f": {mean} s a step, each phase as its slowest rank took it",
            terminal.columns - len(title),
            "dim",
        ),
    )
    label_columns = label_width(terminal)
    width = terminal.columns - label_columns - 18
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        frac = seconds[name] / total
        if frac >= 0.005:
            drawn = bar(frac, width, is_unicode=terminal.is_unicode)
            yield Text.assemble(
                terminal.pad(name, label_columns),
                terminal.pad(drawn, width, "curve"),
                f"{min(99.0, frac):>6.0%}{number(seconds[name] / len(lines)):>9} s",
            )


def _total_seconds(name: str, lines: Sequence[Mapping[str, Any]]) -> float:
    values = (line.get(name) or 0.0 for line in lines)
    return math.fsum(value for value in values if 0 <= value < 1e12)


def label_width(terminal: Terminal) -> int:
    return 18 if terminal.columns >= 76 else 14


def newest_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the last step as the run's own console shows it; nothing if there is no room."""
    # The console reads these two, which early versions did not write.
    metrics = {"optim/updates": None, "optim/skipped_updates": None, **run.steps[-1]}
    header, line = Console(run.num_steps or run.last_step).lines(metrics)
    if len(header) <= terminal.columns:
        yield Text()
        yield terminal.fit(header, terminal.columns, "dim")
        yield terminal.fit(line, terminal.columns)


def _report_lines(run: RecordedRun, terminal: Terminal) -> Iterator[Line]:
    """Yields the beginning of the reports on a failed or hanging run."""
    for name, text in run.reports.items():
        yield Text()
        yield terminal.fit(f"logs/{name}", terminal.columns, "bad")
        yield from terminal.excerpt(text, _REPORT_LINES, indent=2)
