"""A package read from its source, without importing it: what a dotted name leads to, what a class
inherits, what a
function takes. So a build for a GPU can be asked on a machine without one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """What a name leads to: a module, a class, a function, or the statement that makes an
    attribute."""

    node: ast.AST
    module: str
    owner: ast.ClassDef | None = None  # whose member it is

    @cached_property
    def text(self) -> str:
        """Its source without comments, spaces and quotes as ast writes them."""
        return ast.unparse(self.node)


@dataclass(frozen=True)
class Parameters:
    positional: list[str]  # in order, those that may be given by name too
    keyword_only: list[str]
    required: set[str]
    takes_any_positional: bool
    takes_any_keyword: bool


class Source:
    def __init__(self, *folders: Path) -> None:
        """`folders`: as on sys.path; where several hold a module the first one counts."""
        self._folders = folders
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name.replace(".", "/"))
        return self._modules[name]

    def _read(self, path: str) -> ast.Module | None:
        for folder in self._folders:
            for file in (
                f"{path}.py",
                f"{path}/__init__.py",
                f"{path}.pyi",
                f"{path}/__init__.pyi",
            ):
                if (folder / file).is_file():
                    return ast.parse((folder / file).read_text(encoding="utf-8"))
        return None

    def find(self, name: str, seen: frozenset[str] = frozenset()) -> Found | None:
        """A module, or what is in it: `package.module.Class.member`. Imports and base classes are
        followed."""
        if name in seen:  # two modules that import each other
            return None
        pieces = name.split(".")
        for cut in range(len(pieces), 0, -1):
            module = ".".join(pieces[:cut])
            if (tree := self.module(module)) is not None:
                result: Found | None = Found(tree, module)
                for piece in pieces[cut:]:
                    result = (
                        self._member(result, piece, seen | {name}) if result is not None else None
                    )
                return result
        return None

    def _member(self, of: Found, name: str, seen: frozenset[str]) -> Found | None:
        if isinstance(of.node, ast.Module):
            return self._of_module(of, name, seen)
        if isinstance(of.node, ast.ClassDef):
            for item in self.lineage(of, seen):
                assert isinstance(item.node, ast.ClassDef)
                for statement in _statements(item.node):
                    if _definition(statement, name):
                        return Found(statement, item.module, item.node)
                for node in ast.walk(item.node):
                    if _gives_to_self(node, name):
                        return Found(node, item.module, item.node)
        return None

    def _of_module(self, of: Found, name: str, seen: frozenset[str]) -> Found | None:
        stars = []
        for statement in _statements(of.node):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                base = self._imported_from(of.module, statement)
                for alias in statement.names:
                    if alias.name == "*":
                        stars.append(f"{base}.{name}")
                    elif (alias.asname or alias.name) == name:
                        result = self.find(f"{base}.{alias.name}" if base else alias.name, seen)
                        if result is not None:
                            return result
            elif _definition(statement, name):
                return Found(statement, of.module)
        return next(
            (result for star in stars if (result := self.find(star, seen)) is not None), None
        )

    def _imported_from(self, module: str, statement: ast.Import | ast.ImportFrom) -> str:
        if isinstance(statement, ast.Import) or not statement.level:
            return getattr(statement, "module", None) or ""
        package = module.split(".")
        is_package = any(
            (folder / "/".join(package) / "__init__.py").is_file() for folder in self._folders
        )
        above = package[: len(package) - statement.level + is_package]
        return ".".join([*above, *filter(None, [statement.module])])

    def lineage(self, of: Found, seen: frozenset[str] = frozenset()) -> Iterator[Found]:
        """A class and those that it inherits from, nearest first; what is not in these folders is
        left out."""
        assert isinstance(of.node, ast.ClassDef)
        yield of
        for base in of.node.bases:
            dotted = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            key = f"{of.module}.{dotted}"
            above = self.find(key, seen) if key not in seen else None
            if (
                above is not None
                and isinstance(above.node, ast.ClassDef)
                and above.node is not of.node
            ):
                yield from self.lineage(above, seen | {key})

    def parameters(self, of: Found) -> Parameters | None:
        """What a function takes, or the making of a class; without `self`. None where that cannot
        be told."""
        if isinstance(of.node, ast.ClassDef):
            init = self._member(of, "__init__", frozenset())
            return self.parameters(init) if init is not None else self._of_fields(of)
        if not isinstance(of.node, _Def):
            return None
        inputs = of.node.args
        names = [argument.arg for argument in [*inputs.posonlyargs, *inputs.args]]
        with_default = set(names[len(names) - len(inputs.defaults) :])
        is_bound = of.owner is not None and "staticmethod" not in map(
            ast.unparse, of.node.decorator_list
        )
        names = names[1:] if is_bound else names
        only = [argument.arg for argument in inputs.kwonlyargs]
        with_default |= {
            name for name, value in zip(only, inputs.kw_defaults, strict=True) if value is not None
        }
        required = {*names, *only} - with_default
        return Parameters(
            names, only, required, inputs.vararg is not None, inputs.kwarg is not None
        )

    def _of_fields(self, of: Found) -> Parameters | None:
        """Of a dataclass, a msgspec.Struct or a TypedDict: its annotated names, those of base
        classes first."""
        fields: dict[str, bool] = {}
        for item in reversed(list(self.lineage(of))):
            assert isinstance(item.node, ast.ClassDef)
            for statement in item.node.body:
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in (
                    kind := ast.unparse(statement.annotation)
                ):
                    has_default = statement.value is not None or "NotRequired" in kind
                    fields[ast.unparse(statement.target)] = has_default
        required = {name for name, has_default in fields.items() if not has_default}
        return Parameters(list(fields), [], required, False, False) if fields else None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module or class body, also under `if`, `try` and `with`."""
    for branch in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(tree, branch, []):
            if isinstance(statement, ast.ExceptHandler):
                yield from _statements(statement)
                continue
            yield statement
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(statement)


def _definition(statement: ast.stmt, name: str) -> bool:
    """Whether a statement of a module or class body makes this name."""
    if isinstance(statement, ast.ClassDef | _Def):
        return statement.name == name
    return any(isinstance(target, ast.Name) and target.id == name for target in _targets(statement))


def _gives_to_self(statement: ast.AST, name: str) -> bool:
    """Whether a statement in a method gives its object this attribute, or registers it with the
    layer it serves."""
    if isinstance(statement, ast.Call):  # layer.register_parameter("weight", weight)
        registers = ast.unparse(statement.func).endswith(
            (".register_parameter", ".register_buffer")
        )
        return (
            registers and bool(statement.args) and getattr(statement.args[0], "value", None) == name
        )
    owners = ("self", "layer", "self.model")
    return any(
        isinstance(target, ast.Attribute)
        and target.attr == name
        and ast.unparse(target.value) in owners
        for target in _targets(statement)
    )


def _targets(statement: ast.AST) -> Iterator[ast.expr]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]
