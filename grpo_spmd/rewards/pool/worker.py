"""The processes behind the pool: a nursery without torch that imports the rewards once, and the workers that it forks.

    python -m grpo_spmd.rewards.pool.worker SOCKET_FD PARENT_PID      (by pool.py)

It is started by exec, so that no thread, lock or GPU of the rank comes along. The nursery adopts whatever its workers
leave behind (child subreaper), reaps it, and kills it all when the rank goes away, however it goes. A worker serves one
call at a time over its own socket: JSON out, JSON back. It lives in its own process group, so that one kill ends it
together with the helpers that a reward function started.
"""

from __future__ import annotations

import asyncio
import base64
import bdb
import ctypes
import datetime
import decimal
import inspect
import json
import math
import os
import pdb
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.callables import unpack
from grpo_spmd.rewards.protocol import Reward, RewardFacts, load_rewards
from grpo_spmd.rewards.trl import BrokenContractError, CallLog, TrainerState, as_number, values_of
from grpo_spmd.rewards.verifiers import load_math_verify

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = {number.value: number.name for number in signal.Signals}
_MAX_ERROR_CHARS = 4000
_MAX_FRAME_BYTES = 1 << 30
_WARM = {"math": load_math_verify}  # a shipped reward's import at its first call: 2 s, which would count as the call's
# What a data row may hold beyond JSON (parquet columns): to JSON and back.
_BEYOND_JSON: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    decimal.Decimal: (str, decimal.Decimal),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (datetime.timedelta.total_seconds, lambda seconds: datetime.timedelta(seconds=seconds)),
}
_DECODERS = {kind.__name__: decode for kind, (_, decode) in _BEYOND_JSON.items()}
_TAG = "__grpo_spmd_type__"


def encode_frame(message: dict[str, Any]) -> bytes:
    """A message as JSON behind its length. Raises TypeError for what neither JSON nor `_BEYOND_JSON` knows."""

    def encode(value: Any) -> Any:
        kind = type(value).__name__
        if type(value) not in _BEYOND_JSON:
            raise TypeError(f"a value of type {kind} cannot be sent to a reward worker; make it JSON in the data")
        return {_TAG: kind, "value": _BEYOND_JSON[type(value)][0](value)}

    payload = json.dumps(message, default=encode).encode()
    return len(payload).to_bytes(4, "big") + payload


def decode_frame(buffer: bytearray) -> dict[str, Any] | None:
    """Take one message from the front of `buffer`; None while it is not whole. ValueError for what is no message."""
    if len(buffer) < 4:
        return None
    end = 4 + int.from_bytes(buffer[:4], "big")
    if end > _MAX_FRAME_BYTES:
        raise ValueError("not a message of a reward worker")
    if len(buffer) < end:
        return None
    message = json.loads(
        buffer[4:end], object_hook=lambda found: _DECODERS[found[_TAG]](found["value"]) if _TAG in found else found
    )
    del buffer[:end]
    if not isinstance(message, dict):
        raise ValueError("not a message of a reward worker")
    return message


def call_reward(reward: Reward, keywords: dict[str, Any], state: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"values": one a completion: a finite number, None (does not apply), or a string that says why it is unusable},
    with what the function logged (trl.CallLog.reply); or {"failed": what the function did, with the traceback},
    {"broken": what is wrong whatever the completions are}, {"quit": True} where the user left the debugger."""
    expected, log = len(keywords["prompts"]), CallLog(len(keywords["prompts"]))
    try:
        values = reward.function(**keywords | values_of(reward.takes, TrainerState(**state or {}), log))
        if inspect.isawaitable(values):
            values = asyncio.run(_finish(values))
        wrong = f"must return a list of numbers or None; got {type(values).__name__}"
        is_list = hasattr(values, "__len__") and hasattr(values, "__iter__")
        if isinstance(values, str | bytes | dict | set) or not is_list:
            return {"failed": wrong}
        try:
            values = list(values)
        except TypeError:  # a tensor without dimensions
            return {"failed": f"{wrong} without a length"}
        if len(values) != expected:
            return {"broken": f"returned {len(values)} values for {expected} completions"}
        return {"values": [_as_reward(value) for value in values], **log.reply()}
    except BrokenContractError as error:
        return {"broken": str(error)}
    except bdb.BdbQuit:
        return {"quit": True}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the function fails, not the worker
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # this frame says nothing
        what = traceback.format_exception_only(error)[-1].strip()[:500]
        return {"failed": f"raised {what}\n{''.join(traceback.format_exception(error))[-_MAX_ERROR_CHARS:]}"}


async def _finish(values: Awaitable[Any]) -> Any:
    return await values


def _as_reward(value: Any) -> float | str | None:
    number = None if value is None else as_number(value)
    return number if number is None or (isinstance(number, float) and math.isfinite(number)) else f"returned {number}"


class _Debugger(pdb.Pdb):
    def do_EOF(self, arg: str) -> bool | None:
        """Ctrl-D on a terminal leaves the debugger; where piped commands end, which one worker has read, go on."""
        return super().do_EOF(arg) if sys.stdin.isatty() else self.do_continue(arg)


class _Worker:
    """One forked process: it serves calls until its socket ends."""

    def __init__(self, rewards: Sequence[Reward], sock: socket.socket, terminal: tuple[int, int]) -> None:
        self._rewards, self._sock, self._terminal = rewards, sock, terminal
        self._pid = os.getpid()
        self._buffer = bytearray()
        self._log_fds: tuple[int, int] | None = None
        self._stdin: TextIO | None = None
        sys.breakpointhook = self._breakpoint

    def serve(self) -> None:
        while (message := self._receive()) is not None:
            reply = call_reward(self._rewards[message["reward"]], message["keywords"], message.get("state"))
            if os.getpid() != self._pid:  # a child that the function forked has returned too: only its parent answers
                os._exit(0)
            with suppress(Exception):  # the function may have closed or replaced them
                sys.stdout.flush()
                sys.stderr.flush()
            self._leave_terminal()
            self._sock.sendall(encode_frame(reply))

    def _receive(self) -> dict[str, Any] | None:
        while (message := decode_frame(self._buffer)) is None:
            chunk = self._sock.recv(1 << 20)
            if not chunk:
                return None
            self._buffer += chunk
        return message

    def _breakpoint(self, *_: Any, **__: Any) -> None:
        """breakpoint() in a reward: the pool stops this call's clock and lends the terminal, on which pdb runs."""
        if os.environ.get("PYTHONBREAKPOINT") == "0" or os.getpid() != self._pid:
            return
        if self._log_fds is None:
            self._sock.sendall(encode_frame({"breakpoint": self._pid}))
            if self._receive() is None:
                os._exit(0)
            sys.stdout.flush()
            self._log_fds = os.dup(0), os.dup(1)
            for fd, terminal in enumerate(self._terminal):
                os.dup2(terminal, fd)
            if self._stdin is None:  # the same one ever after: it may hold piped commands for a later breakpoint
                self._stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdin = self._stdin
        _Debugger().set_trace(sys._getframe(1))

    def _leave_terminal(self) -> None:
        for fd, log_fd in enumerate(self._log_fds or ()):
            os.dup2(log_fd, fd)
            os.close(log_fd)
        self._log_fds = None


