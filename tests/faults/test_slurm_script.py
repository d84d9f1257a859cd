"""launch/slurm.sbatch without a Slurm: the real script, real torchrun and real signals; srun,
squeue and scontrol are stand-ins.

benchmarks/survival/slurm_trial.py runs the same script, and the trainer, on a real Slurm of two
nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Job
from tests.support.stand_in import make_checkout

# srun drops its options and becomes the command: a signal to it is one to torchrun, as Slurm hands
# it on.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
echo "$*" >>srun.calls
# One rank, and seconds less, where torchrun is not what is tested.
if [ "$1" = torchrun ] && [ -n "${WITHOUT_TORCHRUN:-}" ]; then
  while [ "$1" != -m ]; do shift; done
  export RANK=0
  set -- python "$@"
fi
exec "$@"
"""
SQUEUE = """#!/usr/bin/env bash
echo "$*" >>squeue.calls
case $* in *%e*) echo 2031-02-03T04:05:06 ;; *) cat state ;; esac
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "$*" >>scontrol.calls; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder to call sbatch in, with a trainer that counts."""
    make_checkout(tmp_path, num_steps=8)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "state").write_text("RUNNING\n")
    return tmp_path


def submit(checkout: Path, *overrides: str, **variables: str) -> Job:
    return submit_with_log(subprocess.PIPE, checkout, *overrides, **variables)


def submit_with_log(log: int, checkout: Path, *overrides: str, **variables: str) -> Job:
    env = {
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "ENVIRONMENT": "BATCH",  # Slurm sets it in every batch job
        "NPROC": "2",
        "TZ": "UTC",
    }
    command = ["bash", "launch/slurm.sbatch", "config.yaml", *overrides]
    return Job(command, env=env | variables, cwd=checkout, stdout=log)


def calls(checkout: Path, name: str) -> list[str]:
    path = checkout / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def starts(checkout: Path) -> int:
    return sum("torchrun" in call for call in calls(checkout, "srun"))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until_step(job: Job, run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not metrics(run_dir) or metrics(run_dir)[-1]["step"] < step:
        assert time.monotonic() < deadline
        assert job.process.poll() is None, job.wait()[1]
        time.sleep(0.05)


def test_near_the_walltime_it_saves_and_queues_again_and_then_goes_on_to_the_end(
    checkout: Path,
) -> None:
    run_dir = checkout / "runs/a b"
    job = submit(checkout, "step_s=0.2", "num_steps=1000")
    until_step(job, run_dir, 3)
    os.kill(
        job.process.pid, signal.SIGUSR1
    )  # as `--signal=B:USR1@120` does: to the batch shell alone
    code, output = job.wait(60)
    assert code == 0, output
    assert calls(checkout, "scontrol") == [f"requeue {os.getpid()}"]
    saved = json.loads((run_dir / "preempted.json").read_text())
    assert saved["reason"] == "SIGUSR1"
    assert not job.survivors()

    job = submit(checkout, f"num_steps={saved['step'] + 2}", SLURM_RESTART_COUNT="1")
    code, output = job.wait(60)
    assert code == 0, output
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, saved["step"] + 3))
    assert [line["start"] for line in metrics(run_dir)] == ["0"] * saved["step"] + ["1"] * 2
    assert {line["end"] for line in metrics(run_dir)} == {
        "1927857906"
    }  # `date -u -d 2031-02-03T04:05:06 +%s`
    assert len(calls(checkout, "scontrol")) == 1
    assert not (run_dir / "preempted.json").exists()


