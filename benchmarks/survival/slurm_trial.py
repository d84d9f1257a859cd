"""launch/slurm.sbatch on a real Slurm of two nodes, both on this host: what was tried, and how the run came out of it.

    python -m benchmarks.survival.slurm_trial [--only NAME ...] [--stand-in] [--json FILE]
Needs root and Debian's slurm-wlm and munge. Brings slurmctld and two slurmd up in a temporary folder, on ports of their own, and takes
them down again; meanwhile /etc/hosts names the nodes. A tiny random model is trained on the CPU, its rewards slowed so that a step takes
some 0.6 s; --stand-in takes the trainer of tests/support/workers/stand_in_train.py, to try the script alone. Each row ends `ok` only if the
job came to the state expected, left no process behind, took less than 30 s to leave, and the run's metrics have every step once (and the
last checkpoint every bit of the uninterrupted run's, where the number of ranks is the same).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import yaml

from benchmarks.support.report import Row, report

_ROOT = Path(__file__).resolve().parents[2]
_NODES = ("trial1", "trial2")
_STEPS, _LONG = 40, 180  # of most runs, and of those that outlive a walltime of two minutes
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
_REWARD = """
import time
def reward(completions, **columns):
    time.sleep(0.15)
    return [float(len(c)) for c in completions]
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
        root.joinpath("slurm.conf").write_text(_CONF.format(host=host, port=ports[0], root=root, nodes="\n".join(nodes)))
        os.environ["SLURM_CONF"] = str(root / "slurm.conf")
        self._hosts = Path("/etc/hosts").read_text()
        self._munged = subprocess.run(["pgrep", "-x", "munged"], capture_output=True).returncode == 0

    def __enter__(self) -> Cluster:
        Path("/etc/hosts").write_text(self._hosts.rstrip("\n") + "\n" + "".join(f"127.0.0.1 {node}\n" for node in _NODES))
        if not self._munged:
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            subprocess.run(["su", "-s", "/bin/bash", "munge", "-c", "/usr/sbin/munged"], check=True)
        (self.root / "ctl").mkdir()
        subprocess.run(["slurmctld"], check=True)
        for node in _NODES:
            (self.root / f"d-{node}").mkdir()
            subprocess.run(["slurmd", "-N", node], check=True)
        _until(lambda: _run("sinfo", "--noheader", "--format=%D %t", "--partition=main") == "2 idle", 60, "two idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "--user=root"])
        time.sleep(2)
        for file in self.root.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)
        time.sleep(2)
        if not self._munged:
            subprocess.run(["su", "-s", "/bin/bash", "munge", "-c", "/usr/sbin/munged --stop"], capture_output=True)
        Path("/etc/hosts").write_text(self._hosts)

    def survivors(self) -> list[int]:
        """Processes of jobs of this cluster."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"GRPO_SPMD_TRIAL={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


@dataclass
class Job:
    """A submitted run."""

    cluster: Cluster
    checkout: Path
    run_dir: Path
    id: str
    num_steps: int = _STEPS
    left_s: list[float] = field(default_factory=list)  # from what ended the job, or part of it, until its processes were gone

    def show(self, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", _run("scontrol", "show", "job", self.id, "--oneliner"))
        return found[1] if found else ""

    @property
    def log(self) -> str:
        path = self.checkout / f"slurm-{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, run_dir: Path | None = None) -> list[int]:
        path = (run_dir or self.run_dir) / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def until_step(self, step: int) -> None:
        _until(lambda: max(self.steps(), default=-1) >= step, 180, f"step {step}", self)

    def until_state(self, *states: str, timeout_s: float = 420) -> None:
        _until(lambda: self.show("JobState") in states, timeout_s, f"state {' or '.join(states)}", self)

    def until_gone(self) -> None:
        """Wait for the job's processes to end, and note how long that took."""
        start = time.monotonic()
        _until(lambda: not self.cluster.survivors(), 120, "no process of the job", self)
        self.left_s.append(time.monotonic() - start)

    def leaving_s(self) -> list[float]:
        """Seconds from each signal that the batch shell heard until it queued the job again, by its log."""
        times = re.findall(r"slurm.sbatch: (\S+ \S+) (got SIG|preempted and saved|no time|told to leave)", self.log)
        stamps = [(datetime.fromisoformat(stamp), what) for stamp, what in times]
        return [(after[0] - before[0]).total_seconds() for before, after in pairwise(stamps) if before[1] == "got SIG" != after[1]]


