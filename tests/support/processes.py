"""Run a command in processes of its own, torchrun among them; ended by id, with what it printed.
Most ranks need none:
see ranks.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "GRPO_SPMD_TEST_ID"

# of a test that started one here
_OF_A_GROUP = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
launches: Counter[str] = (
    Counter()
)  # what the tests of this process have started; pytest prints it at its end


def environment() -> dict[str, str]:
    """Of every process that a test starts."""
    local = {name: value for name, value in os.environ.items() if name not in _OF_A_GROUP}
    return local | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _count(command: list[str]) -> None:
    launches["torchrun" if "torch.distributed.run" in command else "other commands"] += 1


def run_command(
    command: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """To its end, output and errors apart; this repository can be imported whatever the folder."""
    _count(command)
    local = {**environment(), "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(command, cwd=cwd, env=local, capture_output=True, text=True, timeout=600)


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that is full: as long as nobody reads, whoever writes into it waits."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b".")
    os.set_blocking(writer, True)
    return reader, writer


class Job:
    """A command in a process group of its own; all its descendants carry a mark in their
    environment."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: str | None = None,
        stdout: int = subprocess.PIPE,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        """`stdout`: of its output and errors; a pipe of ours, or another descriptor."""
        self.mark = uuid.uuid4().hex
        self._stdin = stdin
        _count(command)
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment(), MARK: self.mark, **(env or {})},
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = 300) -> tuple[int, str]:
        """Exit code and output. After `timeout_s` the group is killed and the test fails with the
        output."""
        try:
            output, _ = self.process.communicate(self._stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            # torchrun's workers are in sessions of their own, and hold the pipe.
            for pid in self.running():
                os.kill(pid, signal.SIGKILL)
            output, _ = self.process.communicate()
            raise AssertionError(
                f"still running after {timeout_s} s; its output:\n{output}"
            ) from None
        return self.process.returncode, output or ""

    def running(self) -> list[int]:
        """Processes of this job that are there at this moment."""
        return marked_processes(self.mark)

    def survivors(self) -> list[int]:
        """Processes of this job that do not end after it (see `processes_left`)."""
        return processes_left(self.mark)


def processes_left(mark: str, patience_s: float = 10) -> list[int]:
    """Those with this mark in their environment that are still there after `patience_s`.

    Helpers end by a signal that the kernel sends at their parent's death, so a moment after it."""
    deadline = time.monotonic() + patience_s
    while (pids := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def marked_processes(mark: str) -> list[int]:
    """Those with this mark in their environment, at this moment."""
    result = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                result.append(int(path.parent.name))
        except OSError:  # gone in the meantime, or not ours to read
            continue
    return result


def torchrun(num_ranks: int, *target: str) -> list[str]:
    """`target` is a worker file with its arguments, or "-m", a module and its arguments."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        *target,
    ]
