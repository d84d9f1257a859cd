"""Looking at processes and stacks: /proc, Python frames, torch's flight recorder. Imports no torch at its top."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

# Whoever is in one of these waits for other ranks.
_COLLECTIVE_MODULES = tuple(
    f"grpo_spmd.distributed.{name}" for name in ("collectives", "session", "store")
)
_DEBUGGERS = (
    "pdb",
    "bdb",
    "IPython.terminal",
    "IPython.core.debugger",
    "pudb",
    "pydevd",
    "_pydevd_bundle",
    "debugpy",
)
_STACKS_S = 2.0
MAX_TEXT = 60_000  # characters of a traceback, or of a process's stacks


@dataclass(frozen=True)
class RankProcess:
    """What a rank says of its process, so that another rank can look at it from outside."""

    machine: str  # two processes of one machine see each other in /proc
    host: str
    pid: int
    start: str  # as read_stat has it: another process may get the number
    stacks_fd: int  # its own file into which SIGUSR2 makes it write its stacks

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def this_process(stacks_fd: int) -> RankProcess:
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:  # not Linux, or hidden by the container: nobody's peer
        machine = f"{socket.gethostname()}/{os.getpid()}"
    return RankProcess(
        machine, socket.gethostname(), os.getpid(), read_stat(os.getpid())[1], stacks_fd
    )


def process_state(process: RankProcess) -> Literal["gone", "stopped", "blocked", "running"]:
    state, start = read_stat(process.pid)
    if start != process.start or state in ("", "Z", "X"):
        return "gone"
    return "stopped" if state in ("T", "t") else "blocked" if state == "D" else "running"


def read_stat(pid: int) -> tuple[str, str]:
    """State letter and start time, in ticks since boot; ("", "") where there is no such process, or no /proc."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        )  # the name before may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]


def next_rank(rank: int, ranks: Iterable[int]) -> list[int]:
    """The one after `rank` in the ring of `ranks`, or none: each rank is looked after by one other."""
    others = sorted(other for other in ranks if other != rank)
    return [next((other for other in others if other > rank), others[0])] if others else []


def frames(frame: FrameType | None) -> Iterator[FrameType]:  # the innermost first
    while frame is not None:
        yield frame
        frame = frame.f_back


def in_debugger(frame: FrameType | None) -> bool:
    return any(
        inner.f_globals.get("__name__", "").startswith(_DEBUGGERS) for inner in frames(frame)
    )


def waits_for(frame: FrameType | None) -> Literal["collective", "device", ""]:
    """What a thread with this innermost frame waits for: other ranks, its GPU, or nobody that we know of."""
    for number, inner in enumerate(frames(frame)):
        name = inner.f_globals.get("__name__", "")
        if name.startswith(("torch.distributed.", *_COLLECTIVE_MODULES)):
            return "collective"
        if number == 0 and name.startswith("torch.cuda"):
            return "device"
        if number > 6 or not name.startswith(("torch.", "contextlib")):
            return ""
    return ""


def innermost_line(frame: FrameType | None) -> str:
    """File, line and function of the innermost frame that is not torch's, vLLM's or the standard library's."""
    library = ("site-packages", f"{os.sep}lib{os.sep}python{sys.version_info.major}", "<frozen")
    for inner in frames(frame):
        name = inner.f_code.co_filename
        if (
            not any(part in name for part in library)
            and inner.f_globals.get("__name__") not in _COLLECTIVE_MODULES
        ):
            return f"{name}:{inner.f_lineno} ({inner.f_code.co_name})"
    return ""


def stacks_of(threads: dict[int, FrameType], main_thread: int) -> str:
    """As text. `threads`: as sys._current_frames has them; the calling one is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threads.get(main_thread)
    texts = [
        "main thread:\n"
        + ("".join(traceback.format_stack(main)) if main else "  (no Python frame)\n")
    ]
    for thread, frame in threads.items():
        if thread not in (main_thread, threading.get_ident()):
            texts.append(
                f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
            )
    return "\n".join(texts)[:MAX_TEXT]


def stacks_of_peer(process: RankProcess) -> str:
    """Of one whose Python does not run: the handler of faulthandler is plain C. "" where that does not help either."""
    path, stacks, until = (
        Path(f"/proc/{process.pid}/fd/{process.stacks_fd}"),
        "",
        time.monotonic() + _STACKS_S,
    )
    with suppress(OSError):
        os.kill(process.pid, signal.SIGUSR2)
        while time.monotonic() < until:  # a busy machine lets it write late, and in pieces
            time.sleep(0.2)
            before, stacks = stacks, path.read_text(errors="replace")
            if stacks and stacks == before:
                break
    return stacks[-MAX_TEXT:]


def flight_recorder() -> tuple[dict[str, int], str]:
    """Collectives enqueued by process group, and the last of each, where torch records them (TORCH_FR_BUFFER_SIZE)."""
    from torch._C import _distributed_c10d as c10d

    enqueued, pending = dict[str, int](), list[str]()
    for name in (
        "_dump_fr_trace_json",
        "_dump_nccl_trace_json",
    ):  # gloo's and NCCL's; either may be missing in a build
        with suppress(
            Exception
        ):  # of private functions nothing is certain, and the report must be written
            for entry in json.loads(getattr(c10d, name)()).get("entries", []):
                group, number = ":".join(entry["process_group"]), entry["collective_seq_id"]
                enqueued[group] = max(enqueued.get(group, 0), number)
                if not entry["retired"]:
                    pending.append(
                        f"{entry['profiling_name']} number {number} of group {group} ({entry['state']})"
                    )
    last = [
        f"group {group}: {number} collectives enqueued"
        for group, number in sorted(enqueued.items())
    ]
    return enqueued, "; ".join(last + [f"not finished: {text}" for text in pending[-10:]])


# What is left of the job's time: by the config, or by Slurm's word. Imports no torch.


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
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S, check=True
        ).stdout
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
