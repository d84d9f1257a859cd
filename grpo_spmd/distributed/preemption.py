"""Preemption: stops the run with everything saved, after a signal or before the job's time ends.

A step is not begun if the time left is too short for it. If the run must stop within a step, what
happens depends on whether the step's first optimizer step has begun to change the policy. Before
that, the step is given up: the saved state is the one with which the step began, and the
completions that are sampled already are saved in the rollout buffer. After that, the step is
finished first.

All ranks raise `Preempted` together, at one of these points: at the start of a step, after each
generation was scored, before the update, and between micro-batches while the policy is unchanged.
"""

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
from grpo_spmd.distributed.collectives import any_rank, on_rank0, post_notice, read_notice
from grpo_spmd.distributed.exit import is_embedded
from grpo_spmd.distributed.processes import seconds_left
from grpo_spmd.files import write_durably
from grpo_spmd.records import ScoredRollouts

_log = logging.getLogger("grpo_spmd")
MARKER = "preempted.json"
# The longest of this many recent steps is the estimate for the next one. That is most likely more
# steps than lie between two evaluations, so the estimate includes one.
_NUM_RECENT = 200
# The next step is expected to take at most this many times as long as the longest recent one.
_SPREAD = 1.2
# The key in the run's store under which a rank that got a signal tells the others.
_NOTICE = "preempted"
_NOTICE_POLL_S = 0.5
# The moments of a step from which the rest of it is timed: its start, the end of its last
# generation, the start of its update.
_BEGIN = 0
_GENERATED = 1
_UPDATE = 2


class Preempted(Exception):
    """Raised on all ranks together if the run has to stop; the text is the reason.

    The step in progress is given up.
    """


class _ScoringStoppedError(Exception):
    """Raised within the scoring of completions to stop it, because the step is given up.

    `Preemption.guard` catches it.
    """


