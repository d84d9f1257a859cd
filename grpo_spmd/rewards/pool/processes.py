"""This module has the rank's side of processes that run users' code, one call at a time each.

The rank starts one small process by exec, the nursery (nursery.py), which loads the user's code
once and forks workers. The rank's side sends calls to the workers, kills a worker whose call passes
its deadline, lends the terminal to a debugger, and limits the size of the file with the workers'
output. Subclasses of `ProcessPool` define what a call is, and what happens after its answer or
failure.
"""

from __future__ import annotations

import json
import math
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.records import Fields
from grpo_spmd.rewards.named import pack, pack_functions
from grpo_spmd.rewards.pool.nursery import MAX_ERROR_CHARS, MAX_FRAME_BYTES, take_frame, to_frame
from grpo_spmd.rewards.trl import RewardError

# Seconds for the nursery to start. This is long, since a user's file may load a model on import.
_START_S = 600.0
_MAX_LOG_BYTES = 16 << 20
# Environment variables with secrets of the hub and of experiment trackers.
_TRAINER_SECRETS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
# How long the nursery may take to report a worker's death after the worker's socket has ended.
_GONE_GRACE_S = 1.0
# How long to wait for the rest of a message of which a part has arrived.
_PATIENCE_S = 0.02
# The number of files that a rank may have open besides the sockets of its workers.
_OTHER_FILES = 100
HowItFailed = Literal["error", "timeout"]


@dataclass(eq=False)
class WorkerProcess:
    """What the pool knows about one worker."""

    number: int
    sock: socket.socket
    # Bytes that were received, but are not a whole message yet.
    buffer: bytearray = field(default_factory=bytearray)
    # The running call, or None if the worker is idle.
    call: Any = None
    deadline: float = math.inf
    # True if its socket has ended or sent something that is not a message.
    has_hung_up: bool = False
    # The worker's pid while it waits for the terminal, else 0.
    waiting_pid: int = 0


def allow_workers(num_workers: int, key: str) -> None:
    """Increases this process's limit of open files so that it can have `num_workers` workers.

    Each worker takes one file, its socket. Raises ConfigError if the hard limit is too low; `key`
    is the config key that sets the number.
    """
    needed = num_workers + _OTHER_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if needed > hard != resource.RLIM_INFINITY:
        raise ConfigError(
            f"{key} ({num_workers}) needs {needed} open files on each rank, and the limit of open "
            f"files (ulimit -Hn) is {hard}: at most {max(hard - _OTHER_FILES, 1)} workers fit"
        )
    allow_files(needed)


