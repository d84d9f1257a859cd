"""What is read of a run folder, whole, half written, of an earlier version, or made to hurt: what
became of the run,
and at the worst one line."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.checkpoint import run_dir as holders
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.diagnosis import run as run_module
from grpo_spmd.diagnosis.run import name_apart, read_run
from grpo_spmd.observe import metrics_file
from tests.support.processes import ROOT
from tests.support.reported import LAUNCH, healthy, make_run

LONG_AGO = "2026-01-01T00:00:00.000Z"


def _now(seconds_ago: float = 0.0) -> str:
    return datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat().replace("+00:00", "Z")


def _lines(num_steps: int, seconds_ago: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """Steps of 60 s, the last one written so long ago."""
    end = time.time() - seconds_ago
    return [
        line | {"time/unix_s": end - 60 * (num_steps - line["step"])} | more
        for line in healthy(num_steps)
    ]


def _state(
    folder: Path, launch: dict[str, Any] | None, seconds_ago: float = 1e6, num_steps: int = 5
) -> tuple[str, str]:
    run = read_run(make_run(folder, _lines(num_steps, seconds_ago), launch))
    return run.state, run.why


def test_what_a_launch_says_of_its_end_holds(tmp_path: Path) -> None:
    assert _state(tmp_path, LAUNCH) == ("done", "done after step 5 of 80")
    of = LAUNCH | {"outcome": "preempted", "why": "SIGTERM", "end": LONG_AGO}
    assert _state(tmp_path, of) == ("preempted", "preempted after step 5 of 80: SIGTERM")
    of = LAUNCH | {"outcome": "failed", "why": "rank 1 failed\nfirst", "end": LONG_AGO}
    assert _state(tmp_path, of) == ("failed", "failed after step 5 of 80: rank 1 failed first")
    of = LAUNCH | {"outcome": "killed", "why": "it left no word of its end"}
    assert _state(tmp_path, of) == (
        "killed",
        "killed after step 5 of 80: it left no word of its end",
    )


def test_the_newest_launch_counts(tmp_path: Path) -> None:
    make_run(tmp_path, _lines(5, 1e6))
    failed = LAUNCH | {"outcome": "failed", "why": "once"}
    (tmp_path / "launches.jsonl").write_text(
        json.dumps(failed) + "\n" + json.dumps(LAUNCH | {"launch": 2}) + "\n"
    )
    assert read_run(tmp_path).state == "done"


_OPEN = LAUNCH | {"outcome": None, "end": None, "start": LONG_AGO}


def test_a_launch_that_ended_without_a_word(tmp_path: Path) -> None:
    local, present = _OPEN | {"host": socket.gethostname()}, _OPEN | {"host": "another"}
    state, reason = _state(tmp_path, local, seconds_ago=5.0)
    assert (state, "no process holds its folder" in reason) == ("killed", True)
    assert _state(tmp_path, present, seconds_ago=5.0) == (
        "running",
        "running after step 5 of 80 (on another)",
    )
    # steps took 60 s: silent after ten times as long
    assert _state(tmp_path, present, seconds_ago=500.0)[0] == "running"
    state, reason = _state(tmp_path, present, seconds_ago=7200.0)
    assert (state, "nothing written for 2 h" in reason) == ("silent", True)


def test_an_evaluation_of_each_hundredth_step_is_no_silence(tmp_path: Path) -> None:
    """It took 20 minutes at step 1, as the next may, where the steps since took 10 s each."""
    lines = healthy(90)
    for line in lines:
        line |= {
            "time/step_s": 10.0 if line["step"] > 1 else 1200.0,
            "time/unix_s": time.time() - 1500 - 90 + line["step"],
        }
    launch = _OPEN | {"host": "another", "start": LONG_AGO}
    assert read_run(make_run(tmp_path, lines, launch)).state == "running"
    lines[0]["time/step_s"] = 10.0
    assert read_run(make_run(tmp_path, lines, launch)).state == "silent"


def test_a_first_step_may_take_as_long_as_the_watchdog_lets_it(tmp_path: Path) -> None:
    for seconds, state in ((1700.0, "running"), (1900.0, "silent")):
        run = read_run(make_run(tmp_path, [], _OPEN | {"host": "another", "start": _now(seconds)}))
        assert run.state == state, run.why
    # so may that of a launch that goes on with a run of long ago
    state, reason = _state(
        tmp_path, _OPEN | {"host": "another", "start": _now(1700.0)}, seconds_ago=1e6
    )
    assert state == "running", reason


_HOLD = """
import sys, time
from pathlib import Path
from grpo_spmd.checkpoint import run_dir
run_dir._lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_who_holds_the_folder_goes_on_and_is_not_disturbed(tmp_path: Path) -> None:
    make_run(tmp_path, _lines(5, 5.0), _OPEN | {"host": socket.gethostname()})
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert read_run(tmp_path).state == "running"
        make_run(tmp_path, _lines(5, 7200.0), _OPEN | {"host": socket.gethostname()})
        run = read_run(tmp_path)
        assert (run.state, "holds its folder" in run.why) == ("silent", True)
        make_run(
            tmp_path, _lines(5, 7200.0), LAUNCH | {"outcome": "failed", "why": "x", "end": LONG_AGO}
        )
        run = read_run(tmp_path)
        assert (run.state, run.why) == (
            "running",
            "running after step 5 of 80; it starts again, and the launch before was failed: x",
        )
    finally:
        holder.kill()
        holder.wait()
    assert read_run(tmp_path).state == "failed"


