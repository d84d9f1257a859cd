"""Looks at processes and stacks for the doctor, and at the time that is left to the job.

Reads /proc itself where psutil would count from the clock: psutil's start time of a process changes
when the clock is set, and two ranks could disagree about it. Imports no torch at its top.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

_log = logging.getLogger("grpo_spmd")
_PR_SET_PDEATHSIG = 1
# What torchrun sets for a rank, and start_session if torchrun has not.
LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# What torchrun sets besides begins so.
_LAUNCH_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
# A thread in one of these modules waits for other ranks.
_COLLECTIVE_MODULES = (
    "grpo_spmd.distributed.collectives",
    "grpo_spmd.distributed.session",
    "grpo_spmd.distributed.store",
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
_SQUEUE_TIMEOUT_S = 20
MAX_TEXT = 60_000  # characters of a traceback, or of a process's stacks
_MAX_PENDING = 10  # unfinished collectives in a report
_MAX_SPANS = 6  # of consecutive ranks in a line
# Frames of torch's Python code around the call that waits.
_MAX_WRAPPERS = 6


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that is no rank: without those of torchrun."""
    return {
        name: value
        for name, value in environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }


def end_with_parent(number: int, parent_pid: int | None = None) -> None:
    """Lets the kernel send this process signal `number` when the thread that started it ends; 0
    takes that back. Does nothing where the kernel is not Linux's.

    With `parent_pid` this process exits if its parent ended before this call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The signal is asked for first and the parent looked up after, so that no end goes unnoticed.
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(0)


@dataclass(frozen=True)
class RankProcess:
    """What a rank publishes about its process, so that another rank can look at it."""

    machine: str  # processes with the same one see each other in /proc
    host: str
    pid: int
    start: str  # as in read_stat; another process may get the same pid
    stacks_fd: int  # its file into which SIGUSR2 makes it write its stacks

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def this_process(stacks_fd: int) -> RankProcess:
    """Returns the record of this process."""
    pid = os.getpid()
    start = read_stat(pid)[1]
    machine = host_identity("pid")
    return RankProcess(machine, socket.gethostname(), pid, start=start, stacks_fd=stacks_fd)


def host_identity(namespace: str = "net") -> str:
    """Returns a text that processes of one boot of the kernel and one namespace have in common.

    A loopback address joins the processes of one "net", and those of one "pid" see each other in
    /proc.
    """
    boot_id = ""
    with suppress(OSError):  # a container may hide it
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{socket.gethostname()} {boot_id} {os.readlink(f'/proc/self/ns/{namespace}')}"


def free_port() -> int:
    """Returns a port of this host that nobody uses now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def process_state(process: RankProcess) -> Literal["gone", "stopped", "blocked", "running"]:
    state, start = read_stat(process.pid)
    if start != process.start or state in ("", "Z", "X"):
        return "gone"
    if state in ("T", "t"):
        return "stopped"
    return "blocked" if state == "D" else "running"


def read_stat(pid: int) -> tuple[str, str]:
    """Returns the state letter and the start time of a process, in ticks since boot.

    ("", "") if there is no such process, or no /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The name in brackets may hold anything, so the fields are counted from its end.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def next_rank(rank: int, ranks: Iterable[int]) -> list[int]:
    """Returns the rank after `rank` in the ring of `ranks`, or none if there is no other rank.

    So each rank is watched by one other.
    """
    return sorted(set(ranks) - {rank}, key=lambda peer: (peer < rank, peer))[:1]


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns [0, 1, 2, 5] as "ranks 0-2, 5", so that a line about 1,000 ranks can be read."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if not spans or spans[-1][-1] != rank - 1:
            spans.append([])
        spans[-1].append(rank)
    texts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    remark = f" and {len(texts) - _MAX_SPANS} more" if len(texts) > _MAX_SPANS else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(texts[:_MAX_SPANS])}{remark}"


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a thread's frames, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def in_debugger(frame: FrameType | None) -> bool:
    """Returns True if the thread with this innermost frame is at a debugger's prompt."""
    return any(_module(inner).startswith(_DEBUGGERS) for inner in frames(frame))


