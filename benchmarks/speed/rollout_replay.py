"""The schedules of a rollout replayed with the engine's own rules and no engine: event by event, as lengths say.

A decode step of b requests takes 8 ms + 0.05 ms * b (about a 7B model on one H100); prefill takes no time.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

from grpo_spmd.engine.shares import deal, share_out

Lengths = list[list[int]]  # of each group's completions, in tokens
MEAN_TOKENS = 1000


def draw(rng: random.Random, of_prompt: float, alike: float, cap: int, group_size: int) -> list[int]:
    """A group's lengths: lognormal, sigma 1, of mean MEAN_TOKENS before the cap; `alike` of the variance of the
    logarithm is the prompt's, which has drawn `of_prompt` from a standard normal distribution."""
    mean = math.log(MEAN_TOKENS) - 0.5 + math.sqrt(alike) * of_prompt
    logs = [mean + math.sqrt(1 - alike) * rng.gauss(0, 1) for _ in range(group_size)]
    return [max(1, min(cap, round(math.exp(x)))) for x in logs]


def play(
    lengths: Lengths,
    at_once: int,
    slowness: Sequence[float],
    static: bool = False,
    expected: Sequence[float] | None = None,
) -> list[float]:
    """When each engine is done. Continuous batching; between two ends of completions the batch stays the same.

    Args:
        at_once: requests that an engine runs at the same time; others of its own wait.
        slowness: of each engine, a factor on the time of its steps.
        expected: tokens of a completion of each group; None: groups are taken as they come.
    """
    engines, sizes = len(slowness), [len(group) for group in lengths]
    max_in_flight, num_dealt = share_out(len(lengths), max(sizes), engines, None if static else at_once)
    dealt, queued = deal(sizes, expected, num_dealt, engines)
    queued.reverse()  # the next one last, here and below
    waiting = [[tokens for g in of_engine for tokens in lengths[g]][::-1] for of_engine in dealt]
    running: list[list[int]] = [[] for _ in dealt]  # by engine: at which of its steps a completion ends
    steps, done_s = [0] * engines, [0.0] * engines
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
            heapq.heappush(events, (done_s[e] + (running[e][0] - steps[e]) * step_s, e))

    for e in range(engines):
        go_on(e)
    while events:
        now, e = heapq.heappop(events)
        done_s[e] = now
        steps[e] = heapq.heappop(running[e])
        go_on(e)
    return done_s
