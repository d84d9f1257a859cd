"""This module calls servers from threads of this process, each call with a deadline, under
CallLimits."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grpo_spmd.rewards.pool.call_limits import Call, CallLimits
from grpo_spmd.rewards.trl import FailedCallError

# Extra seconds in which a client may report its timeout itself.
_GRACE_S = 1.0
Job = tuple[int, Callable[[float], Any]]


class ServerCalls:
    """Makes a list of calls, some seconds at a time.

    An answer that comes after its deadline is dropped, and nobody waits for its thread.
    """

    def __init__(self, limits: CallLimits, jobs: Sequence[Job]) -> None:
        """A job is (index of its limit, function that takes the seconds of its deadline and returns
        the answer).

        The function may raise FailedCallError.
        """
        limits.begin_scoring()
        limits.wait_for_all()
        self._limits = limits
        self._jobs = list(jobs)
        self._waiting = deque(Call(limit, [job]) for job, (limit, _) in enumerate(jobs))
        # By job, with the deadline on the monotonic clock.
        self._running: dict[int, tuple[Call, float]] = {}
        self._replies: queue.SimpleQueue[tuple[Call, Any]] = queue.SimpleQueue()
        # The answers and errors of finished jobs, by job.
        self.answers: dict[int, Any] = {}
        self.errors: dict[int, str] = {}
        # The seconds of each request.
        self.seconds: list[float] = []
        self.num_retries = 0

    def run_for(self, seconds: float) -> bool:
        """Makes calls for at most `seconds` seconds. Returns True if some are left."""
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
        """Starts all calls that may start now."""
        for call in self._limits.take_given_up(self._waiting):
            self.errors[call.samples[0]] = self._limits.why_given_up
        call_or_none = self._limits.take_next(self._waiting)
        while call_or_none is not None:
            self._start(call_or_none)
            call_or_none = self._limits.take_next(self._waiting)

    def _start(self, call: Call) -> None:
        """Starts a thread for one call."""
        [job] = call.samples
        limit_s = self._limits.remaining_s(call)
        self._running[job] = (call, time.monotonic() + limit_s + _GRACE_S)

        def ask() -> None:
            try:
                reply = self._jobs[job][1](limit_s)
            except BaseException as error:
                # Every error is passed to the thread that waits for the reply.
                reply = error
            self._replies.put((call, reply))

        threading.Thread(target=ask, daemon=True).start()

    def _drop_overdue(self) -> None:
        """Fails the calls whose deadline has passed."""
        now_s = time.monotonic()
        for call, deadline in [*self._running.values()]:
            if deadline <= now_s:
                self._end(call)
                self._limits.end(call, "failed")
                timeout_s = self._limits.timeout_s(call)
                self.errors[call.samples[0]] = f"did not answer within timeout_s={timeout_s:g}"

    def _take(self, call: Call, reply: Any) -> None:
        """Stores the answer of a call, or lets it wait for another try, or stores its last error.

        Raises what is no failure of a call, which is a fault of the program.
        """
        # A call here has one sample: the number of the question.
        [job] = call.samples
        if job not in self._running or self._running[job][0] is not call:
            # Its deadline has passed.
            return
        seconds = self._end(call)
        if isinstance(reply, FailedCallError):
            call = self._limits.retry(call, reply, seconds)
            if call.error:
                self.errors[job] = call.error
            else:
                self._waiting.append(call)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            self._limits.end(call, "ok")
            self.answers[job] = reply

    def _end(self, call: Call) -> float:
        """Notes that a call is over, and returns its seconds."""
        del self._running[call.samples[0]]
        self.num_retries += call.num_made > 1
        self.seconds.append(time.monotonic() - call.start)
        return self.seconds[-1]
