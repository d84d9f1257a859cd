"""What trackers are shown: the right rollouts, few, and text that stays text; and that one cannot
hold up another."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.config.rules import logging_errors
from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe import followers as module
from grpo_spmd.observe.followers import open_followers
from grpo_spmd.observe.metrics_file import LineFile
from grpo_spmd.observe.rollout_record import RolloutRecord, to_line
from grpo_spmd.observe.trackers import (
    MAX_TEXT_CHARS,
    ShownRollout,
    TensorboardRun,
    Tracker,
    TrackerFeed,
    WandbRun,
    as_table,
    shown_rollouts,
    spread_evenly,
)
from tests.support import fake_wandb

fake = fake_wandb.fake  # the fixture

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "image": "![x](http://evil.test/x.png) <img src=http://evil.test/y.png>",
    "link": "[click](javascript:alert(1))",
    "table": "a | b\n---|---\n1 | 2",
    "fence": "```\nnot code\n```\n# heading",
    "comment": "-->\n<!-- open",
    "tab": "\tcode\n\n    * list\n\n<b>bold</b>",
    "long": "x" * 100_000,
    "ansi": "\x1b[31mred\x1b[0m\x00",
    "rtl": "\u202egnp.exe",
    "surrogate": "half \ud83d of a pair",
    "nothing": "",
}


def record(position: int, sample: int = 0, **second: Any) -> RolloutRecord:
    fields: dict[str, Any] = {
        "prompt": f"prompt {position}",
        "completion": f"text {position}/{sample}",
    }
    fields |= {
        "rollout_id": None,
        "row": position,
        "position": position,
        "sample": sample,
        "reward": position / 8,
    }
    fields |= {
        "columns": {"answer": 72},
        "rewards": {"right": 1.0},
        "statuses": {"right": "ok"},
        "advantage": None,
    }
    fields |= {
        "finish_reason": "stop",
        "prompt_ids": [1],
        "completion_ids": [2, 3],
        "rollout_logprobs": [-0.5, -1.0],
    }
    return RolloutRecord(**(fields | second))


def dump(
    run_dir: Path, step: int, records: Sequence[RolloutRecord], name: str = "{}.jsonl"
) -> Path:
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True, parents=True)
    content = b"".join(to_line(item) + b"\n" for item in records)
    path = folder / name.format(f"step_{step:06d}")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 127, 128, 129, 512, 1000])
def test_rollouts_are_taken_evenly_and_all_of_them_where_they_are_few(number: int) -> None:
    chosen = [int(line) for line in spread_evenly((str(i).encode() for i in range(number)), 64)]
    assert len(chosen) == min(number, 64)
    gaps = np.diff([*chosen, number])
    assert number <= 64 or (
        chosen[0] == 0 and gaps.max() <= 2 * number / 64 + 1 and gaps.min() >= 1
    )


@pytest.mark.parametrize("name", ["{}.jsonl", "{}.jsonl.gz"])
def test_rollouts_of_all_nodes_are_shown_as_they_were_dumped(name: str, tmp_path: Path) -> None:
    dump(tmp_path, 7, [record(0, 0), record(0, 1, reward=None, rewards={"right": None})], name)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2"}]
    dump(tmp_path, 7, [record(1, prompt=chat, advantage=-0.5)], name.replace("{}", "{}.node_1"))
    initial, second, third = shown_rollouts(tmp_path, 7)
    expected = {"position": 0, "sample": 0, "completion": "text 0/0", "reward": 0.0}
    assert initial.fields.items() >= expected.items()
    assert initial.messages == [
        {"role": "user", "content": "prompt 0"},
        {"role": "assistant", "content": "text 0/0"},
    ]
    expected = {"sample": 1, "reward": None, "reward/right": None, "answer": "answer='72'"}
    assert second.fields.items() >= expected.items()
    assert third.fields["prompt"] == "system: be brief\n\nuser: 2 + 2"
    assert third.messages == [*chat, {"role": "assistant", "content": "text 1/0"}]
    assert third.fields["advantage"] == -0.5
    columns, rows = as_table([initial, second, third])
    assert columns[:4] == ["prompt", "completion", "reward", "reward/right"]
    assert [row[:4] for row in rows][:2] == [
        ["prompt 0", "text 0/0", 0.0, 1.0],
        ["prompt 0", "text 0/1", None, None],
    ]


def test_an_episode_is_shown_as_its_conversation(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "python"}}]}
    messages = [
        call,
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
        "no message",
    ]
    line = json.loads(to_line(record(0))) | {"status": "ok", "messages": messages}
    dump(tmp_path, 1, []).write_text(json.dumps(line) + "\n")
    (displayed,) = shown_rollouts(tmp_path, 1)
    assert [message["role"] for message in displayed.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "unknown",
    ]
    assert '"python"' in displayed.messages[1]["content"]
    assert displayed.fields["status"] == "ok"


def test_what_is_no_rollout_is_passed_over_and_what_cannot_be_read_costs_the_table(
    tmp_path: Path,
) -> None:
    path = dump(tmp_path, 1, [record(0)])
    odd = [
        b"{",
        b"[1]",
        b"{}",
        b'{"position": "a"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"position":1e99}',
    ]
    path.write_bytes(b"".join(line + b"\n" for line in odd) + path.read_bytes() + b'{"position": 3')
    assert [item.fields["position"] for item in shown_rollouts(tmp_path, 1)] == [0]
    assert shown_rollouts(tmp_path, 2) == []  # removed by logging.rollouts_keep
    (tmp_path / "rollouts/step_000003.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    os.mkfifo(tmp_path / "rollouts/step_000004.jsonl")  # is_file() says no, as of a folder
    tracker = Kept()
    # a link is refused, though it leads to a good dump
    (tmp_path / "rollouts/step_000005.jsonl").symlink_to(path)
    feed = TrackerFeed(tmp_path, tracker, rollouts_every_steps=1)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "x": 1}) + "\n" for step in (1, 2, 3, 4, 5))
    feed.finish(20)
    assert [(metrics["step"], len(rollouts)) for metrics, rollouts in tracker.lines] == [
        (1, 1),
        (2, 0),
        (3, 0),
        (4, 0),
        (5, 0),
    ]


class Kept(Tracker):
    name, title = "kept", "Kept"

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, Any], Sequence[ShownRollout]]] = []

    def start(self, run_id: str, next_step: int) -> None:
        pass

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        self.lines.append((metrics, rollouts))

    def finish(self) -> None:
        pass


def test_rollouts_come_with_each_nth_step_alone(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        dump(tmp_path, step, [record(step)])
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(line) + "\n"
            for line in ({"step": 2, "x": 1}, {"step": 2, "eval/a": 1}, {"step": 3, "x": 1})
        )
    )
    tracker = Kept()
    TrackerFeed(tmp_path, tracker, rollouts_every_steps=2).finish(20)
    assert [[item.fields["position"] for item in rollouts] for _, rollouts in tracker.lines] == [
        [2],
        [],
        [],
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_text_in_tensorboard(name: str, tmp_path: Path) -> None:
    """Through the dump, the event file and TensorBoard's own reader and renderer of cells."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    text = HOSTILE[name]
    dump(tmp_path, 1, [record(0, prompt=text, completion=text)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "loss/kl": null}\n')
    TrackerFeed(tmp_path, TensorboardRun(tmp_path, {"seed": 1}), rollouts_every_steps=1).finish(60)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert sorted(events.Tags()["tensors"]) == ["config", "rollouts"]
    array = make_ndarray(events.Tensors("rollouts")[0].tensor_proto)
    assert array.shape == (2, 10)
    html = text_array_to_html(array, enable_markdown=True)
    for tag in (
        "<script",
        "<img",
        "<a ",
        "<b>",
        "<h1",
        "<!--",
        "<table>\n<thead",
        "\x1b",
        "\x00",
        "\u202e",
    ):
        assert tag not in html
    displayed = {
        "ansi": "\\u001b[31mred",
        "rtl": "\\u202egnp.exe",
        "surrogate": "half \\ud83d of",
        "nothing": "text",
    }
    retained = {
        "link": "[click](javascript",
        "image": "![x](http",
        "fence": "# heading",
        "table": "a | b",
        "script": "alert(1)",
    }
    assert (displayed | retained).get(name, text[:10].strip()) in html or name in (
        "nothing",
        "comment",
    )
    assert len(html) < 10 * MAX_TEXT_CHARS


def test_the_table_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    dump(
        tmp_path,
        1,
        [record(position, completion=text) for position, text in enumerate(HOSTILE.values())],
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    TrackerFeed(
        tmp_path, WandbRun(tmp_path, LoggingConfig(wandb="offline"), {}), rollouts_every_steps=1
    ).finish(60)
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts_*.json")
    table = json.loads(path.read_text())
    assert table["columns"][:2] == ["prompt", "completion"]
    assert len(table["data"]) == len(HOSTILE)
    assert [row[1] for row in table["data"]][:2] == [HOSTILE["script"], HOSTILE["image"]]
    assert all(len(row[1]) < 2 * MAX_TEXT_CHARS for row in table["data"])


def test_the_traces_of_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: trackio reads its folder's name when it is imported."""
    import sqlite3
    import sys

    from tests.support.processes import run_command

    dump(
        tmp_path,
        1,
        [record(position, completion=text) for position, text in enumerate(HOSTILE.values())],
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "loss/kl": null}\n')
    code = (
        "import pathlib, sys; from grpo_spmd.observe.trackers import TrackerFeed\n"
        "from grpo_spmd.observe.trackers import TrackioRun\n"
        "run = pathlib.Path(sys.argv[1]); TrackerFeed(run, TrackioRun(run, 'p', {'a': {'b': "
        "1}}), 1).finish(60)"
    )
    done = run_command(
        [sys.executable, "-c", code, str(tmp_path)], env={"TRACKIO_DIR": str(tmp_path / "trackio")}
    )
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio/p.db") as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics").fetchall()
        traces = connection.execute(
            "SELECT messages, metadata FROM traces ORDER BY trace_index"
        ).fetchall()
    assert [(step, json.loads(text)) for step, text in rows] == [(1, {"reward/mean": 0.5})]
    assert len(traces) == len(HOSTILE)
    messages, facts = (json.loads(piece) for piece in traces[0])
    assert messages[-1] == {"role": "assistant", "content": HOSTILE["script"]}
    assert facts["reward"] == 0.0
    assert facts["reward/right"] == 1.0


def test_a_tracker_that_hangs_holds_up_no_other(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """W&B hangs in its start, TensorBoard has all lines, and the run waits for its time and no
    longer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("FAKE_WANDB", "init hangs")
    monkeypatch.setattr(module, "FINISH_S", 0.5)
    followers = open_followers(tmp_path, LoggingConfig(trackers=("wandb", "tensorboard")), {})
    assert followers is not None
    file = LineFile(tmp_path / "metrics.jsonl")
    for step in range(1, 51):
        file.write(json.dumps({"step": step, "x": step}))
        followers.line_written(step, False)
    state, deadline = tmp_path / "tensorboard.json", time.monotonic() + 60
    while (
        '"next_step": 51' not in (state.read_text() if state.exists() else "")
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    followers.finish(has_ended=True)
    file.close()
    assert "W&B did not finish within" in caplog.text
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [
        (step, step) for step in range(1, 51)
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "tensorboard"]


def test_nobody_is_followed_by_default_and_nothing_is_imported(tmp_path: Path) -> None:
    assert open_followers(tmp_path, LoggingConfig(), {}) is None


def test_trackers_are_those_that_are_named_and_wandb_where_its_own_key_is_set() -> None:
    assert LoggingConfig().tracker_names == []
    assert LoggingConfig(trackers=("trackio", "wandb", "trackio")).tracker_names == [
        "wandb",
        "trackio",
    ]
    assert LoggingConfig(trackers=("tensorboard",), wandb="offline").tracker_names == [
        "wandb",
        "tensorboard",
    ]
    assert LoggingConfig(wandb=True).tracker_names == ["wandb"]


def test_rollouts_are_shown_of_steps_that_are_dumped() -> None:
    good = LoggingConfig(
        trackers=("trackio",), rollouts_every_steps=2, trackers_rollouts_every_steps=4
    )
    assert not list(logging_errors(good))
    for dumped in (0, 3):
        rule = (
            "trackers_rollouts_every_steps (4) must be a multiple of "
            f"logging.rollouts_every_steps ({dumped})"
        )
        bad = LoggingConfig(
            wandb=True, rollouts_every_steps=dumped, trackers_rollouts_every_steps=4
        )
        (error,) = logging_errors(bad)
        assert rule in error


def test_a_run_that_failed_in_somebodys_process_leaves_no_follower(tmp_path: Path) -> None:
    followers = open_followers(
        tmp_path, LoggingConfig(trackers=("tensorboard",), report_every_steps=1), {}
    )
    assert {"tensorboard", "report"} <= {thread.name for thread in threading.enumerate()}
    module.finish_all()
    assert not {"tensorboard", "report"} & {thread.name for thread in threading.enumerate()}
    assert followers is not None
