"""One interpreter in the jail that is kept for several pieces of model-written code.

That it is kept is no way out of the jail: its walls are those of one piece of code, and stand for
all. It may hold on to memory, threads and CPU time between two pieces, up to the limits of the
jail, and may forge its own answers, which are only ever shown to who wrote the code.
"""

from __future__ import annotations

import time
from pathlib import Path

from grpo_spmd.rewards.sandbox.sandbox import Jail, Limits

_CELLS = Path(__file__).with_name("cells.py")


class Session(Jail):
    """`limits.time_s` is the CPU time of all pieces together. Raises SandboxError where code cannot
    be shut in."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(_CELLS.read_text(encoding="utf-8"), "cells", limits, stdin="")
        self._number = 0

    def run(self, code: str, time_s: float, max_chars: int) -> str | None:
        """Returns what `code` printed and its error, at most about `max_chars` characters.

        A note says how much more was cut. None if the code ended the interpreter or took over
        `time_s` seconds: there is none to go on with.
        """
        self._deadline, self._received = time.monotonic() + time_s, 0
        self._number += 1
        self.write({"code": code, "number": self._number, "limit": max_chars})
        answer = self.read()
        if not isinstance(answer, dict) or answer.get("number") != self._number:
            return None
        printed, error, num_cut = answer.get("printed"), answer.get("error"), answer.get("num_cut")
        if not (isinstance(printed, str) and isinstance(error, str) and isinstance(num_cut, int)):
            return None
        note = f"\n... [{num_cut:,} more characters were cut]\n" if num_cut > 0 else ""
        return f"{printed[:max_chars]}{note}{error[: max_chars + 100]}"
