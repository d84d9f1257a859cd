"""trackio as a tracker, Hugging Face's: a SQLite file on this machine unless its environment
variables name a server."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo_spmd.observe.trackers.feed import ShownRollout, Tracker

_log = logging.getLogger("grpo_spmd")


class TrackioRun(Tracker):
    """trackio writes in the background twice a second, so a kill takes lines that it had accepted.

    So what a launch finds in its file, and not our own note, tells what it lacks. Rollouts become
    its traces, whose text it does not interpret; it does interpret that of tables.
    """

    name = "trackio"
    title = "trackio"

    def __init__(self, run_dir: Path, project: str, config: dict[str, Any]) -> None:
        """`config` is what trackio shows as the run's."""
        self._run_dir = run_dir
        self._project = project
        self._config = config
        # (step, is_evaluation) of the lines that trackio has; None if that is not known
        self._stored_lines: set[tuple[int, bool]] | None = None

    def start(self, run_id: str, next_step: int) -> None:
        import trackio

        self._run = trackio.init(
            project=self._project,
            # folders of two runs may have one name
            name=f"{self._run_dir.name}-{run_id[:6]}",
            config=self._config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            self._stored_lines = _read_stored_lines(self._project, self._run.id)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        if self._stored_lines is None:
            return super().lacks(step, is_evaluation, next_step)
        return (step, is_evaluation) not in self._stored_lines

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
    """Reads trackio's file by the schema that it documents; None if there is none or it is
    different."""
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
