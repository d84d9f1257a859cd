"""The environment of `episodes`, for both sides: it runs in TRL's process and in our workers, and
imports nothing of
grpo_spmd."""

from __future__ import annotations

import time
from typing import Any

TOOL_S = 0.1


class Slow:
    """By TRL's protocol. Its tool waits, as for an answer from another machine."""

    seconds = TOOL_S

    def reset(self, **columns: Any) -> None:
        pass

    def work(self, text: str) -> str:
        """
        Wait, then answer.

        Args:
            text: Anything.

        Returns:
            Always the same three words.
        """
        time.sleep(self.seconds)
        return "w7 w8 w9"


class Quick(Slow):
    seconds = 0.0
