"""Whole runs whose judge is their own engine: two ranks, refills, evaluation, a prompt that is too
long for it, a
resume, a preemption while it judges, a replay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.support.digit_judge import (
    HIGH,
    LOW,
    REPLY_TOKENS,
    RUBRIC,
    PlainJudge,
    asked_of,
    make_digit_model,
    score_of,
)
from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.ranks import train

NUM_STEPS = 3
# The rubric alone, a prompt of 6 or 7 letters, and of a completion so many tokens; a byte that is
# no letter is then 3.
LONGEST = len(asked_of("", "")) + 3 + 7 + 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine_judge")
    make_digit_model(folder / "model", seed=1)
    (folder / "rubric.txt").write_text(RUBRIC)
    rows = [
        json.dumps({"prompt": f"{a},{b}={a * b}:"}) + "\n" for a in range(1, 9) for b in range(1, 5)
    ]
    (folder / "train.jsonl").write_text("".join(rows))
    (folder / "held_out.jsonl").write_text("".join(rows[:3]))
    (folder / "seven.py").write_text(
        "def seven(completions, **_):\n    return [float('7' in text) for text in completions]\n"
    )
    return folder


def build_config(folder: Path, name: str, **sections: Any) -> Path:
    (folder / name).mkdir()
    judge = {
        "url": "engine",
        "judge": str(folder / "rubric.txt"),
        "judge_scale": [LOW, HIGH],
        "weight": 0.5,
    }
    return write_config(
        folder / name,
        folder / "model",
        data={
            "train": str(folder / "train.jsonl"),
            "eval": {"held": str(folder / "held_out.jsonl")},
        },
        optimizer={"lr": 6e-3},
        reward_pool={
            "max_error_frac": 1.0
        },  # a model of 0.1 million parameters often says no number
        **{
            "rewards": [
                {**judge, "judge_tokens": REPLY_TOKENS, "max_tokens": LONGEST},
                {"function": f"{folder}/seven.py:seven", "weight": 2.0},
            ],
            "rollout": {
                "num_prompts_per_step": 4,
                "group_size": 4,
                "max_completion_tokens": 12,
                "dynamic_sampling": True,
            },
            "eval": {"every_steps": 2, "num_samples": 2},
            "checkpoint": {"every_steps": 1, "keep": 10, "export_every_steps": 1},
            "training": {"num_steps": NUM_STEPS, "max_tokens_per_micro_batch": 64},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    train(2, build_config(folder, "whole"))
    return folder / "whole" / "run"


def judge_of_step(run_dir: Path, folder: Path, step: int) -> PlainJudge:
    """With the weights that sampled in a step: those that the step before left."""
    exported = [*run_dir.glob(f"checkpoints/step_{step - 1:06d}/**/model*.safetensors")]
    assert len(exported) == int(step > 1), exported
    return PlainJudge(exported[0].parent if exported else folder / "model", folder / "model")


def test_every_score_of_the_dumps_is_what_transformers_says_with_the_steps_weights(
    run_dir: Path, folder: Path
) -> None:
    kinds, start, num_others = set(), PlainJudge(folder / "model"), 0
    for step in range(1, NUM_STEPS + 1):
        judge = judge_of_step(run_dir, folder, step)
        for record in dumped(run_dir, step):
            assert list(record["rewards"]) == ["judge", "seven"]
            requests = asked_of(record["prompt"], record["completion"])
            status, inputs = record["statuses"]["judge"], record["rewards"]["judge"]
            kinds.add(status)
            if len(judge.ids_of(requests)) > LONGEST:
                assert (status, inputs) == ("not_applicable", None)
                assert "judge" not in record.get("extra", {})
            else:
                reply, reason = judge.reply_to(requests)
                assert record["extra"]["judge"] == {"reply": reply}
                score = score_of(reply, reason)
                assert (status, inputs) == (
                    ("ok", pytest.approx(score)) if score is not None else ("error", None)
                )
                num_others += reply != start.reply_to(requests)[0]
            if status == "error":
                assert record["reward"] is None  # left out, and not 0
            else:
                total = 0.5 * (inputs or 0.0) + 2.0 * record["rewards"]["seven"]
                assert record["reward"] == pytest.approx(total)
    assert kinds == {"ok", "error", "not_applicable"}
    assert num_others > 5  # replies by the weights of another step would be seen


def test_metrics_count_what_became_of_replies(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == NUM_STEPS
    assert all(1 <= line["reward/judge/reply_tokens"] <= REPLY_TOKENS for line in steps)
    for kind in ("not_applicable", "error"):
        assert any(0 < line[f"reward/judge/{kind}_frac"] < 1 for line in steps)
    first_values = [record["rewards"]["judge"] for record in dumped(run_dir, 1)]
    expected_names = [value for value in first_values if value is not None]
    assert steps[0]["reward/judge/mean"] == pytest.approx(sum(expected_names) / len(expected_names))
    assert any(line["dynamic_sampling/rounds"] > 1 for line in steps)
    retained = [line for line in lines if "eval/held/mean" in line]
    assert len(retained) == 3
    assert all(math.isfinite(line["eval/held/reward/judge/reply_tokens"]) for line in retained)


def test_a_resumed_run_has_the_same_replies_to_the_bit(run_dir: Path, folder: Path) -> None:
    config = build_config(
        folder, "resumed", checkpoint={"resume": str(run_dir / "checkpoints" / "step_000001")}
    )
    train(2, config)
    for step in range(2, NUM_STEPS + 1):
        assert _scores(folder / "resumed" / "run", step) == _scores(run_dir, step)


def _scores(run_dir: Path, step: int) -> list[Any]:
    keys = ("position", "sample", "completion_ids", "rewards", "extra", "reward", "advantage")
    return sorted(
        ([record.get(key) for key in keys] for record in dumped(run_dir, step)),
        key=lambda row: row[:2],
    )


def test_a_replay_takes_the_scores_that_were_recorded(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recorded = read_step(run_dir, 2)
    result = replay(recorded)
    assert any(
        "judges by the run's engine, which is not here, gave judge" in note for note in result.notes
    )
    was, current = result.metrics["loss/total"]
    assert current == pytest.approx(was, rel=1e-5, abs=1e-7)


GAME = """
class Game:
    def reset(self, prompt, **row):
        self.left = 2
        return None

    def step(self, action):
        self.left -= 1
        if "3" in action:
            raise ValueError("no threes")
        return f'on\\n\\nassistant: {len(action)}', 0.0, self.left == 0, False, {}
