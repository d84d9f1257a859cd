"""TensorBoard as a tracker: event files written as the format's own records, without torch's writer
and its threads."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_spmd.observe.trackers.feed import ShownRollout, Tracker, as_table

_log = logging.getLogger("grpo_spmd")
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


class TensorboardRun(Tracker):
    """Writes a file per launch, which TensorBoard reads as one run in the order of their names.

    Each file begins with the step from which on it replaces what was there, so that a line that a
    kill cut, and steps that are run again, show once.
    """

    name = "tensorboard"
    title = "TensorBoard"

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        """`config` is shown as the run's, as a text."""
        self._folder = run_dir / "tensorboard"
        self._config = config

    def start(self, run_id: str, next_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = Event
        self._folder.mkdir(exist_ok=True)
        matches = [_FILE_NAME.match(path.name) for path in self._folder.iterdir()]
        earlier = [int(match[1]) for match in matches if match]
        # clocks may go back, the order of the names must not
        unix_s = max([int(time.time()), *(1 + number for number in earlier)])
        path = self._folder / f"events.out.tfevents.{unix_s:010d}.{socket.gethostname()}"
        self._file = RecordWriter(path.open("xb"))
        self._write(file_version="brain.Event:2")
        first_step = max(next_step - 1, 0)
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        config = yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True)
        self._write(step=first_step, summary={"value": [_text_value("config", [[config]])]})
        _log.info("TensorBoard: %s", self._folder)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        # The line before the next one, and its evaluation, are sent again: they replace themselves.
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

    The plugin takes it for Markdown, with images that it fetches: four blanks before each line
    prevent that.
    """
    if type(cell) is float:
        cell = f"{cell:.6g}"
    text = "" if cell is None else str(cell)
    return "\n".join(f"    {line}" for line in text.split("\n"))
