"""The command refuses bad input with exit code 2 and one line, alone and under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.bad_inputs import CASES, Case, check, contents, good_folder, prepare
from tests.support.processes import run_command, torchrun


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return good_folder(tmp_path, monkeypatch)


IN_A_PROCESS = [
    "yaml: key twice",
    "data: not UTF-8",
    "eval: broken JSON",
    "run_dir: holds a run",
    "reward: syntax error",
    "data: truncated parquet",
]


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_bad_input_ends_the_command_with_2(name: str, folder: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    prepare(case)
    old = contents(folder)
    done = run_command(
        [sys.executable, "-m", "grpo_spmd.train", "--config", "config.yaml", *case.overrides],
        cwd=folder,
    )
    check(case, done.returncode, done.stdout, done.stderr)
    assert contents(folder) == old


def test_one_rank_of_a_node_speaks_for_all(folder: Path) -> None:
    """Two ranks of torchrun, one line; the other rank must not end, and torchrun with it, before
    the line is out."""
    prepare(Case("", ""))
    done = run_command(
        torchrun(2, "-m", "grpo_spmd.train", "--config", "config.yaml", "seed=-1"), cwd=folder
    )
    assert done.returncode == 1  # torchrun's own exit code for ranks that ended with 2
    assert done.stderr.splitlines().count("error: seed must be a whole number >= 0; got -1") == 1


def test_who_reads_a_part_of_the_answer_or_cannot_gets_no_traceback(folder: Path) -> None:
    prepare(Case("", ""))
    train = f"{sys.executable} -m grpo_spmd.train --config config.yaml run_dir=é"
    shell = (
        f"{train} --check | true; PYTHONIOENCODING=ascii {train} --explain; {train} --check "
        "> /dev/full"
    )
    done = run_command(["sh", "-c", shell], cwd=folder)
    assert r"\xe9" in done.stdout
    assert (done.returncode, done.stderr) == (2, "error: stdout: No space left on device\n")
    commands = [
        f"{train} --help",
        f"{train} --explain=all",
        f"{sys.executable} -m grpo_spmd.plan --help",
    ]
    commands += [f"{sys.executable} -m grpo_spmd.{name} --help" for name in ("export", "replay")]
    # Without a buffer argparse's own guard would hide what is left for Python's last flush.
    shell = "; ".join(f"{command} | true" for command in commands)
    done = run_command(["sh", "-c", shell], cwd=folder, env={"PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
