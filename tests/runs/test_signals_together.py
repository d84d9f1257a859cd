"""Two teachers, a critic and a reward model in one run: the same whether two ranks share an engine
or not; with tail
batching, which hands groups on to later steps, all of them still see the right rollouts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.ranks.test_partition import relative_difference
from tests.support.dumps import dumped
from tests.support.models import make_model, make_reward_model, write_config
from tests.support.ranks import train
from tests.support.workers.reward_models import plain_scores

NUM_STEPS = {"alone": 2, "shared": 2, "tail": 3}  # by run
NUM_PROMPTS, NUM_ROWS = 4, 10
OF_SIGNALS = ("teacher/", "critic/", "reward/", "loss/", "optim/grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "teacher", "qwen3", tied=False, seed=1)
    make_model(folder / "critic", "qwen3", tied=False, seed=2)
    make_reward_model(folder / "scores", "qwen3", pad_token_id=96, seed=3)
    rows = [
        {"prompt": f"{n}+1=", "hint": f"{n},{n + 1}:{n}+1=", "teacher": "ab"[n % 2]}
        for n in range(NUM_ROWS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    """The teacher b is where the policy started. Each step's running checks look at all of them."""
    config = write_config(
        folder, folder / "model",
        data={"max_prompt_tokens": 12},
        rollout={"num_prompts_per_step": NUM_PROMPTS, "group_size": 3, "max_completion_tokens": 16},
        rewards=[{"model": str(folder / "scores"), "name": "scores"}],
        teacher={
            "path": {"a": str(folder / "teacher"), "b": str(folder / "model")}, "prompt_key": "hint", "loss": "full",  # noqa: E501
            "coef": 0.3,
        },
        advantage={"estimator": "gae", "normalize_std": "batch"},
        critic={"path": str(folder / "critic"), "lr": 1e-3},
        optimizer={"lr": 1e-3},
        training={"num_mini_batches": 2, "max_tokens_per_micro_batch": 64},
        checkpoint={"every_steps": 1, "keep": 9},
        proofs={"every_steps": 1},
    )  # fmt: skip
    method = {
        "alone": [],
        "shared": ["rollout.tensor_parallel_size=2"],
        "tail": ["rollout.tail_batching=1.5"],
    }
    for name, overrides in method.items():
        train(
            2,
            config,
            f"run_dir={folder / name}",
            f"training.num_steps={NUM_STEPS[name]}",
            *overrides,
        )
    return {name: folder / name for name in method}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_an_engine_over_two_ranks_changes_nothing_of_what_teaches(runs: dict[str, Path]) -> None:
    alone, shared = runs["alone"], runs["shared"]
    for step in (1, 2):
        pairs = list(zip(dumped(alone, step), dumped(shared, step), strict=True))
        assert len(pairs) == NUM_PROMPTS * 3
        for single, second in pairs:
            assert [single[key] for key in ("position", "sample")] == [
                second[key] for key in ("position", "sample")
            ]
            assert single["completion_ids"] == second["completion_ids"]
            assert second["rewards"]["scores"] == pytest.approx(
                single["rewards"]["scores"], abs=1e-5
            )
            assert second["advantage"] == pytest.approx(single["advantage"], abs=1e-4)
    for single, second in zip(lines_of(alone), lines_of(shared), strict=True):
        names = [name for name in single if name.startswith(OF_SIGNALS)]
        assert {
            "teacher/a/kl",
            "teacher/b/kl",
            "critic/loss",
            "reward/scores/mean",
            "loss/teacher",
        } < {*names}
        for name in names:
            assert second[name] == pytest.approx(single[name], rel=1e-4, abs=1e-5), name
    states = [sorted((run / "checkpoints/step_000002/state").iterdir()) for run in (alone, shared)]
    assert len(states[0]) == 2  # of each rank
    for files in zip(*states, strict=True):
        retained, second = map(load_file, files)
        assert retained.keys() == second.keys()
        assert any(name.startswith("critic.") for name in retained)
        for name, tensor in retained.items():  # moments are as far apart as gradients of rounding
            if "exp_avg" not in name:
                assert relative_difference(second[name], tensor) < 1e-4, name


def test_with_tail_batching_scores_are_those_of_transformers(
    runs: dict[str, Path], folder: Path
) -> None:
    steps = [dumped(runs["tail"], step) for step in range(1, NUM_STEPS["tail"] + 1)]
    positions = [{record["position"] for record in records} for records in steps]
    assert any(max(early) > min(late) for early, late in pairwise(positions))  # some waited
    records = [record for step in steps for record in step]
    scores = plain_scores(
        folder / "scores", [r["prompt_ids"] + r["completion_ids"] for r in records], 0
    )
    assert [r["rewards"]["scores"] for r in records] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("name", ["shared", "tail"])
def test_a_replay_has_the_recorded_figures(
    runs: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # replay sets it, and pytest puts it back
    result = replay(read_step(runs[name], NUM_STEPS[name]))
    recorded = {
        n: pair
        for n, pair in result.metrics.items()
        if pair[0] is not None and n.startswith(OF_SIGNALS)
    }
    assert {
        "teacher/a/kl",
        "teacher/b/kl",
        "critic/loss",
        "critic/explained_variance",
        "loss/total",
    } < recorded.keys()
    for metric, (was, current) in recorded.items():
        assert current == pytest.approx(was, rel=1e-4, abs=1e-5), metric
