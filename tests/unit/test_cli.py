"""The console script: what it starts, what it refuses before it starts anything."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd import cli
from grpo_spmd.distributed import interrupt, startup
from tests.support.processes import ROOT, run_command

CONFIG = """
run_dir: {folder}/run
model: {{path: {folder}/model}}
data: {{train: {folder}/train.jsonl}}
rewards: [{{name: format, args: {{pattern: x}}}}]
"""


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What it changes of its process: it execs another one, or ends, and never comes back."""
    monkeypatch.setattr(interrupt, "listen", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["grpo-spmd"])
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")  # put back as they were
    yield
    startup.end()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """The command that it execs; [] for the run in this process."""
    started: list[list[str]] = []

    def train() -> None:
        if "--check" not in sys.argv:
            started.append([])
        checked.append(
            (
                sys.argv[1:],
                {name: os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
            )
        )

    def execv(_: str, command: list[str]) -> None:
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert "WORLD_SIZE" not in os.environ
        started.append(command)

    checked: list[Any] = []
    monkeypatch.setattr("grpo_spmd.train.main", train)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["grpo-spmd", "train", *words])
    cli.main()
    (command,) = started
    if command:
        at = command.index("grpo_spmd.train")
        rest, sizes = checked[0]
        assert rest == [*command[at + 1 :], "--check"]
        run.sizes = sizes  # type: ignore[attr-defined]
    return command


def test_one_rank_is_this_process_and_several_are_torchruns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(monkeypatch, "--config", "x.yaml", "seed=1") == []
    launch = [sys.executable, "-m", "grpo_spmd.distributed.launch"]
    words = ["--config", "x.yaml", "seed=1"]
    assert run(monkeypatch, "--nproc", "4", *words) == [
        *launch, "--standalone", "--nproc-per-node=4", "-m", "grpo_spmd.train", *words,
    ]  # fmt: skip
    assert run.sizes == {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}  # type: ignore[attr-defined]


def test_torchruns_options_for_several_nodes_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--nproc=2",
        "--config=x.yaml",
        "--nnodes",
        "3",
        "--rdzv-endpoint=a:1",
        "--max_restarts",
        "2",
        "seed=1",
    ]
    command = run(monkeypatch, *words)
    passed = [
        "--nnodes=3",
        "--rdzv-endpoint=a:1",
        "--max-restarts=2",
        "--rdzv-backend=c10d",
        "--nproc-per-node=2",
    ]
    assert command[3:] == [*passed, "-m", "grpo_spmd.train", "--config=x.yaml", "seed=1"]
    assert run.sizes == {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}  # type: ignore[attr-defined]
    # One rank a node is no debug mode.
    assert run(monkeypatch, "--config=x.yaml", "--nnodes=2", "--node-rank=1", "--master-addr=a")[3:6] == [  # noqa: E501
        "--nnodes=2", "--node-rank=1", "--master-addr=a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "grpo-spmd trian: unknown command; did you mean train? --help lists them"),
        (["train", "--nproc", "two"], "--nproc: 'two' is not a number from 1 on"),
        (["train", "--nproc"], "argument --nproc: expected one argument"),
        (
            ["train", "--nproc=2", "--nnodes=0", "--config=x"],
            "--nnodes: '0' is not a number from 1 on",
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo-spmd", *words])
    with pytest.raises(SystemExit) as remaining:
        cli.main()
    assert remaining.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_bad_config_is_one_line_and_torchrun_is_never_started(tmp_path: Path) -> None:
    """In a process of its own, as a user has it: torch is not even imported."""
    (tmp_path / "x.yaml").write_text(CONFIG.format(folder=tmp_path))
    words = ["train", "--nproc", "2", "--config", str(tmp_path / "x.yaml"), "rollout.group_sise=4"]
    done = run_command([sys.executable, "-X", "importtime", "-m", "grpo_spmd.cli", *words])
    lines = done.stderr.splitlines()
    imported = [
        line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")
    ]
    message = [line for line in lines if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (2, "")
    assert message == ["error: rollout.group_sise: unknown key; did you mean rollout.group_size?"]
    assert "yaml" in imported
    assert "torch" not in imported


def test_help_lists_every_command_in_80_columns() -> None:
    done = run_command([sys.executable, "-m", "grpo_spmd.cli", "--help"])
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    listed = dict(
        line.split(maxsplit=1) for line in done.stdout.partition("--help):\n")[2].splitlines()
    )
    programs = {
        path.parent.name if path.stem == "__main__" else path.stem
        for folder in ("*", "tools/*", "demo/*", "tools/*/*")
        for path in (ROOT / "grpo_spmd").glob(f"{folder}.py")
        if '\nif __name__ == "__main__":' in path.read_text()
        and (path.stem == "__main__" or path.parent.name in ("grpo_spmd", "tools"))
    }
    assert listed.keys() == programs - {"cli"}
    assert all(len(text) > 10 for text in listed.values())


def test_another_command_is_its_module_with_the_users_folder(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "grpo_spmd.cli", "export", "nowhere", "out"], cwd=tmp_path
    )
    alone = run_command([sys.executable, "-m", "grpo_spmd.export", "nowhere", "out"], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        alone.returncode,
        alone.stdout,
        alone.stderr,
    )
    assert done.returncode == 2
