"""What rank 0 does alone while all wait, and what it is sent and sends: simulated, from 1,000 to
100,000 rollouts and 8 to 4,096 ranks.

Groups of 8 with long-tailed lengths (those of `balance`), two reward functions whose rewards are
real numbers, groups dealt to the ranks in turn. An update's sums hold a histogram of as many tokens
as a rank trains on, from 1,000 to 100,000 of them, as a bf16 policy and its engine differ.

Seconds are CPU time of this process, of the quickest of five rounds: "judge" is to read what the
ranks tell of their groups and to judge these, "plan" the plan, "rest" what else is decided
(advantages, metrics), "encode" each rank's share as bytes, "sums" the sums of the ranks' updates.
"share" is all of it, of a step of 100 s. The network's time is not here.

"bytes_in" and "bytes_out" are per rollout, with what each message has beside its rollouts;
"largest" is the largest message; "sums_bytes" a rank's sums; "all_out" what all ranks get together.
Memory is counted in a round of its own, in bytes a rollout and for Python and numpy: "held" is what
stays until the step's end, "peak" the most that there was at one time, without what the ranks told
(bytes_in) and without torch's few numbers a reward while rewards are judged. Both have what is
there for each rank, however few rollouts it has: look at 100,000 rollouts for what a rollout takes.

Bytes are the same in each run. Seconds are those of a machine that others use too: the quickest
round says what the work takes, and the last line judges nothing but the table above it.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.speed.balance import BUDGET, GROUP_SIZE, LONGEST, trace
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed.reductions import Mean, Sum, merge_bytes, to_bytes
from grpo_spmd.learn import balance
from grpo_spmd.learn.losses import mismatch_sums
from grpo_spmd.learn.sampled_step import StepRules, _Rank0Step
from grpo_spmd.learn.step_messages import encode_decisions, encode_groups
from grpo_spmd.learn.update import no_update
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts

T = TypeVar("T")
STEP_S = 100.0


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    gc.freeze()  # as vLLM does in a run
    rows = [
        _measure(num_rollouts, num_ranks)
        for num_rollouts in (1_000, 10_000, 100_000)
        for num_ranks in (8, 64, 512, 1_024, 4_096)
    ]
    report("rank0", rows, args.json)
    print(f"\nat most {max(row['share'] for row in rows):.2%} of a step of {STEP_S:.0f} s")


def _measure(num_rollouts: int, num_ranks: int) -> Row:
    facts, rules = simulated_step(num_rollouts, num_ranks)
    some = [simulated_sums(rank, num_rollouts // num_ranks) for rank in range(min(num_ranks, 64))]
    sums = [some[rank % len(some)] for rank in range(num_ranks)]
    rounds = []
    for _ in range(5):
        seconds: dict[str, float] = {}
        rank0_step = _Rank0Step(rules)
        _timed(seconds, "judge_s", rank0_step.add_round)(facts, num_rollouts // GROUP_SIZE)
        with patch.object(balance, "plan_batch", _timed(seconds, "plan_s", balance.plan_batch)):
            step = _timed(seconds, "rest_s", rank0_step.decide)()
        seconds["rest_s"] -= seconds["plan_s"]
        shares = _timed(seconds, "encode_s", encode_decisions)(step)
        rounds.append(seconds)
        _timed(seconds, "sums_s", merge_bytes)(sums)
    minimum = min(rounds, key=lambda seconds: sum(seconds.values()))
    return {
        "rollouts": num_rollouts,
        "ranks": num_ranks,
        **minimum,
        "share": sum(minimum.values()) / STEP_S,
        "bytes_in": sum(map(len, facts)) / num_rollouts,
        "bytes_out": sum(map(len, shares)) / num_rollouts,
        "largest_in": max(map(len, facts)),
        "largest_out": max(map(len, shares)),
        "sums_bytes": max(map(len, sums)),
        "all_out_mib": sum(map(len, shares)) / 2**20,
        **dict(zip(("held", "peak"), memory(facts, rules), strict=True)),
    }


def _timed(seconds: dict[str, float], name: str, call: Callable[..., T]) -> Callable[..., T]:
    def inner(*args: Any, **kwargs: Any) -> T:
        start = time.process_time()
        result = call(*args, **kwargs)
        seconds[name] = time.process_time() - start
        return result

    return inner


def simulated_step(num_rollouts: int, num_ranks: int) -> tuple[list[bytes], StepRules]:
    """What each rank tells rank 0 of its groups, and the rules of the step."""
    rng, lengths = np.random.default_rng(0), trace(num_rollouts)
    rank_values: list[list[RolloutGroup]] = [[] for _ in range(num_ranks)]
    names = ("accuracy", "format")
    scores_values = [
        ScoredRollouts([], {n: [] for n in names}, {n: [] for n in names}) for _ in range(num_ranks)
    ]
    for position in range(num_rollouts // GROUP_SIZE):
        scored, completions = scores_values[position % num_ranks], []
        for length in lengths[position * GROUP_SIZE : (position + 1) * GROUP_SIZE]:
            tokens: Any = range(length - 64)  # nobody looks at more than their number
            completions.append(Completion(tokens, tokens, "stop"))
            values = rng.normal(size=len(names)).tolist()
            scored.rewards.append(sum(values))
            for name, value in zip(names, values, strict=True):
                scored.by_name[name].append(value)
                scored.statuses[name].append("ok")
        group = RolloutGroup(position, Prompt(position, position, [1] * 64, "", {}), completions)
        rank_values[position % num_ranks].append(group)
    rollout = RolloutConfig(
        num_prompts_per_step=num_rollouts // GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_completion_tokens=LONGEST,
    )
    training = TrainingConfig(max_tokens_per_micro_batch=BUDGET)
    rules = StepRules(
        rollout,
        AdvantageConfig(),
        LossConfig(),
        training,
        0.5,
        num_ranks,
        attention_cost_ratio=2.8e-5,
    )
    return [
        encode_groups(*local, GROUP_SIZE) for local in zip(rank_values, scores_values, strict=True)
    ], rules


def memory(facts: list[bytes], rules: StepRules) -> tuple[float, float]:
    """Bytes a rollout that rank 0 holds until the step's end, and at most meanwhile: Python's and
    numpy's."""

    def decided() -> _Rank0Step:
        rank0_step = _Rank0Step(rules)
        rank0_step.add_round(facts, rules.rollout.num_prompts_per_step)
        encode_decisions(rank0_step.decide())
        return rank0_step

    decided()  # what is made once in a process stays out of it
    gc.collect()
    tracemalloc.start()
    rank0_step = decided()
    gc.collect()
    retained, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rank0_step.decision is not None
    retained += rank0_step.decision.advantages.nbytes  # torch's memory
    return retained / len(rank0_step.decision.rewards), peak / len(rank0_step.decision.rewards)


def simulated_sums(rank: int, num_rollouts: int) -> bytes:
    """What a rank's update came to, as it tells rank 0."""
    rng = np.random.default_rng(rank)
    sums = no_update(LossConfig())
    sums |= {
        name: Mean(rng.normal(), 1000) for name, kind in sums.items() if isinstance(kind, Mean)
    }
    sums |= {name: Sum(rng.normal()) for name, kind in sums.items() if isinstance(kind, Sum)}
    # Most tokens are all but certain, and there engine and policy agree to the last digits.
    size = min(max(1_000, 1_000 * num_rollouts), 100_000)
    difference = torch.from_numpy(
        (rng.normal(size=size) * 0.02 * rng.uniform(size=size) ** 3).astype(np.float32)
    )
    ones = torch.ones(size, dtype=torch.bool)
    measured = mismatch_sums(difference, torch.zeros(size), ones)
    return to_bytes(sums | {name: kind.on_host() for name, kind in measured.items()})


if __name__ == "__main__":
    main()
