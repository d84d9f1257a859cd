"""What a diagnosis consists of: findings for a person, and a run's own checks with their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "bad"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "ok")
"""The worst first."""


@dataclass(frozen=True)
class Finding:
    """Something to look at in a run."""

    level: Level
    title: str
    text: str
    step: int | None = None  # where it began
    metric: str | None = None  # the curve that shows it
    explains: tuple[str, ...] = ()
    """A cause names the metrics whose findings are its symptoms; these are told with it alone."""

    @property
    def suffix(self) -> str:
        """Where it began, to stand behind the title."""
        return f" (from step {self.step})" if self.step is not None else ""


@dataclass(frozen=True)
class Check:
    """One of the run's own checks: its result so far, and the bound at which it stops the run."""

    name: str
    level: Level
    value: str
    bound: str
    text: str
