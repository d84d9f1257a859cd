"""This module loads the user's code that a config names: "file.py:name", or a Python function given
to grpo_spmd.run.

It also checks, before anything is sampled, how a reward can be called, and whether the *gold*
columns (the data set's right answers) can be read.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import machinery, util
from pathlib import Path
from typing import Any

import cloudpickle

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.data.rows import PromptRow
from grpo_spmd.rewards.trl import callable_name, unwrap_partial
from grpo_spmd.rewards.verifiers import countdown_task, parse_tests, values_in

# Stands in place of a file in RewardConfig.function.
PYTHON_MARK = "<python>:"
# Modules that were loaded, by their files.
Modules = dict[str, types.ModuleType]
Function = Callable[..., Any]
# Functions given to grpo_spmd.run, by their specs.
_registered: dict[str, Function] = {}
# Matches the beginning of a number as verifiers.last_number reads it.
_NUMBER = re.compile(r"(?<![A-Za-z0-9.])-?\$?\d")


def load_named(spec: str, key: str, kind: str, modules: Modules | None = None) -> Function:
    """Returns the object that "file.py:name" names.

    The file is run once for each `modules`, which keeps it. Raises ConfigError, which begins with
    `key`.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{key} must be "file.py:{kind}"; got {spec!r}')
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {file}{path_remark(path)}")
    modules = {} if modules is None else modules
    absolute = os.path.abspath(path)
    if absolute not in modules:
        modules[absolute] = _run_file(path, absolute, key)
    function = getattr(modules[absolute], name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {file} has no {kind} {name!r}")
    return function  # type: ignore[no-any-return]


def _run_file(path: Path, absolute: str, key: str) -> types.ModuleType:
    loader = _UncachedLoader(f"reward_{path.stem}", absolute)
    module_spec = util.spec_from_file_location(loader.name, path, loader=loader)
    assert module_spec is not None, path
    module = util.module_from_spec(module_spec)
    # Dataclasses and pickling look their module up there.
    sys.modules[loader.name] = module
    try:
        with as_its_own_program(str(path)):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}: {path}{_line_in(error, absolute)} cannot be imported: "
            f"{type(error).__name__}: {error}{_import_hint(error, path.parent)}"
        ) from error
    return module


class _UncachedLoader(machinery.SourceFileLoader):
    """Leaves no __pycache__ next to the user's file, and never runs an older version from there."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _line_in(error: BaseException, path: str) -> str:
    """Returns ":<line>" for the line of the file in which an error happened, or "" if it is
    unknown."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
    ]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno or 1)
    return f":{lines[-1]}" if lines else ""


def _import_hint(error: BaseException, folder: Path) -> str:
    """Returns the remedy where a reward's file imports another file from its own folder."""
    name = str(getattr(error, "name", "")).partition(".")[0]
    is_beside = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
    if not (isinstance(error, ModuleNotFoundError) and is_beside):
        return ""
    return f"; it lies beside it, and only the working folder is searched: set PYTHONPATH={folder}"


@contextlib.contextmanager
def as_its_own_program(file: str) -> Iterator[None]:
    """Hides our command line from a user's file, and sends what it prints to stderr.

    Our stdout may be the config that --check prints.
    """
    argv = sys.argv
    sys.argv = [file]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = argv


# Functions given to grpo_spmd.run. The nursery is started by exec and shares no memory with the
# rank, so cloudpickle sends a function: by value if a script, a notebook or a closure defines it,
# by name if its module can be imported. The bytes are our own, in a nameless file that only our own
# child inherits; nothing from a file or from another process is ever unpickled.


def function_name(function: Function) -> str | None:
    """Returns the reward's name: the name of its function or class, or None for a lambda."""
    name = callable_name(function)
    return None if name == "<lambda>" else name


def function_spec(function: Function) -> str:
    """Returns the text that config.yaml has in place of "file.py:function"."""
    function = unwrap_partial(function)
    # An object with __call__ is named by its class.
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{PYTHON_MARK}{named.__module__}.{named.__qualname__}"


@contextlib.contextmanager
def registered(functions: dict[str, Function]) -> Iterator[None]:
    """Lets configs of this process name `functions` by their specs within the block."""
    _registered.update(functions)
    try:
        yield
    finally:
        for spec in functions:
            _registered.pop(spec, None)


def registered_function(spec: str, entry: str) -> Function:
    """Returns the function with this spec. Raises ConfigError if this process does not have it."""
    function = _registered.get(spec)
    if function is None:
        name = spec.rpartition(":")[2]
        example = f'rewards: [{{function: "file.py:{name.rpartition(".")[2]}"}}]'
        raise ConfigError(
            f"{entry}.function: {name} was a Python function given to grpo_spmd.run, which no "
            f"command can call; go on with grpo_spmd.run, or put it into a file: {example}"
        )
    return function


