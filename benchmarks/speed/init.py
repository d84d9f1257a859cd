"""Memory of building the policy: what a rank holds at its peak beyond its shard, beside a plain from_pretrained.

A random Qwen3 of 0.3 billion parameters (1.2 GB in float32, several files) is made in a temporary folder. Each row is the largest of
its ranks. Resident memory is the kernel's VmHWM, mapped files included, against what the process held before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.support.report import Row, main_arguments, report

_MIB = 2**20
_ROUNDS = 3


def main() -> None:
    args = main_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "benchmarks.speed.init_worker", "make", folder], check=True)
        sizes = json.loads(Path(folder, "sizes.json").read_text())
        rows = [row for num_ranks in (1, 2) for row in _measure(folder, "policy", num_ranks)]
        rows += _measure(folder, "from_pretrained", 1)
    layer, largest = sizes["layer_bytes"] / _MIB, sizes["largest_tensor_bytes"] / _MIB
    print(f"\n{sizes['num_parameters']:,} parameters; one layer {layer:.0f} MiB, the largest tensor {largest:.0f} MiB")
    report("init", rows, args.json)


def _measure(folder: str, what: str, num_ranks: int) -> list[Row]:
    beyond, seconds, shard = [], [], 0.0
    for _ in range(_ROUNDS):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        done = subprocess.run([*command, "-m", "benchmarks.speed.init_worker", what, folder], check=True, capture_output=True, text=True)
        ranks = [json.loads(line.partition("init_worker: ")[2]) for line in done.stdout.splitlines() if "init_worker: " in line]
        assert len(ranks) == num_ranks, done.stdout + done.stderr
        beyond.append(max(rank["peak_beyond_shard_bytes"] for rank in ranks) / _MIB)
        seconds.append(max(rank["seconds"] for rank in ranks))
        shard = max(rank["shard_bytes"] for rank in ranks) / _MIB
    beyond.sort()
    seconds.sort()
    return [
        {
            "built by": "build_policy" if what == "policy" else what,
            "ranks": num_ranks,
            "shard_mib": shard,
            "peak_beyond_shard_mib": beyond[_ROUNDS // 2],
            "min": beyond[0],
            "max": beyond[-1],
            "seconds": seconds[_ROUNDS // 2],
        }
    ]


if __name__ == "__main__":
    main()
