"""TensorBoard: event files, written by the format's own records, without torch's writer and its threads."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_spmd.observe.trackers.completions import ShownRollout, as_table
from grpo_spmd.observe.trackers.feed import Tracker

_log = logging.getLogger("grpo_spmd")
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


class TensorboardRun(Tracker):
    """A file a launch in `<run_dir>/tensorboard`, whole lines of metrics at a time. TensorBoard reads the files in the
    order of their names as one run. Each begins with the step from which on it takes the place of what was there: what
    a kill left half known, and steps that are run again, show once."""

    name, title = "tensorboard", "TensorBoard"

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        """`config`: shown as the run's, as a text."""
        self._folder, self._config = run_dir / "tensorboard", config

    def start(self, run_id: str, next_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(exist_ok=True)
        there = [
            int(found[1]) for path in self._folder.iterdir() if (found := _NAME.match(path.name))
        ]
        moment = max(
            [int(time.time()), *(1 + each for each in there)]
        )  # clocks may go back, the order must not
        self._file = RecordWriter(
            (self._folder / f"events.out.tfevents.{moment:010d}.{socket.gethostname()}").open("xb")
        )
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        first, start = max(next_step - 1, 0), SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=first, session_log=start))
        config = yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True)
        self._write(
            Event(
                wall_time=time.time(), step=first, summary={"value": [_text("config", [[config]])]}
            )
        )
        _log.info("TensorBoard: %s", self._folder)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        """The line before the next one too, with what followed it: it takes the place of itself."""
        return step >= next_step - 1

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        numbers = {
            name: value
            for name, value in metrics.items()
            if type(value) in (int, float) and name != "step"
        }
        values: list[Any] = [
            {"tag": name, "simple_value": value} for name, value in numbers.items()
        ]
        if rollouts:
            columns, rows = as_table(rollouts)
            values.append(_text("rollouts", [columns, *rows]))
        self._write(Event(wall_time=time.time(), step=metrics["step"], summary={"value": values}))

    def finish(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()


def _text(tag: str, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A value that TensorBoard's text plugin shows as a table. It takes a cell for Markdown, with images that it
    fetches: four blanks before each line make it a text, whatever is in it."""
    from tensorboard.plugins.text.metadata import create_summary_metadata

    cells = [_literal(cell).encode("utf-8", "backslashreplace") for row in rows for cell in row]
    shape = {"dim": [{"size": len(rows)}, {"size": len(rows[0])}]}
    tensor = {"dtype": "DT_STRING", "string_val": cells, "tensor_shape": shape}
    return {"tag": tag, "metadata": create_summary_metadata(tag, ""), "tensor": tensor}


def _literal(cell: Any) -> str:
    text = "" if cell is None else f"{cell:.6g}" if type(cell) is float else str(cell)
    return "\n".join(f"    {line}" for line in text.split("\n"))
