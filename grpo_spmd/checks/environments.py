"""What the files of environments show before anything heavy is imported. They are read here, and not run: what a file
does at its import is for the environments' own processes, which look at the rest."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import looked_for
from grpo_spmd.config.schema import EnvironmentConfig

_SHIPPED = ("countdown", "python", "search")
_DYNAMIC = {
    "*",
    "__getattr__",
    "exec",
    "globals",
    "setattr",
    "vars",
}  # by which a name may come to be unseen
_NO_TOOLS = ("reset", "get_reward")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_environment_early(environment: EnvironmentConfig) -> None:
    """Raises ConfigError for what is certain: no such file, no such name in it, a class without the methods that it
    needs, a tool without types."""
    for number, spec in enumerate(environment.tools):
        _check(f"environment.tools.{number}", spec, "function")
    factory = environment.factory
    of_names = factory if isinstance(factory, Mapping) else {"": factory} if factory else {}
    for name, spec in of_names.items():
        _check(f"environment.factory.{name}".rstrip("."), spec, "Class", [("reset",)])
    if environment.gym:
        _check(
            "environment.gym",
            environment.gym,
            "Class",
            [("reset", "init"), ("step",)],
            is_shipped=False,
        )
    if environment.agent:
        _check("environment.agent", environment.agent, "function", is_shipped=False)


def _check(
    key: str, spec: str, what: str, needs: Sequence[Sequence[str]] = (), *, is_shipped: bool = True
) -> None:
    """`needs`: of each one of these methods."""
    file, colon, name = spec.rpartition(":")
    if is_shipped and not file.endswith(".py") and spec.partition(":")[0] in _SHIPPED:
        return
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{key} must be "file.py:{what}"; got {spec!r}')
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {file}{looked_for(path)}")
    try:
        tree = ast.parse(path.read_bytes(), file)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = (
            f"{file}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else file
        )
        raise ConfigError(
            f"{key}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    mentioned = set(_mentioned(tree))
    if mentioned & _DYNAMIC:
        return
    if name not in mentioned:
        raise ConfigError(f"{key}: {file} has no {what} {name!r}")
    found = [
        node
        for node in tree.body
        if isinstance(node, _Function | ast.ClassDef) and node.name == name
    ]
    is_used = any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    if (
        len(found) != 1 or found[0].decorator_list or is_used
    ):  # by the file itself, which may change it
        return
    if isinstance(found[0], _Function) and key.startswith("environment.tools"):
        _check_tool(key, found[0], found[0].args.args)
    if (
        not isinstance(found[0], ast.ClassDef)
        or found[0].bases
        or found[0].keywords
        or what != "Class"
    ):
        return
    for one_of in needs:
        if not {*one_of} & {*_mentioned(found[0])}:
            shown = "reset(**row)" if one_of == ("reset",) else " or ".join(one_of)
            raise ConfigError(f"{key}: {name} has no method {shown}")
    for method in found[0].body if key.startswith("environment.factory") else ():
        is_tool = (
            isinstance(method, _Function)
            and not method.name.startswith("_")
            and method.name not in _NO_TOOLS
        )
        if is_tool and isinstance(method, _Function) and not method.decorator_list:
            _check_tool(key, method, method.args.args[1:])


def _check_tool(key: str, function: _Function, arguments: Sequence[ast.arg]) -> None:
    untyped = [
        argument.arg
        for argument in (*arguments, *function.args.kwonlyargs)
        if argument.annotation is None
    ]
    if untyped or not ast.get_docstring(function):
        lacks = f"its argument {untyped[0]!r} has no type" if untyped else "it has no docstring"
        what = f"{function.name} has no schema: {lacks}"
        raise ConfigError(f"{key}: {what}; give it types and a docstring of Google's style")


def _mentioned(tree: ast.AST) -> Iterator[str]:
    """All names and all texts of a file or a class."""
    for node in ast.walk(tree):
        if isinstance(node, _Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
