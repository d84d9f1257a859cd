"""The hang doctor: who failed first, or who sleeps while the others wait; then all ranks end within seconds. Twice a
second a thread of each rank looks after its own phase, a neighbour's process and the run's store. The first rank that
finds something raises the alarm; all answer where they are, it writes one report, and all leave with its exit code. No
torch is imported before a session starts: a config error must not wait for it."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.schema import WatchdogConfig
from grpo_spmd.distributed import ending, interrupt, processes
from grpo_spmd.distributed.doctor_report import Alarm, Answer, Fault, Place, Report, answer_from, fault_of, write_report
from grpo_spmd.distributed.ending import leave
from grpo_spmd.distributed.processes import RankProcess
from grpo_spmd.files import hold_standard_streams

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.5
_PEERS_ANSWER_S = 2.0  # then a rank of this host is looked at from outside; on a busy machine up to 3 times so much
_ANSWER_S, _REPORT_S = 3 * _PEERS_ANSWER_S + 5.0, 8.0  # the most: an answer that is there is taken at once
_BEHIND_S = 20.0  # between two looks whether the rank that is furthest behind still beats, or half the limit
_SILENT_S = 60.0  # a rank on another host that says nothing for so long is lost; on this host its process is looked at
_doctor: Doctor | None = None
_waits_at: Callable[[], str] = str
_num_debuggers = 0  # of reward workers; one on the main thread is seen on its stack


def start(store: Store, rank: int, world_size: int, config: WatchdogConfig) -> None:
    """Watch this rank from here on, in phase "start". No earlier attempt of the run has used the prefix of `store`."""
    global _doctor
    assert _doctor is None, "the doctor is there already"
    _doctor = Doctor(store, rank, world_size, config)


def stop() -> None:
    """Watch no more; for the orderly end, when all is saved."""
    global _doctor
    interrupt.is_over(0)
    if _doctor is not None:
        _doctor.stop()
    _doctor = None


def write_reports_to(folder: Path, tell: Callable[[str], None] | None = None) -> None:
    """From here on reports go to failure.txt and hang.txt in `folder` too, which must be this run's own, and one rank
    calls `tell`, which must not take long, with the first line."""
    if _doctor is not None:
        _doctor.folder, _doctor.tell = folder, tell


def limit_s(config: WatchdogConfig, phase: str) -> float:
    return float(config.phase_timeouts_s.get(phase, config.timeout_s))


def enter_phase(name: str, step: int) -> None:
    if _doctor is not None:
        _doctor.move(name, step)


def count_collective() -> None:
    if _doctor is not None:
        _doctor.sequence += 1


def note_debugger(is_open: bool) -> None:
    """A debugger opens in a reward worker, or closes: no rank has limits meanwhile."""
    global _num_debuggers
    _num_debuggers += 1 if is_open else -1


def note_waiting(where: Callable[[], str]) -> None:
    """From here on a report has what `where` says of the processes that this rank waits for; any thread asks it."""
    global _waits_at
    _waits_at = where


@contextmanager
def exit_with_outcome() -> Iterator[None]:
    """End this process with its block, code 0. A failure ends all ranks with one report: ConfigError 2, others 1."""
    hold_standard_streams()
    try:
        yield
        leave(0)
    except BaseException as error:
        interrupt.is_over(1)
        if _doctor is not None:
            _doctor.fail(error)
        elif isinstance(error, ConfigError):  # seen only now: it took the tokenizer or the model to see it
            with suppress(SystemExit):
                refuse(error)
            leave(2)
        leave(1, "" if isinstance(error, KeyboardInterrupt) else "".join(traceback.format_exception(error)).rstrip())


def report(error: BaseException) -> None:
    """Have the doctor, if there is one, report a failure of this rank and end the process, or tell its host."""
    if _doctor is not None:
        _doctor.fail(error)


class Doctor:
    """Watches one rank from a thread of its own, over a connection of its own to the run's store."""

    def __init__(self, store: Store, rank: int, world_size: int, config: WatchdogConfig) -> None:
        self._rank, self._world_size, self._config = rank, world_size, config
        # Two connections, since a request locks its own: `_store` is of the thread that calls move().
        self._store = store
        self._watch_store: Store = store.clone()  # type: ignore[attr-defined]
        self.folder: Path | None = None
        self.tell: Callable[[str], None] | None = None
        self.sequence = self._num_beats = 0
        self._phase, self._step, self._entered = "start", 0, time.monotonic()
        self._paused_s = 0.0  # this process was stopped, or in a debugger: that time counts for no limit
        self._fault: Fault | None = None
        self._wake = threading.Event()
        self._is_stopped = self._says_debugger = False
        self._behind, self._looked_behind = (-1, 0), -math.inf  # who was furthest behind, with how many beats; when
        self._main_thread = threading.get_ident()
        self._heard: tuple[bytes, float] = (b"", self._now())
        self._stacks_fd = os.memfd_create("grpo_spmd_stacks")  # for processes.stacks_of_peer, on any rank of this host
        faulthandler.register(signal.SIGUSR2, self._stacks_fd, all_threads=True)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # torchrun sends it to the survivors of a failure; they would be gone before they can say which rank failed.
            signal.signal(signal.SIGTERM, _interrupt)
        self._process = processes.own_process(self._stacks_fd)
        self._store.set(f"process/{rank}", json.dumps(asdict(self._process)))
        self.move("start", 0)
        self._beat(self._store)
        self._peers: dict[int, RankProcess] | None = None  # other ranks of this host; the thread fills it
        self._thread = threading.Thread(target=self._watch, name="doctor", daemon=True)
        self._thread.start()

    def move(self, phase: str, step: int) -> None:
        self._phase, self._step, self._entered, self._looked_behind = phase, step, self._now(), -math.inf
        self.sequence += 1
        with suppress(RuntimeError):  # the store is gone; the thread says so
            self._store.set(f"at/{self._rank}", json.dumps(asdict(self._place())))

    def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        os.close(self._stacks_fd)
        if signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fail(self, error: BaseException) -> NoReturn:
        """Wait for the doctor to end this process; where even it fails, end it here."""
        self._fault = fault_of(error, self._rank)
        self._wake.set()
        until = time.monotonic() + _ANSWER_S + 2 * _REPORT_S
        while time.monotonic() < until and self._thread.is_alive():
            with suppress(KeyboardInterrupt):  # Ctrl-C again, or torchrun's SIGTERM; the thread is about to end us
                time.sleep(0.1)  # not join(), after which an interrupted Python 3.11 takes the thread for ended
        leave(1, f"rank {self._rank}: {self._fault.headline}\n{self._fault.traceback}")

    def _place(self) -> Place:
        return Place(self._phase, self._step, self.sequence)

    def _now(self) -> float:
        return time.monotonic() - self._paused_s

    def _watch(self) -> None:
        try:
            self._watch_store.set_timeout(timedelta(seconds=_SILENT_S))
            last = time.monotonic()
            while not self._is_stopped:
                now = time.monotonic()
                self._paused_s += now - last if self._in_debugger() else max(0.0, now - last - 4 * _POLL_S)
                last = now
                self._beat(self._watch_store)
                if self._watch_store.add("debuggers", 0) > 0:  # the others wait, however long it takes
                    self._entered = self._now()
                alarm = Alarm(**self._read("alarm")) if self._watch_store.check(["alarm"]) else self._own_alarm()
                if alarm is not None and not self._is_stopped:
                    first = self._watch_store.compare_set("alarm", "", json.dumps(asdict(alarm)))
                    self._end(Alarm(**json.loads(first)))
                if self._fault is None:
                    self._wake.wait(_POLL_S)
        except Exception as error:  # the store is gone, with rank 0's host; or a mistake of ours: it hides no failure
            self._wake.wait(1.0)
            if not self._is_stopped:
                self._leave_alone(error)

    def _read(self, key: str) -> Any:
        return json.loads(self._watch_store.get(key))  # waits for it

    def _beat(self, store: Store) -> None:
        self._num_beats += 1
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._place()) | {"num_beats": self._num_beats}))

    def _own_alarm(self) -> Alarm | None:
        if self._fault is not None:
            return Alarm(self._fault.kind, self._rank, self._rank)
        # The first look at the others comes so long before the limit that the second can decide at it.
        limit, waited = limit_s(self._config, self._phase), self._now() - self._entered
        between = min(_BEHIND_S, max(limit / 2, 6 * _POLL_S))
        is_time = waited > limit - between and self._now() - self._looked_behind > between
        if is_time and not self._others_are_busy() and waited > limit:
            return Alarm("timeout", self._rank, self._rank, limit)
        if self._peers is None:
            self._peers = self._find_peers()
        for rank in processes.next_of(self._rank, self._peers):
            if processes.process_state(self._peers[rank]) == "gone":
                self._wake.wait(1.0)  # at the orderly end it may have left before us
                is_known = self._is_stopped or self._watch_store.check(["alarm"])
                return None if is_known else Alarm("dead", self._rank, rank)
        for rank in processes.next_of(self._rank, range(self._world_size)):
            beat = self._watch_store.get(f"beat/{rank}")
            if beat != self._heard[0] or rank in self._peers:
                self._heard = beat, self._now()
            elif self._now() - self._heard[1] > _SILENT_S:
                return Alarm("silent", self._rank, rank, _SILENT_S)
        return None

    def _others_are_busy(self) -> bool:
        """Whether this rank only waits for one in an earlier phase that still beats: its thread minds its own limit."""
        keys = [f"{key}/{rank}" for key in ("at", "beat") for rank in range(self._world_size)]
        said = [json.loads(text) for text in self._watch_store.multi_get(keys)]
        ats, beats = said[: self._world_size], said[self._world_size :]
        latest = [_later(at, beat) for at, beat in zip(ats, beats, strict=True)]
        rank = min(range(self._world_size), key=lambda rank: latest[rank].sequence)
        before, self._behind = self._behind, (rank, beats[rank]["num_beats"])
        self._looked_behind = self._now()
        return (latest[rank].phase, latest[rank].step) != (self._phase, self._step) and self._behind != before

    def _find_peers(self) -> dict[int, RankProcess]:
        """The other ranks of this host whose processes can be seen from here."""
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        ranks = range(max(first, 0), min(first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self._world_size))
        peers = {rank: RankProcess(**self._read(f"process/{rank}")) for rank in ranks if rank != self._rank}
        return {rank: peer for rank, peer in peers.items() if peer.machine == self._process.machine}

    def _in_debugger(self) -> bool:
        """Here; all other ranks are told, for they wait for this one."""
        found = _num_debuggers > 0 or processes.in_debugger(sys._current_frames().get(self._main_thread))
        if found != self._says_debugger:
            self._says_debugger = found
            self._watch_store.add("debuggers", 1 if found else -1)
        return found

    @ending.killed_after(_ANSWER_S + 3 * _REPORT_S)
    def _end(self, alarm: Alarm) -> NoReturn:
        seen = time.monotonic()
        if alarm.why in ("follows", "config") and self._fault is None:
            self._wake.wait(_POLL_S)  # our own main thread is about to raise the same, or what it follows from
        self._say(self._rank, self._answer())
        silent = self._examine_peers(seen)
        if alarm.by == self._rank:
            hosts = [str(RankProcess(**self._read(f"process/{rank}"))) for rank in range(self._world_size)]
            answers = [self._answer_of(rank, seen + _ANSWER_S) for rank in range(self._world_size)]
            report = write_report(alarm, answers, hosts)
            self._publish(report, alarm)
        else:
            if not self._waited_for("report", seen + _ANSWER_S + _REPORT_S):
                raise TimeoutError(f"rank {alarm.by}, which was to report it, is gone too")
            report = Report(**self._read("report"))
        for rank, peer in silent.items():  # one that is stopped or stuck in C cannot leave by itself; a slow one can
            if not self._read(f"answer/{rank}")["answers"] and processes.process_state(peer) != "gone":
                with suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
        self._leave(report, report.text if alarm.by == self._rank else "")

    def _say(self, rank: int, answer: Answer) -> None:
        self._watch_store.set(f"answer/{rank}", json.dumps(asdict(answer)))

    def _answer(self) -> Answer:
        threads = sys._current_frames()
        main, stacks = threads.get(self._main_thread), processes.stacks_of(threads, self._main_thread)
        waits, line = processes.waits_for(main), processes.innermost_line(main)
        with suppress(Exception):  # it changes while we look
            line = "; ".join(filter(None, [line, _waits_at()]))
        return Answer(self._place(), True, self._fault, waits, line, stacks, *processes.flight_recorder())

    def _examine_peers(self, seen: float) -> dict[int, RankProcess]:
        """Answer for the ranks of this host that do not; which these are."""
        silent, busy = {}, min(3.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        for rank, peer in (self._peers or {}).items():
            key, cannot = f"answer/{rank}", processes.process_state(peer) in ("gone", "stopped")
            if not self._waited_for(key, seen + _PEERS_ANSWER_S * (1.0 if cannot else busy)):
                state = processes.process_state(peer)
                stacks = processes.stacks_of_peer(peer) if state not in ("gone", "stopped") else ""
                if not self._watch_store.check([key]):  # else it was slow, or another rank has looked
                    self._say(rank, Answer(self._last_place(rank), False, stacks=stacks, state=state))
            if not self._read(key)["answers"]:
                silent[rank] = peer
        return silent

    def _last_place(self, rank: int) -> Place:
        return _later(self._read(f"at/{rank}"), self._read(f"beat/{rank}"))

    def _waited_for(self, key: str, until: float) -> bool:
        while not self._watch_store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _answer_of(self, rank: int, until: float) -> Answer:
        if self._waited_for(f"answer/{rank}", until):
            return answer_from(self._read(f"answer/{rank}"))
        return Answer(self._last_place(rank), False, state="unknown")

    def _publish(self, report: Report, alarm: Alarm) -> None:
        self._watch_store.set("report", json.dumps(asdict(report) | {"details": ""}))  # details of all: gigabytes
        if self.folder is not None and report.code != 2:
            head = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}\n{report.text}\n"
            texts = {"failure.txt": head}
            if alarm.why in ("timeout", "silent"):
                texts["hang.txt"] = f"{head}\n{report.details}\n"
            with suppress(OSError):  # a full disk must not keep the others from leaving
                for name, text in texts.items():
                    with (self.folder / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                        file.write(text)
        if self.tell is not None:
            self.tell(report.headline)

    def _leave(self, report: Report, last_words: str) -> NoReturn:
        """Via the error file for torchrun, to which the earliest one, the culprit's, is the root cause."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            is_other = self._rank != report.culprit
            text = report.headline if is_other else report.text
            info = {"py_callstack": text, "timestamp": str(int(time.time()) + is_other)}
            with suppress(OSError):
                Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(1.0)  # the store is in this process: the others read the report from it
        leave(report.code, last_words)

    def _leave_alone(self, error: Exception) -> NoReturn:
        why, fault = f"{type(error).__name__}: {error}", self._fault
        text = f"rank {self._rank}, {self._place()}: stops without a common report, since the ranks cannot talk ({why})"
        text += f"\n{fault.traceback or fault.headline}" if fault is not None else ""
        if self.tell is not None and self._rank == 0:
            self.tell(text)
        leave(2 if fault is not None and fault.kind == "config" else 1, text)


def _later(at: dict[str, Any], beat: dict[str, Any]) -> Place:
    """Of the places that a rank published, as it entered the phase and with its last beat."""
    last = max(at, beat, key=lambda place: place["sequence"])
    return Place(last["phase"], last["step"], last["sequence"])


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
