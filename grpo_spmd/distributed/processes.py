"""Functions about processes and stacks, for the doctor, and about the time that is left to the job.

The start time of a process is read from /proc, in ticks since boot. psutil computes it from the
wall clock: when the clock is set, its value changes, and two ranks could disagree about it. Imports
no torch at its top.
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
# The variables that torchrun sets for a rank; start_session sets them where torchrun has not.
LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# The beginnings of the other variables that torchrun sets.
_LAUNCH_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
# A thread in one of these modules waits for other ranks.
_COLLECTIVE_MODULES = (
    "grpo_spmd.distributed.collectives",
    "grpo_spmd.distributed.session",
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
_STACKS_S = 2.0  # the longest wait for another process's stacks
_SQUEUE_TIMEOUT_S = 20
MAX_TEXT = 60_000  # characters of a traceback, or of a process's stacks
_MAX_PENDING = 10  # unfinished collectives in a report
_MAX_SPANS = 6  # spans of consecutive ranks in a line
# A call of torch that waits goes through at most so many frames of torch's own Python code.
_MAX_WRAPPERS = 6


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` without torchrun's variables, for a child process that is not a rank."""
    return {
        name: value
        for name, value in environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }


def end_with_parent(number: int, parent_pid: int | None = None) -> None:
    """Makes the kernel send a signal to this process when the thread that started it ends.

    `number` is the signal; 0 cancels an earlier call. Does nothing on systems other than Linux. If
    `parent_pid` is given and is no longer this process's parent, because it has ended already, this
    process exits at once.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # Checked after the call above, so that a parent that ends in between is noticed too.
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(0)


@dataclass(frozen=True)
class RankProcess:
    """What a rank publishes about its process, so that another rank can look at it."""

    machine: str  # processes with an equal value see each other in /proc
    host: str
    pid: int
    start: str  # the start time from read_stat, since another process may get the pid later
    stacks_fd: int  # the descriptor to which the process writes its stacks at SIGUSR2

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def this_process(stacks_fd: int) -> RankProcess:
    """Returns the record of this process, to be published."""
    pid = os.getpid()
    start = read_stat(pid)[1]
    machine = host_identity("pid")
    return RankProcess(machine, socket.gethostname(), pid, start=start, stacks_fd=stacks_fd)


def host_identity(namespace: str = "net") -> str:
    """Returns a text that identifies the kernel's boot and a Linux namespace of this process.

    `namespace` is the type of the namespace. Processes with the same text for "net" can reach each
    other by the loopback address. Processes with the same text for "pid" see each other in /proc.
    """
    boot_id = ""
    with suppress(OSError):  # a container may hide it
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot_id} {os.readlink(f'/proc/self/ns/{namespace}')}"


def free_port() -> int:
    """Returns a port of this host that is free at this moment."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def process_state(process: RankProcess) -> Literal["gone", "stopped", "blocked", "running"]:
    """Returns the state of a process on this machine; "blocked" is a wait in the kernel."""
    state, start = read_stat(process.pid)
    if start != process.start or state in ("", "Z", "X"):
        return "gone"
    if state in ("T", "t"):
        return "stopped"
    return "blocked" if state == "D" else "running"


def read_stat(pid: int) -> tuple[str, str]:
    """Returns the state letter of a process, and its start time in ticks since boot.

    Returns ("", "") if there is no such process, or no /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    # The process's name, in parentheses, may contain anything: fields are counted from its end.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def next_rank(rank: int, ranks: Iterable[int]) -> list[int]:
    """Returns a list of the rank after `rank` in the ring of `ranks`; [] if there is no other.

    If each rank watches the next one in the ring, each is watched by exactly one rank.
    """
    return sorted(set(ranks) - {rank}, key=lambda peer: (peer < rank, peer))[:1]


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as a short text: "ranks 0-2, 5" for [0, 1, 2, 5].

    So a line about 1,000 ranks can be read.
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if not spans or spans[-1][-1] != rank - 1:
            spans.append([])
        spans[-1].append(rank)
    texts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    if len(texts) > _MAX_SPANS:
        texts[_MAX_SPANS:] = [f"and {len(texts) - _MAX_SPANS} more"]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(texts)}"


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a thread's stack; `frame` is the innermost and comes first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    """Returns the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def in_debugger(frame: FrameType | None) -> bool:
    """Returns True if the thread with this innermost frame is at a debugger's prompt."""
    return any(_module(inner).startswith(_DEBUGGERS) for inner in frames(frame))


