"""What several pages say of a run folder: which steps have completions, what could not be read, per-token figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.token_scores import TokenScores, each_token_scores
from grpo_spmd.report.run import RecordedRun
from grpo_spmd.show.dump import Unread
from grpo_spmd.show.paper import Line, Paper

_MOST_RANGES = 8


def scores_of(run_dir: Path, step: int, wanted: Collection[int | None], unread: Unread) -> dict[int, TokenScores]:
    """Of the rollouts with the `wanted` ids that were trained on; {} where the run recorded none."""
    return {rollout_id: scores for rollout_id, scores in _each(run_dir, step, unread) if rollout_id in wanted}


def largest_differences(run_dir: Path, step: int, unread: Unread) -> dict[int, float]:
    """By rollout id, over its tokens, in nats; NaN where one was not finite."""
    return {
        rollout_id: math.nan if scores.difference_max is None else float(scores.difference_max)
        for rollout_id, scores in _each(run_dir, step, unread)
    }


def _each(run_dir: Path, step: int, unread: Unread) -> Iterator[tuple[int, TokenScores]]:
    """As far as they can be read."""
    try:
        for _, rollout_id, scores in each_token_scores(run_dir, step):
            yield rollout_id, scores
    except ConfigError as error:
        unread.add(str(error))


def unread_lines(unread: Unread, paper: Paper) -> Iterator[Line]:
    if unread.missing:
        said = f"{unread.missing} rollouts of the step are not in its files, of which each node wrote one"
        yield from paper.excerpt(said, 2, 0, 0, "warning")
    if unread.num:
        more = f" (and {unread.num - 1} more)" if unread.num > 1 else ""
        said = f"not read{more}: {unread.first}"
        yield from paper.excerpt(said, 3, 0, 0, "warning")


def ranges(steps: Sequence[int]) -> str:
    """Which steps have completions, in words."""
    if not steps:
        return "there are none of any step (logging.rollouts_every_steps)"
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(steps) > 3 and len(set(gaps)) == 1:
        every = "" if gaps[0] == 1 else f", every {gaps[0]}"
        return f"there are those of steps {steps[0]} to {steps[-1]}{every}"
    listed = [str(step) for step in steps]
    if len(listed) > 2 * _MOST_RANGES:
        listed = [*listed[:_MOST_RANGES], "...", *listed[-_MOST_RANGES:]]
    return f"there are those of step{'s' * (len(steps) > 1)} {', '.join(listed)}"


def dumped_step(run: RecordedRun, step: int | None) -> int:
    """`step`, or the newest with completions. Raises ConfigError where there are none."""
    if step is None and run.dumped_steps:
        return run.dumped_steps[-1]
    if step is None or step not in run.dumped_steps:
        of = f"--step {step}: no completions of it are in" if step is not None else "no completions are in"
        raise ConfigError(f"{of} {run.folder}/rollouts; {ranges(run.dumped_steps)}")
    return step