class Preemption:
    """Decides when the run has to stop, and makes all ranks stop together.

    The run stops if some rank gets SIGTERM, SIGUSR1, SIGHUP or (from the first step on) Ctrl-C, or
    if the deadline is near. A second Ctrl-C ends this process at once. The deadline is `max_time_s`
    after the launch if that is set, else the end of the Slurm job, minus up to 10 s for what
    follows the last save.

    Create this object before the engine, which takes long to start: until then a signal kills the
    process.
    """

    def __init__(self, max_time_s: float | None) -> None:
        """Installs the signal handlers. `max_time_s` is training.max_time_s; None: not set."""
        self._max_time_s = max_time_s
        self._signal: str | None = None
        # Why this rank ended its generation early, or None if it did not.
        self._aborting: str | None = None
        # On the monotonic clock, as all times here. None until `begin_step` has asked for it.
        self._deadline: float | None = None
        self._next_poll = 0.0
        # By moment (_BEGIN, _GENERATED, _UPDATE): when this step reached it, and how long each
        # recent step took from there to its end.
        self._moments = [math.nan] * 3
        self._durations_s: list[deque[float]] = [deque(maxlen=_NUM_RECENT) for _ in range(3)]
        self._num_steps = 0
        self._policy_changes = False
        # How long a save takes, and the estimate that is used until one was measured.
        self._save_s = 0.0
        self._unknown_save_s = 0.0
        self._take_signals()

    def begin_step(self, time_to_save_s: float = 0.0) -> None:
        """Collective. Starts the clocks of a step, and raises Preempted if the run has to stop.

        That is so after a signal, or if less time is left than a step and a save take. Called at
        the start of each step, and once more before the evaluation after the last step.
        `time_to_save_s` is how long a save took, 0 if none was measured yet.
        """
        # vLLM, or a user's reward function, may have replaced our signal handlers.
        self._take_signals()
        if is_embedded():
            signal.signal(signal.SIGINT, self._on_interrupt)
        time_s = time.monotonic()
        if self._deadline is None:
            interrupt.stop_with(self._on_press)
            self._set_deadline(time_s)
        else:
            for durations_s, moment in zip(self._durations_s, self._moments, strict=True):
                durations_s.append(time_s - moment)
            self._num_steps += 1
            # Forget the first step: it took longer, since it included what happens only once.
            if self._num_steps == 2:
                for durations_s in self._durations_s:
                    durations_s.popleft()
        self._save_s = time_to_save_s or self._unknown_save_s
        self._moments = [time_s] * 3
        self._policy_changes = False
        self._agree(self._reason_to_stop(_BEGIN, "a step"))

    def _set_deadline(self, time_s: float) -> None:
        """Collective. Sets the deadline; rank 0 asks how much time the job has left."""
        left_s = on_rank0(lambda _: seconds_left(self._max_time_s), None)
        self._deadline = math.inf
        if left_s is not None:
            self._deadline = time_s + left_s - min(10.0, 0.05 * left_s)
            self._unknown_save_s = min(60.0, 0.05 * max(left_s, 0.0))

    def check_before_update(self) -> None:
        """Collective. Raises Preempted after a signal, or if no time is left for update and save.

        Later in the step the deadline is not checked any more.
        """
        self._moments[_UPDATE] = time.monotonic()
        self._agree(self._aborting or self._reason_to_stop(_UPDATE, "an update"))

    def check_in_update(self, changes_policy: bool) -> None:
        """Collective. Raises Preempted if some rank got a signal.

        Called between micro-batches, only as long as the step has not changed the policy.
        `changes_policy` is True in the last call before an optimizer step changes it.
        """
        if any_rank(self._signal is not None):
            self._agree(self._signal)
        self._policy_changes = changes_policy

    def should_abort(self) -> bool:
        """Returns True if this rank should end its generation early.

        The engine asks before each of its steps. Does not wait for other ranks.
        """
        if self._aborting is None:
            self._aborting = self._reason_to_give_up()
            self._share_notice(self._aborting)
        return self._aborting is not None

    def check_scoring(self) -> None:
        """Raises _ScoringStoppedError, which `guard` catches, if this step is to be given up.

        That is so if some rank got a signal or ended its generation early. Called again and again
        while completions are scored. Does not wait for other ranks.
        """
        self._share_notice(self._signal)
        if self._signal is not None or self._aborting is not None:
            raise _ScoringStoppedError

    def _share_notice(self, reason: str | None) -> None:
        """Posts `reason` in the run's store, or looks there for another rank's reason.

        It looks if `reason` is None, every half a second. A reason that it reads goes to
        `_aborting`.
        """
        time_s = time.monotonic()
        if reason is not None:
            post_notice(_NOTICE, reason)
        elif time_s >= self._next_poll:
            self._next_poll = time_s + _NOTICE_POLL_S
            self._aborting = self._aborting or read_notice(_NOTICE)

    def guard(self, score: Callable[..., ScoredRollouts]) -> Callable[..., ScoredRollouts]:
        """Returns `score`, wrapped so that the run can stop before, in and after the scoring.

        All ranks call the wrapped function after each generation. If this rank already has a reason
        to stop, it does not call `score`. If `score` fails after a signal, the step is given up and
        the error is only logged, because Slurm sends the signal to the reward processes as well.
        """

        def guarded(*args: Any, **kwargs: Any) -> ScoredRollouts:
            """Collective. Scores the completions. Raises Preempted as check_before_update does, or
            if some rank ended its generation early."""
            scored = ScoredRollouts()
            self._moments[_GENERATED] = time.monotonic()
            reason = self._reason_to_give_up()
            if reason is None:
                try:
                    scored = score(*args, **kwargs)
                except _ScoringStoppedError:
                    reason = self._signal or self._aborting
                except Exception as error:
                    if self._signal is None:
                        raise
                    text = f"{type(error).__name__}: {error}"
                    _log.warning("%s: scoring failed and is given up (%s)", self._signal, text)
            self._agree(reason or self._aborting or self._reason_to_stop(_UPDATE, "an update"))
            return scored

        return guarded

    def _reason_to_give_up(self) -> str | None:
        """Returns why this rank should end its generation early; None if it should not."""
        return self._aborting or self._reason_to_stop(_GENERATED, "the rest of the step")

    def _reason_to_stop(self, moment: int, remaining_work: str) -> str | None:
        """Returns why the step cannot go on from `moment` to its end, or None if it can.

        `remaining_work` names the work from `moment` to the end, for the message.
        """
        if self._signal is not None:
            return self._signal
        assert self._deadline is not None, "begin_step comes first"
        needed_s = max(self._durations_s[moment], default=0.0)
        left_s = self._deadline - time.monotonic()
        if left_s >= _SPREAD * needed_s + self._save_s:
            return None
        return (
            f"deadline: {left_s:.0f} s left, {remaining_work} takes {needed_s:.0f} s and a save "
            f"{self._save_s:.0f} s"
        )

    def _agree(self, reason: str | None) -> None:
        """Collective. Raises Preempted on all ranks if at least one of them has a reason to stop.

        `reason` is this rank's, or None. The exception has the reason of the lowest such rank.
        """
        agreed_reason: str | None = on_rank0(
            lambda reasons: next(filter(None, reasons), None), reason
        )
        if agreed_reason is not None:
            raise Preempted(agreed_reason)

    def _take_signals(self) -> None:
        """Installs our signal handlers again. A SIGHUP that is ignored (nohup) stays ignored."""
        for number in interrupt.SIGNALS:
            handler = signal.getsignal(number)
            is_nohup = number == signal.SIGHUP and handler == signal.SIG_IGN
            if handler != self._on_signal and not is_nohup:
                signal.signal(number, self._on_signal)
        interrupt.restore_handler()

    def _on_press(self) -> bool:
        """Handles Ctrl-C in the thread of interrupt.py.

        Returns True if the run finishes the update before it saves, since the update changes the
        policy already.
        """
        self._signal = self._signal or "Ctrl-C"
        return self._policy_changes

    def _on_interrupt(self, _: int, frame: object) -> None:
        """Handles Ctrl-C in a run that is embedded in the caller's process.

        The first press makes the run save and end; the second press interrupts the code at once.
        """
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = "Ctrl-C"

    def _on_signal(self, number: int, _: object) -> None:
        """Notes which signal has come. The checks of this class read it."""
        # Do nothing else here: a signal handler may interrupt any line, even one that holds a lock.
        if self._signal is None:
            self._signal = signal.Signals(number).name


def write_marker(run_dir: str | os.PathLike[str], step: int, reason: str) -> None:
    """Collective. Writes `<run_dir>/preempted.json` once all ranks have saved their part."""
    marker = json.dumps({"step": step, "reason": reason, "saved": True}).encode() + b"\n"
    on_rank0(lambda _: write_durably(Path(run_dir, MARKER), marker), None)


def remove_marker(run_dir: str | os.PathLike[str]) -> None:
    """Collective. Removes the preempted.json of an earlier launch, because the run goes on."""
    on_rank0(lambda _: Path(run_dir, MARKER).unlink(missing_ok=True), None)
