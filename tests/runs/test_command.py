"""Answers of the command that need no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.support.processes import run_command

MINIMAL: dict[str, Any] = {
    "run_dir": "runs/x",
    "model": {"path": "some/model"},
    "data": {"train": "x.jsonl"},
    "rewards": [{"name": "exact"}],
}


def _run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, "-c", code, *args])


MAIN = """
import sys
from grpo_spmd.train import main
status = 0
try:
    main()
except SystemExit as stop:
    status = stop.code
heavy = sorted({"torch", "vllm", "transformers", "datasets", "sympy"} & set(sys.modules))
print("status", status, "heavy", heavy)
"""


@pytest.mark.parametrize("case", ["help", "config_error", "data_error", "check"])
def test_answers_that_need_no_model_import_neither_torch_nor_vllm(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    (tmp_path / "model" / "model.safetensors").write_bytes(
        safetensors.numpy.save({"x": numpy.zeros(1)})
    )
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    tree = {
        **MINIMAL,
        "run_dir": f"{tmp_path}/run",
        "model": {"path": f"{tmp_path}/model"},
        "data": {"train": f"{tmp_path}/x.jsonl"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    config = ["--config", f"{tmp_path}/config.yaml"]
    args, status = {
        "help": (["--help"], 0),
        "config_error": ([*config, "optimizer.lr=x"], 2),
        "data_error": ([*config, "rollout.num_prompts_per_step=2"], 2),
        "check": ([*config, "rollout.num_prompts_per_step=1", "--check"], 0),
    }[case]
    done = _run(MAIN, *args)
    assert done.stdout.splitlines()[-1] == f"status {status} heavy []", done.stderr


def test_help_lists_the_keys() -> None:
    help_text = _run(MAIN, "--help").stdout
    assert "rollout.group_size" in help_text
    assert "rewards.N.weight" in help_text
