"""Trees of processes, found by a mark in their environment and by descent, and ended whole. Imports
no torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# a variable that every process of a tree inherits, its value drawn for that tree
MARK = "GRPO_SPMD_BENCHMARK_TREE"


def marked(mark: str, variable: str = MARK) -> set[int]:
    """Processes whose environment has the mark."""
    wanted, result = f"{variable}={mark}".encode(), set[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone in the meantime, or not ours to read
            if wanted in path.read_bytes().split(b"\0"):
                result.add(int(path.parent.name))
    return result


def with_descendants(pids: Iterable[int]) -> set[int]:
    """These processes and all that descend from them: a sandbox has an empty environment, and so no
    mark."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    result, waiting = set[int](), set(pids)
    while waiting:
        pid = waiting.pop()
        result.add(pid)
        waiting |= set(children.get(pid, ())) - result
    return result


def kill_tree(mark: str, variable: str = MARK, limit_s: float = 20.0) -> int:
    """SIGKILL for a whole tree, however its processes were put into groups and sessions. Returns
    how many there were. torchrun's ranks lead sessions of their own: killing a group would leave
    them, and the GPU's memory taken. Raises RuntimeError where one is still there after `limit_s`,
    as while a driver call does not
    return."""
    killed, end = set[int](), time.monotonic() + limit_s
    while remaining := marked(mark, variable):
        stopped = set[int]()
        while (
            more := with_descendants(marked(mark, variable)) - stopped
        ):  # one that still ran may have started another
            _signal(more, signal.SIGSTOP)
            stopped |= more
        _signal(stopped, signal.SIGKILL)
        killed |= stopped
        if time.monotonic() > end:
            raise RuntimeError(
                f"processes {sorted(remaining)} are still there {limit_s:.0f} s after SIGKILL"
            )
        time.sleep(0.02)
    return len(killed)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