class _Nursery:
    def __init__(self, rank: socket.socket, parent_pid: int) -> None:
        self._rank = rank
        self._workers: dict[int, int] = {}  # pid to the pool's number for it
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before we could ask to be told
            os._exit(0)
        # The terminal, for the debugger. All else that is printed here goes to the pool's file, our stderr.
        self._terminal = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        with open(os.devnull) as devnull:
            os.dup2(devnull.fileno(), 0)

    def run(self) -> None:
        try:
            with suppress(ConnectionError):  # the rank died with messages of ours unread
                self._serve()
        except BaseException:
            traceback.print_exc()
            self._end(code=1)
        self._end()

    def _serve(self) -> None:
        setup = json.loads(self._rank.recv(1 << 20))
        sys.path[:] = setup["sys_path"]
        configs = [RewardConfig(**reward) for reward in setup["rewards"]]
        rewards = self._load(configs, setup["timeout_s"], setup.get("functions"))
        names = [field.name for field in fields(RewardFacts)]
        self._tell({"ready": [{name: getattr(reward, name) for name in names} for reward in rewards]})
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
                    self._spawn(rewards, message["spawn"], *fds)
                else:
                    for pid in [pid for pid, number in self._workers.items() if number == message["kill"]]:
                        _kill_group(pid)

    def _load(self, configs: Sequence[RewardConfig], timeout_s: float, functions: int | None) -> list[Reward]:
        try:
            if functions is not None:
                unpack(functions)
            rewards = load_rewards(configs, timeout_s)
            for config in configs:
                if config.function is None and config.name in _WARM:
                    _WARM[config.name]()
            return rewards
        except BaseException as error:
            text = str(error) if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
            self._tell({"error": text[-_MAX_ERROR_CHARS:]})
            os._exit(1)

    def _spawn(self, rewards: Sequence[Reward], number: int, sock_fd: int, log_fd: int) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                nursery_pid = os.getppid()
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                for number_ in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number_, signal.SIG_DFL)
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != nursery_pid:
                    os._exit(0)
                self._rank.close()
                os.close(self._wakeup)
                os.dup2(log_fd, 1)
                os.dup2(log_fd, 2)
                os.close(log_fd)
                for stream in (sys.stdout, sys.stderr):
                    stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
                _Worker(rewards, socket.socket(fileno=sock_fd), self._terminal).serve()
                status = 0
            except OSError:  # the pool is gone, or the reward closed our socket
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        with suppress(OSError):  # the child does the same; whoever comes first
            os.setpgid(pid, pid)
        os.close(sock_fd)
        os.close(log_fd)
        self._workers[pid] = number  # this thread also reaps, so that it cannot have died unnoticed before this line

    def _reap(self) -> None:
        """Collect the dead. With a worker go its group, before its pid is free again, and helpers beside it."""
        while (ended := _first_dead_child()) is not None:
            if ended.si_pid in self._workers:
                _kill_group(ended.si_pid)
                os.waitpid(ended.si_pid, 0)
                code, has_exited = ended.si_status, ended.si_code == os.CLD_EXITED
                how = f"exited with code {code}" if has_exited else f"died of {_SIGNALS.get(code, f'signal {code}')}"
                self._kill_adopted()
                self._tell({"died": self._workers.pop(ended.si_pid), "how": how})
            else:
                os.waitpid(ended.si_pid, 0)

    def _kill_adopted(self, patience_s: float = 2) -> None:
        """Kill what was reparented to us until there is none: each kill may hand us the killed one's children."""
        deadline = time.monotonic() + patience_s
        while adopted := [pid for pid in _children() if pid not in self._workers]:
            for pid in adopted:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:  # in an uninterruptible wait, say for a dead file server
                return
            time.sleep(0.002)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._rank.send(json.dumps(message).encode())
        except OSError:
            self._end()

    def _end(self, *_: Any, code: int = 0) -> None:
        """Leave nothing behind. Patient, since nobody comes after us: a machine may stall for seconds."""
        for pid in self._workers:
            _kill_group(pid)
        self._workers.clear()
        self._kill_adopted(patience_s=60)
        os._exit(code)


def _first_dead_child() -> Any:
    with suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None


def _children() -> list[int]:
    with suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group may not be there yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    _Nursery(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).run()
