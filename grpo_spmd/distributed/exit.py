"""Ends a process within a time limit, even a stuck one, and prints log lines without waiting.

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

# How long an exiting process waits until its output was read: longer after a success, because the
# output may be all that the process was started for.
_FLUSH_S = 10.0
_FAILED_FLUSH_S = 1.0
# How long the teardown of vLLM and NCCL may take.
_END_S = 60.0
_MAX_WAITING_LINES = 1000
_MIN_COLUMNS = 40  # lines are not wrapped to less, however narrow the terminal is
# Takes the last words of a run that is embedded in somebody else's process (`embedded_in`).
_owner: Callable[[str], None] | None = None


class Rank0Error(RuntimeError):
    """Raised on every rank if a function that rank 0 ran for all (`on_rank0`) has failed."""


class Terminal(QueueHandler):
    """A log handler that prints on `stream` from its own thread.

    A reader who stalls (Ctrl-S, a stuck tee) does not hold up the run. If 1,000 lines are waiting,
    further lines are dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        """Starts the thread that prints on `stream`."""
        self._lines: Queue[logging.LogRecord | None] = Queue(_MAX_WAITING_LINES)
        super().__init__(self._lines)
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Hands a record to the thread; drops it if too many lines are waiting."""
        with suppress(Full):
            self._lines.put_nowait(record)

    def _run(self) -> None:
        """Prints each record that is enqueued, until it gets None; the body of the thread."""
        for record in iter(self._lines.get, None):
            line = printable(record.getMessage())
            # The reader may be gone (train | head), or the stream may be no real file.
            with suppress(OSError, ValueError, AttributeError):
                # One write: ranks share a pipe, and print() writes the newline separately.
                self._stream.write(f"{self._wrap(line)}\n")
                self._stream.flush()
            startup.follow(line)
            self._lines.task_done()

    def _wrap(self, line: str) -> str:
        """Returns the line wrapped to the terminal's width; unchanged if there is no terminal."""
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
        """Prints the waiting lines and ends the thread.

        This is not close(), which vLLM's logging setup calls on every handler while the run goes
        on.
        """
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(_FLUSH_S)

    def flush(self) -> None:
        """Waits until all lines so far are printed, at most 10 s."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)


@contextmanager
def embedded_in(owner: Callable[[str], None]) -> Iterator[None]:
    """Marks the run as embedded in the caller's process (a script, a notebook) within the block.

    Then `exit_process` does not end the process: it passes its last words to `owner` and ends only
    the thread that called it, by SystemExit.
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
    """Makes the kernel kill this process (SIGKILL) if the block takes longer than `seconds`.

    That works even if the process is stopped or stuck in C, where none of its own threads could
    act. An embedded run is never killed.
    """
    libc = ctypes.CDLL(None)
    # timer_create is missing outside Linux, and in old versions of glibc.
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
    """Limits the time of the teardown in the block to a minute, after which the process exits.

    Use it once every rank knows that all is saved. The exit code is then 0. If the threads are so
    stuck that this timer cannot run, the kernel kills the process 20 s later. Otherwise torchrun
    would wait for the rank that hangs, and the nodes would stay allocated.
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
    """Flushes the output, prints `last_words` on stderr and exits with `code`, without finalizers.

    The finalizers of vLLM and of the process group would wait for other ranks. And the
    interpreter's own exit sometimes aborts in threads that gloo left behind ("terminate called
    without an active exception"), which torchrun takes for a failed run.
    """
    # In an embedded run the caller's process lives on, and its owner gets the last words.
    if _owner is not None:
        _owner(last_words)
        raise SystemExit(code)
    try:
        with suppress(TimeoutError):
            within(_FAILED_FLUSH_S if code else _FLUSH_S, _flush)
        if last_words:
            say(last_words)
    finally:
        # Exit even if another Ctrl-C has interrupted the lines above.
        os._exit(code)


def _flush() -> None:
    """Flushes the log's handlers, stdout and stderr. Streams that nobody reads are skipped."""
    for stream in (*logging.getLogger("grpo_spmd").handlers, sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed pipe
            stream.flush()
