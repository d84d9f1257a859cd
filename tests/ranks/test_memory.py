"""What waits in host memory comes back to the bit; a rank that runs out of memory says where it
was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, run_worker, train
from tests.support.recorded import plain_config

FIELDS = ("peak", "allocated", "reserved", "driver_used", "other")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def test_a_rank_that_runs_out_of_memory_in_a_run_says_so_after_it_was_alarmed(
    tmp_path: Path, model: Path
) -> None:
    """Rank 1 of 2 keeps 100 MiB a step (alarmed from 64 MiB), and asks for 4 PiB in its third
    update."""
    path = write_config(
        tmp_path, model, training={"num_steps": 4, "max_tokens_per_micro_batch": 64}
    )
    code, output = RanksJob(2, "tests.support.workers.out_of_memory", "--config", str(path)).wait(
        120
    )
    assert code == 1
    assert re.search(
        r"^rank 1 \(.*\) failed first, in phase update, step 3: RuntimeError: ", output, re.M
    ), output
    assert "rank 1 ran out of memory in phase update; the host has" in output
    assert "update, when it failed" in output
    assert (
        "what may help, the likeliest first: lower training.max_tokens_per_micro_batch (64);"
        in output
    )
    alarms = [line for line in output.splitlines() if "memory grows:" in line]
    assert [line.partition(":")[0] for line in alarms] == ["rank 1", "rank 1"], (
        output
    )  # at the second step's sleep and the third's
    metrics = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert len(metrics) == 2
    for line in metrics:
        assert {
            f"memory/{phase}/{field}_gib"
            for phase in ("weight_sync", "rollout", "update")
            for field in FIELDS
        } <= line.keys()
        assert line["memory/host/offloaded_gib"] == 0
    assert metrics[1]["memory/sleep/left_gib"] - metrics[0]["memory/sleep/left_gib"] > 0.09


# Offload


@pytest.mark.parametrize(
    ("num_ranks", "optimizer"), [(1, "adamw"), (2, "adamw"), (2, "adamw_8bit")]
)
def test_three_steps_with_offload_equal_those_without_to_the_bit(
    tmp_path: Path, model: Path, num_ranks: int, optimizer: str
) -> None:
    sections: dict[str, Any] = {
        "data": {"max_prompt_tokens": 9},
        "rollout": {"num_prompts_per_step": 6, "group_size": 4, "max_completion_tokens": 28},
        "training": {"num_mini_batches": 2, "max_tokens_per_micro_batch": 100},
        "loss": {"kl_coef": 0.1},
        "optimizer": {"lr": 1e-3, "name": optimizer},
    }
    output = run_worker(num_ranks, "offload", str(write_config(tmp_path, model, **sections)))
    assert output.count(": equal") == num_ranks


def test_a_run_with_offload_ends_with_the_weights_of_one_without(
    tmp_path: Path, plain_run: Path
) -> None:
    """A real engine, evaluation while it is awake: weights at the end, losses and evaluations equal
    to the bit."""
    train(1, plain_config(tmp_path, plain_run / "model"), "model.offload=true", timeout_s=180)
    result = {}
    for label, folder in ((False, plain_run), (True, tmp_path)):
        weights = load_file(next((folder / "run/checkpoints/step_000003").glob("*.safetensors")))
        lines = [
            json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        ]
        result[label] = weights, lines
    assert all(
        torch.equal(tensor, result[True][0][name]) for name, tensor in result[False][0].items()
    )
    keys = ("reward/mean", "loss/total", "loss/kl", "optim/grad_norm", "eval/held/mean")
    assert [[line.get(key) for key in keys] for line in result[True][1]] == [
        [line.get(key) for key in keys] for line in result[False][1]
    ]
    numel = sum(tensor.numel() for tensor in result[True][0].values())
    steps = [line for line in result[True][1] if "loss/total" in line]
    away = [line["memory/host/offloaded_gib"] * 2**30 for line in steps]
    assert away == [
        numel * 8,
        numel * 16,
        numel * 16,
    ]  # 4 bytes each for policy and reference, 8 for the moments after the first update
