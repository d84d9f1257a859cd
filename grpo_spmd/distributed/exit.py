"""How a process ends, in time whatever it is stuck in, and log lines that nobody has to read. Imports no torch."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import Full, Queue
from typing import Any, NoReturn, TextIO

from grpo_spmd.config.errors import printable, say
from grpo_spmd.distributed import startup

_FLUSH_S = 10.0  # what a worker printed may be all that it was for; a reader that is there takes it at once
_WRAPPED: dict[str, Any] = {
    "subsequent_indent": "  ",
    "break_long_words": False,
    "break_on_hyphens": False,
}
_END_S = 60.0  # for vLLM's and NCCL's teardown
_host: Callable[[str], None] | None = None


class Terminal(QueueHandler):
    """Shows log lines on `stream` from a thread of its own, so that a reader who stalls (Ctrl-S, a stuck tee) does not
    hold the run. Lines that find 1,000 waiting are left out."""

    def __init__(self, stream: TextIO) -> None:
        self._lines: Queue[logging.LogRecord | None] = Queue(1000)
        super().__init__(self._lines)
        self._thread = threading.Thread(
            target=self._show, args=(stream,), name="terminal", daemon=True
        )
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            self._lines.put_nowait(record)

    def _show(self, stream: TextIO) -> None:
        while (record := self._lines.get()) is not None:
            line = printable(record.getMessage())
            with suppress(
                OSError, ValueError, AttributeError
            ):  # whoever read it is gone (train | head), or no file
                columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
                if 0 < columns < len(line):
                    line = textwrap.fill(line, max(columns, 40), **_WRAPPED)
                stream.write(
                    f"{line}\n"
                )  # at once: ranks share a pipe, and print() writes the newline by itself
                stream.flush()
            startup.follow(line)
            self._lines.task_done()

    def end(self) -> None:
        """Show what waits, and end the thread. Not close(), which vLLM's set-up of logging calls."""
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(_FLUSH_S)

    def flush(self) -> None:
        """Wait until the lines so far are shown."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)


@contextmanager
def embedded_in(tell: Callable[[str], None]) -> Iterator[None]:
    """Within it this process is not ours to end: whoever would leave it gives `tell` the last words, and its
    thread ends."""
    global _host
    _host = tell
    try:
        yield
    finally:
        _host = None


def is_embedded() -> bool:
    return _host is not None


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """SIGKILL for this process, by the kernel, if the block takes longer: also where it is stopped or stuck in C."""
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    event, moment = (
        struct.pack("Pii48x", 0, signal.SIGKILL, 0),
        struct.pack("4l", 0, 0, int(seconds), 0),
    )
    monotonic, has_timer = (
        1,
        hasattr(libc, "timer_create"),
    )  # not elsewhere than on Linux, nor with an old glibc
    if (
        is_set := _host is None
        and has_timer
        and libc.timer_create(monotonic, event, ctypes.byref(timer)) == 0
    ):
        libc.timer_settime(timer, 0, moment, None)
    try:
        yield
    finally:
        if is_set:
            libc.timer_delete(timer)


@contextmanager
def bounded_teardown() -> Iterator[None]:
    """Around what is taken down when all is saved and every rank knows it. Whoever hangs in it for a minute has come to
    its end all the same, and whoever is stopped is killed: torchrun waits for it, and the nodes would be held."""
    if _host is not None:
        yield
        return
    timer = threading.Timer(_END_S, exit_process, (0,))
    timer.daemon = True
    timer.start()
    try:
        with killed_after(_END_S + 2 * _FLUSH_S):
            yield
    finally:
        timer.cancel()


@killed_after(3 * _FLUSH_S)
def exit_process(code: int, last_words: str = "") -> NoReturn:
    """Exit without finalizers: vLLM's and the process group's wait for peers. The interpreter's own exit now and then
    aborts in threads that gloo left ("terminate called without an active exception"), to torchrun a failed run."""
    if _host is not None:
        _host(last_words)
        raise SystemExit(code)
    try:
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(1.0 if code else _FLUSH_S)
        if last_words:
            say(last_words)
    finally:  # Ctrl-C in here too
        os._exit(code)


def _flush() -> None:
    for stream in (*logging.getLogger("grpo_spmd").handlers, sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe
            stream.flush()


# The error that all ranks share.


class Rank0Error(RuntimeError):
    """`on_rank0` failed on rank 0; every rank raises this, so that none waits for a result that never comes."""