@dataclass
class Trial:
    """Submits runs over the same tiny model and data."""

    cluster: Cluster
    checkout: Path
    key: str  # of the number of steps
    number: int = 0

    def submit(self, *overrides: str, num_steps: int = _STEPS, nodes: int = 1, options: tuple[str, ...] = (), **variables: str) -> Job:
        self.number += 1
        run_dir = self.checkout / "runs" / str(self.number)
        env = os.environ | {"NPROC": str(2 // nodes), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
        env["GRPO_SPMD_TRIAL"] = self.cluster.mark
        command = ["sbatch", "--parsable", f"--nodes={nodes}", "--gpus-per-node=0", "--time=30", *options, "launch/slurm.sbatch"]
        done = subprocess.run(
            [*command, "config.yaml", f"run_dir={run_dir}", f"{self.key}={num_steps}", *overrides],
            cwd=self.checkout,
            env=env,
            check=True,
            capture_output=True,
            text=True,
        )
        return Job(self.cluster, self.checkout, run_dir, done.stdout.strip(), num_steps)


def uninterrupted(trial: Trial) -> Job:
    job = trial.submit(num_steps=_LONG)
    job.until_state("COMPLETED", "FAILED")
    return job


def walltime(trial: Trial, nodes: int = 1) -> Job:
    # Slurm counts walltime in minutes, and sends the signal up to a minute early.
    job = trial.submit(num_steps=_LONG, nodes=nodes, options=("--time=2", "--signal=B:USR1@70"))
    job.until_state("COMPLETED", "FAILED")
    return job


def scancelled(trial: Trial) -> Job:
    job = trial.submit(nodes=2)
    job.until_step(8)
    _run("scancel", job.id)
    job.until_gone()
    job.until_state("CANCELLED")
    time.sleep(12)
    assert not _run("squeue", "--noheader"), "a job that was cancelled came back"
    return job


def scancelled_and_submitted_again(trial: Trial) -> Job:
    first = scancelled(trial)
    trial.number -= 1  # the same folder
    job = trial.submit(nodes=2)
    job.left_s = first.left_s
    job.until_state("COMPLETED", "FAILED")
    return job


def drained(trial: Trial) -> Job:
    job = trial.submit()
    job.until_step(8)
    node = job.show("NodeList")
    _run("scontrol", "update", f"nodename={node}", "state=drain", "reason=trial")
    _run("scontrol", "requeue", job.id)
    job.until_gone()
    job.until_state("RUNNING")
    assert job.show("NodeList") != node
    job.until_state("COMPLETED", "FAILED")
    _run("scontrol", "update", f"nodename={node}", "state=resume")
    return job


def preempted(trial: Trial, partition: str = "main") -> Job:
    job = trial.submit(nodes=2, options=(f"--partition={partition}",))
    job.until_step(8)
    urgent = _run("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    job.until_gone()
    _until(lambda: "COMPLETED" in _run("scontrol", "show", "job", urgent), 60, "the end of the urgent job", job)
    job.until_state("COMPLETED", "FAILED")
    return job


def rank_killed(trial: Trial) -> Job:
    job = trial.submit(nodes=2)
    job.until_step(12)
    ranks = [pid for pid in trial.cluster.survivors() if _is_rank(pid)]
    os.kill(ranks[0], signal.SIGKILL)
    job.until_state("COMPLETED", "FAILED")
    return job


def crash_after_crash(trial: Trial) -> Job:
    """Killed as soon as a rank is there, with no checkpoint in between."""
    job = trial.submit(MAX_RESTARTS="1")
    job.until_step(1)
    while job.show("JobState") == "RUNNING":
        for pid in filter(_is_rank, trial.cluster.survivors()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
    job.until_state("FAILED")
    return job


def bad_config(trial: Trial) -> Job:
    job = trial.submit("seeed=4")
    job.until_state("FAILED", "COMPLETED")
    return job


def array(trial: Trial) -> Job:
    job = trial.submit("seed=%a", options=("--array=0-1",))
    for each in ("0", "1"):
        task = Job(job.cluster, job.checkout, Path(f"{job.run_dir}-{each}"), f"{job.id}_{each}")
        task.until_step(8)
        _run("scancel", "--signal=USR1", "--batch", task.id)  # saved, and queued again: this task alone
    for each in ("0", "1"):
        Job(job.cluster, job.checkout, job.run_dir, f"{job.id}_{each}").until_state("COMPLETED", "FAILED", timeout_s=600)
    return job


SCENARIOS: dict[str, tuple[Callable[[Trial], Job], str]] = {
    "uninterrupted": (uninterrupted, "COMPLETED"),
    "walltime": (walltime, "COMPLETED"),
    "walltime, 2 nodes": (lambda trial: walltime(trial, 2), "COMPLETED"),
    "scancel, 2 nodes": (scancelled, "CANCELLED"),
    "scancel, submitted again": (scancelled_and_submitted_again, "COMPLETED"),
    "node drained, requeued": (drained, "COMPLETED"),
    "preempted, 2 nodes": (preempted, "COMPLETED"),
    "preempted with grace": (lambda trial: preempted(trial, "grace"), "COMPLETED"),
    "rank killed, 2 nodes": (rank_killed, "COMPLETED"),
    "crash after crash": (crash_after_crash, "FAILED"),
    "bad config": (bad_config, "FAILED"),
    "array of 2, USR1": (array, "COMPLETED"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        print("slurm_trial: skipped, it needs root and slurm-wlm and munge (apt-get install slurm-wlm munge)")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the daemons are taken down
    with tempfile.TemporaryDirectory(prefix="slurm_trial.") as folder:
        checkout = Path(folder, "checkout")
        _make_checkout(checkout, args.stand_in)
        rows: list[Row] = []
        reference: dict[int, str] = {}
        with Cluster(Path(folder)) as cluster:
            trial = Trial(cluster, checkout, "num_steps" if args.stand_in else "training.num_steps")
            for name in args.only:
                run, expected = SCENARIOS[name]
                print(f"slurm_trial: {name}", flush=True)
                try:
                    job = run(trial)
                except AssertionError as error:
                    print(error)
                    rows.append(_row(name, None, expected, {}, str(error).partition("\n")[0]))
                    subprocess.run(["scancel", "--user=root"])
                    _until(lambda: not cluster.survivors(), 60, "no process of the job")
                    continue
                if name == "uninterrupted":
                    reference = {steps: _digests(job.run_dir, steps) for steps in (_STEPS, _LONG)}
                rows.append(_row(name, job, expected, reference))
                print("  " + ", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    report("slurm_trial", rows, args.json)
    sys.exit(any(row["outcome"] != "ok" for row in rows))


def _row(name: str, job: Job | None, expected: str, reference: dict[int, str], problem: str = "") -> Row:
    if job is None:
        return {"tried": name, "ended": "-", "starts": "-", "steps": "-", "to_leave_s": "-", "left_behind": "-", "outcome": problem}
    state, log = job.show("JobState"), job.log
    _until(lambda: not job.cluster.survivors(), 30, "no process of the job", job)
    steps, run_dirs = job.steps(), [job.run_dir]
    if name.startswith("array"):
        run_dirs = [Path(f"{job.run_dir}-{n}") for n in (0, 1)]
        steps = [step for run_dir in run_dirs for step in job.steps(run_dir)]
        log = "".join(path.read_text() for path in job.checkout.glob("slurm-*.log") if int(path.stem.split("-")[1]) >= int(job.id))
    leaving = job.left_s + job.leaving_s()
    problems = [problem] if problem else []
    if state != expected:
        problems.append(f"ended {state}, not {expected}")
    if leaving and max(leaving) > 30:
        problems.append("took long to leave")
    if expected == "COMPLETED" and steps != list(range(job.num_steps)) * len(run_dirs):
        problems.append(f"{len(steps)} lines for {job.num_steps} steps")
    if expected == "COMPLETED" and "array" not in name and reference and _digests(job.run_dir, job.num_steps) != reference[job.num_steps]:
        problems.append("parameters differ from the uninterrupted run's")
    starts = log.count(" starting on ")
    if expected == "COMPLETED" and starts == 1 and name not in ("uninterrupted", "scancel, submitted again"):
        problems.append("never interrupted")
    if name == "bad config" and job.show("ExitCode") != "2:0":
        problems.append(f"exit code {job.show('ExitCode')}")
    if name.startswith("scancel, 2") and not (job.run_dir / "preempted.json").exists():
        problems.append("not saved")
    return {
        "tried": name,
        "ended": state,
        "starts": starts,
        "steps": len(steps),
        "to_leave_s": round(max(leaving), 1) if leaving else "-",
        "left_behind": len(job.cluster.survivors()),
        "outcome": "; ".join(problems) or "ok",
    }


def _digests(run_dir: Path, steps: int) -> str:
    """Of the shards of the checkpoint after so many steps."""
    manifest = run_dir / f"checkpoints/step_{steps:06d}/manifest.json"
    if not manifest.exists():
        return ""
    files = json.loads(manifest.read_text())["files"]
    return json.dumps({name: entry["sha256"] for name, entry in sorted(files.items()) if name.startswith("state/")})


def _make_checkout(checkout: Path, stand_in: bool) -> None:
    """What launch/slurm.sbatch finds in the folder that sbatch is called in."""
    checkout.mkdir()
    for name in ("launch", ".venv"):
        (checkout / name).symlink_to(_ROOT / name)
    if stand_in:
        (checkout / "grpo_spmd").mkdir()
        (checkout / "grpo_spmd/__init__.py").touch()
        shutil.copy(_ROOT / "tests/support/workers/stand_in_train.py", checkout / "grpo_spmd/train.py")
        config = {"run_dir": "x", "seed": 0, "num_steps": _STEPS, "step_s": 0.6, "crash_at": -1, "checkpoint.resume": "never"}
        (checkout / "config.yaml").write_text(yaml.safe_dump(config))
        return
    from tests.support.models import make_model, write_config

    (checkout / "grpo_spmd").symlink_to(_ROOT / "grpo_spmd")
    (checkout / "reward.py").write_text(_REWARD)
    write_config(
        checkout,
        make_model(checkout / "model", "qwen3", tied=True),
        rewards=[{"function": f"{checkout}/reward.py:reward"}],
        optimizer={"lr": 1e-4},
        checkpoint={"every_steps": 10, "keep": 100},
    )


def _is_rank(pid: int) -> bool:
    with suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"\0LOCAL_RANK=" in b"\0" + environment and b"grpo_spmd.train" in command
    return False


def _until(holds: Callable[[], bool], timeout_s: float, what: str, job: Job | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        log = f"; the end of its log:\n{job.log[-3000:]}" if job else ""
        assert time.monotonic() < deadline, f"no {what.removeprefix('no ')} after {timeout_s:g} s{log}"
        time.sleep(0.2)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
