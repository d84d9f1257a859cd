"""Worker: a training whose slow rewards are called while the engine samples, or never before it has
ended.

python -m tests.support.workers.scored_early early|late|KILL|TERM CONFIG [OVERRIDE...]

A rank prints "rank N began early" for each group whose calls it begins while its engine samples.
With SIGKILL or SIGTERM the last rank sends itself that signal after the second one of the launch's
second step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from grpo_spmd import train
from grpo_spmd.records import RolloutGroup
from grpo_spmd.rewards.pool import pool
from grpo_spmd.rewards.pool.pool import RewardPool

_start = RewardPool.start_early
_steps: dict[int, int] = {}  # groups begun early, by step


def _counted(pool: RewardPool, group: RolloutGroup, tokenizer: Any) -> None:
    print(f"rank {os.environ['RANK']} began early", flush=True)
    _start(pool, group, tokenizer)
    pool.poll()
    step = pool._state.global_step
    _steps[step] = _steps.get(step, 0) + 1
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if (
        (name := sys.argv[0]) in signal.Signals.__members__
        and is_last
        and len(_steps) == 2
        and _steps[step] == 2
    ):
        os.kill(os.getpid(), signal.Signals[name])


def main() -> None:
    when, config, *overrides = sys.argv[1:]
    if when == "late":
        pool._SLOW_S = float("inf")
    RewardPool.start_early = _counted  # type: ignore[method-assign, assignment]
    sys.argv[:] = [when, "--config", config, *overrides]
    train.main()


if __name__ == "__main__":
    main()
