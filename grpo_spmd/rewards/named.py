"""Code of the user's that a config names, as "file.py:name"."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import machinery, util
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.data.rows import PromptRow
from grpo_spmd.rewards.verifiers import tests_of

Modules = dict[str, types.ModuleType]  # by the file


def load_named(
    spec: str, key: str, what: str, modules: Modules | None = None
) -> Callable[..., Any]:
    """What "file.py:name" names, out of the file, which is run, unless it is one of `modules`, where it is put. Raises
    ConfigError, which begins with `key`."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{key} must be "file.py:{what}"; got {spec!r}')
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {file}{path_remark(path)}")
    modules = {} if modules is None else modules
    if (place := os.path.abspath(path)) not in modules:
        modules[place] = _run(path, key)
    found = getattr(modules[place], name, None)
    if not callable(found):
        raise ConfigError(f"{key}: {file} has no {what} {name!r}")
    return found  # type: ignore[no-any-return]


def _run(path: Path, key: str) -> types.ModuleType:
    loader = _UncachedLoader(f"reward_{path.stem}", os.path.abspath(path))
    module_spec = util.spec_from_file_location(loader.name, path, loader=loader)
    assert module_spec is not None, path
    module = util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickling look their module up there
    try:
        with as_its_own_program(str(path)):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        place, said = (
            f"{path}{_line_in(error, os.path.abspath(path))}",
            f"{type(error).__name__}: {error}",
        )
        said += lacking_module(error, path.parent)
        raise ConfigError(f"{key}: {place} cannot be imported: {said}") from error
    return module


class _UncachedLoader(machinery.SourceFileLoader):
    """Leaves no __pycache__ beside the user's file, and never runs an older version of it from there."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _line_in(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        return f":{error.lineno}"
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
    ]
    return f":{lines[-1]}" if lines else ""


# A reward's file is imported as a program of its own.


@contextlib.contextmanager
def as_its_own_program(file: str) -> Iterator[None]:
    """Within it a parser of arguments sees none, for ours are not the file's; and what is printed goes to stderr, for
    our stdout may be the config that --check prints."""
    ours, sys.argv = sys.argv, [file]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = ours


# Rewards that are Python functions of the process that trains (grpo_spmd.run), and their way to the nursery.
#
# The nursery is started by exec: it shares no memory with the rank. So a function travels as cloudpickle writes it: of a
# script, a notebook or a closure by value, of a module that can be imported by its name. The bytes are our own, in
# memory that only our own child inherits; nothing of a file or of another's process is ever read in this way.


MARK = "<python>:"  # what stands for a file in RewardConfig.function
_given: dict[str, Callable[..., Any]] = {}  # by that key


def name_of(function: Callable[..., Any]) -> str | None:
    """Of a reward: its function's, or its class's; None for a lambda."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return None if name == "<lambda>" else str(name)


def spec_of(function: Callable[..., Any]) -> str:
    """What config.yaml says in place of "file.py:function"."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{MARK}{named.__module__}.{named.__qualname__}"


@contextlib.contextmanager
def given(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Within it `functions`, by their specs, are the rewards that configs of this process name."""
    _given.update(functions)
    try:
        yield
    finally:
        for spec in functions:
            _given.pop(spec, None)


def given_function(spec: str, where: str) -> Callable[..., Any]:
    if (function := _given.get(spec)) is not None:
        return function
    name = spec.rpartition(":")[2]
    what = f"{name} was a Python function given to grpo_spmd.run, which no command can call"
    remedy = f'go on with grpo_spmd.run, or put it into a file: rewards: [{{function: "file.py:{name.rpartition(".")[2]}"}}]'
    raise ConfigError(f"{where}.function: {what}; {remedy}")


def packed(rewards: Sequence[RewardConfig]) -> int | None:
    """A descriptor of memory that holds those of `rewards` that are functions of this process, for `unpack` in a child
    that inherits it; None where there are none. Raises ConfigError for one that cannot travel."""
    named = [
        (f"rewards.{i}", r.function)
        for i, r in enumerate(rewards)
        if (r.function or "").startswith(MARK)
    ]
    if not named:
        return None
    import cloudpickle

    content: dict[str, bytes] = {}
    for where, spec in named:
        assert spec is not None
        function = given_function(spec, where)
        with _own_modules_by_value(function, cloudpickle):
            try:
                content[spec] = cloudpickle.dumps(function)
            except (
                Exception
            ) as error:  # whatever a user's __reduce__ raises, beside PicklingError and TypeError
                what = f"{spec.rpartition(':')[2]} cannot be handed to the processes that score"
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
                raise ConfigError(
                    f"{where}: {what} ({why}); make what it holds on to inside the function"
                ) from None
    descriptor = os.memfd_create("grpo_spmd_rewards")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(cloudpickle.dumps(content))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def unpack(descriptor: int) -> None:
    """In the nursery: what `packed` wrote. Raises whatever a function's import raises."""
    import cloudpickle

    with open(descriptor, "rb") as file:
        content = cloudpickle.load(file)
    _given.update({spec: cloudpickle.loads(function) for spec, function in content.items()})


@contextlib.contextmanager
def _own_modules_by_value(function: Callable[..., Any], cloudpickle: Any) -> Iterator[None]:
    """A module that only this process knows (made by a notebook's tools, a test runner) travels with its function."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = sys.modules.get(
        getattr(inspect.unwrap(inner), "__module__", None) or type(inner).__module__
    )
    is_own = (
        module is not None
        and module.__name__ != "__main__"
        and not _can_be_imported(module.__name__)
    )
    if is_own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if is_own:
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    return importlib.machinery.PathFinder.find_spec(top) is not None


# What a reward shows before anything has been sampled: how it can be called, and what its gold columns hold.
#
# A row without a usable gold value gives None for every completion, and one whose value a verifier chokes on stops the
# run at the step that draws it, with engine and policy long up. Only what costs microseconds a row is asked here.


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
    named = {
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if not takes_any and not named & {"completions", "completion_ids"}:
        raise ConfigError(
            f"{where}.function: {shown} takes neither completions nor completion_ids by name; {form}"
        )
    while isinstance(function, functools.partial):
        function = function.func
    body = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise ConfigError(f"{where}.function: {shown} is a generator (it has a yield); {form}")


def lacking_module(error: BaseException, folder: Path) -> str:
    """The remedy where a reward's file imports another one that lies beside it."""
    name = (
        str(getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError)
        else ""
    )
    is_there = name and ((folder / f"{name}.py").is_file() or (folder / name).is_dir())
    return (
        f"; it lies beside it, and only the working folder is searched: set PYTHONPATH={folder}"
        if is_there
        else ""
    )


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
        column = (
            str(config.args.get("tests_column", "tests"))
            if config.name == "code"
            else _COLUMN[config.name]
        )
        is_only_one, first = len(configs) == 1, None
        num_without = num_odd = 0  # null is odd where there is no other reward
        for row in rows:
            try:
                is_usable = usable(row.columns, column)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{row.where}: rewards.{index}: {config.name!r} cannot read {error}"
                ) from None
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
    then = (
        "nothing would train"
        if number == num_rows
        else "their completions get no reward, and are left out"
    )
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
    return (
        _NUMBER.search(text, max(0, text.rfind("####"))) is not None
        or _NUMBER.search(text) is not None
    )


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
