"""What a Ctrl-C does, by how far the run is; on real processes without torch, a second or two
each."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment

# Says "ready", then lets the main thread wait in C, where Python's own handlers never run.
PROGRAM = """
import ctypes, signal, sys, time
from grpo_spmd.distributed import interrupt
{before}
interrupt.listen()
interrupt.set_run_dir(sys.argv[1])
{body}
print("ready", flush=True)
while True:
    ctypes.CDLL(None).usleep(50_000)
"""
TRAINS = "interrupt.stop_with(lambda: print('stops', flush=True) or {in_update})"


def start(folder: Path, body: str = "", old: str = "") -> subprocess.Popen[str]:
    program = PROGRAM.format(body=body, before=old)
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


def test_before_the_first_step_it_ends_at_once_with_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for newest in (None, "step_000012"):
        if newest is not None:
            for name in ("step_000009", newest, "step_000020.tmp", "step_000030.aside"):
                (folder / name).mkdir(parents=True)
        process = ready(start(tmp_path))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        says = f"checkpoints/{newest} stands (checkpoint.resume=auto)"
        if newest is None:
            says = "no checkpoint was saved"
        assert (process.returncode, out, err) == (
            1,
            "",
            f"stopped by Ctrl-C before the first step; {says}\n",
        )


def test_other_ranks_of_a_node_say_nothing(tmp_path: Path) -> None:
    process = ready(start(tmp_path, old="import os; os.environ['LOCAL_RANK'] = '1'"))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 1


def test_one_that_came_before_anybody_heard_it_is_not_lost(tmp_path: Path) -> None:
    """As in a rank whose interpreter is just starting: its parent has held the signal back."""
    hold = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); "
        "signal.raise_signal(signal.SIGINT)"
    )
    process = start(tmp_path, old=hold)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err == "stopped by Ctrl-C before the first step; no checkpoint was saved\n"
    assert out in ("", "ready\n")


@pytest.mark.parametrize(
    "second", [signal.SIGINT, signal.SIGTERM]
)  # the latter is how torchrun passes on the second
def test_while_it_trains_the_first_stops_the_run_and_the_second_ends_it(
    tmp_path: Path, second: signal.Signals
) -> None:
    in_update = second is signal.SIGINT
    handler = "signal.signal(signal.SIGTERM, lambda *_: None)"
    process = ready(start(tmp_path, TRAINS.format(in_update=in_update), handler))
    process.send_signal(signal.SIGTERM)  # no press yet
    time.sleep(1.1)
    for _ in range(3):  # one press, which came from the terminal and from torchrun, twice
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(second)
    out, err = process.communicate(timeout=20)
    initial = (
        f"Ctrl-C: {'finishing the update, then ' if in_update else ''}saving; again to quit now"
    )
    final = "Ctrl-C: out at once; no checkpoint was saved"
    assert (process.returncode, out, err.splitlines()) == (1, "stops\n", [initial, final])


def test_when_all_is_saved_only_the_second_ends_it_and_well(tmp_path: Path) -> None:
    process = ready(start(tmp_path, "interrupt.leave_on_second_press(0)"))
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


def test_a_job_in_the_background_goes_on(tmp_path: Path) -> None:
    """A shell has its background jobs ignore Ctrl-C."""
    process = ready(start(tmp_path, old="signal.signal(signal.SIGINT, signal.SIG_IGN)"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_the_demos_model_half_made_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_spmd.demo", "--out", str(tmp_path / "demo")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (
        1,
        "demo: stopped by Ctrl-C; the demo's model is not made\n",
    )
    assert max(map(len, out.splitlines())) <= 80 or str(tmp_path) in out
    assert list(tmp_path.iterdir()) == []


DEBUGGED = """
import time
from grpo_spmd.distributed import interrupt
interrupt.listen()
interrupt.stop_with(lambda: print("stops", flush=True))
breakpoint()
while True:
    interrupt.restore_handler()  # as each step does
    print("works", flush=True)
    time.sleep(0.1)
"""


def test_a_debuggers_prompt_and_its_continue_keep_ctrl_c_to_themselves() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", DEBUGGED])
    displayed = ""

    def type_and_read(keys: bytes, text: str) -> str:
        nonlocal displayed
        os.write(terminal, keys)
        deadline = time.monotonic() + 30
        while text not in displayed:
            assert time.monotonic() < deadline, displayed
            if select.select([terminal], [], [], 1)[0]:
                displayed += os.read(terminal, 4096).decode()
        old, _, displayed = displayed.partition(text)
        return old

    message = type_and_read(b"", "(Pdb) ")
    message += type_and_read(b"import time; time.sleep(100)\n", "100")
    time.sleep(0.5)
    message += type_and_read(b"\x03", "(Pdb) ")
    assert "KeyboardInterrupt" in message
    message += type_and_read(b"c\n", "works")
    message += type_and_read(b"\x03", "(Pdb) ")  # a program that goes on is interrupted where it is
    assert "stops" not in message
    assert "saving" not in message
    os.write(terminal, b"import os; os._exit(7)\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(terminal)
