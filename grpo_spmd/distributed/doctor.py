"""The hang doctor: who failed first, or who sleeps while the others wait; and the end of all ranks within seconds of
it.

A thread of each rank looks twice a second after its own phase, the process of a neighbour and the run's store. The
first rank that finds something raises the alarm; all answer with where they are, that one writes one report, and every
rank leaves with its exit code. Imports no torch before a session starts, as a config error must not wait for it.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.schema import WatchdogConfig
from grpo_spmd.distributed.doctor_report import MAX_TEXT, Alarm, Answer, Fault, Place, Report, answer_from, write_report
from grpo_spmd.distributed.errors import Rank0Error
from grpo_spmd.distributed.processes import (
    entries,
    flight_recorder,
    format_stack,
    frames,
    innermost_line,
    machine_id,
    next_of,
    process_facts,
    process_state,
    waits_for,
)

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.5
_PEERS_ANSWER_S = 2.0  # a rank of this host that has not answered by then is looked at from outside
_ANSWER_S = 3.0
_REPORT_S = 8.0
_BEHIND_S = 20.0  # how often, once over its limit, a rank looks whether the one that is furthest behind still beats
_SILENT_S = 60.0  # a rank on another host that says nothing for so long is lost; on this host its process is looked at
_DEBUGGERS = ("pdb", "bdb", "IPython.terminal", "IPython.core.debugger", "pudb", "pydevd", "_pydevd_bundle", "debugpy")
_LOST_PEER = re.compile(r"onnection|gloo|NCCL|[Tt]imed out|Broken pipe|reset by peer")
_doctor: Doctor | None = None
_num_debuggers = 0  # of reward workers; one on the main thread is seen on its stack


def start(store: Store, rank: int, world_size: int, config: WatchdogConfig) -> None:
    """Watch this rank from here on, in phase "start". `store`: the run's, with a prefix that no earlier attempt of the
    run has used."""
    global _doctor
    assert _doctor is None, "the doctor is there already"
    _doctor = Doctor(store, rank, world_size, config)


def stop() -> None:
    """Watch no more; for the orderly end."""
    global _doctor
    if _doctor is not None:
        _doctor.stop()
    _doctor = None


def write_reports_to(folder: Path) -> None:
    """Reports go to `failure.txt` and `hang.txt` in `folder` from here on, besides the terminal: only a folder that is
    this run's own."""
    if _doctor is not None:
        _doctor.folder = folder


def limit_s(config: WatchdogConfig, phase: str) -> float:
    return float(config.phase_timeouts_s.get(phase, config.timeout_s))


def enter_phase(name: str, step: int) -> None:
    """Say that this rank is in phase `name` of `step`; its time limit begins."""
    if _doctor is not None:
        _doctor.move(name, step)


def leave_phase(name: str, step: int) -> None:
    """What comes between phases hangs too: it has a limit of its own."""
    if _doctor is not None:
        _doctor.move(f"after {name}", step)


def count_collective() -> None:
    """Say that this rank enters a collective which all ranks enter."""
    if _doctor is not None:
        _doctor.sequence += 1


def debugger_opens() -> None:
    """Somebody looks into a reward worker: no limits until `debugger_closes`, on any rank. (One in this process is
    noticed by itself.)"""
    global _num_debuggers
    _num_debuggers += 1


def debugger_closes() -> None:
    global _num_debuggers
    _num_debuggers -= 1


@contextmanager
def exit_with_outcome() -> Iterator[None]:
    """Ends this process when the block ends, with exit code 0, or 2 for a ConfigError, or 1 for anything else.

    A failure ends all ranks, with one report that has the traceback of the rank that failed first.
    """
    try:
        yield
        _flush()
        # Not through the interpreter's own exit: it now and then aborts in threads that gloo left ("terminate called
        # without an active exception"), and torchrun would report a run that had come to its end as failed.
        os._exit(0)
    except BaseException as error:
        if _doctor is not None:
            _doctor.fail(error)
        elif isinstance(error, ConfigError):  # seen only now: it took the tokenizer or the model to see it
            with suppress(SystemExit):
                refuse(error)
            _flush()
            os._exit(2)
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error)
        _flush()
        # Not sys.exit: finalizers of vLLM and of the process group wait for peers that are blocked in a collective with
        # us.
        os._exit(1)


