"""This module loads the user's code that a config names: "file.py:name", or a Python function given
to grpo_spmd.run.

It also checks, before anything is sampled, whether the shipped rewards can read their *gold*
columns (the data set's right answers).
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
from grpo_spmd.records import Fields
from grpo_spmd.rewards.trl import Function, callable_name, unwrap_partial
from grpo_spmd.rewards.verifiers import countdown_task, parse_tests, values_in

# Stands in RewardConfig.function where "file.py:function" has the file.
PYTHON_MARK = "<python>:"
# The modules of users' files that were run, by absolute path.
Modules = dict[str, types.ModuleType]
# Functions given to grpo_spmd.run, by their specs.
_registered: dict[str, Function] = {}
# Matches the beginning of a number as verifiers.last_number reads it.
_NUMBER = re.compile(r"(?<![A-Za-z0-9.])-?\$?\d")


def load_named(spec: str, key: str, kind: str, modules: Modules | None = None) -> Function:
    """Returns the function or other callable that "file.py:name" names.

    `modules` keeps the module, so that a file runs only once. `kind` says in messages what the name
    stands for. Raises ConfigError, whose message begins with `key`.
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
    """Imports a user's file as a new module. Raises ConfigError for any error in it."""
    loader = _UncachedLoader(f"reward_{path.stem}", absolute)
    module_spec = util.spec_from_file_location(loader.name, path, loader=loader)
    assert module_spec is not None, path
    module = util.module_from_spec(module_spec)
    # Dataclasses and pickle look up a class's module in sys.modules.
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
    """Loads a file without writing a __pycache__ beside it or reading an older version from one."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _line_in(error: BaseException, path: str) -> str:
    """Returns ":<line>" for the line of the file `path` at which an error happened.

    Returns "" if the line is unknown.
    """
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
    ]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno or 1)
    return f":{lines[-1]}" if lines else ""


def _import_hint(error: BaseException, folder: Path) -> str:
    """Returns the remedy if a user's file in `folder` could not import a module from `folder`.

    Returns "" for other errors.
    """
    name = str(getattr(error, "name", "")).partition(".")[0]
    is_beside = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
    if not (isinstance(error, ModuleNotFoundError) and is_beside):
        return ""
    return f"; only the working folder is searched, not the file's own: set PYTHONPATH={folder}"


@contextlib.contextmanager
def as_its_own_program(file: str) -> Iterator[None]:
    """Hides this program's command line from a user's file and sends what the file prints to
    stderr, within the block.

    stdout must have nothing but the config if the command is --check.
    """
    argv = sys.argv
    sys.argv = [file]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = argv


# Functions given to grpo_spmd.run. The nursery, which starts the reward workers, is a new program
# and shares no memory with the rank, so functions are sent to it by cloudpickle: by value if they
# are defined in a script, in a notebook or inside a function, by name if their module can be
# imported. The messages of calls go the same way. Unpickling is safe here: the bytes are this
# process's own, in an unnamed file or a socket that only its child inherits. Nothing from a user's
# file or another process is ever unpickled; what a worker replies is JSON.


def function_name(function: Function) -> str | None:
    """Returns the reward's name: the name of its function or class, or None for a lambda."""
    name = callable_name(function)
    return None if name == "<lambda>" else name


def function_spec(function: Function) -> str:
    """Returns the text that config.yaml has for this function in place of "file.py:function"."""
    function = unwrap_partial(function)
    # An object with __call__ has the name of its class.
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{PYTHON_MARK}{named.__module__}.{named.__qualname__}"


@contextlib.contextmanager
def registered(functions: dict[str, Function]) -> Iterator[None]:
    """Lets configs of this process name `functions`, which are given by spec, within the block."""
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
    """Returns the functions of `rewards` that were given to grpo_spmd.run, pickled, by spec.

    Raises ConfigError for a function that cannot be pickled.
    """
    content = {}
    for index, reward in enumerate(rewards):
        spec = reward.function or ""
        if not spec.startswith(PYTHON_MARK):
            continue
        entry = f"rewards.{index}"
        function = registered_function(spec, entry)
        with _unknown_module_by_value(function):
            try:
                content[spec] = pack(function)
            # PicklingError, TypeError, or whatever a user's __reduce__ raises.
            except Exception as error:
                name = spec.rpartition(":")[2]
                message = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{entry}: {name} cannot be handed to the processes that score "
                    f"({type(error).__name__}: {message}); create the object that it uses inside "
                    "the function"
                ) from None
    return content


