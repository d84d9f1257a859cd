"""Starts and ends the followers of metrics.jsonl on rank 0: trackers and the report.

A follower reads metrics.jsonl while the run writes it. The run waits for followers only at its end,
and none of them can make it fail. A tracker runs in a thread (trackers.py). report.html is
made in a process of its own, which has limits of memory, size and time, and ends with the run.
ReportProcess starts that process as
    python -m grpo_spmd.observe.followers PARENT_PID NICE MODULE ARGUMENT ...
"""

from __future__ import annotations

import logging
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_spmd
from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.distributed.processes import end_with_parent, without_launch
from grpo_spmd.observe.trackers import TensorboardRun, Tracker, TrackerFeed, TrackioRun, WandbRun

_log = logging.getLogger("grpo_spmd")
# The seconds that a report may take, and the niceness of its process. For the last report both are
# lower, because the run waits for that one.
_MAX_S, _LAST_MAX_S = 600.0, 45.0
_NICE, _LAST_NICE = 19, 5
_POLL_S = 0.1
# Seconds that a killed report gets to end.
_KILLED_S = 5.0
# Bytes of address space, and of a file that it writes.
MAX_MEMORY = 4 << 30
MAX_FILE = 1 << 28
_LIMITS = {
    resource.RLIMIT_AS: MAX_MEMORY,
    resource.RLIMIT_FSIZE: MAX_FILE,
    resource.RLIMIT_CORE: 0,
}
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# How many seconds all followers together get at the end of a run, and if it was preempted.
FINISH_S = 60.0
STOPPED_S = 5.0

# Followers of runs that have not ended, for `finish_all`.
_open: weakref.WeakSet[Followers] = weakref.WeakSet()


