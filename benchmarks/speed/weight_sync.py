"""Weight sync against a memcpy of the same bytes: the gather alone for several bucket sizes, and
whole syncs into a real vLLM.

Random Qwen3 models are made in a temporary folder. "gather" draws all full tensors and throws them
away. x_memcpy is the time over that of copying as many bytes between two buffers that are already
mapped, by every rank at once, in the same round; median, least and most of the rounds. "all-gather
alone" moves the same bytes between the ranks, and neither casts nor unpacks: the floor of any sync
over this network. "gather alone" draws pieces, as a direct load does (on one rank they are the
parameters themselves), "and copy" copies them to where they stay, "named" with the name of the
weights, which a rollout buffer needs and whole syncs have unless it says otherwise. These go in
turn through vLLM's loader and directly. peak_mib is resident memory beyond what was there before
(VmHWM); bound_mib is the buckets and the largest tensor.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.speed.weight_sync_worker import make
from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread

_MIB = 2**20
_BUCKETS_MIB = (1, 4, 16, 64, 256)
_GATHERS = [
    (size, ranks, dtype)
    for size in ("0.3M", "20M", "98M")
    for ranks in (1, 2)
    for dtype in ("bfloat16", "float32")
]
_SYNCS = [(size, ranks, "bfloat16") for size in ("20M", "98M") for ranks in (1, 2)]


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        gathers = [row for case in _GATHERS for row in _measure(folder, "gather", *case)]
        report("weight_sync gather", gathers, args.json)
        syncs = [row for case in _SYNCS for row in _measure(folder, "engine", *case)]
        report("weight_sync into vLLM", syncs, args.json)


def _measure(folder: str, label: str, size: str, num_ranks: int, dtype: str) -> list[Row]:
    buckets = ",".join(map(str, _BUCKETS_MIB))
    environment = {"THP_MEM_ALLOC_ENABLE": "1"}  # as train.py sets it
    worker = "benchmarks.speed.weight_sync_worker"
    result = measure(
        num_ranks, worker, label, str(Path(folder, size)), dtype, buckets, env=environment
    )
    return [
        {
            "model": size,
            "ranks": num_ranks,
            "dtype": dtype,
            "what": figures["what"],
            "ms": 1e3 * statistics.median(figures["seconds"]),
            **spread("x_memcpy", ratios(figures["seconds"], result[0]["seconds"])),
            "collectives": figures["collectives"],
            "moved_mib": figures["moved_bytes"] / _MIB,
            "needed_mib": figures["needed_bytes"] / _MIB,
            **(
                {
                    "peak_mib": figures["peak_bytes"] / _MIB,
                    "bound_mib": figures["bound_bytes"] / _MIB,
                }
                if label == "gather"
                else {}
            ),
        }
        for figures in result
    ]


if __name__ == "__main__":
    main()