def pack_functions(rewards: Sequence[RewardConfig]) -> dict[str, bytes]:
    """Returns the Python functions of `rewards`, pickled, by their specs.

    Raises ConfigError for a function that cannot be pickled.
    """
    content: dict[str, bytes] = {}
    for index, reward in enumerate(rewards):
        spec = reward.function or ""
        if not spec.startswith(PYTHON_MARK):
            continue
        entry = f"rewards.{index}"
        function = registered_function(spec, entry)
        with _unknown_module_by_value(function):
            try:
                content[spec] = cloudpickle.dumps(function)
            # Beside PicklingError and TypeError whatever a user's __reduce__ raises.
            except Exception as error:
                name = spec.rpartition(":")[2]
                message = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{entry}: {name} cannot be handed to the processes that score "
                    f"({type(error).__name__}: {message}); make what it holds on to inside the "
                    "function"
                ) from None
    return content


def unpack_functions(content: Mapping[str, bytes]) -> None:
    """Registers the functions that `pack_functions` packed; runs in the nursery.

    Raises any error of their imports.
    """
    _registered.update({spec: cloudpickle.loads(packed) for spec, packed in content.items()})


@contextlib.contextmanager
def _unknown_module_by_value(function: Function) -> Iterator[None]:
    """Pickles a module that only this process knows (a notebook tool's) with its function."""
    inner = inspect.unwrap(unwrap_partial(function))
    name = getattr(inner, "__module__", None) or type(inner).__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__" or _can_be_imported(name):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or machinery.PathFinder.find_spec(top) is not None


# Checks of the gold columns. A row without a usable gold value gives None for every completion. A
# value that a verifier cannot read stops the run at the step that draws it, long after engine and
# policy were built. Only checks that cost microseconds a row are made here.


def check_gold(
    configs: Sequence[RewardConfig], rows: Sequence[PromptRow], *, is_held_out: bool = False
) -> Iterator[str]:
    """Yields a warning for each shipped reward that has nothing to compare with in some rows.

    Raises ConfigError, which names file:line, for a value that a verifier cannot read, and where a
    reward has nothing to compare with in any row. If there are several rewards, a null says
    on purpose that this reward does not apply to a row; and a held-out set may have no answers for
    one of them.
    """
    is_only_one = len(configs) == 1
    for index, config in enumerate(configs):
        if not config.is_shipped or config.name not in _GOLD:
            continue
        find_gold, kind, column = _GOLD[config.name]
        for option in ("column", "tests_column"):
            column = config.args.get(option, column)
        unusable: list[tuple[PromptRow, Any]] = []
        for row in rows:
            [gold] = values_in({"": [row.columns]}, f".{column}")
            try:
                if not find_gold(gold, row.columns):
                    unusable.append((row, gold))
            except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{row.where}: rewards.{index}: {config.name!r} cannot read the row: {error}"
                ) from None
        is_empty = len(unusable) == len(rows) > 0 and (is_only_one or not is_held_out)
        odd_rows = [
            (row, gold) for row, gold in unusable if is_empty or is_only_one or gold is not None
        ]
        if not odd_rows:
            continue
        row, gold = odd_rows[0]
        label = "null" if gold is None else f"{gold!r:.60}"
        message = (
            f"{row.where}: rewards.{index}: {config.name!r} finds no {kind} in {column!r} "
            f"({label}), as in {len(odd_rows):,} of {len(rows):,} rows"
        )
        if is_empty:
            raise ConfigError(f"{message}: nothing would train")
        yield f"{message}: their completions get no reward, and are left out"


def _is_answer(gold: Any, _: Mapping[str, Any]) -> bool:
    return not (gold is None or isinstance(gold, list | dict))


def _find_number(gold: Any, _: Mapping[str, Any]) -> Any:
    text = str(gold)
    # The end first: most solutions close with "#### 42", and to search all of 100,000 takes
    # seconds.
    return _NUMBER.search(text, max(0, text.rfind("####"))) or _NUMBER.search(text)


# By shipped reward: (function that returns what is true if a row's gold value can be used,
# description of a usable value, its column).
_GOLD: dict[str, tuple[Callable[[Any, Mapping[str, Any]], Any], str, str]] = {
    "code": (lambda gold, _: parse_tests(gold), "test", "tests"),
    "countdown": (lambda gold, row: countdown_task(row.get("nums"), gold), "task", "target"),
    "exact": (_is_answer, "text", "answer"),
    "gsm8k": (_find_number, "number", "answer"),
    "math": (lambda gold, row: _is_answer(gold, row) and str(gold).strip(), "answer", "answer"),
}
