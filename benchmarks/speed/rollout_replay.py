"""The schedules of a rollout replayed with the engine's own rules and no engine: event by event, as
lengths say.

A decode step of b requests takes 8 ms + 0.05 ms * b (about a 7B model on one H100); prefill takes
no time.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_spmd.data.prompts import PromptStream, TailStream
from grpo_spmd.engine.requests import deal, share_out
from grpo_spmd.records import Prompt

Lengths = list[list[int]]  # of each group's completions, in tokens
MEAN_TOKENS = 1000


def draw(
    rng: random.Random, prompt_values: float, equal: float, cap: int, group_size: int
) -> list[int]:
    """A group's lengths: lognormal, sigma 1, of mean MEAN_TOKENS before the cap; `alike` of the
    variance of the
    logarithm is the prompt's, which has drawn `of_prompt` from a standard normal distribution."""
    mean = math.log(MEAN_TOKENS) - 0.5 + math.sqrt(equal) * prompt_values
    logs = [mean + math.sqrt(1 - equal) * rng.gauss(0, 1) for _ in range(group_size)]
    return [max(1, min(cap, round(math.exp(x)))) for x in logs]


@dataclass
class Played:
    """One round."""

    done_s: list[float]  # when each engine is done
    complete: list[int]  # groups, in the order in which they were
    num_tokens: float  # that were sampled, also of groups that were dropped


def play(
    lengths: Lengths,
    at_once: int,
    slowness: Sequence[float],
    static: bool = False,
    expected: Sequence[float] | None = None,
    enough: int | None = None,
) -> Played:
    """Continuous batching; between two ends of completions the batch stays the same.

    Args:
        at_once: requests that an engine runs at the same time; others of its own wait.
        slowness: of each engine, a factor on the time of its steps.
        expected: tokens of a completion of each group; None: groups are taken as they come.
        enough: complete groups that end the round; None: all.
    """
    engines, sizes = len(slowness), [len(group) for group in lengths]
    max_in_flight, num_dealt = share_out(
        len(lengths), max(sizes), engines, None if static else at_once
    )
    dealt, queued = deal(sizes, expected, num_dealt, engines)
    queued.reverse()  # the next one last, here and below
    waiting = [
        [(tokens, g) for g in engine_values for tokens in lengths[g]][::-1]
        for engine_values in dealt
    ]
    running: list[list[tuple[int, int, int]]] = [
        [] for _ in dealt
    ]  # the step of the end, the group, that of the start
    steps, played, num_left = [0] * engines, Played([0.0] * engines, [], 0.0), sizes
    events: list[tuple[float, int]] = []

    def step_s(e: int) -> float:
        return (0.008 + 0.00005 * len(running[e])) * slowness[e]

    def go_on(e: int) -> None:
        while True:
            while waiting[e] and len(running[e]) < at_once:
                tokens, group = waiting[e].pop()
                heapq.heappush(running[e], (steps[e] + tokens, group, steps[e]))
            if not queued or len(running[e]) + len(waiting[e]) >= max_in_flight:
                break
            group = queued.pop()
            waiting[e][:0] = [(tokens, group) for tokens in lengths[group]][::-1]
        if running[e]:
            heapq.heappush(
                events, (played.done_s[e] + (running[e][0][0] - steps[e]) * step_s(e), e)
            )

    for e in range(engines):
        go_on(e)
    while events:
        current, e = heapq.heappop(events)
        played.done_s[e] = current
        steps[e], group, start = heapq.heappop(running[e])
        played.num_tokens += steps[e] - start
        num_left[group] -= 1
        if not num_left[group]:
            played.complete.append(group)
            if len(played.complete) == enough:
                break
        go_on(e)
    for e, engine_values in enumerate(running):  # what is dropped; empty where all are complete
        if engine_values:
            step = steps[e] + (current - played.done_s[e]) / step_s(e)
            played.num_tokens += sum(step - start for *_, start in engine_values)
            played.done_s[e] = current
    return played


@dataclass
class Epoch:
    """Of a training set whose prompts were sampled once before."""

    rollout_s: float
    dropped_frac: float  # of the sampled tokens
    short_mean: float | None  # tokens of a completion that was trained on in a short round
    mean: float  # of all


def play_epoch(  # noqa: PLR0913, a model's parameters, each by its own name
    seed: int,
    num_steps: int,
    num_prompts: int,
    group_size: int,
    engines: int,
    at_once: int,
    equal: float,
    cap: int,
    factor: float,
) -> Epoch:
    """An epoch of `num_steps` under tail batching with `factor`; 1: without."""
    rng, num_rows = random.Random(seed), num_prompts * num_steps
    prompts_values = [rng.gauss(0, 1) for _ in range(num_rows)]
    last_time = [
        sum(draw(rng, mean, equal, cap, group_size)) / group_size for mean in prompts_values
    ]
    fresh = PromptStream(
        [Prompt(row, row, [], "", {}) for row in range(num_rows)], seed, shuffle=True
    )
    stream = TailStream(fresh, num_rows, math.ceil(round(num_prompts * factor, 6)))
    seconds, sampled, trained = 0.0, 0.0, list[int]()
    short_values = list[int]()
    for step in range(num_steps):
        dealt = stream.take(num_prompts)
        rows = [prompt.row for prompt in dealt]
        lengths = [
            draw(random.Random(f"{seed}/{step}/{r}"), prompts_values[r], equal, cap, group_size)
            for r in rows
        ]
        played = play(
            lengths, at_once, [1.0] * engines, False, [last_time[row] for row in rows], num_prompts
        )
        selected = set(played.complete)
        used = [tokens for slot in selected for tokens in lengths[slot]]
        trained += used
        if len(rows) > num_prompts:
            stream.leave([prompt for slot, prompt in enumerate(dealt) if slot not in selected], {})
            short_values += used
        seconds, sampled = seconds + max(played.done_s), sampled + played.num_tokens
    assert (len(trained), stream.epoch) == (num_rows * group_size, 1.0)
    short_mean = sum(short_values) / len(short_values) if short_values else None
    return Epoch(seconds, 1 - sum(trained) / sampled, short_mean, sum(trained) / len(trained))
