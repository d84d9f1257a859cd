"""Plots of the recorded rows, as SVG text: horizontal bars with the spread of the rounds.

`python -m benchmarks.measured` writes them into benchmarks/results/, and a test holds the files to
the rows. The text is written by hand, so that the same rows give the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.support.record import Record, RecordedRow, RecordError, Rows, figure, taken_on

_WIDTH = 800
_LABEL_WIDTH = 300
_VALUE_WIDTH = 90
_ROW_HEIGHT = 24
_COLORS = {"gain": "#2f7d5b", "loss": "#b3402e", "plain": "#3a6ea5"}


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: a median with the least and the greatest value of its rounds."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    color: str = "plain"  # a key of _COLORS
    note: str = ""  # printed behind the value


@dataclass(frozen=True)
class Plot:
    """Bars under a title, with an optional vertical line that marks a value."""

    title: str
    caption: str  # what it was taken on
    bars: Sequence[Bar]
    reference: float | None = None
    reference_label: str = ""


def draw(plot: Plot) -> str:
    """Returns the SVG text of a plot."""
    bar_end = _WIDTH - _VALUE_WIDTH
    largest = max([bar.high or bar.value for bar in plot.bars] + [plot.reference or 0])
    scale = (bar_end - _LABEL_WIDTH) / largest
    top = 54
    height = top + _ROW_HEIGHT * len(plot.bars) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#333">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">{escape(plot.title)}</text>',
    ]
    for number, bar in enumerate(plot.bars):
        lines += _draw_bar(bar, y=top + _ROW_HEIGHT * number, scale=scale)
    if plot.reference is not None:
        x = _LABEL_WIDTH + plot.reference * scale
        bottom = top + _ROW_HEIGHT * len(plot.bars)
        lines += [
            f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}" '
            f'stroke="#333" stroke-dasharray="4 3"/>',
            f'<text x="{x:.1f}" y="{top - 10}" text-anchor="middle" font-size="11">'
            f"{escape(plot.reference_label)}</text>",
        ]
    lines += [
        f'<text x="12" y="{height - 12}" font-size="11" fill="#666">{escape(plot.caption)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _draw_bar(bar: Bar, y: int, scale: float) -> list[str]:
    middle = y + _ROW_HEIGHT // 2
    end = _LABEL_WIDTH + bar.value * scale
    text_x = max(end, _LABEL_WIDTH + (bar.high or 0) * scale) + 6
    lines = [
        f'<text x="{_LABEL_WIDTH - 8}" y="{middle + 4}" '
        f'text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{_LABEL_WIDTH}" y="{y + 4}" width="{bar.value * scale:.1f}" '
        f'height="{_ROW_HEIGHT - 8}" fill="{_COLORS[bar.color]}"/>',
        f'<text x="{text_x:.1f}" y="{middle + 4}">{figure(bar.value)}{escape(bar.note)}</text>',
    ]
    if bar.low is not None and bar.high is not None:
        low, high = (_LABEL_WIDTH + value * scale for value in (bar.low, bar.high))
        lines.append(
            f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} '
            f'{middle - 4}v8" stroke="#111" fill="none"/>'
        )
    return lines


def _ratio_bar(label: str, row: RecordedRow, column: str = "ratio") -> Bar:
    """A ratio with its spread, green from 1 on and red below."""
    prefix = f"{column}_" if f"{column}_min" in row else ""
    value = row.number(column)
    return Bar(
        label=label,
        value=value,
        low=row.number(f"{prefix}min"),
        high=row.number(f"{prefix}max"),
        color="gain" if value >= 1 else "loss",
        note="x",
    )


def _caption(rows: Rows) -> str:
    """Where and when rows were taken, without the marks of Markdown."""
    return f"{rows[0]['hardware']}; commit {taken_on(rows)}".replace("`", "").replace("\\", "")


_HELD = {
    "policy and optimizer": ("policy", "moments", "gradients", "gathered parameters"),
    "activations": ("activations",),
    "engine's weights": ("engine's weights", "layer in load", "largest tensor", "buckets"),
    "KV cache": ("KV cache", "engine's activations"),
}
_HELD_COLORS = ("#3a6ea5", "#e0a030", "#2f7d5b", "#8fc7a5", "#b8b8b8")


def memory(record: Record) -> str | None:
    """What fills the memory of one rank in each phase of a step, as the planner predicts it."""
    rows = record.run("plan_phases", "phase", "holds")
    if not rows:
        return None
    groups = [*_HELD, "CUDA, NCCL, fragmentation"]
    retained: dict[str, list[float]] = {}
    for row in rows:
        sizes = retained.setdefault(str(row["phase"]), [0.0] * len(groups))
        names = [name for name, members in _HELD.items() if row["holds"] in members]
        sizes[groups.index(names[0] if names else groups[-1])] += row.number("gib")
    return _draw_stacks(
        title=f"GiB of one rank in each phase of a step: {rows[0]['config']} on {rows[0]['on']}",
        caption=f"Predicted by python -m grpo_spmd.plan; {_caption(rows)}",
        stacks=retained,
        groups=groups,
        limit=rows[0].number("gpu_gib"),
    )


def _draw_stacks(
    title: str, caption: str, stacks: dict[str, list[float]], groups: list[str], limit: float
) -> str:
    """Returns the SVG text of vertical stacked bars in the order of time, below a line at
    `limit`."""
    width, top, bottom, remaining = _WIDTH, 74, 300, 52
    step = (width - remaining - 20) / len(stacks)
    scale = (bottom - top) / (limit * 1.04)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 54}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#333">',
        f'<rect width="{width}" height="{bottom + 54}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    x = 12.0
    for group, color in zip(groups, _HELD_COLORS, strict=True):
        lines.append(f'<rect x="{x:.0f}" y="36" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17:.0f}" y="47">{escape(group)}</text>')
        x += 34 + 7.2 * len(group)
    limit_y = bottom - limit * scale
    lines += [
        f'<line x1="{remaining}" y1="{limit_y:.1f}" x2="{width - 12}" y2="{limit_y:.1f}" '
        f'stroke="#333" stroke-dasharray="4 3"/>',
        f'<text x="{remaining - 6}" y="{limit_y + 4:.1f}" text-anchor="end">{figure(limit)}</text>',
        f'<text x="{remaining - 6}" y="{bottom}" text-anchor="end">0</text>',
    ]
    for number, (phase, sizes) in enumerate(stacks.items()):
        y = float(bottom)
        for size, color in zip(sizes, _HELD_COLORS, strict=True):
            y -= size * scale
            lines.append(
                f'<rect x="{remaining + step * number:.1f}" y="{y:.1f}" width="{step - 6:.1f}" '
                f'height="{size * scale:.1f}" fill="{color}"/>'
            )
        middle = remaining + step * number + step / 2 - 3
        lines += [
            f'<text x="{middle:.1f}" y="{y - 5:.1f}" '
            f'text-anchor="middle">{figure(sum(sizes))}</text>',
            f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(phase)}</text>',
        ]
    lines += [
        f'<text x="12" y="{bottom + 42}" font-size="11" fill="#666">{escape(caption)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def step_vs_trl(record: Record) -> Plot | None:
    """TRL's time over ours, for each shape at TRL's best micro-batch."""
    phases = ("step", "generation a token", "sync", "logprobs + update")
    rows: Rows = []
    for shape in dict.fromkeys(str(row.get("shape", "short")) for row in record.all("step_vs_trl")):
        newest = record.run(
            "step_vs_trl", "shape", "TRL's micro-batch", "phase", location=_has(shape)
        )
        best = [row for row in newest if row["TRL's micro-batch"].endswith("its best")]
        rows += [row for row in best if row["phase"] in phases]
    if not rows:
        return None
    return Plot(
        title=f"Time of a step of TRL {rows[0]['TRL version']} over ours, by phase",
        caption=_caption(rows),
        bars=[_ratio_bar(f"{row['shape']}: {row['phase']}", row) for row in rows],
        reference=1.0,
        reference_label="equal",
    )


def _has(shape: str) -> Callable[[RecordedRow], bool]:
    return lambda row: row.get("shape") == shape


def rollout_dump(record: Record) -> Plot | None:
    """Time of a step's dump through rank 0 over that of each rank writing its own."""
    rows = record.run("rollout_dump", "ranks", "rollouts", "tokens")
    if not rows:
        return None
    return Plot(
        title="Time to dump a rollout through rank 0, over each rank writing its own",
        caption=_caption(rows),
        bars=[
            _ratio_bar(f"{row['rollouts']:,} x {row['tokens']:,} tokens, {row['ranks']} ranks", row)
            for row in rows
        ],
        reference=1.0,
        reference_label="equal",
    )


