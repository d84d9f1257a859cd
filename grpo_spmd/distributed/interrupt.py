"""Ctrl-C. What a press does depends on whether the run starts, trains, or has saved everything.

A thread hears it, because the main thread may be in C for seconds: in an import, a collective or a
matrix product. Imports no torch.
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

# Called with 1 at the first press, 2 at the second, ...
Answer = Callable[[int], None]
# Other signals that stop a run. SIGHUP: the terminal was closed, or its ssh connection has ended.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# One press may arrive as several signals: from the terminal and from torchrun, or from a held key.
_ONE_PRESS_S = 1.0
# The first rank of a node prints before the others exit.
_FIRST_RANK_S = 0.5
_listener: _Listener | None = None
_run_dir: Path | None = None


def listen(answer: Answer | None = None) -> None:
    """From now on Ctrl-C calls `answer`; until one is given it ends this process, since training
    has not begun.

    Installs no handler where Ctrl-C is ignored (a background job of a shell), or outside the main
    thread."""
    global _listener
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _listener is None and is_main and is_default:
        _listener = _Listener(quit_before_training)
    if answer is not None:
        _answer_with(answer)
    # The parent process may have blocked it until somebody handles it (cli.py).
    if is_main:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _answer_with(answer: Answer) -> None:
    """Changes the handler; presses are counted on."""
    if _listener is not None:
        _listener.answer = answer


def stop_with(stop: Callable[[], bool]) -> None:
    """From now on the first press calls `stop`, and the second ends this process.

    `stop` has the run saved; it returns True if an update is finished before.
    """

    def answer(number: int) -> None:
        if number > 1:
            _quit(f"Ctrl-C: out at once; {_newest_checkpoint()}")
        update = "finishing the update, then " if stop() else ""
        print_notice(f"Ctrl-C: {update}saving; again to quit now")

    _answer_with(answer)


def restore_handler() -> None:
    """Installs the signal handler again, in the main thread. A library may have set its own."""
    if _listener is not None:
        _listener.install()


def leave_on_second_press(code: int) -> None:
    """From now on the run ends by itself, and a second press ends it at once with this code."""
    _answer_with(lambda number: exit_process(code) if number > 1 else None)


def set_run_dir(run_dir: str | os.PathLike[str]) -> None:
    """Sets the folder whose newest checkpoint the last words name."""
    global _run_dir
    _run_dir = Path(run_dir)


def print_notice(text: str) -> None:
    """Prints one sentence from the first rank of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # On its own line: the terminal has shown ^C.
        say(("\n" if sys.stderr.isatty() else "") + text)


def quit_before_training(_: int) -> None:
    _quit(f"stopped by Ctrl-C before the first step; {_newest_checkpoint()}")


def quit_evaluation(scratch: str) -> None:
    """From now on a press ends this process, an evaluation whose folder of files is `scratch`."""

    def answer(_: int) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        _quit("stopped by Ctrl-C; the evaluation has no figures")

    _answer_with(answer)


def _quit(text: str) -> NoReturn:
    print_notice(text)
    # torchrun ends the others as soon as one rank is gone.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_RANK_S)
    exit_process(1)


def _newest_checkpoint() -> str:
    """Returns in words which checkpoint of the run's folder is the newest."""
    folder = (_run_dir or Path()) / "checkpoints"
    # Folders that are being written have another ending.
    steps = [int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    if _run_dir is None or not steps:
        return "no checkpoint was saved"
    return f"checkpoints/step_{max(steps):06} stands (checkpoint.resume=auto)"


class _Listener:
    """Thread that receives Ctrl-C through Python's wakeup descriptor and calls `answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
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
        """The interpreter calls it once the main thread runs Python, mostly after the answer."""
        if in_debugger(frame):
            raise KeyboardInterrupt
        # asyncio may have replaced the wakeup descriptor.
        if not self._num_presses:
            with suppress(OSError):
                self._writer.send(bytes([signal.SIGINT]))

    def _run(self, reader: socket.socket) -> None:
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
                self.answer(self._num_presses)