def pack(message: Any) -> bytes:
    """Returns a message to a process that this one has started, pickled."""
    return bytes(cloudpickle.dumps(message))


def unpack(packed: bytes) -> Any:
    """Returns the message that the parent of this process has packed."""
    return cloudpickle.loads(packed)


def unpack_functions(content: Mapping[str, bytes]) -> None:
    """Registers the functions that `pack_functions` pickled. Called in the nursery.

    Raises whatever their imports raise.
    """
    _registered.update({spec: unpack(packed) for spec, packed in content.items()})


@contextlib.contextmanager
def _unknown_module_by_value(function: Function) -> Iterator[None]:
    """Has cloudpickle send the function's module by value, within the block, if other processes
    cannot import it.

    A notebook tool, for instance, may have created a module that exists in this process only.
    """
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
    """Returns True if Python finds the top-level package of a module by its name."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or machinery.PathFinder.find_spec(top) is not None


# Checks of the gold columns. In a row without a usable gold value, every completion's reward is
# None. A value that makes a verifier fail would stop the run only at the step that draws the row,
# long after engine and policy were built. Only checks that take microseconds a row are made here.


def check_gold(
    configs: Sequence[RewardConfig], rows: Sequence[PromptRow], *, is_held_out: bool = False
) -> Iterator[str]:
    """Yields a warning for each shipped reward that has nothing to compare with in some rows.

    Raises ConfigError, which names file:line, if a verifier cannot read a value, or if a reward has
    nothing to compare with in all rows. If there are several rewards, a null is no mistake: it says
    that this reward does not apply to the row. A held-out set may then lack the answers for one
    reward altogether.
    """
    is_only_one = len(configs) == 1
    for index, config in enumerate(configs):
        if not config.is_shipped or config.name not in _GOLD:
            continue
        find_gold, kind, column = _GOLD[config.name]
        for option in ("column", "tests_column"):
            column = config.args.get(option, column)
        unusable = []
        for row in rows:
            # Looked up as a value inside a column "", so that `column` may have dots and gives None
            # if the row lacks it.
            [gold] = values_in({"": [row.columns]}, f".{column}")
            try:
                if not find_gold(gold, row.columns):
                    unusable.append((row, gold))
            except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{row.where}: rewards.{index}: {config.name!r} cannot read the row: {error}"
                ) from None
        is_useless = len(unusable) == len(rows) > 0 and (is_only_one or not is_held_out)
        odd_rows = [
            (row, gold) for row, gold in unusable if is_useless or is_only_one or gold is not None
        ]
        if not odd_rows:
            continue
        row, gold = odd_rows[0]
        label = "null" if gold is None else f"{gold!r:.60}"
        message = (
            f"{row.where}: rewards.{index}: {config.name!r} finds no {kind} in {column!r} "
            f"({label}), as in {len(odd_rows):,} of {len(rows):,} rows"
        )
        if is_useless:
            raise ConfigError(f"{message}: nothing would train")
        yield f"{message}: their completions get no reward, and are left out"


def _is_answer(gold: Any, _: Fields) -> bool:
    return not (gold is None or isinstance(gold, list | dict))


def _find_number(gold: Any, _: Fields) -> Any:
    text = str(gold)
    # Search behind "####" first: most solutions end with "#### 42", and searching 100,000 whole
    # solutions takes seconds.
    return _NUMBER.search(text, max(0, text.rfind("####"))) or _NUMBER.search(text)


# By shipped reward: (function of a row's gold value and its columns that is truthy if the verifier
# can use the value, what messages call such a value, the default column).
_GOLD: dict[str, tuple[Callable[[Any, Fields], Any], str, str]] = {
    "code": (lambda gold, _: parse_tests(gold), "test", "tests"),
    "countdown": (lambda gold, row: countdown_task(row.get("nums"), gold), "task", "target"),
    "exact": (_is_answer, "text", "answer"),
    "gsm8k": (_find_number, "number", "answer"),
    "math": (lambda gold, row: _is_answer(gold, row) and str(gold).strip(), "answer", "answer"),
}
