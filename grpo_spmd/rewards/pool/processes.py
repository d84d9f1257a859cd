"""This module is the rank's side of processes that run users' code: each runs one call at a time.

The rank starts one small process by exec, the nursery (nursery.py), which loads the user's code
once and forks workers. This side sends calls to the workers, kills a worker whose call passes its
deadline, lends the terminal to a debugger, and bounds the file with the workers' output. Subclasses
of `ProcessPool` decide what a call is, and what happens with its answer or failure.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.rewards.named import pack_functions
from grpo_spmd.rewards.pool.nursery import (
    MAX_ERROR_CHARS,
    MAX_FRAME_BYTES,
    decode_frame,
    encode_frame,
)

# Seconds for the start: a user's file may load a model when it is imported.
_START_S = 600.0
_MAX_LOG_BYTES = 16 << 20
# Environment variables with secrets of the hub and of trackers.
_TRAINER_SECRETS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
# Seconds between the end of a worker's socket and the nursery's message how the worker died.
_GONE_GRACE_S = 1.0
# Seconds to wait for the end of a message whose beginning is there.
_PATIENCE_S = 0.02
# Files that a rank may have open, apart from those of its workers.
_OTHER_FILES = 100
HowItFailed = Literal["error", "timeout"]


@dataclass(eq=False)
class WorkerProcess:
    """The pool's view of one worker."""

    number: int
    sock: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    # The running call; None if the worker is idle.
    call: Any = None
    deadline: float = math.inf
    has_hung_up: bool = False
    # The worker's pid while it waits for the terminal, else 0.
    waiting_pid: int = 0


def allow_workers(num_workers: int, key: str) -> None:
    """Raises the limit of open files for this number of workers; each takes one file in this
    process.

    Raises ConfigError where the hard limit is too low.
    """
    needed = num_workers + _OTHER_FILES
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if needed > hard != resource.RLIM_INFINITY:
        raise ConfigError(
            f"{key} ({num_workers}) needs {needed} open files on each rank, and the limit of open "
            f"files (ulimit -Hn) is {hard}: {max(hard - _OTHER_FILES, 1)} workers would do"
        )
    allow_files(needed)


