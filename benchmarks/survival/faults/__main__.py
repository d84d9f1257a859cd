"""The fault table: what a run was put through, how often, and how often it came out as if nothing
had happened. Real processes and kills.

    benchmarks/run.sh faults [--json FILE] [--only NAME ...] [--num N]        about an hour on 2
    cores
A row a fault: how many were tried, survived and lost, the worst figure, and what went wrong where
something did. Rows are printed and written as they end. A run of two ranks survives a kill if the
newest checkpoint is whole, at most one interval of steps was lost (and what was finished while a
save was under way), and it ends with the same state, metrics and rollouts, to the bit, as the run
that nobody touched. --num: the number of random kills (100) and of draws a kind of damage; kills a
phase and repeats are a tenth of it, whole trees and odd stops a quarter. The exit code is 1 if
anything was lost.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, arguments_parser, report
from benchmarks.survival.faults.damage import corruption, disk
from benchmarks.survival.faults.kills import sigkill_phase, sigkill_random
from benchmarks.survival.faults.lab import Lab, kill_all_launches
from benchmarks.survival.faults.long_runs import soak, world_size
from benchmarks.survival.faults.save_time import save_time
from benchmarks.survival.faults.stops import hang, raises, signals
from benchmarks.survival.faults.trees import odd_stops, whole_trees


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="parts to run")
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the moments of whole_trees and odd_stops (default: 0)",
    )
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    lost = 0
    try:
        with tempfile.TemporaryDirectory(
            prefix="grpo_spmd_faults_", ignore_cleanup_errors=True
        ) as root:
            lab = Lab(Path(root), seed=args.seed)
            for piece in args.only or PARTS:
                for row in PARTS[piece](lab, args.num):
                    report("faults", [row], args.json)
                    lost += row["lost"]
    finally:
        kill_all_launches()
    sys.exit(1 if lost else 0)


def _end(*_: Any) -> None:
    kill_all_launches()  # first: threads wait for them
    sys.exit(1)


PARTS: dict[str, Callable[[Lab, int], Iterator[Row]]] = {
    "sigkill_random": sigkill_random,
    "sigkill_phase": sigkill_phase,
    "whole_trees": whole_trees,
    "odd_stops": odd_stops,
    "corruption": corruption,
    "disk": disk,
    "world_size": world_size,
    "async": save_time,
    "soak": soak,
    "raise": raises,
    "hang": hang,
    "signals": signals,
}


if __name__ == "__main__":
    main()
