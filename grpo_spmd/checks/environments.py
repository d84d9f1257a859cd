"""Early checks of the files that define tools, environments and agents.

The files are parsed, not run: only the environments' own processes import them. What a parse
cannot tell for certain is left to those processes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import EnvironmentConfig

_SHIPPED = ("countdown", "python", "search")
# A file that mentions one of these may define names that a parse does not see.
_DYNAMIC = {"*", "__getattr__", "exec", "globals", "setattr", "vars"}
_NO_TOOLS = ("reset", "get_reward")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_environment_early(environment: EnvironmentConfig) -> None:
    """Raises ConfigError for a file of tools, environments or agents that certainly cannot work.

    The file may be missing, may lack a name, or may have a class without the needed methods or a
    tool without types.
    """
    for number, spec in enumerate(environment.tools):
        _check_spec(f"environment.tools.{number}", spec, "function")
    factory = environment.factory
    factories = factory if isinstance(factory, Mapping) else {"": factory} if factory else {}
    for name, spec in factories.items():
        key = f"environment.factory.{name}".rstrip(".")
        _check_spec(key, spec, "Class", [("reset",)])
    if environment.gym:
        methods = [("reset", "init"), ("step",)]
        _check_spec("environment.gym", environment.gym, "Class", methods, may_ship=False)
    if environment.agent:
        _check_spec("environment.agent", environment.agent, "function", may_ship=False)


def _check_spec(
    key: str,
    spec: str,
    kind: str,
    methods: Sequence[Sequence[str]] = (),
    *,
    may_ship: bool = True,
) -> None:
    """Raises ConfigError if `spec`, the value of `key`, names nothing that is usable as `kind`.

    A class needs one method of each group in `methods`.
    """
    file, colon, name = spec.rpartition(":")
    if may_ship and not file.endswith(".py") and spec.partition(":")[0] in _SHIPPED:
        return
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{key} must be "file.py:{kind}"; got {spec!r}')
    tree = _parse_file(key, file)
    mentioned = set(_mentioned_names(tree))
    if mentioned & _DYNAMIC:
        return
    # A name may be imported or assigned: any mention is enough.
    if name not in mentioned:
        raise ConfigError(f"{key}: {file} has no {kind} {name!r}")
    definitions = [
        node
        for node in tree.body
        if isinstance(node, _Function | ast.ClassDef) and node.name == name
    ]
    # The file may change a definition that it uses itself.
    is_used = any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    if len(definitions) != 1 or definitions[0].decorator_list or is_used:
        return
    definition = definitions[0]
    if isinstance(definition, _Function):
        if key.startswith("environment.tools"):
            _check_tool(key, definition, definition.args.args)
    elif kind == "Class" and not definition.bases and not definition.keywords:
        _check_class(key, definition, methods)


def _parse_file(key: str, file: str) -> ast.Module:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {file}{path_remark(path)}")
    try:
        return ast.parse(path.read_bytes(), file)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        location = f"{file}:{line}" if line else file
        raise ConfigError(
            f"{key}: {location} cannot be imported: {type(error).__name__}: {error}"
        ) from None


def _check_class(key: str, node: ast.ClassDef, methods: Sequence[Sequence[str]]) -> None:
    for group in methods:
        if not {*group} & {*_mentioned_names(node)}:
            usage = "reset(**row)" if group == ("reset",) else " or ".join(group)
            raise ConfigError(f"{key}: {node.name} has no method {usage}")
    if not key.startswith("environment.factory"):
        return
    for method in node.body:
        if not isinstance(method, _Function) or method.decorator_list:
            continue
        if not method.name.startswith("_") and method.name not in _NO_TOOLS:
            # The schema of a tool is made of its types and docstring.
            _check_tool(key, method, method.args.args[1:])


def _check_tool(key: str, function: _Function, arguments: Sequence[ast.arg]) -> None:
    all_arguments = (*arguments, *function.args.kwonlyargs)
    untyped = [argument.arg for argument in all_arguments if argument.annotation is None]
    if untyped or not ast.get_docstring(function):
        lacks = f"its argument {untyped[0]!r} has no type" if untyped else "it has no docstring"
        raise ConfigError(
            f"{key}: {function.name} has no schema: {lacks}; give it types and a docstring of "
            "Google's style"
        )


def _mentioned_names(tree: ast.AST) -> Iterator[str]:
    """Yields all names and all string constants in a file or a class."""
    for node in ast.walk(tree):
        # Functions and imports have a name, uses an id or attr, and constants a value.
        for field in ("name", "asname", "id", "attr", "value"):
            text = getattr(node, field, None)
            if isinstance(text, str):
                yield text
