"""The tail of a rollout: how much sooner the last engine is done with the shared queue than with the static split, and
with the queue's longest expected groups first.

    benchmarks/run.sh rollout_tail [--json FILE]        about 4 minutes on 2 cores
"model" rows replay the schedules with the engine's own rule and no engine: a decode step of b requests takes 8 ms +
0.05 ms * b (about a 7B model on one H100), lengths are lognormal with sigma 1, mean 1000 and a cap, groups have 8
completions; prefill takes no time. "alike" is the share of the variance of log(length) that completions of a prompt
have in common. What is expected of a group is the mean of 8 other completions of its prompt, those of an epoch ago.
"real" rows are vLLM on two ranks with a made model whose prompts decide the mean length of their completions; static,
shared queue and longest first in turn, the same tokens asserted in each round. `ratio` is static / shared_queue in the
time until the last engine is done, and `first` shared_queue / longest_first: median, min and max over seeds or rounds.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed import rollout_tail_worker
from benchmarks.support import ranks
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from grpo_spmd.engine.shares import deal, share_out

GROUP_SIZE, MEAN_TOKENS, NUM_SEEDS = 8, 1000, 7
SCHEDULES = "static", "shared_queue", "longest_first"  # the last two: the shared queue, in the stream's order or not
Lengths = list[list[int]]  # of each group's completions, in tokens


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    rows = []
    # alike, engines, requests at once, fair share / that, cap / mean, one engine in 8 at half the speed
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
    rows += measure()
    report("rollout_tail", rows, args.json)


def replay(alike: float, engines: int, at_once: int, load: int, cap: int, one_slow: bool) -> Row:
    """The model's row of one regime."""
    step_s = [2.0 if one_slow and engine % 8 == 0 else 1.0 for engine in range(engines)]
    seconds: dict[str, list[list[float]]] = {schedule: [] for schedule in SCHEDULES}
    for seed in range(NUM_SEEDS):
        num_groups = engines * at_once * load // GROUP_SIZE
        lengths, last_time = draw_lengths(random.Random(seed), num_groups, alike, cap * MEAN_TOKENS)
        for schedule, of_seeds in seconds.items():
            expected = [sum(group) / GROUP_SIZE for group in last_time] if schedule == "longest_first" else None
            of_seeds.append(finish_times(lengths, engines, at_once, schedule == "static", step_s, expected))
    what = f"alike {alike:g}, cap {cap} x mean" + (", 1 engine in 8 at half speed" if one_slow else "")
    return _row("model", what, engines, at_once, at_once * load, seconds)


def draw_lengths(rng: random.Random, num_groups: int, alike: float, cap: int) -> tuple[Lengths, Lengths]:
    """Of the same prompts in two epochs. Lognormal, sigma 1, of mean MEAN_TOKENS before the cap; `alike` of the
    variance of the logarithm is the prompt's."""
    epochs: tuple[Lengths, Lengths] = [], []
    for _ in range(num_groups):
        of_prompt = math.log(MEAN_TOKENS) - 0.5 + math.sqrt(alike) * rng.gauss(0, 1)
        for groups in epochs:
            logs = [of_prompt + math.sqrt(1 - alike) * rng.gauss(0, 1) for _ in range(GROUP_SIZE)]
            groups.append([max(1, min(cap, round(math.exp(x)))) for x in logs])
    return epochs


def finish_times(
    lengths: Lengths,
    engines: int,
    at_once: int,
    static: bool,
    slowness: Sequence[float],
    expected: Sequence[float] | None = None,
) -> list[float]:
    """When each engine is done: continuous batching, event by event; between two ends of completions the batch stays
    the same.

    Args:
        at_once: requests that an engine runs at the same time; others of its own wait.
        slowness: of each engine, a factor on the time of its steps.
        expected: tokens of a completion of each group; None: groups are taken as they come.
    """
    max_in_flight, num_dealt = share_out(len(lengths), len(lengths[0]), engines, None if static else at_once)
    dealt, queued = deal([len(group) for group in lengths], expected, num_dealt, engines)
    queued.reverse()  # the next one last, here and below
    waiting = [[tokens for group in of_engine for tokens in lengths[group]][::-1] for of_engine in dealt]
    running: list[list[int]] = [[] for _ in range(engines)]  # by engine: at which of its steps a completion ends
    steps, clock = [0] * engines, [0.0] * engines
    events: list[tuple[float, int]] = []

    def go_on(e: int) -> None:
        while True:
            while waiting[e] and len(running[e]) < at_once:
                heapq.heappush(running[e], steps[e] + waiting[e].pop())
            if not queued or len(running[e]) + len(waiting[e]) >= max_in_flight:
                break
            waiting[e][:0] = lengths[queued.pop()][::-1]
        if running[e]:
            step_s = (0.008 + 0.00005 * len(running[e])) * slowness[e]
            heapq.heappush(events, (clock[e] + (running[e][0] - steps[e]) * step_s, e))

    for e in range(engines):
        go_on(e)
    while events:
        now, e = heapq.heappop(events)
        clock[e] = now
        steps[e] = heapq.heappop(running[e])
        go_on(e)
    return clock


def measure() -> list[Row]:
    """The rows of real vLLM on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        rollout_tail_worker.make(Path(folder))
        found = ranks.measure(2, "benchmarks.speed.rollout_tail_worker", folder)
    return [_row("real", case["what"], 2, case["at_once"], case["per_engine"], case["seconds"]) for case in found]


def _row(
    source: str, what: str, engines: int, at_once: int, per_engine: int, seconds: dict[str, list[list[float]]]
) -> Row:
    """`seconds`: by schedule, for each seed or round, of each engine."""
    last = {schedule: [max(of_engines) for of_engines in of_rounds] for schedule, of_rounds in seconds.items()}

    first = spread("first", ratios(last["shared_queue"], last["longest_first"]))

    def waste(schedule: str) -> float:
        return statistics.median(
            1 - sum(of_engines) / len(of_engines) / max(of_engines) for of_engines in seconds[schedule]
        )

    return {
        "source": source,
        "what": what,
        "engines": engines,
        "at once": at_once,
        "completions an engine": per_engine,
        "static_s": statistics.median(last["static"]),
        "shared_queue_s": statistics.median(last["shared_queue"]),
        "longest_first_s": statistics.median(last["longest_first"]),
        **spread("ratio", ratios(last["static"], last["shared_queue"])),
        "first": first.pop("first"),
        **{f"first {end}": ratio for end, ratio in first.items()},
        "static waste": waste("static"),
        "shared waste": waste("shared_queue"),
        "first waste": waste("longest_first"),
    }


if __name__ == "__main__":
    main()
