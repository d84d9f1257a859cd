"""Looking at processes and stacks: /proc, Python frames, torch's flight recorder."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

# Whoever is in one of these waits for other ranks.
_COLLECTIVE_MODULES = tuple(f"grpo_spmd.distributed.{name}" for name in ("collectives", "session", "store"))


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


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
        if not any(part in name for part in library) and inner.f_globals.get("__name__") not in _COLLECTIVE_MODULES:
            return f"{name}:{inner.f_lineno} ({inner.f_code.co_name})"
    return ""


def format_stack(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (no Python frame)\n"


def entries(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def flight_recorder() -> tuple[dict[str, int], str]:
    """Collectives enqueued by process group, and the last ones of each, where torch keeps a flight recorder
    (TORCH_FR_BUFFER_SIZE)."""
    from torch._C import _distributed_c10d as c10d

    enqueued: dict[str, int] = {}
    pending: list[str] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's and NCCL's; either may be missing in a build
        with suppress(Exception):  # of private functions nothing is certain, and the report must be written
            for entry in json.loads(getattr(c10d, name)()).get("entries", []):
                group = ":".join(entry["process_group"])
                enqueued[group] = max(enqueued.get(group, 0), entry["collective_seq_id"])
                if not entry["retired"]:
                    pending.append(
                        f"{entry['profiling_name']} number {entry['collective_seq_id']} of group {group} "
                        f"({entry['state']})"
                    )
    last = [f"group {group}: {number} collectives enqueued" for group, number in sorted(enqueued.items())]
    return enqueued, "; ".join(last + [f"not finished: {text}" for text in pending[-10:]])


def machine_id() -> str:
    """Two processes that say the same here see each other in /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux, or hidden by the container: nobody's peer
        return f"{socket.gethostname()}/{os.getpid()}"


def process_facts(pid: int) -> tuple[str, str]:
    """State letter and start time, in ticks since boot; ("", "") where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def process_state(facts: dict[str, Any]) -> Literal["gone", "stopped", "blocked", "running"]:
    state, start = process_facts(facts["pid"])
    if start != facts["start"] or state in ("", "Z", "X"):  # another process may have got the number
        return "gone"
    return "stopped" if state in ("T", "t") else "blocked" if state == "D" else "running"


def next_of(rank: int, ranks: Iterable[int]) -> list[int]:
    """The one after `rank` in the ring of `ranks`, or none: each rank is looked after by one other."""
    others = sorted(other for other in ranks if other != rank)
    return [next((other for other in others if other > rank), others[0])] if others else []
