"""A run whose processes are all killed at once (SIGKILL), and the same command again: where it goes
on, what it repeats, whether anything is left behind.

    python -m benchmarks.gpu_day.crash --folder NEW [--size 0.5b|tiny] [--json FILE]

It fails where the second start does not come to the run's end, where more than two intervals were
lost (a save may be under way when the kill comes), or where steps that were made twice differ: on a
CPU at all, on a GPU by more than other draws of the same policy do. Kernels there may add in
another order, and a completion that parts from its twin at one token is another one from there on.
The first such step has its weights from the same checkpoint: "first loss off by" is 0 where this
GPU repeats itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.gpu import SIZES, make_model, training_config
from benchmarks.support.report import Row, arguments_parser, read_lines, report
from benchmarks.support.tree import kill_tree, marked

_STEPS, _EVERY, _KILL_AFTER = (
    6,
    2,
    5,
)  # of the run, between its checkpoints, lines of metrics at the kill
_MARK = "GRPO_SPMD_CRASH_TREE"
_SAME = ("reward/mean", "loss/total", "completion/tokens_mean", "optim/grad_norm")
# On a GPU five standard deviations of the difference of two draws: of a mean of 128 rewards of 0 to
# 6 (0.25), and of a
# mean of 128 advantages about 1 (0.13).
_REWARD_OFF, _LOSS_OFF = 1.2, 0.6


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    args = parser.parse_args()
    size, folder = SIZES[args.size], args.folder
    num_parameters = make_model(folder / "model", size)
    half = {
        "num_prompts_per_step": size.num_prompts // 2,
        "max_completion_tokens": size.max_completion_tokens // 2,
    }
    sections: dict[str, dict[str, Any]] = {
        "rollout": half,
        "checkpoint": {"every_steps": _EVERY, "keep": 2, "resume": "auto"},
    }
    dtype = "float32" if args.size == "tiny" else "bfloat16"
    config = training_config(folder, "run", size, _STEPS, dtype, **sections)
    command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]
    path, mark = folder / "run/metrics.jsonl", uuid.uuid4().hex
    process = subprocess.Popen(command, env={**os.environ, _MARK: mark}, process_group=0)
    while process.poll() is None and _num_lines(path) < _KILL_AFTER:
        time.sleep(0.02)
    if process.returncode is not None:
        print(f"crash: the first start ended by itself, exit code {process.returncode}")
        return 1
    killed = kill_tree(mark, _MARK)
    process.wait()
    old = [
        json.loads(line) for line in path.read_text().splitlines()[:_KILL_AFTER]
    ]  # what follows may be torn
    checkpoints, used = (
        sorted(result.name for result in (folder / "run/checkpoints").glob("*")),
        _gpu_used_mib(),
    )
    start = time.perf_counter()
    code = subprocess.run(command, env={**os.environ, _MARK: mark}).returncode
    seconds, remaining = time.perf_counter() - start, marked(mark, _MARK)
    lines = read_lines(path)
    row: Row = {"model": f"{args.size}, {num_parameters:,} parameters", "processes_killed": killed}
    row |= {"steps_before_the_kill": len(old), "checkpoints_then": " ".join(checkpoints) or "-"}
    row |= {
        "gpu_used_mib_after_the_kill": used,
        "exit_code_of_the_second": code,
        "second_start_s": seconds,
    }
    row |= compared(old, lines) | {"processes_left": len(remaining)}
    import torch  # only now: a context of this process would be in the runs' ledgers

    problems = judged(row, len(lines), exactly=not torch.cuda.is_available())
    report("gpu_day_crash", [row | {"problems": "; ".join(problems) or "-"}], args.json)
    return int(bool(problems))


def compared(initial: Sequence[Row], after: Sequence[Row]) -> Row:
    """Where the second start went on, and how far steps differ that were made twice. A line that
    the second start kept
    is the same in every figure, times too."""
    pairs = list(zip(initial, after, strict=False))
    retained = next((i for i, (old, new) in enumerate(pairs) if old != new), len(pairs))
    twice = pairs[retained:]
    off = {name: [abs(old[name] - new[name]) for old, new in twice] or [0.0] for name in _SAME}
    row: Row = {"went_on_at_step": retained, "steps_made_twice": len(twice)}
    return (
        row
        | {f"{name} off by": max(off[name]) for name in _SAME}
        | {"first loss off by": off["loss/total"][0]}
    )


def judged(row: Row, num_steps: int, *, exactly: bool) -> list[str]:
    problems = []
    if row["exit_code_of_the_second"] or num_steps != _STEPS:
        code = row["exit_code_of_the_second"]
        problems.append(f"the second start ended at step {num_steps} of {_STEPS}, exit code {code}")
    if row["went_on_at_step"] < _KILL_AFTER - 2 * _EVERY:
        problems.append(
            f"it went on at step {row['went_on_at_step']}, more than two intervals of {_EVERY} back"
        )
    reward_off, loss_off = (0.0, 0.0) if exactly else (_REWARD_OFF, _LOSS_OFF)
    if row["reward/mean off by"] > reward_off or row["loss/total off by"] > loss_off:
        problems.append("steps that were made twice differ")
    if row["processes_left"]:
        problems.append(f"{row['processes_left']} processes left")
    return problems


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _gpu_used_mib() -> int | str:
    """By the driver, a second after the kill: this process has no context there. "-" without a
    GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return "-"
    time.sleep(1.0)
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    message = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return int(message[0]) if message and message[0].isdigit() else "-"


if __name__ == "__main__":
    sys.exit(main())
