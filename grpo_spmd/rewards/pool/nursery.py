"""This module runs users' code in processes: a nursery that loads the code once, and its workers.

    python -m MODULE SOCKET_FD SETUP_FD PARENT_PID      (by processes.py; MODULE calls run_nursery)

A *nursery* is a process without torch that imports the users' code once and forks *workers*, which
call the code. The nursery is started by exec, so that no thread, lock or GPU of the rank is
inherited. It adopts all processes that its workers leave (child subreaper), reaps them, and kills
them all when the rank ends, however the rank ends.

A worker serves one call at a time over its own socket. Each message is a *frame*: four bytes of
length and JSON. A worker lives in its own process group, so that one kill ends it together with the
helper processes that the user's code started.
"""

from __future__ import annotations

import ctypes
import datetime
import decimal
import json
import os
import pdb
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.processes import end_with_parent
from grpo_spmd.rewards.named import unpack_functions

# Turns the message of a call into its reply.
Answer = Callable[[dict[str, Any]], dict[str, Any]]
# Takes the setup message of the pool. Returns facts for the pool, and a function that makes the
# Answer of a worker, in that worker.
Load = Callable[[dict[str, Any]], tuple[Any, Callable[["Worker"], Answer]]]

MAX_FRAME_BYTES, MAX_ERROR_CHARS = 1 << 30, 4000
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {number.value: number.name for number in signal.Signals}
# Types of parquet columns that JSON does not know, by name: functions to JSON and back.
_BEYOND_JSON: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes.hex, bytes.fromhex),
    "Decimal": (str, decimal.Decimal),
    "datetime": (str, datetime.datetime.fromisoformat),
    "date": (str, datetime.date.fromisoformat),
    "time": (str, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta.total_seconds,
        lambda seconds: datetime.timedelta(seconds=seconds),
    ),
}
_TAG = "__grpo_spmd_type__"


def encode_frame(message: dict[str, Any]) -> bytes:
    """Returns a frame: a message as JSON after its length in four bytes.

    Raises TypeError for a value whose type is neither JSON's nor in `_BEYOND_JSON`.
    """

    def encode(value: Any) -> Any:
        kind = type(value).__name__
        if kind not in _BEYOND_JSON:
            raise TypeError(
                f"a value of type {kind} cannot be sent to a worker process; make it JSON in the "
                "data"
            )
        return {_TAG: kind, "value": _BEYOND_JSON[kind][0](value)}

    payload = json.dumps(message, default=encode).encode()
    return len(payload).to_bytes(4, "big") + payload


def decode_frame(
    buffer: bytearray, most_bytes: int = MAX_FRAME_BYTES, *, has_types: bool = True
) -> dict[str, Any] | None:
    """Takes one message from the front of `buffer` and returns it, or None while it is incomplete.

    Without `has_types` no value is of a type in `_BEYOND_JSON`. Raises ValueError for bytes that
    are not a message.
    """
    if len(buffer) < 4:
        return None
    end = 4 + int.from_bytes(buffer[:4], "big")
    if end > most_bytes:
        raise ValueError("not a message of a worker")
    if len(buffer) < end:
        return None
    message = json.loads(buffer[4:end], object_hook=_decode_value if has_types else None)
    del buffer[:end]
    if not isinstance(message, dict):
        raise ValueError("not a message of a worker")
    return message


def _decode_value(value: dict[str, Any]) -> Any:
    """Returns the value that `encode_frame` has written as an object of JSON."""
    if value.keys() != {_TAG, "value"}:
        return value
    try:
        return _BEYOND_JSON[value[_TAG]][1](value["value"])
    # Arguments of a call may look like it, which a policy has written.
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return value


class _Debugger(pdb.Pdb):
    """A pdb that continues the program where piped commands end."""

    def do_EOF(self, arg: str) -> bool | None:
        """Leaves the debugger on a terminal; continues the program where piped commands end.

        One worker has read all piped commands, so the end says nothing about the user's wish.
        """
        return super().do_EOF(arg) if sys.stdin.isatty() else self.do_continue(arg)


class Worker:
    """One forked process, which serves calls until its socket ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._buffer = bytearray()
        self._log_fds: tuple[int, int] | None = None
        self._stdin: TextIO | None = None
        sys.breakpointhook = self._breakpoint

    def serve(self, answer: Answer) -> None:
        """Answers one message after the other until the pool closes the socket."""
        while (message := self._receive()) is not None:
            reply = answer(message)
            # The user's code may have closed or replaced these streams.
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            self._leave_terminal()
            self.say(reply)

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message to the pool.

        A child that the user's code forked returns from it too, and ends here instead: only its
        parent answers.
        """
        if os.getpid() != self._pid:
            os._exit(0)
        self._sock.sendall(encode_frame(message))

    def _receive(self) -> dict[str, Any] | None:
        """Returns the next message, or None when the pool has closed the socket."""
        while (message := decode_frame(self._buffer)) is None:
            chunk = self._sock.recv(1 << 20)
            if not chunk:
                return None
            self._buffer += chunk
        return message

    def _breakpoint(self, *_arguments: Any, **_options: Any) -> None:
        """Serves breakpoint() in user code.

        The pool stops this call's clock and lends the terminal, on which pdb runs.
        """
        if os.environ.get("PYTHONBREAKPOINT") == "0" or os.getpid() != self._pid:
            return
        if self._log_fds is None:
            self.say({"breakpoint": self._pid})
            # The answer brings the rank's standard streams, which no other call can reach.
            frame, terminal, *_ = socket.recv_fds(self._sock, 1 << 10, 2)
            self._buffer += frame
            if len(terminal) != 2 or self._receive() is None:
                os._exit(0)
            sys.stdout.flush()
            self._log_fds = os.dup(0), os.dup(1)
            for fd, stream in enumerate(terminal):
                os.dup2(stream, fd)
                os.close(stream)
            # The same stream serves later breakpoints: it may hold piped commands for them.
            if self._stdin is None:
                self._stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdin = self._stdin
        _Debugger().set_trace(sys._getframe(1))

    def _leave_terminal(self) -> None:
        """Gives the terminal back after a debugged call."""
        for fd, log_fd in enumerate(self._log_fds or ()):
            os.dup2(log_fd, fd)
            os.close(log_fd)
        self._log_fds = None


