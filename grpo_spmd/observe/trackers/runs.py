"""W&B, TensorBoard and trackio as trackers. Each package is imported only if a run uses it.

This module writes TensorBoard's event files itself, without torch's SummaryWriter and its
threads. trackio, Hugging Face's, writes a SQLite file on this machine unless its environment
variables name a server.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe.trackers.feed import ShownRollout, Tracker, as_table

_log = logging.getLogger("grpo_spmd")
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


@dataclass
class WandbRun(Tracker):
    """W&B as a tracker.

    W&B refuses steps below its own counter, so we leave the counter alone: `step` is logged as a
    metric, and is the x-axis of the others."""

    run_dir: Path
    options: LoggingConfig
    config: dict[str, Any]
    """What W&B shows as the config of the run."""

    name = "wandb"
    title = "W&B"
    # wandb 0.31 writes its file and sends lines every 15 s, in a process that ends with ours. A
    # line that is sent twice is drawn over itself.
    settles_s = 45.0

    def start(self, run_id: str, next_step: int) -> None:
        import wandb

        # console="off": capturing it would put W&B between the training and its terminal, and
        # logs/rank_0.log has every line. login_timeout: without a key W&B may ask for one at a
        # terminal, but not for ever.
        settings = wandb.Settings(init_timeout=120, login_timeout=30, console="off", silent=True)
        mode = self.options.wandb
        self._run = wandb.init(
            project=self.options.wandb_project,
            name=self.run_dir.name,
            dir=str(self.run_dir),
            id=run_id,
            resume="allow",
            # None: WANDB_MODE, else online
            mode=mode if isinstance(mode, str) else None,
            config=self.config,
            settings=settings,
        )
        _log.info("W&B: %s", self._run.url or self._run.dir)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        if rollouts:
            import wandb

            columns, rows = as_table(rollouts)
            metrics = metrics | {"rollouts": wandb.Table(columns=columns, data=rows)}
        self._run.log(metrics)

    def finish(self) -> None:
        self._run.finish()


@dataclass
class TensorboardRun(Tracker):
    """TensorBoard as a tracker: writes one event file per launch.

    TensorBoard reads all files as one run, in the order of their names. Each file begins with a
    START event, at which TensorBoard drops what earlier files have from that step on. So steps that
    are run again show once.
    """

    run_dir: Path
    config: dict[str, Any]
    """What is shown, as a text, as the config of the run."""

    name = "tensorboard"
    title = "TensorBoard"

    def start(self, run_id: str, next_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = Event
        folder = self.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        matches = [_FILE_NAME.match(path.name) for path in folder.iterdir()]
        earlier = [int(match[1]) for match in matches if match]
        # a clock may be set back, but the names must stay in the order of the launches
        unix_s = max([int(time.time()), *(1 + number for number in earlier)])
        path = folder / f"events.out.tfevents.{unix_s:010d}.{socket.gethostname()}"
        self._file = RecordWriter(path.open("xb"))
        self._write(file_version="brain.Event:2")
        first_step = max(next_step - 1, 0)
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        config = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
        self._write(step=first_step, summary={"value": [_text_value("config", [[config]])]})
        _log.info("TensorBoard: %s", folder)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        # The START event has dropped the step before the next one too, so it is sent again.
        return step >= next_step - 1

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        values: list[Any] = [
            {"tag": name, "simple_value": value}
            for name, value in metrics.items()
            if type(value) in (int, float) and name != "step"
        ]
        if rollouts:
            columns, rows = as_table(rollouts)
            values.append(_text_value("rollouts", [columns, *rows]))
        self._write(step=metrics["step"], summary={"value": values})

    def finish(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        event = self._event_type(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())
        self._file.flush()


def _text_value(tag: str, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns a value that TensorBoard's text plugin shows as a table."""
    from tensorboard.plugins.text.metadata import create_summary_metadata

    cells = [_escape(cell).encode("utf-8", "backslashreplace") for row in rows for cell in row]
    shape = {"dim": [{"size": len(rows)}, {"size": len(rows[0])}]}
    tensor = {"dtype": "DT_STRING", "string_val": cells, "tensor_shape": shape}
    return {"tag": tag, "metadata": create_summary_metadata(tag, ""), "tensor": tensor}


def _escape(cell: Any) -> str:
    """Returns a cell as a block of literal text.

    TensorBoard's plugin renders Markdown, and fetches images that it names. Four spaces before each
    line make it show the text as it is.
    """
    if type(cell) is float:
        cell = f"{cell:.6g}"
    text = "" if cell is None else str(cell)
    return "\n".join(f"    {line}" for line in text.split("\n"))


@dataclass
class TrackioRun(Tracker):
    """trackio as a tracker.

    trackio writes in the background twice a second, so a kill can lose lines that it had accepted.
    To find out which lines it lacks, a launch reads trackio's own file and not our state file.
    Rollouts are sent as its traces, whose text trackio shows as it is; the text of its tables it
    would interpret.
    """

    run_dir: Path
    project: str
    config: dict[str, Any]
    """What trackio shows as the config of the run."""
    stored_lines: set[tuple[int, bool]] | None = None
    """(step, is_evaluation) of the lines that trackio has; None if that is not known."""
    name = "trackio"
    title = "trackio"

    def start(self, run_id: str, next_step: int) -> None:
        import trackio

        self._run = trackio.init(
            project=self.project,
            # the folders of two runs may have the same name
            name=f"{self.run_dir.name}-{run_id[:6]}",
            config=self.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            self.stored_lines = _read_stored_lines(self.project, self._run.id)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        if self.stored_lines is None:
            return super().lacks(step, is_evaluation, next_step)
        return (step, is_evaluation) not in self.stored_lines

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        import trackio

        values = {
            name: value for name, value in metrics.items() if name != "step" and value is not None
        }
        if rollouts:
            values["rollouts"] = [
                trackio.Trace(
                    messages,
                    # prompt and completion are messages
                    metadata={
                        name: value
                        for name, value in fields.items()
                        if name not in ("prompt", "completion")
                    },
                )
                for messages, fields in rollouts
            ]
        self._run.log(values, step=metrics["step"])

    def finish(self) -> None:
        import trackio

        trackio.finish()


def _read_stored_lines(project: str, run_id: str) -> set[tuple[int, bool]] | None:
    """Returns (step, is_evaluation) of the lines in trackio's file.

    Reads the schema that trackio documents. Returns None if there is no file, or another schema."""
    from trackio.sqlite_storage import SQLiteStorage

    path = SQLiteStorage.get_project_db_path(project)
    uri = f"{path.absolute().as_uri()}?mode=ro"
    query = "SELECT step, substr(metrics, 1, 7) FROM metrics WHERE run_id = ?"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=30)) as connection:
            rows = connection.execute(query, (run_id,))
            return {(step, start in (b'{"eval/', '{"eval/')) for step, start in rows}
    except sqlite3.Error as error:
        _log.debug("trackio's %s: %s", path, error)
        return None
