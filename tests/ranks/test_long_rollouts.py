"""Rollouts of 65,536 tokens, at tiny width, by two ranks that share each row: a run samples, trains
on them, is killed, goes on to the same bits, evaluates, dumps, and is replayed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.faults.test_resume import metrics, run, start, state
from tests.support.dumps import dumped
from tests.support.models import make_model, write_config

NUM_TOKENS = 65_536
COMPLETION_TOKENS = 8
SECTIONS: dict[str, Any] = {
    "rollout": {
        "num_prompts_per_step": 1,
        "group_size": 2,
        "max_completion_tokens": COMPLETION_TOKENS,
    },
    "training": {"num_steps": 2, "max_tokens_per_micro_batch": NUM_TOKENS},
    "checkpoint": {"every_steps": 1, "keep": 2, "resume": "auto"},
    "logging": {"rollouts_every_steps": 1},
    "eval": {"every_steps": 2, "num_samples": 1},
}


def make_run(folder: Path) -> Path:
    """A folder with config, model and data; a token of the demo's tokenizer is a digit."""
    model = make_model(
        folder / "model",
        "qwen3",
        tied=True,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=NUM_TOKENS,
    )
    rng = random.Random(0)
    length = NUM_TOKENS - COMPLETION_TOKENS
    for name, num_rows in (("train", 2), ("held_out", 1)):
        rows = [
            {"prompt": "".join(rng.choice("0123456789") for _ in range(length))}
            for _ in range(num_rows)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}_long.jsonl").write_text(text)
    data = {
        "train": str(folder / "train_long.jsonl"),
        "eval": {"held_out": str(folder / "held_out_long.jsonl")},
        "max_prompt_tokens": length,
        "shuffle": False,
    }
    sizes = {"path": str(model), "dtype": "float32", "sequence_parallel_size": 2}
    # Completions hardly ever get the same reward, so that there is a gradient.
    source = (
        "def spread(completion_ids, **_): return [sum(ids) % 97 / 97 for ids in completion_ids]"
    )
    (folder / "reward.py").write_text(source)
    rewards = [{"function": f"{folder}/reward.py:spread"}]
    write_config(folder, model, data=data, model=sizes, rewards=rewards, **SECTIONS)
    return folder


@pytest.mark.nightly
def test_rollouts_of_64k_tokens_train_are_killed_go_on_and_are_replayed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    job = start(2, folder)
    file = folder / "run/metrics.jsonl"
    deadline = time.monotonic() + 1200
    # A line for the evaluation before training, and one for the first step.
    while not file.exists() or file.read_text().count("\n") < 2:
        assert time.monotonic() < deadline, job.wait(1)
        time.sleep(0.2)
    time.sleep(5)  # in its second step
    for pid in job.running():
        os.kill(pid, signal.SIGKILL)
    job.wait(60)
    assert len(metrics(folder)) == 2
    assert not (folder / "run/checkpoints/step_000002").exists()
    run(2, folder)
    resumed, shards = metrics(folder), state(folder, 2)
    (folder / "run").rename(folder / "killed")
    run(2, folder)
    assert metrics(folder) == resumed
    assert state(folder, 2) == shards
    lines = [line for line in resumed if "optim/grad_norm" in line]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["weight_sync/mismatch_abs_mean"] < 1e-5
        assert line["optim/grad_norm"] > 0
    records = dumped(folder / "run", 2)
    assert len(records) == 2
    for record in records:
        assert len(record["prompt_ids"]) == NUM_TOKENS - COMPLETION_TOKENS
    result = replay(read_step(folder / "run", 2, ()), None)
    for name in ("loss/policy", "optim/grad_norm", "reward/mean"):
        recorded, again = result.metrics[name]
        assert again == pytest.approx(recorded, rel=1e-5), name
