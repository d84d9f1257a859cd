"""The hang doctor: who failed first, or who sleeps while the others wait; then all ranks end within seconds. Twice a
second a thread of each rank looks after its own phase, a neighbour's process and the run's store. The first rank that
finds something raises the alarm; all answer where they are, it writes one report, and all leave with its exit code. No
torch is imported before a session starts: a config error must not wait for it."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.schema import WatchdogConfig
from grpo_spmd.distributed import exit, interrupt, processes
from grpo_spmd.distributed.exit import Rank0Error, exit_process
from grpo_spmd.distributed.processes import MAX_TEXT, RankProcess, waits_for
from grpo_spmd.files import hold_standard_streams

if TYPE_CHECKING:
    from torch.distributed import Store


_POLL_S = 0.5
_PEERS_ANSWER_S = 2.0  # then a rank of this host is looked at from outside; on a busy machine up to 3 times so much
_ANSWER_S, _REPORT_S = (
    3 * _PEERS_ANSWER_S + 5.0,
    8.0,
)  # the most: an answer that is there is taken at once
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
    interrupt.leave_on_second_press(0)
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


def count_debugger(is_open: bool) -> None:
    """A debugger opens in a reward worker, or closes: no rank has limits meanwhile."""
    global _num_debuggers
    _num_debuggers += 1 if is_open else -1


def describe_waiting_with(where: Callable[[], str]) -> None:
    """From here on a report has what `where` says of the processes that this rank waits for; any thread asks it."""
    global _waits_at
    _waits_at = where


@contextmanager
def exit_with_outcome() -> Iterator[None]:
    """End this process with its block, code 0. A failure ends all ranks with one report: ConfigError 2, others 1."""
    hold_standard_streams()
    try:
        yield
        exit_process(0)
    except BaseException as error:
        interrupt.leave_on_second_press(1)
        if _doctor is not None:
            _doctor.fail(error)
        elif isinstance(
            error, ConfigError
        ):  # seen only now: it took the tokenizer or the model to see it
            with suppress(SystemExit):
                refuse(error)
            exit_process(2)
        exit_process(
            1,
            ""
            if isinstance(error, KeyboardInterrupt)
            else "".join(traceback.format_exception(error)).rstrip(),
        )


def report_failure(error: BaseException) -> None:
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
        self._paused_s = (
            0.0  # this process was stopped, or in a debugger: that time counts for no limit
        )
        self._fault: Fault | None = None
        self._wake = threading.Event()
        self._is_stopped = self._says_debugger = False
        self._behind, self._looked_behind = (
            (-1, 0),
            -math.inf,
        )  # who was furthest behind, with how many beats; when
        self._main_thread = threading.get_ident()
        self._heard: tuple[bytes, float] = (b"", self._now())
        self._stacks_fd = os.memfd_create(
            "grpo_spmd_stacks"
        )  # for processes.stacks_of_peer, on any rank of this host
        faulthandler.register(signal.SIGUSR2, self._stacks_fd, all_threads=True)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # torchrun sends it to the survivors of a failure; they would be gone before they can say which rank failed.
            signal.signal(signal.SIGTERM, _interrupt)
        self._process = processes.own_process(self._stacks_fd)
        self._store.set(f"process/{rank}", json.dumps(asdict(self._process)))
        self.move("start", 0)
        self._beat(self._store)
        self._peers: dict[int, RankProcess] | None = (
            None  # other ranks of this host; the thread fills it
        )
        self._thread = threading.Thread(target=self._watch, name="doctor", daemon=True)
        self._thread.start()

    def move(self, phase: str, step: int) -> None:
        self._phase, self._step, self._entered, self._looked_behind = (
            phase,
            step,
            self._now(),
            -math.inf,
        )
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
            with suppress(
                KeyboardInterrupt
            ):  # Ctrl-C again, or torchrun's SIGTERM; the thread is about to end us
                time.sleep(
                    0.1
                )  # not join(), after which an interrupted Python 3.11 takes the thread for ended
        exit_process(1, f"rank {self._rank}: {self._fault.headline}\n{self._fault.traceback}")

    def _place(self) -> Position:
        return Position(self._phase, self._step, self.sequence)

    def _now(self) -> float:
        return time.monotonic() - self._paused_s

    def _watch(self) -> None:
        try:
            self._watch_store.set_timeout(timedelta(seconds=_SILENT_S))
            last = time.monotonic()
            while not self._is_stopped:
                now = time.monotonic()
                self._paused_s += (
                    now - last if self._in_debugger() else max(0.0, now - last - 4 * _POLL_S)
                )
                last = now
                self._beat(self._watch_store)
                if (
                    self._watch_store.add("debuggers", 0) > 0
                ):  # the others wait, however long it takes
                    self._entered = self._now()
                alarm = (
                    Alarm(**self._read("alarm"))
                    if self._watch_store.check(["alarm"])
                    else self._own_alarm()
                )
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
        store.set(
            f"beat/{self._rank}", json.dumps(asdict(self._place()) | {"num_beats": self._num_beats})
        )

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
        return (latest[rank].phase, latest[rank].step) != (
            self._phase,
            self._step,
        ) and self._behind != before

    def _find_peers(self) -> dict[int, RankProcess]:
        """The other ranks of this host whose processes can be seen from here."""
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        ranks = range(
            max(first, 0),
            min(first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self._world_size),
        )
        peers = {
            rank: RankProcess(**self._read(f"process/{rank}"))
            for rank in ranks
            if rank != self._rank
        }
        return {rank: peer for rank, peer in peers.items() if peer.machine == self._process.machine}

    def _in_debugger(self) -> bool:
        """Here; all other ranks are told, for they wait for this one."""
        found = _num_debuggers > 0 or processes.in_debugger(
            sys._current_frames().get(self._main_thread)
        )
        if found != self._says_debugger:
            self._says_debugger = found
            self._watch_store.add("debuggers", 1 if found else -1)
        return found

    @exit.killed_after(_ANSWER_S + 3 * _REPORT_S)
    def _end(self, alarm: Alarm) -> NoReturn:
        seen = time.monotonic()
        if alarm.why in ("follows", "config") and self._fault is None:
            self._wake.wait(
                _POLL_S
            )  # our own main thread is about to raise the same, or what it follows from
        self._say(self._rank, self._answer())
        silent = self._examine_peers(seen)
        if alarm.by == self._rank:
            hosts = [
                str(RankProcess(**self._read(f"process/{rank}")))
                for rank in range(self._world_size)
            ]
            answers = [self._answer_of(rank, seen + _ANSWER_S) for rank in range(self._world_size)]
            report = write_report(alarm, answers, hosts)
            self._publish(report, alarm)
        else:
            if not self._waited_for("report", seen + _ANSWER_S + _REPORT_S):
                raise TimeoutError(f"rank {alarm.by}, which was to report it, is gone too")
            report = Report(**self._read("report"))
        for (
            rank,
            peer,
        ) in (
            silent.items()
        ):  # one that is stopped or stuck in C cannot leave by itself; a slow one can
            if (
                not self._read(f"answer/{rank}")["answers"]
                and processes.process_state(peer) != "gone"
            ):
                with suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
        self._exit_process(report, report.text if alarm.by == self._rank else "")

    def _say(self, rank: int, answer: Answer) -> None:
        self._watch_store.set(f"answer/{rank}", json.dumps(asdict(answer)))

    def _answer(self) -> Answer:
        threads = sys._current_frames()
        main, stacks = (
            threads.get(self._main_thread),
            processes.stacks_of(threads, self._main_thread),
        )
        waits, line = processes.waits_for(main), processes.innermost_line(main)
        with suppress(Exception):  # it changes while we look
            line = "; ".join(filter(None, [line, _waits_at()]))
        return Answer(
            self._place(), True, self._fault, waits, line, stacks, *processes.flight_recorder()
        )

    def _examine_peers(self, seen: float) -> dict[int, RankProcess]:
        """Answer for the ranks of this host that do not; which these are."""
        silent, busy = {}, min(3.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        for rank, peer in (self._peers or {}).items():
            key, cannot = f"answer/{rank}", processes.process_state(peer) in ("gone", "stopped")
            if not self._waited_for(key, seen + _PEERS_ANSWER_S * (1.0 if cannot else busy)):
                state = processes.process_state(peer)
                stacks = processes.stacks_of_peer(peer) if state not in ("gone", "stopped") else ""
                if not self._watch_store.check(
                    [key]
                ):  # else it was slow, or another rank has looked
                    self._say(
                        rank, Answer(self._last_place(rank), False, stacks=stacks, state=state)
                    )
            if not self._read(key)["answers"]:
                silent[rank] = peer
        return silent

    def _last_place(self, rank: int) -> Position:
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
        self._watch_store.set(
            "report", json.dumps(asdict(report) | {"details": ""})
        )  # details of all: gigabytes
        if self.folder is not None and report.code != 2:
            head = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}\n{report.text}\n"
            texts = {"failure.txt": head}
            if alarm.why in ("timeout", "silent"):
                texts["hang.txt"] = f"{head}\n{report.details}\n"
            with suppress(OSError):  # a full disk must not keep the others from leaving
                for name, text in texts.items():
                    with (self.folder / name).open(
                        "a", encoding="utf-8", errors="backslashreplace"
                    ) as file:
                        file.write(text)
        if self.tell is not None:
            self.tell(report.headline)

    def _exit_process(self, report: Report, last_words: str) -> NoReturn:
        """Via the error file for torchrun, to which the earliest one, the culprit's, is the root cause."""
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            is_other = self._rank != report.culprit
            text = report.headline if is_other else report.text
            info = {"py_callstack": text, "timestamp": str(int(time.time()) + is_other)}
            with suppress(OSError):
                Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": info}}))
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(1.0)  # the store is in this process: the others read the report from it
        exit_process(report.code, last_words)

    def _leave_alone(self, error: Exception) -> NoReturn:
        why, fault = f"{type(error).__name__}: {error}", self._fault
        text = f"rank {self._rank}, {self._place()}: stops without a common report, since the ranks cannot talk ({why})"
        text += f"\n{fault.traceback or fault.headline}" if fault is not None else ""
        if self.tell is not None and self._rank == 0:
            self.tell(text)
        exit_process(2 if fault is not None and fault.kind == "config" else 1, text)


