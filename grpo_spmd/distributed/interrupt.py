"""Handles Ctrl-C. Its effect depends on whether the run starts, trains, or has saved everything.

A thread of its own reacts to the press: the main thread may be in C for seconds (in an import, a
collective or a matrix product), where Python calls no signal handler. Imports no torch.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from grpo_spmd.config.errors import say
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.distributed.processes import in_debugger

# Called with 1 at the first press of Ctrl-C, with 2 at the second, and so on.
PressHandler = Callable[[int], None]
# The other signals that stop a run. SIGHUP: the terminal or its ssh connection was closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Signals within this time count as one press: both the terminal and torchrun may send one, and a
# key may be held down.
_ONE_PRESS_S = 1.0
# How long the other ranks of a node wait before they exit, so that the first one can print.
_FIRST_RANK_S = 0.5
_listener: _Listener | None = None
_run_dir: Path | None = None


def listen(handler: PressHandler | None = None) -> None:
    """Makes Ctrl-C call `handler`. As long as none was given, Ctrl-C ends this process.

    Installs nothing outside the main thread, or where SIGINT has no default handler: in a shell's
    background job Ctrl-C is ignored.
    """
    global _listener
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _listener is None and is_main and is_default:
        _listener = _Listener(quit_before_training)
    if handler is not None:
        _set_handler(handler)
    # The parent process may have blocked SIGINT, so that no press is lost before it can be handled
    # (cli.py, launch.py).
    if is_main:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _set_handler(handler: PressHandler) -> None:
    """Replaces the function that a press calls, if `listen` has installed anything.

    The number of presses is not reset.
    """
    if _listener is not None:
        _listener.handler = handler


def stop_with(stop: Callable[[], bool]) -> None:
    """Makes the first press call `stop`, and the second one end this process.

    `stop` makes the run save and end. It returns True if the run finishes an update first.
    """

    def handler(number: int) -> None:
        """Stops the run at the first press, and ends this process at the second one."""
        if number > 1:
            _quit(f"Ctrl-C: out at once; {_newest_checkpoint()}")
        update = "finishing the update, then " if stop() else ""
        print_notice(f"Ctrl-C: {update}saving; again to quit now")

    _set_handler(handler)


def restore_handler() -> None:
    """Installs our signal handler again (in the main thread): a library may have replaced it."""
    if _listener is not None:
        _listener.install()


def leave_on_second_press(code: int) -> None:
    """Makes a second press exit at once with `code`; a first one does nothing. For a run's end."""
    _set_handler(lambda number: exit_process(code) if number > 1 else None)


def set_run_dir(run_dir: str | os.PathLike[str]) -> None:
    """Sets the run folder; the line printed at Ctrl-C names the newest checkpoint in it."""
    global _run_dir
    _run_dir = Path(run_dir)


def print_notice(text: str) -> None:
    """Prints one sentence on stderr, from the first rank of each node only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # A new line first, because the terminal has printed ^C.
        say(("\n" if sys.stderr.isatty() else "") + text)


def quit_before_training(_: int) -> None:
    """Ends this process with code 1: the handler of Ctrl-C until training begins."""
    _quit(f"stopped by Ctrl-C before the first step; {_newest_checkpoint()}")


def quit_evaluation(scratch: str) -> None:
    """Makes a press of Ctrl-C end this process, which evaluates a policy without training.

    `scratch` is the folder of the evaluation's temporary files, which is removed then.
    """

    def answer(_: int) -> None:
        """Removes the evaluation's files and ends this process."""
        shutil.rmtree(scratch, ignore_errors=True)
        _quit("stopped by Ctrl-C; the evaluation has no figures")

    _set_handler(answer)


def _quit(text: str) -> NoReturn:
    """Prints `text` on the first rank of each node, and ends this process with code 1."""
    print_notice(text)
    # torchrun ends the other ranks as soon as one is gone, and the first rank must print before.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_RANK_S)
    exit_process(1)


def _newest_checkpoint() -> str:
    """Returns a text that names the newest checkpoint in the run folder."""
    folder = (_run_dir or Path()) / "checkpoints"
    # The name of a checkpoint that is still being written has a suffix after the number.
    steps = [int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    if _run_dir is None or not steps:
        return "no checkpoint was saved"
    return f"checkpoints/step_{max(steps):06} stands (checkpoint.resume=auto)"


class _Listener:
    """A thread that receives Ctrl-C through Python's wakeup descriptor and calls `handler`."""

    def __init__(self, handler: PressHandler) -> None:
        """Installs the signal handler, and starts the thread that calls `handler` at each press."""
        self.handler = handler
        self._num_presses = 0
        self._last_press = -math.inf
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._main_thread = threading.main_thread().ident
        self.install()
        threading.Thread(target=self._run, args=(reader,), name="Ctrl-C", daemon=True).start()

    def install(self) -> None:
        """Sets signal.set_wakeup_fd, so that Python writes each signal's number to the socket.

        Does nothing while pdb handles SIGINT: after its `continue`, Ctrl-C must bring back pdb's
        prompt.
        """
        debugger = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        if "bdb" not in sys.modules or not isinstance(debugger, sys.modules["bdb"].Bdb):
            signal.signal(signal.SIGINT, self._on_signal)
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        """Python's own handler of SIGINT. It runs only once the main thread executes Python code.

        By then our thread has mostly handled the press.
        """
        if in_debugger(frame):
            raise KeyboardInterrupt
        # If no press has arrived yet, asyncio may have replaced the wakeup descriptor.
        if not self._num_presses:
            with suppress(OSError):
                self._writer.send(bytes([signal.SIGINT]))

    def _run(self, reader: socket.socket) -> None:
        """Calls `handler` for each press. `reader` receives the number of each signal."""
        for numbers in iter(lambda: reader.recv(64), b""):
            # torchrun turns a second Ctrl-C into SIGTERM.
            is_second = self._num_presses > 0 and signal.SIGTERM in numbers
            is_press = signal.SIGINT in numbers or is_second
            is_ours = signal.getsignal(signal.SIGINT) == self._on_signal
            time_s = time.monotonic()
            if not is_press or not is_ours or time_s - self._last_press < _ONE_PRESS_S:
                continue
            frame = sys._current_frames().get(self._main_thread or 0)
            if not in_debugger(frame):
                self._last_press = time_s
                self._num_presses += 1
                self.handler(self._num_presses)
