"""The rules of the house, as checks over a tree of the package. A breach is one line: file, line, rule.

A check takes the folder of the package, so that tests can plant a breach in a copy and see it found.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# Imports run one way: a room imports rooms that stand before it here. A tuple: neither may import the other.
ORDER: tuple[str | tuple[str, ...], ...] = (
    "config",
    "untrusted",
    ("records", "files"),
    "distributed",
    "data",
    ("model", "rewards"),
    "learn",
    "proofs",
    "observe",
    "engine",
    "rollout",
    "checkpoint",
    "preflight",
    "plan",
    "report",
    "signal_parts",
    "parts",
    "loop",
    ("train", "replay", "export", "demo", "small", "prefetch", "show", "checkup"),
    ("cli", "api"),
)
# Lines of each room, blank ones and comments counted. A new capability brings a room and a budget of its own.
TRAINER = {
    "config": 775,
    "data": 280,
    "records": 305,
    "rewards/protocol.py": 230,
    "rewards/verifiers.py": 250,
    "rewards/verifiers.py": 40,
    "model": 960,
    "learn": 990,
    "engine": 1350,
    "rollout": 535,
    "parts": 310,
    "loop": 85,
    "train": 94,
}
OPERATIONS = {
    "distributed": 1090,
    "observe": 875,
    "checkpoint": 1090,
    "preflight": 800,
    "replay": 620,
    "rewards/pool": 795,
    "rewards/sandbox": 650,
    "files": 70,
}
EXAMPLES = {"small": 140, "demo": 200}
# What the trials of the first month brought: families of models, running proofs, TRL's rewards, hostile folders.
ARMOUR = {
    "proofs": 2290,
    "model/families": 705,
    "rewards/trl.py": 200,
    "untrusted": 222,
    "distributed/exit.py": 135,
}
# What shows before a GPU is there that it will run there, and what else only GPUs and several hosts need.
EVIDENCE = {
    "plan": 1330,
    "observe/cards.py": 85,
    "distributed/machine.py": 150,
    "engine/start.py": 95,
    "engine/start.py": 60,
    "model/offload.py": 50,
}
# What makes it kind at the terminal: names that people bring, ways in, what is shown while it runs.
KINDNESS = {
    "config/aliases.py": 440,  # one a line: parts of this are made side by side
    "config/command_line.py": 150,
    "config/describe.py": 85,
    "config/load.py": 85,
    "config/schema.py": 25,
    "config/coerce.py": 135,
    "config/coerce.py": 95,
    "config/load.py": 70,
    "config/load.py": 100,
    "checks/data.py": 185,
    "data/hub.py": 120,
    "checks/engine_keys.py": 110,
    "checks/engine_keys.py": 85,
    "data/rows.py": 110,
    "rewards/named.py": 155,
    "checks/model_folder.py": 290,
    "checks/model_folder.py": 80,
    "engine/cache_room.py": 65,
    "observe/console.py": 190,
    "model/schedule.py": 70,
    "model/optimizer.py": 35,
    "export": 70,
    "checkpoint/merge.py": 145,
    "model/hf_files.py": 45,
    "prefetch": 150,
    "cli": 170,
    "checkpoint/run_dir.py": 55,
    "distributed/startup.py": 75,
    "distributed/interrupt.py": 145,
    "distributed/processes.py": 55,
    "distributed/launch.py": 115,
    "config/describe.py": 65,
    "learn/sampled_step.py": 105,
    "observe/columns.py": 50,
    "observe/launches.py": 225,
    "observe/progress.py": 60,
    "observe/rollout_reader.py": 90,
    "observe/rollout_reader.py": 95,
    "api": 190,
    "distributed/embedded_run.py": 130,
    "rewards/named.py": 130,
    "rewards/named.py": 20,
    "engine/leftovers.py": 40,
}
# What keeps it cheap where rollouts, rows and ranks are many.
SCALE = {
    "learn/assemble.py": 100,  # one a line: parts of this are made side by side
    "observe/rollout_reader.py": 75,
    "observe/rollout_writer.py": 180,
    "data/cache.py": 410,
    "data/rows.py": 35,
    "data/rows.py": 180,
    "data/tokens.py": 250,
    "engine/requests.py": 55,
    "rollout/sample.py": 60,
    "distributed/startup.py": 30,
    "config/load.py": 70,
    "distributed/collectives.py": 195,
    "distributed/packed.py": 50,
    "distributed/reductions.py": 190,
    "learn/sampled_step.py": 130,
    "learn/sampled_step.py": 100,
    "learn/balance.py": 185,
    "rewards/trl.py": 70,
    "engine/direct_load.py": 210,
    "engine/gather.py": 210,
    "engine/gather.py": 90,
    "data/prompts.py": 80,
    "rollout/sample.py": 115,
}
# Rollouts of several turns: what they are made of, and the environments that answer.
EPISODES = {
    "config/schema.py": 75,
    "learn/sampled_step.py": 70,
    "learn/advantages.py": 95,
    "rollout/environments": 4200,
    "engine/conversations.py": 105,
    "learn/contexts.py": 85,
    "observe/rollout_reader.py": 140,
    "rollout/buffer.py": 165,
    "tools/replay/episodes.py": 130,
    "rewards/sandbox/cells.py": 80,
    "rewards/sandbox/session.py": 50,
    "demo/__main__.py": 70,
    "demo/making.py": 95,
    "demo/tools.py": 140,
    "demo/stockroom.py": 50,
    "rewards/named.py": 70,
    "rewards/pool/nursery.py": 320,
    "rewards/pool/processes.py": 325,
}
# What shows a run: what it records for it, one page, a terminal, trackers; and whether a machine is fit.
LOOKING = {
    "observe/timeline.py": 165,
    "observe/token_scores.py": 195,
    "observe/tokenizer_file.py": 50,
    "observe/trackers": 600,
    "report": 2650,
    "observe/followers.py": 95,
    "observe/report_process.py": 160,
    "config/schema.py": 65,
    "show": 1700,
    "checkup": 2250,
}
# More teachers than a rule: distillation, reward models, judges and servers, a critic.
SIGNALS = {
    "config/aliases.py": 70,
    "config/recipes.py": 180,
    "config/load.py": 95,
    "learn/signals.py": 110,
    "signal_parts.py": 295,
    "config/schema.py": 110,
    "checks/memory.py": 30,
    "checks/explain.py": 25,
    "checks/reward_models.py": 125,
    "rollout/merge_scores.py": 50,
    "rollout/engine_judge.py": 190,
    "model/offload.py": 110,
    "config/rules.py": 130,
    "rewards/remote": 735,
    "rewards/pool/call_limits.py": 190,
    "rewards/pool/pool.py": 40,
    "rollout/sample.py": 75,
    "config/schema.py": 90,
    "config/rules.py": 50,
    "learn/served_teacher.py": 200,
    "checks/signals.py": 145,
    "proofs/server_check.py": 95,
    "config/rules.py": 40,
    "learn/losses.py": 65,
    "learn/teacher.py": 190,
    "model/divergence.py": 220,
    "checks/signals.py": 145,
    "checks/signals.py": 85,
    "checks/model_folder.py": 80,
    "proofs/teacher_check.py": 150,
    "proofs/made_up_teacher.py": 90,
    "demo/distill.py": 80,
    "tools/replay/update.py": 50,
    "tools/replay/read.py": 55,
    "demo/judge.py": 65,
    "model/reward_model.py": 130,
    "model/reward_model_files.py": 150,
    "rollout/reward_models.py": 140,
    "rollout/reward_models.py": 85,
    "rollout/reward_models.py": 60,
    "checks/reward_models.py": 110,
    "demo/reward_model.py": 130,
    "config/schema.py": 70,
    "learn/advantages.py": 110,
    "learn/critic.py": 240,
    "learn/update.py": 45,
    "model/values.py": 150,
    "learn/policy_critic.py": 65,
    "model/values.py": 85,
    "proofs/made_up_values.py": 165,
}
CARVED_OUT = ARMOUR | EVIDENCE | KINDNESS | SCALE | EPISODES | LOOKING | SIGNALS
TRAINER_LINES, OPERATIONS_LINES = 6000, 6000
MOST_ROOMS = 30
FILE_LINES, FUNCTION_LINES, COLUMNS = 450, 70, 120
# Whoever else wants a value gets its section, or the value.
KNOW_CONFIG = (
    "config",
    "preflight",
    "plan",
    "signal_parts",
    "parts",
    "loop",
    "train",
    "replay",
    "small",
    "api",
    "checkup",
)
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


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
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
            parts = module.split(".")
            if parts[0] != "grpo_spmd":
                continue
            for other in parts[1:2] or names:
                if other != room and level.get(other, -1) >= level[room]:
                    yield f"{name}:{line}: {room} imports {other}, which does not stand below it"


def vllm_outside_the_engine(package: Path) -> Iterator[str]:
    for name, _, tree in _modules(package):
        for line, module, _ in _imports(tree):
            if module.split(".")[0] == "vllm" and _room_of(name) != "engine":
                yield f"{name}:{line}: imports vllm, which engine/ alone may"


def scattered_collectives(package: Path) -> Iterator[str]:
    """Collectives of torch.distributed outside the one file, and functions there that do not say "Collective."."""
    for name, text, tree in _modules(package):
        if name != _COLLECTIVES_FILE:
            for node in ast.walk(tree):
                is_call = (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "dist"
                )
                if is_call and node.attr in _COLLECTIVES:  # type: ignore[attr-defined]
                    yield f"{name}:{node.lineno}: a collective outside {_COLLECTIVES_FILE}"  # type: ignore[attr-defined]
            for line, module, names in _imports(tree):
                if module == "torch.distributed" and set(names) & set(_COLLECTIVES):
                    yield f"{name}:{line}: a collective outside {_COLLECTIVES_FILE}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                body = ast.get_source_segment(text, node) or ""
                talks = (
                    any(f"dist.{call}(" in body for call in _COLLECTIVES) or "_ALL_GATHER(" in body
                )
                if talks and not (ast.get_docstring(node) or "").startswith(
                    ("Collective.", "Collective over ")
                ):
                    yield f"{name}:{node.lineno}: {node.name} communicates, so its docstring begins with Collective"


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


# Functions of the caller's own process, for the child that it starts, through memory that only that child inherits.
_OWN_PICKLES = ("rewards/named.py", "cloudpickle")


def code_of_others(tree_of: Path) -> Iterator[str]:
    """What may run code from a model's or a checkpoint's folder: loaders of transformers and vLLM that are not told
    trust_remote_code=False (left out, transformers asks on stdin), and pickle."""
    for name, _, tree in _modules(tree_of):
        told: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords = {
                    keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
                }
                if keywords.get("trust_remote_code") is False:
                    told |= {
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
            if is_loader and node not in told and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                yield f"{name}:{node.lineno}: {ast.unparse(node)} without trust_remote_code=False"  # type: ignore[attr-defined]
        for line, module, _ in _imports(tree):
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
    """Of an attribute or a name its last part: also where it is not called here but kept for later."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def foreign_attributes(package: Path) -> Iterator[str]:
    """Assignments to an attribute of an object of one of our classes, made outside the class's own module.

    Fields of records are meant to be filled (MicroBatch), and nobody can write a frozen one; a part's state is its own.
    """
    owners: dict[str, set[str]] = {}  # attribute to the modules whose classes have it
    for name, _, tree in _modules(package):
        if _room_of(name) in ("records", "config", "parts"):  # the Run is a bundle of parts
            continue
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                for target in _targets(node):
                    if isinstance(target, ast.Attribute) and _is_name(target.value, "self"):
                        owners.setdefault(target.attr, set()).add(name)
            is_frozen = any(
                "frozen=True" in ast.unparse(decorator) for decorator in cls.decorator_list
            )
            for field in () if is_frozen else cls.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    owners.setdefault(field.target.id, set()).add(name)
    for name, _, tree in _modules(package):
        for node in ast.walk(tree):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and not _is_name(target.value, "self", "ctx"):
                    homes = owners.get(target.attr, set())
                    if homes and name not in homes:
                        owner = sorted(homes)[0]
                        yield f"{name}:{target.lineno}: writes {ast.unparse(target)}, which belongs to {owner}"


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    found = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def oversize(package: Path) -> Iterator[str]:
    """Files, functions, lines and rooms that are too large, and the whole."""
    lines = {name: text.count("\n") for name, text, _ in _modules(package)}
    for name, text, tree in _modules(package):
        if lines[name] > FILE_LINES:
            yield f"{name}:1: {lines[name]} lines, and no file may have more than {FILE_LINES}"
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, and {COLUMNS} are the most"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{name}:{node.lineno}: {node.name} has {length} lines, and {FUNCTION_LINES} are the most"
    counted: set[str] = set()
    for side, budgets, most in (
        ("trainer", TRAINER, TRAINER_LINES),
        ("operations", OPERATIONS, OPERATIONS_LINES),
        ("armour", ARMOUR, sum(ARMOUR.values())),
        ("evidence", EVIDENCE, sum(EVIDENCE.values())),
        ("kindness", KINDNESS, sum(KINDNESS.values())),
        ("scale", SCALE, sum(SCALE.values())),
        ("episodes", EPISODES, sum(EPISODES.values())),
        ("looking", LOOKING, sum(LOOKING.values())),
        ("signals", SIGNALS, sum(SIGNALS.values())),
        ("examples", EXAMPLES, sum(EXAMPLES.values())),
    ):
        total = 0
        for room, budget in budgets.items():
            carves = budgets in (ARMOUR, EVIDENCE, KINDNESS, SCALE, EPISODES, LOOKING, SIGNALS)
            own = {
                name
                for name in lines
                if _is_in(name, room) and (carves or not _in_any(name, CARVED_OUT))
            }
            counted |= own
            length = sum(lines[name] for name in own)
            total += length
            if length > budget:
                yield f"{room}: {length} lines, and its budget is {budget}"
        if total > most:
            yield f"{side}: {total} lines, and its budget is {most}"
    for name in lines.keys() - counted - {"__init__.py", "rewards/__init__.py"}:
        yield f"{name}:1: in no budget; a new room brings one of its own"
    if len(rooms(package)) > MOST_ROOMS:
        yield f"{len(rooms(package))} rooms at the top, and {MOST_ROOMS} are the most"


