"""When the run has to stop: Slurm's word, and real signals to real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.distributed import collectives as store
from grpo_spmd.distributed import processes as module
from grpo_spmd.distributed.interrupt import SIGNALS
from tests.support.models import write_config
from tests.support.nightly import selected_values
from tests.support.processes import Job, full_pipe, torchrun

FORWARDED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    old = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_notice() -> None:
    if store._store is not None:
        store._store.delete_key("preempted")


SQUEUE = {
    "time": (
        '[ "$SLURM_TIME_FORMAT $*" = "standard -h -j 77 -o %e" ] && '
        '/bin/date -d "100 minutes" +%FT%T',
        6000,
        "",
    ),
    "unlimited": ("echo N/A", None, ""),
    "invalid": ("echo INVALID", None, "Invalid isoformat string: 'INVALID'"),
    "fails": ("echo no controller >&2; exit 1", None, "returned non-zero exit status 1"),
    "hangs": ("exec /bin/sleep 60", None, "timed out after 0.5 seconds"),
    "missing": (None, None, "No such file"),
}


@pytest.mark.parametrize("case", SQUEUE)
def test_slurms_own_word_for_the_time_that_is_left(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body, expected, warning = SQUEUE[case]
    (tmp_path / "bin").mkdir()
    if body is not None:
        (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin/squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setattr(module, "_SQUEUE_TIMEOUT_S", 0.5 if case == "hangs" else 30)
    assert module.seconds_left(None) is None  # no job, no question
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert module.seconds_left(None) == (expected and pytest.approx(expected, abs=60))
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)
    # The environment spares the question, the config has the first word.
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 50))
    assert module.seconds_left(None) == pytest.approx(50, abs=5)
    remaining = module.seconds_left(1e9)
    assert remaining is not None
    assert 1e9 - 1e6 < remaining < 1e9


def test_the_time_since_the_launch_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    started = time.time() - module.seconds_since_launch()
    seen = float(os.popen(f"ps -o etimes= -p {os.getpid()}").read())
    assert time.time() - started == pytest.approx(seen, abs=5)


CASES: dict[
    str, tuple[int, tuple[str, ...], signal.Signals | None, float]
] = {  # ranks, torchrun's options, the signal, seconds of a step
    "SIGTERM to torchrun": (2, (), signal.SIGTERM, 0.2),
    "SIGUSR1 to torchrun": (2, FORWARDED, signal.SIGUSR1, 0.2),
    "SIGUSR1 to one rank": (2, (), signal.SIGUSR1, 0.2),
    "SIGHUP to torchrun": (2, (), signal.SIGHUP, 0.2),  # its terminal was closed
    "SIGTERM to one process, nobody reads": (1, (), signal.SIGTERM, 0.2),
    "deadline": (2, (), None, 1.0),
}


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[int, str, float, dict[str, Any], list[int]]]:
    """Of each selected case, all at a time: exit code, output, seconds from the signal to the end,
    files, and processes that stayed."""
    jobs, result = {}, {}
    for case in selected_values(request, "stop"):
        num_ranks, options, number, step_s = CASES[case]
        folder = tmp_path_factory.mktemp("stop")
        config = write_config(
            folder, folder / "model", training={"max_time_s": 12.0 if number is None else None}
        )
        (folder / "run").mkdir()
        command = torchrun(num_ranks, *options) if num_ranks > 1 else torchrun(1)[:1]
        stdout = full_pipe()[1] if case.endswith("nobody reads") else subprocess.PIPE
        command += ["-m", "tests.support.workers.stop", str(config), str(step_s)]
        jobs[case] = (Job(command, stdout=stdout), folder / "run")
    for case, (job, run_dir) in jobs.items():
        number = CASES[case][2]
        if number is not None:
            progress = run_dir / f"rank_{CASES[case][0] - 1}"
            while not (progress.exists() and progress.read_text() >= "3"):
                assert job.process.poll() is None, job.wait()[1]
                time.sleep(0.05)
            target = job.process.pid
            if case == "SIGUSR1 to one rank":
                target = max(
                    pid
                    for pid in job.running()
                    if b"tests.support.workers.stop" in Path(f"/proc/{pid}/cmdline").read_bytes()
                )
            os.kill(target, number)
        start = time.monotonic()
        code, output = job.wait(60)
        seconds = time.monotonic() - start
        files = {path.name: json.loads(path.read_text()) for path in run_dir.iterdir()}
        result[case] = (code, output, seconds, files, job.survivors())
    return result


@pytest.mark.parametrize("stop", CASES)
def test_all_ranks_stop_alike_and_leave_a_marker(stopped: dict[str, Any], stop: str) -> None:
    code, output, seconds, files, survivors = stopped[stop]
    num_ranks, _, number, _ = CASES[stop]
    marker = files.pop("preempted.json")
    # torchrun's agent was signalled, and says so; its ranks ended well
    assert code == (1 if stop.endswith("to torchrun") else 0), output
    assert seconds < 25
    assert survivors == []
    message = [] if stop.endswith("nobody reads") else [f"stops: {marker['reason']}"] * num_ranks
    assert [line for line in output.splitlines() if "stops: " in line] == message
    # given up before its update, or never begun
    assert files == {f"rank_{rank}": marker["step"] for rank in range(num_ranks)}
    assert marker["saved"] is True
    if number is not None:
        assert marker["reason"] == number.name
    else:
        assert marker["reason"].startswith("deadline: ")
