"""Scoring in worker processes: a deadline for each call, a hard kill, and exact counts of what went wrong.
The rank starts one small nursery process by exec; the nursery imports the rewards once and forks workers (worker.py).
This side sends calls to whichever worker is free and watches the clock. protocol.py says what becomes of failures.
With W workers and h completions that hang, scoring takes about (h + number of groups they are in) / W + 1 deadlines."""

from __future__ import annotations

import json
import logging
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
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.callables import packed
from grpo_spmd.rewards.pool.worker import decode_frame, encode_frame
from grpo_spmd.rewards.protocol import RewardError, RewardFacts, check_error_rate, weighted_sum
from grpo_spmd.rewards.trl import TrainerState

_log = logging.getLogger("grpo_spmd")

_START_S = 600.0  # a user's file may load a model when it is imported
_MAX_LOG_BYTES = 16 << 20
_GONE_GRACE_S = 1.0  # between the end of a worker's socket and the word how the worker died
_OTHER_FILES = 100  # that a rank may have open beside those of its workers
_Failure = Literal["error", "timeout"]


@dataclass(frozen=True)
class _Call:
    reward: int  # index
    samples: list[int]  # places in the flat list of this rank's completions


@dataclass(eq=False)
class _Worker:
    number: int
    sock: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    call: _Call | None = None
    deadline: float = math.inf
    has_hung_up: bool = False
    wants_terminal: bool = False
    pid: int = 0  # known once it asks for the terminal


