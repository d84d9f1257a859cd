"""grpo_spmd.run from a process like a notebook's: several runs, failures and Ctrl-C in one process,
which goes on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.test_resume import TIMED
from tests.support.models import make_model, write_config
from tests.support.processes import ROOT, Job
from tests.support.ranks import train


def _snippet() -> str:
    """Of configs/README.md, under "From Python"."""
    text = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    result = re.search(r"^## From Python\n.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert result is not None
    return result[1]


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not TIMED.search(name)} for line in lines
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = tmp_path_factory.mktemp("from_python")
    write_config(created, make_model(created / "model", "qwen3", tied=True))
    return created


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What tests/support/workers/from_python.py saw."""
    (folder / "cell.py").write_text(_snippet(), encoding="utf-8")
    worker = [
        sys.executable,
        "-m",
        "tests.support.workers.from_python",
        str(folder),
        str(folder / "cell.py"),
    ]
    job = Job(worker)
    code, output = job.wait(300)
    assert code == 0, output
    assert job.survivors() == []
    outcome: dict[str, Any] = json.loads(
        next(line for line in output.splitlines() if line.startswith('{"before"'))
    )
    return outcome


def test_what_cannot_be_used_is_refused_before_torch(found: dict[str, Any]) -> None:
    column, key, kind = found["refused"]
    assert re.match(r"ConfigError: .*missing_column", column)
    assert re.match(r"ConfigError: optimizer.learning_rate: .*optimizer.lr", key)
    assert kind.startswith("ConfigError: rewards.0 must be a function, a pair")
    assert not found["torch_after_refusals"]


def test_two_runs_of_one_process_are_those_of_the_command(
    found: dict[str, Any], folder: Path
) -> None:
    assert found["snippet"] == {
        "run_dir": "runs/a",
        "num_steps": 2,
        "is_preempted": False,
        "steps": [1, 2],
    }
    assert found["other"]["steps"] == [1, 2]
    assert sorted(path.name for path in (folder / "runs/a/rollouts").iterdir())[0].startswith(
        "step_000001"
    )
    cell = _snippet().partition("result =")[0]
    (folder / "my_reward.py").write_text(cell, encoding="utf-8")
    config = yaml.safe_load((folder / "runs/a/config.yaml").read_text())
    specs = [reward["function"] for reward in config["rewards"]]
    assert specs[0] == "<python>:__main__.short"
    assert len(specs) == 1
    config["rewards"][0]["function"] = f"{folder / 'my_reward.py'}:short"
    (folder / "by_command.yaml").write_text(
        yaml.safe_dump({**config, "run_dir": str(folder / "by_command")})
    )
    train(1, folder / "by_command.yaml")
    assert _metrics(folder / "runs/a") == _metrics(folder / "by_command")


def test_a_failure_is_an_exception_with_the_report_and_the_next_run_is_whole(
    found: dict[str, Any], folder: Path
) -> None:
    assert found["failed"].startswith("RuntimeError: ")
    assert "no second step" in found["failed"]
    assert "step 2" in found["failed"]
    assert "no second step" in (folder / "failed/logs/failure.txt").read_text()
    assert _metrics(folder / "failed")[-1]["step"] == 1


def test_ctrl_c_saves_and_returns_and_the_second_is_the_callers(
    found: dict[str, Any], folder: Path
) -> None:
    stopped = found["interrupted"]
    assert stopped["is_preempted"]
    assert 1 <= stopped["num_steps"] < 500
    assert found["gone_on"]["num_steps"] == stopped["num_steps"] + 1
    assert not found["gone_on"]["is_preempted"]
    assert found["gone_on"]["steps"] == list(range(1, stopped["num_steps"] + 2))
    assert found["twice"].startswith("KeyboardInterrupt")


def test_the_process_is_left_as_it_was(found: dict[str, Any]) -> None:
    assert found["after_failure"] == found["before"]
    assert found["after"] == found["before"]
    assert found["before"]["threads"] == []
    assert found["children"] == 0
    # Lines of a run are shown once, also in the later ones.
    assert (
        found["shown"].count("starting vLLM")
        == found["shown"].count("policy: Qwen3ForCausalLM")
        == 6
    )


def test_what_a_run_held_is_released(found: dict[str, Any]) -> None:
    """The first brings the libraries. What stays of a later one is far below its KV cache (64 MiB)
    and its model."""
    initial, *later = found["rss_mib"]
    assert max(later) - initial < 60, found["rss_mib"]
