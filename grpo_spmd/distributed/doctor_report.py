"""The doctor's report: what ranks say after an alarm, who is to blame, and the text for a person."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.errors import Rank0Error
from grpo_spmd.distributed.processes import MAX_TEXT, waits_for

_LOST_PEER = re.compile(r"onnection|gloo|NCCL|[Tt]imed out|Broken pipe|reset by peer")


@dataclass(frozen=True)
class Place:
    phase: str
    step: int
    sequence: int  # phases and collectives that it has entered; all ranks count alike, so that a laggard has fewer

    def __str__(self) -> str:
        return f"phase {self.phase}, step {self.step}"


@dataclass(frozen=True)
class Fault:
    kind: Literal["raise", "config", "stopped", "follows"]  # "stopped": Ctrl-C, SIGTERM; "follows": another failed
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

    place: Place
    answers: bool = True  # False: its Python does not run
    fault: Fault | None = None
    waits: Literal["collective", "device", ""] = ""  # what its main thread waits for
    line: str = ""  # the innermost of our own or the user's code
    stacks: str = ""
    enqueued: dict[str, int] = field(default_factory=dict)  # collectives by process group, from torch's flight recorder
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
    text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n...\n{text[-MAX_TEXT // 2 :]}"
    # A lost peer: torch's own text, raised from within a collective.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lost = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    lost = lost and waits_for(frames[-1] if frames else None) == "collective"
    follows = (isinstance(error, Rank0Error) and rank != 0) or lost
    first_line = str(shown).partition("\n")[0]
    return Fault("follows" if follows else "raise", f"{type(shown).__name__}: {first_line}", text)


def answer_from(tree: dict[str, Any]) -> Answer:  # of dataclasses.asdict
    fault = tree.pop("fault")
    return Answer(**(tree | {"place": Place(**tree["place"]), "fault": None if fault is None else Fault(**fault)}))


def write_report(alarm: Alarm, answers: list[Answer], hosts: list[str]) -> Report:
    """`answers` and `hosts` (name and process) in the order of ranks."""
    culprit, reason = find_culprit(alarm, answers)
    of_culprit = answers[culprit]
    fault = of_culprit.fault
    if fault is not None and fault.kind == "config":
        is_common = all(a.fault is not None and a.fault.kind == "config" for a in answers)
        text = f"error: {fault.headline}" + ("" if is_common else f" (said by rank {culprit} on {hosts[culprit]})")
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
        described, flight = _describe(answer), f"flight recorder: {answer.flight}\n" if answer.flight else ""
        if rank != culprit:
            by_text.setdefault(described, []).append(rank)
        details += f"\n--- rank {rank} ({hosts[rank]}): {described}, sequence {answer.place.sequence}\n"
        details += f"{answer.stacks}\n{flight}"
    if by_text:
        lines.append("where the other ranks were:")
        lines += [f"  {_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    lines.append("all ranks stop with exit code 1")
    return Report(headline, "\n".join(lines), details[1:], 1, culprit)


def find_culprit(alarm: Alarm, answers: list[Answer]) -> tuple[int, str]:
    """Its rank, and what is said of it: who raised, else is gone, else is silent; of a hang `_laggard`."""

    def of_kind(kind: str) -> list[int]:
        found = [rank for rank, a in enumerate(answers) if a.fault is not None and a.fault.kind == kind]
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
    hangs = f"hangs in {answers[rank].place}" + (f", at {answers[rank].line}" if answers[rank].line else "")
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
    waits = {"collective": ", waits in a collective", "device": ", waits for its device", "": ""}[answer.waits]
    return f"{answer.place}{waits}" + (f", at {answer.line}" if answer.line and answer.fault is None else "")


def _ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5": a report of 1,000 ranks is still read."""
    spans: list[list[int]] = []
    for rank in ranks:
        if not spans or spans[-1][-1] != rank - 1:
            spans.append([])
        spans[-1].append(rank)
    text = ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
    return ("ranks " if len(ranks) > 1 else "rank ") + text
