"""The driver of benchmarks/gpu_day over made-up steps: limits, kills, what is remembered; and the
parts of its site."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import day
from benchmarks.gpu_day.day import Day, DayError, Step
from benchmarks.support.tree import kill_tree, marked
from tests.support.processes import ROOT, run_command


def _command(folder: Path, names: str, minutes: float = 1, *old: Path) -> list[str]:
    day = [str(folder), str(minutes), names, *map(str, old)]
    return [sys.executable, "-m", "tests.support.made_up_day", *day]


def _state(folder: Path, location: str = "out") -> dict[str, dict[str, Any]]:
    steps: dict[str, dict[str, Any]] = json.loads((folder / location / "state.json").read_text())[
        "steps"
    ]
    return steps


def test_a_step_at_its_limit_is_killed_whole_and_the_others_run_once(tmp_path: Path) -> None:
    command = _command(tmp_path, "row,stuck,skip,bad")
    done = run_command(command)
    assert done.returncode == 1, done.stdout + done.stderr
    steps = _state(tmp_path)
    assert {name: step["status"] for name, step in steps.items()} == {
        "row": "done", "stuck": "limit", "skip": "skipped", "bad": "failed",
    }  # fmt: skip
    assert steps["stuck"]["said"].startswith("killed at its limit with 3 processes")
    assert steps["bad"]["said"] == "exit code 1; oh"
    assert [
        json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()
    ] == [{"step": "row", "status": "done", "form": "dry", "benchmark": "x", "a": 1}]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "state.json", "rows.jsonl", "page.txt", "logs.tar.gz",
    }  # fmt: skip
    assert run_command(command).returncode == 1  # and makes nothing again
    assert (tmp_path / "told").read_text().split() == ["row", "stuck", "skip", "bad"]


@pytest.mark.parametrize(("number", "num_left"), [(signal.SIGKILL, 1), (signal.SIGTERM, 0)])
def test_a_driver_that_is_killed_goes_on_and_ends_what_it_left_running(
    tmp_path: Path, number: signal.Signals, num_left: int
) -> None:
    """SIGTERM it can answer itself: it takes its step with it."""
    command = _command(tmp_path, "row,once,skip")
    driver = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    report = tmp_path / "told"
    end = time.monotonic() + 30
    while not report.exists() or "once" not in report.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    driver.send_signal(number)
    driver.communicate()
    remaining = _state(tmp_path, "scratch")["once"]
    assert (remaining["status"], len(marked(remaining["mark"]))) == ("running", num_left)
    done = run_command(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"once: its driver was killed; ended {num_left} processes of it" in done.stdout
    assert not marked(remaining["mark"])
    assert report.read_text().split() == ["row", "once", "once", "skip"]
    assert [(name, step["status"]) for name, step in _state(tmp_path).items()] == [
        ("row", "done"), ("once", "done"), ("skip", "skipped"),
    ]  # fmt: skip


def test_the_dry_day_is_killed_in_a_run_and_goes_on(tmp_path: Path) -> None:
    """The real command: killed while vLLM runs in its second step, and begun again."""
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--dry", "--commit", "abc"]
    command += ["--scratch", str(scratch), "--out", str(out)]

    def start_until(condition: Callable[[], bool]) -> None:
        """Starts the day, and kills its driver once the condition holds."""
        driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 300
        try:
            while not condition():
                assert driver.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
        finally:
            driver.kill()
            driver.wait()

    log = scratch / "logs/smoke.log"
    start_until(lambda: log.exists() and "starting vLLM" in log.read_text())
    initial = _state(tmp_path, "scratch")
    assert {name: step["status"] for name, step in initial.items()} == {
        "host": "done", "smoke": "running",
    }  # fmt: skip
    try:
        start_until(lambda: "tests" in _state(tmp_path, "scratch"))
        steps = _state(tmp_path, "scratch")
        assert steps["host"] == initial["host"]
        assert (steps["smoke"]["status"], steps["smoke"]["starts"]) == ("done", 2)
        assert not marked(initial["smoke"]["mark"])
        rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
        assert [row["benchmark"] for row in rows] == ["gpu_day_host", "gpu_day_smoke"]
        assert rows[1]["passed"] is True
    finally:
        for step in _state(tmp_path, "scratch").values():
            kill_tree(step["mark"])


def test_a_step_whose_limit_does_not_fit_waits_for_the_next_command_on_another_machine(
    tmp_path: Path,
) -> None:
    """Of 20.3 s "row" takes 0.5, and "skip" might take 20. Then only the results are left of the
    first machine."""
    assert run_command(_command(tmp_path, "row,skip", 20.3 / 60)).returncode == 3
    assert list(_state(tmp_path)) == ["row"]
    second = tmp_path / "other"
    second.mkdir()
    assert run_command(_command(second, "row,skip", 1, tmp_path / "out")).returncode == 0
    assert (second / "told").read_text().split() == ["skip"]
    assert "row" in _state(second)
    assert (second / "out/rows.jsonl").read_bytes() == (tmp_path / "out/rows.jsonl").read_bytes()


def test_the_parts_of_the_site_are_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    """Built by a pip that has one package of 2.5 MiB; nothing but the parts is left of it."""
    pieces, present, site, package = (
        tmp_path / name for name in ("parts", "there", "site", "package.py")
    )
    package.write_bytes(os.urandom(5 << 19))
    for folder in ("bin", "temporary"):
        (tmp_path / folder).mkdir()
    pip = tmp_path / "bin/python3"
    pip.write_text(f'#!/bin/sh\nwhile [ "$1" != --target ]; do shift; done\ncp {package} "$2"\n')
    pip.chmod(0o755)
    script, arrived = str(ROOT / "benchmarks/gpu_day/site.sh"), tmp_path / "came"
    local = {"PATH": f"{pip.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "temporary")}
    done = run_command(["bash", script, "build", str(pieces), "1"], env=local)
    assert (done.returncode, done.stderr, list((tmp_path / "temporary").iterdir())) == (0, "", [])
    assert f"site: 3 parts, 3 MiB in all, in {pieces}" in done.stdout
    names = sorted(path.name for path in pieces.glob("site.tar.xz.*"))
    assert len(names) == 3
    for number, name in enumerate(names):
        arrived.mkdir()
        for file in (name, "site.sha256"):
            (arrived / file).write_bytes((pieces / file).read_bytes())
        if number == len(names) - 1:
            done = run_command(["bash", script, "unpack", str(present), str(site)])
            assert (done.returncode, done.stderr) == (
                1,
                f"site: missing or damaged in {present}: {name} ; take them again\n",
            )
            assert not site.exists()
        done = run_command(["bash", script, "take", str(arrived), str(present)])
        missing = "".join(f"{item} " for item in names[number + 1 :]) or "none"
        assert done.stdout == f"site: {len(names)} parts in all, missing: {missing}\n", done.stderr
        for path in arrived.iterdir():
            path.unlink()
        arrived.rmdir()
    assert run_command(["bash", script, "unpack", str(present), str(site)]).returncode == 0
    assert (site / "package.py").read_bytes() == package.read_bytes()


def test_a_process_that_no_kill_ends_costs_its_step_and_not_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose call of the driver does not return."""

    def immortal(mark: str) -> int:
        raise RuntimeError("processes [7] are still there 20 s after SIGKILL")

    steps = tuple(Step(name, "", ("-c", "print('made')"), 9) for name in ("one", "two"))
    created = Day(steps, tmp_path / "scratch", tmp_path / "out", "dry", "abc", [])
    monkeypatch.setattr(day, "kill_tree", immortal)
    assert created.run(1.0) == 1
    state = json.loads((tmp_path / "out/state.json").read_text())
    assert {
        name: (of["status"], of["said"]) for name, of in state["steps"].items()
    } == dict.fromkeys(
        ("one", "two"), ("failed", "processes [7] are still there 20 s after SIGKILL")
    )
    created._state["steps"]["one"]["status"] = "running"  # as after a kill of the driver
    with pytest.raises(DayError, match="step one of an earlier command: processes"):
        created.run(1.0)
