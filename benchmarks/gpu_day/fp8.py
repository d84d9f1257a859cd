"""The same run with the engine in FP8 and in bfloat16: what sampling gains, and what it costs in
agreement. Skipped where this version has no `rollout.quantization`, and on a CPU, whose kernels
lack it.

    python -m benchmarks.gpu_day.fp8 --folder NEW [--size 0.5b] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_day.day import SKIPPED
from benchmarks.speed.gpu import SIZES, make_model, training_config
from benchmarks.support.report import Row, arguments_parser, read_lines, report
from grpo_spmd.config.schema import RolloutConfig

_STEPS = 4


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    args = parser.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        return SKIPPED
    size, rows = SIZES[args.size], list[Row]()
    make_model(args.folder / "model", size)
    for name in ("bfloat16", "fp8"):
        sections = {"rollout": {"quantization": "fp8"}} if name == "fp8" else {}
        config = training_config(args.folder, name, size, _STEPS, "bfloat16", **sections)
        command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]
        if code := subprocess.run(command).returncode:
            return code
        metrics = read_lines(args.folder / name / "metrics.jsonl")[1:]  # the first warms up
        figures = (
            "time/rollout_s",
            "rollout/tokens_per_s",
            "time/weight_sync_s",
            "weight_sync/mismatch_abs_mean",
        )
        median = {figure: statistics.median(line[figure] for line in metrics) for figure in figures}
        rows.append({"engine": name, "model": args.size, **median})
    report("gpu_day_fp8", rows, args.json)
    return 0


def missing() -> str:
    """Why there is nothing to measure; empty where there is."""
    import torch

    if "quantization" not in {field.name for field in dataclasses.fields(RolloutConfig)}:
        return "there is no rollout.quantization in this version"
    return "" if torch.cuda.is_available() else "vLLM's FP8 kernels need a GPU"


if __name__ == "__main__":
    sys.exit(main())