def waits_for(frame: FrameType | None) -> Literal["collective", "device", ""]:
    """Returns what a thread with this innermost frame waits for: other ranks, its GPU, or ""."""
    for number, inner in enumerate(frames(frame)):
        name = _module(inner)
        if name.startswith(("torch.distributed.", *_COLLECTIVE_MODULES)):
            return "collective"
        if number == 0 and name.startswith("torch.cuda"):
            return "device"
        if number > _MAX_WRAPPERS or not name.startswith(("torch.", "contextlib")):
            return ""
    return ""


def innermost_line(frame: FrameType | None) -> str:
    """Returns file, line and function of the innermost frame in our code or the user's."""
    library_paths = (
        "site-packages",
        f"{os.sep}lib{os.sep}python{sys.version_info.major}",
        "<frozen",
    )
    for inner in frames(frame):
        path = inner.f_code.co_filename
        is_library = any(text in path for text in library_paths)
        if not is_library and _module(inner) not in _COLLECTIVE_MODULES:
            return f"{path}:{inner.f_lineno} ({inner.f_code.co_name})"
    return ""


def stacks_of(threads: dict[int, FrameType], main_thread: int) -> str:
    """Returns the stacks of `threads` (as from sys._current_frames) as text.

    The calling thread is left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    # The main thread first.
    for thread in sorted(threads, key=lambda thread: thread != main_thread):
        if thread != threading.get_ident():
            stack = "".join(traceback.format_stack(threads[thread]))
            texts.append(f"thread {names.get(thread, thread)}:\n{stack}")
    return "\n".join(texts)[:MAX_TEXT]


def stacks_of_peer(process: RankProcess) -> str:
    """Returns the stacks of a process whose Python does not run, or "".

    SIGUSR2 makes it write them: faulthandler's signal handler is plain C.
    """
    path = Path(f"/proc/{process.pid}/fd/{process.stacks_fd}")
    deadline = time.monotonic() + _STACKS_S
    stacks = ""
    with suppress(OSError):
        os.kill(process.pid, signal.SIGUSR2)
        # On a busy machine it writes late, and in pieces.
        while time.monotonic() < deadline:
            time.sleep(0.2)
            previous = stacks
            stacks = path.read_text(errors="replace")
            if stacks and stacks == previous:
                break
    return stacks[-MAX_TEXT:]


def flight_recorder() -> tuple[dict[str, int], str]:
    """Returns the number of collectives enqueued by process group, and the last ones as text.

    torch records them if TORCH_FR_BUFFER_SIZE is set.
    """
    from torch._C import _distributed_c10d as c10d

    enqueued: dict[str, int] = {}
    pending = []
    # gloo's and NCCL's. A build may lack either.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        # These functions are private and may change, but the report must be written.
        with suppress(Exception):
            for entry in json.loads(getattr(c10d, name)()).get("entries", []):
                group = ":".join(entry["process_group"])
                number = entry["collective_seq_id"]
                enqueued[group] = max(enqueued.get(group, 0), number)
                if not entry["retired"]:
                    text = f"{entry['profiling_name']} number {number} of group {group}"
                    pending.append(f"not finished: {text} ({entry['state']})")
    counts = [f"group {group}: {number} collectives enqueued" for group, number in enqueued.items()]
    return enqueued, "; ".join(counts + pending[-_MAX_PENDING:])


def seconds_left(max_time_s: float | None) -> float | None:
    """Returns the time left to this job: of `max_time_s`, else of the Slurm job, else None."""
    if max_time_s is not None:
        return max_time_s - seconds_since_launch()
    end_time = os.environ.get("SLURM_JOB_END_TIME", "")
    if end_time.isdecimal():
        return int(end_time) - time.time()
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    command = ["squeue", "-h", "-j", job, "-o", "%L"]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        text = str(error)
    time_s = parse_time_left(text)
    if time_s is None and text.strip() != "UNLIMITED":
        _log.warning(
            "the end of the Slurm job is not known (squeue said %r); "
            "without training.max_time_s only signals stop the run",
            text,
        )
    return time_s


def parse_time_left(text: str) -> int | None:
    """Returns the seconds in squeue's %L, [[days-]hours:]minutes:seconds.

    None for UNLIMITED, INVALID, NOT_SET and everything else.
    """
    match = re.match(r"\s*(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)\s*$", text, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def seconds_since_launch() -> float:
    """Returns the time since torchrun was started, else since this process was.

    A restart of the ranks by torchrun gives the job no new time.
    """
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    ticks = int(read_stat(pid)[1])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
