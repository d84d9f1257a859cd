"""Whole runs whose rewards are models: two of them on two ranks, with refills, evaluation, offload
and a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.dumps import dumped
from tests.support.models import make_model, make_reward_model, write_config
from tests.support.played import make_caller
from tests.support.ranks import RanksJob, train
from tests.support.reward_texts import OTHER_TEMPLATE, give_chat_tokenizer
from tests.support.workers.reward_models import plain_scores

Lines = list[dict[str, Any]]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_models")
    make_model(folder / "model", "qwen3", tied=True)
    make_reward_model(folder / "same", "qwen3", pad_token_id=96, seed=3)
    make_reward_model(folder / "other", "llama", vocab_size=272, pad_token_id=None, seed=4)
    give_chat_tokenizer(folder / "other")
    rows = [
        json.dumps({"prompt": f"{a},{b}={a * b}:"}) + "\n" for a in range(1, 9) for b in range(1, 5)
    ]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "held_out.jsonl").write_text("".join(rows[:3]))
    (folder / "digits.py").write_text(
        "def digits(completions, **_):\n    return [float('1' in text) for text in completions]\n"
    )
    return folder


def build_config(folder: Path, name: str, **sections: Any) -> Path:
    (folder / name).mkdir()
    return write_config(
        folder / name,
        folder / "model",
        data={
            "train": str(folder / "train.jsonl"),
            "eval": {"held": str(folder / "held_out.jsonl")},
        },
        rewards=[
            # Prompts of 7 tokens are too long for it, so that some groups have only the function's
            # 0 or 2: refills.
            {"model": str(folder / "same"), "name": "same", "weight": 0.5, "max_tokens": 18},
            {"function": f"{folder}/digits.py:digits", "weight": 2.0},
            {"model": str(folder / "other"), "weight": 0.0},
        ],
        **{
            "rollout": {
                "num_prompts_per_step": 4,
                "group_size": 4,
                "max_completion_tokens": 12,
                "dynamic_sampling": True,
            },
            "eval": {"every_steps": 2, "num_samples": 2},
            "checkpoint": {"every_steps": 2, "keep": 10},
            "training": {"num_steps": NUM_STEPS, "max_tokens_per_micro_batch": 64},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    config = build_config(
        folder, "whole", model={"path": str(folder / "model"), "dtype": "float32", "offload": True}
    )
    output = train(2, config)
    assert output.count("its scores are within") == 2  # of each model once
    return folder / "whole" / "run"


def test_every_score_of_the_dumps_is_that_of_transformers(run_dir: Path, folder: Path) -> None:
    policy = transformers.AutoTokenizer.from_pretrained(folder / "model")
    pretrained = transformers.AutoTokenizer.from_pretrained(folder / "other")
    records = [record for step in range(1, NUM_STEPS + 1) for record in dumped(run_dir, step)]
    ids = [record["prompt_ids"] + record["completion_ids"] for record in records]
    same_values = iter(
        plain_scores(folder / "same", [local for local in ids if len(local) <= 18], 0)
    )
    texts = [
        record["prompt"] + policy.decode(record["completion_ids"], skip_special_tokens=True)
        for record in records
    ]
    other_values = plain_scores(folder / "other", [pretrained(text).input_ids for text in texts], 0)
    kinds = set()
    for record, local, second_values in zip(records, ids, other_values, strict=True):
        assert list(record["rewards"]) == ["same", "digits", "other"]
        assert record["rewards"]["other"] == pytest.approx(second_values, abs=1e-5)
        kinds.add(record["statuses"]["same"])
        inputs = record["rewards"]["same"]
        assert inputs == (pytest.approx(next(same_values), abs=1e-5) if len(local) <= 18 else None)
        total = 0.5 * (inputs or 0.0) + 2.0 * record["rewards"]["digits"]
        assert record["reward"] == pytest.approx(total, abs=1e-6)
    assert kinds == {"ok", "not_applicable"}


def test_metrics_and_evaluation_have_the_models_scores(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == NUM_STEPS
    for line in steps:
        assert math.isfinite(line["reward/same/mean"])
        assert math.isfinite(line["reward/other/mean"])
        assert line["reward/other/error_frac"] == 0
    assert any(0 < line["reward/same/not_applicable_frac"] < 1 for line in steps)
    assert any(line["dynamic_sampling/rounds"] > 1 for line in steps)
    retained = [line["eval/held/mean"] for line in lines if "eval/held/mean" in line]
    assert len(retained) == 3
    assert all(map(math.isfinite, retained))


def test_a_resumed_run_has_the_same_scores_to_the_bit(run_dir: Path, folder: Path) -> None:
    config = build_config(
        folder, "resumed", checkpoint={"resume": str(run_dir / "checkpoints" / "step_000002")}
    )
    train(2, config)
    for step in range(3, NUM_STEPS + 1):
        assert _scores(folder / "resumed" / "run", step) == _scores(run_dir, step)


def _scores(run_dir: Path, step: int) -> list[Any]:
    keys = ("position", "sample", "completion_ids", "rewards", "reward", "advantage")
    return sorted([record.get(key) for key in keys] for record in dumped(run_dir, step))


def test_episodes_are_scored_by_what_was_said_in_all_their_turns(tmp_path: Path) -> None:
    """Beside the environment's own reward, on two ranks. Both read the row's prompt, without what
    reset() said."""
    model = make_caller(tmp_path)
    make_reward_model(
        tmp_path / "judge", "qwen3", vocab_size=272, pad_token_id=None, max_position_embeddings=512
    )
    give_chat_tokenizer(tmp_path / "judge")
    (tmp_path / "judge/chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "shown.jinja").write_text(OTHER_TEMPLATE)
    config = write_config(
        tmp_path, model,
        data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 8},
        rollout={"num_prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 16},
        environment={
            "gym": "tests/support/played.py:Quiz", "max_turns": 3, "max_tokens": 96, "num_workers": 2,  # noqa: E501
        },
        rewards=[
            {"model": str(tmp_path / "judge"), "name": "judge", "weight": 0.5, "template": f"{tmp_path}/shown.jinj"  # noqa: E501
                                                                                           "a"}
        ],
        training={"num_steps": 2, "max_tokens_per_micro_batch": 512},
        proofs={"every_steps": 1},
    )  # fmt: skip
    code, output = RanksJob(
        2, "grpo_spmd.train", "--config", str(config), env={"PLAYED": str(tmp_path)}
    ).wait(200)
    assert code == 0, output
    assert "its scores are within" in output
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "judge")
    records = [record for step in (1, 2) for record in dumped(tmp_path / "run", step)]
    assert any(len(record["messages"]) > 2 for record in records)
    displayed = []
    for record in records:
        messages = [*record["prompt"], *record["messages"]]
        displayed.append("start," + "".join(f"{m['role']}={m['content']};" for m in messages))
    scores = plain_scores(tmp_path / "judge", [tokenizer(text).input_ids for text in displayed], 0)
    for record, score in zip(records, scores, strict=True):
        assert record["rewards"]["judge"] == pytest.approx(score, abs=1e-5)
        [local] = [value for name, value in record["rewards"].items() if name != "judge"]
        assert record["reward"] == pytest.approx(0.5 * score + local, abs=1e-6)
    assert len({round(score, 4) for score in scores}) > 4
