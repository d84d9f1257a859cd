"""Limits of calls on one rank: how many at once, how soon the next, whether once more. Only where a reward asks for it.

`max_concurrent` and `max_per_minute` are of all ranks: each has an equal share, the first ones one more where that does
not divide. Calls begin at even distances, so that no minute has more of them than it may. A call that is made again is
a call like any other, and waits outside: it holds neither a process nor a place.

After 20 failures in a row a reward's calls pause for 30 s, and one is made to see. If that fails too, they pause again
while the engine still samples, since nobody waits for them; and when it has ended, those that are left of this scoring
are not made, but counted as failed. So a server that is gone costs half a minute, not hours, and the share of what
failed decides (reward_pool.max_error_frac) whether the run goes on. The next scoring begins without a pause.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from grpo_spmd.config.schema import RewardConfig

if TYPE_CHECKING:
    from grpo_spmd.rewards.pool.pool import Call

_FAILURES_IN_A_ROW, _PAUSE_S = 20, 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MOST_WAIT_S = 0.5
Outcome = Literal[
    "ok", "failed", "put_off"
]  # the last: its server is there, and asks for a later call


@dataclass
class _Limit:
    """Of one reward, on this rank."""

    timeout_s: float
    own_timeout: bool
    has_server: bool
    retries: int
    most: float  # calls at once
    distance_s: float  # between the beginnings of two
    num_under_way: int = 0
    next_s: float = -math.inf  # when the next may begin
    num_failed: int = 0  # in a row
    paused_until: float = -math.inf
    is_trying: bool = False  # it has paused, or pauses: one call decides
    tried: Call | None = None
    has_given_up: bool = False


class CallLimits:
    def __init__(
        self, rewards: Sequence[RewardConfig], timeout_s: float, rank: int, num_ranks: int
    ) -> None:
        """`rewards` as the pool's calls number them; `timeout_s` is of those without their own."""
        self._limits = []
        for reward in rewards:
            most, a_minute = (
                share_of(limit, rank, num_ranks)
                for limit in (reward.max_concurrent, reward.max_per_minute)
            )
            own = reward.timeout_s, reward.url is not None
            seconds = timeout_s if own[0] is None else own[0]
            self._limits.append(
                _Limit(seconds, own[0] is not None, own[1], reward.retries, most, 60.0 / a_minute)
            )
        self._is_watched = [reward.is_measured for reward in rewards]
        self._due: list[float] = []  # when calls that wait may be made again, as a heap
        self._jitter = random.Random()
        self._is_waited_for = True

    def wait_for_all(self) -> None:
        """From here on nothing else is done until all calls of this scoring have ended."""
        self._is_waited_for = True

    def begin_scoring(self) -> None:
        self._is_waited_for = False
        for limit in self._limits:
            limit.paused_until = -math.inf
            limit.num_failed, limit.is_trying, limit.tried, limit.has_given_up = (
                0,
                False,
                None,
                False,
            )
            limit.num_under_way = 0
        self._due.clear()

    def timeout_s(self, call: Call) -> float:
        return self._limits[call.reward].timeout_s

    def has_own_timeout(self, call: Call) -> bool:
        return self._limits[call.reward].own_timeout

    def next_of(self, calls: deque[Call]) -> Call | None:
        """Take the first that may begin now, which it does; None where none may."""
        now = time.monotonic()
        can_begin = [self._can_begin(limit, now) for limit in self._limits]
        if not any(can_begin):
            return None
        for place, call in enumerate(calls):
            if can_begin[call.reward] and call.not_before <= now:
                del calls[place]
                limit, begun = (
                    self._limits[call.reward],
                    replace(call, num_made=call.num_made + 1, began=now),
                )
                limit.num_under_way += 1
                limit.next_s = now + limit.distance_s
                if limit.is_trying:
                    limit.tried = begun
                return begun
        return None

    def _can_begin(self, limit: _Limit, now: float) -> bool:
        is_free = limit.num_under_way < (1 if limit.is_trying else limit.most)
        return is_free and _next_s(limit) <= now

    def wait_s(self) -> float:
        """How long nothing can change but by what workers say, and half a second at the most."""
        now = time.monotonic()
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
        times = [*self._due[:1], *(at for limit in self._limits if (at := _next_s(limit)) > now)]
        return min([_MOST_WAIT_S, *(at - now for at in times)])

    def seconds_for(self, call: Call) -> float:
        """That one which begins may take."""
        return self._limits[call.reward].timeout_s - call.spent_s

    def not_begun(self, call: Call) -> Call:
        """Its worker had died before: it is to begin once more."""
        self._limits[call.reward].num_under_way -= 1
        return replace(call, num_made=call.num_made - 1)

    def ended(self, call: Call, outcome: Outcome) -> None:
        limit = self._limits[call.reward]
        limit.num_under_way -= 1
        if outcome == "ok":
            limit.num_failed, limit.is_trying, limit.tried = 0, False, None
        elif outcome == "failed":
            limit.num_failed += 1
            is_enough = (
                limit.num_failed >= _FAILURES_IN_A_ROW and not limit.is_trying and limit.has_server
            )
            if call is limit.tried and self._is_waited_for:
                limit.has_given_up = True
            elif call is limit.tried or is_enough:
                limit.is_trying, limit.paused_until = True, time.monotonic() + _PAUSE_S

    def again(self, call: Call, reply: Mapping[str, Any]) -> Call | str:
        """Of a call that has ended with `reply`: the one that is to be made again later, or why none is."""
        limit, why, now = self._limits[call.reward], str(reply["failed"]), time.monotonic()
        if not reply["again"]:
            return why
        times = f"asked {call.num_made} times"
        if call.num_made > limit.retries:
            return f"{why} ({times})" if call.num_made > 1 else why
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (call.num_made - 1))
        wait_s = reply["wait_s"]
        pause_s = self._jitter.uniform(0, longest) if wait_s is None else wait_s
        spent_s = call.spent_s + (now - call.began) + pause_s
        if spent_s >= limit.timeout_s:
            asks = "" if wait_s is None else f"; it asks for {wait_s:.3g} s"
            return (
                f"{why} ({times}{asks}; timeout_s={limit.timeout_s:g} leaves no time for another)"
            )
        heapq.heappush(self._due, now + pause_s)
        return replace(call, spent_s=spent_s, not_before=now + pause_s)

    def given_up(self, calls: deque[Call]) -> list[Call]:
        """Take those that are not to be made any more."""
        if not any(limit.has_given_up for limit in self._limits):
            return []
        kept = [call for call in calls if not self._limits[call.reward].has_given_up]
        left = [call for call in calls if self._limits[call.reward].has_given_up]
        calls.clear()
        calls.extend(kept)
        return left

    @property
    def why_given_up(self) -> str:
        return f"was not asked: {_FAILURES_IN_A_ROW} calls had failed in a row, and one more {_PAUSE_S:g} s later"

    def measured(self, call: Call) -> dict[str, list[float]]:
        """Of one that ended, as notes of ScoredRollouts have it: seconds of the last request, requests, statuses."""
        if not self._is_watched[call.reward]:
            return {}
        statuses: dict[str, list[float]] = {
            f".http_{status}": [number, 0] for status, number in Counter(call.statuses).items()
        }
        return {
            ".s": [time.monotonic() - call.began, 1],
            ".requests": [call.num_made, 1],
            **statuses,
        }


def _next_s(limit: _Limit) -> float:
    return max(limit.next_s, limit.paused_until)


def share_of(limit: int | None, rank: int, num_ranks: int) -> float:
    """Of a limit over all ranks, for this one; infinite where there is none. Never zero, as check_calls sees to it."""
    return math.inf if limit is None else limit // num_ranks + (rank < limit % num_ranks)
