"""The hang doctor: finds the rank that failed or hangs, writes one report, and ends all ranks.

A thread on each rank looks twice a second at its own phase, at the process of one other rank and at
the run's store. The first rank that finds something wrong raises the alarm in the store. Then every
rank writes into the store where it is (its *answer*), the rank that raised the alarm writes the
report, and all exit with the same code within seconds.

Imports no torch: it is imported before the config is checked, and an error in the config must not
wait for torch.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from grpo_spmd.config.errors import ConfigError, cut_middle, refuse
from grpo_spmd.config.schema import WatchdogConfig
from grpo_spmd.distributed import exit, interrupt, processes
from grpo_spmd.distributed.exit import Rank0Error, exit_process
from grpo_spmd.distributed.processes import MAX_TEXT, RankProcess, format_ranks, waits_for
from grpo_spmd.files import hold_standard_streams

if TYPE_CHECKING:
    from torch.distributed import Store

Record = TypeVar("Record")
# The time between two rounds of the doctor's thread.
_POLL_S = 0.5
# If a rank has not answered an alarm after this time, another rank of its host answers for it, from
# what it sees of that process. On a busy machine an answer may take seconds.
_PEER_ANSWER_S = 5.0
# The longest times to wait for all ranks' answers, and then for the report. A wait ends as soon as
# they are in the store.
_ANSWER_S = _PEER_ANSWER_S + 5.0
_REPORT_S = 8.0
# The time between two looks at whether the slowest rank still beats. It is less if the phase's time
# limit is short.
_BEHIND_S = 20.0
# A rank on another host that has not beaten for so long counts as lost. Of ranks on this host, the
# process is looked at instead.
_SILENT_S = 60.0
# What torch's errors say if the other side of a collective is gone.
_LOST_PEER = re.compile(r"onnection|gloo|NCCL|[Tt]imed out|Broken pipe|reset by peer")
_STATES = {
    "gone": "its process is gone (killed, or crashed outside Python)",
    "stopped": "its process is stopped (SIGSTOP, or a debugger)",
    "running": "its process is there, but its Python does not run: a call into C keeps the "
    "interpreter's lock (GIL)",
    "blocked": "its process waits in the kernel, likely for a disk or a file system, and does not "
    "answer",
    "unknown": "it does not answer, and no other rank of its host is there to look at it: its "
    "process, host or network is gone",
}
# What became of a rank: the kinds of a Fault; "gone" or "silent" (it does not answer); "well". The
# culprit is the rank whose outcome comes first here.
_OUTCOMES = ("raise", "config", "gone", "silent", "stopped", "follows", "well")


@dataclass(frozen=True)
class Position:
    """Where a rank is in the run. Each rank publishes it in the store as its beat."""

    phase: str
    step: int
    # Phases and collectives entered so far. All ranks count the same: the slowest has the fewest.
    sequence: int
    # Beats (signs of life) so far: a rank whose Python runs publishes one every half second.
    num_beats: int = 0

    def __str__(self) -> str:
        return f"phase {self.phase}, step {self.step}"


@dataclass(frozen=True)
class Fault:
    """How a rank failed: by an error in its main thread, or by a signal."""

    # "raise", "config", "stopped" (by Ctrl-C or SIGTERM) or "follows" (another rank failed)
    kind: str
    headline: str
    traceback: str = ""


@dataclass(frozen=True)
class Alarm:
    """What a rank has noticed. Only the first alarm of a run counts."""

    # The kind of its own fault; "timeout" (its phase took too long); "dead" (the process of its
    # neighbour is gone); "silent" (its neighbour on another host does not beat).
    why: str
    by: int  # the rank that raised the alarm
    limit_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """Where one rank is after an alarm. The rank itself writes it, or another rank on its host."""

    position: Position
    responds: bool = True  # False: the rank's Python does not run, so another rank wrote this
    fault: Fault | None = None
    waits: str = ""  # what its main thread waits for: "collective", "device" or ""
    line: str = ""  # where the main thread is: the innermost line of our code or the user's
    stacks: str = ""
    # Collectives by process group, from torch's flight recorder.
    enqueued: dict[str, int] = field(default_factory=dict)
    flight: str = ""  # a text about them
    state: str = ""  # the state of its process (a key of _STATES) if it does not respond

    @property
    def outcome(self) -> str:
        """What became of the rank: one of _OUTCOMES."""
        if not self.responds:
            return "gone" if self.state == "gone" else "silent"
        return self.fault.kind if self.fault is not None else "well"


@dataclass(frozen=True)
class Report:
    """The report on a failed run, which all ranks share: which rank is to blame, and why."""

    headline: str
    text: str
    details: str  # stacks of all ranks, for hang.txt
    code: int
    culprit: int


def fault_of(error: BaseException, rank: int) -> Fault:
    """Returns the Fault that describes `error`, which ended the main thread of `rank`."""
    if isinstance(error, ConfigError):
        return Fault("config", str(error))
    if isinstance(error, KeyboardInterrupt):
        return Fault("stopped", f"stopped by {error.args[0] if error.args else 'Ctrl-C'}")
    is_from_rank0 = isinstance(error, Rank0Error)
    cause = error.__cause__ if is_from_rank0 and error.__cause__ else error
    # The message of a failed proof is complete: where it was raised adds nothing.
    is_complete = getattr(cause, "says_all", False)
    headline, _, details = str(cause).partition("\n")
    text = details if is_complete else "".join(traceback.format_exception(cause))
    text = cut_middle(text, MAX_TEXT)
    # If another rank is lost, torch itself raises an error, from within a collective. Then this
    # rank is not the one that failed first.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_lost_peer = (
        isinstance(error, RuntimeError)
        and _LOST_PEER.search(str(error)) is not None
        and waits_for(frames[-1] if frames else None) == "collective"
    )
    is_follower = is_lost_peer or (is_from_rank0 and rank != 0)
    headline = f"{type(cause).__name__}: {headline}"
    return Fault("follows" if is_follower else "raise", headline, text)


def write_report(alarm: Alarm, answers: list[Answer], hosts: list[str]) -> Report:
    """Returns the report on a failed run; nothing is written to a file here.

    `answers` and `hosts` (texts with host name and process id) have an entry for each rank, in rank
    order.
    """
    culprit, reason = find_culprit(alarm, answers)
    answer = answers[culprit]
    fault = answer.fault
    if fault is not None and fault.kind == "config":
        is_common = all(answer.outcome == "config" for answer in answers)
        origin = "" if is_common else f" (said by rank {culprit} on {hosts[culprit]})"
        text = f"error: {fault.headline}{origin}"
        return Report(text, text, "", 2, culprit)
    headline = f"rank {culprit} ({hosts[culprit]}) {reason}"
    lines = [headline]
    # A fault without a traceback was a signal, or its message is complete: stacks add nothing.
    if fault is None and answer.stacks:
        lines += ["its stacks:", answer.stacks.rstrip()]
    elif fault is not None and fault.traceback:
        lines.append(fault.traceback.rstrip())
    ranks_by_text: dict[str, list[int]] = {}
    details = []
    for rank, answer in enumerate(answers):
        text = _describe(answer)
        if rank != culprit:
            ranks_by_text.setdefault(text, []).append(rank)
        head = f"--- rank {rank} ({hosts[rank]}): {text}, sequence {answer.position.sequence}"
        details.append(f"{head}\n{answer.stacks}\nflight recorder: {answer.flight}\n")
    if ranks_by_text:
        lines.append("where the other ranks were:")
    lines += [f"  {format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    # After a long traceback the reason is repeated, because people read the last line first.
    is_long = fault is not None and "\n" in fault.traceback
    lines.append("all ranks stop with exit code 1" + f": rank {culprit} {reason}" * is_long)
    return Report(headline, "\n".join(lines), "\n".join(details), 1, culprit)


def find_culprit(alarm: Alarm, answers: list[Answer]) -> tuple[int, str]:
    """Returns the rank to blame and the reason, a text that follows the rank's name in the report.

    The rank to blame is one that raised an error. If there is none, it is one whose process is
    gone, else one that does not answer, else one that was stopped, else one that failed because of
    another rank. If all ranks are well, the run hangs, and the slowest rank is to blame.
    """
    # Of several ranks with the same outcome, the one that raised the alarm was first.
    rank = min(
        range(len(answers)),
        key=lambda rank: (_OUTCOMES.index(answers[rank].outcome), rank != alarm.by),
    )
    answer = answers[rank]
    if answer.fault is not None:
        return rank, f"failed first, in {answer.position}: {answer.fault.headline}"
    if not answer.responds:
        return rank, f"went silent in {answer.position}: {_STATES[answer.state]}"
    rank, *equals = _slowest_ranks(answers)
    ending = "and the others wait for it"
    if equals:
        ending = "as do others: no rank can be told to be the one that the others wait for"
    limit = f"{alarm.limit_s:g} s here (watchdog.timeout_s, watchdog.phase_timeouts_s)"
    hang = f"hangs in {answers[rank].position}, at {answers[rank].line or '?'}, {ending}"
    return rank, f"{hang}; no phase may take longer than {limit}"


def _slowest_ranks(answers: list[Answer]) -> list[int]:
    """Returns the ranks for which the others may be waiting; several if nothing tells them apart.

    These are the ranks that have entered the fewest phases and collectives. Among ranks with equal
    counts, they are those that have enqueued the fewest collectives according to torch's flight
    recorder. Among ranks that are still equal, they are those whose main threads wait for nothing,
    else those that wait for their device.
    """
    low = min(answer.position.sequence for answer in answers)
    slowest = {rank: a for rank, a in enumerate(answers) if a.position.sequence == low}
    groups = sorted(set.intersection(*(set(answer.enqueued) for answer in slowest.values())))

    def order(rank: int) -> list[int]:
        """Returns the sort key of a rank: collectives by process group, then what it waits for."""
        answer = answers[rank]
        waits = ("", "device", "collective").index(answer.waits)
        return [*(answer.enqueued[group] for group in groups), waits]

    return [rank for rank in slowest if order(rank) == min(map(order, slowest))]


def _describe(answer: Answer) -> str:
    """Returns a text for the report: where a rank is, and what it waits for or how it failed."""
    if not answer.responds:
        return f"{answer.position}, went silent: {_STATES[answer.state]}"
    if answer.fault is not None and answer.fault.kind == "raise":
        return f"{answer.position}, failed too: {answer.fault.headline}"
    waits = {"collective": ", waits in a collective", "device": ", waits for its device", "": ""}
    line = f", at {answer.line}" if answer.line else ""
    return f"{answer.position}{waits[answer.waits]}{line}"


class Doctor:
    """Watches one rank from a thread of its own, over its own connection to the run's store.

    Each rank has one Doctor. The thread publishes beats, raises the alarm if something is wrong,
    and ends the process at an alarm. The main thread tells it of each phase (`move`) and of an
    error (`fail`).
    """

    def __init__(self, store: Store, rank: int, world_size: int, config: WatchdogConfig) -> None:
        """Starts the thread, and installs handlers of SIGUSR2 and, if it has none, of SIGTERM."""
        self._rank = rank
        self._world_size = world_size
        self._config = config
        # Two connections, because a request locks its connection. `_store` is for the thread that
        # calls move(), `_watch_store` for the doctor's.
        self._store = store
        self._watch_store: Store = store.clone()  # type: ignore[attr-defined]
        # Where the report is written, and what gets its first line (`write_reports_to`).
        self.folder: Path | None = None
        self.tell: Callable[[str], None] | None = None
        # The number of phases and collectives that this rank has entered.
        self.sequence = 0
        self._num_beats = 0
        # Both threads publish the position: the lock keeps an older one from replacing a newer one.
        self._beat_lock = threading.Lock()
        self._phase = "start"
        self._step = 0
        # How long this process was stopped or in a debugger so far. That time counts for no limit.
        self._paused_s = 0.0
        # When this rank entered its phase.
        self._entered = time.monotonic()
        self._fault: Fault | None = None
        self._wake = threading.Event()
        self._is_stopped = False
        self._is_in_debugger = False
        # The slowest rank and its position when this rank last looked, and when that was.
        self._slowest: tuple[int, Position] | None = None
        self._slowest_seen = -math.inf
        # The newest beat of the next rank, which this rank watches, and when it came.
        self._last_beat = b""
        self._last_beat_seen = self._now()
        self._main_thread = threading.get_ident()
        # At SIGUSR2 this process writes its stacks here, even if its Python does not run. Another
        # rank reads them (processes.stacks_of_peer).
        self._stacks_fd = os.memfd_create("grpo_spmd_stacks")
        faulthandler.register(signal.SIGUSR2, self._stacks_fd, all_threads=True)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # torchrun sends SIGTERM to the ranks that survive a failure. By default it would end
            # them before they can say which rank failed.
            signal.signal(signal.SIGTERM, _raise_interrupt)
        self._process = processes.this_process(self._stacks_fd)
        self._publish(f"process/{rank}", self._process, self._store)
        self.move("start", 0)
        # The other ranks of this host. None until the thread has looked for them.
        self._peers: dict[int, RankProcess] | None = None
        self._thread = threading.Thread(target=self._watch, name="doctor", daemon=True)
        self._thread.start()

    def move(self, phase: str, step: int) -> None:
        """Notes and publishes that this rank enters a phase. The phase's time limit starts now."""
        self._phase = phase
        self._step = step
        self._entered = self._now()
        self._slowest_seen = -math.inf
        self.sequence += 1
        with suppress(RuntimeError):  # if the store is gone, the thread reports that
            self._beat(self._store)

    def stop(self) -> None:
        """Ends the thread, and removes the signal handlers that were installed."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        os.close(self._stacks_fd)
        if signal.getsignal(signal.SIGTERM) is _raise_interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fail(self, error: BaseException) -> NoReturn:
        """Reports `error`, which ended the main thread, and ends this process.

        The thread raises the alarm, reports and ends the process, and the main thread waits for
        that. If the thread does not manage it in time, the process ends here, without a common
        report.
        """
        self._fault = fault_of(error, self._rank)
        self._wake.set()
        deadline = time.monotonic() + _ANSWER_S + 2 * _REPORT_S
        while time.monotonic() < deadline and self._thread.is_alive():
            # Ctrl-C again, or torchrun's SIGTERM: the thread is about to end this process.
            with suppress(KeyboardInterrupt):
                # Not join(): after an interrupted join(), Python 3.11 takes the thread for ended.
                time.sleep(0.1)
        exit_process(1, f"rank {self._rank}: {self._fault.headline}\n{self._fault.traceback}")

    def _position(self) -> Position:
        """Returns where this rank is now."""
        return Position(self._phase, self._step, self.sequence, num_beats=self._num_beats)

    def _now(self) -> float:
        """Returns the monotonic time without the seconds in which this process was stopped.

        The watching thread adds the gaps between its beats to `_paused_s`: a process that SIGSTOP
        or a suspended machine held up must not count as one that hangs.
        """
        return time.monotonic() - self._paused_s

    def _watch(self) -> None:
        """Beats, looks for something wrong, and ends this process at the first alarm of any rank.

        This is the body of the thread: one round every half second, until `stop` is called. While
        any rank is in a debugger, no rank's phase can exceed its limit.
        """
        try:
            self._watch_store.set_timeout(timedelta(seconds=_SILENT_S))
            previous = time.monotonic()
            while not self._is_stopped:
                current_time = time.monotonic()
                # A long gap between two rounds means that this process was stopped (SIGSTOP). In a
                # debugger all time counts as paused.
                usual_s = 0.0 if self._look_for_debugger() else 4 * _POLL_S
                self._paused_s += max(0.0, current_time - previous - usual_s)
                previous = current_time
                self._beat(self._watch_store)
                # While a rank is in a debugger, the others may wait for it: their limits start
                # anew.
                if self._watch_store.add("debuggers", 0) > 0:
                    self._entered = self._now()
                is_raised = self._watch_store.check(["alarm"])
                alarm = None if is_raised else self._find_alarm()
                if alarm is not None and not self._is_stopped:
                    # This sets the alarm only if no other rank has: all ranks act on the first one.
                    self._watch_store.compare_set("alarm", "", json.dumps(asdict(alarm)))
                    is_raised = True
                if is_raised and not self._is_stopped:
                    self._end(self._read("alarm", Alarm))
                if self._fault is None:
                    self._wake.wait(_POLL_S)
        except Exception as error:
            # The store is gone (with rank 0's host), or this code has a fault. Report both.
            self._wake.wait(1.0)
            if not self._is_stopped:
                self._exit_alone(error)

    def _read(self, key: str, kind: type[Record]) -> Record:
        """Returns the record under `key` in the store; waits until some rank has set the key."""
        return _decode(self._watch_store.get(key), kind)  # get() waits until the key is set

    def _publish(self, key: str, record: Any, store: Store | None = None) -> None:
        """Writes a record to the store as JSON. `store` is the connection; None is the thread's."""
        (store or self._watch_store).set(key, json.dumps(asdict(record)))

    def _beat(self, store: Store) -> None:
        """Publishes this rank's position with a higher number of beats, as a sign of life."""
        with self._beat_lock:
            self._num_beats += 1
            self._publish(f"beat/{self._rank}", self._position(), store)

    def _find_alarm(self) -> Alarm | None:
        """Returns what is wrong with this rank or with one that it watches; None if all is well.

        It looks in this order whether this rank has failed, its phase has exceeded the time limit,
        the process of the next rank of this host is gone, or the next rank of the run, on another
        host, has stopped beating.
        """
        if self._fault is not None:
            return Alarm(self._fault.kind, self._rank)
        limit = limit_s(self._config, self._phase)
        waited_s = self._now() - self._entered
        # Only a second look can tell whether the slowest rank still beats. So the first one is made
        # an interval before the limit, and the second one decides at the limit.
        interval_s = min(_BEHIND_S, max(limit / 2, 6 * _POLL_S))
        is_due = self._now() - self._slowest_seen > interval_s and waited_s > limit - interval_s
        if is_due and not self._waits_for_busy_rank() and waited_s > limit:
            return Alarm("timeout", self._rank, limit)
        if self._peers is None:
            self._peers = self._find_peers()
        # Ranks of this host form one ring, in which processes are looked at, and all ranks form
        # another, in which beats are read: each rank watches one neighbour in each.
        for rank in processes.next_rank(self._rank, self._peers):
            if processes.process_state(self._peers[rank]) == "gone":
                # At a normal end that rank may exit before this one. Then `stop` comes within a
                # second, and the alarm is dropped.
                self._wake.wait(1.0)
                return Alarm("dead", self._rank)
        for rank in processes.next_rank(self._rank, range(self._world_size)):
            beat = self._watch_store.get(f"beat/{rank}")
            if beat != self._last_beat or rank in self._peers:
                self._last_beat = beat
                self._last_beat_seen = self._now()
            elif self._now() - self._last_beat_seen > _SILENT_S:
                return Alarm("silent", self._rank, _SILENT_S)
        return None

    def _waits_for_busy_rank(self) -> bool:
        """Returns True if the slowest rank is in another phase and has beaten since the last call.

        Then this rank only waits for the slowest one, and its own time limit does not count: the
        doctor of the slowest rank watches the limit of its phase.
        """
        # One request for all ranks: with a thousand ranks, one request each would take too long.
        ranks = range(self._world_size)
        texts = self._watch_store.multi_get([f"beat/{rank}" for rank in ranks])
        positions = [_decode(text, Position) for text in texts]
        rank = min(ranks, key=lambda rank: positions[rank].sequence)
        position, previous = positions[rank], self._slowest
        self._slowest = (rank, position)
        self._slowest_seen = self._now()
        is_same_phase = position.phase == self._phase and position.step == self._step
        return not is_same_phase and self._slowest != previous

    def _find_peers(self) -> dict[int, RankProcess]:
        """Returns the other ranks of this host whose processes this rank can see in /proc."""
        # torchrun puts consecutive ranks on a host.
        start = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        stop = start + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        peers = {}
        for rank in range(self._world_size)[max(start, 0) : stop]:
            process = self._read(f"process/{rank}", RankProcess)
            if rank != self._rank and process.machine == self._process.machine:
                peers[rank] = process
        return peers

    def _look_for_debugger(self) -> bool:
        """Returns True if this rank is in a debugger, and keeps the store's count of such ranks."""
        frame = sys._current_frames().get(self._main_thread)
        is_open = _num_debuggers > 0 or processes.in_debugger(frame)
        if is_open != self._is_in_debugger:
            self._is_in_debugger = is_open
            self._watch_store.add("debuggers", 1 if is_open else -1)
        return is_open

    @exit.killed_after(_ANSWER_S + 3 * _REPORT_S)
    def _end(self, alarm: Alarm) -> NoReturn:
        """Answers the alarm, writes or reads the report, and ends this process.

        The rank that raised the alarm writes the report from the answers of all ranks. The other
        ranks wait for the report in the store.
        """
        start = time.monotonic()
        if alarm.why in ("follows", "config") and self._fault is None:
            # Wait a moment: the main thread is likely about to raise the same ConfigError, or the
            # error because of which the other rank failed.
            self._wake.wait(_POLL_S)
        self._publish(f"answer/{self._rank}", self._answer())
        silent = self._answer_for_peers(start)
        if alarm.by == self._rank:
            ranks = range(self._world_size)
            hosts = [str(self._read(f"process/{rank}", RankProcess)) for rank in ranks]
            answers = [self._answer_of(rank, start + _ANSWER_S) for rank in ranks]
            report = write_report(alarm, answers, hosts)
            self._share(report, alarm)
        else:
            if not self._wait_for("report", start + _ANSWER_S + _REPORT_S):
                raise TimeoutError(f"rank {alarm.by}, which was to report it, is gone too")
            report = self._read("report", Report)
        # Kill the ranks that are stopped or stuck in C, which cannot exit by themselves. A rank
        # that was only slow has answered meanwhile, and can.
        for rank, peer in silent.items():
            is_stuck = not self._read(f"answer/{rank}", Answer).responds
            if is_stuck and processes.process_state(peer) != "gone":
                with suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
        self._exit(report, report.text if alarm.by == self._rank else "")

    def _answer(self) -> Answer:
        """Returns this rank's answer to an alarm: where its main thread is, with all stacks.

        The answer's `line` also says what the processes do for which this rank waits (such as
        reward workers).
        """
        threads = sys._current_frames()
        frame = threads.get(self._main_thread)
        lines = [processes.innermost_line(frame)]
        with suppress(Exception):  # what the function describes may change while it runs
            lines.append(_describe_waiting())
        enqueued, flight = processes.flight_recorder()
        return Answer(
            position=self._position(),
            fault=self._fault,
            waits=waits_for(frame),
            line="; ".join(filter(None, lines)),
            stacks=processes.stacks_of(threads, self._main_thread),
            enqueued=enqueued,
            flight=flight,
        )

    def _answer_for_peers(self, start: float) -> dict[int, RankProcess]:
        """Publishes an answer for each other rank of this host that does not answer itself.

        Returns the ranks that do not respond, with their processes. `start` is when this rank saw
        the alarm, on the monotonic clock. A rank that can still answer gets 5 s for it, any other
        half a second.
        """
        silent = {}
        for rank, peer in (self._peers or {}).items():
            key = f"answer/{rank}"
            can_answer = processes.process_state(peer) in ("running", "blocked")
            if not self._wait_for(key, start + (_PEER_ANSWER_S if can_answer else _POLL_S)):
                stacks = processes.stacks_of_peer(peer) if can_answer else ""
                state = processes.process_state(peer)
                # Meanwhile a slow rank may have answered, or another rank in its place.
                if not self._watch_store.check([key]):
                    position = self._read(f"beat/{rank}", Position)
                    self._publish(key, Answer(position, responds=False, stacks=stacks, state=state))
            if not self._read(key, Answer).responds:
                silent[rank] = peer
        return silent

    def _wait_for(self, key: str, deadline: float) -> bool:
        """Waits until `key` is in the store; returns False if it is not by the deadline."""
        while not self._watch_store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _answer_of(self, rank: int, deadline: float) -> Answer:
        """Returns a rank's answer to the alarm, and waits for it until the deadline.

        If none has come by then, it returns an answer with state "unknown" and the rank's last
        position.
        """
        if not self._wait_for(f"answer/{rank}", deadline):
            position = self._read(f"beat/{rank}", Position)
            return Answer(position, responds=False, state="unknown")
        return self._read(f"answer/{rank}", Answer)

    def _share(self, report: Report, alarm: Alarm) -> None:
        """Gives the report to the other ranks, writes it to the run folder, and calls `tell`.

        Errors in the user's config (code 2) are not written to the folder.
        """
        # The details stay out: with many ranks they would be gigabytes in the store.
        self._publish("report", replace(report, details=""))
        if self.folder is not None and report.code != 2:
            head = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}\n{report.text}\n"
            texts = {"failure.txt": head}
            if alarm.why in ("timeout", "silent"):
                texts["hang.txt"] = f"{head}\n{report.details}\n"
            with suppress(OSError):  # even with a full disk, all ranks must exit
                for name, text in texts.items():
                    path = self.folder / name
                    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                        file.write(text)
        if self.tell is not None:
            self.tell(report.headline)

    def _exit(self, report: Report, last_words: str) -> NoReturn:
        """Ends this process with the report's exit code, after printing `last_words`."""
        is_culprit = self._rank == report.culprit
        _write_error_file(report.text if is_culprit else report.headline, is_culprit=is_culprit)
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The store is in this process, and the other ranks still read the report from it.
            time.sleep(1.0)
        exit_process(report.code, last_words)

    def _exit_alone(self, error: Exception) -> NoReturn:
        """Ends this process without a common report, because the thread itself has failed.

        The usual cause is that the store, through which the ranks talk, is gone. `error` is the
        thread's error.
        """
        fault = self._fault
        reason = f"{type(error).__name__}: {error}"
        text = (
            f"rank {self._rank}, {self._position()}: stops without a common report, "
            f"since the ranks cannot talk ({reason})"
        )
        if fault is not None:
            text += f"\n{fault.traceback or fault.headline}"
        if self.tell is not None and self._rank == 0:
            self.tell(text)
        exit_process(2 if fault is not None and fault.kind == "config" else 1, text)


