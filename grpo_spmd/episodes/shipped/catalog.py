"""This module has the tools and environments that the config may name without a file.

They are `python` (a tool that runs the policy's code in the sandbox and keeps its variables for the
next call), `countdown` (a game: reach a target by arithmetic with some numbers) and `search:CORPUS`
(search.py).
The docstrings of tool methods are sent to the policy as the tools' descriptions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.shipped.search import Search
from grpo_spmd.rewards import verifiers
from grpo_spmd.rewards.sandbox.sandbox import Limits, SandboxError, Session, check_isolation

Factory = Callable[[], Any]

_CALL_S = 8.0
_EPISODE_CPU_S = 120.0
_MEMORY_MIB = 1024
_MAX_CHARS = 8000
_MAX_CODE_CHARS = 100_000
_MAX_EXPRESSION_CHARS = 256
_EXPRESSION = "whole numbers, + - * / and brackets"


class SandboxDown(BaseException):
    """The sandbox itself failed.

    This is a BaseException, because an Exception would be the tool's result for the policy, as if
    the policy's code had failed.
    """


class PythonTool:
    """Runs Python code for the policy, with one interpreter for each episode.

    The interpreter is started at the first call.
    """

    def __init__(self, isolation: str = "required") -> None:
        """Raises SandboxError if this machine cannot isolate code."""
        if isolation == "required":
            check_sandbox()
        self._limits = Limits(_EPISODE_CPU_S, _MEMORY_MIB, isolation)
        self._session: Session | None = None

    def reset(self, **columns: Any) -> None:
        """Begins a new episode: the variables of the last one are gone."""
        self._end()

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Variables are
        kept between calls.

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
        # None means that the interpreter has ended. The next call starts one without variables, so
        # the policy is told that they are gone.
        output = self._session.run(code, _CALL_S, _MAX_CHARS)
        if output is None:
            self._end()
            return (
                f"[ended: over {_CALL_S:g} s or too much memory, or it ended Python; all "
                "variables are gone]"
            )
        return output or "[nothing was printed]"

    def _end(self) -> None:
        """Ends the interpreter of the episode, if one was started."""
        if self._session is not None:
            self._session.__exit__()
            self._session = None


# Raises SandboxError if this machine cannot isolate code. Cached, so that it is checked once for a
# process and its forks.
check_sandbox = functools.cache(check_isolation)


class Countdown:
    """An environment in which each episode is one game of countdown."""

    def reset(self, nums: Sequence[int], target: int, **columns: Any) -> str:
        """Begins a game and returns the task, from the row's columns `nums` and `target`."""
        self._nums = [int(number) for number in nums]
        self._target = int(target)
        if not self._nums:
            raise ValueError("nums is empty: countdown needs numbers to reach the target with")
        self._reward: float | None = None
        numbers = ", ".join(map(str, self._nums))
        return (
            f"Reach {self._target} with the numbers {numbers}, each used exactly once, "
            "and + - * / and brackets. Try with evaluate, then submit one expression."
        )

    def evaluate(self, expression: str) -> str:
        """
        Compute the exact value of an expression.

        Args:
            expression: Whole numbers, + - * / and brackets, such as "(8-3)*4".

        Returns:
            The value, a whole number or a fraction.
        """
        if not isinstance(expression, str) or not re.fullmatch(
            rf"[0-9+\-*/() ]{{1,{_MAX_EXPRESSION_CHARS}}}", expression
        ):
            raise ValueError(
                f"an expression has {_EXPRESSION}, {_MAX_EXPRESSION_CHARS} characters at most"
            )
        try:
            return str(verifiers.evaluate(expression))
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"this is no expression of {_EXPRESSION}") from None

    def submit(self, expression: str) -> str:
        """
        Submit the answer. Only the first one counts.

        Args:
            expression: Uses each of the numbers exactly once and reaches the target.

        Returns:
            Whether it is right.
        """
        if self._reward is not None:
            raise ValueError("an answer has been submitted already")
        text = expression if isinstance(expression, str) else ""
        self._reward = verifiers.countdown([text], [self._nums], [self._target], answer_tag=None)[0]
        return "right" if self._reward == 1.0 else "wrong"

    def get_reward(self) -> float:
        """Returns 1.0 if the submitted answer is right, and 0.0 otherwise."""
        return self._reward or 0.0


def shipped_factory(name: str) -> Factory | None:
    """Returns a function that makes a shipped environment in TRL's form.

    Returns None for a name that is not shipped. Raises ConfigError if the environment lacks
    something that it needs.
    """
    kind, _, path = name.partition(":")
    if kind == "search" and not path.endswith(".py"):
        if not path:
            raise ConfigError(
                "search needs the file to search, with JSON lines of title and text: search:CORPUS"
            )
        return functools.partial(Search, path)
    if name == "python":
        try:
            check_sandbox()
        except SandboxError as error:
            raise ConfigError(f"the tool python: {error}") from None
        return PythonTool
    return {"countdown": Countdown}.get(name)