class ReportProcess:
    """Makes report.html every `every_steps` steps and at the end, in a thread on rank 0.

    The thread starts a process for each report. There are never two at once: a step that ends while
    a report is made starts no other one. The kernel kills the report's process when the thread
    ends, so also when the run is killed. A failure is logged as a warning and does not stop the
    run.
    """

    def __init__(self, run_dir: Path, every_steps: int, module: str = "grpo_spmd.report") -> None:
        """Starts the thread. `module` is what makes the report; python -m runs it."""
        self._run_dir = run_dir.absolute()
        self._every_steps = every_steps
        self._module = module
        self._news = threading.Event()
        self._ended = threading.Event()
        self._makes_last = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def line_written(self, step: int, is_evaluation: bool) -> None:
        """Wakes the thread if a report is due after this line. Takes microseconds."""
        if step % self._every_steps == 0 and not is_evaluation:
            self._news.set()

    def end(self, has_ended: bool) -> None:
        """Makes the thread kill a report in progress, since that lacks the last steps.

        If `has_ended` (the run was not preempted and did not fail), the thread makes one last
        report.
        """
        self._makes_last = has_ended
        self._ended.set()
        self._news.set()

    def finish(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the last report of the run, which `end` has ordered.

        If `end` has killed the process that writes the report, waits a few seconds for its end."""
        self._thread.join(max(timeout_s, 0) + _KILLED_S)

    def _run(self) -> None:
        """Makes a report whenever one is due, and the last one; the body of the thread."""
        try:
            while not self._ended.is_set():
                self._news.wait()
                if not self._ended.is_set():
                    self._make(is_last=False)
                    self._news.clear()
            if self._makes_last:
                self._make(is_last=True)
        except Exception as error:
            _log.warning("no report is made any more: %s: %s", type(error).__name__, error)

    def _make(self, is_last: bool) -> None:
        """Makes one report and waits for it. Kills it if it takes too long or the run ends.

        The last report is not killed when the run ends, and has a shorter time limit.
        """
        max_s = _LAST_MAX_S if is_last else _MAX_S
        log = self._run_dir / "logs" / "report.log"
        process = self._start(log, _LAST_NICE if is_last else _NICE)
        deadline = time.monotonic() + max_s
        while process.poll() is None and time.monotonic() < deadline:
            if not is_last and self._ended.is_set():
                break
            time.sleep(_POLL_S)
        failure = f"exit code {process.returncode}"
        if process.returncode is None:
            failure = f"it took more than {max_s:.0f} s"
            process.kill()
            # a process that waits for a dead file server does not end even when it is killed
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
            if not is_last and self._ended.is_set():
                return
        # warn only of the first of several failures in a row
        if process.returncode and not self._has_failed:
            _log.warning("report.html is not made (%s): see %s", failure, log)
        self._has_failed = process.returncode != 0

    def _start(self, log: Path, nice: int) -> subprocess.Popen[bytes]:
        """Starts and returns the process of one report, whose output goes to the file `log`.

        The process is no rank: it gets no GPU, one thread, and none of torchrun's variables.
        """
        log.parent.mkdir(exist_ok=True)
        arguments = [str(os.getpid()), str(nice), self._module, str(self._run_dir)]
        env = without_launch(os.environ)
        paths = [str(Path(grpo_spmd.__file__).resolve().parents[1]), env.get("PYTHONPATH", "")]
        env |= {
            **dict.fromkeys(_THREAD_COUNTS, "1"),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # a process group of its own: Ctrl-C must reach only the run, which ends the report
                process_group=0,
                env=env,
            )


def _limit_own_process(parent_pid: int, nice: int) -> None:
    """Makes this process end with the thread that started it, and sets its priority and limits.

    Called in the process of a report, so that it can do the run no harm. `parent_pid` is the run's
    process on rank 0.
    """
    end_with_parent(signal.SIGKILL, parent_pid)
    os.nice(nice)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # if memory runs out, the kernel kills this process first and not the run
        file.write("1000")
    for kind, limit in _LIMITS.items():
        # keep a hard limit that is lower already; -1 means no limit
        if not 0 <= resource.getrlimit(kind)[1] < limit:
            resource.setrlimit(kind, (limit, limit))


@dataclass(eq=False)
class Followers:
    """The followers of one run on rank 0: the trackers' feeds and the report's thread."""

    followers: Sequence[TrackerFeed | ReportProcess]

    def __post_init__(self) -> None:
        """Adds this object to those that `finish_all` ends."""
        _open.add(self)

    def line_written(self, step: int, is_evaluation: bool) -> None:
        """Tells each follower that metrics.jsonl has a new line. Takes microseconds."""
        for follower in self.followers:
            follower.line_written(step, is_evaluation)

    def finish(self, has_ended: bool) -> None:
        """Ends all followers at the same time, within 60 s, or 5 s if the run was preempted."""
        _open.discard(self)
        deadline = time.monotonic() + (FINISH_S if has_ended else STOPPED_S)
        # all of them are told first, so that they finish at the same time
        for follower in self.followers:
            follower.end(has_ended)
        for follower in self.followers:
            follower.finish(deadline - time.monotonic())


def finish_all() -> None:
    """Ends the followers of all runs in this process that have not ended theirs.

    Called after a failed run that is embedded in the caller's process (a script, a notebook), which
    goes on.
    """
    for followers in list(_open):
        followers.finish(has_ended=False)


def open_followers(
    run_dir: Path, options: LoggingConfig, config: dict[str, Any]
) -> Followers | None:
    """Starts and returns the helpers that follow the run's metrics file: trackers, and the report.

    Returns None if `options` (the config's section `logging`) asks for none. Trackers show `config`
    as the config of the run.
    """
    trackers: dict[str, Tracker] = {
        "wandb": WandbRun(run_dir, options, config),
        "tensorboard": TensorboardRun(run_dir, config),
        "trackio": TrackioRun(run_dir, options.wandb_project, config),
    }
    every_steps = options.trackers_rollouts_every_steps
    followers: list[TrackerFeed | ReportProcess] = [
        TrackerFeed(run_dir, trackers[name], every_steps) for name in options.tracker_names
    ]
    if options.report_every_steps:
        followers.append(ReportProcess(run_dir, options.report_every_steps))
    return Followers(followers) if followers else None


if __name__ == "__main__":
    _limit_own_process(int(sys.argv[1]), int(sys.argv[2]))
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
