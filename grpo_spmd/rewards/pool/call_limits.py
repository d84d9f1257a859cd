"""This module limits the reward calls of one rank: how many run at once, how soon the next one
starts, and whether a failed call is retried.

`max_concurrent` and `max_per_minute` are limits over all ranks. Each rank has an equal share; if
the limit is no multiple of the number of ranks, the first ranks have one more. Calls start at even
intervals, so that no minute has too many of them. A retry is a call like any other; while it waits
to start, it occupies no worker and does not count towards the limits.

After 20 failures in a row, the calls of a reward that has a server pause for 30 s. Then one call,
the *probe*, tries the server. If the probe fails while the engine still samples, the calls pause
again, since nothing waits for them yet. If it fails after the engine has finished, the remaining
calls of this scoring are not made and count as failed. So a server that is down costs half a
minute, not hours, and the fraction of failures (reward_pool.max_error_frac) decides whether the run
continues. The next scoring begins without a pause.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.trl import FailedCallError

_MAX_FAILURES_IN_A_ROW = 20
_PAUSE_S = 30.0
_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 30.0
# The most seconds between two looks at which calls may start.
_MAX_WAIT_S = 0.5
# How a call ended. "put_off": the server is up, but has asked to be called again later.
Outcome = Literal["ok", "failed", "put_off"]


@dataclass(frozen=True)
class Call:
    """One call of a reward, which may be made several times. Times are of the monotonic clock."""

    reward: int
    """The index of the reward."""
    samples: list[Any]
    """The samples to score; only the caller knows their type."""
    num_made: int = 0
    """The number of attempts that were started."""
    start: float = 0.0
    """When the latest attempt started."""
    spent_s: float = 0.0
    """Seconds that earlier attempts and the pauses after them took."""
    not_before: float = -math.inf
    """When the next attempt may start."""
    statuses: tuple[int, ...] = ()
    """The HTTP statuses of failed attempts."""
    error: str = ""
    """Why the call has failed for good, or "" as long as it may be made again."""


@dataclass
class _Limit:
    """The limits of one reward on this rank, and the state of its calls in the current scoring."""

    timeout_s: float
    config: RewardConfig
    max_concurrent: float
    # Seconds between the starts of two calls.
    interval_s: float
    # The earliest start of the next call, by `interval_s`. It is not reset between two scorings, so
    # that no minute has too many calls.
    next_start: float = -math.inf
    num_running: int = 0
    # The number of calls that have failed in a row, and the reason of the first of these failures.
    num_failed: int = 0
    first_reason: str = ""
    paused_until: float = -math.inf
    # The call that tries the server after a pause, once it has started.
    probe: Call | None = None
    # True if the server stayed down, so that no more calls are made in this scoring.
    has_given_up: bool = False

    @property
    def ready_at(self) -> float:
        """The earliest time at which a call may start, by `interval_s` and a pause."""
        return max(self.next_start, self.paused_until)

    @property
    def is_probing(self) -> bool:
        """True from the beginning of a pause until a call has succeeded."""
        return self.config.url is not None and self.num_failed >= _MAX_FAILURES_IN_A_ROW

    def can_start(self, now_s: float) -> bool:
        """Returns True if a call may start now."""
        max_running = 1 if self.is_probing else self.max_concurrent
        return self.num_running < max_running and self.ready_at <= now_s


class CallLimits:
    """Decides when this rank starts the calls of its rewards.

    Calls of a reward without limits may start at once.
    """

    def __init__(
        self, rewards: Sequence[RewardConfig], timeout_s: float, rank: int, num_ranks: int
    ) -> None:
        """`Call.reward` is an index of `rewards`. `timeout_s` is for rewards that do not set it."""
        self._limits = [
            _Limit(
                timeout_s if reward.timeout_s is None else reward.timeout_s,
                reward,
                max_concurrent=share_of(reward.max_concurrent, rank, num_ranks),
                interval_s=60.0 / share_of(reward.max_per_minute, rank, num_ranks),
            )
            for reward in rewards
        ]
        self._random = random.Random()
        # False while the engine still samples, so that a pause delays nothing.
        self._is_waited_for = True

    def begin_scoring(self) -> None:
        """Forgets the failures and pauses of the previous scoring."""
        self._is_waited_for = False
        for limit in self._limits:
            limit.num_running = 0
            limit.num_failed = 0
            limit.paused_until = -math.inf
            limit.has_given_up = False

    def wait_for_all(self) -> None:
        """Must be called when the engine has finished, and the caller only waits for the calls.

        From then on a server that stays down is given up instead of being paused for again.
        """
        self._is_waited_for = True

    def timeout_s(self, call: Call) -> float:
        """Returns the seconds that a call may take, with its retries and the pauses between."""
        return self._limits[call.reward].timeout_s

    def remaining_s(self, call: Call) -> float:
        """Returns the seconds that a call has left of its time limit if it starts now."""
        return self.timeout_s(call) - call.spent_s

    def take_next(self, calls: deque[Call]) -> Call | None:
        """Removes the first of `calls` that may start now, counts it as started and returns it.

        Returns None if no call may start now.
        """
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

    def wait_s(self, calls: Iterable[Call]) -> float:
        """Returns the seconds until one of `calls` may be able to start, at most 0.5.

        The caller waits that long for answers before it calls take_next() again.
        """
        now_s = time.monotonic()
        times = [limit.ready_at for limit in self._limits]
        times += [call.not_before for call in calls]
        return min([_MAX_WAIT_S, *(at - now_s for at in times if at > now_s)])

    def put_back(self, call: Call) -> Call:
        """Returns a started call as it was before its start.

        Used if the worker died before it got the call.
        """
        self._limits[call.reward].num_running -= 1
        return replace(call, num_made=call.num_made - 1)

    def end(self, call: Call, outcome: Outcome, reason: str = "") -> None:
        """Records how a started call ended, on which pauses depend. `reason` says why it failed."""
        limit = self._limits[call.reward]
        limit.num_running -= 1
        if outcome == "ok":
            limit.num_failed = 0
        elif outcome == "failed":
            if not limit.num_failed:
                limit.first_reason = reason.partition("\n")[0]
            limit.num_failed += 1
            is_probe = call is limit.probe
            is_down = limit.is_probing and limit.num_failed == _MAX_FAILURES_IN_A_ROW
            # The engine has finished, so another pause would make the whole run wait.
            if is_probe and self._is_waited_for:
                limit.has_given_up = True
            elif is_probe or is_down:
                limit.paused_until = time.monotonic() + _PAUSE_S

    def retry(self, call: Call, error: FailedCallError, seconds: float) -> Call:
        """Records that a started call failed after `seconds`, and returns it for another attempt.

        If there may be no other attempt, `error` of the returned call says why.
        """
        self.end(call, "failed" if error.wait_s is None else "put_off", str(error))
        if error.status is not None:
            call = replace(call, statuses=(*call.statuses, error.status))
        limit = self._limits[call.reward]
        pause_s = error.wait_s
        if pause_s is None:
            # Full jitter (a uniformly random pause up to an exponentially growing one), so that not
            # all ranks return to a busy server at once.
            longest_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2 ** (call.num_made - 1))
            pause_s = self._random.uniform(0, longest_s)
        spent_s = call.spent_s + seconds + pause_s
        has_retries = error.may_retry and call.num_made <= limit.config.retries
        if has_retries and spent_s < limit.timeout_s:
            return replace(call, spent_s=spent_s, not_before=time.monotonic() + pause_s)
        reason = str(error)
        if has_retries:
            reason += f" (timeout_s={limit.timeout_s:g} leaves no time for another request)"
        elif call.num_made > 1:
            reason += f" (asked {call.num_made} times)"
        return replace(call, error=reason)

    def take_given_up(self, calls: deque[Call]) -> list[Call]:
        """Removes from `calls` the calls of rewards that were given up in this scoring, because
        their server is down.

        Returns the removed calls with their `error` set.
        """
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
        """Returns the metrics of a call that has ended, in the form of ScoredRollouts.notes
        "logged".

        They are the `seconds` of the last request, the number of requests, and the number of each
        HTTP error. A dot before a name keeps it apart from names that reward functions log.
        Returns {} if the reward's calls are not measured.
        """
        if not self._limits[call.reward].config.is_measured:
            return {}
        metrics: dict[str, list[float]] = {".s": [seconds, 1], ".requests": [call.num_made, 1]}
        for status, number in Counter(call.statuses).items():
            metrics[f".http_{status}"] = [number, 0]
        return metrics


def share_of(limit: int | None, rank: int, num_ranks: int) -> float:
    """Returns this rank's share of a limit over all ranks, or infinity if there is no limit.

    The limit is a number of calls, at a time or per minute. servers.check_pace divides the groups
    or completions that are to be scored in the same way.
    The share is at least 1, since `check_calls` refuses a limit below the number of ranks.
    """
    return math.inf if limit is None else limit // num_ranks + (rank < limit % num_ranks)
