"""launch/node.sh, which Kubernetes and SkyPilot start on each node: real torchrun, real signals, a
stand-in trainer."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.processes import Job
from tests.support.stand_in import make_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path, num_steps=6)


def free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return int(result.getsockname()[1])


def start(checkout: Path, *overrides: str, **variables: str) -> Job:
    kubeflow = {
        "PET_NNODES": "1",
        "PET_NODE_RANK": "0",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
        "RANK": "0",  # of the pod, and not of a rank
        "WORLD_SIZE": "2",
        "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}",
    }
    command = ["bash", "launch/node.sh", "config.yaml", *overrides]
    return Job(command, env=kubeflow | variables, cwd=checkout)


def steps(checkout: Path) -> list[int]:
    path = checkout / "runs/a b/metrics.jsonl"
    return (
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def test_a_pod_that_is_told_to_end_saves_and_the_next_goes_on(checkout: Path) -> None:
    job = start(checkout, "step_s=0.2", "num_steps=1000")
    deadline = time.monotonic() + 60
    while len(steps(checkout)) < 2:
        assert time.monotonic() < deadline
        assert job.process.poll() is None, job.wait()[1]
        time.sleep(0.05)
    os.kill(job.process.pid, signal.SIGTERM)  # as Kubernetes does: to the first process alone
    code, output = job.wait(60)
    assert code == 138, output
    saved = json.loads((checkout / "runs/a b/preempted.json").read_text())
    assert saved["reason"] == "SIGTERM"
    assert "stopped and saved" in output
    assert not job.survivors()

    code, output = start(checkout, f"num_steps={saved['step'] + 2}").wait(60)
    assert code == 0, output
    assert steps(checkout) == list(range(1, saved["step"] + 3))
    assert not (checkout / "runs/a b/preempted.json").exists()


def test_a_bad_config_is_final_and_a_crash_is_not(checkout: Path) -> None:
    code, output = start(checkout, "sed=3").wait(60)
    assert (code, output) == (2, "error: sed: unknown key\n")
    (checkout / "bin").mkdir()  # torchrun itself is in the other tests
    (checkout / "bin/torchrun").write_text('#!/usr/bin/env bash\nRANK=0 exec python "$@"\n')
    (checkout / "bin/torchrun").chmod(0o755)
    path = f"{checkout}/bin:{checkout}/.venv/bin:{os.environ['PATH']}"
    code, output = start(checkout, "crash_at=2", PATH=path).wait(60)
    assert code == 140, output
    assert output.splitlines()[-1].endswith("node 0: torchrun failed with exit code 1")


def test_the_nodes_of_skypilot_meet(checkout: Path) -> None:
    sky = {
        "SKYPILOT_NODE_IPS": "localhost\nlocalhost",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "PET_MASTER_PORT": str(free_port()),
    }
    jobs = [start(checkout, **sky, SKYPILOT_NODE_RANK=str(rank)) for rank in (1, 0)]
    for job in jobs:
        code, output = job.wait(90)
        assert code == 0, output
        assert "starting 1 ranks, one of 2 nodes" in output
    assert len(steps(checkout)) == 6  # rank 0 alone writes
