"""What is left of the job's time: by the config, or by Slurm's word. Imports no torch."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time

from grpo_spmd.distributed.processes import read_stat

_log = logging.getLogger("grpo_spmd")
_SQUEUE_TIMEOUT_S = 20


def seconds_left(max_time_s: float | None) -> float | None:
    """Of this job; None where nothing says so."""
    if max_time_s is not None:
        return max_time_s - seconds_since_launch()
    job, end = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal():
        return int(end) - time.time()
    if job is None:
        return None
    command = ["squeue", "-h", "-j", job, "-o", "%L"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        what = "the end of the Slurm job is not known (%s); without training.max_time_s only signals stop the run"
        _log.warning(what, error)
        return None
    left = parse_time_left(said)
    if left is None and said.strip() != "UNLIMITED":
        what = "the end of the Slurm job is not known: squeue said %r; without training.max_time_s only signals stop it"
        _log.warning(what, said)
    return left


def parse_time_left(text: str) -> int | None:
    """Seconds of squeue's %L, [[days-]hours:]minutes:seconds; None for UNLIMITED, INVALID, NOT_SET and all else."""
    found = re.match(r"\s*(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)\s*$", text, re.ASCII)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def seconds_since_launch() -> float:
    """Since torchrun was started, as its restarts of the ranks give no new time; without it, since this process was."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    ticks = int(read_stat(pid)[1])  # since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