def allow_files(number: int) -> None:
    """Raises the limit of open files to `number`, or as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if number > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


class ProcessPool:
    """The workers of one nursery, which `close()` ends.

    Only the thread that made the pool may use it.
    """

    # The purpose of the workers, for errors.
    _what: str
    _max_frame_bytes = MAX_FRAME_BYTES

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        rewards: Sequence[RewardConfig],
        log_file: Path,
        *,
        check: Callable[[], None] = lambda: None,
        variables: Mapping[str, str] | None = None,
        secrets: Collection[str] = (),
    ) -> None:
        """Starts the nursery, `python -m module`. It loads `rewards` while the caller goes on;
        `setup` is further JSON for it.

        The output of workers goes to `log_file`; the file and its folder are made with the first
        worker. `check` is called twice a second while the pool waits; an exception from it ends the
        wait. `variables` are added to the nursery's environment, which has all of the
        rank's but the secrets that the trainer itself uses: `secrets` are further names of them.
        """
        hold_standard_streams()
        setup = {
            **setup,
            "sys_path": sys.path,
            "rewards": [asdict(reward) for reward in rewards],
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
        self._nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as setup_file:
            setup_file.write(encode_frame(setup))
            setup_file.seek(0)
            fds = [theirs.fileno(), setup_file.fileno()]
            command = [sys.executable, "-m", module, *map(str, fds), str(os.getpid())]
            inherited = {
                name: value
                for name, value in os.environ.items()
                if name not in _TRAINER_SECRETS and name not in secrets
            }
            # The nursery has its own process group: Ctrl-C is for the rank alone, and the nursery
            # ends when the rank is gone.
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

    # Methods that a subclass defines.

    def _answered(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        """Handles a worker's message about its call. After the final answer it must call
        `_release`."""
        raise NotImplementedError

    def _failed(self, worker: WorkerProcess, call: Any, kind: HowItFailed, reason: str) -> None:
        """Handles the failure of a worker, which is gone unless it was kept.

        `call` is the call that was running, or None if the worker was idle.
        """
        raise NotImplementedError

    def _too_long(self, worker: WorkerProcess) -> str:
        """Returns the error for a call whose deadline has passed."""
        raise NotImplementedError

    def _ended(self, reason: str) -> Exception:
        """Returns the error to raise when the nursery ended, or cannot load the user's code."""
        raise NotImplementedError

    # The workers and their messages.

    def _listen(self, max_s: float) -> None:
        """Waits for a message, at most `max_s` seconds and not past the next deadline.

        Handles what is there by then, and fails the workers whose deadline has passed."""
        next_deadline = min(
            (worker.deadline for worker in self._workers.values()), default=math.inf
        )
        for key, _ in self._selector.select(min(max(next_deadline - time.monotonic(), 0.0), max_s)):
            if isinstance(key.data, WorkerProcess):
                self._hear(key.data)
        # All messages are read, because the next look may be much later.
        while any(key.fileobj is self._nursery for key, _ in self._selector.select(0.0)):
            message = self._hear_nursery()
            worker = self._workers.get(message.get("died", -1))
            if worker is not None:
                if not worker.has_hung_up:
                    # The worker may have answered before it died.
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
        """Notes the call that a worker runs, and its deadline in `seconds` from now."""
        worker.call = call
        worker.deadline = time.monotonic() + seconds

    def _hear(self, worker: WorkerProcess) -> None:
        """Reads a worker's messages; waits a moment for the end of an incomplete one."""
        end = time.monotonic() + _PATIENCE_S
        while worker.number in self._workers:
            chunk = b""
            try:
                # Replies are plain JSON: in them, the mark of another type is a tool's own text.
                reply = decode_frame(worker.buffer, self._max_frame_bytes, has_types=False)
                if reply is None:
                    remaining_s = end - time.monotonic()
                    if remaining_s <= 0:
                        return
                    worker.sock.settimeout(remaining_s if worker.buffer else 0.0)
                    chunk = worker.sock.recv(1 << 20)
                    worker.buffer += chunk
            except (BlockingIOError, TimeoutError):
                return
            except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
                reply = None
            if reply is not None:
                self._take(worker, reply)
            # The end of the stream, an error of the socket or a broken frame: the worker is most
            # likely dead, and the nursery will soon say how it died.
            elif not chunk:
                self._selector.unregister(worker.sock)
                worker.has_hung_up = True
                worker.deadline = min(worker.deadline, time.monotonic() + _GONE_GRACE_S)
                return

    def _take(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        """Handles one message: a request for the terminal, or an answer to the running call."""
        pid = reply.get("breakpoint")
        if isinstance(pid, int):
            worker.waiting_pid = pid
            # The clock of the call stops while a person is at the prompt.
            worker.deadline = math.inf
            self._lend_terminal()
        elif worker.call is None:
            self._fail(worker, "error", "spoke when nobody had asked")
        else:
            self._answered(worker, reply)

    def _fail(self, worker: WorkerProcess, kind: HowItFailed, reason: str) -> None:
        """Kills a worker and reports the failure of its call."""
        call = worker.call
        self._discard(worker)
        self._failed(worker, call, kind, reason)

    def _give(self, worker: WorkerProcess, call: Any, frame: bytes, seconds: float) -> None:
        """Sends a call to a worker and starts the call's clock.

        Raises OSError if the worker died, or was stopped, between two calls.
        """
        self._take_on(worker, call, seconds)
        worker.sock.settimeout(seconds)
        worker.sock.sendall(frame)

    def _open_log(self) -> None:
        """Opens the file for the workers' output, if it is not open yet."""
        if self._log is None:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(
                self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )

    def _spawn(self) -> WorkerProcess:
        """Returns a new worker, which the nursery forks."""
        self._open_log()
        assert self._log is not None
        ours, theirs = socket.socketpair()
        order = json.dumps({"spawn": self._num_started}).encode()
        with theirs:
            try:
                socket.send_fds(self._nursery, [order], [theirs.fileno(), self._log])
            except OSError:
                raise self._nursery_ended() from None
        worker = self._workers[self._num_started] = WorkerProcess(self._num_started, ours)
        self._num_started += 1
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _discard(self, worker: WorkerProcess) -> None:
        """Makes the nursery kill a worker and its process group.

        A new worker may start at once, even if the old one waits for a disk and cannot die.
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
        """Marks a worker as idle. If it had the terminal, the next worker that waits gets it."""
        worker.call = None
        worker.deadline = math.inf
        worker.waiting_pid = 0
        if worker is self._debugged:
            self._debugged = None
            doctor.count_debugger(is_open=False)
            _give_terminal_to(os.getpgrp())
            self._lend_terminal()

    def _lend_terminal(self) -> None:
        """Lends the terminal to the worker that has waited longest, if nobody has it.

        The other workers wait at their breakpoints with their clocks stopped.
        """
        waiting = [worker for worker in self._workers.values() if worker.waiting_pid]
        if self._debugged is None and waiting:
            self._debugged = waiting[0]
            doctor.count_debugger(is_open=True)
            _give_terminal_to(waiting[0].waiting_pid)
            waiting[0].waiting_pid = 0
            # An error means that the worker is dead, which the process that starts them (the
            # nursery) reports.
            with suppress(OSError):
                socket.send_fds(waiting[0].sock, [encode_frame({"go": True})], [0, 1])

    def _wait_until_ready(self) -> Any:
        """Waits for the nursery and returns the facts that it reports after loading the user's
        code.

        Raises the error that `_ended` makes from the reason.
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

    def _hear_nursery(self) -> dict[str, Any]:
        """Returns the nursery's next message. Raises an error if the nursery has ended."""
        try:
            payload = self._nursery.recv(1 << 16)
        except OSError:
            payload = b""
        if not payload:
            raise self._nursery_ended()
        return dict(json.loads(payload))

    def _nursery_ended(self) -> Exception:
        code = self._process.wait(10)
        self._nursery_output.seek(0)
        output = self._nursery_output.read().decode(errors="replace")[-MAX_ERROR_CHARS:]
        reason = f"the process that starts the {self._what} workers ended with code {code} {output}"
        return self._ended(reason.strip())

    def _bound_log(self) -> None:
        """Empties the log file when it is too large; workers append, so they go on at its start."""
        if self._log is not None and os.fstat(self._log).st_size > _MAX_LOG_BYTES:
            os.ftruncate(self._log, 0)
            note = f"(cut here: this file is emptied when it is over {_MAX_LOG_BYTES >> 20} MiB)\n"
            os.write(self._log, note.encode())


def _give_terminal_to(process_group: int) -> None:
    """Makes a process group the foreground group of the terminal, if there is one.

    The group may then read from the terminal and gets Ctrl-C.
    """
    # The default action of SIGTTOU stops a process in the background.
    old_handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with suppress(OSError):
            os.tcsetpgrp(0, process_group)
    finally:
        signal.signal(signal.SIGTTOU, old_handler)
