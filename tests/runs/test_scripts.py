"""The scripts start, and the demo's says what is wrong in one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.support.environment import environment_python
from tests.support.processes import ROOT, run_command


@pytest.mark.parametrize(
    "script",
    [
        "launch/setup.sh",
        "launch/demo.sh",
        "launch/slurm.sbatch",
        "launch/node.sh",
        "tests/run.sh",
        "benchmarks/run.sh",
        ".ci/run",
    ],
)
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert run_command(["bash", "-n", script]).returncode == 0


def test_the_demo_refuses_a_bad_override_in_one_line() -> None:
    done = run_command(["launch/demo.sh", "rollout.group_sise=4"])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: rollout.group_sise: unknown key; did you mean rollout.group_size?"
    ]


def test_a_demo_that_is_not_there_is_one_line_before_any_set_up() -> None:
    done = run_command(["launch/demo.sh", "nosuch", "seed=1"])
    assert (done.returncode, done.stdout) == (2, "")
    rest = sorted(
        path.stem.removeprefix("demo-") for path in (ROOT / "configs").glob("demo-*.yaml")
    )
    message = (
        "error: there is no demo nosuch; without a name it is countdown, others are: "
        f"{' '.join(rest)}\n"
    )
    assert done.stderr == message


def test_a_benchmarks_environment_has_our_packages_and_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "environment"
    for startup, is_made in (("", True), ("", False), ("import os", True)):
        python = environment_python(folder, [], startup=startup)
        assert ("making" in capsys.readouterr().out) == is_made
    code = "import sys, yaml; print(sys.prefix); print(yaml.__file__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(folder), yaml.__file__]
