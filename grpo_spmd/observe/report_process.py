"""report.html while the run goes on: `python -m grpo_spmd.report RUN` in a process of its own,
which can take nothing from the run that it would miss, and ends with it.

python -m grpo_spmd.observe.report_process PARENT_PID NICE MODULE ARGUMENT ...     (by
ReportProcess)
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import grpo_spmd

_log = logging.getLogger("grpo_spmd")
_PR_SET_PDEATHSIG = 1
_LONGEST_S, _LAST_S = 600.0, 45.0  # of one report; of the one at the end, for which the run waits
_NICE, _LAST_NICE = (
    19,
    5,
)  # nobody waits for the first; of the last one the report itself sees that it is waited for
_LOOK_S, _KILLED_S = 0.1, 5.0  # how often it is looked at; what a killed one gets to be gone
MOST_MEMORY, MOST_FILE = 4 << 30, 1 << 28  # bytes of address space, and of a file that it writes
# What tells a process that it is a rank, or has a GPU: a report is neither.
_OF_RANKS = (
    "TORCHELASTIC_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "NCCL_",
    "PET_",
    "TORCH_",
    "VLLM_",
    "CUDA_",
    "LOCAL_",
)
_OF_RANKS_WHOLE = ("RANK", "WORLD_SIZE", "PYTHONBREAKPOINT", "PYTHONSTARTUP")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ReportProcess:
    """Rank 0's side: a thread that starts a report when the run has come to each `every_steps`-th
    step, never two at once (steps that come while one is made start none), and a last one at the
    end. The kernel kills the process when that thread ends, and with it when the run is killed.
    What goes wrong costs a warning."""

    def __init__(self, run_dir: Path, every_steps: int, module: str = "grpo_spmd.report") -> None:
        self._run_dir, self._every_steps, self._module = run_dir.absolute(), every_steps, module
        self._news, self._ended = threading.Event(), threading.Event()
        self._makes_last = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def step_written(self, step: int) -> None:
        """Takes microseconds."""
        if step % self._every_steps == 0:
            self._news.set()

    def end(self, makes_last: bool) -> None:
        """No step comes any more; what is being made is older than the last one."""
        self._makes_last = makes_last
        self._ended.set()
        self._news.set()

    def finish(self, timeout_s: float) -> None:
        """After `end`: wait for the last one, up to `timeout_s`, or for the end of the one under
        way."""
        self._thread.join(max(timeout_s, 0) + _KILLED_S)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._news.wait()
                if not self._ended.is_set():
                    self._make(_LONGEST_S, is_last=False)
                    self._news.clear()
            if self._makes_last:
                self._make(_LAST_S, is_last=True)
        except Exception as error:
            _log.warning("no report is made any more: %s: %s", type(error).__name__, error)

    def _make(self, seconds: float, is_last: bool) -> None:
        log = self._run_dir / "logs" / "report.log"
        log.parent.mkdir(exist_ok=True)
        nice = str(_LAST_NICE if is_last else _NICE)
        command = [
            sys.executable,
            "-P",
            "-m",
            __name__,
            str(os.getpid()),
            nice,
            self._module,
            str(self._run_dir),
        ]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(log, flags, 0o666), "wb") as file:
            # A group of its own: Ctrl-C at a terminal is for the run, which ends it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,
                env=_environment(os.environ),
            )
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until:
            if not is_last and self._ended.is_set():
                break
            time.sleep(_LOOK_S)
        how = f"exit code {process.returncode}"
        if process.returncode is None:
            how = f"it took more than {seconds:.0f} s"
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it waits for a dead file server
                process.wait(_KILLED_S)
            if not is_last and self._ended.is_set():
                return
        if process.returncode and not self._has_failed:  # said once, until it goes well again
            _log.warning("report.html is not made (%s): see %s", how, log)
        self._has_failed = process.returncode != 0


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: value
        for name, value in variables.items()
        if not name.startswith(_OF_RANKS) and name not in _OF_RANKS_WHOLE
    }
    root = str(Path(grpo_spmd.__file__).resolve().parents[1])
    paths = [root, *filter(None, [variables.get("PYTHONPATH")])]
    return (
        found
        | dict.fromkeys(_ONE_THREAD, "1")
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    )


def _be_harmless(parent_pid: int, nice: int) -> None:
    """End with the parent's thread, and take of the machine only what nobody else wants."""
    with suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before we could ask to be told
        os._exit(0)
    os.nice(nice)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, this goes first and not the run
    for what, most in (
        (resource.RLIMIT_AS, MOST_MEMORY),
        (resource.RLIMIT_FSIZE, MOST_FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, bound))


if __name__ == "__main__":
    _be_harmless(int(sys.argv[1]), int(sys.argv[2]))
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