def test_scancel_saves_and_does_not_come_back(checkout: Path) -> None:
    run_dir = checkout / "runs/a b"
    job = submit(checkout, "step_s=0.2", "num_steps=1000")
    until_step(job, run_dir, 1)
    (checkout / "state").write_text(
        "COMPLETING\n"
    )  # what Slurm says of a job that it is about to end
    torchrun = [
        pid
        for pid in job.running()
        if b"--signals-to-handle" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in (*torchrun, job.process.pid):
        os.kill(pid, signal.SIGTERM)
    code, output = job.wait(60)
    assert code != 0
    assert "Slurm ends this job (COMPLETING)" in output
    assert (run_dir / "preempted.json").exists()
    assert not calls(checkout, "scontrol")
    assert not job.survivors()


def test_crashes_are_tried_again_until_they_make_no_headway(checkout: Path) -> None:
    """It crashes at step 6 each time: one checkpoint further at first, then none."""
    code, output = submit(checkout, "crash_at=6", MAX_RESTARTS="1", WITHOUT_TORCHRUN="1").wait(120)
    assert code == 1, output
    assert starts(checkout) == 2
    assert "newest checkpoint: step_000005; failures in a row since it: 2" in output
    assert not calls(checkout, "scontrol")
    assert (checkout / "runs/a b/failures").read_text() == "step_000005 2\n"


def test_a_bad_config_and_a_run_that_never_began_are_not_tried_again(checkout: Path) -> None:
    code, output = submit(checkout, "sed=3").wait(60)
    assert code == 2
    assert output.splitlines()[-1] == "error: sed: unknown key"
    assert starts(checkout) == 0
    code, output = submit(checkout, "crash_at=before", WITHOUT_TORCHRUN="1").wait(60)
    assert code == 1, output
    assert "failed with exit code 1 before the run began: not tried again" in output
    assert starts(checkout) == 1


def test_the_tasks_of_an_array_have_folders_of_their_own(checkout: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3", "WITHOUT_TORCHRUN": "1"}
    code, output = submit(checkout, "seed=%a", "num_steps=2", **array).wait(60)
    assert code == 0, output
    assert [line["seed"] for line in metrics(checkout / "runs/a b-3")] == [3, 3]
    assert calls(checkout, "squeue")[-1] == "--noheader --jobs 70_3 --format %T"
    code, output = submit(checkout, "run_dir=runs/of_%a", "num_steps=1", **array).wait(60)
    assert code == 0, output
    assert len(metrics(checkout / "runs/of_3")) == 1


# As sites write them: it prints, reads what is not set, and ends with a status of no meaning.
ENVIRONMENT = """
echo "loading modules"
echo "${STEP:-batch} $NOT_SET" >>sourced
export PATH=$PWD/bin:$PWD/.venv/bin:$PATH STEP=task
false
"""
TORCHRUN = """#!/usr/bin/env bash
while [ "$1" != -m ]; do shift; done
RANK=0 exec python "$@"
"""


def test_a_sites_environment_meeting_place_and_log(checkout: Path) -> None:
    (checkout / "site.sh").write_text(ENVIRONMENT)
    (checkout / "bin/torchrun").write_text(TORCHRUN)
    (checkout / "bin/torchrun").chmod(0o755)
    site = {"SITE_ENVIRONMENT": "site.sh", "RDZV_HOST": "ib-n1", "RDZV_PORT": "4711"}
    logs = checkout / "runs/a b/logs"
    for attempt in ({}, {"SLURM_RESTART_COUNT": "1"}):
        with (checkout / "out of slurm.log").open("a") as log:
            code, _ = submit_with_log(
                log.fileno(), checkout, "num_steps=2", **site, **attempt
            ).wait(60)
        message = (checkout / "out of slurm.log").read_text()
        assert code == 0, message
        assert [path.name for path in logs.iterdir()] == [f"slurm-{os.getpid()}.log"]
        assert next(logs.iterdir()).read_text() == message
    assert (checkout / "sourced").read_text().splitlines() == [
        "batch ",
        "task ",
        "task ",
        "task ",
    ] * 2
    assert message.count("loading modules") == 8
    [initial, _] = [call for call in calls(checkout, "srun") if "torchrun" in call]
    assert "--rdzv-endpoint ib-n1:4711 " in initial
    code, output = submit(checkout, SITE_ENVIRONMENT="none.sh").wait(60)
    assert (code, output) == (2, "error: SITE_ENVIRONMENT: cannot read none.sh\n")
