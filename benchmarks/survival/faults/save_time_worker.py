"""How long a save keeps training waiting (under torchrun for more ranks).

    python -m benchmarks.survival.faults.save_time_worker CONFIG RUN_DIR REPEATS

A policy with both moments of Adam, 12 bytes a parameter in all. Asynchronous: the copy, as in a
run, with the save before long through.
Synchronous: the copy, the write and its completion. Rank 0 tells the seconds of each, the slowest
rank's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from benchmarks.support.ranks import tell
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import build_policy
from tests.support.checkpoints import checkpoints_of


def main() -> None:
    config_file, run_dir, repeats = sys.argv[1:]
    config = load_config(config_file, [f"run_dir={run_dir}", "checkpoint.keep=1"])
    session = start_session()
    policy = build_policy(config.model, 1.0, session)
    updater = PolicyUpdater(
        policy, config.optimizer, config.loss, config.training, config.rollout.max_completion_tokens
    )
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    updater.optimizer.step()
    updater.optimizer.zero_grad(set_to_none=True)
    Path(run_dir).mkdir(exist_ok=True)
    checkpoints = checkpoints_of(config, session, policy, updater)
    copies, saves = [], []
    for step in range(1, int(repeats) + 2):
        barrier()
        start = time.perf_counter()
        checkpoints.stage(step, 0, {"mismatch_scale": None})
        checkpoints.write_staged()
        copies.append(on_rank0(max, time.perf_counter() - start))
        checkpoints.wait()
        saves.append(on_rank0(max, time.perf_counter() - start))
    if session.is_rank0:
        num_bytes = sum(
            path.stat().st_size for path in Path(run_dir, "checkpoints").glob("*/state/*")
        )
        # The first copy gets its memory from the system, once a run.
        tell(
            {"bytes": num_bytes, "first_s": copies[0], "copies_s": copies[1:], "saves_s": saves[1:]}
        )
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
