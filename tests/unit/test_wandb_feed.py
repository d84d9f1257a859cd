"""A tracker never stops or slows what feeds it, and gets every line in the end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.observe import trackers as feed_module
from grpo_spmd.observe.metrics_file import LineFile
from grpo_spmd.observe.trackers import TrackerFeed, WandbRun
from tests.support import fake_wandb
from tests.support.models import write_config

fake = fake_wandb.fake  # the fixture


def told(folder: Path, label: str) -> list[Any]:
    path = folder / "out.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)[label] for line in lines if label in json.loads(line)]


def run(config: Config, steps: range, finish_s: float = 20) -> float:
    """Writes the steps' lines as a run does; the seconds that this took beside waiting for the
    end."""
    folder = Path(config.run_dir)
    folder.mkdir(exist_ok=True)
    file, feed = (
        LineFile(folder / "metrics.jsonl"),
        TrackerFeed(folder, WandbRun(folder, config.logging, config_to_dict(config))),
    )
    start = time.monotonic()
    for step in steps:
        file.write(json.dumps({"step": step, "x": step / 7}))
        feed.line_written(1, False)
    spent = time.monotonic() - start
    feed.finish(finish_s)
    file.close()
    return spent


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_config(tmp_path, tmp_path / "model", logging={"wandb": "online"}))


def test_every_line_arrives_once_and_in_order(config: Config, fake: Path) -> None:
    run(config, range(300))
    assert told(fake, "log") == [{"step": step, "x": step / 7} for step in range(300)]
    assert told(fake, "finish") == [True]


def test_a_run_that_goes_on_has_the_same_id_and_repeated_steps_are_sent_again(
    config: Config, fake: Path
) -> None:
    run(config, range(10))
    metrics = Path(config.run_dir, "metrics.jsonl")
    metrics.write_text(
        "".join(metrics.read_text().splitlines(keepends=True)[:6])
    )  # as resuming at step 6 cuts it
    run(config, range(6, 12))
    assert [line["step"] for line in told(fake, "log")] == [*range(10), *range(6, 12)]
    initial, second = told(fake, "init")
    assert initial == second
    assert initial["resume"] == "allow"


@pytest.mark.parametrize(
    "method", ["init hangs", "log hangs", "finish hangs", "init raises", "init exits", "log raises"]
)
def test_a_tracker_that_fails_costs_no_line_and_no_time(
    method: str,
    config: Config,
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_WANDB", method)
    assert run(config, range(100), finish_s=1.5) < 10  # 0.01 s on an idle core
    assert len(Path(config.run_dir, "metrics.jsonl").read_text().splitlines()) == 100
    assert (
        "did not finish within" if "hangs" in method else "W&B is off from here on"
    ) in caplog.text
    if method.startswith("log"):
        assert [line["step"] for line in told(fake, "log")] == [0]
    # Started again with a tracker that works, nothing is missing there. What it was given seconds
    # before it failed it
    # may have lost, and gets once more.
    old = told(fake, "log")
    monkeypatch.setenv("FAKE_WANDB", "")
    sys.modules.pop("wandb", None)
    run(config, range(100, 102))
    assert [line["step"] for line in told(fake, "log")[len(old) :]] == list(range(102))


def test_what_has_settled_is_not_sent_again(
    config: Config, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "finish hangs")
    monkeypatch.setattr(WandbRun, "settles_s", 0.0)
    run(config, range(100), finish_s=1.5)
    monkeypatch.setenv("FAKE_WANDB", "")
    sys.modules.pop("wandb", None)
    run(config, range(100, 102))
    assert [line["step"] for line in told(fake, "log")] == list(range(102))


def test_a_tracker_that_does_not_answer_is_said_once(
    config: Config, fake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_WANDB", "init hangs")
    monkeypatch.setattr(feed_module, "ANSWER_S", 0.05)
    folder = Path(config.run_dir)
    folder.mkdir()
    feed = TrackerFeed(folder, WandbRun(folder, config.logging, config_to_dict(config)))
    for _ in range(3):
        time.sleep(0.1)
        feed.line_written(1, False)
    assert caplog.text.count("W&B has not answered for") == 1
