"""Whole runs with a teacher: resumed to the bit, replayed, alone without any reward; nothing of it
where it is off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.support.dumps import dumped
from tests.support.models import make_model, write_config
from tests.support.processes import run_command
from tests.support.ranks import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "teacher", "qwen3", tied=True, seed=1)
    rows = [
        {
            "prompt": f"{a},{b}={a + b}:",
            "hint": f"{b}+{a}={a + b},{a},{b}=:",
            "teacher": "ab"[a % 2],
        }
        for a in range(1, 9)
        for b in range(1, 5)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {n: v for n, v in line.items() if not n.startswith(("time/", "throughput/", "memory/"))}
        for line in lines
    ]


def same_as_recorded(run: Path, step: int, *names: str) -> None:
    recorded = read_step(run, step)
    result = replay(recorded)
    for name in ("loss/total", "optim/grad_norm", "teacher/kl", *names):
        was, current = result.metrics[name]
        assert was is not None
        assert current == pytest.approx(was, rel=1e-5, abs=1e-7), name
    assert not any("left out" in note for note in result.notes)


def test_a_run_with_two_teachers_goes_on_to_the_bit_and_is_replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks, the teachers in host memory while the engine is awake, with prompts of their
    own, beside a reward;
    one of them is where the policy started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # replay sets it, and pytest puts it back
    teachers = {
        "path": {"a": str(folder / "teacher"), "b": str(folder / "model")},
        "prompt_key": "hint",
        "coef": 0.2,
    }
    sections: dict[str, Any] = {
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 24},
        "training": {"num_steps": 3, "num_mini_batches": 2},
        "model": {"path": str(folder / "model"), "dtype": "float32", "offload": True},
        "checkpoint": {"every_steps": 1, "keep": 9},
        "proofs": {"every_steps": 1},
    }
    train(
        2,
        write_config(folder, folder / "model", teacher=teachers, **sections),
        f"run_dir={folder}/whole",
    )
    resume = f"checkpoint.resume={folder}/whole/checkpoints/step_000002"
    train(2, folder / "config.yaml", f"run_dir={folder}/resumed", resume)
    full, resumed = (metrics_of(folder / name) for name in ("whole", "resumed"))
    functions_values = (
        "reward/",
        "completion/",
        "loss/",
        "optim/",
        "teacher/",
        "weight_sync/mismatch",
    )
    names = {n for n in full[2] if n.startswith(functions_values)}
    assert {"teacher/a/kl", "teacher/b/kl", "reward/format/mean"} < names
    assert {n: resumed[0][n] for n in names} == {n: full[2][n] for n in names}
    saved = json.loads((folder / "whole/checkpoints/step_000002/trainer.json").read_text())
    assert {"the model of teacher.path.a", "the model of teacher.path.b"} < saved["contents"].keys()
    same_as_recorded(folder / "whole", 2, "teacher/a/kl", "teacher/b/kl")


FEEDBACK = """
def feedback(prompts, completions, answer, log_extra, **columns):
    # Odd answers get feedback, all others none.
    texts = [f"{a}{c[:1]}=" if a % 2 else None for a, c in zip(answer, completions)]
    log_extra("tip", texts)
    return [float(len(c)) for c in completions]
"""


@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
def test_a_live_teacher_with_the_rewards_feedback_goes_on_to_the_bit_and_is_replayed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any]
) -> None:
    """On two ranks with two mini-batches, in the weights and moments too; rollouts without feedback
    are scored after the policy's own prompt, where teacher and policy are one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "feedback.py").write_text(FEEDBACK)
    rows = [{"prompt": f"{a},{b}=:", "answer": a + b} for a in range(1, 9) for b in range(1, 5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 24},
        "rewards": [{"function": f"{tmp_path}/feedback.py:feedback", "weight": 0.1}],
        "training": {"num_steps": 3, "num_mini_batches": 2},
        "model": {"path": str(folder / "model"), "dtype": "float32", "offload": True, "lora": lora},
        "checkpoint": {"every_steps": 1, "keep": 9},
        "proofs": {"every_steps": 1},
        "teacher": {"path": "policy", "prompt_template": "{tip}{prompt}", "loss": "full"},
    }
    config = write_config(tmp_path, folder / "model", **sections)
    train(2, config, f"run_dir={tmp_path}/whole")
    resume = f"checkpoint.resume={tmp_path}/whole/checkpoints/step_000002"
    train(2, config, f"run_dir={tmp_path}/resumed", resume)
    full, resumed = (metrics_of(tmp_path / name) for name in ("whole", "resumed"))
    names = {n for n in full[2] if n.startswith(("reward/", "loss/", "optim/", "teacher/"))}
    assert {n: resumed[0][n] for n in names} == {n: full[2][n] for n in names}
    last, again = (
        sorted((tmp_path / name / "checkpoints/step_000003/state").glob("shard_*"))
        for name in ("whole", "resumed")
    )
    assert [p.read_bytes() for p in last] == [p.read_bytes() for p in again]
    saved = json.loads((tmp_path / "whole/checkpoints/step_000003/trainer.json").read_text())
    assert not any(key.startswith("the model of") for key in saved["contents"])
    for step, line in enumerate(full, 1):
        records = dumped(tmp_path / "whole", step)
        has_tip = [record["columns"]["answer"] % 2 == 1 for record in records]
        assert line["teacher/prompted_frac"] == pytest.approx(sum(has_tip) / len(has_tip))
        assert line["teacher/kl"] > 1e-3
    same_as_recorded(tmp_path / "whole", 2)


def test_a_teacher_alone_teaches_without_any_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    data = {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 24}
    teacher = {"path": str(folder / "teacher"), "loss": "topk", "top_k": 40}
    config = write_config(
        folder,
        folder / "model",
        teacher=teacher,
        data=data,
        rewards=[],
        training={"num_steps": 4},
        run_dir=f"{folder}/alone",
    )
    train(1, config)
    lines = metrics_of(folder / "alone")
    assert [line["reward/mean"] for line in lines] == [0.0] * 4
    assert [line["loss/policy"] for line in lines] == [0.0] * 4
    assert lines[-1]["teacher/kl"] < 0.7 * lines[0]["teacher/kl"]
    assert all(line["loss/total"] == pytest.approx(line["loss/teacher"]) for line in lines)
    same_as_recorded(folder / "alone", 1, "loss/teacher")


def test_without_a_teacher_nothing_of_it_is_imported(folder: Path) -> None:
    config = write_config(
        folder, folder / "model", rewards=[{"name": "format", "args": {"pattern": "x"}}]
    )
    code = f"""
import sys
sys.argv[1:] = ["--config", {str(config)!r}, "--check"]
import grpo_spmd.loop, grpo_spmd.tools.replay.__main__, grpo_spmd.train
try:
    grpo_spmd.train.main()
finally:
    print("there:", [name for name in sys.modules for part in ("teacher", "distil", "diverg") if part in name])
"""  # noqa: E501
    done = run_command([sys.executable, "-c", code])
    assert "there: []" in done.stdout, done.stdout + done.stderr
