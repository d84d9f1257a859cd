"""Followers of metrics.jsonl on rank 0: trackers, and the process that makes report.html.

The run waits for none of them until its end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe.report_process import ReportProcess
from grpo_spmd.observe.trackers.feed import Tracker, TrackerFeed
from grpo_spmd.observe.trackers.tensorboard_run import TensorboardRun
from grpo_spmd.observe.trackers.trackio_run import TrackioRun
from grpo_spmd.observe.trackers.wandb_run import WandbRun

# Seconds for all followers together: at the end of a run, and of one that was preempted.
FINISH_S = 60.0
STOPPED_S = 5.0

_open: weakref.WeakSet[Followers] = weakref.WeakSet()


class Followers:
    def __init__(self, feeds: Sequence[TrackerFeed], report: ReportProcess | None) -> None:
        self._feeds = feeds
        self._report = report
        _open.add(self)

    def line_written(self, step: int, is_evaluation: bool) -> None:
        """Tells the followers of a new line. Takes microseconds."""
        for feed in self._feeds:
            feed.line_written()
        if self._report is not None and not is_evaluation:
            self._report.step_written(step)

    def finish(self, has_ended: bool) -> None:
        """Ends the followers, which finish side by side within 60 s, or 5 s if the run was
        preempted."""
        _open.discard(self)
        deadline = time.monotonic() + (FINISH_S if has_ended else STOPPED_S)
        # all of them are told first, so that they finish at the same time
        for feed in self._feeds:
            feed.end()
        if self._report is not None:
            self._report.end(makes_last=has_ended)
        for feed in self._feeds:
            feed.finish(deadline - time.monotonic())
        if self._report is not None:
            self._report.finish(deadline - time.monotonic())


def finish_all() -> None:
    """Ends the followers of a run that failed in a process which goes on."""
    for followers in list(_open):
        followers.finish(has_ended=False)


def open_followers(
    run_dir: Path, options: LoggingConfig, config: dict[str, Any]
) -> Followers | None:
    """Returns the followers that the options ask for, or None; `config` is what trackers show as
    the run's."""
    trackers: dict[str, Tracker] = {
        "wandb": WandbRun(run_dir, options, config),
        "tensorboard": TensorboardRun(run_dir, config),
        "trackio": TrackioRun(run_dir, options.wandb_project, config),
    }
    every_steps = options.trackers_rollouts_every_steps
    feeds = [TrackerFeed(run_dir, trackers[name], every_steps) for name in options.tracker_names]
    report = None
    if options.report_every_steps:
        report = ReportProcess(run_dir, options.report_every_steps)
    return Followers(feeds, report) if feeds or report else None
