"""Calls servers from threads of this process, each with a deadline, under CallLimits."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_spmd.rewards.pool.call_limits import Call, CallLimits, Outcome
from grpo_spmd.rewards.trl import FailedCallError

_GRACE_S = 1.0  # in which a client may say itself that its time was over
Job = tuple[int, Callable[[float], Any]]


class ServerCalls:
    """Makes a list of calls, a while at a time.

    An answer that comes after its deadline is dropped, and nobody waits for its thread.
    """

    def __init__(self, limits: CallLimits, jobs: Sequence[Job]) -> None:
        """A job is the index of its limit, and what asks within so many seconds.

        The latter may raise FailedCallError.
        """
        limits.begin_scoring()
        limits.wait_for_all()
        self._limits = limits
        self._jobs = list(jobs)
        self._waiting = deque(Call(limit, [job]) for job, (limit, _) in enumerate(jobs))
        # By job, with the deadline on the monotonic clock.
        self._running: dict[int, tuple[Call, float]] = {}
        self._replies: queue.SimpleQueue[tuple[Call, Any]] = queue.SimpleQueue()
        self.answers: dict[int, Any] = {}  # by job
        self.errors: dict[int, str] = {}  # by job
        self.seconds: list[float] = []  # of each request
        self.num_retries = 0

    def run_for(self, seconds: float) -> bool:
        """Make calls for so long at the most. Returns True if some are left."""
        end = time.monotonic() + seconds
        while self._waiting or self._running:
            self._start_calls()
            now_s = time.monotonic()
            if now_s >= end:
                return True
            deadline = min((deadline for _, deadline in self._running.values()), default=end)
            wait_s = min(self._limits.wait_s(), end - now_s, deadline - now_s)
            try:
                call, reply = self._replies.get(timeout=max(wait_s, 0.001))
                self._take(call, reply)
            except queue.Empty:
                pass
            self._drop_overdue()
        return False

    def _start_calls(self) -> None:
        for call in self._limits.take_given_up(self._waiting):
            self.errors[call.samples[0]] = self._limits.why_given_up
        call_or_none = self._limits.take_next(self._waiting)
        while call_or_none is not None:
            self._start(call_or_none)
            call_or_none = self._limits.take_next(self._waiting)

    def _start(self, call: Call) -> None:
        [job] = call.samples
        limit_s = self._limits.remaining_s(call)
        self._running[job] = (call, time.monotonic() + limit_s + _GRACE_S)

        def ask() -> None:
            try:
                reply = self._jobs[job][1](limit_s)
            except BaseException as error:  # for the thread that waits for it
                reply = error
            self._replies.put((call, reply))

        threading.Thread(target=ask, daemon=True).start()

    def _drop_overdue(self) -> None:
        now_s = time.monotonic()
        for call, deadline in [*self._running.values()]:
            if deadline <= now_s:
                self._end(call, "failed")
                timeout_s = self._limits.timeout_s(call)
                self.errors[call.samples[0]] = f"did not answer within timeout_s={timeout_s:g}"

    def _take(self, call: Call, reply: Any) -> None:
        [job] = call.samples
        if job not in self._running or self._running[job][0] is not call:
            # Its deadline has passed.
            return
        if isinstance(reply, FailedCallError):
            self._end(call, "failed" if reply.wait_s is None else "put_off")
            retry = self._limits.retry(call, reply)
            if isinstance(retry, Call):
                self._waiting.append(retry)
            else:
                self.errors[job] = retry
        elif isinstance(reply, BaseException):
            raise reply
        else:
            self._end(call, "ok")
            self.answers[job] = reply

    def _end(self, call: Call, outcome: Outcome) -> None:
        del self._running[call.samples[0]]
        self._limits.end(call, outcome)
        self.seconds.append(time.monotonic() - call.start)
        self.num_retries += call.num_made > 1