def allow_files(number: int) -> None:
    """Increases this process's limit of open files to `number`, or to the hard limit if lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1.
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if number > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


class ProcessPool:
    """A nursery and its workers; `close()` ends them.

    Only the thread that created the pool may use it.
    """

    # What the workers run ("reward", "environment"), for messages.
    _what: str
    _max_frame_bytes = MAX_FRAME_BYTES

    def __init__(
        self,
        module: str,
        setup: Fields,
        rewards: Sequence[RewardConfig],
        log_file: Path,
        *,
        check: Callable[[], None] = lambda: None,
        variables: Mapping[str, str] | None = None,
        secrets: Collection[str] = (),
    ) -> None:
        """Starts the nursery, `python -m module`, and returns while it loads `rewards`.

        `setup` is further data for the nursery. The workers' output goes to `log_file`, which is
        created, with its folder, before the first worker. `check` is called twice a second while
        the pool waits, and ends the wait if it raises. The nursery's environment is that of this
        process plus `variables`, without the secrets that only the trainer needs
        (`_TRAINER_SECRETS` and the variables named in `secrets`).
        """
        hold_standard_streams()
        setup = {
            **setup,
            "sys_path": sys.path,
            "rewards": rewards,
            "functions": pack_functions(rewards),
        }
        self._log_file = log_file
        self._check = check
        self._log: int | None = None
        self._workers: dict[int, WorkerProcess] = {}
        self._num_started = 0
        self._debugged: WorkerProcess | None = None
        self._selector = selectors.DefaultSelector()
        self._nursery_output = tempfile.TemporaryFile()  # noqa: SIM115
        self._nursery, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end, tempfile.TemporaryFile() as setup_file:
            setup_file.write(pack(setup))
            setup_file.seek(0)
            fds = [child_end.fileno(), setup_file.fileno()]
            command = [sys.executable, "-m", module, *map(str, fds), str(os.getpid())]
            inherited = {
                name: value
                for name, value in os.environ.items()
                if name not in _TRAINER_SECRETS and name not in secrets
            }
            # The nursery gets its own process group, so that Ctrl-C reaches only the rank. It ends
            # when the rank has ended.
            self._process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=self._nursery_output,
                stderr=self._nursery_output,
                process_group=0,
                env={**inherited, **(variables or {})},
            )
        self._selector.register(self._nursery, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes of the pool and whatever they left running."""
        for worker in list(self._workers.values()):
            self._forget(worker)
        self._selector.close()
        # The nursery ends when its socket is closed.
        self._nursery.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._nursery_output.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None

    # A subclass defines the next three methods, and perhaps the fourth.

    def _answered(self, worker: WorkerProcess, reply: Fields) -> None:
        """Called with a worker's message about its running call.

        If it is the last message of the call, the method must call `_release`.
        """
        raise NotImplementedError

    def _failed(self, worker: WorkerProcess, call: Any, kind: HowItFailed, reason: str) -> None:
        """Called after a call failed. The worker was killed, unless it has replied and can go on.

        `call` is the call that was running, or None if an idle worker was killed.
        """
        raise NotImplementedError

    def _too_long(self, worker: WorkerProcess) -> str:
        """Returns the reason of failure for a worker's call whose deadline has passed."""
        raise NotImplementedError

    def _ended(self, reason: str) -> Exception:
        """Returns the exception to raise if the nursery ended or cannot load the user's code."""
        return RewardError(reason)

    # The methods below exchange messages with the workers.

    def _listen(self, max_s: float) -> None:
        """Waits for a message, at most `max_s` seconds and not past the next deadline.

        Handles all messages that have arrived by then, then kills the workers whose deadline has
        passed and reports their calls as failed."""
        next_deadline = min(
            (worker.deadline for worker in self._workers.values()), default=math.inf
        )
        for key, _ in self._selector.select(min(max(next_deadline - time.monotonic(), 0.0), max_s)):
            if isinstance(key.data, WorkerProcess):
                self._hear(key.data)
        # Read all messages of the nursery now: the next call of this method may be much later.
        while any(key.fileobj is self._nursery for key, _ in self._selector.select(0.0)):
            message = self._hear_nursery()
            worker = self._workers.get(message.get("died", -1))
            if worker is not None:
                if not worker.has_hung_up:
                    # Read what the worker may have sent before it died.
                    self._hear(worker)
                if worker.number in self._workers:
                    self._fail(worker, "error", message["how"])
        for worker in list(self._workers.values()):
            if worker.deadline <= time.monotonic():
                if worker.has_hung_up:
                    self._fail(worker, "error", "closed the worker's connection to the pool")
                else:
                    self._fail(worker, "timeout", self._too_long(worker))
        self._bound_log()

    def _take_on(self, worker: WorkerProcess, call: Any, seconds: float) -> None:
        """Records the call that a worker runs, and its deadline in `seconds` from now."""
        worker.call = call
        worker.deadline = time.monotonic() + seconds

    def _hear(self, worker: WorkerProcess) -> None:
        """Reads and handles a worker's messages; waits briefly for the rest of a partial one."""
        end = time.monotonic() + _PATIENCE_S
        while worker.number in self._workers:
            try:
                reply = self._receive(worker, end)
            except (OSError, EOFError, ValueError, RecursionError):
                # The stream has ended, the socket failed, or the bytes are not a message. Most
                # likely the worker is dead, and the nursery will soon report how it died.
                self._selector.unregister(worker.sock)
                worker.has_hung_up = True
                worker.deadline = min(worker.deadline, time.monotonic() + _GONE_GRACE_S)
                return
            if reply is None:
                return
            self._take(worker, reply)

    def _receive(self, worker: WorkerProcess, end: float) -> Fields | None:
        """Returns a worker's next message, or None if no message has arrived.

        Waits for the rest of a message until `end`. Raises an exception if nothing more can come.
        """
        while (frame := take_frame(worker.buffer, self._max_frame_bytes)) is None:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return None
            worker.sock.settimeout(remaining_s if worker.buffer else 0.0)
            try:
                chunk = worker.sock.recv(1 << 20)
            except (BlockingIOError, TimeoutError):
                return None
            if not chunk:
                raise EOFError
            worker.buffer += chunk
        return msgspec.convert(json.loads(frame), Fields)

    def _take(self, worker: WorkerProcess, reply: Fields) -> None:
        """Handles one message: a request for the terminal, or an answer to the running call."""
        pid = reply.get("breakpoint")
        if isinstance(pid, int):
            worker.waiting_pid = pid
            # The time that a person spends in the debugger does not count.
            worker.deadline = math.inf
            self._lend_terminal()
        elif worker.call is None:
            self._fail(worker, "error", "sent a message although it had no call")
        else:
            self._answered(worker, reply)

    def _fail(self, worker: WorkerProcess, kind: HowItFailed, reason: str) -> None:
        """Kills a worker and reports the failure of its call to the subclass (`_failed`)."""
        call = worker.call
        self._discard(worker)
        self._failed(worker, call, kind, reason)

    def _give(self, worker: WorkerProcess, call: Any, message: Any, seconds: float) -> None:
        """Sends the message of a call to a worker, which may take `seconds` for it.

        Raises OSError if the worker has died, or was stopped, since its last call.
        """
        self._take_on(worker, call, seconds)
        worker.sock.settimeout(seconds)
        worker.sock.sendall(to_frame(pack(message)))

    def _open_log(self) -> None:
        """Opens the file for the workers' output, if it is not open yet."""
        if self._log is None:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(
                self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )

    def _spawn(self) -> WorkerProcess:
        """Tells the nursery to fork a new worker, and returns it."""
        self._open_log()
        assert self._log is not None
        pool_end, worker_end = socket.socketpair()
        order = json.dumps({"spawn": self._num_started}).encode()
        with worker_end:
            try:
                socket.send_fds(self._nursery, [order], [worker_end.fileno(), self._log])
            except OSError:
                raise self._nursery_ended() from None
        worker = self._workers[self._num_started] = WorkerProcess(self._num_started, pool_end)
        self._num_started += 1
        self._selector.register(pool_end, selectors.EVENT_READ, worker)
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
        """Tells the nursery to kill a worker and its process group, and forgets the worker.

        It does not wait for the death, so a new worker can replace one that hangs in the kernel.
        """
        with suppress(OSError):
            self._nursery.send(json.dumps({"kill": worker.number}).encode())
        self._forget(worker)

    def _forget(self, worker: WorkerProcess) -> None:
        """Forgets a worker and closes its socket."""
        self._release(worker)
        del self._workers[worker.number]
        if not worker.has_hung_up:
            self._selector.unregister(worker.sock)
        worker.sock.close()

    def _release(self, worker: WorkerProcess) -> None:
        """Marks a worker as idle. If it had the terminal, the next waiting worker gets that."""
        worker.call = None
        worker.deadline = math.inf
        worker.waiting_pid = 0
        if worker is self._debugged:
            self._debugged = None
            doctor.count_debugger(is_open=False)
            _give_terminal_to(os.getpgrp())
            self._lend_terminal()

    def _lend_terminal(self) -> None:
        """Lends the terminal to the oldest worker that waits for it, unless another worker has it.

        The others wait at their breakpoints; this time does not count for their calls.
        """
        waiting = [worker for worker in self._workers.values() if worker.waiting_pid]
        if self._debugged is None and waiting:
            self._debugged = waiting[0]
            doctor.count_debugger(is_open=True)
            _give_terminal_to(waiting[0].waiting_pid)
            waiting[0].waiting_pid = 0
            # An OSError means that the worker is dead, which the nursery reports.
            with suppress(OSError):
                socket.send_fds(waiting[0].sock, [to_frame(pack("go"))], [0, 1])

    def _wait_until_ready(self) -> Any:
        """Waits until the nursery has loaded the user's code, and returns the facts that it
        reports.

        Raises the exception of `_ended` if the code cannot be loaded or the nursery ends.
        """
        deadline = time.monotonic() + _START_S
        while True:
            self._check()
            if any(key.fileobj is self._nursery for key, _ in self._selector.select(0.5)):
                message = self._hear_nursery()
                if "error" in message:
                    raise self._ended(
                        f"the {self._what}s cannot be imported in the {self._what} pool: "
                        f"{message['error']}"
                    )
                return message["ready"]
            if time.monotonic() > deadline:
                raise self._ended(f"importing the {self._what}s took longer than {_START_S:.0f} s")

    def _hear_nursery(self) -> Fields:
        """Returns the nursery's next message. Raises the exception of `_ended` if it has ended."""
        try:
            payload = self._nursery.recv(1 << 16)
        except OSError:
            payload = b""
        if not payload:
            raise self._nursery_ended()
        return dict(json.loads(payload))

    def _nursery_ended(self) -> Exception:
        """Returns an exception with the nursery's exit code and the end of its output."""
        code = self._process.wait(10)
        self._nursery_output.seek(0)
        output = self._nursery_output.read().decode(errors="replace")[-MAX_ERROR_CHARS:]
        reason = f"the process that starts the {self._what} workers ended with code {code} {output}"
        return self._ended(reason.strip())

    def _bound_log(self) -> None:
        """Empties the log file if it is too large. Workers append to it, so they go on at its
        start.
        """
        if self._log is not None and os.fstat(self._log).st_size > _MAX_LOG_BYTES:
            os.ftruncate(self._log, 0)
            note = f"(cut here: this file is emptied when it is over {_MAX_LOG_BYTES >> 20} MiB)\n"
            os.write(self._log, note.encode())


def _give_terminal_to(process_group: int) -> None:
    """Makes a process group the foreground group of the terminal, if there is one.

    That group can then read from the terminal, and gets Ctrl-C.
    """
    # Without this, SIGTTOU would stop this process if it is not in the foreground group.
    old_handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with suppress(OSError):
            os.tcsetpgrp(0, process_group)
    finally:
        signal.signal(signal.SIGTTOU, old_handler)
