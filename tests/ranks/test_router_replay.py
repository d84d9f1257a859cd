"""The engine's routes and their replay: what is recorded, what a run does with it, what is refused,
and which faults are seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, run_worker


def config_of(folder: Path, family: str = "qwen3_moe", **sections: Any) -> Path:
    model = make_model(folder / "model", family, tied=family == "qwen3_moe")
    return write_config(folder, model, **sections)


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        ("qwen3_moe", 2),
        ("granitemoe", 1),
        pytest.param("mixtral", 2, marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", 1, marks=pytest.mark.nightly),
        pytest.param("olmoe", 1, marks=pytest.mark.nightly),
    ],
)
def test_recorded_routes_are_those_of_transformers(
    tmp_path: Path, family: str, num_ranks: int
) -> None:
    """With shared prompts, second turns and preempted requests; two ranks share one engine."""
    rollout = {
        "temperature": 0.7,
        "tensor_parallel_size": num_ranks,
        "max_completion_tokens": 40,
        "engine": {"num_gpu_blocks_override": 16},
    }
    sections = {"data": {"max_prompt_tokens": 96}, "training": {"max_tokens_per_micro_batch": 256}}
    config = config_of(tmp_path, family, rollout=rollout, **sections)
    output = run_worker(num_ranks, "routes", str(config))
    preempted = [int(number) for number in re.findall(r"(\d+) preempted", output)]
    assert len(preempted) == num_ranks
    assert min(preempted) > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("neighbours_route", "engine and policy differ by"),
        ("one_wrong_route", "engine and policy differ by"),
        ("other_rollouts_routes", "trained on with other"),
        ("cut_gradient", "the gradient of .*gate.weight"),
        ("loads_of_one_rank", "router_aux"),
        pytest.param("own_weights", "the logprob of a token", marks=pytest.mark.nightly),
        pytest.param("no_balance_gradient", "the gradient of", marks=pytest.mark.nightly),
        pytest.param("recomputed_otherwise", "the gradient of", marks=pytest.mark.nightly),
    ],
)
def test_planted_faults_stop_the_run(tmp_path: Path, fault: str, message: str) -> None:
    config = config_of(tmp_path, loss={"router_aux_coef": 0.1}, training={"num_steps": 1})
    options = ["model.activation_checkpointing=true"] if fault == "recomputed_otherwise" else []
    job = RanksJob(
        2, "tests.support.workers.planted_routes", fault, "--config", str(config), *options
    )
    code, output = job.wait()
    assert code == 1
    assert re.search(rf"(MismatchError|UpdateCheckError): .*{message}", output), output