def test_reading_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts in that very moment would be told that another process is in its folder."""
    make_run(tmp_path, _lines(5), _OPEN | {"host": socket.gethostname()})
    (tmp_path / "logs" / "launch").touch()
    selected: list[object] = []
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: selected.append(arguments))
    monkeypatch.setattr(fcntl, "lockf", lambda *arguments: selected.append(arguments))
    read_run(tmp_path)
    assert not selected
    monkeypatch.undo()
    holders._lock(tmp_path)
    holders.let_go(tmp_path)


def test_folders_of_before_there_were_launches(tmp_path: Path) -> None:
    assert _state(tmp_path, None, num_steps=80) == ("done", "done after step 80 of 80")
    assert _state(tmp_path, None)[0] == "killed"
    assert _state(tmp_path, None, seconds_ago=5.0)[0] == "running"
    (tmp_path / "logs" / "failure.txt").write_text(
        "=== 2026-01-01 00:00:00\nrank 0 failed first\ntraceback\n"
    )
    assert _state(tmp_path, None) == ("failed", "failed after step 5 of 80: rank 0 failed first")
    (tmp_path / "preempted.json").write_text('{"step": 5, "reason": "SIGTERM", "saved": true}')
    assert _state(tmp_path, None) == ("preempted", "preempted after step 5 of 80: SIGTERM")


def test_reports_are_the_newest_launchs(tmp_path: Path) -> None:
    text = "=== 2026-01-01 00:00:00\nfirst\n=== 2026-01-02 00:00:00\nsecond\n  with === 3\n"
    make_run(tmp_path, _lines(5), LAUNCH | {"outcome": "failed", "start": LONG_AGO})
    (tmp_path / "logs" / "failure.txt").write_text(text)
    (tmp_path / "logs" / "hang.txt").write_text("=== 2026-01-02 00:00:00\n" + "x" * 1_000_000)
    reports = read_run(tmp_path).reports
    assert reports["failure.txt"] == "=== 2026-01-02 00:00:00\nsecond\n  with === 3"
    assert len(reports["hang.txt"]) == 100_000
    os.utime(tmp_path / "logs" / "hang.txt", (1e9, 1e9))  # of an earlier launch
    assert [*read_run(tmp_path).reports] == ["failure.txt"]
    make_run(tmp_path, _lines(5))
    assert read_run(tmp_path).reports == {}  # it is done: what failed was another launch


def test_metrics_are_those_that_count(tmp_path: Path) -> None:
    """Of a step that was made twice the last line; evaluations by themselves; of foreign values
    none."""
    make_run(tmp_path, [])
    lines = [
        '{"step": 0, "eval/a/mean": 0.5, "time/unix_s": 1}',
        '{"step": 1, "x": 1.5, "text": "no", "list": [1], "bool": true, "none": null}',
        '{"step": 2, "x": 2}',
        '{"step": 2, "eval/a/mean": 0.75}',
        '{"step": 3, "x": 3}',
        '{"step": 2, "x": 20, "y": NaN, "z": 1e999}',
        "no line",
        '{"step": "4"}',
        '{"step": -1, "x": 1}',
        '{"step": 1.0}',
        '{"step": 5, "x": ' + "9" * 400 + "}",
        '{"step": 6, "x": 6',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert run.steps == [
        {"step": 1, "x": 1.5, "none": None},
        {"step": 2, "x": 20, "y": None, "z": None},
        {"step": 3, "x": 3},
        {"step": 5, "x": None},
    ]
    assert run.evaluations == [
        {"step": 0, "eval/a/mean": 0.5, "time/unix_s": 1},
        {"step": 2, "eval/a/mean": 0.75},
    ]


def test_a_month_is_read_thinly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step, or fourth, and always the last: memory has a bound."""
    monkeypatch.setattr(run_module, "_MAX_STEPS", 100)
    make_run(tmp_path, ({"step": step, "x": float(step)} for step in range(1, 331)))
    steps = [line["step"] for line in read_run(tmp_path).steps]
    assert steps == [*range(4, 329, 4), 330]