class Doctor:
    """Watches one rank from a thread of its own, over a connection of its own to the run's store."""

    def __init__(self, store: Store, rank: int, world_size: int, config: WatchdogConfig) -> None:
        self._rank, self._world_size, self._config = rank, world_size, config
        self._store = store  # of the thread that calls move()
        self._watch_store: Store = store.clone()  # type: ignore[attr-defined]  # its lock is held during a request: a thread must not wait for the other's
        self.folder: Path | None = None
        self.sequence = 0
        self._phase, self._step, self._entered = "start", 0, time.monotonic()
        self._paused_s = 0.0  # this process was stopped, or in a debugger: that time counts for no limit
        self._fault: Fault | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._says_debugger = False
        # the rank furthest behind, its beats, and when it was looked at
        self._behind: tuple[tuple[int, int], float] = ((-1, 0), -math.inf)
        self._main_thread = threading.get_ident()
        self._num_beats = 0
        self._heard: tuple[bytes, float] = (b"", self._now())
        # Any rank of this host can have the stacks of one whose Python does not run: the handler of faulthandler is
        # plain C.
        self._stacks_fd = os.memfd_create("grpo_spmd_stacks")
        faulthandler.register(signal.SIGUSR2, self._stacks_fd, all_threads=True)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # torchrun sends it to the survivors of a failure; they would be gone before they can say which rank failed.
            signal.signal(signal.SIGTERM, _interrupt)
        facts = {
            "machine": machine_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start": process_facts(os.getpid())[1],
        }
        self._store.set(f"facts/{rank}", json.dumps(facts | {"stacks_fd": self._stacks_fd}))
        self.move("start", 0)
        self._beat(self._store)
        self._peers: dict[int, dict[str, Any]] | None = None  # other ranks of this host, looked up by the thread
        self._thread = threading.Thread(target=self._watch, name="doctor", daemon=True)
        self._thread.start()

    def move(self, phase: str, step: int) -> None:
        self._phase, self._step, self._entered = phase, step, self._now()
        self.sequence += 1
        with suppress(RuntimeError):  # the store is gone; the thread says so
            self._store.set(f"at/{self._rank}", json.dumps(asdict(self._place())))

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        os.close(self._stacks_fd)
        if signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fail(self, error: BaseException) -> None:
        """Does not return, but where even the doctor fails."""
        self._fault = _fault_of(error, self._rank)
        self._wake.set()
        until = time.monotonic() + _ANSWER_S + 2 * _REPORT_S
        while time.monotonic() < until:
            with suppress(KeyboardInterrupt):  # Ctrl-C again, or torchrun's SIGTERM; the thread is about to end us
                time.sleep(0.1)  # not join(), after which an interrupted Python 3.11 takes the thread for ended
        print(f"rank {self._rank}: {self._fault.headline}\n{self._fault.traceback}", file=sys.stderr)

    def _place(self) -> Place:
        return Place(self._phase, self._step, self.sequence)

    def _now(self) -> float:
        return time.monotonic() - self._paused_s

    # ---- the thread

    def _watch(self) -> None:
        try:
            self._watch_store.set_timeout(_seconds(_SILENT_S))
            last = time.monotonic()
            while not self._stopped:
                now = time.monotonic()
                paused = now - last if self._in_debugger() else max(0.0, now - last - 4 * _POLL_S)
                self._paused_s += paused
                last = now
                self._beat(self._watch_store)
                if self._watch_store.add("debuggers", 0) > 0:  # the others wait, however long it takes
                    self._entered = self._now()
                alarm = self._heard_alarm() or self._own_alarm()
                if alarm is not None and not self._stopped:
                    alarm = self._post(alarm)
                    self._end(alarm)
                if self._fault is None:
                    self._wake.wait(_POLL_S)
        # the store is gone, and with it the host of rank 0; or a mistake in here, which must not hide a failure
        except Exception as error:
            self._wake.wait(1.0)
            if not self._stopped:
                self._leave_alone(error)

    def _beat(self, store: Store) -> None:
        self._num_beats += 1
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._place()) | {"num_beats": self._num_beats}))

    def _heard_alarm(self) -> Alarm | None:
        return Alarm(**json.loads(self._watch_store.get("alarm"))) if self._watch_store.check(["alarm"]) else None

    def _own_alarm(self) -> Alarm | None:
        if self._fault is not None:
            return Alarm(self._fault.kind, self._rank, self._rank)
        limit = limit_s(self._config, self._phase)
        if limit < self._now() - self._entered and not self._others_are_busy():
            return Alarm("timeout", self._rank, self._rank, limit)
        if self._peers is None:
            self._peers = self._find_peers()
        for rank in next_of(self._rank, self._peers):
            if process_state(self._peers[rank]) == "gone":
                self._wake.wait(1.0)  # at the orderly end it may have left before us
                return None if self._stopped or self._watch_store.check(["alarm"]) else Alarm("dead", self._rank, rank)
        for rank in next_of(self._rank, range(self._world_size)):
            beat = self._watch_store.get(f"beat/{rank}")
            if beat != self._heard[0] or rank in self._peers:
                self._heard = beat, self._now()
            elif self._now() - self._heard[1] > _SILENT_S:
                return Alarm("silent", self._rank, rank, _SILENT_S)
        return None

    def _others_are_busy(self) -> bool:
        """Whether this rank only waits for one that is in an earlier phase, which has a limit of its own and a thread
        that minds it.

        Such a thread beats; where it does not, the process is stopped, stuck or lost.
        """
        last_beat, looked = self._behind
        if self._now() - looked < _BEHIND_S:
            return True
        said = self._watch_store.multi_get(
            [f"{key}/{rank}" for key in ("at", "beat") for rank in range(self._world_size)]
        )
        ats, beats = (
            [json.loads(text) for text in part] for part in (said[: self._world_size], said[self._world_size :])
        )
        latest = [max(at, beat, key=lambda place: place["sequence"]) for at, beat in zip(ats, beats, strict=True)]
        rank = min(range(self._world_size), key=lambda rank: latest[rank]["sequence"])
        behind = rank, beats[rank]["num_beats"]
        self._behind = behind, self._now()
        return (latest[rank]["phase"], latest[rank]["step"]) != (self._phase, self._step) and behind != last_beat

    def _find_peers(self) -> dict[int, dict[str, Any]]:
        """The other ranks of this host whose processes can be seen from here."""
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        ranks = range(max(first, 0), min(first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self._world_size))
        facts = {rank: json.loads(self._watch_store.get(f"facts/{rank}")) for rank in ranks if rank != self._rank}
        return {rank: of_rank for rank, of_rank in facts.items() if of_rank["machine"] == machine_id()}

    def _in_debugger(self) -> bool:
        """Here; all other ranks are told, for they wait for this one."""
        frame = sys._current_frames().get(self._main_thread)
        found = _num_debuggers > 0 or any(f.f_globals.get("__name__", "").startswith(_DEBUGGERS) for f in frames(frame))
        if found != self._says_debugger:
            self._says_debugger = found
            self._watch_store.add("debuggers", 1 if found else -1)
        return found

    def _post(self, alarm: Alarm) -> Alarm:
        """The alarm that was first."""
        return Alarm(**json.loads(self._watch_store.compare_set("alarm", "", json.dumps(asdict(alarm)))))

    # ---- after an alarm

    def _end(self, alarm: Alarm) -> None:
        seen = time.monotonic()
        if alarm.why in ("follows", "config") and self._fault is None:
            self._wake.wait(_POLL_S)  # our own main thread is about to raise the same, or what it follows from
        self._say(self._rank, self._answer())
        silent = self._examine_peers(seen + _PEERS_ANSWER_S)
        if alarm.by == self._rank:
            report = write_report(alarm, self._collect(seen + _ANSWER_S), self._facts())
            self._publish(report, alarm)
        else:
            if not self._waited_for("report", seen + _ANSWER_S + _REPORT_S):
                raise TimeoutError(f"rank {alarm.by}, which was to report it, is gone too")
            report = Report(**json.loads(self._watch_store.get("report")))
        for rank in silent:  # a process that is stopped or stuck in C cannot leave by itself; one that was slow can
            has_answered = json.loads(self._watch_store.get(f"answer/{rank}"))["answers"]
            facts = (self._peers or {})[rank]
            if not has_answered and process_state(facts) != "gone":
                with suppress(OSError):
                    os.kill(facts["pid"], signal.SIGKILL)
        self._leave(report)

    def _say(self, rank: int, answer: Answer) -> None:
        self._watch_store.set(f"answer/{rank}", json.dumps(asdict(answer)))

    def _answer(self) -> Answer:
        frames = sys._current_frames()
        main = frames.get(self._main_thread)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = [f"main thread:\n{format_stack(main)}"]
        me = threading.get_ident()
        parts += [
            f"thread {names.get(i, i)}:\n{format_stack(f)}"
            for i, f in frames.items()
            if i not in (self._main_thread, me)
        ]
        enqueued, flight = flight_recorder()
        line = innermost_line(main)
        return Answer(
            self._place(), True, self._fault, waits_for(main), line, "\n".join(parts)[:MAX_TEXT], enqueued, flight
        )

    def _examine_peers(self, until: float) -> list[int]:
        """Answer for the ranks of this host that do not; which these are."""
        silent = []
        for rank, facts in (self._peers or {}).items():
            if self._waited_for(f"answer/{rank}", until):
                continue
            state, stacks = process_state(facts), ""
            if state not in ("gone", "stopped"):
                with suppress(OSError):
                    os.kill(facts["pid"], signal.SIGUSR2)
                    time.sleep(0.2)
                    stacks = Path(f"/proc/{facts['pid']}/fd/{facts['stacks_fd']}").read_text(errors="replace")[
                        -MAX_TEXT:
                    ]
            self._say(rank, Answer(self._last_place(rank), False, stacks=stacks, state=state))
            silent.append(rank)
        return silent

    def _last_place(self, rank: int) -> Place:
        """As published: when it entered its phase, or with its last beat."""
        published = [json.loads(self._watch_store.get(f"{key}/{rank}")) for key in ("at", "beat")]
        return max((Place(p["phase"], p["step"], p["sequence"]) for p in published), key=lambda place: place.sequence)

    def _waited_for(self, key: str, until: float) -> bool:
        while not self._watch_store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _collect(self, until: float) -> list[Answer]:
        answers = []
        for rank in range(self._world_size):
            if self._waited_for(f"answer/{rank}", until):
                answers.append(answer_from(json.loads(self._watch_store.get(f"answer/{rank}"))))
            else:
                answers.append(Answer(self._last_place(rank), False, state="unknown"))
        return answers

    def _facts(self) -> list[str]:
        facts = [json.loads(self._watch_store.get(f"facts/{rank}")) for rank in range(self._world_size)]
        return [f"{of_rank['host']}, process {of_rank['pid']}" for of_rank in facts]

    def _publish(self, report: Report, alarm: Alarm) -> None:
        print(report.text, file=sys.stderr, flush=True)
        if self.folder is not None and report.code != 2:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            with suppress(OSError):  # a full disk must not keep the others from leaving
                _append(self.folder / "failure.txt", f"=== {when}\n{report.text}\n")
                if alarm.why in ("timeout", "silent"):
                    _append(self.folder / "hang.txt", f"=== {when}\n{report.text}\n\n{report.details}\n")
        # all stacks times all ranks would be gigabytes
        self._watch_store.set("report", json.dumps(asdict(report) | {"details": ""}))

    def _leave(self, report: Report) -> None:
        """With the report in the culprit's error file for torchrun, which takes the earliest for the root cause: that
        is the culprit's."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            is_other = self._rank != report.culprit
            text = report.headline if is_other else report.text
            info = {"py_callstack": text, "timestamp": str(int(time.time()) + is_other)}
            with suppress(OSError):
                Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(1.0)  # the store is in this process: the others read the report from it
        _flush()
        os._exit(report.code)

    def _leave_alone(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        say = f"rank {self._rank}, {self._place()}: stops without a common report, since the ranks cannot talk ({why})"
        if self._fault is not None:
            say += f"\n{self._fault.traceback or self._fault.headline}"
        print(say, file=sys.stderr, flush=True)
        _flush()
        os._exit(2 if self._fault is not None and self._fault.kind == "config" else 1)


def _fault_of(error: BaseException, rank: int) -> Fault:
    if isinstance(error, ConfigError):
        return Fault("config", str(error))
    if isinstance(error, KeyboardInterrupt):
        return Fault("stopped", f"stopped by {error.args[0] if error.args else 'Ctrl-C'}")
    shown = error.__cause__ if isinstance(error, Rank0Error) and error.__cause__ else error
    text = "".join(traceback.format_exception(shown))
    text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    follows = (isinstance(error, Rank0Error) and rank != 0) or _lost_a_peer(error)
    first_line = str(shown).partition("\n")[0]
    return Fault("follows" if follows else "raise", f"{type(shown).__name__}: {first_line}", text)


def _lost_a_peer(error: BaseException) -> bool:
    """A collective failed because another rank is no longer there: the text is torch's, raised from within a
    collective."""
    if not isinstance(error, RuntimeError) or not _LOST_PEER.search(str(error)):
        return False
    frames = [entry.tb_frame for entry in entries(error.__traceback__)]
    return bool(frames) and waits_for(frames[-1]) == "collective"


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _seconds(number: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=number)


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def _flush() -> None:
    with suppress(Exception):  # a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
