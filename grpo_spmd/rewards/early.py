"""What a reward shows before anything has been sampled: how it can be called, and what its gold columns hold.

A row without a usable gold value gives None for every completion, and one whose value a verifier chokes on stops the
run at the step that draws it, with engine and policy long up. Only what costs microseconds a row is asked here.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.data.table import PromptRow
from grpo_spmd.rewards.verifiers import tests_of

_NUMBER = re.compile(r"(?<![A-Za-z0-9.])-?\$?\d")  # how one begins, for verifiers.last_number


def check_callable(where: str, shown: str, function: Callable[..., Any]) -> None:
    """Refuse (ConfigError) what a call by keywords alone cannot reach, what sees no completion, and generators."""
    parameters = inspect.signature(function).parameters
    form = "write fn(prompts, completions, completion_ids, **columns), which returns a list of numbers or None"
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            why = f"takes {name!r} by its position alone, and is called by names"
            raise ConfigError(f"{where}.function: {shown} {why}; {form}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not takes_any and not named & {"completions", "completion_ids"}:
        raise ConfigError(f"{where}.function: {shown} takes neither completions nor completion_ids by name; {form}")
    while isinstance(function, functools.partial):
        function = function.func
    body = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise ConfigError(f"{where}.function: {shown} is a generator (it has a yield); {form}")


def lacking_module(error: BaseException, folder: Path) -> str:
    """The remedy where a reward's file imports another one that lies beside it."""
    name = str(getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    is_there = name and ((folder / f"{name}.py").is_file() or (folder / name).is_dir())
    return f"; it lies beside it, and only the working folder is searched: set PYTHONPATH={folder}" if is_there else ""


def check_gold(
    configs: Sequence[RewardConfig], rows: Sequence[PromptRow], *, is_held_out: bool = False
) -> Iterator[str]:
    """Read the gold columns of the shipped rewards in every row. Raises ConfigError, which names file:line, for a value
    that a verifier chokes on, and where a reward has nothing to compare with in any row. Gives a line for each reward
    that has nothing in some.

    Null says on purpose that a reward does not apply, where there are others: a held-out set may be for another one.
    """
    for index, config in enumerate(configs):
        if not config.is_shipped or config.name not in _USABLE:
            continue
        usable, what = _USABLE[config.name]
        column = str(config.args.get("tests_column", "tests")) if config.name == "code" else _COLUMN[config.name]
        is_only_one, first = len(configs) == 1, None
        num_without = num_odd = 0  # null is odd where there is no other reward
        for row in rows:
            try:
                is_usable = usable(row.columns, column)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise ConfigError(f"{row.where}: rewards.{index}: {config.name!r} cannot read {error}") from None
            if not is_usable:
                num_without += 1
                if is_only_one or row.columns.get(column) is not None:
                    num_odd, first = num_odd + 1, first or row
        who = f"rewards.{index}: {config.name!r}"
        if num_without == len(rows) > 0 and not (is_held_out and not is_only_one):
            raise ConfigError(_nothing(rows[0], num_without, len(rows), who, what, column))
        if first is not None:
            yield _nothing(first, num_odd, len(rows), who, what, column)


def _nothing(first: PromptRow, number: int, num_rows: int, who: str, what: str, column: str) -> str:
    shown = "null" if first.columns.get(column) is None else repr(first.columns[column])[:60]
    then = "nothing would train" if number == num_rows else "their completions get no reward, and are left out"
    some = f"({shown}), as in {number:,} of {num_rows:,} rows"
    return f"{first.where}: {who} finds no {what} in {column!r} {some}: {then}"


def _has_text(columns: Mapping[str, Any], column: str) -> bool:
    gold = columns.get(column)
    return gold is not None and not isinstance(gold, list | dict) and bool(str(gold).strip())


def _has_answer(columns: Mapping[str, Any], column: str) -> bool:
    return columns.get(column) is not None and not isinstance(columns[column], list | dict)


def _has_number(columns: Mapping[str, Any], column: str) -> bool:
    if type(gold := columns.get(column)) is int:
        return True
    text = str(gold)
    # The end first: most solutions close with "#### 42", and to search all of 100,000 takes seconds.
    return _NUMBER.search(text, max(0, text.rfind("####"))) is not None or _NUMBER.search(text) is not None


def _has_countdown(columns: Mapping[str, Any], _: str) -> bool:
    given, goal = columns.get("nums"), columns.get("target")
    if given is None or goal is None:
        return False
    if not isinstance(given, list | tuple):
        raise ValueError(f"'nums', which must be a list of whole numbers; got {given!r:.60}")
    for number in given:
        if type(number) is not int and not _is_whole(number):
            raise ValueError(f"'nums', which must be a list of whole numbers; got {given!r:.60}")
    if type(goal) is not int:
        try:
            Fraction(goal)
        except (ArithmeticError, TypeError, ValueError):
            raise ValueError(f"'target', which must be a number; got {goal!r:.60}") from None
    return True


def _is_whole(number: Any) -> bool:
    try:
        return int(number) == (number if isinstance(number, float) else int(number))
    except (ArithmeticError, TypeError, ValueError):
        return False


def _has_tests(columns: Mapping[str, Any], column: str) -> bool:
    try:
        return bool(tests_of(columns.get(column)))
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{column!r}: {error}") from None


_USABLE: dict[str, tuple[Callable[[Mapping[str, Any], str], bool], str]] = {
    "code": (_has_tests, "test"),
    "countdown": (_has_countdown, "task"),
    "exact": (_has_answer, "text"),
    "gsm8k": (_has_number, "number"),
    "math": (_has_text, "answer"),
}
_COLUMN = {"countdown": "target", "exact": "answer", "gsm8k": "answer", "math": "answer"}
