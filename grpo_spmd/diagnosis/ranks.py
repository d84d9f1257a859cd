"""What the timeline of the newest steps shows: a rank slower than the others, slow rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from grpo_spmd.diagnosis.results import Finding
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.timeline import Timeline

_NUM_STEPS = 50
_MIN_STEPS = 3
_MIN_STEP_S = 1.0  # shorter steps are a tiny model's
_EXCESS = 0.15  # of the time
_SLOW_REWARDS = 0.4  # of the time


def judge_timeline(run: RecordedRun) -> Iterator[Finding]:
    """Yields the findings about ranks and rewards of the newest steps."""
    steps = [line["step"] for line in run.steps[-_NUM_STEPS:]]
    lines = [line for line in run.files.timeline(steps).values() if all(line.spans)]
    if len(lines) >= _MIN_STEPS:
        yield from _judge_ranks(lines)
        yield from _judge_rewards(lines)


def _judge_ranks(lines: list[Timeline]) -> Iterator[Finding]:
    """Yields the rank that falls behind the others most, if that costs much of the time.

    Ranks leave a collective together, so a slow rank shows only in phases that it ends alone, as
    when it samples. Ranks that are slow in turn, by their completions, are no finding.
    """
    delays: dict[int, Counter[str]] = {}
    num_slowest: Counter[int] = Counter()
    for line in lines:
        line_delays = _delays(line)
        for rank, delay in line_delays.items():
            delays.setdefault(rank, Counter()).update(delay)
        num_slowest[max(line_delays, key=lambda rank: line_delays[rank].total())] += 1
    if len(delays) < 2:
        return
    totals = {rank: delay.total() for rank, delay in delays.items()}
    slowest = max(totals, key=lambda rank: totals[rank])
    usual = float(np.median([total for rank, total in totals.items() if rank != slowest]))
    excess = (totals[slowest] - usual) / sum(map(_step_s, lines))
    if excess >= _EXCESS:
        phases = " and ".join(phase for phase, _ in delays[slowest].most_common(2))
        yield Finding(
            "warning",
            f"rank {slowest} is slow",
            f"It is the slowest in {num_slowest[slowest]} of the last {len(lines)} steps, mostly "
            f"in {phases}, and costs {excess:.0%} of the time: look for another process on its "
            "machine, a throttled GPU or a slow disk (grpo-spmd checkup).",
            step=lines[0].step,
            explains=("rollout/tail_waste_frac", "time/reward_s"),
        )


def _judge_rewards(lines: list[Timeline]) -> Iterator[Finding]:
    """Yields rewards that take much of the time.

    A rank that waits for another one's rollouts waits in its reward phase, so the shortest of the
    ranks' times counts.
    """
    reward_s = [
        min(
            sum(span.end_s - span.start_s for span in spans if span.phase == "reward")
            for spans in line.spans
        )
        for line in lines
    ]
    total_s = sum(map(_step_s, lines))
    if total_s >= _MIN_STEP_S * len(lines) and sum(reward_s) >= _SLOW_REWARDS * total_s:
        yield Finding(
            "warning",
            "steps wait for rewards",
            f"Rewards take {sum(reward_s) / total_s:.0%} of the last {len(lines)} steps: more "
            "reward_pool.num_workers for functions; max_concurrent, or a faster host, for servers.",
            metric="time/reward_s",
        )


def _delays(line: Timeline) -> dict[int, Counter[str]]:
    """Returns for each rank the seconds by phase that it fell behind the earliest rank.

    A rank that waits for another one in a collective falls behind nobody.
    """
    delays: dict[int, Counter[str]] = {rank: Counter() for rank in line.ranks}
    for index in range(min(len(spans) for spans in line.spans)):
        spans = [rank_spans[index] for rank_spans in line.spans]
        earliest_start_s = min(span.start_s for span in spans)
        earliest_end_s = min(span.end_s for span in spans)
        for rank, span in zip(line.ranks, spans, strict=True):
            behind_s = (span.end_s - earliest_end_s) - (span.start_s - earliest_start_s)
            delays[rank][span.phase] += max(0.0, behind_s)  # type: ignore[assignment]
    return delays


def _step_s(line: Timeline) -> float:
    return max(span.end_s for spans in line.spans for span in spans)
