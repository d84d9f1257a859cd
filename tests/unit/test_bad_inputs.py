"""Bad configs and data files of all kinds: exit code 2, one line that names the key or file:line,
and nothing
written."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from grpo_spmd.tools import prefetch
from tests.support.bad_inputs import (
    CASES,
    Case,
    check,
    check_exit_code,
    contents,
    good_folder,
    prepare,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return good_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused_in_one_line(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(case)
    # Another test may have started a session in this process, which sets both.
    for name, size in (
        ("WORLD_SIZE", case.world_size),
        ("LOCAL_WORLD_SIZE", case.local_world_size),
    ):
        monkeypatch.delenv(name, raising=False)
        if size is not None:
            monkeypatch.setenv(name, str(size))
    old = contents(folder)
    status = check_exit_code(monkeypatch, *case.overrides)
    captured = capsys.readouterr()
    check(case, status, captured.out, captured.err)
    assert contents(folder) == old


def test_the_unspoiled_folder_is_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Case("", ""))
    old = contents(folder)
    assert check_exit_code(monkeypatch) == 0
    displayed = capsys.readouterr().out.splitlines()
    assert displayed[0].startswith("prompt 1 of ")
    assert displayed[-1].startswith("checked: model, ")
    assert contents(folder) == old


def test_what_a_reward_prints_is_no_part_of_what_was_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Case("", ""))
    Path("mine.py").write_text(
        "print('seen')\ndef score(completions):\n    return [0.0] * len(completions)\n"
    )
    assert check_exit_code(monkeypatch, "rewards=[{function: 'mine.py:score'}]") == 0
    displayed = capsys.readouterr()
    assert (displayed.err, "seen" in displayed.out) == ("seen\n", False)
    assert displayed.out.splitlines()[-1].endswith(", 1 reward")
    assert sys.argv[0] == "train"


def test_a_check_is_about_as_many_ranks_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good_folder(tmp_path, monkeypatch)
    prepare(Case("", ""))
    overrides = ["rollout.tensor_parallel_size=3"]
    assert check_exit_code(monkeypatch, "--ranks", "8", *overrides) == 2
    assert "(3) must divide the number of ranks (8): 1, 2, 4, 8" in capsys.readouterr().err
    assert check_exit_code(monkeypatch, "--ranks", "6", *overrides) == 2
    assert "number of ranks" not in capsys.readouterr().err  # another rule, of the model's heads


def test_a_folder_of_checkpoints_leads_to_the_newest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Case("", ""))
    for step in (2, 4):
        Path(f"old/checkpoints/step_{step:06}").mkdir(parents=True)
        Path(f"old/checkpoints/step_{step:06}/manifest.json").write_text("{}")
    for inputs in ("old", "old/checkpoints"):
        assert check_exit_code(monkeypatch, f"checkpoint.resume={inputs}") == 2
        assert "the newest is old/checkpoints/step_000004" in capsys.readouterr().err


def test_prefetch_does_not_send_to_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(Case("", ""))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port that discards
    for name, value in (("OFFLINE", "0"), ("DISABLE_PROGRESS_BARS", "1")):
        monkeypatch.setenv(f"HF_HUB_{name}", value)
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["prefetch", "--config", "config.yaml", "data.train=hub:org/set::train"]
    )
    with pytest.raises(SystemExit):
        prefetch.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert "run this on a node with network" in line


def test_names_of_cases_are_unique() -> None:
    names = [(case.name, case.expected) for case in CASES]
    assert len(set(names)) == len(names)