def waits_for(frame: FrameType | None) -> Literal["collective", "device", ""]:
    """Returns what a thread waits for: "collective" (other ranks), "device" (its GPU) or "".

    `frame` is the thread's innermost frame. A thread waits for other ranks if it is inside
    torch.distributed or our own collectives. The call may go through frames of other parts of
    torch, at most _MAX_WRAPPERS of them. A copy from the GPU, such as .item(), has no frame of
    torch.cuda and gives "".
    """
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
    """Returns file, line and function of a thread's innermost frame in our code or the user's.

    Frames of libraries, and of our own modules of collectives, are skipped. Returns "" if no frame
    is left.
    """
    for inner in frames(frame):
        path = inner.f_code.co_filename
        is_library = re.search("site-packages|/lib/python3|<frozen", path)
        if not is_library and _module(inner) not in _COLLECTIVE_MODULES:
            return f"{path}:{inner.f_lineno} ({inner.f_code.co_name})"
    return ""


def stacks_of(threads: dict[int, FrameType], main_thread: int) -> str:
    """Returns the stacks of threads as text: the main thread first, without the calling thread.

    `threads` has the innermost frame of each thread by its ident, as sys._current_frames gives
    them.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    # False sorts before True.
    for thread in sorted(threads, key=lambda thread: thread != main_thread):
        if thread != threading.get_ident():
            stack = "".join(traceback.format_stack(threads[thread]))
            texts.append(f"thread {names.get(thread, thread)}:\n{stack}")
    return "\n".join(texts)[:MAX_TEXT]


def stacks_of_peer(process: RankProcess) -> str:
    """Returns the stacks of another rank's process on this machine; "" if it writes none.

    SIGUSR2 makes that process write its stacks. That works even if its Python does not run, since
    faulthandler's signal handler is plain C.
    """
    path = Path(f"/proc/{process.pid}/fd/{process.stacks_fd}")
    deadline = time.monotonic() + _STACKS_S
    stacks = ""
    with suppress(OSError):
        os.kill(process.pid, signal.SIGUSR2)
        # On a busy machine it writes late, and in pieces: wait until the text stops growing.
        while time.monotonic() < deadline:
            time.sleep(0.2)
            previous = stacks
            stacks = path.read_text(errors="replace")
            if stacks and stacks == previous:
                break
    return stacks[-MAX_TEXT:]


def flight_recorder() -> tuple[dict[str, int], str]:
    """Returns what torch's flight recorder knows about this rank's collectives.

    The result is (the number of enqueued collectives by process group, a text about them). The text
    also names the last collectives that have not finished. torch records collectives if
    TORCH_FR_BUFFER_SIZE is set.
    """
    from torch._C import _distributed_c10d as c10d

    enqueued: dict[str, int] = {}
    pending = []
    # The recorders of gloo and of NCCL. A build of torch may lack either.
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
    """Returns the seconds that are left to this job; None if it has no known limit.

    The limit is `max_time_s` (training.max_time_s) after the launch if that is given, else the end
    of the Slurm job.
    """
    if max_time_s is not None:
        return max_time_s - seconds_since_launch()
    end_time = os.environ.get("SLURM_JOB_END_TIME", "")
    if end_time.isdecimal():
        return int(end_time) - time.time()
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    # Slurm before 23 sets no SLURM_JOB_END_TIME. The time that is left (%L) depends on no time zone
    # and no SLURM_TIME_FORMAT, as the time of the end does.
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
    """Returns the seconds in squeue's text for %L, [[days-]hours:]minutes:seconds.

    Returns None for UNLIMITED, INVALID, NOT_SET and everything else.
    """
    match = re.match(r"\s*(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)\s*$", text, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def seconds_since_launch() -> float:
    """Returns the seconds since torchrun was started; without torchrun since this process was.

    torchrun's start counts because a restart of the ranks gives the job no more time.
    """
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    ticks = int(read_stat(pid)[1])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
