"""The tail of a rollout: how much sooner the last engine is done with the shared queue than with
the static split, and with the queue's longest expected groups first; and what tail batching saves
of an epoch.

    benchmarks/run.sh rollout_tail [--trace RUN] [--json FILE]        about 6 minutes on 2 cores
"model" rows replay the schedules with no engine (rollout_replay.py): lengths are lognormal with
sigma 1, mean 1000 and a cap, groups have 8 completions. "alike" is the share of the variance of
log(length) that completions of a prompt have in common. What is expected of a group is the mean of
8 other completions of its prompt, those of an epoch ago. "real" rows are vLLM on two ranks with a
made model whose prompts decide the mean length of their completions; static, shared queue and
longest first in turn, the same tokens asserted in each round. Their `steps` are decode steps of the
engine that made most, which no other load of the machine changes. "recorded" rows replay the
lengths of the real rows on more engines, or with
--trace those of a run of one's own with two epochs or more, from its rollout dump. `ratio` is
static / shared_queue in the time until the last engine is done, and `first` shared_queue /
longest_first: median, min and max over seeds, rounds or steps. "tail" rows, a table of their own,
replay an epoch of 16 steps with `rollout.tail_batching: factor` beside one without; `ratio` is
without / with in the time of all rollouts, `dropped` the share of sampled tokens that is thrown
away, `short mean` the tokens of a completion that short rounds train on, `mean` those of all. "tail
real" rows are epochs of vLLM on the two ranks, in turn, each prompt once asserted; their `dropped`
is the mean of the epoch's rounds.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.speed import rollout_tail_worker
from benchmarks.speed.rollout_replay import MEAN_TOKENS, Lengths, draw, play, play_epoch
from benchmarks.support import ranks
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from grpo_spmd.observe.run_folder import RunFolder
from grpo_spmd.tools.replay.read import read_step

GROUP_SIZE, NUM_SEEDS, NUM_TAIL_SEEDS = 8, 7, 3
SCHEDULES = (
    "static",
    "shared_queue",
    "longest_first",
)  # the last two: the shared queue, in the stream's order or not


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--trace", type=Path, help="replay the lengths in the rollout dump of this run"
    )
    args = parser.parse_args()
    if args.trace is not None:
        report(
            "rollout_tail",
            list(replay_recorded(str(args.trace), recorded_steps(args.trace))),
            args.json,
        )
        return
    rows = []
    # alike, engines, requests at once, fair share / that, cap / mean, one engine in 8 at half the
    # speed
    for case in (
        (0.5, 1, 32, 8, 4, False),
        (0.5, 8, 256, 1, 8, False),
        (0.5, 64, 256, 1, 8, False),
        (0.0, 8, 32, 8, 8, False),
        (0.0, 64, 32, 8, 8, False),
        (0.5, 8, 32, 2, 4, False),
        (0.5, 8, 32, 8, 4, False),
        (0.5, 64, 8, 2, 4, False),
        (0.5, 64, 32, 4, 4, False),
        (0.5, 64, 32, 8, 4, False),
        (0.5, 64, 32, 8, 16, False),
        (0.8, 64, 32, 8, 4, False),
        (0.8, 64, 8, 16, 8, False),
        (1.0, 8, 8, 8, 4, False),
        (1.0, 64, 8, 16, 8, False),
        (0.5, 8, 256, 1, 8, True),
        (0.5, 8, 32, 2, 4, True),
        (0.5, 8, 32, 8, 4, True),
        (0.5, 64, 32, 8, 4, True),
    ):
        rows.append(replay(*case))
    rank_values, epochs_values = measure()
    report("rollout_tail", rows + rank_values, args.json)
    # alike, engines, requests at once, prompts a step, cap / mean, factor
    cases = (
        (0.5, 8, 256, 256, 8),
        (0.5, 8, 32, 256, 8),
        (0.0, 8, 64, 64, 8),
        (0.5, 8, 64, 64, 2),
        (0.9, 8, 64, 64, 16),
    )
    tail = [tail_row(*case, factor) for case in cases for factor in (1.1, 1.25, 1.5)]
    report("rollout_tail", [*tail, *epochs_values], args.json)


def replay(equal: float, engines: int, at_once: int, load: int, cap: int, one_slow: bool) -> Row:
    """The model's row of one regime."""
    step_s = [2.0 if one_slow and engine % 8 == 0 else 1.0 for engine in range(engines)]
    seconds: dict[str, list[list[float]]] = {schedule: [] for schedule in SCHEDULES}
    for seed in range(NUM_SEEDS):
        num_groups = engines * at_once * load // GROUP_SIZE
        rng = random.Random(seed)
        prompts_values = [rng.gauss(0, 1) for _ in range(num_groups)]
        epochs = [
            [draw(rng, x, equal, cap * MEAN_TOKENS, GROUP_SIZE) for x in prompts_values]
            for _ in range(2)
        ]
        for schedule, seeds_values in seconds.items():
            expected = (
                [sum(group) / GROUP_SIZE for group in epochs[0]]
                if schedule == "longest_first"
                else None
            )
            seeds_values.append(
                play(epochs[1], at_once, step_s, schedule == "static", expected).done_s
            )
    label = f"alike {equal:g}, cap {cap} x mean" + (
        ", 1 engine in 8 at half speed" if one_slow else ""
    )
    return _row("model", label, engines, at_once, at_once * load, seconds)


