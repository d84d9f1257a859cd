"""The command `--explain`: without torch, without a trace, for any number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.load import load_config
from tests.support.models import make_model, write_config
from tests.support.processes import run_command


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, with what it imported as the last line of its output."""
    code = (
        "import sys; from grpo_spmd.train import main; main(); print(sorted({'torch', 'vllm', "
        "'transformers'} "
        "& set(sys.modules)))"
    )
    return run_command([sys.executable, "-c", code, *arguments], cwd=cwd, env=env)


def test_the_command_imports_no_torch_and_plans_a_run_that_is_under_way(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    path = write_config(tmp_path, model, rollout={"engine": {"hf_token": "hunter2"}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    done = run(
        "--config", str(path), "--explain=all", "--ranks", "2", "optimizer.lr=3e-3", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert any(line.split()[:2] == ["engines", "2"] for line in lines)
    table = {
        line.split()[0]: line for line in lines[lines.index("where each value came from") + 1 : -1]
    }
    config = load_config(path, ["optimizer.lr=3e-3"])
    assert list(table) == list(flatten_config(config))
    assert table["optimizer.lr"].split() == ["optimizer.lr", "0.003", "command", "line"]
    number = path.read_text().splitlines().index("  max_prompt_tokens: 16") + 1
    assert table["data.max_prompt_tokens"].split() == [
        "data.max_prompt_tokens",
        "16",
        f"{path}:{number}",
    ]
    assert "<redacted>" in table["rollout.engine.hf_token"]
    assert "hunter2" not in done.stdout
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run/metrics.jsonl"]

    checked = run("--config", str(path), "--check", cwd=tmp_path)
    assert checked.returncode == 2
    assert "nothing is written over" in checked.stderr


def test_the_number_of_ranks_is_that_of_torchrun_unless_it_is_given(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    path = write_config(tmp_path, model)
    done = run("--config", str(path), "--explain", cwd=tmp_path, WORLD_SIZE="4")
    assert "\n  ranks                                               4  " in done.stdout
    done = run(
        "--config",
        str(path),
        "--explain",
        "--ranks",
        "3",
        "rollout.tensor_parallel_size=2",
        cwd=tmp_path,
        WORLD_SIZE="4",
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: rollout.tensor_parallel_size (2) must divide the number of ranks (3): 1, 3 "
        "would\n"
    )
    for arguments in (["--ranks", "0", "--explain"], ["--ranks", "2"]):
        assert run("--config", str(path), *arguments, cwd=tmp_path).returncode == 2
