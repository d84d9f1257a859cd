"""The rules of the house, as checks over a tree of the package. A breach is one line: file, line,
rule.

A check takes the folder of the package, so that tests can plant a breach in a copy and see it
found. What ruff can check stands in pyproject.toml: columns (E501) and parameters of a function
(PLR0913).
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Imports run one way: a room imports rooms that stand before it here. A tuple: neither may import
# the other.
ORDER: tuple[str | tuple[str, ...], ...] = (
    "config",
    "files",
    "records",
    "distributed",
    "data",
    ("model", "rewards"),
    "learn",
    "proofs",
    "observe",
    "engine",
    "episodes",
    "rollout",
    "checkpoint",
    "diagnosis",
    "checks",
    "signals",
    "parts",
    "loop",
    ("train", "demo"),
    "tools",
    ("cli", "api"),
)
# Tokens of each room (names, operators, numbers, strings; no comments, docstrings or blank space,
# so that no way of
# formatting changes the count), with some room for what comes. A new room brings its own number.
ROOM_TOKENS = {
    "config": 13_260,
    "files": 1_760,
    "records": 1_890,
    "distributed": 15_300,
    "data": 9_020,
    "rewards": 28_660,
    "model": 28_360,
    "learn": 19_490,
    "proofs": 19_690,
    "observe": 20_450,
    "engine": 21_310,
    "episodes": 24_050,
    "rollout": 9_820,
    "checkpoint": 9_990,
    "diagnosis": 10_740,
    "checks": 18_460,
    "signals": 13_990,
    "parts": 4_140,
    "loop": 780,
    "train": 580,
    "demo": 5_430,
    "tools": 59_040,
    "cli": 840,
    "api": 1_170,
}
MOST_FILES = 204
MOST_NAMES_AT_TOP = 24
MOST_VAGUE_PERCENT = 1.0
MOST_LATE_IMPORTS = 25
# Names that say nothing about the value. As names of local variables and parameters they may be 1 %
# of a room's.
_VAGUE_WORDS = """own found said told given held asked begun kept left taken made shown what which where why how one
other others place many places came talks whole beside due known there here it this those mine yours apart alike wrong
right least most longest first last before after ahead behind now then since until whose part parts share each"""  # noqa: E501
VAGUE_NAMES = frozenset(_VAGUE_WORDS.split())
# Rooms that may know the whole Config. Every other room gets its section, or the value.
KNOW_CONFIG = ("config", "checks", "signals", "parts", "loop", "train", "tools", "api")
_COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
]
_COLLECTIVES_FILE = "distributed/collectives.py"


def rooms(package: Path) -> list[str]:
    """Files and folders at the top of the package, as the README's map writes them."""
    top = sorted(package.iterdir())
    return [f"{path.name}/" if path.is_dir() else path.name for path in top if _is_room(path)]


def _is_room(path: Path) -> bool:
    return (path / "__init__.py").exists() or (path.suffix == ".py" and path.name != "__init__.py")