def _decode(text: bytes, kind: type[Record]) -> Record:
    """Returns the record, of the class `kind`, from the JSON that `Doctor._publish` wrote.

    It is decoded by json and not by msgspec, which refuses lone surrogates: error messages may
    contain them.
    """
    return msgspec.convert(json.loads(text), kind)


def _write_error_file(text: str, *, is_culprit: bool) -> None:
    """Writes the file in which torchrun looks for the error of this rank.

    torch's decorator `record` is not used. It would write the file in the main thread while the
    doctor's thread writes it too and ends the process, and torchrun fails if it finds half a file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun takes the error with the earliest time for the root cause: that of the culprit.
        info = {"py_callstack": text, "timestamp": str(int(time.time()) + (not is_culprit))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))


def _raise_interrupt(number: int, _: FrameType | None) -> None:
    """Handles SIGTERM: raises KeyboardInterrupt in the main thread, named after the signal."""
    raise KeyboardInterrupt(signal.Signals(number).name)


# The doctor of this process, None before a session starts and after it has ended.
_doctor: Doctor | None = None
# Returns a text about the processes that this rank waits for (`describe_waiting_with`). By default
# it is "", which is str().
_describe_waiting: Callable[[], str] = str
# The number of debuggers that are open in this rank's reward workers. A debugger in the main thread
# is not counted here: it is found on that thread's stack.
_num_debuggers = 0


def start(store: Store, rank: int, world_size: int, config: WatchdogConfig) -> None:
    """Starts the doctor of this rank, which is in phase "start".

    `store` is the run's store under a prefix that no earlier attempt of the run has used.
    """
    global _doctor
    assert _doctor is None, "the doctor runs already"
    _doctor = Doctor(store, rank, world_size, config)


def stop() -> None:
    """Ends the doctor of this rank. Called at the normal end, when everything is saved."""
    global _doctor
    interrupt.leave_on_second_press(0)
    if _doctor is not None:
        _doctor.stop()
    _doctor = None


def write_reports_to(folder: Path, tell: Callable[[str], None] | None = None) -> None:
    """Makes reports go to failure.txt and hang.txt in `folder` as well, this run's own folder.

    The rank that writes the report calls `tell` with its first line; `tell` must return soon.
    """
    if _doctor is not None:
        _doctor.folder = folder
        _doctor.tell = tell


def limit_s(config: WatchdogConfig, phase: str) -> float:
    """Returns the time limit of a phase in seconds, from the config's section `watchdog`."""
    return float(config.phase_timeouts_s.get(phase, config.timeout_s))


