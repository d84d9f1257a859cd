"""What a step's rollout dump costs: each rank into its node's file ("now"), beside all through rank
0 ("before").

Rollouts are those of `host_overhead` (740 tokens on average), or all of 8,192. Token ids are random
numbers below 150,000: those of text are smaller, and cost fewer digits. Times are wall time of the
slowest rank over the rollouts of the step (of all ranks), the median of rounds in which both forms
take turns, with the lowest and the highest ratio of a round; files are new in no round, and on this
machine's disk cache. "bytes" are those of a rollout's line, "frac" now over before. "rank0_peak" is
what rank 0 needs beyond what it had, over the rollouts of the step; it is measured at the first
dump of each form. Before, it grows with the rollouts of all ranks; now with rank 0's own.
"""

from __future__ import annotations

from statistics import median

from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report

_ROUNDS = 5
_SHAPES = ((1024, 0), (4096, 0), (256, 8192))  # rollouts, tokens each


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    report(
        "rollout_dump",
        [_measure(ranks, *shape) for ranks in (1, 2, 4) for shape in _SHAPES],
        args.json,
    )


def _measure(num_ranks: int, num_rollouts: int, tokens: int) -> Row:
    ranks = measure(
        num_ranks,
        "benchmarks.speed.rollout_dump_worker",
        str(num_rollouts),
        str(tokens),
        str(_ROUNDS),
    )
    initial = next(rank for rank in ranks if rank["rank"] == 0)
    times = initial["times"]  # equal on all ranks: of the slowest
    ratios = [old / current for old, current in zip(times["before"], times["now"], strict=True)]
    return {
        "ranks": num_ranks,
        "rollouts": num_rollouts,
        "tokens": tokens or 740,
        **{f"{form}_us": median(times[form]) / num_rollouts * 1e6 for form in times},
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        **{f"{form}_bytes": initial["sizes"][form] / num_rollouts for form in times},
        "bytes_frac": initial["sizes"]["now"] / initial["sizes"]["before"],
        **{
            f"{form}_rank0_peak_kib": initial["peaks"][form] / num_rollouts / 1024 for form in times
        },
    }


if __name__ == "__main__":
    main()
