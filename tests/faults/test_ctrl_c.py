"""Ctrl-C at a real terminal, on two ranks under torchrun: one sentence, no traceback, nothing
stray."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.support.models import make_model, write_config
from tests.support.nightly import selected_values
from tests.support.terminal import TerminalJob

# Case: seconds of the set-up and of a step, of which the second half is update; when to press
# first; how often.
CASES = {
    "set-up": ("30", "1", "set up", 1),
    "update": ("0", "4", "update 1", 1),
    "stuck": ("0", "60", "set up", 2),
}
FAR_S = 15.0  # from the first press to the end
REWARD = """
import pathlib
import time
calls = 0
def reward(completions, **columns):
    global calls
    calls += 1
    if calls > 4:
        pathlib.Path({folder!r}, "scores").touch()
        time.sleep(60)
    return [float(len(c)) for c in completions]
"""


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[int, list[str], float, list[int], Path]]:
    """Of each selected case, all at a time: exit code, lines, seconds from the first press to the
    end, who stayed, folder."""
    jobs, result = {}, {}
    for case in selected_values(request, "case"):
        set_up_s, step_s, _, _ = CASES[case]
        folder = tmp_path_factory.mktemp("ctrl_c")
        for name in ("run", "temporary"):
            (folder / name).mkdir()
        launch = [
            sys.executable,
            "-m",
            "grpo_spmd.distributed.launch",
            "--standalone",
            "--max-restarts=3",
        ]
        launch += ["--nproc-per-node=2", "-m"]
        config = write_config(folder, folder / "model")
        command = [*launch, "tests.support.workers.stop", str(config), step_s, set_up_s]
        jobs[case] = TerminalJob(command, folder / "temporary"), folder
    for case, (job, folder) in jobs.items():
        _, _, moment, num_presses = CASES[case]
        job.read_until(moment)
        if case == "stuck":
            time.sleep(1.0)  # into the first step
        start = time.monotonic()
        job.press_ctrl_c()
        if num_presses == 2:
            job.read_until("again to quit now")
            time.sleep(1.2)  # two signals within a second are one press
            job.press_ctrl_c()
        code, lines = job.wait(60)
        result[case] = code, lines, time.monotonic() - start, job.survivors(), folder
    return result


def after_press(lines: list[str]) -> list[str]:
    """What is shown from the press on, without what the log still says of steps."""
    rest = lines[next(number for number, line in enumerate(lines) if "^C" in line) + 1 :]
    return [line for line in rest if line.strip("^C") and not line.startswith(("update", "set up"))]


@pytest.mark.parametrize("case", CASES)
def test_it_leaves_in_time_and_without_a_trace(
    stopped: dict[str, tuple[int, list[str], float, list[int], Path]], case: str
) -> None:
    code, lines, seconds, survivors, folder = stopped[case]
    text = "\n".join(lines)
    assert survivors == [], text
    assert list((folder / "temporary").iterdir()) == []
    assert seconds < FAR_S, text
    assert "Traceback" not in text
    assert "torch" not in text
    message = {
        "set-up": (1, ["stopped by Ctrl-C before the first step; no checkpoint was saved"]),
        "update": (
            0,
            [
                "Ctrl-C: finishing the update, then saving; again to quit now",
                *["stops: Ctrl-C"] * 2,
            ],
        ),
        "stuck": (
            1,
            ["Ctrl-C: saving; again to quit now", "Ctrl-C: out at once; no checkpoint was saved"],
        ),
    }
    assert (code, after_press(lines)) == message[case]
    assert max(map(len, lines)) <= 80
    marker = folder / "run/preempted.json"
    assert marker.exists() == (case == "update")
    if marker.exists():
        assert json.loads(marker.read_text()) == {"step": 2, "reason": "Ctrl-C", "saved": True}


def press_while_scoring(job: TerminalJob, folder: Path) -> tuple[int, list[str]]:
    """Presses Ctrl-C when REWARD has begun. Returns exit code and lines; fails if it takes long."""
    while not (folder / "scores").exists():
        job.read_until("")
        time.sleep(0.1)
    start = time.monotonic()
    job.press_ctrl_c()
    code, lines = job.wait(60)
    assert time.monotonic() - start < FAR_S, lines
    return code, lines


def test_a_run_that_scores_gives_the_step_up_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Its rewards would take another minute."""
    (tmp_path / "reward.py").write_text(REWARD.format(folder=str(tmp_path)))
    config = write_config(
        tmp_path,
        make_model(tmp_path / "model", "qwen3", tied=True),
        rewards=[{"function": f"{tmp_path}/reward.py:reward"}],
        reward_pool={"num_workers": 1},
        training={"num_steps": 10_000},
    )
    (tmp_path / "temporary").mkdir()
    command = [
        sys.executable,
        "-m",
        "grpo_spmd.cli",
        "train",
        "--nproc",
        "2",
        "--config",
        str(config),
    ]
    job = TerminalJob(command, tmp_path / "temporary")
    code, lines = press_while_scoring(job, tmp_path)
    text = "\n".join(lines)
    assert code == 0, text
    num_steps = len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert num_steps > 0
    assert after_press(lines) == [
        "Ctrl-C: saving; again to quit now",
        f"preempted (Ctrl-C): everything is saved, up to step {num_steps}",
        "to go on: the same command with checkpoint.resume=auto",
    ]
    assert "Traceback" not in text
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [
        f"step_{num_steps:06d}"
    ]
    assert job.survivors() == []
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_evaluation_alone_leaves_nothing_behind(tmp_path: Path) -> None:
    """It has nothing to save. Its rewards would take another minute."""
    (tmp_path / "reward.py").write_text(REWARD.format(folder=str(tmp_path)))
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    rows = "".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(12))
    (tmp_path / "held.jsonl").write_text(rows)
    config = write_config(
        tmp_path,
        model,
        data={"train": str(tmp_path / "held.jsonl"), "eval": str(tmp_path / "held.jsonl")},
        rewards=[{"function": f"{tmp_path}/reward.py:reward"}],
        reward_pool={"num_workers": 1, "timeout_s": 120},
        eval={"num_samples": 1},
    )
    (tmp_path / "temporary").mkdir()
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "grpo_spmd.cli", "eval", str(model), "--config", str(config)]
    job = TerminalJob([*command, f"--json={figures}"], tmp_path / "temporary")
    code, lines = press_while_scoring(job, tmp_path)
    text = "\n".join(lines)
    assert code == 1, text
    assert after_press(lines) == ["stopped by Ctrl-C; the evaluation has no figures"]
    assert "Traceback" not in text
    assert not figures.exists()
    assert not (tmp_path / "run").exists()
    assert job.survivors() == []
    assert list((tmp_path / "temporary").iterdir()) == []