def enter_phase(name: str, step: int) -> None:
    """Tells the doctor that this rank enters a phase, whose time limit starts now."""
    if _doctor is not None:
        _doctor.move(name, step)


def count_collective() -> None:
    """Tells the doctor that this rank enters a collective."""
    if _doctor is not None:
        _doctor.sequence += 1


def count_debugger(is_open: bool) -> None:
    """Tells the doctor that a debugger opens or closes in a reward worker.

    While one is open, no rank has limits.
    """
    global _num_debuggers
    _num_debuggers += 1 if is_open else -1


def describe_waiting_with(describe: Callable[[], str]) -> None:
    """Makes reports include what `describe` returns about the processes that this rank waits for.

    `describe` is called in the doctor's thread.
    """
    global _describe_waiting
    _describe_waiting = describe


def report_failure(error: BaseException) -> None:
    """Makes the doctor, if there is one, report a failure of this rank and end the process.

    If the run is embedded in the caller's process (a script, a notebook), that process goes on and
    gets the report.
    """
    if _doctor is not None:
        _doctor.fail(error)


@contextmanager
def exit_with_outcome() -> Iterator[None]:
    """Ends this process when the block ends, with exit code 0.

    If the block raises, all ranks end with one report: with code 2 for a ConfigError, else 1.
    """
    hold_standard_streams()
    try:
        yield
        exit_process(0)
    except BaseException as error:
        interrupt.leave_on_second_press(1)
        report_failure(error)
        # There is no doctor: the session has not started yet, or it has ended.
        text = "".join(traceback.format_exception(error)).rstrip()
        _write_error_file(text, is_culprit=True)
        if isinstance(error, ConfigError):
            with suppress(SystemExit):
                refuse(error)
            exit_process(2)
        exit_process(1, "" if isinstance(error, KeyboardInterrupt) else text)
