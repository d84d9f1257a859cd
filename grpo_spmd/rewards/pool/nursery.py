"""This module runs users' code in processes: a nursery that loads the code once, and its workers.

    python -m MODULE SOCKET_FD SETUP_FD PARENT_PID

processes.py starts it with a MODULE that calls `run_nursery`. A *nursery* is a process without
torch that imports the users' code once and forks *workers*, which call the code. The nursery is a
new program (exec), so it inherits no thread, lock or GPU of the rank. As a child subreaper it
becomes the parent of all processes that its workers leave behind. It reaps them, and kills all of
them when the rank ends, even if the rank was killed.

A worker serves one call at a time over its own socket. Each message is a *frame*: its length in
four bytes, then its content. The rank's messages are pickled, since the worker is the rank's own
child and gets them from nobody else; the workers' messages, into which the user's code may write
anything, are JSON. A worker leads its own process group, so that one kill ends it together with the
helper processes that the user's code started.
"""

from __future__ import annotations

import ctypes
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
from grpo_spmd.records import Fields
from grpo_spmd.rewards.named import unpack, unpack_functions

# A function of a worker that takes the message of a call and returns the reply.
Answer = Callable[[Fields], Fields]
# A function of the nursery that takes the pool's setup message and loads the user's code. It
# returns facts for the pool, and a function that each worker calls to create its Answer.
Load = Callable[[Fields], tuple[Any, Callable[["Worker"], Answer]]]

MAX_FRAME_BYTES, MAX_ERROR_CHARS = 1 << 30, 4000
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {number.value: number.name for number in signal.Signals}


def to_frame(payload: bytes) -> bytes:
    """Returns a message as a frame: its length in four bytes, then the message."""
    return len(payload).to_bytes(4, "big") + payload


def take_frame(buffer: bytearray, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """Removes one message from the front of `buffer` and returns it, or None if it is incomplete.

    Raises ValueError for a message of more than `max_bytes` bytes.
    """
    end = 4 + int.from_bytes(buffer[:4], "big")
    if end > max_bytes:
        raise ValueError("not a message of a worker")
    if len(buffer) < max(end, 5):
        return None
    message = bytes(buffer[4:end])
    del buffer[:end]
    return message


class _Debugger(pdb.Pdb):
    """The debugger for breakpoint() in a worker: pdb, but when commands that were piped to its
    stdin end, it continues the program."""

    def do_EOF(self, arg: str) -> bool | None:
        """Leaves the debugger at Ctrl-D on a terminal, but continues at the end of piped commands.

        A pipe may be at its end only because another worker has read all of it.
        """
        return super().do_EOF(arg) if sys.stdin.isatty() else self.do_continue(arg)


class Worker:
    """The worker's side of a forked process: it serves calls until the pool closes its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._buffer = bytearray()
        self._log_fds: tuple[int, int] | None = None
        self._stdin: TextIO | None = None
        sys.breakpointhook = self._breakpoint

    def serve(self, answer: Answer) -> None:
        """Replies to one message after the other until the pool closes the socket."""
        while (message := self._receive()) is not None:
            reply = answer(message)
            # The user's code may have closed or replaced these streams.
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            self._leave_terminal()
            self.say(reply)

    def say(self, message: Fields) -> None:
        """Sends a message to the pool.

        If the user's code forked, the child process, too, returns from that code to this method. It
        ends here, so that only the worker answers.
        """
        if os.getpid() != self._pid:
            os._exit(0)
        self._sock.sendall(to_frame(json.dumps(message).encode()))

    def _receive(self) -> Any:
        """Returns the next message, or None when the pool has closed the socket."""
        while (message := take_frame(self._buffer)) is None:
            chunk = self._sock.recv(1 << 20)
            if not chunk:
                return None
            self._buffer += chunk
        return unpack(message)

    def _breakpoint(self, *_arguments: Any, **_options: Any) -> None:
        """Runs pdb for breakpoint() in the user's code.

        It first asks the pool, which stops the call's clock and lends the rank's terminal.
        """
        if os.environ.get("PYTHONBREAKPOINT") == "0" or os.getpid() != self._pid:
            return
        if self._log_fds is None:
            self.say({"breakpoint": self._pid})
            # The answer comes with the rank's stdin and stdout. No other worker has them meanwhile.
            frame, terminal, *_ = socket.recv_fds(self._sock, 1 << 10, 2)
            self._buffer += frame
            if len(terminal) != 2 or self._receive() is None:
                os._exit(0)
            sys.stdout.flush()
            self._log_fds = os.dup(0), os.dup(1)
            for fd, stream in enumerate(terminal):
                os.dup2(stream, fd)
                os.close(stream)
            # Kept for later breakpoints: its buffer may already have piped commands for them.
            if self._stdin is None:
                self._stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdin = self._stdin
        _Debugger().set_trace(sys._getframe(1))

    def _leave_terminal(self) -> None:
        """Restores the worker's own streams after a call that used the terminal."""
        for fd, log_fd in enumerate(self._log_fds or ()):
            os.dup2(log_fd, fd)
            os.close(log_fd)
        self._log_fds = None


def run_nursery(load: Load) -> None:
    """Runs the nursery with the arguments in sys.argv (see the top of the file). Never returns."""
    _Nursery(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3]), load).run()


