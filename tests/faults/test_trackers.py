"""Trackers of runs that are killed and go on: the real packages, real processes, SIGKILL. What
could be wrong without a
word: a line that a tracker never gets, or shows twice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_wandb_feed import records
from tests.support.processes import Job

Line = tuple[int, str, float]  # step, metric, value


@pytest.fixture
def killed_run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Of the tracker that the test asks for: killed while its package is imported, killed again
    later, ended."""
    folder = tmp_path / "a run"
    for launch, (initial, killed_at, pause_s) in enumerate(
        ((1, 3, 0.0), (3, 150, 0.02), (145, None, 0.005)), start=1
    ):
        _launch(folder, request.param, initial, launch, killed_at, pause_s)
    return folder


def _launch(
    folder: Path, tracker: str, initial: int, launch: int, killed_at: int | None, pause_s: float
) -> str:
    """Up to step 160, or to the kill. What it prints beside its steps: why a tracker is off."""
    arguments = [str(folder), tracker, str(initial), "160", str(launch), str(pause_s)]
    local = {"TRACKIO_DIR": str(folder.parent / "trackio"), "WANDB_SILENT": "true"}
    job = Job([sys.executable, "-m", "tests.support.workers.tracked_run", *arguments], env=local)
    assert job.process.stdout is not None
    output = ""
    for line in job.process.stdout:
        output += "" if line.startswith("step ") else line
        if line == f"step {killed_at}\n":
            os.kill(job.process.pid, signal.SIGKILL)
    assert job.process.wait(60) == (0 if killed_at is None else -signal.SIGKILL), output
    return output


def in_metrics(folder: Path) -> list[Line]:
    """The truth: what metrics.jsonl says at the end, to the places that it was written with."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = [
        (line["step"], name, value)
        for line in lines
        for name, value in line.items()
        if name != "step"
    ]
    return sorted(
        (step, name, round(value, 4)) for step, name, value in result if value is not None
    )


@pytest.mark.parametrize("killed_run", ["tensorboard"], indirect=True)
def test_tensorboard_shows_metrics_jsonl_and_nothing_twice(killed_run: Path) -> None:
    assert in_events(killed_run) == in_metrics(killed_run)
    assert len(in_metrics(killed_run)) == 160 + 32
    assert {int(value) for _, _, value in in_metrics(killed_run)} == {
        1,
        2,
        3,
    }  # of all three launches something stayed


def in_events(folder: Path) -> list[Line]:
    """By TensorBoard's own reader. Values are float32 there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return sorted((e.step, tag, round(e.value, 4)) for tag in tags for e in events.Scalars(tag))


@pytest.mark.parametrize("killed_run", ["trackio"], indirect=True)
def test_trackio_has_every_line_and_only_what_was_run_again_twice(killed_run: Path) -> None:
    with closing(sqlite3.connect(killed_run.parent / "trackio/grpo_spmd.db")) as connection:
        rows = connection.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert len({name for name, _, _ in rows}) == 1
    lines = [
        (step, name, value) for _, step, text in rows for name, value in json.loads(text).items()
    ]
    result, expected = (
        Counter((step, name, round(value, 4)) for step, name, value in lines),
        in_metrics(killed_run),
    )
    assert {line: result[line] for line in expected if result[line] != 1} == {}
    check_others(result, expected)


@pytest.mark.parametrize("killed_run", ["wandb"], indirect=True)
def test_wandb_has_every_line_that_a_kill_took_from_it_too(killed_run: Path) -> None:
    expected, launches, output = in_metrics(killed_run), 3, ""
    settled_in_wandb = _settled_in_wandb(killed_run, set(expected))
    while (
        set(expected) - settled_in_wandb.keys() and launches < 6
    ):  # on a busy machine W&B gets the rest when the run goes on
        launches += 1
        output = _launch(killed_run, "wandb", 161, launches, None, 0.0)
        settled_in_wandb = _settled_in_wandb(killed_run, set(expected))
    assert set(expected) - settled_in_wandb.keys() == set(), output
    assert {line: count for line, count in settled_in_wandb.items() if count > launches} == {}
    check_others(settled_in_wandb, expected)


def _settled_in_wandb(folder: Path, expected: set[Line]) -> Counter[Line]:
    """W&B's own process writes when it can."""
    deadline, result = time.monotonic() + 30, Counter(in_wandb(folder))
    while not result.keys() >= expected and time.monotonic() < deadline:
        time.sleep(0.2)
        result = Counter(in_wandb(folder))
    return result


def in_wandb(folder: Path) -> Iterator[Line]:
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            values: dict[str, Any] = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in values.items():
                if name.startswith(("eval/", "reward/")):
                    yield values["step"], name, round(value, 4)


def check_others(found: Counter[Line], expected: list[Line]) -> None:
    """Beside the lines of metrics.jsonl there are only those of steps that an earlier launch had
    made, and a later one
    made again: launches are told apart by their values."""
    retained = {(step, name): value for step, name, value in expected}
    assert [line for line in found.keys() - set(expected) if not line[2] < retained[line[:2]]] == []
    assert {int(value) for _, _, value in expected} == {1, 2, 3}