def _modules(package: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """Relative path, text and tree of each module."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(package).as_posix(), text, _tree(text)


@functools.cache
def _tree(text: str) -> ast.Module:
    """Nobody changes it: most files are alike in the package and in its copies."""
    return ast.parse(text)


def _room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """(line, module, names) of every import, also of those in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module, [alias.name for alias in node.names]


def upward_imports(package: Path) -> Iterator[str]:
    """Imports of a room that does not stand below the importing one."""
    level = {
        room: i
        for i, rooms in enumerate(ORDER)
        for room in ((rooms,) if isinstance(rooms, str) else rooms)
    }
    for name, _, tree in _modules(package):
        room = _room_of(name)
        if room == "__init__":
            continue
        if room not in level:
            yield f"{name}:1: the room {room} has no place in the order of imports"
            continue
        for line, module, names in _imports(tree):
            pieces = module.split(".")
            if pieces[0] != "grpo_spmd":
                continue
            for second in pieces[1:2] or names:
                if second != room and level.get(second, -1) >= level[room]:
                    yield f"{name}:{line}: {room} imports {second}, which does not stand below it"


def vllm_outside_the_engine(package: Path) -> Iterator[str]:
    for name, _, tree in _modules(package):
        for line, module, _ in _imports(tree):
            if module.split(".")[0] == "vllm" and _room_of(name) != "engine":
                yield f"{name}:{line}: imports vllm, which engine/ alone may"


def scattered_collectives(package: Path) -> Iterator[str]:
    """Collectives of torch.distributed outside the one file, and functions there that do not say
    "Collective."."""
    for name, text, tree in _modules(package):
        if name != _COLLECTIVES_FILE:
            for node in ast.walk(tree):
                is_call = (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "dist"
                )
                if is_call and node.attr in _COLLECTIVES:  # type: ignore[attr-defined]
                    yield (f"{name}:{node.lineno}: a collective outside {_COLLECTIVES_FILE}")  # type: ignore[attr-defined]
            for line, module, names in _imports(tree):
                if module == "torch.distributed" and set(names) & set(_COLLECTIVES):
                    yield f"{name}:{line}: a collective outside {_COLLECTIVES_FILE}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                body = ast.get_source_segment(text, node) or ""
                communicates = (
                    any(f"dist.{call}(" in body for call in _COLLECTIVES) or "_ALL_GATHER(" in body
                )
                if communicates and not (ast.get_docstring(node) or "").startswith(
                    ("Collective.", "Collective over ")
                ):
                    yield (
                        f"{name}:{node.lineno}: {node.name} communicates, so its docstring "
                        "begins with Collective"
                    )


def known_config(package: Path) -> Iterator[str]:
    """The whole Config below the rooms that may know it, and the Run below the loop."""
    for name, _, tree in _modules(package):
        for line, module, names in _imports(tree):
            if (
                module == "grpo_spmd.config.schema"
                and "Config" in names
                and _room_of(name) not in KNOW_CONFIG
            ):
                yield f"{name}:{line}: knows the whole Config; pass its section, or the value"
            if module == "grpo_spmd.parts" and "Run" in names and _room_of(name) != "loop":
                yield f"{name}:{line}: knows the Run, which is for loop.py alone"


# Functions and messages of the caller's own process, for the child that it starts, through memory
# or a socket that only that child inherits.
_OWN_PICKLES = ("rewards/named.py", "cloudpickle")
# Where a process packs messages for its child, and where that child unpacks them.
_PACKERS = ("checks/trials.py", "rewards/pool/pool.py", "rewards/pool/processes.py")
_UNPACKERS = ("rewards/pool/nursery.py", "rewards/pool/worker.py")


def code_of_others(tree_of: Path) -> Iterator[str]:
    """What may run code from a model's or a checkpoint's folder: loaders of transformers and vLLM
    that are not told
    trust_remote_code=False (left out, transformers asks on stdin), and pickle."""
    for name, _, tree in _modules(tree_of):
        report: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords = {
                    keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
                }
                if keywords.get("trust_remote_code") is False:
                    report |= {
                        node.func,
                        *node.args,
                    }  # functools.partial(LLM, trust_remote_code=False)
                if (
                    ast.unparse(node.func) == "torch.load"
                    and keywords.get("weights_only") is not True
                ):
                    yield f"{name}:{node.lineno}: torch.load without weights_only=True unpickles"
        for node in ast.walk(tree):
            is_loader = _called(node) in ("from_pretrained", "from_config", "LLM")
            if is_loader and node not in report and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                yield (f"{name}:{node.lineno}: {ast.unparse(node)} without trust_remote_code=False")  # type: ignore[attr-defined]
        for line, module, names in _imports(tree):
            if module == "grpo_spmd.rewards.named":
                for function, places in (("pack", _PACKERS), ("unpack", _UNPACKERS)):
                    if function in names and name not in places:
                        yield f"{name}:{line}: imports {function}, which is cloudpickle's"
            is_own = (name, module) == _OWN_PICKLES
            if not is_own and module.split(".")[0] in (
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "shelve",
            ):
                yield f"{name}:{line}: imports {module}, whose files are programs"


def _called(node: ast.AST) -> str:
    """Of an attribute or a name its last part: also where it is not called here but kept for
    later."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def foreign_attributes(package: Path) -> Iterator[str]:
    """Assignments to an attribute of an object of one of our classes, made outside the class's own
    module.

    Fields of records are meant to be filled (MicroBatch), and nobody can write a frozen one; a
    part's state is its own.
    """
    owners: dict[str, set[str]] = {}  # attribute to the modules whose classes have it
    record_fields = {
        node.target.id
        for name, _, tree in _modules(package)
        if _room_of(name) == "records"
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for name, _, tree in _modules(package):
        if _room_of(name) in ("records", "config", "parts"):  # the Run is a bundle of parts
            continue
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                for target in _targets(node):
                    if isinstance(target, ast.Attribute) and _is_name(target.value, "self"):
                        owners.setdefault(target.attr, set()).add(name)
            is_frozen = any(
                "frozen=True" in ast.unparse(node) for node in (*cls.decorator_list, *cls.keywords)
            )
            for field in () if is_frozen else cls.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    owners.setdefault(field.target.id, set()).add(name)
    for name, _, tree in _modules(package):
        for node in ast.walk(tree):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and not _is_name(target.value, "self", "ctx"):
                    homes = owners.get(target.attr, set())
                    is_exempt = target.attr in record_fields or _is_name(target.value, "sys")
                    if homes and name not in homes and not is_exempt:
                        owner = sorted(homes)[0]
                        yield (
                            f"{name}:{target.lineno}: writes {ast.unparse(target)}, which "
                            f"belongs to {owner}"
                        )


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    result = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        result = [node.target]
    for target in result:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def import_circles(package: Path) -> Iterator[str]:
    """Modules that can reach themselves by imports, late ones included."""
    modules = {_dotted(name) for name, _, _ in _modules(package)}
    edges: dict[str, set[str]] = {}
    for name, _, tree in _modules(package):
        for_types = _nodes_for_types(tree)
        targets = set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= (submodules & modules) or ({node.module} & modules)
        edges[_dotted(name)] = targets - {_dotted(name)}
    for module in sorted(edges):
        if module in _reachable(module, edges):
            yield f"{module}: stands in a circle of imports"


def _dotted(name: str) -> str:
    return "grpo_spmd." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _nodes_for_types(tree: ast.Module) -> set[ast.AST]:
    """Everything below `if TYPE_CHECKING:`, which never runs."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {node for block in blocks for node in ast.walk(block)}


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    visited, waiting = set[str](), list(edges[start])
    while waiting:
        module = waiting.pop()
        if module not in visited:
            visited.add(module)
            waiting += edges.get(module, ())
    return visited


def late_imports(package: Path) -> Iterator[str]:
    """Own modules imported inside functions, where they are more than it takes to stay in front of
    torch."""
    positions = []
    for name, _, tree in _modules(package):
        for function in _functions(tree):
            for line, module, _ in _imports(function):
                if module.split(".")[0] == "grpo_spmd":
                    positions.append(f"{name}:{line}: imports {module} inside a function")
    if len(set(positions)) > MOST_LATE_IMPORTS:
        yield from sorted(set(positions))


def oversize(package: Path) -> Iterator[str]:
    """Rooms of too many tokens, too many files, too many names at the top."""
    tokens = dict.fromkeys(ROOM_TOKENS, 0)
    num_files = 0
    for name, text, _ in _modules(package):
        num_files += 1
        room = _room_of(name)
        if room in tokens:
            tokens[room] += count_tokens(text)
        elif room != "__init__":
            yield f"{name}:1: the room {room} has no number of tokens in ROOM_TOKENS"
    for room, count in tokens.items():
        if count > ROOM_TOKENS[room]:
            yield f"{room}: {count} tokens, and {ROOM_TOKENS[room]} are the most"
    if num_files > MOST_FILES:
        yield f"{num_files} files, and {MOST_FILES} are the most"
    if len(rooms(package)) > MOST_NAMES_AT_TOP:
        yield f"{len(rooms(package))} names at the top, and {MOST_NAMES_AT_TOP} are the most"


_NO_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@functools.cache
def count_tokens(text: str) -> int:
    """Number of tokens of a module, without comments, docstrings and blank space."""
    count, at_line_start = 0, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _NO_TOKENS:
            ends_line = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            at_line_start = at_line_start or ends_line
        elif (
            token.type == tokenize.STRING and at_line_start
        ):  # a docstring, or the text below a field
            at_line_start = False
        else:
            count, at_line_start = count + 1, False
    return count


def vague_names(package: Path) -> Iterator[str]:
    """Rooms where more than 1 % of the local names say nothing (VAGUE_NAMES, or of_ in front)."""
    num_names: dict[str, int] = {}
    vague: dict[str, list[str]] = {}
    for name, _, tree in _modules(package):
        room = _room_of(name)
        for function in _functions(tree):
            names = _local_names(function)
            num_names[room] = num_names.get(room, 0) + len(names)
            for word in sorted(names):
                if word in VAGUE_NAMES or word.startswith("of_"):
                    position = f"{name}:{function.lineno}: {function.name} calls a local {word!r}"
                    vague.setdefault(room, []).append(position)
    for room, positions in vague.items():
        if len(positions) > max(1, num_names[room] * MOST_VAGUE_PERCENT / 100):
            yield from positions


def packed_tuples(package: Path) -> Iterator[str]:
    """Tuples that are assigned to a name only to be splatted into a call."""
    for name, _, tree in _modules(package):
        for function in _functions(tree):
            tuples = _names_of_tuples(function)
            for node in ast.walk(function):
                for argument in node.args if isinstance(node, ast.Call) else ():
                    if isinstance(argument, ast.Starred) and _is_name(argument.value, *tuples):
                        yield f"{name}:{argument.lineno}: {ast.unparse(argument)} is a packed tuple"


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    names = {argument.arg for argument in arguments}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _names_of_tuples(function: ast.AST) -> set[str]:
    """Names that are assigned a tuple written out, alone or in an assignment of several."""
    names = set[str]()
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]  # type: ignore[attr-defined]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # type: ignore[attr-defined]
                pairs = list(zip(target.elts, node.value.elts, strict=False))  # type: ignore[attr-defined]
            for to, value in pairs:
                if isinstance(to, ast.Name) and isinstance(value, ast.Tuple):
                    names.add(to.id)
    return names


def undescribed_rooms(package: Path) -> Iterator[str]:
    """A folder's __init__ says in two to six lines what lives there, what may not and what
    it may import. No code."""
    for path in sorted(package.rglob("__init__.py")):
        name = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = (ast.get_docstring(tree) or "").splitlines()
        if name != "__init__.py" and (
            not 2 <= len([line for line in lines if line]) <= 6 or len(tree.body) != 1
        ):
            yield f"{name}:1: must be two to six lines of docstring and nothing else"


def map_differences(package: Path, readme: str) -> Iterator[str]:
    """The table of rooms in grpo_spmd/README.md beside the tree."""
    named = set(re.findall(r"^\| `([\w.]+/?)` \|", readme, re.MULTILINE))
    yield from (
        f"README.md: names {room}, which is not there"
        for room in sorted(named - set(rooms(package)))
    )
    yield from (f"README.md: does not name {room}" for room in sorted(set(rooms(package)) - named))


CHECKS = (
    upward_imports,
    vllm_outside_the_engine,
    scattered_collectives,
    known_config,
    code_of_others,
    foreign_attributes,
    oversize,
    import_circles,
    late_imports,
    vague_names,
    packed_tuples,
    undescribed_rooms,
)
