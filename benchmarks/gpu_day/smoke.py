"""A small run by the default way of starting the engine, and by the next fallback where it fails.

    python -m benchmarks.gpu_day.smoke --folder NEW [--size 0.5b|tiny] [--within SECONDS]
    [--json FILE]

Each run has two steps of 64 rollouts: start, sync and its proof, generation, sleep, update, wake.
A run that takes longer than --within is killed and has failed. The later steps of the day go by the
way that passed. It fails where no way passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.speed.gpu import SIZES, make_model, training_config
from benchmarks.support.report import Row, arguments_parser, report
from benchmarks.support.tree import kill_tree
from benchmarks.support.ways import WAYS, way_environment

_MARK = "GRPO_SPMD_SMOKE_TREE"
_NUM_STEPS = 2
_NUM_PROMPTS, _MAX_COMPLETION_TOKENS = 8, 64


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument(
        "--within", type=float, default=120.0, help="seconds that each way may take"
    )
    args = parser.parse_args()
    size = SIZES[args.size]
    make_model(args.folder / "model", size)
    tokens = min(_MAX_COMPLETION_TOKENS, size.max_completion_tokens)
    shape = {"num_prompts_per_step": _NUM_PROMPTS, "max_completion_tokens": tokens}
    for name in WAYS:
        sections = {
            "rollout": shape | WAYS[name].rollout,
            "proofs": {"every_steps": 1},
            "checkpoint": {"every_steps": 0},
        }
        config = training_config(args.folder, name, size, _NUM_STEPS, "bfloat16", **sections)
        command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]
        start = time.perf_counter()
        code = run_within(command, args.within, way_environment(name))
        row: Row = {"way": name, "model": args.size, "passed": code == 0, "exit_code": code}
        report("gpu_day_smoke", [row | {"seconds": time.perf_counter() - start}], args.json)
        if code == 0:
            return 0
    print("smoke: no way of starting the engine passes")
    return 1


def run_within(command: list[str], seconds: float, environment: dict[str, str]) -> int:
    """The exit code; -9 where the command's whole tree was killed after `seconds`."""
    mark = os.urandom(16).hex()
    process = subprocess.Popen(command, env={**os.environ, **environment, _MARK: mark})
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill_tree(mark, _MARK)
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