def allow_workers(num_workers: int) -> None:
    """Raise the limit of open files, of which a worker takes one here; ConfigError where it cannot be raised so far."""
    needed, (soft, hard) = num_workers + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > hard != resource.RLIM_INFINITY:
        most = f"the limit of open files (ulimit -Hn) is {hard}: {max(hard - _OTHER_FILES, 1)} workers would do"
        raise ConfigError(f"reward_pool.num_workers ({num_workers}) needs {needed} open files on each rank, and {most}")
    if needed > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class RewardPool(AbstractContextManager["RewardPool"]):
    """Scores rollouts in `pool.num_workers` processes, which `close()` ends. For the thread that made it alone."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        pool: RewardPoolConfig,
        log_file: Path,
        *,
        columns: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the nursery; it imports the rewards, which `load_rewards` has checked, while the caller goes on.
        `log_file` gets what reward functions print; it and its folder are made when something is first scored.
        `columns` are all that the data sets have: a row that lacks one passes None for it. `check` is called twice a
        second while something is scored; what it raises ends that."""
        hold_standard_streams()
        allow_workers(pool.num_workers)
        functions = packed(rewards)
        self._pool, self._log_file, self._columns, self._check = pool, log_file, tuple(columns), check
        self._log: int | None = None
        self._rewards: list[RewardFacts] = []  # once the nursery has imported them
        self._state = TrainerState()
        self._workers: dict[int, _Worker] = {}
        self._num_started = 0
        self._debugged: _Worker | None = None
        self._selector = selectors.DefaultSelector()
        self._nursery_says = tempfile.TemporaryFile()  # noqa: SIM115
        self._nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = [theirs.fileno(), *([] if functions is None else [functions])]
            command = [sys.executable, "-m", "grpo_spmd.rewards.pool.worker", str(fds[0]), str(os.getpid())]
            # In a process group of its own: Ctrl-C is for the rank, and the nursery ends when the rank has gone.
            self._process = subprocess.Popen(command, pass_fds=fds, stderr=self._nursery_says, process_group=0)
        setup = {"sys_path": sys.path, "timeout_s": pool.timeout_s, "rewards": [asdict(reward) for reward in rewards]}
        if functions is not None:
            setup["functions"] = functions
            os.close(functions)
        self._nursery.send(json.dumps(setup).encode())
        self._selector.register(self._nursery, selectors.EVENT_READ)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the pool and whatever reward functions left running."""
        for worker in list(self._workers.values()):
            self._forget(worker)
        self._selector.close()
        self._nursery.close()  # the nursery takes this for the end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._nursery_says.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def begin_step(self, state: TrainerState) -> None:
        """What reward functions are told of the run from now on."""
        self._state = state

    def score(
        self, groups: Sequence[RolloutGroup], tokenizer: Any, *, num_step_completions: int | None = None
    ) -> ScoredRollouts:
        """Score every completion of `groups`, this rank's share of the step, perhaps none. Raises RewardError where the
        rewards cannot be imported in the nursery, the nursery was killed, or the user left the debugger; and, since a
        function may hang in every call, as soon as the timeouts on this rank alone are `max_error_frac` of
        `num_step_completions`, those over all ranks."""
        token_ids = [completion.token_ids for group in groups for completion in group.completions]
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True) if token_ids else []
        scored = ScoredRollouts(texts=texts)
        if not groups:
            return scored
        self._wait_until_ready()
        if self._log is None:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            self._log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        step = _Step(groups, texts, self._rewards, self._columns)
        try:
            self._run(step, num_step_completions)
        finally:
            for worker in list(self._workers.values()):
                if worker.call is not None:  # only after an exception
                    self._discard(worker)
        self._warn(step)
        for reward, statuses, values in zip(self._rewards, step.statuses, step.values, strict=True):
            scored.statuses[reward.name], scored.by_name[reward.name] = statuses, values
        weights, by_sample = [reward.weight for reward in self._rewards], zip(*step.values, strict=True)
        scored.rewards = [weighted_sum(list(zip(weights, values, strict=True))) for values in by_sample]
        scored.first_error, scored.given = step.first_error(), step.given
        for number, note in sorted(step.notes.items()):  # in an order that does not tell which worker was first
            scored.notes[number] = {kind: dict(sorted(found.items())) for kind, found in sorted(note.items())}
        return scored

    def _run(self, step: _Step, num_step_completions: int | None) -> None:
        while step.calls or any(worker.call is not None for worker in self._workers.values()):
            self._check()
            self._dispatch(step)
            next_deadline = min((worker.deadline for worker in self._workers.values()), default=math.inf)
            for key, _ in self._selector.select(min(max(next_deadline - time.monotonic(), 0.0), 0.5)):
                if key.fileobj is self._nursery:
                    message = self._hear_nursery()
                    if (worker := self._workers.get(message.get("died", -1))) is not None:
                        worker.sock.settimeout(0.1)
                        while worker.call is not None and not worker.has_hung_up:  # what it said before it died
                            self._hear(step, worker)
                        self._fail(step, worker, "error", message["how"])
                elif key.data.number in self._workers:
                    self._hear(step, key.data)
            too_long = f"took longer than reward_pool.timeout_s={self._pool.timeout_s:g}"
            for worker in list(self._workers.values()):
                if worker.deadline <= time.monotonic():
                    if worker.has_hung_up:
                        self._fail(step, worker, "error", "closed the worker's connection to the pool")
                    else:
                        self._fail(step, worker, "timeout", too_long)
            self._bound_log()
            if num_step_completions is not None and step.has_new_timeout:
                self._stop_if_hopeless(step, num_step_completions)

    def _dispatch(self, step: _Step) -> None:
        free = [worker for worker in self._workers.values() if worker.call is None and not worker.has_hung_up]
        while step.calls and (free or len(self._workers) < self._pool.num_workers):
            worker = free.pop() if free else self._spawn()
            call = step.calls.popleft()
            state = {"state": asdict(self._state)} if self._rewards[call.reward].takes else {}
            frame = encode_frame({"reward": call.reward, "keywords": step.keywords(call), **state})
            worker.call, worker.deadline = call, time.monotonic() + self._pool.timeout_s
            try:
                worker.sock.settimeout(self._pool.timeout_s)
                worker.sock.sendall(frame)
            except OSError:  # it died, or was stopped, between two calls: not this call's fault
                step.calls.appendleft(call)
                self._discard(worker)

    def _hear(self, step: _Step, worker: _Worker) -> None:
        try:
            chunk = worker.sock.recv(1 << 16)
            worker.buffer += chunk
            reply = decode_frame(worker.buffer)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            chunk, reply = b"", None
        if reply is None:
            if not chunk:  # most likely it is dead, and the nursery will say in a moment how it died
                self._selector.unregister(worker.sock)
                worker.has_hung_up, worker.deadline = True, min(worker.deadline, time.monotonic() + _GONE_GRACE_S)
            return
        if "breakpoint" in reply:
            worker.pid, worker.wants_terminal, worker.deadline = int(reply["breakpoint"]), True, math.inf
            self._lend_terminal()
        elif worker.call is None:
            self._discard(worker)  # nobody asked
        elif "quit" in reply:
            raise RewardError(f"the debugger was left in reward {self._rewards[worker.call.reward].name!r}")
        elif "broken" in reply:
            raise RewardError(f"reward {self._rewards[worker.call.reward].name!r} {reply['broken']}")
        elif "values" in reply:
            step.record(worker.call, reply["values"])
            step.note(worker.call, reply)
            self._release(worker)
        else:
            self._fail(step, worker, "error", str(reply.get("failed")), keep=True)

    def _fail(self, step: _Step, worker: _Worker, status: _Failure, why: str, *, keep: bool = False) -> None:
        call = worker.call
        if keep:
            self._release(worker)
        else:
            self._discard(worker)
        if call is not None:
            step.fail(call, status, why)

    def _stop_if_hopeless(self, step: _Step, num_step_completions: int) -> None:
        step.has_new_timeout = False
        for reward, known in zip(self._rewards, step.statuses, strict=True):
            num_failed = known.count("timeout")
            statuses = {"timeout": num_failed, "ok": num_step_completions - num_failed}
            check_error_rate([{reward.name: statuses}], [step.first_error()], self._pool.max_error_frac)

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        assert self._log is not None
        order = json.dumps({"spawn": self._num_started}).encode()
        with theirs:
            try:
                socket.send_fds(self._nursery, [order], [theirs.fileno(), self._log])
            except OSError:
                raise self._nursery_ended() from None
        worker = self._workers[self._num_started] = _Worker(self._num_started, ours)
        self._num_started += 1
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _discard(self, worker: _Worker) -> None:
        """Have it killed, with its group. Its place is free at once, even if it waits for a disk and cannot die."""
        with suppress(OSError):
            self._nursery.send(json.dumps({"kill": worker.number}).encode())
        self._forget(worker)

    def _forget(self, worker: _Worker) -> None:
        self._release(worker)
        del self._workers[worker.number]
        if not worker.has_hung_up:
            self._selector.unregister(worker.sock)
        worker.sock.close()

    def _release(self, worker: _Worker) -> None:
        worker.call, worker.deadline, worker.wants_terminal = None, math.inf, False
        if worker is self._debugged:
            self._debugged = None
            doctor.note_debugger(is_open=False)
            _give_terminal_to(os.getpgrp())
            self._lend_terminal()

    def _lend_terminal(self) -> None:
        """To one worker at a time; the others wait at their breakpoints with their clocks stopped."""
        waiting = [worker for worker in self._workers.values() if worker.wants_terminal]
        if self._debugged is None and waiting:
            self._debugged, waiting[0].wants_terminal = waiting[0], False
            doctor.note_debugger(is_open=True)
            _give_terminal_to(waiting[0].pid)
            waiting[0].sock.sendall(encode_frame({"go": True}))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._rewards:
            self._check()
            if self._selector.select(0.5):
                message = self._hear_nursery()
                if "error" in message:
                    raise RewardError(f"the rewards cannot be imported in the reward pool: {message['error']}")
                self._rewards = [RewardFacts(**facts) for facts in message["ready"]]
            elif time.monotonic() > deadline:
                raise RewardError(f"importing the rewards took longer than {_START_S:.0f} s")

    def _hear_nursery(self) -> dict[str, Any]:
        try:
            payload = self._nursery.recv(1 << 16)
        except OSError:
            payload = b""
        if not payload:
            raise self._nursery_ended()
        return dict(json.loads(payload))

    def _nursery_ended(self) -> RewardError:
        code = self._process.wait(10)
        self._nursery_says.seek(0)
        said = self._nursery_says.read().decode(errors="replace")[-4000:]
        return RewardError(f"the process that starts the reward workers ended with code {code} {said}".strip())

    def _bound_log(self) -> None:
        if self._log is not None and os.fstat(self._log).st_size > _MAX_LOG_BYTES:
            os.ftruncate(self._log, 0)
            note = f"(cut here: this file is emptied when it is over {_MAX_LOG_BYTES >> 20} MiB)\n"
            os.write(self._log, note.encode())

    def _warn(self, step: _Step) -> None:
        for index, reward in enumerate(self._rewards):
            counts, errors, repeated = Counter(step.statuses[index]), step.errors[index], step.repeated[index]
            if left_out := list(step.left_out[index]):
                more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
                _log.warning("reward %r: not logged: %s%s", reward.name, "; ".join(left_out[:3]), more)
            if failed := counts["timeout"] + counts["error"]:
                kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("timeout", "error") if counts[kind])
                found = f"{failed} of {len(step.texts)} completions failed ({kinds})"
                first = errors.get(min(errors, default=-1), "")
            elif repeated:
                found = f"it failed for {len(repeated)} groups and was called again for each of their completions"
                first = repeated[0]
            else:
                continue
            _log.warning("reward %r: %s; first: %s", reward.name, found, first.partition("\n")[0])


class _Step:
    """The flat lists of what is scored in one go, and what came of it."""

    def __init__(
        self, groups: Sequence[RolloutGroup], texts: list[str], rewards: list[RewardFacts], columns: Sequence[str]
    ) -> None:
        self.texts, self._rewards = texts, rewards
        self.calls: deque[_Call] = deque()  # still to be made
        self.given: list[dict[str, Any]] = []
        absent = dict.fromkeys([*columns, *(name for reward in rewards for name in reward.needs)])
        for group in groups:
            first, prompt = len(self.given), group.prompt.text
            samples = list(range(first, first + len(group.completions)))
            for index, reward in enumerate(rewards):
                parts = [[i] for i in samples] if reward.one_at_a_time else [samples]
                self.calls.extend(_Call(index, part) for part in parts)
            for completion in group.completions:
                text = texts[len(self.given)]
                said = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                given = {"prompts": prompt, "completions": said, "completion_ids": completion.token_ids}
                self.given.append(absent | group.prompt.columns | given)
        self.values: list[list[float | None]] = [[None] * len(texts) for _ in rewards]
        self.statuses = [[""] * len(texts) for _ in rewards]
        self.errors: list[dict[int, str]] = [{} for _ in rewards]
        self.repeated: list[list[str]] = [[] for _ in rewards]
        self.left_out: list[dict[str, None]] = [{} for _ in rewards]
        self.notes: dict[int, dict[str, Any]] = {}  # as in ScoredRollouts
        self.has_new_timeout = False

    def keywords(self, call: _Call) -> dict[str, list[Any]]:
        """Every column that the data set, the functions or this row have."""
        rows = [self.given[i] for i in call.samples]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def record(self, call: _Call, values: Sequence[float | str | None]) -> None:
        for i, value in zip(call.samples, values, strict=True):
            if isinstance(value, str):
                self.fail(_Call(call.reward, [i]), "error", value)
            else:
                self.values[call.reward][i] = None if value is None else float(value)
                self.statuses[call.reward][i] = "not_applicable" if value is None else "ok"

    def note(self, call: _Call, reply: Mapping[str, Any]) -> None:
        """Keep what the function logged in a call that gave values."""
        self.left_out[call.reward] |= dict.fromkeys(reply.get("left_out", ()))
        if metrics := reply.get("metrics"):
            self._add_note(call.samples[0], "logged", call, metrics)
        if extra := reply.get("extra"):
            for place, i in enumerate(call.samples):
                self._add_note(i, "extra", call, {column: values[place] for column, values in extra.items()})

    def _add_note(self, sample: int, kind: str, call: _Call, value: Any) -> None:
        self.notes.setdefault(sample, {}).setdefault(kind, {})[self._rewards[call.reward].name] = value

    def fail(self, call: _Call, status: _Failure, why: str) -> None:
        """Note a failure, or queue the calls that show whose it was, where that is not known yet."""
        why = f"reward {self._rewards[call.reward].name!r} {why}"
        if len(call.samples) > 1:
            self.repeated[call.reward].append(why)
            self._add_note(call.samples[0], "retried", call, status)
            self.calls.extend(_Call(call.reward, [i]) for i in call.samples)
            return
        (i,) = call.samples
        self.values[call.reward][i], self.statuses[call.reward][i], self.errors[call.reward][i] = math.nan, status, why
        self.has_new_timeout |= status == "timeout"

    def first_error(self) -> str | None:
        errors = max(self.errors, key=len)
        return errors[min(errors)] if errors else next((repeated[0] for repeated in self.repeated if repeated), None)


def _give_terminal_to(process_group: int) -> None:
    """Make it the foreground group of our terminal, if we have one, so that it may read and gets Ctrl-C."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # its default action stops who is in the background
    try:
        with suppress(OSError):
            os.tcsetpgrp(0, process_group)
    finally:
        signal.signal(signal.SIGTTOU, before)
