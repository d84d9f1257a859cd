"""Whole runs with a critic, of its own and on the policy's layers: warm-up, offload, checks of it
while it trains, and
going on to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, train

_OF_THE_MACHINE = ("time/", "memory/", "throughput/", "rollout/t", "weight_sync/proof_s", "proofs/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "critic", "qwen3", tied=False, seed=1)
    return folder


@pytest.fixture(scope="module", params=["own", "policy"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def config(folder: Path, kind: str) -> Path:
    local = folder / kind
    local.mkdir()
    return write_config(
        local, folder / "model",
        model={"path": str(folder / "model"), "dtype": "float32", "offload": True},
        advantage={"estimator": "gae", "normalize_std": "batch"},
        critic={"path": str(folder / "critic") if kind == "own" else kind, "lr": 1e-3, "warmup_steps": 1},  # noqa: E501
        loss={"kl_coef": 0.01, "kl_in": "reward", "kl_estimator": "k1"},
        optimizer={"lr": 1e-3},
        training={"num_steps": 3, "num_mini_batches": 2},
        checkpoint={"every_steps": 2, "keep": 9},
        proofs={"every_steps": 1},
        run_dir=str(local / "run"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    train(2, config)
    return config.parent / "run"


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_the_first_step_trains_the_critic_alone(run: Path, kind: str) -> None:
    initial, *later = lines_of(run)
    assert initial["optim/updates"] == 0
    assert initial["optim/grad_norm"] is None
    assert initial["loss/entropy"] > 0
    assert all(line["optim/updates"] == 2 and line["optim/grad_norm"] > 0 for line in later)
    assert all(
        line["critic/loss"] > 0 and line["critic/grad_norm"] > 0 for line in (initial, *later)
    )
    assert all(("loss/value" in line) == (kind == "policy") for line in later)
    if kind == "policy":  # of a mini-batch, of which there are two of about as many tokens
        assert all(
            line["loss/value"] == pytest.approx(0.1 * line["critic/loss"], rel=0.2)
            for line in later
        )
    assert all(
        line["memory/host/offloaded_gib"] > 0 and line["proofs/update_check_s"] > 0
        for line in (initial, *later)
    )


def test_it_goes_on_to_the_bit(folder: Path, config: Path, run: Path) -> None:
    again = config.parent / "again"
    checkpoint = run / "checkpoints" / "step_000002"
    train(2, config, f"run_dir={again}", f"checkpoint.resume={checkpoint}")
    (resumed,), expected = lines_of(again), lines_of(run)[2]
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        assert name.startswith(_OF_THE_MACHINE) or resumed[name] == value, name
    states = [
        sorted((item / "checkpoints" / "step_000003" / "state").iterdir()) for item in (run, again)
    ]
    names = {
        name for item in states[0] for name in load_file(item)
    }  # a head has one row, which one rank has
    assert {"critic.head.weight", "critic_exp_avg_sq.head.weight"} <= names
    for single, second in zip(*states, strict=True):
        retained, loaded = load_file(single), load_file(second)
        assert retained.keys() == loaded.keys()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in retained.items())
    export_checkpoint(run / "checkpoints" / "step_000003", config.parent / "exported")
    exported = [
        load_file(position / "model.safetensors").keys()
        for position in (config.parent / "exported", folder / "model")
    ]
    assert exported[0] == exported[1]


def test_a_critic_cannot_go_on_the_way(config: Path, run: Path) -> None:
    checkpoint = shutil.copytree(
        run / "checkpoints" / "step_000002", config.parent / "kept" / "step_000002"
    )
    plain = "critic.path=null", "critic.warmup_steps=0", "advantage.estimator=grpo"
    location = f"run_dir={config.parent / 'plain'}", f"checkpoint.resume={checkpoint}"
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config), *plain, *location).wait(
        60
    )
    assert code == 2, output
    assert "critic.path (None) was " in output


@pytest.mark.parametrize("step", [1, 3])
def test_a_replay_has_the_recorded_figures(
    run: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", ""
    )  # as the replay sets it for the rest of the process
    result = replay(read_step(run, step))
    metrics = {name: pair for name, pair in result.metrics.items() if pair[0] is not None}
    assert {
        "critic/loss",
        "critic/explained_variance",
        "loss/entropy",
        "reward/mean",
    } <= metrics.keys()
    for name, (was, current) in metrics.items():
        if not name.startswith("weight_sync/"):
            assert current == pytest.approx(was, rel=1e-4, abs=1e-5), name
