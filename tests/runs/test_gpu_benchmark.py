"""The whole flow of benchmarks/speed/gpu.py, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.ranks import RanksJob, run_ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    assert RanksJob(1, "benchmarks.speed.gpu").wait(60) == (0, "gpu: no GPU: nothing measured\n")


def test_the_whole_flow_runs_on_the_cpu(tmp_path: Path) -> None:
    arguments = [
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--steps",
        "2",
        "--variants",
        "offload",
        "--json",
        str(tmp_path / "rows.jsonl"),
    ]
    run_ranks(1, "benchmarks.speed.gpu", *arguments, timeout_s=120)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    phases = {row["phase"]: row for row in rows if row["benchmark"] == "gpu"}
    for phase in ("weight_sync", "rollout", "logprobs", "update", "step"):
        assert min(phases[phase][name] for name in ("floor_s", "measured_s", "share")) > 0, phases[
            phase
        ]
    assert "offloaded/link" in phases["weight_sync"]["floor"]
    assert phases["weight_sync"]["mismatch_kl"] < 1e-6
    memory = {row["phase"]: row for row in rows if row["benchmark"] == "gpu_memory"}
    assert memory["update"]["peak"] > 0
    assert memory["sleep"]["left"] > 0
    assert all("smoke test" in row["device"] for row in rows)
