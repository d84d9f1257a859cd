"""The rows of the fault table."""

from __future__ import annotations

from benchmarks.support.report import Row
from benchmarks.survival.faults.lab import EVERY, Strike


def row(fault: str, tried: int, problems: list[str], worst: str, notes: str = "") -> Row:
    """A problem is a fault that was not survived."""
    message = "; ".join(dict.fromkeys(problems[:3]))
    return {
        "fault": fault,
        "tried": tried,
        "survived": tried - len(problems),
        "lost": len(problems),
        "worst": worst,
        "notes": "; ".join(note for note in (message, notes) if note) or "-",
    }


def row_of_strikes(fault: str, strikes: list[Strike], notes: str = "") -> Row:
    lost = [strike.lost_steps for strike in strikes if strike.lost_steps is not None]
    in_save = sum(strike.in_save for strike in strikes)
    worst = f"{max(lost, default=0)} steps lost, interval {EVERY}"
    problems = ["; ".join(strike.problems) for strike in strikes if strike.problems]
    return row(
        fault,
        len(strikes),
        problems,
        worst,
        "; ".join(note for note in (f"{in_save} with a save half written", notes) if note),
    )
