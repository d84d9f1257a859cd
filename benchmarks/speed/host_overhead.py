"""Host time a rollout from the engine's completions to the packed micro-batches of all ranks, part
by part, on real ranks.

Completions are those of the `balance` trace with a median of 448 tokens (740 tokens a rollout on
average, 4,352 at most), groups of 8, two rewards. Each figure is the median of several rounds of
the wall time of the slowest rank over the rollouts of the step (of all ranks); "total_cpu" is the
same in CPU time, which a busy machine disturbs less. "budget" is what the project allows for the
total; "dump" (the step's rollouts as jsonl, `logging.rollouts_every_steps`) is not in it.
"""

from __future__ import annotations

from statistics import median

from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report

BUDGET_US = 250
_ROUNDS = 3


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    report(
        "host_overhead",
        [_measure(ranks, rollouts) for ranks in (1, 2) for rollouts in (512, 4096, 16384)],
        args.json,
    )


def _measure(num_ranks: int, num_rollouts: int) -> Row:
    ranks = measure(
        num_ranks, "benchmarks.speed.host_overhead_worker", str(num_rollouts), str(_ROUNDS)
    )
    rounds = [
        {piece: max(rank[number][piece] for rank in ranks) for piece in ranks[0][number]}
        for number in range(_ROUNDS)
    ]
    return {
        "ranks": num_ranks,
        "rollouts": num_rollouts,
        "budget_us": BUDGET_US,
        **{
            f"{piece}_us": median(r[piece] for r in rounds) / num_rollouts * 1e6
            for piece in rounds[0]
        },
    }


if __name__ == "__main__":
    main()