"""


def test_episodes_are_judged_whole_and_failed_ones_not_at_all(folder: Path) -> None:
    """On two ranks of one engine, of which the first alone has episodes."""
    (folder / "game.py").write_text(GAME)
    config = build_config(
        folder,
        "episodes",
        environment={"gym": f"{folder}/game.py:Game", "max_tokens": 60},
        rewards=[
            {
                "url": "engine",
                "judge": str(folder / "rubric.txt"),
                "judge_scale": [LOW, HIGH],
                "judge_tokens": 3,
            }
        ],
        rollout={
            "num_prompts_per_step": 4,
            "group_size": 2,
            "max_completion_tokens": 8,
            "tensor_parallel_size": 2,
        },
        training={"num_steps": 1, "max_tokens_per_micro_batch": 128},
        eval={"every_steps": 1, "num_samples": 1},
    )
    train(2, config)
    judge, kinds = PlainJudge(folder / "model"), set()
    for record in dumped(folder / "episodes" / "run", 1):
        inputs = record["statuses"]["judge"], record["rewards"]["judge"]
        kinds.add(inputs[0])
        if record["status"] == "env_error":
            assert inputs == ("not_applicable", None)
            continue
        requests = asked_of(record["prompt"], record["messages"])
        reply, reason = judge.reply_to(requests)
        score = score_of(reply, reason)
        assert inputs == (("ok", pytest.approx(score)) if score is not None else ("error", None))
        assert record["extra"]["judge"] == {"reply": reply}
    assert len(kinds) > 1, kinds