def _later(at: dict[str, Any], beat: dict[str, Any]) -> Position:
    """Of the places that a rank published, as it entered the phase and with its last beat."""
    last = max(at, beat, key=lambda place: place["sequence"])
    return Position(last["phase"], last["step"], last["sequence"])


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


# The doctor's report: what ranks say after an alarm, who is to blame, and the text for a person.


_LOST_PEER = re.compile(r"onnection|gloo|NCCL|[Tt]imed out|Broken pipe|reset by peer")


@dataclass(frozen=True)
class Position:
    phase: str
    step: int
    sequence: int  # phases and collectives that it has entered; all ranks count alike, so that a laggard has fewer

    def __str__(self) -> str:
        return f"phase {self.phase}, step {self.step}"


@dataclass(frozen=True)
class Fault:
    kind: Literal[
        "raise", "config", "stopped", "follows"
    ]  # "stopped": Ctrl-C, SIGTERM; "follows": another failed
    headline: str
    traceback: str = ""


@dataclass(frozen=True)
class Alarm:
    """What the first rank that noticed something noticed."""

    why: Literal["raise", "config", "stopped", "follows", "timeout", "dead", "silent"]
    by: int
    rank: int  # the one that it noticed it of
    limit_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself after an alarm, or what another of its host says of it."""

    place: Position
    answers: bool = True  # False: its Python does not run
    fault: Fault | None = None
    waits: Literal["collective", "device", ""] = ""  # what its main thread waits for
    line: str = ""  # the innermost of our own or the user's code
    stacks: str = ""
    enqueued: dict[str, int] = field(
        default_factory=dict
    )  # collectives by process group, from torch's flight recorder
    flight: str = ""
    state: str = ""  # of the process, where it does not answer


@dataclass(frozen=True)
class Report:
    headline: str
    text: str
    details: str
    code: int
    culprit: int


def fault_of(error: BaseException, rank: int) -> Fault:
    if isinstance(error, ConfigError):
        return Fault("config", str(error))
    if isinstance(error, KeyboardInterrupt):
        return Fault("stopped", f"stopped by {error.args[0] if error.args else 'Ctrl-C'}")
    shown = error.__cause__ if isinstance(error, Rank0Error) and error.__cause__ else error
    # What a running proof found says all there is to say; where it was raised tells nobody anything.
    text = "" if getattr(shown, "says_all", False) else "".join(traceback.format_exception(shown))
    text = (
        text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    )
    # A lost peer: torch's own text, raised from within a collective.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lost = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    lost = lost and waits_for(frames[-1] if frames else None) == "collective"
    follows = (isinstance(error, Rank0Error) and rank != 0) or lost
    first_line = str(shown).partition("\n")[0]
    return Fault("follows" if follows else "raise", f"{type(shown).__name__}: {first_line}", text)


def answer_from(tree: dict[str, Any]) -> Answer:  # of dataclasses.asdict
    fault = tree.pop("fault")
    return Answer(
        **(
            tree
            | {
                "place": Position(**tree["place"]),
                "fault": None if fault is None else Fault(**fault),
            }
        )
    )


def write_report(alarm: Alarm, answers: list[Answer], hosts: list[str]) -> Report:
    """`answers` and `hosts` (name and process) in the order of ranks."""
    culprit, reason = find_culprit(alarm, answers)
    of_culprit = answers[culprit]
    fault = of_culprit.fault
    if fault is not None and fault.kind == "config":
        is_common = all(a.fault is not None and a.fault.kind == "config" for a in answers)
        text = f"error: {fault.headline}" + (
            "" if is_common else f" (said by rank {culprit} on {hosts[culprit]})"
        )
        return Report(text, text, "", 2, culprit)
    where = f" ({hosts[culprit]})" if len(answers) > 1 else ""
    headline = f"rank {culprit}{where} {reason}"
    lines = [headline]
    if fault is not None and fault.traceback:
        lines.append(fault.traceback.rstrip())
    elif of_culprit.stacks and fault is None:  # else it was stopped, or its words say it all
        lines += ["its stacks:", of_culprit.stacks.rstrip()]
    by_text, details = dict[str, list[int]](), ""
    for rank, answer in enumerate(answers):
        described, flight = (
            _describe(answer),
            f"flight recorder: {answer.flight}\n" if answer.flight else "",
        )
        if rank != culprit:
            by_text.setdefault(described, []).append(rank)
        details += (
            f"\n--- rank {rank} ({hosts[rank]}): {described}, sequence {answer.place.sequence}\n"
        )
        details += f"{answer.stacks}\n{flight}"
    if by_text:
        lines.append("where the other ranks were:")
        lines += [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    lines.append("all ranks stop with exit code 1")
    return Report(headline, "\n".join(lines), details[1:], 1, culprit)


def find_culprit(alarm: Alarm, answers: list[Answer]) -> tuple[int, str]:
    """Its rank, and what is said of it: who raised, else is gone, else is silent; of a hang `_laggard`."""

    def of_kind(kind: str) -> list[int]:
        found = [
            rank for rank, a in enumerate(answers) if a.fault is not None and a.fault.kind == kind
        ]
        return [alarm.by] if alarm.by in found else found

    gone = [rank for rank, a in enumerate(answers) if a.state == "gone"]
    silent = [rank for rank, a in enumerate(answers) if not a.answers]
    raised = of_kind("raise") or of_kind("config")
    for rank in raised + gone + silent + of_kind("stopped") + of_kind("follows"):
        place, fault = answers[rank].place, answers[rank].fault
        if fault is not None:
            return rank, f"failed first, in {place}: {fault.headline}"
        return rank, f"went silent in {place}: {_STATES[answers[rank].state]}"
    rank, is_clear = _laggard(answers)
    hangs = f"hangs in {answers[rank].place}" + (
        f", at {answers[rank].line}" if answers[rank].line else ""
    )
    if not is_clear:
        hangs += ", as do others: no rank can be told to be the one that the others wait for"
    elif len(answers) > 1:
        hangs += ", and the others wait for it"
    limit = f"{alarm.limit_s:g} s here (watchdog.timeout_s, watchdog.phase_timeouts_s)"
    return rank, f"{hangs}; no phase may take longer than {limit}"


def _laggard(answers: list[Answer]) -> tuple[int, bool]:
    """Who entered the fewest phases and collectives; among equals who enqueued the fewest in torch's flight recorder,
    then whose main thread waits for nobody. And whether that is one rank alone."""
    ranks = _least(range(len(answers)), lambda rank: answers[rank].place.sequence)
    for group in sorted(set.intersection(*(set(answers[rank].enqueued) for rank in ranks))):
        ranks = _least(ranks, lambda rank, group=group: answers[rank].enqueued[group])  # type: ignore[misc]
    ranks = _least(ranks, lambda rank: ("", "device", "collective").index(answers[rank].waits))
    return ranks[0], len(ranks) == 1


def _least(ranks: Sequence[int], key: Callable[[int], int]) -> list[int]:
    least = min(map(key, ranks))
    return [rank for rank in ranks if key(rank) == least]


_STATES = {
    "gone": "its process is gone (killed, or crashed outside Python)",
    "stopped": "its process is stopped (SIGSTOP, or a debugger)",
    "running": "its process is there, but its Python does not run: a call into C keeps the interpreter's lock (GIL)",
    "blocked": "its process waits in the kernel, likely for a disk or a file system, and does not answer",
    "unknown": "it does not answer, and no other rank of its host is there to look at it: its process, host or "
    "network is gone",
}


def _describe(answer: Answer) -> str:
    if not answer.answers:
        return f"{answer.place}, went silent: {_STATES[answer.state]}"
    if answer.fault is not None and answer.fault.kind == "raise":
        return f"{answer.place}, failed too: {answer.fault.headline}"
    waits = {"collective": ", waits in a collective", "device": ", waits for its device", "": ""}[
        answer.waits
    ]
    return f"{answer.place}{waits}" + (
        f", at {answer.line}" if answer.line and answer.fault is None else ""
    )


def _ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5": a report of 1,000 ranks is still read."""
    spans: list[list[int]] = []
    for rank in ranks:
        if not spans or spans[-1][-1] != rank - 1:
            spans.append([])
        spans[-1].append(rank)
    text = ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
    return ("ranks " if len(ranks) > 1 else "rank ") + text
