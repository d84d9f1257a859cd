"""Memory of building the policy: what a rank holds at its peak beyond its shard, beside a plain
from_pretrained.

A random Qwen3 of 0.3 billion parameters (1.2 GB in float32, several files) is made in a temporary
folder. Each row is the largest of its ranks. Resident memory is the kernel's VmHWM, mapped files
included, against what the process held before.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.speed.init_worker import make
from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report, spread

_MIB = 2**20
_ROUNDS = 3


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters, layer_bytes, largest_bytes = make(Path(folder))
        rows = [
            _row(folder, *case) for case in (("policy", 1), ("policy", 2), ("from_pretrained", 1))
        ]
    layer, largest = layer_bytes / _MIB, largest_bytes / _MIB
    print(
        f"\n{num_parameters:,} parameters; one layer {layer:.0f} MiB, the largest tensor "
        f"{largest:.0f} MiB"
    )
    report("init", rows, args.json)


def _row(folder: str, label: str, num_ranks: int) -> Row:
    rounds = [
        measure(num_ranks, "benchmarks.speed.init_worker", label, folder) for _ in range(_ROUNDS)
    ]
    beyond = [max(rank["peak_beyond_shard_bytes"] for rank in ranks) / _MIB for ranks in rounds]
    return {
        "built by": "build_policy" if label == "policy" else label,
        "ranks": num_ranks,
        "shard_mib": max(rank["shard_bytes"] for rank in rounds[-1]) / _MIB,
        **spread("peak_beyond_shard_mib", beyond),
        "seconds": statistics.median(max(rank["seconds"] for rank in ranks) for ranks in rounds),
    }


if __name__ == "__main__":
    main()
