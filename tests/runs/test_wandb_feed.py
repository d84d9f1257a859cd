"""A tracker never changes a training; the real package."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.observe.metrics_file import LineFile
from grpo_spmd.observe.trackers import TrackerFeed, WandbRun
from tests.support import fake_wandb
from tests.support.models import write_config
from tests.support.ranks import RanksJob
from tests.support.recorded import plain_config

fake = fake_wandb.fake  # the fixture


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


def test_without_the_package_or_a_key_it_is_off_with_a_warning(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(config, range(2))
    assert "W&B is off from here on (UsageError" in caplog.text
    caplog.clear()
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(config, range(2, 4))
    assert "W&B is off from here on (ModuleNotFoundError" in caplog.text
    assert not [
        thread for thread in threading.enumerate() if thread.name == "wandb" and not thread.daemon
    ]


def test_a_training_is_the_same_to_the_bit_beside_a_hanging_tracker(
    tmp_path: Path, plain_run: Path, fake: Path
) -> None:
    environment = {"FAKE_WANDB": "import hangs", "PYTHONPATH": str(fake)}
    arguments = [
        "--config",
        str(plain_config(tmp_path, plain_run / "model")),
        "logging.wandb=online",
    ]
    code, output = RanksJob(1, "grpo_spmd.train", *arguments, env=environment).wait(120)
    assert code == 0, output
    manifests, metrics = [], []
    for folder in (plain_run, tmp_path):
        manifest = json.loads((folder / "run/checkpoints/step_000003/manifest.json").read_text())
        manifests.append(
            {name: entry for name, entry in manifest["files"].items() if name.startswith("state/")}
        )
        lines = [
            json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        ]
        measured = re.compile(r"^(time|throughput|memory)/|_s$|tail_waste")
        metrics.append(
            [
                {key: value for key, value in line.items() if not measured.search(key)}
                for line in lines
            ]
        )
    assert manifests[0] == manifests[1]
    assert len(metrics[0]) == len(metrics[1]) == 6  # three steps, and three evaluations
    for without, hanging in zip(*metrics, strict=True):
        assert without == hanging


def test_the_real_package_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run and its continuation leave two folders of one id, which `wandb sync` puts together."""
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(write_config(tmp_path, tmp_path / "model", logging={"wandb": "offline"}))
    run(config, range(5), finish_s=60)
    time.sleep(1)  # its folders are named by the second
    run(config, range(3, 7), finish_s=60)
    assert "W&B" not in caplog.text
    run_id = json.loads(Path(config.run_dir, "wandb.json").read_text())["id"]
    assert (
        len(list(Path(config.run_dir).glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")))
        == 2
    )
    expected, steps, deadline = [*range(5), *range(3, 7)], [-1], time.monotonic() + 30
    while (
        steps != expected and time.monotonic() < deadline
    ):  # W&B's own process writes them, when it comes to it
        steps = []
        for file in sorted(
            Path(config.run_dir).glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
        ):
            for record in records(file):
                steps += [
                    int(item.value_json)
                    for item in record.history.item
                    if "step" in (item.key, *item.nested_key)
                ]
    assert steps == expected


def records(path: Path) -> Iterator[Any]:
    """Of a W&B file: after 7 bytes, blocks of 32 KiB of chunks with checksum, length and type
    (LevelDB's log
    format)."""
    from wandb.proto import wandb_internal_pb2

    data, position, full = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        full += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # all of a record, or the last of it
            record = wandb_internal_pb2.Record()
            record.ParseFromString(full)
            full = b""
            yield record
