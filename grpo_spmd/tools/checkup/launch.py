"""Finds the ranks of a checkup, which torchrun or srun launched, or starts children as ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import msgspec

from grpo_spmd.config.command_line import number_of_ranks
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.processes import free_port
from grpo_spmd.tools.checkup.exchange import Report
from grpo_spmd.tools.checkup.results import Target, bad

ANSWER = "checkup report: "  # before a child's report in its output


@dataclass(frozen=True)
class Launch:
    """Tells the number of this rank, and of the ranks launched with it."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    environ: Mapping[str, str]
    serves_store: bool  # rank 0, unless torchrun's agent already serves the store

    @property
    def address(self) -> str:
        return f"{self.environ.get('MASTER_ADDR')}:{self.environ.get('MASTER_PORT')}"


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Returns the launch by torchrun or srun; None if this process is alone. Raises ConfigError."""
    if "RANK" not in environ:
        return _find_slurm_step(environ)
    num_ranks = number_of_ranks()
    # torchrun with one rank is a machine without others.
    if num_ranks == 1:
        return None
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT", "").isdecimal():
        raise ConfigError(
            "RANK is set, and MASTER_ADDR or MASTER_PORT is not; torchrun sets all: unset "
            "RANK alone"
        )
    rank = int(environ["RANK"])
    return Launch(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        local_ranks=int(environ.get("LOCAL_WORLD_SIZE", num_ranks)),
        environ=environ,
        serves_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _find_slurm_step(environ: Mapping[str, str]) -> Launch | None:
    # A batch script has no step, although SLURM_NTASKS is set in it.
    text = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not text.isdecimal() or int(text) < 2:
        return None

    def number(name: str) -> int:
        return int(environ.get(f"SLURM_{name}", "0"))

    # "4(x2),2": two nodes with 4 tasks, one with 2.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", text))
    tasks = [int(count) for count, times in groups for _ in range(int(times or 1))]
    node, rank = number("NODEID"), number("PROCID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # All ranks derive the same port from the job.
    port = 20000 + (number("JOB_ID") + number("STEP_ID")) % 20000
    defaults = {"MASTER_ADDR": first_host(nodes), "MASTER_PORT": str(port)}
    return Launch(
        rank=rank,
        num_ranks=int(text),
        local_rank=number("LOCALID"),
        local_ranks=tasks[node] if node < len(tasks) else 1,
        environ={
            **environ,
            **{name: environ.get(name) or value for name, value in defaults.items()},
            "WORLD_SIZE": text,
        },
        serves_store=rank == 0,
    )


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list: "node[03-05,9],login1" gives node03."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(text or "" for text in match.groups()) if match and nodes else "127.0.0.1"


class LocalRanks:
    """Starts child processes that measure all-reduces: one for each GPU, or two on the CPU.

    They start at once, while the other checks run."""

    def __init__(self, target: Target, deadline_s: float) -> None:
        self.num_ranks = target.num_gpus or 2
        self._deadline = time.monotonic() + deadline_s + 5
        port = free_port()
        self._children: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        for rank in range(self.num_ranks):
            env = {
                **target.environ,
                "TORCH_CPP_LOG_LEVEL": "FATAL",
                "NCCL_DEBUG": "",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(self.num_ranks),
                "LOCAL_WORLD_SIZE": str(self.num_ranks),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
            child = subprocess.Popen(
                [sys.executable, "-m", "grpo_spmd.tools.checkup.reduce", str(deadline_s)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._children.append((child, output))

    def reports(self) -> dict[int, Report]:
        """Waits for the children, at most until the deadline, and ends all. Returns their reports
        by rank.

        A child that exited without one counts as failed; one that had to be killed without one is
        left out.
        """
        reports: dict[int, Report] = {}
        for rank, (child, output) in enumerate(self._children):
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, self._deadline - time.monotonic()))
            # A killed child may have written its report.
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            answers = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
            if answers:
                # Not msgspec's decoder: an error may hold lone surrogates, which it refuses.
                reports[rank] = msgspec.convert(json.loads(answers[-1]), Report)
            elif child.returncode is not None:
                text = lines[-1][:300] if lines else f"exit code {child.returncode}"
                line = bad("all-reduce", f"importing torch: {text}", "python -c 'import torch'")
                reports[rank] = Report("failed", [line])
        self.end()
        return reports

    def end(self) -> None:
        while self._children:
            child, output = self._children.pop()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            output.close()
