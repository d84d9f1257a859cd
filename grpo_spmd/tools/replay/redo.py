"""Replays rewards, advantages and loss of a recorded step, and reports the differences.

The replay runs on the CPU, in one process, without vLLM. It runs the trainer's own code on the
dumped rollouts, so that breakpoint() works in a reward (in the reward pool, with its time limits,
as in training), in the advantages and in the loss. With overrides it shows what another config
would do. The report has notes, the recorded and the replayed metrics side by side, and the rollouts
that differ most or look suspicious.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import cut_middle
from grpo_spmd.observe.rollout_record import RolloutRecord, gold_answer
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.tools.replay.read import (
    RecordedStep,
    Replay,
    ReplayedRollout,
    callable_rewards,
    describe_episodes,
)
from grpo_spmd.tools.terminal import Column, Terminal

# Relative differences up to this one come from float32 sums in another order.
_ROUNDING = 1e-6
_MIN_NAME_WIDTH = 34
# (value, rollout): the larger the value, the more suspicious the rollout.
Ranked = tuple[float, ReplayedRollout]


def replay(recorded: RecordedStep, checkpoint: Path | None = None) -> Replay:
    """Repeats rewards, advantages and update of a step and returns the results.

    The policy is that of `checkpoint`; by default it is that of the run's checkpoint before the
    step, or for step 1 the model with which the run started.

    Raises ConfigError or CheckpointError if something is missing or damaged, and RewardError if the
    user has quit the debugger.
    """
    with tempfile.NamedTemporaryFile(prefix="rewards_", suffix=".log", delete=False) as log:
        log_file = Path(log.name)
    rewards = callable_rewards(recorded)
    options = recorded.config.reward_pool
    with RewardPool(rewards, options, log_file, columns=recorded.all_columns) as pool:
        # The pool's workers have started, and may use GPUs. This process must see none. torch reads
        # the variable when it is imported, so modules that import torch come after this line.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from grpo_spmd.tools.replay.step import repeat_step

        result = repeat_step(recorded, checkpoint, pool)
    if log_file.stat().st_size:
        result.notes.append(f"what the rewards printed is in {log_file}")
    else:
        log_file.unlink()
    return result


def report(recorded: RecordedStep, replay: Replay, top: int) -> list[str]:
    """Returns the lines of the report, with at most `top` rollouts in each list."""
    rollouts = replay.rollouts
    group_size = recorded.config.rollout.group_size
    return [
        f"step {recorded.step} of {recorded.run_dir}: {len(rollouts)} rollouts in groups of "
        f"{group_size}",
        *(f"  {note}" for note in replay.notes),
        *_metric_lines(replay),
        "",
        *_difference_lines(rollouts, top),
        *_suspicious_lines(rollouts, top),
        *describe_episodes(rollouts, top),
    ]


def _metric_lines(replay: Replay) -> Iterator[str]:
    """Yields a table of the recorded and the replayed metrics; nothing if there are none."""
    if replay.metrics:
        # Metrics that are 0 in both are left out: there are many, such as fractions.
        rows = [
            [name, _number(old), _number(new), _difference(old, new)]
            for name, (old, new) in sorted(replay.metrics.items())
            if old or new
        ]
        name_width = max([_MIN_NAME_WIDTH, *(len(row[0]) for row in rows)])
        titles = ("recorded", "replayed", "difference")
        columns = [Column("", name_width, "<"), *(Column(title, 14) for title in titles)]
        yield ""
        yield from (line.plain for line in Terminal().table(columns, rows))


def _suspicious_lines(rollouts: Sequence[ReplayedRollout], top: int) -> Iterator[str]:
    """Yields lists of suspicious rollouts, with at most `top` rollouts each.

    They are those with the most weight in the loss, the least likely tokens, the largest
    differences between policy and engine, and logprobs that are not finite.
    """
    weights = [
        (abs(rollout.replayed.advantage or 0.0) * len(rollout.recorded.rollout_logprobs), rollout)
        for rollout in rollouts
        if rollout.in_loss
    ]
    unlikely: list[Ranked] = []
    mismatches: list[Ranked] = []
    broken: list[Ranked] = []
    source = "engine"
    for rollout in rollouts:
        engine = rollout.recorded.rollout_logprobs
        policy = rollout.logprobs or []
        if rollout.logprobs is not None:
            source = "policy"
        if not all(map(math.isfinite, [*engine, *policy])):
            broken.append((1.0, rollout))
            continue
        unlikely.append((-min(policy or engine, default=0.0), rollout))
        if policy:
            differences = [abs(new - old) for new, old in zip(policy, engine, strict=True)]
            mismatches.append((max(differences), rollout))
    title = "furthest from the engine, largest |policy - engine| of a token"
    yield from _ranked_lines("most weight in the loss, |advantage| x tokens", weights, top)
    yield from _ranked_lines(f"least likely token, -logprob of the {source}", unlikely, top)
    yield from _ranked_lines(title, mismatches, top)
    title = f"{len(broken)} rollouts with a logprob that is not finite"
    yield from _ranked_lines(title, broken, top)


def _difference_lines(rollouts: Sequence[ReplayedRollout], top: int) -> Iterator[str]:
    """Yields how many rollouts differ in each outcome, and the rollouts that differ most."""
    counts: dict[str, int] = {}
    ranked: list[tuple[list[float], str]] = []
    for rollout in rollouts:
        old = _outcomes(rollout.recorded)
        new = _outcomes(rollout.replayed)
        changes = []
        for name in old | new:
            old_value = old.get(name)
            new_value = new.get(name)
            is_other = _differ(old_value, new_value)
            counts[name] = counts.get(name, 0) + is_other
            if is_other:
                changes.append(f"{name} {_number(old_value)} -> {_number(new_value)}")
        if changes:
            distances = [
                abs((old[name] or 0.0) - (new[name] or 0.0)) for name in ("advantage", "reward")
            ]
            ranked.append((distances, _rollout_line(rollout, f" {'; '.join(changes)}")))
    totals = ", ".join(f"{name} {num}" for name, num in counts.items())
    yield f"of {len(rollouts)} rollouts differ: {totals}"
    if ranked:
        yield "largest differences (position/sample):"
        ranked.sort(key=lambda entry: entry[0], reverse=True)
        yield from (line for _, line in ranked[:top])


def _outcomes(record: RolloutRecord) -> dict[str, Any]:
    """Returns the outcomes of a rollout that a replay may change, by their names in the report."""
    return {
        "reward": record.reward,
        "advantage": record.advantage,
        **{f"reward {name}": value for name, value in record.rewards.items()},
        **{f"status {name}": status for name, status in record.statuses.items()},
    }


def _ranked_lines(title: str, ranked: Sequence[Ranked], top: int) -> Iterator[str]:
    """Yields a title and the `top` rollouts with the largest values; nothing if all are 0."""
    entries = sorted(
        (entry for entry in ranked if entry[0] > 0), key=lambda entry: entry[0], reverse=True
    )
    if entries:
        yield ""
        yield f"{title}:"
    for value, rollout in entries[:top]:
        record = rollout.recorded
        facts = (
            f"{_number(value):>10}",
            f"reward {_number(rollout.replayed.reward)}",
            f"advantage {_number(rollout.replayed.advantage)}",
            f"{len(record.rollout_logprobs)} tokens",
            record.finish_reason,
        )
        yield _rollout_line(rollout, "  ".join(facts))


def _rollout_line(rollout: ReplayedRollout, facts: str) -> str:
    """Returns one line about a rollout, with its completion and the answer of its data row."""
    completion = cut_middle(rollout.recorded.completion)
    # Dumps of earlier versions have no columns; then take those of the data set, if it was read.
    gold = gold_answer(rollout.recorded.columns or rollout.replayed.columns)
    return f"  {rollout.name:>9} {facts}  {completion!r}  {gold}".rstrip()


def _differ(old: Any, new: Any) -> bool:
    """Returns True if two outcomes differ, numbers by more than rounding."""
    if isinstance(old, float | int) and isinstance(new, float | int):
        return not abs(old - new) <= _ROUNDING * max(1.0, abs(old))
    return bool(old != new)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | int) else str(value or "-")


def _difference(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "-"
    return "0" if old == new else f"{new - old:+.1e}"
