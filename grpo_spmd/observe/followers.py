"""Whoever follows metrics.jsonl on rank 0: trackers, and the process that makes report.html. None of them is waited
for while the run goes on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.config.schema import LoggingConfig

if TYPE_CHECKING:  # where they are off they are not even imported
    from grpo_spmd.observe.report_process import ReportProcess
    from grpo_spmd.observe.trackers.feed import Tracker, TrackerFeed

FINISH_S, STOPPED_S = (
    60.0,
    5.0,
)  # for all of them together: at the end of a run, and where it was preempted


_open: weakref.WeakSet[Followers] = weakref.WeakSet()


class Followers:
    def __init__(self, feeds: Sequence[TrackerFeed], report: ReportProcess | None) -> None:
        self._feeds, self._report = feeds, report
        _open.add(self)

    def line_written(self, step: int, is_evaluation: bool) -> None:
        """Takes microseconds."""
        for feed in self._feeds:
            feed.line_written()
        if self._report is not None and not is_evaluation:
            self._report.step_written(step)

    def finish(self, has_ended: bool) -> None:
        """No line comes any more. They work side by side and have 60 s, or 5 s where the run has no time."""
        _open.discard(self)
        until = time.monotonic() + (FINISH_S if has_ended else STOPPED_S)
        for feed in self._feeds:
            feed.end()
        if self._report is not None:
            self._report.end(makes_last=has_ended)
        for feed in self._feeds:
            feed.finish(until - time.monotonic())
        if self._report is not None:
            self._report.finish(until - time.monotonic())


def finish_all() -> None:
    """Of a run that failed in a process which goes on."""
    for followers in list(_open):
        followers.finish(has_ended=False)


def open_followers(
    run_dir: Path, options: LoggingConfig, config: dict[str, Any]
) -> Followers | None:
    """`config`: what trackers show as the run's. None where nobody is asked for."""
    feeds, report = [], None
    for name in options.tracker_names:
        from grpo_spmd.observe.trackers.feed import TrackerFeed

        feeds.append(
            TrackerFeed(
                run_dir,
                _tracker(name, run_dir, options, config),
                options.trackers_rollouts_every_steps,
            )
        )
    if options.report_every_steps:
        from grpo_spmd.observe.report_process import ReportProcess

        report = ReportProcess(run_dir, options.report_every_steps)
    return Followers(feeds, report) if feeds or report else None


def _tracker(name: str, run_dir: Path, options: LoggingConfig, config: dict[str, Any]) -> Tracker:
    if name == "wandb":
        from grpo_spmd.observe.trackers.wandb_run import WandbRun

        return WandbRun(run_dir, options, config)
    if name == "tensorboard":
        from grpo_spmd.observe.trackers.tensorboard_run import TensorboardRun

        return TensorboardRun(run_dir, config)
    from grpo_spmd.observe.trackers.trackio_run import TrackioRun

    return TrackioRun(run_dir, options.wandb_project, config)