class _Nursery:
    """The process that loads the user's code once and forks workers from it."""

    def __init__(self, rank_socket: socket.socket, parent_pid: int, load: Load) -> None:
        """`rank_socket` is connected to the pool, in the process `parent_pid` (the rank). `load`
        loads the user's code."""
        self._rank_socket, self._load = rank_socket, load
        # By pid of a worker: the number by which the pool knows it.
        self._workers: dict[int, int] = {}
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        end_with_parent(signal.SIGTERM, parent_pid)

    def run(self) -> None:
        """Serves the rank until it ends. Never returns."""
        try:
            # ConnectionError: the rank died before it had read all messages.
            with suppress(ConnectionError):
                self._serve()
        except BaseException:
            traceback.print_exc()
            self._end(code=1)
        self._end()

    def _serve(self) -> None:
        """Loads the user's code and tells the pool how that went, then forks and kills workers as
        the pool orders, until the pool closes the socket."""
        with open(int(sys.argv[2]), "rb") as file:
            setup = unpack(file.read())
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
        selector.register(self._rank_socket, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == self._wakeup:
                    os.read(self._wakeup, 4096)
                    self._reap()
                    continue
                payload, fds, _, _ = socket.recv_fds(self._rank_socket, 1 << 16, 2)
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
                # The worker leads a new process group, so that one kill also ends its helpers.
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                for signal_number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(signal_number, signal.SIG_DFL)
                end_with_parent(signal.SIGKILL, nursery_pid)
                self._rank_socket.close()
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
                # The pool is gone, or the user's code closed the worker's socket. (An OSError of
                # the user's code itself has become a reply.)
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(sock_fd)
        os.close(log_fd)
        # The worker may have died already, but only this thread reaps children, so its death is
        # still to be handled and will find this entry.
        self._workers[pid] = number

    def _reap(self) -> None:
        """Reaps dead children and tells the pool which workers died.

        A dead worker's process group is killed first, while its number (the worker's pid) cannot
        have been reused yet. Helpers that left the group are killed too.
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
        """Kills the processes that workers have left to the nursery, until there are none.

        Each kill may make the nursery the parent of the killed process's children.
        """
        deadline = time.monotonic() + patience_s
        while adopted := [pid for pid in _children() if pid not in self._workers]:
            for pid in adopted:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            # Give up on a process in an uninterruptible wait, perhaps for a dead file server.
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _tell(self, message: Fields) -> None:
        """Sends a message to the pool; ends the nursery if the rank is gone."""
        try:
            self._rank_socket.send(json.dumps(message).encode())
        except OSError:
            self._end()

    def _end(self, *_: Any, code: int = 0) -> None:
        """Kills all workers and their helpers, and exits. Also the handler of SIGTERM.

        It waits up to a minute for their end, since nobody would kill them afterwards.
        """
        for pid in self._workers:
            _kill_group(pid)
        self._workers.clear()
        self._kill_adopted(patience_s=60)
        os._exit(code)


def _first_dead_child() -> Any:
    """Returns the result of waitid for a dead child, which is not reaped, or None without one."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None


def _children() -> list[int]:
    """Returns the pids of this process's children."""
    # A kernel without CONFIG_PROC_CHILDREN has no such file.
    with suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(pid) for pid in children.split()]
    return []


def _kill_group(pid: int) -> None:
    """Kills the process group that a worker leads, and the worker itself, which may not have
    created its group yet."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
