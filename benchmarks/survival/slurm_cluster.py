"""A real Slurm of two nodes on this host, and jobs that train on it. Used by slurm_trial.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

_NODES = ("trial1", "trial2")
STEPS, LONG = 40, 180  # of most runs, and of those that outlive a walltime of two minutes
_CONF = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# How long a job that was queued again waits (the default, 120 s, would make this trial long).
AuthInfo=cred_expire=5
StateSaveLocation={root}/ctl
SlurmdSpoolDir={root}/d-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobRequeue=1
ReturnToService=2
SchedulerParameters=bf_interval=3,sched_interval=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=40
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


class Cluster:
    """slurmctld and a slurmd a node, in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root, self.mark = root, uuid.uuid4().hex
        ports = _free_ports(1 + len(_NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs=2 State=UNKNOWN"
            for n, p in zip(_NODES, ports[1:], strict=True)
        ]
        root.joinpath("slurm.conf").write_text(
            _CONF.format(host=host, port=ports[0], root=root, nodes="\n".join(nodes))
        )
        os.environ["SLURM_CONF"] = str(root / "slurm.conf")
        self._hosts = Path("/etc/hosts").read_text()
        self._munged = (
            subprocess.run(["pgrep", "-x", "munged"], capture_output=True).returncode == 0
        )

    def __enter__(self) -> Cluster:
        Path("/etc/hosts").write_text(
            self._hosts.rstrip("\n") + "\n" + "".join(f"127.0.0.1 {node}\n" for node in _NODES)
        )
        if not self._munged:
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            subprocess.run(["su", "-s", "/bin/bash", "munge", "-c", "/usr/sbin/munged"], check=True)
        (self.root / "ctl").mkdir()
        subprocess.run(["slurmctld"], check=True)
        for node in _NODES:
            (self.root / f"d-{node}").mkdir()
            subprocess.run(["slurmd", "-N", node], check=True)
        until(
            lambda: run("sinfo", "--noheader", "--format=%D %t", "--partition=main") == "2 idle",
            60,
            "two idle nodes",
        )
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "--user=root"])
        time.sleep(2)
        for file in self.root.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        time.sleep(2)
        if not self._munged:
            subprocess.run(
                ["su", "-s", "/bin/bash", "munge", "-c", "/usr/sbin/munged --stop"],
                capture_output=True,
            )
        Path("/etc/hosts").write_text(self._hosts)

    def survivors(self) -> list[int]:
        """Processes of jobs of this cluster."""
        result = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"GRPO_SPMD_TRIAL={self.mark}".encode() in path.read_bytes():
                    result.append(int(path.parent.name))
        return result


@dataclass
class Job:
    """A submitted run."""

    cluster: Cluster
    checkout: Path
    run_dir: Path
    id: str
    num_steps: int = STEPS
    # from what ended the job, or part of it, until its processes were gone
    left_s: list[float] = field(default_factory=list)

    def show(self, name: str) -> str:
        """A field of `scontrol show job`."""
        result = re.search(
            rf"\b{name}=(\S+)", run("scontrol", "show", "job", self.id, "--oneliner")
        )
        return result[1] if result else ""

    @property
    def log(self) -> str:
        path = self.checkout / f"slurm-{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, run_dir: Path | None = None) -> list[int]:
        path = (run_dir or self.run_dir) / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def until_step(self, step: int) -> None:
        until(lambda: max(self.steps(), default=-1) >= step, 180, f"step {step}", self)

    def until_state(self, *states: str, timeout_s: float = 420) -> None:
        until(
            lambda: self.show("JobState") in states, timeout_s, f"state {' or '.join(states)}", self
        )

    def until_gone(self) -> None:
        """Wait for the job's processes to end, and note how long that took."""
        start = time.monotonic()
        until(lambda: not self.cluster.survivors(), 120, "no process of the job", self)
        self.left_s.append(time.monotonic() - start)

    def leaving_s(self) -> list[float]:
        """Seconds from each signal that the batch shell heard until it queued the job again, by its
        log."""
        times = re.findall(
            r"slurm.sbatch: (\S+ \S+) (got SIG|preempted and saved|no time|told to leave)", self.log
        )
        stamps = [(datetime.fromisoformat(stamp), label) for stamp, label in times]
        return [
            (new[0] - old[0]).total_seconds()
            for old, new in pairwise(stamps)
            if old[1] == "got SIG" != new[1]
        ]


@dataclass
class Trial:
    """Submits runs over the same tiny model and data."""

    cluster: Cluster
    checkout: Path
    key: str  # of the number of steps
    number: int = 0

    def submit(
        self,
        *overrides: str,
        num_steps: int = STEPS,
        nodes: int = 1,
        options: tuple[str, ...] = (),
        **variables: str,
    ) -> Job:
        self.number += 1
        run_dir = self.checkout / "runs" / str(self.number)
        env = (
            os.environ
            | {"NPROC": str(2 // nodes), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            | variables
        )
        env["GRPO_SPMD_TRIAL"] = self.cluster.mark
        command = [
            "sbatch",
            "--parsable",
            f"--nodes={nodes}",
            "--gpus-per-node=0",
            "--time=30",
            *options,
            "launch/slurm.sbatch",
        ]
        done = subprocess.run(
            [*command, "config.yaml", f"run_dir={run_dir}", f"{self.key}={num_steps}", *overrides],
            cwd=self.checkout,
            env=env,
            check=True,
            capture_output=True,
            text=True,
        )
        return Job(self.cluster, self.checkout, run_dir, done.stdout.strip(), num_steps)


def until(holds: Callable[[], bool], timeout_s: float, label: str, job: Job | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        log = f"; the end of its log:\n{job.log[-3000:]}" if job else ""
        assert time.monotonic() < deadline, (
            f"no {label.removeprefix('no ')} after {timeout_s:g} s{log}"
        )
        time.sleep(0.2)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports
