"""Reads the settings of other trainers' scripts: Python by its syntax tree, shell by its words.

A script is text of somebody else. Nothing in it is run, imported or expanded by a shell, and what
is read of it has a bound.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_spmd.config.coerce import find_alias
from grpo_spmd.config.describe import flat
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import YAML_ERRORS, StrictLoader, read_tree
from grpo_spmd.files import open_regular
from grpo_spmd.rewards.verifiers import evaluate

# shlex copies a word for each of its characters.
_MAX_BYTES = 1 << 17
_MAX_CHARS = 1 << 20  # of all variables where they are used
_MAX_STEPS = 1000  # from name to name
# Their values are names of functions and classes.
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func")
_CALLS = ("GRPOConfig", "RLOOConfig", "GRPOTrainer", "RLOOTrainer", "LoraConfig")
# Arguments of GRPOTrainer whose parts are read where they are made.
_MADE_ELSEWHERE = ("args", "processing_class", "peft_config")
# Calls that stand for their argument.
_TRANSPARENT_CALLS = ("str", "int", "float", "Path", "from_pretrained")


class Unreadable(NamedTuple):
    """Stands for a value that only running the script would tell."""

    text: str


class Script(NamedTuple):
    """What a script sets."""

    trainer: str  # as in aliases.tsv
    settings: dict[str, Any]  # by their names
    defaults: dict[str, Any]  # what its launcher and its classes set if it does not


def read_script(path: Path, words: Sequence[str]) -> Script:
    """Returns what a script sets, where `words` are its own command line.

    Raises ConfigError for a file that cannot be read or starts no trainer that is known.
    """
    try:
        with open_regular(path, follow=True) as file:
            text = file.read(_MAX_BYTES + 1).decode("utf-8")
        if len(text) > _MAX_BYTES:
            raise ConfigError(f"it is larger than {_MAX_BYTES >> 10} KiB, as no script is")
        if path.suffix in (".yaml", ".yml"):
            tree = read_tree(path)[0]
            is_verl = "actor_rollout_ref" in tree
            settings = flat(tree) if is_verl else {str(name): tree[name] for name in tree}
            return Script("verl" if is_verl else "TRL", settings | _settings(words), {})
        return _read_python(text, words) if path.suffix == ".py" else _read_shell(text, words)
    # ValueError: ConfigError, bytes that are no text, and what ast and shlex cannot read.
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it is nested too deeply"
        raise ConfigError(f"{path}: {reason.removeprefix(f'{path}: ')}") from None


def _read_python(text: str, words: Sequence[str]) -> Script:
    nodes = list(ast.walk(ast.parse(text)))
    module = _Module(nodes, _settings(words))
    settings: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for node in nodes:
        match node:
            case ast.Call(func=func, keywords=keywords) if _name(func) in _CALLS:
                # peft's defaults are not those of TRL's flags.
                if _name(func) == "LoraConfig":
                    defaults |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
                if _name(func) == "RLOOConfig":
                    defaults |= {"estimator": "rloo", "beta": 0.05, "num_generations": 2}
                for keyword in keywords:
                    name = "lora.r" if keyword.arg == "r" else str(keyword.arg)
                    if name not in _MADE_ELSEWHERE:
                        settings[name] = module.value(name, keyword.value)
            # training_args.beta = 0.1, and not self.max_steps of an environment
            case ast.Assign(targets=[ast.Attribute(value=owner, attr=name)], value=value):
                if find_alias("TRL", name) and _name(owner) not in ("self", ""):
                    settings[name] = module.value(name, value)
    if not re.search("(GRPO|RLOO)(Config|Trainer)", text) or not settings:
        raise ConfigError("neither GRPOConfig(...) nor GRPOTrainer(...) is called in it")
    # TRL's own parser makes the config of the command line.
    if re.search("TrlParser|HfArgumentParser", text):
        settings = module.arguments | settings
    return Script("TRL", settings, defaults)


def _name(node: ast.expr) -> str:
    """Returns the last part of a dotted name; "" for another expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


class _Module:
    """The assignments of a Python script, and the arguments of its command line."""

    def __init__(self, nodes: Sequence[ast.AST], arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self._variables: dict[str, list[ast.expr]] = {}
        self._num_steps = 0
        for node in nodes:
            match node:
                case ast.Assign(targets=[target], value=value):
                    for element in target.elts if isinstance(target, ast.Tuple) else [target]:
                        self._variables.setdefault(_name(element), []).append(value)
        for node in nodes:
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=flag), *_]
                ):
                    name = str(flag).lstrip("-").replace("-", "_")
                    for keyword in node.keywords:
                        if keyword.arg == "default":
                            arguments.setdefault(name, self.value(name, keyword.value))

    def value(self, name: str, node: ast.expr) -> Any:
        """Returns the plain value of setting `name`, or an Unreadable."""
        try:
            if name in _FUNCTIONS:
                assigned = self._variables.get(_name(node), [node])[0]
                return re.findall(r"[\w.]+(?:\(.*\))?|'[^']*'", ast.unparse(assigned))
            if name.endswith("_dataset"):
                return self._source(node, int(name == "eval_dataset"))
            return self._plain(node)
        except (*YAML_ERRORS, SyntaxError):
            return Unreadable(ast.unparse(node)[:200])

    def _plain(self, node: ast.expr) -> Any:
        self._num_steps += 1
        # Names of names of names may double their number each time.
        if self._num_steps > _MAX_STEPS:
            raise LookupError
        match node:
            # A name with two values may have either.
            case ast.Name(id=name) if len(self._variables[name]) == 1:
                return self._plain(self._variables[name][0])
            case ast.Attribute(attr=name) if not isinstance(self.arguments[name], Unreadable):
                return self.arguments[name]
            case ast.Call(func=func, args=[argument, *_]) if _name(func) in _TRANSPARENT_CALLS:
                return self._plain(argument)
            case ast.BoolOp(op=ast.Or(), values=[value, alternative]):
                return self._plain(value) or self._plain(alternative)
            case ast.BinOp():
                return int(evaluate(ast.unparse(node)))
        return ast.literal_eval(node)

    def _source(self, node: ast.expr, index: int) -> Any:
        """Returns the hub:REPO:SUBSET:SPLIT that a data set was loaded from."""
        for _ in range(_MAX_STEPS):
            for inner in ast.walk(node):
                match inner:
                    case ast.Call(func=func, args=parts) if _name(func) == "load_dataset":
                        repo, *subset = map(self._plain, parts)
                        splits = [k.value for k in inner.keywords if k.arg == "split"]
                        split = self._plain(splits[0]) if splits else "train"
                        split = split[index] if isinstance(split, list) else split
                        return f"hub:{repo}:{''.join(subset)}:{split}"
            if isinstance(node, ast.Constant):
                return node.value
            # A mapped data set is that of its oldest assignment, with other columns.
            names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
            node = self._variables[names[0]][0]
        raise LookupError


def _read_shell(text: str, words: Sequence[str]) -> Script:
    for command in _commands(text):
        for index, word in enumerate(command):
            is_verl = re.search(r"(^|[./])main_\w+(\.py)?$", word)
            is_trl = word.endswith(".py") or word in ("grpo", "rloo")
            # Only then, as a line may have thousands of words.
            has_flags = " ".join(command[index + 1 : index + 2]).startswith("-")
            if is_verl or "openrlhf.cli.train_ppo" in word or (is_trl and has_flags):
                settings = _settings([*command[index + 1 :], *words])
                launcher = _settings(command[:index])
                ranks = launcher.get("num_processes", launcher.get("nproc_per_node"))
                trainer = "verl" if is_verl else "TRL" if is_trl else "OpenRLHF"
                return Script(trainer, settings, {"ranks": ranks} if ranks else {})
    raise ConfigError(
        "no command in it starts verl (main_ppo), OpenRLHF (openrlhf.cli.train_ppo_ray) or TRL "
        "(trl grpo, or a .py file with flags)"
    )


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command, with the values of variables; unknown ones keep their `$`.

    Raises ValueError for a quote without an end.
    """
    text = re.sub(r"(?m)^[ \t]*#.*\n?|(?<=\s)#.*$", "", text).replace("\\\n", " ")
    # An array is a text of its words, and arithmetic is one word.
    text = re.sub(r"=\(([^()]*)\)", lambda match: f"={shlex.quote(match[1])}", text)
    text = re.sub(r"\$\(\([^()\n]*\)\)", lambda match: match[0].replace(" ", ""), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    variables = {"HOME": "~"}
    command: list[str] = []
    num_chars = 0

    def put_in(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    def compute(match: re.Match[str]) -> str:
        return str(evaluate(re.sub(r"[A-Za-z_]\w*", lambda name: variables[name[0]], match[1])))

    for word in [*lexer, "\n"]:
        if not word.strip(";&|\n"):
            yield command
            command = []
            continue
        value = re.sub(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$(\w+)", put_in, word)
        num_chars += len(value)
        if num_chars > _MAX_CHARS:
            raise ConfigError(f"its variables make more than {_MAX_CHARS >> 20} MiB")
        with suppress(*YAML_ERRORS, SyntaxError):
            value = re.sub(r"\$\(\((.*?)\)\)", compute, value)
        assignment = re.fullmatch(r"(\w+)=(.*)", value, re.DOTALL)
        if assignment and command in ([], ["export"]):
            variables[assignment[1]] = assignment[2]
            command = []
        # A word that is a variable alone may hold several words; $@ is the caller's.
        elif word.startswith("$"):
            command += shlex.split(value.replace("$@", "").replace("$*", ""))
        else:
            command.append(value)


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Returns argparse's options (--a 1, --a=1, --a 1 2, --a) and Hydra's overrides (a=1)."""
    values: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        option = re.fullmatch(r"(-*)\+*([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if option and (option[1] or option[3] is not None):
            name = option[2].replace("-", "_")
            values[name] = [] if option[3] is None else [_plain_value(option[3])]
        elif name:
            values[name].append(_plain_value(word.rstrip(",")))
    return {
        name: items if len(items) > 1 else items[0] if items else True
        for name, items in values.items()
    }


def _plain_value(text: str) -> Any:
    """Returns the number, truth value, list or text that a word is, or an Unreadable."""
    if "$" in text:
        return Unreadable(text)
    # YAML reads 1e-6 as text, and no as a truth value.
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", text, re.IGNORECASE):
        return float(text) if re.search("[.eE]", text) else int(text)
    try:
        is_yaml = re.match(r"[\[{]|(?i:true|false|none|null)$", text)
        return yaml.load(text, Loader=StrictLoader) if is_yaml else text
    except YAML_ERRORS:
        return text
