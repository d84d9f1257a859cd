"""The command: python -m grpo_spmd.replay RUN_DIR --step N [--checkpoint FOLDER] [section.key=value
...]

The replay runs on the CPU, in one process, without vLLM. It runs the trainer's own code on the
dumped rollouts, so that breakpoint() works in a reward (in the reward pool, with its time limits,
as in training), in the advantages and in the loss. With overrides it shows what another config
would do. The report has notes, the recorded and the replayed metrics side by side, and the rollouts
that differ most or look suspicious.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.manifest import CheckpointError
from grpo_spmd.config.command_line import OverridesParser
from grpo_spmd.config.errors import ConfigError, cut_middle, refuse
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.observe.rollout_record import RolloutRecord, gold_answer
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import RewardError
from grpo_spmd.tools.replay.read import (
    RecordedStep,
    Replay,
    ReplayedRollout,
    callable_rewards,
    describe_episodes,
    read_step,
)
from grpo_spmd.tools.terminal import Column, Terminal

# (value, rollout), for a list in the report: rollouts with larger values come first.
Ranked = tuple[float, ReplayedRollout]


def main() -> None:
    """Runs the command; the exit code is 2 for wrong input and 1 for any other failure."""
    hold_standard_streams()
    about = (
        "Run reward -> advantage -> loss of a dumped step again, on the CPU, without vLLM, "
        "and compare with what was recorded. breakpoint() works in a reward, in the "
        "advantages and in the loss."
    )
    parser = OverridesParser(prog="python -m grpo_spmd.replay", description=about)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, or a copy of it")
    add("--step", type=int, required=True, metavar="N", help="as in metrics.jsonl, from 1 on")
    policy = "the policy (default: that of checkpoints/step_(N-1); for step 1 also model.path)"
    add("--checkpoint", type=Path, metavar="FOLDER", help=policy)
    add("--top", type=int, default=5, metavar="K", help="rollouts in each list (default: 5)")
    ask_help = "ask servers and judges again (default: take the recorded rewards)"
    add("--ask-servers", action="store_true", help=ask_help)
    args = parser.parse()
    if args.step < 1:
        parser.error(f"--step counts from 1 on; got {args.step}")
    try:
        recorded = read_step(args.run_dir, args.step, args.overrides, asks_servers=args.ask_servers)
    except ConfigError as error:
        refuse(error)
    # Otherwise torch's C++ warnings would be among the lines of the report.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = 0
    try:
        show("\n".join(report(recorded, replay(recorded, args.checkpoint), args.top)))
    except (ConfigError, CheckpointError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RewardError) else 2
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)


def replay(recorded: RecordedStep, checkpoint: Path | None = None) -> Replay:
    """Computes the rewards, advantages and update of a step again, and returns the results.

    The policy is that of `checkpoint`; by default it is that of the run's checkpoint before the
    step, or for step 1 the model with which the run started.

    Raises ConfigError or CheckpointError if something is missing or damaged, and RewardError if the
    user has quit the debugger (breakpoint() in a reward).
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
    # The pool's workers write what users' rewards print to this file, not to the report.
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
    """Yields a table of the metrics: recorded value, replayed value and difference.

    Yields nothing if there are no metrics."""
    if replay.metrics:
        # Metrics that are 0 in both are left out: there are many, such as fractions.
        rows = [
            [name, _number(old), _number(new), _difference(old, new)]
            for name, (old, new) in sorted(replay.metrics.items())
            if old or new
        ]
        name_width = max([34, *(len(row[0]) for row in rows)])
        titles = ("recorded", "replayed", "difference")
        columns = [Column("", name_width, "<"), *(Column(title, 14) for title in titles)]
        yield ""
        yield from (line.plain for line in Terminal().table(columns, rows))


def _suspicious_lines(rollouts: Sequence[ReplayedRollout], top: int) -> Iterator[str]:
    """Yields lists of suspicious rollouts, with at most `top` rollouts each.

    They are those with the most weight in the loss, the least likely tokens, the largest
    differences between policy and engine, and logprobs that are not finite.
    """
    source = "policy" if any(rollout.logprobs for rollout in rollouts) else "engine"
    weight = "most weight in the loss, |advantage| x tokens"
    unlikely = f"least likely token, -logprob of the {source}"
    mismatch = "furthest from the engine, largest |policy - engine| of a token"
    lists: dict[str, list[Ranked]] = {weight: [], unlikely: [], mismatch: []}
    # Rollouts with a logprob that is not finite, which cannot be ranked by their logprobs.
    broken: list[Ranked] = []
    for rollout in rollouts:
        engine = rollout.recorded.rollout_logprobs
        policy = rollout.logprobs or []
        if rollout.in_loss:
            size = abs(rollout.replayed.advantage or 0.0) * len(engine)
            lists[weight].append((size, rollout))
        if not all(map(math.isfinite, [*engine, *policy])):
            broken.append((1.0, rollout))
            continue
        lists[unlikely].append((-min(policy or engine, default=0.0), rollout))
        if policy:
            differences = [abs(new - old) for new, old in zip(policy, engine, strict=True)]
            lists[mismatch].append((max(differences), rollout))
    for title, ranked in lists.items():
        yield from _ranked_lines(title, ranked, top)
    title = f"{len(broken)} rollouts with a logprob that is not finite"
    yield from _ranked_lines(title, broken, top)


def _difference_lines(rollouts: Sequence[ReplayedRollout], top: int) -> Iterator[str]:
    """Yields how many rollouts differ between run and replay in each outcome, such as the reward.

    Then come the `top` rollouts that differ most, by their advantages first."""
    counts: Counter[str] = Counter()
    ranked: list[tuple[list[float], str]] = []
    for rollout in rollouts:
        old, new = _outcomes(rollout.recorded), _outcomes(rollout.replayed)
        changes = []
        for name in old | new:
            is_other = _differ(old.get(name), new.get(name))
            counts[name] += is_other
            if is_other:
                changes.append(f"{name} {_number(old.get(name))} -> {_number(new.get(name))}")
        if changes:
            # By these the rollouts are sorted. A number that is unknown counts as 0.
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
    positive = [entry for entry in ranked if entry[0] > 0]
    if positive:
        yield ""
        yield f"{title}:"
    for value, rollout in sorted(positive, key=lambda entry: entry[0], reverse=True)[:top]:
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
    """Returns one line about a rollout.

    It has its name, `facts`, its completion (shortened), and the right answer according to its row
    in the data set, if the row has one."""
    completion = cut_middle(rollout.recorded.completion)
    # Dumps of earlier versions have no columns; then take those of the data set, if it was read.
    gold = gold_answer(rollout.recorded.columns or rollout.replayed.columns)
    return f"  {rollout.name:>9} {facts}  {completion!r}  {gold}".rstrip()


def _differ(old: Any, new: Any) -> bool:
    """Returns True if the outcomes `old` and `new` differ.

    Numbers must differ by more than rounding errors."""
    if isinstance(old, float | int) and isinstance(new, float | int):
        # Smaller relative differences come from float32 sums in another order. With `not <=`, NaN
        # differs from every number.
        return not abs(old - new) <= 1e-6 * max(1.0, abs(old))
    return bool(old != new)


def _number(value: Any) -> str:
    """Returns a number with six digits, any other value as text, and "-" for None or ""."""
    return f"{value:.6g}" if isinstance(value, float | int) else str(value or "-")


def _difference(old: float | None, new: float | None) -> str:
    """Returns `new` minus `old` as text; "-" if one of them is None."""
    if old is None or new is None:
        return "-"
    return "0" if old == new else f"{new - old:+.1e}"


if __name__ == "__main__":
    main()
