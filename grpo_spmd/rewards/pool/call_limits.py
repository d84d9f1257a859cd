"""This module limits the reward calls of one rank: how many run at once, how soon the next one
starts, and whether a failed call is retried.

`max_concurrent` and `max_per_minute` count over all ranks: each rank has an equal share; the first
ranks have one more where the limit does not divide. Calls start at even intervals, so that no
minute has too many of them. A retry is a call like any other; until it starts, it occupies no
worker and counts for no limit.

After 20 failures in a row a reward's calls pause for 30 s, and then one call (the *probe*) tries
the server. If the probe fails while the engine still samples, the calls pause again, since nobody
waits for them. If it fails after the engine has finished, the remaining calls of this scoring are
not made, but counted as failed. So a lost server costs half a minute, not hours, and the share of
failures (reward_pool.max_error_frac) decides whether the run continues. The next scoring begins
without a pause.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.trl import FailedCallError

_MAX_FAILURES_IN_A_ROW = 20
_PAUSE_S = 30.0
_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 30.0
_MAX_WAIT_S = 0.5
# How a call ended. "put_off" means that its server is up and asks for a later call.
Outcome = Literal["ok", "failed", "put_off"]


@dataclass(frozen=True)
class Call:
    """One call of a reward. Times are on the monotonic clock."""

    reward: int
    """The index of the reward."""
    samples: list[Any]
    """The samples to score; only the caller knows their type."""
    num_made: int = 0
    start: float = 0.0
    spent_s: float = 0.0
    """Seconds that earlier attempts took, pauses included."""
    not_before: float = -math.inf
    statuses: tuple[int, ...] = ()
    """The HTTP statuses of failed attempts."""
    error: str = ""
    """Why it failed for good, or "" while it may be made again."""


@dataclass
class _Limit:
    """The limits of one reward on this rank, with the counts and pauses of this scoring."""

    timeout_s: float
    config: RewardConfig
    max_concurrent: float
    # Seconds between the starts of two calls.
    interval_s: float
    # This time holds from one scoring to the next, so that no minute has too many calls.
    next_start: float = -math.inf
    num_running: int = 0
    # Failures in a row, and the reason of the first of them.
    num_failed: int = 0
    first_reason: str = ""
    paused_until: float = -math.inf
    # True during a pause and after it, until the probe has succeeded.
    is_probing: bool = False
    probe: Call | None = None
    has_given_up: bool = False

    @property
    def ready_at(self) -> float:
        """Returns the earliest time at which a call may start."""
        return max(self.next_start, self.paused_until)

    def can_start(self, now_s: float) -> bool:
        """Returns True if a call may start now."""
        max_running = 1 if self.is_probing else self.max_concurrent
        return self.num_running < max_running and self.ready_at <= now_s


class CallLimits:
    """Decides when the calls of all rewards start on this rank.

    Calls of a reward without limits start at once.
    """

    def __init__(
        self, rewards: Sequence[RewardConfig], timeout_s: float, rank: int, num_ranks: int
    ) -> None:
        """`rewards` are in the order of `Call.reward`; `timeout_s` is for rewards without their
        own."""
        self._limits = [
            _Limit(
                timeout_s if reward.timeout_s is None else reward.timeout_s,
                reward,
                max_concurrent=share_of(reward.max_concurrent, rank, num_ranks),
                interval_s=60.0 / share_of(reward.max_per_minute, rank, num_ranks),
            )
            for reward in rewards
        ]
        # The start times of waiting retries.
        self._retry_times: list[float] = []
        self._random = random.Random()
        self._is_waited_for = True

    def begin_scoring(self) -> None:
        """Forgets the failures and pauses of the previous scoring."""
        self._is_waited_for = False
        for limit in self._limits:
            limit.num_running = 0
            limit.num_failed = 0
            limit.paused_until = -math.inf
            limit.is_probing = False
            limit.probe = None
            limit.has_given_up = False
        self._retry_times.clear()

    def wait_for_all(self) -> None:
        """Records that the caller now does nothing but wait for the calls of this scoring."""
        self._is_waited_for = True

    def timeout_s(self, call: Call) -> float:
        """Returns the seconds that a call may take, retries and pauses included."""
        return self._limits[call.reward].timeout_s

    def remaining_s(self, call: Call) -> float:
        """Returns the seconds that a call may take if it starts now."""
        return self.timeout_s(call) - call.spent_s

    def take_next(self, calls: deque[Call]) -> Call | None:
        """Removes the first of `calls` that may start now, starts it and returns it, or returns
        None."""
        now_s = time.monotonic()
        can_start = [limit.can_start(now_s) for limit in self._limits]
        if not any(can_start):
            return None
        for i, call in enumerate(calls):
            if can_start[call.reward] and call.not_before <= now_s:
                del calls[i]
                started = replace(call, num_made=call.num_made + 1, start=now_s)
                limit = self._limits[call.reward]
                limit.num_running += 1
                limit.next_start = now_s + limit.interval_s
                if limit.is_probing:
                    limit.probe = started
                return started
        return None

    def wait_s(self) -> float:
        """Returns the seconds until a call may start without a new answer, half a second at
        most."""
        now_s = time.monotonic()
        self._retry_times = [at for at in self._retry_times if at > now_s]
        times = [*self._retry_times, *(limit.ready_at for limit in self._limits)]
        return min([_MAX_WAIT_S, *(at - now_s for at in times if at > now_s)])

    def put_back(self, call: Call) -> Call:
        """Returns a started call as it was before the start: its worker had died before the call
        began."""
        self._limits[call.reward].num_running -= 1
        return replace(call, num_made=call.num_made - 1)

    def end(self, call: Call, outcome: Outcome, reason: str = "") -> None:
        """Notes how a started call has ended; `reason` says why it failed."""
        limit = self._limits[call.reward]
        limit.num_running -= 1
        if outcome == "ok":
            limit.num_failed = 0
            limit.is_probing = False
            limit.probe = None
        elif outcome == "failed":
            if not limit.num_failed:
                limit.first_reason = reason.partition("\n")[0]
            limit.num_failed += 1
            is_probe = call is limit.probe
            is_down = (
                limit.num_failed >= _MAX_FAILURES_IN_A_ROW
                and not limit.is_probing
                and limit.config.url is not None
            )
            # Nobody samples any more, so further pauses would only make the run wait.
            if is_probe and self._is_waited_for:
                limit.has_given_up = True
            elif is_probe or is_down:
                limit.is_probing = True
                limit.paused_until = time.monotonic() + _PAUSE_S

    def retry(self, call: Call, error: FailedCallError, seconds: float) -> Call:
        """Notes that a started call has failed after `seconds`. Returns the call that retries it;
        its `error` is the reason if there is no retry."""
        self.end(call, "failed" if error.wait_s is None else "put_off", str(error))
        if error.status is not None:
            call = replace(call, statuses=(*call.statuses, error.status))
        limit = self._limits[call.reward]
        attempts = f"asked {call.num_made} times"
        if not error.may_retry or call.num_made > limit.config.retries:
            return replace(call, error=f"{error} ({attempts})" if call.num_made > 1 else str(error))
        pause_s = error.wait_s
        if pause_s is None:
            # Full jitter: the ranks must not come back to a busy server all at once.
            longest_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** (call.num_made - 1))
            pause_s = self._random.uniform(0, longest_s)
        spent_s = call.spent_s + seconds + pause_s
        if spent_s >= limit.timeout_s:
            reason = (
                f"{error} ({attempts}; timeout_s={limit.timeout_s:g} leaves no time for another "
                f"after {pause_s:.3g} s)"
            )
            return replace(call, error=reason)
        retry_at = time.monotonic() + pause_s
        self._retry_times.append(retry_at)
        return replace(call, spent_s=spent_s, not_before=retry_at)

    def take_given_up(self, calls: deque[Call]) -> list[Call]:
        """Removes from `calls` those of rewards that were given up in this scoring; returns them
        with their error."""
        hopeless = {i for i, limit in enumerate(self._limits) if limit.has_given_up}
        if not hopeless:
            return []
        given_up = [
            replace(
                call,
                error=f"{self._limits[call.reward].first_reason}, {_MAX_FAILURES_IN_A_ROW} times "
                f"in a row and once more {_PAUSE_S:g} s later; not asked again in this step",
            )
            for call in calls
            if call.reward in hopeless
        ]
        remaining = [call for call in calls if call.reward not in hopeless]
        calls.clear()
        calls.extend(remaining)
        return given_up

    def measure(self, call: Call, seconds: float) -> dict[str, list[float]]:
        """Returns the metrics of a call that ended, in the form of notes of ScoredRollouts.

        They are the `seconds` of the last request, the number of requests, and the HTTP errors.
        """
        if not self._limits[call.reward].config.is_measured:
            return {}
        metrics: dict[str, list[float]] = {".s": [seconds, 1], ".requests": [call.num_made, 1]}
        for status, number in Counter(call.statuses).items():
            metrics[f".http_{status}"] = [number, 0]
        return metrics


def share_of(limit: int | None, rank: int, num_ranks: int) -> float:
    """Returns this rank's share of a limit over all ranks; infinity if there is no limit.

    The share is never 0: `check_calls` refuses such a limit.
    """
    return math.inf if limit is None else limit // num_ranks + (rank < limit % num_ranks)