def weight_sync(record: Record) -> Plot | None:
    """Time of a whole weight sync in multiples of a memcpy of the same bytes."""
    rows = [
        row
        for row in record.run("weight_sync into vLLM", "model", "ranks", "dtype", "what")
        if str(row["what"]).startswith("whole sync") and row["dtype"] == "bfloat16"
    ]
    if not rows:
        return None
    return Plot(
        title="A whole weight sync into vLLM, in multiples of a memcpy of its bytes",
        caption=_caption(rows),
        bars=[
            Bar(
                label=f"{row['model']}, {row['ranks']} ranks: "
                f"{str(row['what']).removeprefix('whole sync').lstrip(', ')}",
                value=row.number("x_memcpy"),
                low=row.number("min"),
                high=row.number("max"),
            )
            for row in rows
        ],
    )


def signals(record: Record) -> Plot | None:
    """Time of a step with a teacher, a critic or a reward model over the plain step."""
    rows = record.run("signals", "signal")
    if not rows:
        return None
    return Plot(
        title="Time of a step with a signal, over the plain step of the same rollouts",
        caption=_caption(rows),
        bars=[
            Bar(
                label=str(row["signal"]),
                value=row.number("to_plain"),
                low=row.number("min"),
                high=row.number("max"),
            )
            for row in rows
        ],
        reference=1.0,
        reference_label="plain",
    )


PLOTS: dict[str, Callable[[Record], Plot | None]] = {
    "step_vs_trl": step_vs_trl,
    "weight_sync": weight_sync,
    "rollout_dump": rollout_dump,
    "signals": signals,
}


def drawings(record: Record) -> dict[str, str]:
    """Returns the SVG text of each plot that has rows, by file name. Raises RecordError."""
    texts: dict[str, str] = {}
    picture = memory(record)
    if picture is not None:
        texts["memory.svg"] = picture
    for name, make in PLOTS.items():
        try:
            plot = make(record)
        except (TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise RecordError(
                f"{name}: its rows cannot be drawn ({problem}); take them again"
            ) from error
        if plot is not None:
            texts[f"{name}.svg"] = draw(plot)
    return texts
