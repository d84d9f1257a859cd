"""The scripts start, and the demo's says what is wrong in one line."""

from __future__ import annotations

import os

import pytest

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
