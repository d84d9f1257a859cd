"""Rewards that are Python functions of the process that trains (grpo_spmd.run), and their way to the nursery.

The nursery is started by exec: it shares no memory with the rank. So a function travels as cloudpickle writes it: of a
script, a notebook or a closure by value, of a module that can be imported by its name. The bytes are our own, in
memory that only our own child inherits; nothing of a file or of another's process is ever read in this way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig

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
    remedy = (
        f'go on with grpo_spmd.run, or put it into a file: rewards: [{{function: "file.py:{name.rpartition(".")[2]}"}}]'
    )
    raise ConfigError(f"{where}.function: {what}; {remedy}")


def packed(rewards: Sequence[RewardConfig]) -> int | None:
    """A descriptor of memory that holds those of `rewards` that are functions of this process, for `unpack` in a child
    that inherits it; None where there are none. Raises ConfigError for one that cannot travel."""
    named = [(f"rewards.{i}", r.function) for i, r in enumerate(rewards) if (r.function or "").startswith(MARK)]
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
            except Exception as error:  # whatever a user's __reduce__ raises, beside PicklingError and TypeError
                what = f"{spec.rpartition(':')[2]} cannot be handed to the processes that score"
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
                raise ConfigError(f"{where}: {what} ({why}); make what it holds on to inside the function") from None
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
    module = sys.modules.get(getattr(inspect.unwrap(inner), "__module__", None) or type(inner).__module__)
    is_own = module is not None and module.__name__ != "__main__" and not _can_be_imported(module.__name__)
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
