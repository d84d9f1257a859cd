"""torchrun is killed while its ranks import torch: nobody else would end them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.models import write_config
from tests.support.processes import Job


def _ranks(job: Job) -> list[int]:
    """Processes of the job that run the training command, once torch's import has begun."""
    ranks = []
    for pid in {*job.running()} - {job.process.pid}:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it has ended
            continue
        if b"grpo_spmd.train" in words:
            ranks += [pid] * ("libtorch" in maps)
    return ranks


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "grpo_spmd.distributed.launch"])
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path, folder: Path, launcher: str) -> None:
    config = write_config(tmp_path, folder / "model")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2"]
    job = Job(
        [*command, "-m", "grpo_spmd.train", "--config", str(config)], env={"TMPDIR": str(temporary)}
    )
    deadline = time.monotonic() + 120
    while len(_ranks(job)) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        assert job.process.poll() is None
        time.sleep(0.02)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    # Without the tie they waited for the launcher's store as long as the limit of a start.
    while job.running():
        assert time.monotonic() < deadline, f"still there: {job.running()}"
        time.sleep(0.05)
    if launcher == "grpo_spmd.distributed.launch":  # torchrun leaves its folder of error files
        assert list(temporary.iterdir()) == []
