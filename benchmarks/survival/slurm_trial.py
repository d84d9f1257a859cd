"""launch/slurm.sbatch on a real Slurm of two nodes, both on this host: what was tried, and how the
run came out of it.

    python -m benchmarks.survival.slurm_trial [--only NAME ...] [--stand-in] [--json FILE]
Needs root and Debian's slurm-wlm and munge. Brings slurmctld and two slurmd up in a temporary
folder, on ports of their own, and takes them down again; meanwhile /etc/hosts names the nodes. A
tiny random model is trained on the CPU, its rewards slowed so that a step takes some 0.6 s;
--stand-in takes the trainer of tests/support/workers/stand_in_train.py, to try the script alone.
Each row ends `ok` only if the job came to the state expected, left no process behind, took less
than 30 s to leave, and the run's metrics have every step once (and the last checkpoint every bit of
the uninterrupted run's, where the number of ranks is the same).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from benchmarks.support.report import Row, arguments_parser, report
from benchmarks.survival.slurm_cluster import LONG, STEPS, Cluster, Job, Trial, run, until

_ROOT = Path(__file__).resolve().parents[2]
_REWARD = """
import time
def reward(completions, **columns):
    time.sleep(0.15)
    return [float(len(c)) for c in completions]
"""


def uninterrupted(trial: Trial) -> Job:
    job = trial.submit(num_steps=LONG)
    job.until_state("COMPLETED", "FAILED")
    return job


def walltime(trial: Trial, nodes: int = 1) -> Job:
    # Slurm counts walltime in minutes, and sends the signal up to a minute early.
    job = trial.submit(num_steps=LONG, nodes=nodes, options=("--time=2", "--signal=B:USR1@70"))
    job.until_state("COMPLETED", "FAILED")
    return job


def scancelled(trial: Trial) -> Job:
    job = trial.submit(nodes=2)
    job.until_step(8)
    run("scancel", job.id)
    job.until_gone()
    job.until_state("CANCELLED")
    time.sleep(12)
    assert not run("squeue", "--noheader"), "a job that was cancelled came back"
    return job


def scancelled_and_submitted_again(trial: Trial) -> Job:
    initial = scancelled(trial)
    trial.number -= 1  # the same folder
    job = trial.submit(nodes=2)
    job.left_s = initial.left_s
    job.until_state("COMPLETED", "FAILED")
    return job


def drained(trial: Trial) -> Job:
    job = trial.submit()
    job.until_step(8)
    node = job.show("NodeList")
    run("scontrol", "update", f"nodename={node}", "state=drain", "reason=trial")
    run("scontrol", "requeue", job.id)
    job.until_gone()
    job.until_state("RUNNING")
    assert job.show("NodeList") != node
    job.until_state("COMPLETED", "FAILED")
    run("scontrol", "update", f"nodename={node}", "state=resume")
    return job


def preempted(trial: Trial, partition: str = "main") -> Job:
    job = trial.submit(nodes=2, options=(f"--partition={partition}",))
    job.until_step(8)
    urgent = run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 2",
    )
    job.until_gone()
    until(
        lambda: "COMPLETED" in run("scontrol", "show", "job", urgent),
        60,
        "the end of the urgent job",
        job,
    )
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
    for item in ("0", "1"):
        task = Job(job.cluster, job.checkout, Path(f"{job.run_dir}-{item}"), f"{job.id}_{item}")
        task.until_step(8)
        run(
            "scancel", "--signal=USR1", "--batch", task.id
        )  # saved, and queued again: this task alone
    for item in ("0", "1"):
        Job(job.cluster, job.checkout, job.run_dir, f"{job.id}_{item}").until_state(
            "COMPLETED", "FAILED", timeout_s=600
        )
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
    parser = arguments_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--stand-in", action="store_true")
    args = parser.parse_args()
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        print(
            "slurm_trial: skipped, it needs root and slurm-wlm and munge (apt-get install "
            "slurm-wlm munge)"
        )
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
                scenario, expected = SCENARIOS[name]
                print(f"slurm_trial: {name}", flush=True)
                try:
                    job = scenario(trial)
                except AssertionError as error:
                    print(error)
                    rows.append(_row(name, None, expected, {}, str(error).partition("\n")[0]))
                    subprocess.run(["scancel", "--user=root"])
                    until(lambda: not cluster.survivors(), 60, "no process of the job")
                    continue
                if name == "uninterrupted":
                    reference = {steps: _digests(job.run_dir, steps) for steps in (STEPS, LONG)}
                rows.append(_row(name, job, expected, reference))
                print(
                    "  " + ", ".join(f"{key} {value}" for key, value in rows[-1].items()),
                    flush=True,
                )
    report("slurm_trial", rows, args.json)
    sys.exit(any(row["outcome"] != "ok" for row in rows))


def _row(
    name: str, job: Job | None, expected: str, reference: dict[int, str], problem: str = ""
) -> Row:
    if job is None:
        return {
            "tried": name,
            "ended": "-",
            "starts": "-",
            "steps": "-",
            "to_leave_s": "-",
            "left_behind": "-",
            "outcome": problem,
        }
    state, log = job.show("JobState"), job.log
    until(lambda: not job.cluster.survivors(), 30, "no process of the job", job)
    steps, run_dirs = job.steps(), [job.run_dir]
    if name.startswith("array"):
        run_dirs = [Path(f"{job.run_dir}-{n}") for n in (0, 1)]
        steps = [step for run_dir in run_dirs for step in job.steps(run_dir)]
        log = "".join(
            path.read_text()
            for path in job.checkout.glob("slurm-*.log")
            if int(path.stem.split("-")[1]) >= int(job.id)
        )
    leaving = job.left_s + job.leaving_s()
    problems = [problem] if problem else []
    if state != expected:
        problems.append(f"ended {state}, not {expected}")
    if leaving and max(leaving) > 30:
        problems.append("took long to leave")
    if expected == "COMPLETED" and steps != list(range(1, job.num_steps + 1)) * len(run_dirs):
        problems.append(f"{len(steps)} lines for {job.num_steps} steps")
    if (
        expected == "COMPLETED"
        and "array" not in name
        and reference
        and _digests(job.run_dir, job.num_steps) != reference[job.num_steps]
    ):
        problems.append("parameters differ from the uninterrupted run's")
    starts = log.count(" starting on ")
    if (
        expected == "COMPLETED"
        and starts == 1
        and name not in ("uninterrupted", "scancel, submitted again")
    ):
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
    return json.dumps(
        {
            name: entry["sha256"]
            for name, entry in sorted(files.items())
            if name.startswith("state/")
        }
    )


def _make_checkout(checkout: Path, stand_in: bool) -> None:
    """What launch/slurm.sbatch finds in the folder that sbatch is called in."""
    checkout.mkdir()
    for name in ("launch", ".venv"):
        (checkout / name).symlink_to(_ROOT / name)
    if stand_in:
        (checkout / "grpo_spmd").mkdir()
        (checkout / "grpo_spmd/__init__.py").touch()
        shutil.copy(
            _ROOT / "tests/support/workers/stand_in_train.py", checkout / "grpo_spmd/train.py"
        )
        config = {
            "run_dir": "x",
            "seed": 0,
            "num_steps": STEPS,
            "step_s": 0.6,
            "crash_at": -1,
            "checkpoint.resume": "never",
        }
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


if __name__ == "__main__":
    main()
