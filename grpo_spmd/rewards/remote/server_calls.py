"""Calls of servers from threads of this process, each with its deadline, under the limits of pool/call_limits.py."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_spmd.rewards.pool.call_limits import CallLimits
from grpo_spmd.rewards.pool.pool import Call
from grpo_spmd.rewards.trl import FailedCallError

_GRACE_S = 1.0  # in which a client may say itself that its time was over
Job = tuple[int, Callable[[float], Any]]


class ServerCalls:
    """Makes some, a while at a time. What comes later than its deadline is nobody's, nor is a thread waited for."""

    def __init__(self, limits: CallLimits, jobs: Sequence[Job]) -> None:
        """Of each job the number of its limit, and what asks within so many seconds, or raises FailedCallError."""
        limits.begin_scoring()
        limits.wait_for_all()
        self._limits, self._jobs = limits, list(jobs)
        self._waiting = deque(Call(number, [job]) for job, (number, _) in enumerate(jobs))
        self._under_way: dict[
            int, tuple[Call, float]
        ] = {}  # by job, with the deadline on the monotonic clock
        self._replies: queue.SimpleQueue[tuple[Call, Any]] = queue.SimpleQueue()
        self.found: dict[int, Any] = {}  # by job
        self.failed: dict[int, str] = {}
        self.seconds: list[float] = []  # of each request
        self.num_again = 0  # requests

    def go_on(self, seconds: float) -> bool:
        """For so long at the most; whether some are left."""
        until = time.monotonic() + seconds
        while self._waiting or self._under_way:
            self._begin()
            if (now := time.monotonic()) >= until:
                return True
            due = min((deadline for _, deadline in self._under_way.values()), default=until)
            try:
                reply = self._replies.get(
                    timeout=max(min(self._limits.wait_s(), until - now, due - now), 0.001)
                )
                self._take(*reply)
            except queue.Empty:
                pass
            self._drop_overdue()
        return False

    def _begin(self) -> None:
        for left in self._limits.given_up(self._waiting):
            self.failed[left.samples[0]] = self._limits.why_given_up
        while (call := self._limits.next_of(self._waiting)) is not None:
            (job,) = call.samples
            limit_s = self._limits.seconds_for(call)
            self._under_way[job] = call, time.monotonic() + limit_s + _GRACE_S
            threading.Thread(
                target=self._ask, args=(call, self._jobs[job][1], limit_s), daemon=True
            ).start()

    def _ask(self, call: Call, ask: Callable[[float], Any], limit_s: float) -> None:
        try:
            reply = ask(limit_s)
        except BaseException as error:  # for the thread that waits for it
            reply = error
        self._replies.put((call, reply))

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for call, deadline in [*self._under_way.values()]:
            if deadline <= now:
                self._end(call, "failed")
                self.failed[call.samples[0]] = (
                    f"did not answer within timeout_s={self._limits.timeout_s(call):g}"
                )

    def _take(self, call: Call, reply: Any) -> None:
        (job,) = call.samples
        if self._under_way.get(job, (None,))[0] is not call:
            return
        if not isinstance(reply, BaseException):
            self._end(call, "ok")
            self.found[job] = reply
            return
        if not isinstance(reply, FailedCallError):
            raise reply
        self._end(call, "failed" if reply.wait_s is None else "put_off")
        said = {"failed": str(reply), "again": reply.may_retry, "wait_s": reply.wait_s}
        if isinstance(again := self._limits.again(call, said), Call):
            self._waiting.append(again)
        else:
            self.failed[job] = again

    def _end(self, call: Call, outcome: Any) -> None:
        del self._under_way[call.samples[0]]
        self._limits.ended(call, outcome)
        self.seconds.append(time.monotonic() - call.began)
        self.num_again += call.num_made > 1
