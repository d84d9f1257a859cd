"""How even the plans are, and what planning takes: long-tailed traces of 100 to 100,000 rollouts
over 2 to 64 ranks, by arithmetic.

Completions are lognormal (sigma 1, median 512 tokens) and cut off at 8,192; the 8 of a group are
alike (0.81 of the variance is the group's). Rows hold 16,384 tokens, and once 8,448. Costs are
those of Qwen2.5-1.5B: a token of a rollout of 8,192 costs 1.23 times that of a short one.

The bound is what no plan can better: a rank's fair share of the cost, or the longest rollout where
that is more ("best" is the efficiency there: where it is below 1, ranks must wait). The gap is how
far ours is above the bound. "plain" is the efficiency of tokens dealt longest first to the rank
with the fewest, then first fit into rows. CPU time is the least of three.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Sequence

import numpy as np
import transformers

from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.learn.balance import attention_cost_ratio, plan_batch, plan_metrics
from grpo_spmd.records import BatchPlan

GROUP_SIZE, LONGEST = 8, 8192
BUDGET = 16384
TIGHT_BUDGET = (
    8448  # no more than the longest rollout: rows of short ones are full before they cost as much
)
_PLAIN_UP_TO = 10_000  # its time grows with rollouts * rows


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    # as vLLM does in a run: else each 100,000 rollouts would pay for walks through all that torch
    # has made
    gc.freeze()
    qwen = transformers.Qwen2Config(num_hidden_layers=28, hidden_size=1536, num_attention_heads=12)
    ratio = attention_cost_ratio(1_543_714_304, qwen)
    rows = [
        _measure(num_rollouts, num_ranks, max_tokens, ratio)
        for max_tokens in (BUDGET, TIGHT_BUDGET)
        for num_rollouts in (100, 1_000, 10_000, 100_000)
        for num_ranks in (2, 4, 8, 16, 32, 64)
        if max_tokens == BUDGET or 1_000 <= num_rollouts <= 10_000
    ]
    report("balance", rows, args.json)
    usual = [row for row in rows if row["max_tokens"] == BUDGET]
    possible = [row for row in usual if row["best"] == 1]
    print(
        f"\nwhere no rollout is above a rank's fair share ({len(possible)} of {len(usual)} at "
        f"{BUDGET:,} tokens): "
        "efficiency >= "
        f"{min(row['efficiency'] for row in possible):.4f}, rank cost spread <= "
        f"{max(row['rank_cost_spread'] for row in possible):.2%}; "
        "in the others at most "
        f"{max(row['gap_to_bound'] for row in usual if row['best'] < 1):.2%} above the bound"
    )
    for few, several in ((1_000, 10_000), (10_000, 100_000)):
        times = [
            sum(row["cpu_s"] for row in usual if row["rollouts"] == number)
            for number in (few, several)
        ]
        print(f"{few:,} -> {several:,} rollouts: {times[1] / times[0]:.1f} times the CPU time")


def _measure(num_rollouts: int, num_ranks: int, max_tokens: int, ratio: float) -> Row:
    num_tokens = trace(num_rollouts)
    costs = [n + ratio * n * n for n in num_tokens]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = plan_batch(
            num_tokens,
            num_ranks=num_ranks,
            mini_batch_sizes=[num_rollouts],
            max_tokens=max_tokens,
            costs=costs,
        )
        seconds.append(time.process_time() - start)
    figures = plan_metrics(plan, num_tokens, costs)
    fraction = sum(costs) / num_ranks
    bound = max(fraction, *costs)
    plain = None
    if num_rollouts <= _PLAIN_UP_TO:
        plain = plan_metrics(plan_by_tokens(num_tokens, num_ranks, max_tokens), num_tokens, costs)[
            "packing_efficiency_frac"
        ]
    return {
        "max_tokens": max_tokens,
        "rollouts": num_rollouts,
        "ranks": num_ranks,
        "efficiency": figures["packing_efficiency_frac"],
        "best": fraction / bound,
        "gap_to_bound": fraction / figures["packing_efficiency_frac"] / bound - 1,
        "rank_cost_spread": figures["rank_cost_spread_frac"],
        "plain": plain,
        "micro_batches": figures["micro_batches"],
        "fewest": -(-sum(num_tokens) // (num_ranks * max_tokens)),
        "ranks_of_a_group": ranks_of_a_group(plan, num_rollouts),
        "cpu_s": min(seconds),
        "us_a_rollout": min(seconds) / num_rollouts * 1e6,
    }


def trace(
    num_rollouts: int, *, median: int = 512, max_length: int = LONGEST, seed: int = 0
) -> list[int]:
    """Tokens of each rollout, in the order of ids: lognormal completions behind prompts of 64 to
    256 tokens, groups
    side by side."""
    rng = np.random.default_rng(seed)
    num_groups = -(-num_rollouts // GROUP_SIZE)
    logs = rng.normal(0, 0.9, (num_groups, 1)) + rng.normal(
        0, (1 - 0.9**2) ** 0.5, (num_groups, GROUP_SIZE)
    )
    completions = np.clip(median * np.exp(logs), 1, max_length).astype(int)
    tokens: list[int] = (
        (rng.integers(64, 256, (num_groups, 1)) + completions).ravel()[:num_rollouts].tolist()
    )
    return tokens


def plan_by_tokens(num_tokens: list[int], num_ranks: int, max_tokens: int) -> BatchPlan:
    """The plain way: tokens dealt longest first to the rank with the fewest, then each into the
    first of its rows that
    has room."""
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    room: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for i in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + num_tokens[i], rank))
        number = next(
            (n for n, free in enumerate(room[rank]) if free >= num_tokens[i]), len(room[rank])
        )
        if number == len(room[rank]):
            ranks[rank].append([])
            room[rank].append(max_tokens)
        ranks[rank][number].append(i)
        room[rank][number] -= num_tokens[i]
    maximum = max(map(len, ranks))
    return plan_of([[rows + [[]] * (maximum - len(rows)) for rows in ranks]])


def plan_of(mini_batches: Sequence[list[list[list[int]]]]) -> BatchPlan:
    """Of rows of rollout ids [mini_batch][rank][micro_batch]."""
    rows = [row for ranks in mini_batches for rank in ranks for row in rank]
    lengths = [
        np.array([[len(row) for row in rank] for rank in ranks], np.int32) for ranks in mini_batches
    ]
    return BatchPlan(np.array([i for row in rows for i in row], np.int32), lengths)


def ranks_of_a_group(plan: BatchPlan, num_rollouts: int) -> float:
    """On how many ranks the rollouts of a group lie, on average."""
    rank_of = {i: rank for rank, rows in enumerate(plan[0]) for row in rows for i in row}
    groups = range(num_rollouts // GROUP_SIZE)
    return sum(
        len({rank_of[GROUP_SIZE * group + sample] for sample in range(GROUP_SIZE)})
        for group in groups
    ) / len(groups)


if __name__ == "__main__":
    main()
