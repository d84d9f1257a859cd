"""What `python -m grpo_spmd.report` takes for runs of 100, 1,000 and 10,000 steps of 512 rollouts
(740 tokens each).

The run folders are made by `report_worker`: their dumps are of 50 different steps, read from this
machine's page cache. "seconds" are wall time of the whole command, "cpu_s" the CPU time of all its
processes, "peak_mib" their resident memory together, "mb" the file. "steps_there" are those that
the page has: the command stops reading after 14 s.

    --steps N ...     other numbers of steps
"""

from __future__ import annotations

import tempfile

from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report

_STEPS, _ROLLOUTS = (100, 1_000, 10_000), 512


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=_STEPS, metavar="N", help="steps of the runs"
    )
    args = parser.parse_args()
    report("report", [_measure(steps) for steps in args.steps], args.json)


def _measure(num_steps: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        (figures,) = measure(
            0, "benchmarks.speed.report_worker", folder, str(num_steps), str(_ROLLOUTS)
        )
    return {"steps": num_steps, "rollouts": _ROLLOUTS, **figures}


if __name__ == "__main__":
    main()
