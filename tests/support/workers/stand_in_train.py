"""Stands in for grpo_spmd.train where launch/slurm.sbatch is tested: ranks without torch that
count, save, resume, crash and hear signals.

Copied as grpo_spmd/train.py into a checkout of the test's own. Rank 0 keeps the run folder as the
trainer does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import yaml

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--check", action="store_true")
parser.add_argument("overrides", nargs="*")
args = parser.parse_intermixed_args()
config = yaml.safe_load(Path(args.config).read_text())
for override in args.overrides:
    key, _, value = override.partition("=")
    if key not in ("run_dir", "seed", "num_steps", "step_s", "crash_at", "checkpoint.resume"):
        print(f"error: {key}: unknown key", file=sys.stderr)
        sys.exit(2)
    config[key] = yaml.safe_load(value)
if args.check:
    yaml.safe_dump(config, sys.stdout, sort_keys=False)
    sys.exit(0)

told: list[str] = []


def hear(number: int, frame: FrameType | None) -> None:
    told.append(signal.Signals(number).name)


for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, hear)
run_dir = Path(config["run_dir"])
is_rank0 = os.environ["RANK"] == "0"
done = sorted((run_dir / "checkpoints").glob("step_*"))
start = (
    int(done[-1].name.removeprefix("step_"))
    if done and config["checkpoint.resume"] == "auto"
    else 0
)


def save(step: int) -> None:
    (run_dir / f"checkpoints/step_{step:06d}").mkdir(parents=True, exist_ok=True)


if config["crash_at"] == "before":
    sys.exit("crashed")
if is_rank0:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
for step in range(start, config["num_steps"]):
    time.sleep(config["step_s"])
    if step == config["crash_at"]:
        sys.exit("crashed")
    if is_rank0:
        facts = {
            "start": os.environ.get("SLURM_RESTART_COUNT", "0"),
            "end": os.environ.get("SLURM_JOB_END_TIME"),
        }
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step + 1, "seed": config["seed"], **facts}) + "\n")
        if (step + 1) % 5 == 0:
            save(step + 1)
    if told:
        if is_rank0:
            save(step + 1)
            (run_dir / "preempted.json").write_text(
                json.dumps({"step": step + 1, "reason": told[0]})
            )
        break