def run_nursery(load: Load) -> None:
    """Runs the nursery and does not return; sys.argv is as above."""
    _Nursery(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3]), load).run()


class _Nursery:
    """The process that loads the user's code once and forks workers from it."""

    def __init__(self, rank: socket.socket, parent_pid: int, load: Load) -> None:
        self._rank, self._load = rank, load
        # The number by which the pool knows a worker, by the worker's pid.
        self._workers: dict[int, int] = {}
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        # Only Linux has prctl.
        with suppress(AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        end_with_parent(signal.SIGTERM, parent_pid)

    def run(self) -> None:
        """Serves the rank until it ends. Does not return."""
        try:
            # This error says that the rank died before it read all messages.
            with suppress(ConnectionError):
                self._serve()
        except BaseException:
            traceback.print_exc()
            self._end(code=1)
        self._end()

    def _serve(self) -> None:
        """Loads the user's code, then forks and kills workers as the pool asks."""
        with open(int(sys.argv[2]), "rb") as file:
            setup: Any = decode_frame(bytearray(file.read()))
        sys.path[:] = setup["sys_path"]
        try:
            unpack_functions(setup["functions"])
            facts, make = self._load(setup)
        except BaseException as error:
            text = (
                str(error)
                if isinstance(error, ConfigError)
                else "".join(traceback.format_exception(error))
            )
            self._tell({"error": text[-MAX_ERROR_CHARS:]})
            os._exit(1)
        self._tell({"ready": facts})
        selector = selectors.DefaultSelector()
        selector.register(self._rank, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._reap()
                    continue
                payload, fds, _, _ = socket.recv_fds(self._rank, 1 << 16, 2)
                if not payload:
                    self._end()
                message = json.loads(payload)
                if "spawn" in message:
                    self._spawn(make, message["spawn"], *fds)
                else:
                    for pid, number in self._workers.items():
                        if number == message["kill"]:
                            _kill_group(pid)

    def _spawn(
        self, make: Callable[[Worker], Answer], number: int, sock_fd: int, log_fd: int
    ) -> None:
        """Forks a worker that serves the socket `sock_fd` and writes its output to `log_fd`."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                nursery_pid = os.getppid()
                # The worker leads a new group, so that one kill reaches its helpers too.
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                for number_ in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number_, signal.SIG_DFL)
                end_with_parent(signal.SIGKILL, nursery_pid)
                self._rank.close()
                os.close(self._wakeup)
                os.dup2(log_fd, 1)
                os.dup2(log_fd, 2)
                os.close(log_fd)
                for stream in (sys.stdout, sys.stderr):
                    stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
                worker = Worker(socket.socket(fileno=sock_fd))
                worker.serve(make(worker))
                status = 0
            except OSError:
                # The pool is gone, or the user's code closed the worker's socket.
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(sock_fd)
        os.close(log_fd)
        # This thread also reaps, so the worker cannot have died unnoticed before this line.
        self._workers[pid] = number

    def _reap(self) -> None:
        """Reaps dead children and tells the pool which workers died.

        The group of a dead worker is killed before the worker's pid is free again. Adopted helpers
        are killed too.
        """
        while (ended := _first_dead_child()) is not None:
            if ended.si_pid in self._workers:
                _kill_group(ended.si_pid)
                os.waitpid(ended.si_pid, 0)
                code = ended.si_status
                how = f"died of {_SIGNALS.get(code, f'signal {code}')}"
                if ended.si_code == os.CLD_EXITED:
                    how = f"exited with code {code}"
                self._kill_adopted()
                self._tell({"died": self._workers.pop(ended.si_pid), "how": how})
            else:
                os.waitpid(ended.si_pid, 0)

    def _kill_adopted(self, patience_s: float = 2) -> None:
        """Kills adopted processes until there are none.

        Each kill may hand the killed process's children to the nursery.
        """
        deadline = time.monotonic() + patience_s
        while adopted := [pid for pid in _children() if pid not in self._workers]:
            for pid in adopted:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            # Some process is in an uninterruptible wait, perhaps for a dead file server.
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends a message to the pool; ends the nursery if the rank is gone."""
        try:
            self._rank.send(json.dumps(message).encode())
        except OSError:
            self._end()

    def _end(self, *_: Any, code: int = 0) -> None:
        """Kills all workers and their helpers, and exits.

        The patience is long, since nobody kills them afterwards: a machine may stall for seconds.
        """
        for pid in self._workers:
            _kill_group(pid)
        self._workers.clear()
        self._kill_adopted(patience_s=60)
        os._exit(code)


def _first_dead_child() -> Any:
    """Returns the first dead child without reaping it, or None."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None


def _children() -> list[int]:
    # A kernel without CONFIG_PROC_CHILDREN has no such file.
    with suppress(OSError):
        return [
            int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ]
    return []


def _kill_group(pid: int) -> None:
    """Kills a process group, and its leader if the group does not exist yet."""
    # The process may not have made its group yet.
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
