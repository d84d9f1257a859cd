"""Python as a tool: the policy's code runs in the sandbox; names stay for the next call."""

from __future__ import annotations

import functools
from typing import Any

from grpo_spmd.rewards.sandbox.sandbox import Limits, SandboxError, check_isolation
from grpo_spmd.rewards.sandbox.session import Session

_CALL_S = 8.0
_EPISODE_CPU_S = 120.0
_MEMORY_MIB = 1024
_MAX_CHARS = 8000
_MAX_CODE_CHARS = 100_000


class SandboxDown(BaseException):
    """The sandbox itself failed.

    No Exception: that would be shown to the policy as if its code had failed.
    """


class PythonTool:
    """One interpreter for each episode, started at the first call."""

    def __init__(self, isolation: str = "required") -> None:
        """Raises SandboxError if this machine cannot isolate code."""
        if isolation == "required":
            check_sandbox()
        self._limits = Limits(_EPISODE_CPU_S, _MEMORY_MIB, isolation)
        self._session: Session | None = None

    def reset(self, **columns: Any) -> None:
        """Begins another episode: the names of the last one are gone."""
        self._end()

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Variables are kept between calls.

        Args:
            code: The code to run.

        Returns:
            What was printed, with the error if there was one.
        """
        if not isinstance(code, str):
            raise TypeError(f"code is text, and not {type(code).__name__}")
        if len(code) > _MAX_CODE_CHARS:
            raise ValueError(
                f"the code has {len(code):,} characters, and {_MAX_CODE_CHARS:,} are the most"
            )
        try:
            self._session = self._session or Session(self._limits)
        except (SandboxError, OSError) as error:
            raise SandboxDown(str(error)) from error
        output = self._session.run(code, _CALL_S, _MAX_CHARS)
        if output is None:
            self._end()
            reason = f"over {_CALL_S:g} s or too much memory, or it ended Python"
            return f"[ended: {reason}; all variables are gone]"
        return output or "[nothing was printed]"

    def _end(self) -> None:
        if self._session is not None:
            self._session.__exit__()
            self._session = None


@functools.cache
def check_sandbox() -> None:
    """Checks once for a process and its forks. Raises SandboxError if code cannot be isolated."""
    check_isolation()
