"""Ends a process in bounded time, whatever it is stuck in, and prints log lines without waiting.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import Full, Queue
from typing import NoReturn, TextIO

from grpo_spmd.config.errors import printable, say, within
from grpo_spmd.distributed import startup

# A worker may have been started only for its output, so it waits this long for a reader.
_FLUSH_S = 10.0
_FAILED_FLUSH_S = 1.0
# The time that vLLM and NCCL get to end.
_END_S = 60.0
_MAX_WAITING_LINES = 1000
_MIN_COLUMNS = 40
# The owner of this process, if the run is embedded in it.
_owner: Callable[[str], None] | None = None


class Rank0Error(RuntimeError):
    """`on_rank0` failed on rank 0. Every rank raises this error: no rank waits for a result."""


class Terminal(QueueHandler):
    """A log handler that prints on `stream` from its own thread.

    A reader who stalls (Ctrl-S, a stuck tee) does not hold up the run. If 1,000 lines are waiting,
    further lines are dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines: Queue[logging.LogRecord | None] = Queue(_MAX_WAITING_LINES)
        super().__init__(self._lines)
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            self._lines.put_nowait(record)

    def _run(self) -> None:
        for record in iter(self._lines.get, None):
            line = printable(record.getMessage())
            # Whoever read it is gone (train | head), or the stream is no file.
            with suppress(OSError, ValueError, AttributeError):
                # One write: ranks share a pipe, and print() writes the newline separately.
                self._stream.write(f"{self._wrap(line)}\n")
                self._stream.flush()
            startup.follow(line)
            self._lines.task_done()

    def _wrap(self, line: str) -> str:
        """Returns the line in the width of the terminal, if the stream is one."""
        is_terminal = self._stream.isatty()
        columns = os.get_terminal_size(self._stream.fileno()).columns if is_terminal else 0
        if not 0 < columns < len(line):
            return line
        return textwrap.fill(
            line,
            max(columns, _MIN_COLUMNS),
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    def end(self) -> None:
        """Prints the waiting lines and ends the thread. Not close(), which vLLM's logging calls."""
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(_FLUSH_S)

    def flush(self) -> None:
        """Waits until the lines so far are printed."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)


@contextmanager
def embedded_in(owner: Callable[[str], None]) -> Iterator[None]:
    """Within the block this process is not ours to end.

    Whatever would end it gives its last words to `owner` instead, and only its thread ends.
    """
    global _owner
    _owner = owner
    try:
        yield
    finally:
        _owner = None


def is_embedded() -> bool:
    """Returns True if the run is embedded in a process that is not its own."""
    return _owner is not None


@contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """Has the kernel kill this process if the block takes longer.

    It also ends a process that is stopped or stuck in C, which no thread of its own could.
    """
    libc = ctypes.CDLL(None)
    # Only Linux has it, with a glibc that is not old.
    if _owner is not None or not hasattr(libc, "timer_create"):
        yield
        return
    timer = ctypes.c_void_p()
    # struct sigevent: value, signal, SIGEV_SIGNAL, padding.
    event = struct.pack("Pii48x", 0, signal.SIGKILL, 0)
    libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer))
    # struct itimerspec: no interval, then seconds and nanoseconds.
    libc.timer_settime(timer, 0, struct.pack("4l", 0, 0, int(seconds), 0), None)
    try:
        yield
    finally:
        libc.timer_delete(timer)


@contextmanager
def bounded_teardown() -> Iterator[None]:
    """Bounds the time of the teardown, after every rank knows that everything is saved.

    If the teardown hangs for a minute, the process exits with 0; if its threads are stuck so that
    even this timer cannot run, it is killed.
    torchrun waits for all ranks, and the nodes would be held.
    """
    if _owner is not None:
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
    """Exits without finalizers, because vLLM's and the process group's wait for other ranks.

    The interpreter's own exit sometimes aborts in threads that gloo left behind ("terminate called
    without an active exception"), which torchrun takes for a failed run.
    """
    # An embedded run: the caller's process lives on, and its owner gets the last words.
    if _owner is not None:
        _owner(last_words)
        raise SystemExit(code)
    try:
        with suppress(TimeoutError):
            within(_FAILED_FLUSH_S if code else _FLUSH_S, _flush)
        if last_words:
            say(last_words)
    finally:
        # Also after another Ctrl-C in here.
        os._exit(code)


def _flush() -> None:
    for stream in (*logging.getLogger("grpo_spmd").handlers, sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe
            stream.flush()
