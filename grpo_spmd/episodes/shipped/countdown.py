"""The game of countdown as an environment: reach a number with some others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_spmd.rewards import verifiers

_MAX_CHARS = 256
_EXPRESSION = "whole numbers, + - * / and brackets"


class Countdown:
    """One game an episode."""

    def reset(self, nums: Sequence[int], target: int, **columns: Any) -> str:
        """Returns the task, from the row's columns `nums` and `target`."""
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
            rf"[0-9+\-*/() ]{{1,{_MAX_CHARS}}}", expression
        ):
            limit = f"{_MAX_CHARS} characters at most"
            raise ValueError(f"an expression has {_EXPRESSION}, {limit}")
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
        """Returns 1.0 if the submitted answer is right, else 0.0."""
        return self._reward or 0.0
