"""After every sync the engine answers with exactly the policy's weights: the real vLLM against
plain transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_spmd.engine.weight_proof import WeightProofError, _raise_if_replicas_differ
from tests.support.models import FAMILIES, make_model, write_config
from tests.support.ranks import run_worker

# All 16 together take 6 minutes on 2 cores, so that a plain run takes each family once, and tied
# and untied with each
# number of ranks. FULL_MATRIX=1 tests/run.sh -k engine_equals    runs them all.
_ALL = [(family, tied, tp) for family in FAMILIES for tied in (True, False) for tp in (1, 2)]
_SOME = [("qwen2", True, 1), ("qwen3", False, 2), ("llama", True, 2), ("granite", False, 1)]
_REPLICATED = ("llama",)  # on two ranks each holds the whole policy (HSDP)


@pytest.mark.parametrize(("family", "tied", "tp"), _ALL if os.environ.get("FULL_MATRIX") else _SOME)
def test_engine_equals_transformers_after_each_update(
    tmp_path: Path, family: str, tied: bool, tp: int
) -> None:
    model = make_model(tmp_path / "model", family, tied=tied)
    replicas = {
        "path": str(model),
        "dtype": "float32",
        "num_replicas": tp if family in _REPLICATED else 1,
    }
    rollout = {"temperature": 0.7, "tensor_parallel_size": tp, "weight_sync_bucket_mib": 1}
    config = write_config(
        tmp_path, model, rollout=rollout, data={"max_prompt_tokens": 48}, model=replicas
    )
    output = run_worker(tp, "sync", str(config), "8")
    assert output.count("worst") == tp


@pytest.mark.parametrize(("num_ranks", "replicas"), [(1, 1), (3, 1), (4, 2)])
def test_bucketed_gather_equals_full_tensor(tmp_path: Path, num_ranks: int, replicas: int) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=replicas > 1)
    tree = {"path": str(model), "dtype": "float32", "num_replicas": replicas}
    run_worker(
        num_ranks,
        "gather",
        str(write_config(tmp_path, model, model=tree, rollout={"tensor_parallel_size": replicas})),
    )


def test_replicas_that_drifted_apart_stop_the_run() -> None:
    _raise_if_replicas_differ([5, 5, 5, 5], 7)
    with pytest.raises(
        WeightProofError,
        match=r"step 7: the replicas .* those of rank 2, 3 are not those of rank 0",
    ):
        _raise_if_replicas_differ([5, 5, -1, 6], 7)
