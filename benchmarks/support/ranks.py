"""Measuring in processes of their own: start the ranks, time what they do in turn, and carry
figures out of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from grpo_spmd.distributed.collectives import barrier, on_rank0
from tests.support.processes import torchrun

_MARK = "figures: "
T = TypeVar("T")


def measure(
    num_ranks: int, module: str, *arguments: str, env: Mapping[str, str] | None = None
) -> list[Any]:
    """What the ranks of a module told, in no order of ranks. Zero ranks: a plain process. Raises
    RuntimeError with
    their output."""
    command = torchrun(num_ranks, "-m", module) if num_ranks else [sys.executable, "-m", module]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)
    report = [
        json.loads(line.partition(_MARK)[2]) for line in done.stdout.splitlines() if _MARK in line
    ]
    if done.returncode or not report:
        raise RuntimeError(
            f"{module} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return report


def tell(figures: Any) -> None:
    """Hand figures to the `measure` that started this process."""
    # in one piece: print() on torchrun's ranks writes the line break apart
    sys.stdout.write(f"{_MARK}{json.dumps(figures)}\n")
    sys.stdout.flush()


def time_in_turn(
    timed: Mapping[str, Callable[[], T]], num_rounds: int
) -> tuple[dict[str, list[float]], dict[str, T]]:
    """Collective. Seconds of the slowest rank in each round, and what each call returned in a round
    before them, which warms up.

    Every round makes each call once, so that all see the same machine.
    """
    times: dict[str, list[float]] = {name: [] for name in timed}
    initial: dict[str, T] = {}
    for number in range(1 + num_rounds):
        for name, call in timed.items():
            barrier()
            start = perf_counter()
            result = call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = on_rank0(max, perf_counter() - start)
            if number == 0:
                initial[name] = result
            else:
                times[name].append(seconds)
    return times, initial


def peak_bytes(work: Callable[[], object], *, on_gpu: bool | None = None) -> int:
    """Memory at the peak of `work` beyond what was there before: allocated on the GPU where there
    is one, else resident in this process.

    Resident memory is the kernel's VmHWM, mapped files included.
    """
    if torch.cuda.is_available() if on_gpu is None else on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        status_bytes = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - status_bytes
    status_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    work()
    return _status_bytes("VmHWM") - status_bytes


def _status_bytes(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)
