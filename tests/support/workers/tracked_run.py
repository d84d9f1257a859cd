"""A run without a model, for the tests of trackers and of the report's process: it writes lines of
metrics, and is killed.

python -m tests.support.workers.tracked_run RUN TRACKER FIRST_STEP LAST_STEP LAUNCH PAUSE_S
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe.followers import open_followers
from grpo_spmd.observe.metrics_file import LineFile, cut_metrics


def main() -> None:
    run_dir, tracker, (initial, final, launch) = (
        Path(sys.argv[1]),
        sys.argv[2],
        map(int, sys.argv[3:6]),
    )
    run_dir.mkdir(exist_ok=True)
    cut_metrics(run_dir / "metrics.jsonl", initial - 1)
    options = LoggingConfig(trackers=(tracker,), wandb="offline" if tracker == "wandb" else False)
    followers, file = (
        open_followers(run_dir, options, {"seed": 1}),
        LineFile(run_dir / "metrics.jsonl"),
    )
    assert followers is not None
    for step in range(initial, final + 1):
        if step % 5 == 1:
            file.write(json.dumps({"step": step - 1, "eval/set/mean": launch + (step - 1) / 1000}))
            followers.line_written(step - 1, True)
        file.write(json.dumps({"step": step, "reward/mean": launch + step / 1000, "loss/kl": None}))
        followers.line_written(step, False)
        print("step", step, flush=True)
        time.sleep(float(sys.argv[6]))
    followers.finish(True)
    file.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
