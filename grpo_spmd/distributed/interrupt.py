"""Ctrl-C. A thread hears it, since the main thread may be in C for seconds: an import, a collective, a matrix product.
What a press does depends on how far the run is: nothing is trained yet, it trains, all is saved. Imports no torch."""

from __future__ import annotations

import math
import os
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

Answer = Callable[[int], None]  # to the first press, the second, ...
# One press may come as several signals: by the terminal and by torchrun, or of a key that is held.
_ONE_PRESS_S = 1.0
_FIRST_SAYS_S = 0.5
_listener: _Listener | None = None
_run_dir: Path | None = None


def listen(answer: Answer | None = None) -> None:
    """From here on a press is answered by `answer`; by default it ends this process, which has not trained yet. Does
    nothing where Ctrl-C is ignored (a shell's background job), or outside the main thread."""
    global _listener
    is_main = threading.current_thread() is threading.main_thread()
    if (
        _listener is None
        and is_main
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        _listener = _Listener(quit_before_training)
    if answer is not None:
        answer_with(answer)
    if (
        is_main
    ):  # whoever started this process may have held it back until somebody hears it (cli.py)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def answer_with(answer: Answer) -> None:
    """For the presses to come; they are counted on."""
    if _listener is not None:
        _listener.answer = answer


def stop_with(stop: Callable[[], bool]) -> None:
    """From here on the first press calls `stop`, which has the run saved and says whether an update is finished before;
    the second ends this process."""

    def answer(number: int) -> None:
        if number > 1:
            newest = _newest_checkpoint()
            what = (
                f"{newest} stands (checkpoint.resume=auto)" if newest else "no checkpoint was saved"
            )
            _quit(f"Ctrl-C: out at once; {what}")
        print_notice(
            f"Ctrl-C: {'finishing the update, then ' if stop() else ''}saving; again to quit now"
        )

    answer_with(answer)


def restore_handler() -> None:
    """In the main thread, where something else may have set a handler of its own."""
    if _listener is not None:
        _listener.take()


def leave_on_second_press(code: int) -> None:
    """All is saved, or the run has failed: it ends by itself, at the second press at once, with this exit code."""
    answer_with(lambda number: exit_process(code) if number > 1 else None)


def set_run_dir(run_dir: str | os.PathLike[str]) -> None:
    """The last words name the newest checkpoint of this folder."""
    global _run_dir
    _run_dir = Path(run_dir)


def print_notice(text: str) -> None:
    """Show one sentence of the first rank of each node, on a line of its own: the terminal has shown ^C."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(("\n" if sys.stderr.isatty() else "") + text)


def quit_before_training(_: int) -> None:
    newest = _newest_checkpoint()
    _quit(
        f"stopped by Ctrl-C before the first step; {f'{newest} stands' if newest else 'nothing was trained'}"
    )


def _quit(text: str) -> NoReturn:
    print_notice(text)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_SAYS_S)  # torchrun ends the others as soon as one is gone
    exit_process(1)


def _newest_checkpoint() -> Path | None:
    """Below the run's folder."""
    if _run_dir is None:
        return None
    found = (_run_dir / "checkpoints").glob("step_*")
    numbers = [path for path in found if path.name.removeprefix("step_").isdecimal()]
    newest = max(numbers, key=lambda path: int(path.name.removeprefix("step_")), default=None)
    return newest and newest.relative_to(_run_dir)


class _Listener:
    def __init__(self, answer: Answer) -> None:
        self.answer, self._num_presses, self._last = answer, 0, -math.inf
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._main_thread = threading.main_thread().ident
        self.take()
        threading.Thread(target=self._listen, args=(reader,), name="Ctrl-C", daemon=True).start()

    def take(self) -> None:
        """Have the interpreter's C handler write the number of each signal; not from a debugger, whose user said
        "continue": there Ctrl-C comes back to its prompt."""
        handler = signal.getsignal(signal.SIGINT)
        is_debuggers = "bdb" in sys.modules and isinstance(
            getattr(handler, "__self__", None), sys.modules["bdb"].Bdb
        )
        if not is_debuggers:
            signal.signal(signal.SIGINT, self._on_signal)
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        """The interpreter calls it in the main thread, as soon as that is in Python: mostly after the answer."""
        if in_debugger(frame):
            raise KeyboardInterrupt
        if not self._num_presses:  # the wakeup descriptor may have become another's (asyncio)
            with suppress(OSError):
                self._writer.send(bytes([signal.SIGINT]))

    def _listen(self, reader: socket.socket) -> None:
        while numbers := reader.recv(64):
            # torchrun turns a second Ctrl-C into SIGTERM.
            is_press = signal.SIGINT in numbers or (
                self._num_presses > 0 and signal.SIGTERM in numbers
            )
            now, is_ours = time.monotonic(), signal.getsignal(signal.SIGINT) == self._on_signal
            if not is_press or not is_ours or now - self._last < _ONE_PRESS_S:
                continue
            if not in_debugger(sys._current_frames().get(self._main_thread or 0)):
                self._last, self._num_presses = now, self._num_presses + 1
                self.answer(self._num_presses)
