"""Preemption: a signal, or the end of the job's time, ends the run with everything saved.

No step is begun that cannot finish. Only the first optimizer step of a step changes the policy. A
step that is stopped before it is given up: the state saved is the one it began with, and its
samples are in the rollout buffer. A step that is stopped later is finished.

All ranks raise `Preempted` together: at a step's start, after each generation's scoring, before the
update and between its micro-batches.
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
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.exit import is_embedded
from grpo_spmd.distributed.processes import seconds_left
from grpo_spmd.distributed.store import post_notice, read_notice
from grpo_spmd.files import write_durably
from grpo_spmd.records import ScoredRollouts

_log = logging.getLogger("grpo_spmd")
MARKER = "preempted.json"
# Steps whose times count; most likely more than lie between two evaluations.
_NUM_RECENT = 200
# A step may take this many times the longest recent one.
_SPREAD = 1.2
# In the run's store a rank that was signalled tells the others.
_NOTICE = "preempted"
_NOTICE_POLL_S = 0.5
# Moments of a step: its start, the end of its last generation, the start of its update.
_BEGIN = 0
_GENERATED = 1
_UPDATE = 2


class Preempted(Exception):
    """The run has to stop, for the reason in the text. All ranks raise it together.

    The step in progress is given up.
    """


class _ScoringStoppedError(Exception):
    """Scoring stops here, because the step is given up."""


class Preemption:
    """Knows when the run has to stop; a signalled rank tells the others.

    The deadline is `max_time_s` after the launch, else the end of the Slurm job, minus up to 10 s
    for what follows the save. Create it before the engine, which takes long to start: until then a
    signal kills. From the first step on Ctrl-C is such a signal; a second one ends this process.
    """

    def __init__(self, max_time_s: float | None) -> None:
        self._max_time_s = max_time_s
        self._signal: str | None = None
        # Why this rank ended its generation early.
        self._aborting: str | None = None
        # Times are on the monotonic clock. None: not asked for yet.
        self._deadline: float | None = None
        self._next_poll = 0.0
        # When this step began, had generated and began its update; and for each of the three how
        # long recent steps took from it to their end.
        self._moments = [math.nan] * 3
        self._durations_s: list[deque[float]] = [deque(maxlen=_NUM_RECENT) for _ in range(3)]
        self._num_steps = 0
        self._policy_changes = False
        # How long a save may take, and an estimate until one was measured.
        self._save_s = 0.0
        self._unknown_save_s = 0.0
        self._take_signals()

    def begin_step(self, time_to_save_s: float = 0.0) -> None:
        """Collective. Call it at the start of each step, and once more before the evaluation that
        follows the last step.

        Raises Preempted after a signal, or if less time is left than a step and a save take.
        `time_to_save_s` is 0 while no save was measured.
        """
        # vLLM, or a user's reward, may have set its own handlers.
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
            # The first step took longer: it includes everything that happens once.
            if self._num_steps == 2:
                for durations_s in self._durations_s:
                    durations_s.popleft()
        self._save_s = time_to_save_s or self._unknown_save_s
        self._moments = [time_s] * 3
        self._policy_changes = False
        self._agree(self._reason_to_stop(_BEGIN, "a step"))

    def _set_deadline(self, time_s: float) -> None:
        """Collective. Rank 0 asks how much time the job has left."""
        left_s = on_rank0(lambda _: seconds_left(self._max_time_s), None)
        self._deadline = math.inf
        if left_s is not None:
            self._deadline = time_s + left_s - min(10.0, 0.05 * left_s)
            self._unknown_save_s = min(60.0, 0.05 * max(left_s, 0.0))

    def check_before_update(self) -> None:
        """Collective. Raises Preempted as begin_step does, for update and save.

        This is the last look at the clock in a step.
        """
        self._moments[_UPDATE] = time.monotonic()
        self._agree(self._aborting or self._reason_to_stop(_UPDATE, "an update"))

    def check_in_update(self, changes_policy: bool) -> None:
        """Collective. Raises Preempted after a signal; call it while the policy is as at the start.

        `changes_policy`: from now on the policy changes.
        """
        if any_rank(self._signal is not None):
            self._agree(self._signal)
        self._policy_changes = changes_policy

    def should_abort(self) -> bool:
        """Returns True if this rank should end its generation.

        The engine asks before each of its steps. Waits for nobody.
        """
        if self._aborting is None:
            self._aborting = self._reason_to_give_up()
            self._share_notice(self._aborting)
        return self._aborting is not None

    def check_scoring(self) -> None:
        """Stops the scoring in `guard` if some rank was signalled. Waits for nobody."""
        self._share_notice(self._signal)
        if self._signal is not None or self._aborting is not None:
            raise _ScoringStoppedError

    def _share_notice(self, reason: str | None) -> None:
        """Posts the reason, or else reads from time to time what another rank has posted."""
        time_s = time.monotonic()
        if reason is not None:
            post_notice(_NOTICE, reason)
        elif time_s >= self._next_poll:
            self._next_poll = time_s + _NOTICE_POLL_S
            self._aborting = self._aborting or read_notice(_NOTICE)

    def guard(self, score: Callable[..., ScoredRollouts]) -> Callable[..., ScoredRollouts]:
        """Returns `score` with a check after it; all ranks call it after each generation.

        If the step is given up, nothing is scored. After a signal a failure of `score` also gives
        up the step, because Slurm signals the reward processes as well.
        """

        def guarded(*args: Any, **kwargs: Any) -> ScoredRollouts:
            """Collective. Raises Preempted as check_before_update does, or if some rank ended its
            generation early."""
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
        """Collective. Raises Preempted with the reason of the first rank that has one."""
        agreed_reason: str | None = on_rank0(
            lambda reasons: next(filter(None, reasons), None), reason
        )
        if agreed_reason is not None:
            raise Preempted(agreed_reason)

    def _take_signals(self) -> None:
        for number in interrupt.SIGNALS:
            handler = signal.getsignal(number)
            is_nohup = number == signal.SIGHUP and handler == signal.SIG_IGN
            if handler != self._on_signal and not is_nohup:
                signal.signal(number, self._on_signal)
        interrupt.restore_handler()

    def _on_press(self) -> bool:
        """Ctrl-C, in a thread of its own. Returns True if an update must be finished."""
        self._signal = self._signal or "Ctrl-C"
        return self._policy_changes

    def _on_interrupt(self, _: int, frame: object) -> None:
        """Ctrl-C in a process that is not ours to end: the second one is its owner's."""
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = "Ctrl-C"

    def _on_signal(self, number: int, _: object) -> None:
        # Nothing else: a handler may run in the middle of anything.
        if self._signal is None:
            self._signal = signal.Signals(number).name


def write_marker(run_dir: str | os.PathLike[str], step: int, reason: str) -> None:
    """Collective. Writes `<run_dir>/preempted.json` once all ranks have saved their part."""
    marker = json.dumps({"step": step, "reason": reason, "saved": True}).encode() + b"\n"
    on_rank0(lambda _: write_durably(Path(run_dir, MARKER), marker), None)


def remove_marker(run_dir: str | os.PathLike[str]) -> None:
    """Collective. Removes the marker, because the run goes on."""
    on_rank0(lambda _: Path(run_dir, MARKER).unlink(missing_ok=True), None)