def replay_recorded(label: str, steps: Sequence[dict[str, Lengths]]) -> Iterator[Row]:
    """Rows of lengths that an engine sampled in the steps of an epoch, and of the same prompts an
    epoch before."""
    for engines, at_once in ((2, 8), (4, 4), (8, 4)):
        seconds: dict[str, list[list[float]]] = {schedule: [] for schedule in SCHEDULES}
        for step in steps:
            expected = [sum(group) / len(group) for group in step["last_time"]]
            for schedule, steps_values in seconds.items():
                expected_names = expected if schedule == "longest_first" else None
                steps_values.append(
                    play(
                        step["lengths"],
                        at_once,
                        [1.0] * engines,
                        schedule == "static",
                        expected_names,
                    ).done_s
                )
        per_engine = sum(map(len, steps[0]["lengths"])) // engines
        yield _row("recorded", label, engines, at_once, per_engine, seconds)


def recorded_steps(run_dir: Path) -> list[dict[str, Lengths]]:
    """Of a run's rollout dump, the steps all of whose prompts an earlier step had."""
    lengths_of: dict[int, list[int]] = {}
    steps: list[dict[str, Lengths]] = []
    for step in RunFolder(run_dir).dumped_steps:
        groups = read_step(run_dir, step).rollouts
        rows, lengths = (
            [group[0].row for group in groups],
            [[len(r.completion_ids) for r in group] for group in groups],
        )
        if all(row in lengths_of for row in rows):
            steps.append({"lengths": lengths, "last_time": [lengths_of[row] for row in rows]})
        lengths_of |= dict(zip(rows, lengths, strict=True))
    if not steps:
        raise SystemExit(
            f"{run_dir}: no step of its rollout dump has prompts that all were sampled before"
        )
    return steps


def tail_row(
    equal: float, engines: int, at_once: int, prompts: int, cap: int, factor: float
) -> Row:
    """An epoch of 16 steps with tail batching beside one without; both begin with the longest
    expected groups."""
    shape = 16, prompts, GROUP_SIZE, engines, at_once, equal, cap * MEAN_TOKENS
    without = [play_epoch(seed, *shape, 1.0) for seed in range(NUM_TAIL_SEEDS)]
    epochs = [play_epoch(seed, *shape, factor) for seed in range(NUM_TAIL_SEEDS)]
    times = [[epoch.rollout_s for epoch in everything] for everything in (without, epochs)]
    return {
        "source": "tail",
        "what": f"alike {equal:g}, cap {cap} x mean",
        "engines": engines,
        "at once": at_once,
        "prompts": prompts,
        "factor": factor,
        "without_s": statistics.median(times[0]),
        "tail_s": statistics.median(times[1]),
        **spread("ratio", ratios(*times)),
        "dropped": statistics.median(epoch.dropped_frac for epoch in epochs),
        "short mean": statistics.median(epoch.short_mean or math.nan for epoch in epochs),
        "mean": statistics.median(epoch.mean for epoch in epochs),
    }


def measure() -> tuple[list[Row], list[Row]]:
    """The rows of real vLLM on two ranks, with those of their lengths on more, and those of its
    epochs."""
    with tempfile.TemporaryDirectory() as folder:
        rollout_tail_worker.make(Path(folder))
        *cases, epochs = ranks.measure(2, "benchmarks.speed.rollout_tail_worker", folder)
    rows = []
    for case in cases:
        row = _row("real", case["what"], 2, case["at_once"], case["per_engine"], case["seconds"])
        steps = {
            f"{name} steps": statistics.median(map(max, rounds_values))
            for name, rounds_values in case["steps"].items()
        }
        rows += [row | steps, *replay_recorded(case["what"], case["trace"])]
    return rows, [_epoch_row(epochs)]


def _epoch_row(epochs: Row) -> Row:
    times, steps = (
        [[of[position] for of in epochs[name]] for name in ("without", "with")]
        for position in (0, 1)
    )
    return {
        "source": "tail real",
        "what": "prompts of lognormal mean length",
        "engines": 2,
        "at once": rollout_tail_worker.AT_ONCE,
        "prompts": rollout_tail_worker.STEP_PROMPTS,
        "factor": epochs["factor"],
        "without_s": statistics.median(times[0]),
        "tail_s": statistics.median(times[1]),
        **spread("ratio", ratios(*times)),
        "dropped": statistics.median(epochs["dropped"]),
        "short mean": statistics.median(epochs["short"]),
        "mean": statistics.median(epochs["all"]),
        "without steps": statistics.median(steps[0]),
        "tail steps": statistics.median(steps[1]),
    }


def _row(
    source: str,
    label: str,
    engines: int,
    at_once: int,
    per_engine: int,
    seconds: dict[str, list[list[float]]],
) -> Row:
    """`seconds`: by schedule, for each seed or round, of each engine."""
    final = {
        schedule: [max(engines_values) for engines_values in rounds_values]
        for schedule, rounds_values in seconds.items()
    }

    initial = spread("first", ratios(final["shared_queue"], final["longest_first"]))

    def waste(schedule: str) -> float:
        return statistics.median(
            1 - sum(engines_values) / len(engines_values) / max(engines_values)
            for engines_values in seconds[schedule]
        )

    return {
        "source": source,
        "what": label,
        "engines": engines,
        "at once": at_once,
        "completions an engine": per_engine,
        "static_s": statistics.median(final["static"]),
        "shared_queue_s": statistics.median(final["shared_queue"]),
        "longest_first_s": statistics.median(final["longest_first"]),
        **spread("ratio", ratios(final["static"], final["shared_queue"])),
        "first": initial.pop("first"),
        **{f"first {end}": ratio for end, ratio in initial.items()},
        "static waste": waste("static"),
        "shared waste": waste("shared_queue"),
        "first waste": waste("longest_first"),
    }


if __name__ == "__main__":
    main()
