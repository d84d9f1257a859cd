"""trackio: Hugging Face's tracker, a SQLite file on this machine unless its environment variables name a server."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo_spmd.observe.trackers.completions import ShownRollout
from grpo_spmd.observe.trackers.feed import Tracker

_log = logging.getLogger("grpo_spmd")


class TrackioRun(Tracker):
    """trackio writes behind our back twice a second, so that a kill takes lines that it had taken: what a launch finds
    in its file, and not our own note, says what it lacks. Rollouts are its traces, whose text it does not interpret, as
    it does that of tables."""

    name, title = "trackio", "trackio"

    def __init__(self, run_dir: Path, project: str, config: dict[str, Any]) -> None:
        """`config`: what trackio shows as the run's."""
        self._run_dir, self._project, self._config = run_dir, project, config
        self._there: set[tuple[int, bool]] | None = (
            None  # lines that trackio has: step, and whether of an evaluation
        )

    def start(self, run_id: str, next_step: int) -> None:
        import trackio

        name = f"{self._run_dir.name}-{run_id[:6]}"  # by which it finds a run again: folders may have one name
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(
            project=self._project, name=name, config=self._config, resume="allow", **quiet
        )
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            self._there = _stored(self._project, self._run.id)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        if self._there is None:
            return super().lacks(step, is_evaluation, next_step)
        return (step, is_evaluation) not in self._there

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        import trackio

        values = {
            name: value for name, value in metrics.items() if name != "step" and value is not None
        }
        if rollouts:
            values["rollouts"] = [
                trackio.Trace(each.messages, metadata=_facts(each)) for each in rollouts
            ]
        self._run.log(values, step=metrics["step"])

    def finish(self) -> None:
        import trackio

        trackio.finish()


def _facts(rollout: ShownRollout) -> dict[str, Any]:
    return {
        "reward": rollout.reward,
        **{f"reward/{name}": value for name, value in rollout.rewards.items()},
        "advantage": rollout.advantage,
        "finish_reason": rollout.finish_reason,
        **({} if rollout.status is None else {"status": rollout.status}),
        "answer": rollout.answer,
        "position": rollout.position,
        "sample": rollout.sample,
    }


def _stored(project: str, run_id: str) -> set[tuple[int, bool]] | None:
    """By the schema that trackio documents for queries; None where there is no such file, or it is another's."""
    from trackio.sqlite_storage import SQLiteStorage

    path = SQLiteStorage.get_project_db_path(project)
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)
        ) as connection:
            query = "SELECT step, substr(metrics, 1, 7) FROM metrics WHERE run_id = ?"
            found = connection.execute(query, (run_id,))
            return {(step, start in (b'{"eval/', '{"eval/')) for step, start in found}
    except sqlite3.Error as error:
        _log.debug("trackio's %s: %s", path, error)
        return None
