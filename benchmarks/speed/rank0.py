"""What rank 0 does alone while all wait, and what it is sent and sends: simulated, from 1,000 to 100,000 rollouts and 8
to 4,096 ranks.

Groups of 8 with long-tailed lengths (those of `balance`), two reward functions whose rewards are real numbers, groups
dealt to the ranks in turn. Seconds are CPU time of one process, the least of three: "decode and judge" of what the
ranks tell of their groups; "plan"; "rest" of the decision (advantages, metrics); "encode" of what each rank gets;
"sums" of the ranks' updates. Bytes are per rollout, with what each message has beside its rollouts; "largest" is the
largest message; "sums_bytes" are a rank's. "share" is all of it, of a step of 100 s. The network's time is not here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from benchmarks.speed.balance import BUDGET, GROUP_SIZE, LONGEST, trace
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed.reductions import Histogram, Mean, Sum, merge_bytes, to_bytes
from grpo_spmd.learn import sampled_step
from grpo_spmd.learn.facts import encode_facts
from grpo_spmd.learn.sampled_step import StepRules, _Decider
from grpo_spmd.learn.shares import encode_shares
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
    sums = [simulated_sums(rank) for rank in range(num_ranks)]
    rounds = []
    for _ in range(3):
        seconds: dict[str, float] = {}
        decider = _Decider(rules)
        _timed(seconds, "judge_s", decider.add_round)(facts, num_rollouts // GROUP_SIZE)
        with patch.object(sampled_step, "plan_batch", _timed(seconds, "plan_s", sampled_step.plan_batch)):
            step = _timed(seconds, "rest_s", decider.decide)()
        seconds["rest_s"] -= seconds["plan_s"]
        shares = _timed(seconds, "encode_s", encode_shares)(step)
        rounds.append(seconds)
        _timed(seconds, "sums_s", merge_bytes)(sums)
    least = min(rounds, key=lambda seconds: sum(seconds.values()))
    return {
        "rollouts": num_rollouts,
        "ranks": num_ranks,
        **least,
        "share": sum(least.values()) / STEP_S,
        "bytes_in": sum(map(len, facts)) / num_rollouts,
        "bytes_out": sum(map(len, shares)) / num_rollouts,
        "largest_in": max(map(len, facts)),
        "largest_out": max(map(len, shares)),
        "sums_bytes": max(map(len, sums)),
        "all_out_mib": sum(map(len, shares)) / 2**20,
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
    of_ranks: list[list[RolloutGroup]] = [[] for _ in range(num_ranks)]
    names = ("accuracy", "format")
    of_scores = [ScoredRollouts([], {n: [] for n in names}, {n: [] for n in names}) for _ in range(num_ranks)]
    for position in range(num_rollouts // GROUP_SIZE):
        scored, completions = of_scores[position % num_ranks], []
        for length in lengths[position * GROUP_SIZE : (position + 1) * GROUP_SIZE]:
            tokens: Any = range(length - 64)  # nobody looks at more than their number
            completions.append(Completion(tokens, tokens, "stop"))
            values = rng.normal(size=len(names)).tolist()
            scored.rewards.append(sum(values))
            for name, value in zip(names, values, strict=True):
                scored.by_name[name].append(value)
                scored.statuses[name].append("ok")
        group = RolloutGroup(position, Prompt(position, position, [1] * 64, "", {}), completions)
        of_ranks[position % num_ranks].append(group)
    rollout = RolloutConfig(
        num_prompts_per_step=num_rollouts // GROUP_SIZE, group_size=GROUP_SIZE, max_completion_tokens=LONGEST
    )
    training = TrainingConfig(max_tokens_per_micro_batch=BUDGET)
    rules = StepRules(rollout, AdvantageConfig(), LossConfig(), training, 0.5, num_ranks, attention_cost_ratio=2.8e-5)
    return [encode_facts(*own, GROUP_SIZE) for own in zip(of_ranks, of_scores, strict=True)], rules


def simulated_sums(rank: int) -> bytes:
    """What a rank's update came to, as it tells rank 0."""
    rng = np.random.default_rng(rank)
    sums = no_update(LossConfig())
    sums |= {name: Mean(rng.normal(), 1000) for name, kind in sums.items() if isinstance(kind, Mean)}
    sums |= {name: Sum(rng.normal()) for name, kind in sums.items() if isinstance(kind, Sum)}
    return to_bytes(sums | {"mismatch_ratios": Histogram(rng.integers(0, 1000, 401).astype(float).tolist())})


if __name__ == "__main__":
    main()
