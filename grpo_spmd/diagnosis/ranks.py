"""A rank that is slower than the others, read from the timeline of the newest steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from grpo_spmd.diagnosis.results import Finding
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.timeline import Timeline

_NUM_STEPS = 50
_MIN_STEPS = 5
_MOST = 0.75  # of steps
_EXCESS = 0.2  # of a step's time


def judge_ranks(run: RecordedRun) -> Iterator[Finding]:
    """Yields the rank that is the slowest in most of the newest steps, with its phases.

    Ranks leave a collective together, so a slow rank shows only in phases that it ends alone, as
    when it samples.
    """
    steps = [line["step"] for line in run.steps[-_NUM_STEPS:]]
    lines = [line for line in run.files.timeline(steps).values() if len(line.ranks) > 1]
    if len(lines) < _MIN_STEPS:
        return
    slowest: Counter[int] = Counter()
    phases: dict[int, Counter[str]] = {}
    excesses: dict[int, list[float]] = {}
    for line in lines:
        delays = _delays(line)
        totals = [sum(delay.values()) for delay in delays]
        index = int(np.argmax(totals))
        rank = line.ranks[index]
        excess = totals[index] - float(np.median(np.delete(totals, index)))
        step_s = max((span.end_s for spans in line.spans for span in spans), default=0.0)
        if step_s > 0 and excess >= _EXCESS * step_s:
            slowest[rank] += 1
            excesses.setdefault(rank, []).append(excess / step_s)
            phases.setdefault(rank, Counter()).update(delays[index])
    for rank, count in slowest.most_common(1):
        if count >= _MOST * len(lines):
            names = " and ".join(name for name, _ in phases[rank].most_common(2))
            yield Finding(
                "warning",
                f"rank {rank} is slow",
                f"It is the slowest in {count} of the last {len(lines)} steps, mostly in {names}, "
                f"and costs {np.mean(excesses[rank]):.0%} of a step: look for another process on "
                "its machine, a throttled GPU or a slow disk (grpo-spmd checkup).",
                step=lines[0].step,
                explains=("rollout/tail_waste_frac",),
            )


def _delays(line: Timeline) -> list[dict[str, float]]:
    """Returns for each rank the seconds by phase that it fell behind the earliest rank.

    A rank that waits for another one in a collective falls behind nobody.
    """
    delays: list[dict[str, float]] = [{} for _ in line.ranks]
    for index in range(min(len(spans) for spans in line.spans)):
        spans = [rank_spans[index] for rank_spans in line.spans]
        earliest_start_s = min(span.start_s for span in spans)
        earliest_end_s = min(span.end_s for span in spans)
        for delay, span in zip(delays, spans, strict=True):
            behind_s = (span.end_s - earliest_end_s) - (span.start_s - earliest_start_s)
            delay[span.phase] = delay.get(span.phase, 0.0) + max(0.0, behind_s)
    return delays