def _is_in(name: str, room: str) -> bool:
    return name in (room, f"{room}.py") or name.startswith(f"{room}/")


def _in_any(name: str, rooms: Iterable[str]) -> bool:
    return any(_is_in(name, room) for room in rooms)


def undescribed_rooms(package: Path) -> Iterator[str]:
    """A folder's __init__ says in three lines what lives there, what may not and what it may import. No code."""
    for path in sorted(package.rglob("__init__.py")):
        name = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = (ast.get_docstring(tree) or "").splitlines()
        if name != "__init__.py" and (
            len([line for line in said if line]) != 3 or len(tree.body) != 1
        ):
            yield f"{name}:1: must be three lines of docstring and nothing else"


def map_differences(package: Path, readme: str) -> Iterator[str]:
    """The README's table of rooms beside the tree."""
    named = set(re.findall(r"^\| `grpo_spmd/([\w/.]+)` \|", readme, re.MULTILINE))
    yield from (
        f"README.md: names grpo_spmd/{room}, which is not there"
        for room in sorted(named - set(rooms(package)))
    )
    yield from (
        f"README.md: does not name grpo_spmd/{room}" for room in sorted(set(rooms(package)) - named)
    )


CHECKS = (
    upward_imports,
    vllm_outside_the_engine,
    scattered_collectives,
    known_config,
    code_of_others,
    foreign_attributes,
    oversize,
    undescribed_rooms,
)
