"""vLLM's asynchronous scheduler with its queue of two batches, which every GPU runs and no CPU does
by itself: our request loop over it, with preemptions, conversations, aborts, races and a sleep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import write_config
from tests.support.ranks import RanksJob


@pytest.mark.parametrize("scheduler_mode", ["v1", "v2"])
def test_no_token_is_lost_doubled_or_shifted(folder: Path, scheduler_mode: str) -> None:
    """The asserts are in the worker. 40 blocks of 32 tokens have room for 20 of 64 requests."""
    rollout = {
        "max_completion_tokens": 64,
        "engine": {
            "async_scheduling": True,
            "max_num_seqs": 64,
            "num_gpu_blocks_override": 40,
        },
    }
    config = write_config(
        folder,
        folder / "model",
        rollout=rollout,
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 150},
        training={"max_tokens_per_micro_batch": 512},
    )
    worker = "tests.support.workers.async_scheduler"
    code, output = RanksJob(1, worker, str(config), scheduler_mode).wait(200)
    assert code == 0, output
