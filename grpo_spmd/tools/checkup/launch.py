"""Finds the ranks of a checkup, which torchrun or srun launched, or starts children as ranks."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from grpo_spmd.config.command_line import number_of_ranks
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.processes import free_port
from grpo_spmd.tools.checkup.results import Result, Target, bad


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
        environ = {**environ, **_torchrun_variables(environ)}
    num_ranks = int(environ.get("WORLD_SIZE", number_of_ranks()))
    # One rank without a port is no launch, whatever variable was left from elsewhere.
    if "RANK" not in environ or (num_ranks == 1 and "MASTER_PORT" not in environ):
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


def _torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what torchrun would set for this task of a Slurm step; {} for other processes."""
    slurm = {name.removeprefix("SLURM_"): text for name, text in environ.items()}
    # A batch script has no step, although SLURM_NTASKS is set in it.
    num_tasks = slurm.get("STEP_NUM_TASKS", "1")
    if num_tasks == "1":
        return {}
    # "4(x2),2": two nodes with 4 tasks, one with 2.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", slurm.get("STEP_TASKS_PER_NODE", num_tasks))
    tasks = [count for count, times in groups for _ in range(int(times or 1))]
    # All ranks derive the same port from the job.
    port = 20000 + (int(slurm.get("JOB_ID", 0)) + int(slurm.get("STEP_ID", 0))) % 20000
    nodes = slurm.get("STEP_NODELIST") or slurm.get("JOB_NODELIST", "")
    return {
        "RANK": slurm["PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": slurm["LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[int(slurm["NODEID"])],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list: "node[03-05,9],login1" gives node03."""
    match = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(text or "" for text in match.groups()) if match and nodes else "127.0.0.1"


def check_links(target: Target) -> Iterator[Result]:
    """Measures all-reduces by ranks of this machine: one for each GPU, or two on the CPU.

    They are launched checkups of their links alone. Yields the lines of their rank 0.
    """
    if target.is_launched:
        return
    num_ranks = target.num_gpus or 2
    environ = {
        "NCCL_DEBUG": "",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    command = [sys.executable, "-m", "grpo_spmd.checkup", "--only", "links"]
    command += ["--deadline", f"{target.deadline_s:g}", "--json"]

    def run_rank(rank: int) -> str:
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        answer = target.run([*command, str(file)], 3 * target.deadline_s + 60, environ | numbers)
        return answer.stderr.strip() if answer else ""

    with tempfile.TemporaryDirectory(prefix="grpo_spmd_") as folder:
        file = Path(folder, "links.jsonl")
        with ThreadPoolExecutor(num_ranks) as pool:
            errors = [*pool.map(run_rank, range(num_ranks))]
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    for fields in map(json.loads, text.splitlines()):
        if "level" in fields:
            yield Result(fields["name"], fields["level"], fields["found"], fields["remedy"])
    if "verdict" not in text:
        reason = [*filter(None, errors), "its ranks ended without a word"][0].splitlines()[-1]
        yield bad("all-reduce", reason[:300], "python -c 'import torch'")
