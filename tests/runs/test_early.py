"""What is said early is said by real processes too, before anything heavy is imported."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.early_mistakes import MISTAKES, good_folder
from tests.support.processes import run_command

CODE = """
import sys
from grpo_spmd.train import main
status = 0
try:
    main()
except SystemExit as stop:
    status = stop.code
print("status", status, sorted({"torch", "vllm", "transformers", "datasets", "sympy"} & set(sys.modules)))
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    good_folder()
    return tmp_path


def _check(folder: Path, *overrides: str, **environment: str) -> tuple[str, str]:
    """Last line of stdout, and stderr."""
    arguments = ["--config", "config.yaml", "--check", *overrides]
    done = run_command([sys.executable, "-c", CODE, *arguments], cwd=folder, env=environment)
    return done.stdout.splitlines()[-1], done.stderr


def test_nothing_heavy_is_imported_for_a_model_with_adapters_and_chat(folder: Path) -> None:
    assert _check(folder, "rollout.engine={max_num_seqs: 8}") == ("status 0 []", "")


@pytest.mark.parametrize("name", ["a shard cut off", "a model of the hub, no network"])
def test_a_mistake_is_one_line_of_a_process(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mistake,) = (item for item in MISTAKES if item.name == name)
    mistake.make(monkeypatch)
    hub = {key: value for key, value in os.environ.items() if key.startswith("HF_")}
    final, message = _check(folder, *mistake.overrides, **hub)
    assert final == "status 2 []"
    (line,) = message.splitlines()
    assert all(piece in line for piece in mistake.says)


def test_a_run_itself_says_it_at_its_start(folder: Path) -> None:
    shutil.rmtree("model")
    command = [sys.executable, "-m", "grpo_spmd.train", "--config", "config.yaml"]
    done = run_command(command, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: model.path: there is no folder model (below the working folder, "
    )
    assert not Path("runs").exists()
