"""Preemption: a signal, or the end of the job's time, ends the run with everything saved. No step is begun that cannot
finish. Only its first optimizer step changes the policy, so a step stopped before it is given up: what is saved is the
state that it began with, and its samples lie in the rollout buffer. After that it is finished. All ranks raise
`Preempted` alike, at a step's start, after each generation's scoring, before the update, between its micro-batches."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_spmd.distributed import interrupt
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.exit import is_embedded
from grpo_spmd.distributed.processes import seconds_left
from grpo_spmd.distributed.store import post_notice, read_notice
from grpo_spmd.files import write_durably
from grpo_spmd.records import ScoredRollouts

_log = logging.getLogger("grpo_spmd")
SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGHUP,
)  # the last: the terminal was closed, or its ssh has ended
MARKER = "preempted.json"
_NUM_RECENT = 200  # steps; more than lie between two evaluations, most likely
_SPREAD = 1.2  # a step may take so many times the longest of the recent ones
_NOTICE = "preempted"  # in the run's store: a rank that was signalled tells the others
_NOTICE_POLL_S = 0.5
_BEGIN, _GENERATED, _UPDATE = range(
    3
)  # a step's start, its last generation's end, its update's start


class Preempted(Exception):
    """The run has to stop, for the reason it says, and the step under way is given up; raised on all ranks alike."""


class _GivenUpError(Exception):
    """Scoring ends here: nothing comes of the step."""


class Preemption:
    """Knows when the run has to stop: a signalled rank tells the others. The deadline is `max_time_s` after the launch,
    else the Slurm job's end, less up to 10 s for what follows the save. Make it before the engine starts, which takes
    long: until then a signal kills. Ctrl-C is such a signal from the first step on; a second one ends this process."""

    def __init__(self, max_time_s: float | None) -> None:
        self._max_time_s = max_time_s
        self._signal: str | None = None
        self._aborting: str | None = None  # why generation was ended early on this rank
        self._deadline: float | None = (
            None  # on the monotonic clock, like all times here; None: not asked for yet
        )
        self._next_poll = 0.0
        self._moments = [math.nan] * 3  # of this step
        self._took_s: list[deque[float]] = [
            deque(maxlen=_NUM_RECENT) for _ in range(3)
        ]  # from each to the step's end
        self._num_steps, self._policy_changes = 0, False
        self._save_s = self._unknown_save_s = (
            0.0  # what a save may take; the second while no save was measured
        )
        self._take_signals()

    def begin_step(self, time_to_save_s: float = 0.0) -> None:
        """Collective. At the start of each step, and before an evaluation that follows the last: raises Preempted after
        a signal, or where less time is left than a step and a save take (0: none was made yet, so nobody knows)."""
        self._take_signals()  # vLLM, or a user's reward, may have set handlers of its own
        if is_embedded():
            signal.signal(signal.SIGINT, self._on_interrupt)
        now = time.monotonic()
        if self._deadline is None:
            interrupt.stop_with(self._on_press)
            left = on_rank0(lambda _: seconds_left(self._max_time_s), None)
            self._deadline = math.inf
            if left is not None:
                self._deadline = now + left - min(10.0, 0.05 * left)
                self._unknown_save_s = min(60.0, 0.05 * max(left, 0.0))
        else:
            for took_s, start in zip(self._took_s, self._moments, strict=True):
                took_s.append(now - start)
            self._num_steps += 1
            if self._num_steps == 2:  # the first took longer, for all that happens once
                for took_s in self._took_s:
                    took_s.popleft()
        self._save_s = time_to_save_s or self._unknown_save_s
        self._moments, self._policy_changes = [now] * 3, False
        self._agree(self._why_stop(_BEGIN, "a step"))

    def check_before_update(self) -> None:
        """Collective. The last look at the clock in a step: raises Preempted like begin_step, for update and save."""
        self._moments[_UPDATE] = time.monotonic()
        self._agree(self._aborting or self._why_stop(_UPDATE, "an update"))

    def check_in_update(self, changes_policy: bool) -> None:
        """Collective. For a signal alone, while the policy is what the step began with; `changes_policy`: no longer."""
        if any_rank(self._signal is not None):
            self._agree(self._signal)
        self._policy_changes = changes_policy

    def should_abort(self) -> bool:
        """Whether this rank should end its generation. The engine asks before each of its steps; waits for nobody."""
        if self._aborting is None:
            self._aborting = self._why_give_up()
            now = time.monotonic()
            if self._aborting is not None:
                post_notice(_NOTICE, self._aborting)
            elif now >= self._next_poll:
                self._next_poll = now + _NOTICE_POLL_S
                self._aborting = read_notice(_NOTICE)
        return self._aborting is not None

    def check_scoring(self) -> None:
        """Raises what `guard` takes for the end of scoring, where some rank was signalled; waits for nobody."""
        if self._signal is not None:
            post_notice(_NOTICE, self._signal)
        elif (now := time.monotonic()) >= self._next_poll:
            self._next_poll = now + _NOTICE_POLL_S
            self._aborting = self._aborting or read_notice(_NOTICE)
        if self._signal is not None or self._aborting is not None:
            raise _GivenUpError

    def guard(self, score: Callable[..., ScoredRollouts]) -> Callable[..., ScoredRollouts]:
        """`score`, after which the ranks agree whether the step is given up; called after each generation by all. Then
        nothing is scored, and after a signal a failure means that too: Slurm signals the reward's processes as well."""

        def guarded(*args: Any, **kwargs: Any) -> ScoredRollouts:
            """Collective. Raises Preempted as check_before_update, or where some rank ended its generation early."""
            scored = ScoredRollouts()
            self._moments[_GENERATED] = time.monotonic()
            reason = self._why_give_up()
            if reason is None:
                try:
                    scored = score(*args, **kwargs)
                except _GivenUpError:
                    reason = self._signal or self._aborting
                except Exception as e:
                    if self._signal is None:
                        raise
                    _log.warning(
                        "%s: scoring failed and is given up (%s: %s)",
                        self._signal,
                        type(e).__name__,
                        e,
                    )
            self._agree(reason or self._aborting or self._why_stop(_UPDATE, "an update"))
            return scored

        return guarded

    def _why_give_up(self) -> str | None:
        return self._aborting or self._why_stop(_GENERATED, "the rest of the step")

    def _why_stop(self, since: int, what: str) -> str | None:
        """`since`: the moment from which on the step must come to its end; `what`: that part of it."""
        needed_s = max(self._took_s[since], default=0.0)
        if self._signal is not None:
            return self._signal
        assert self._deadline is not None, "begin_step comes first"
        left = self._deadline - time.monotonic()
        if left >= _SPREAD * needed_s + self._save_s:
            return None
        return f"deadline: {left:.0f} s left, {what} takes {needed_s:.0f} s and a save {self._save_s:.0f} s"

    def _agree(self, reason: str | None) -> None:
        first: str | None = on_rank0(
            lambda reasons: next((r for r in reasons if r is not None), None), reason
        )
        if first is not None:
            raise Preempted(first)

    def _take_signals(self) -> None:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before != self._on_signal and (number, before) != (
                signal.SIGHUP,
                signal.SIG_IGN,
            ):  # nohup
                signal.signal(number, self._on_signal)
        interrupt.restore_handler()

    def _on_press(self) -> bool:
        """Ctrl-C, heard in a thread of its own while this rank is anywhere. Whether an update must be finished."""
        self._signal = self._signal or "Ctrl-C"
        return self._policy_changes

    def _on_interrupt(self, _: int, frame: object) -> None:
        """In a process that is not ours to end: the second Ctrl-C is its owner's."""
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = "Ctrl-C"

    def _on_signal(self, number: int, _: object) -> None:
        if self._signal is None:  # nothing else: a handler may run in the middle of anything
            self._signal = signal.Signals(number).name


def leave_marker(run_dir: str | os.PathLike[str], step: int, reason: str) -> None:
    """Collective. Write `<run_dir>/preempted.json`, once all ranks have come here with their part saved."""
    marker = json.dumps({"step": step, "reason": reason, "saved": True}).encode() + b"\n"
    on_rank0(lambda _: write_durably(Path(run_dir, MARKER), marker), None)


def remove_marker(run_dir: str | os.PathLike[str]) -> None:
    """Collective. The run goes on."""
    on_rank0(lambda _: Path(run_dir, MARKER).unlink(missing_ok=True), None)