def test_a_config_that_nobody_can_read_costs_the_config(tmp_path: Path) -> None:
    make_run(
        tmp_path,
        _lines(5),
        config="run_dir: x\nmodel: {path: m}\nrewards: [{name: math}]\nday: 2026-01-01\n",
    )
    assert read_run(tmp_path).config == {
        "run_dir": "x", "model.path": "m", "rewards.0.name": "math", "day": "2026-01-01"
    }  # fmt: skip
    bomb = "a: &a [x, x]\n" + "".join(
        f"b{i}: &b{i} [*{'a' if not i else f'b{i - 1}'}, *a, *a]\n" for i in range(40)
    )
    for text in ("[", "- a list", "x" * (1 << 21), bomb, "a: [" * 5000, "\x00"):
        (tmp_path / "config.yaml").write_text(text)
        run = read_run(tmp_path)
        assert (len(run.config) < 10_001, run.num_steps, len(run.steps)) == (True, None, 5)
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert read_run(tmp_path).config == {}


NAMES = ("metrics.jsonl", "config.yaml", "launches.jsonl", "preempted.json", "logs/failure.txt", "logs/hang.txt",  # noqa: E501
         "logs/launch", "rollouts", "checkpoints", "logs", "timeline.jsonl", "tokenizer.json")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_one_line_at_the_worst(name: str, tmp_path: Path) -> None:
    """Nothing hangs on a fifo, and no link leads out of the folder; under a deadline of the test
    suite's."""
    for kind in ("fifo", "folder", "link", "empty", "device", "noise"):
        folder = make_run(tmp_path / kind, _lines(5), None)
        path = folder / name
        if path.is_dir():
            path.rename(folder / "aside")
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(b"" if kind == "empty" else os.urandom(10_000))
        message = _said(folder)
        assert "\n" not in message
        assert "root:" not in message


def _said(folder: Path) -> str:
    """What became of the run, or the line that refuses its folder."""
    try:
        run = read_run(folder)
    except ConfigError as error:
        return str(error)
    return json.dumps(vars(run), default=str)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, "so it is no run folder"),
        (tmp_path / "none", "is no folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_run(folder)
    (tmp_path / "config.yaml").write_text("run_dir: x\n")
    assert read_run(tmp_path).state == "empty"


def test_runs_of_one_name_are_named_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "run", []) for name in ("a", "b")]
    assert [run.name for run in name_apart([read_run(folder) for folder in folders])] == [
        "a/run",
        "b/run",
    ]
    twice = name_apart([read_run(folders[0]), read_run(folders[0])])
    assert [run.name for run in twice] == ["a/run (1)", "a/run (2)"]


def test_a_line_of_many_metrics_has_a_bound(tmp_path: Path) -> None:
    make_run(
        tmp_path,
        ({"step": step, **{f"{step}/{i}": 1.0 for i in range(400)}} for step in range(1, 20)),
    )
    run = read_run(tmp_path)
    assert len({key for line in run.steps for key in line}) == 1_000 + 1  # with "step"
    assert len(run.steps) == 19


@pytest.mark.parametrize("line", [b"\n", b'{"step": 1}\n'])
def test_more_lines_than_a_run_writes_are_refused_in_time(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 million of them took over a minute."""
    monkeypatch.setattr(metrics_file, "MAX_LINES", 1000)
    folder = make_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_bytes(line * 1000)
    if line != b"\n":
        assert read_run(folder).last_step == 1
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(ConfigError, match="nor more than 1,000 lines or 4 GiB"):
        read_run(folder)
