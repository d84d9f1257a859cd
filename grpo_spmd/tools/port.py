"""Translates a training script of TRL, verl or OpenRLHF into a config, without running it.

python -m grpo_spmd.port [--ranks N] [--rows N] [--out x.yaml] SCRIPT [ARGUMENTS OF THE SCRIPT ...]

A script is text of somebody else. It is read by its syntax tree (Python) or by its words (shell).
Nothing in it is run, imported or expanded by a shell, and what is read of it has a bound.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_spmd.config.coerce import find_alias, find_remedy, key_names, keys_named, read_table
from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.describe import flat, flatten_config, join_key
from grpo_spmd.config.errors import ConfigError, cut_middle, printable, refuse, say
from grpo_spmd.config.load import (
    YAML_ERRORS,
    StrictLoader,
    apply_override,
    build_config,
    read_tree,
)
from grpo_spmd.config.rules import met_conditions
from grpo_spmd.config.schema import TRACKERS, Config
from grpo_spmd.files import hold_standard_streams, open_regular, show
from grpo_spmd.rewards.verifiers import evaluate

# Bytes of a script. The limit is low because shlex copies a word for each of its characters.
_MAX_BYTES = 1 << 17
_MAX_CHARS = 1 << 20  # of all words of a shell script, with the values of its variables put in
_MAX_STEPS = 1000  # from a name to its assigned expression, since names may refer to each other
# Arguments of GRPOTrainer whose values are names of functions and classes.
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func")
_CALLS = ("GRPOConfig", "RLOOConfig", "GRPOTrainer", "RLOOTrainer", "LoraConfig")
# Arguments of GRPOTrainer that are objects and no settings. GRPOConfig(...) and LoraConfig(...) are
# read as calls of their own.
_MADE_ELSEWHERE = ("args", "processing_class", "peft_config")
# Calls whose value is taken to be that of their first argument.
_TRANSPARENT_CALLS = ("str", "int", "float", "Path", "from_pretrained")
_NAME = re.compile(r"[a-z_][\w.]*")
_DECIDED, _BY_HAND = "decided here", "by hand"


# The settings of a script


class Unreadable(NamedTuple):
    """Stands for a value that only running the script would tell. `text` is its expression."""

    text: str

    def __str__(self) -> str:
        return self.text


class Script(NamedTuple):
    """The settings of a training script, under the names of its trainer (TRL, verl, OpenRLHF)."""

    trainer: str  # as in aliases.tsv
    settings: dict[str, Any]  # by the trainer's names, such as num_generations
    # Values for names that `settings` lacks: the launcher's number of ranks, and defaults of the
    # classes that the script calls.
    defaults: dict[str, Any]


def read_script(path: Path, words: Sequence[str]) -> Script:
    """Returns the settings of a script (.py, .yaml, or else shell).

    `words` are the command line arguments with which it is called. Raises ConfigError for a file
    that cannot be read or starts no trainer that is known."""
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
    """Returns the settings of a Python script of TRL.

    They are the keyword arguments of the calls in _CALLS, and later assignments to their
    attributes. Raises ConfigError if there are none. The script's command line arguments `words`
    count where the script reads them."""
    nodes = list(ast.walk(ast.parse(text)))
    module = _Module(nodes, _settings(words))
    settings: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for node in nodes:
        match node:
            case ast.Call(func=func, keywords=keywords) if _name(func) in _CALLS:
                # With LoraConfig(...), peft's defaults apply, not those of TRL's flags.
                if _name(func) == "LoraConfig":
                    defaults |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
                if _name(func) == "RLOOConfig":
                    defaults |= {"estimator": "rloo", "beta": 0.05, "num_generations": 2}
                for keyword in keywords:
                    name = "lora.r" if keyword.arg == "r" else str(keyword.arg)
                    if name not in _MADE_ELSEWHERE:
                        settings[name] = module.value(name, keyword.value)
            # Such as training_args.beta = 0.1, but not self.max_steps = 8 in a class.
            case ast.Assign(targets=[ast.Attribute(value=owner, attr=name)], value=value):
                if find_alias("TRL", name) and _name(owner) not in ("self", ""):
                    settings[name] = module.value(name, value)
    if not re.search("(GRPO|RLOO)(Config|Trainer)", text) or not settings:
        raise ConfigError("neither GRPOConfig(...) nor GRPOTrainer(...) is called in it")
    # With TRL's own parser, the arguments of the command line are settings.
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
    """Tells the values of a Python script's expressions, without running it.

    They come from the script's assignments and the arguments of its command line."""

    def __init__(self, nodes: Sequence[ast.AST], arguments: dict[str, Any]) -> None:
        """Collects the assignments in `nodes`, all nodes of the script's syntax tree.

        The defaults of add_argument(...) calls are added to `arguments`."""
        self.arguments = arguments
        # By name, all expressions that are assigned to it, in the order of ast.walk.
        self._variables: dict[str, list[ast.expr]] = {}
        self._num_steps = 0
        for node in nodes:
            match node:
                case ast.Assign(targets=[target], value=value):
                    # Each name of a tuple gets the whole right side, where `_source` looks for
                    # load_dataset.
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
        """Returns the value of the setting `name`, whose expression is `node`.

        It is a plain value, for functions and classes a list of their names, for a data set its
        path or hub source. Returns an Unreadable if only running the script would tell the
        value."""
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
        """Returns the value of an expression that needs no run of the script.

        It may be a literal, a variable that is assigned once, an argument of the command line, or
        arithmetic on whole numbers. Raises one of YAML_ERRORS or SyntaxError for any other
        expression."""
        self._num_steps += 1
        # If each variable uses another one twice, the number of steps doubles with each variable.
        if self._num_steps > _MAX_STEPS:
            raise LookupError
        match node:
            # A name that is assigned twice may have either value, so it is not read.
            case ast.Name(id=name) if len(self._variables[name]) == 1:
                return self._plain(self._variables[name][0])
            # Such as args.beta: any attribute with the name of an argument.
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
        """Returns the source of a data set, hub:REPO:SUBSET:SPLIT, or a text that stands for it.

        `index` is the place in a list of splits: 0 for training, 1 for evaluation. Raises
        LookupError if no load_dataset(...) call is found.
        """
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
            # dataset = dataset.map(...) only changes columns: go on with the first assignment of
            # the first name in the expression.
            names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
            node = self._variables[names[0]][0]
        raise LookupError


def _read_shell(text: str, words: Sequence[str]) -> Script:
    """Returns the settings of the first command of a shell script that starts a known trainer.

    `words` are the script's own command line arguments, which count as the command's last ones.
    Raises ConfigError if no command starts a known trainer."""
    for command in _commands(text):
        for index, word in enumerate(command):
            is_verl = re.search(r"(^|[./])main_\w+(\.py)?$", word)
            is_trl = word.endswith(".py") or word in ("grpo", "rloo")
            # True if the next word is a flag. Only that word is looked at, since a line may have
            # thousands of words.
            has_flags = " ".join(command[index + 1 : index + 2]).startswith("-")
            if is_verl or "openrlhf.cli.train_ppo" in word or (is_trl and has_flags):
                settings = _settings([*command[index + 1 :], *words])
                # The words before the program are the launcher's (accelerate launch, torchrun).
                launcher = _settings(command[:index])
                ranks = launcher.get("num_processes", launcher.get("nproc_per_node"))
                trainer = "verl" if is_verl else "TRL" if is_trl else "OpenRLHF"
                return Script(trainer, settings, {"ranks": ranks} if ranks else {})
    raise ConfigError(
        "no command in it starts verl (main_ppo), OpenRLHF (openrlhf.cli.train_ppo_ray) or TRL "
        "(trl grpo, or a .py file with flags)"
    )


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell script, with the values of variables put in.

    Variables without a known value keep their `$`. Raises ValueError for a quote without an end,
    and ConfigError if the values make the text too large.
    """
    text = re.sub(r"(?m)^[ \t]*#.*\n?|(?<=\s)#.*$", "", text).replace("\\\n", " ")
    # Quote arrays, so that each becomes one text of its words, and make arithmetic one word.
    text = re.sub(r"=\(([^()]*)\)", lambda match: f"={shlex.quote(match[1])}", text)
    text = re.sub(r"\$\(\([^()\n]*\)\)", lambda match: match[0].replace(" ", ""), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    variables = {"HOME": "~"}
    command: list[str] = []
    num_chars = 0

    def put_in(match: re.Match[str]) -> str:
        """Returns the text for $NAME or ${NAME:-DEFAULT}: the value, else DEFAULT, else itself."""
        return variables.get(match[1] or match[3], match[2] or match[0])

    def compute(match: re.Match[str]) -> str:
        """Returns the result of the arithmetic $((...)) as text."""
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
        # A word that begins with a variable may hold several words. The script's arguments ($@) are
        # added by `_read_shell`.
        elif word.startswith("$"):
            command += shlex.split(value.replace("$@", "").replace("$*", ""))
        else:
            command.append(value)


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Returns the settings in the words of a command line, by name.

    The words are options as argparse takes them (--a 1, --a=1, --a 1 2, --a), or Hydra's overrides
    (a=1). An option with several values has a list, and one without a value is True."""
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
    """Returns the number, truth value, list or text that a word of a command line stands for.

    Returns an Unreadable if it has a shell variable without a known value."""
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


# The config that a script stands for


class Entry(NamedTuple):
    """The value of one of our keys.

    With it are a comment that says how it was worked out, and the names of the script's settings on
    which it depends."""

    value: Any
    comment: str
    settings: frozenset[str]


class Port(NamedTuple):
    """A config that our loader accepts, and notes for the user.

    The notes are on settings that are not in it, and on keys that the user has to set."""

    entries: dict[str, Entry]  # by dotted key
    notes: dict[str, str]  # by the script's setting or our key: "TITLE: TEXT"


class _Values(dict[str, Any]):
    """Looks up values by name: a script's settings, its trainer's defaults, and values of our keys.

    The rules in config/port.tsv work these out of the settings. It is a dict without entries, so
    that each look-up calls `__missing__`."""

    def __init__(self, script: Script, options: dict[str, int]) -> None:
        """Reads the rules for the script's trainer.

        `options` are those of this command (ranks, rows)."""
        super().__init__()
        self._defaults = script.defaults | options
        self.used: set[str] = set()  # the script's settings that were looked up
        # By name: the rows of port.tsv, (conditions, formula), of which the first that applies
        # counts.
        self.rules: dict[str, list[list[str]]] = {}
        self._settings = script.settings
        for trainer, name, *rule in read_table("port.tsv"):
            if trainer == script.trainer:
                self.rules.setdefault(name, []).append(rule)

    def __missing__(self, name: str) -> Any:
        """Returns the value of `name`, and adds the script's setting to `used` if it is one.

        A name may be the last part of a setting's dotted name. Without a setting or a default,
        `suffix:NAME` is the suffix of a path, NAME.0 the first item of a list, and any other name
        is worked out by its rules. Raises KeyError with the reason if there is no value.
        """
        for setting, value in self._settings.items():
            # For many settings, -1 means that they are not set.
            if f".{setting}".endswith(f".{name}") and value not in (None, -1):
                self.used.add(setting)
                if isinstance(value, Unreadable):
                    raise KeyError(f"{setting} is no plain value: {value.text}")
                return value
        if name in self._defaults:
            return self._defaults[name]
        if name.startswith("suffix:"):
            return Path(self[name.removeprefix("suffix:")]).suffix
        stem, _, last_part = name.rpartition(".")
        return self[stem][int(last_part)] if last_part.isdecimal() else self.work_out(name)[0]

    def work_out(self, name: str) -> tuple[Any, str]:
        """Returns the value of `name` by its rules, and a text that says how it was worked out.

        Raises KeyError with the reason if no rule applies."""
        error = KeyError(name)
        for conditions, formula in self.rules.get(name, ()):
            try:
                facts = met_conditions(conditions, self) if conditions else formula.lstrip("=")
                if facts:
                    return self._compute(formula, facts)
            except KeyError as missing:
                # A reason (a text with spaces) says more than the name of an absent setting.
                error = error if " " in error.args[0] else missing
        raise error

    def _compute(self, formula: str, facts: str) -> tuple[Any, str]:
        """Returns the value of a formula of port.tsv, and a text that says how it was worked out.

        A formula is a literal behind "=", a name, a text with {NAME}, or arithmetic on names, which
        "ceil" before it rounds up. `facts` is the text for a literal."""
        if formula.startswith("="):
            return yaml.load(formula[1:], Loader=StrictLoader), facts
        if _NAME.fullmatch(formula):
            return self[formula], formula
        text = re.sub(r"\{([\w.]+)\}", lambda match: str(self[match[1]]), formula)
        if text != formula:
            return yaml.load(text, Loader=StrictLoader) if text[0] == "[" else text, formula
        # In exact fractions 0.1 * 30 is 3; in floats it would be a little more.
        text = formula.removeprefix("ceil ")
        number = evaluate(_NAME.sub(lambda name: f"({Fraction(str(float(self[name[0]])))})", text))
        is_whole = number.denominator == 1 or text != formula
        arithmetic = _NAME.sub(lambda name: f"{name[0]} ({self[name[0]]})", text)
        return math.ceil(number) if is_whole else float(number), arithmetic


def translate(script: Script, options: dict[str, int], stem: str) -> Port:
    """Returns the config that a script stands for.

    `options` may have the number of ranks and of rows of the data. `stem` is the script's name, for
    the names of files in the config. A value that our loader refuses is left out and noted.
    """
    their = _Values(script, options)
    keys = key_names(Config)
    file = f"{stem}_functions.py"
    # The keys that every config has to set, with values for a script that does not tell them.
    required = {
        "run_dir": f"runs/{stem}",
        "model.path": "MODEL",
        "data.train": f"{stem}.jsonl",
        "rewards": [{"function": f"{file}:reward"}],
    }
    defaults = flatten_config(build_config(as_tree(required)))
    entries: dict[str, Entry] = {}
    notes: dict[str, str] = {}
    # Settings that are False and for which no rule gives a value: they need no note.
    settings_off: set[str] = set()

    def put(key: str, value: Any, comment: str) -> None:
        """Adds an entry for our key.

        A value that comes from no setting of the script, and is our default too, needs none."""
        if isinstance(value, list) and value:
            value = _adapted(key, value, file, their)
        # "low_var_kl is k3": the table of remedies translates words.
        remedy = re.fullmatch(r".* is (\w+)", find_remedy(key, str(value)) or "", re.DOTALL)
        value = remedy[1] if remedy else value
        if their.used or defaults.get(key, 0) != value:
            comment += "" if their.used else f": {script.trainer}'s default"
            entries[key] = Entry(value, comment, frozenset(their.used))

    # First our keys that have rules in port.tsv, which may combine several settings.
    for key in (key for key in their.rules if key in keys):
        their.used.clear()
        try:
            put(key, *their.work_out(key))
        except YAML_ERRORS as error:
            reason = str(error.args[0] if error.args else error)
            reason = "--rows is not given" if reason == "rows" else reason
            # A name alone is no reason: no rule's conditions were met, or a setting is absent.
            if " " in reason:
                reason = f"{_DECIDED}: {key} is left as it is: {reason}"
                notes |= dict.fromkeys(their.used or {key}, reason)
            settings_off |= {name for name in their.used if script.settings[name] is False}
    # Then the settings that went into no entry: each is translated to its one key, or gets a note.
    for name, value in script.settings.items():
        is_used = any(name in entry.settings for entry in entries.values())
        if is_used or name in notes or name in settings_off:
            continue
        alias = find_alias(script.trainer, name)
        sampling = find_alias("vLLM", name)
        same = keys_named(name.rpartition(".")[2], keys)
        targets = alias.keys if alias else same if len(same) == 1 and not sampling else []
        is_plain = len(targets) == 1 and targets[0] in keys and targets[0] not in their.rules
        # Explained: a rule has looked at the setting, or the alias's note says what happens in its
        # place.
        has_rule = any(target in their.rules for target in targets)
        is_explained = has_rule or bool(alias and alias.note and not targets)
        is_lost = isinstance(value, Unreadable) or not (is_plain or is_explained or not value)
        title = _BY_HAND if is_lost else _DECIDED
        notes[name] = f"{title}: {alias or sampling or 'not known'}"
        if value is None or value == -1:
            notes[name] = f"{_DECIDED}: not set"
        elif is_plain and title == _DECIDED:
            del notes[name]
            their.used = {name}
            put(targets[0], value, f"{name}{alias.note and ': '}{alias.note}" if alias else name)
    _leave_out_refused(entries, notes, required)
    for key in required.keys() - entries.keys():
        entries[key] = Entry(required[key], "set it", frozenset())
        notes.setdefault(key, f"{_DECIDED}: the script does not say: set it")
    if any(file in str(entry.value) for entry in entries.values()):
        notes[file] = f"{_BY_HAND}: copy functions, tools and environments there, with imports"
    if script.trainer == "TRL" and "ranks" not in script.defaults | options:
        notes["ranks"] = f"{_DECIDED}: 1 GPU, as the script does not say: --ranks N"
    return Port(entries, notes)


def _adapted(key: str, value: list[Any], file: str, their: _Values) -> Any:
    """Returns a list that the script sets in the form that our key takes.

    For some keys this is a dict, or one value only. `file` is the Python file to which the user
    copies the script's functions."""
    if key == "logging.trackers":
        return [name for name in value if name in TRACKERS]
    if key == "data.eval":
        return {Path(str(source)).parent.name: source for source in value}
    if key == "environment.tools":
        return [f"{file}:{name}" for name in value]
    if key in ("data.train", "environment.factory"):
        return value[0] if key == "data.train" else f"{file}:{value[0]}"
    if key != "rewards" or not isinstance(value[0], str):
        return value
    rewards = []
    for index, name in enumerate(value):
        reward = {"model": name.strip("'")} if "'" in name else {"function": f"{file}:{name}"}
        # port.tsv has rows for reward functions that we ship too.
        with suppress(KeyError):
            reward = their[f"reward:{name}"]
        with suppress(LookupError):
            reward = reward | {"weight": their["reward_weights"][index]}
        rewards.append(reward)
    return rewards


def _leave_out_refused(
    entries: dict[str, Entry], notes: dict[str, str], required: dict[str, Any]
) -> None:
    """Removes the entries whose values our loader refuses, and adds notes that say why.

    The loader reports one error at a time, so it is called again after each removal."""
    while True:
        values = {key: entry.value for key, entry in entries.items()}
        try:
            build_config(as_tree(required | values))
            return
        except ConfigError as error:
            text = str(error)
            # The error begins with the key at fault; it may name others later.
            named = [key for key in entries if key in text]
            if not named:
                raise
            key = min(named, key=text.index)
            settings = entries.pop(key).settings
            title = _BY_HAND if settings else _DECIDED
            text = text.partition("; did you mean")[0].replace(" must be ", " can only be ")
            for name in settings or {key}:
                notes.setdefault(name, f"{title}: {text}")


def as_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values`, which are by dotted key, as nested sections in the order of the schema."""
    tree: dict[str, Any] = {}
    for key in sorted(values, key=key_names(Config).index):
        apply_override(tree, f"{key}={json.dumps(values[key], default=str)}")
    return tree


def _lines(tree: Mapping[str, Any], entries: Mapping[str, Entry], prefix: str) -> Iterator[str]:
    """Yields the config `tree` as lines of YAML, each value with its comment.

    `prefix` is the dotted key of `tree`, "" for the whole config."""
    for name, section in tree.items():
        key = join_key(prefix, name)
        head = f"{'  ' * key.count('.')}{name}:"
        if key in entries:
            entry = entries[key]
            yield f"{head} {json.dumps(entry.value, default=str)}  # {_one_line(entry.comment)}"
        else:
            yield head
            yield from _lines(section, entries, key)


def _one_line(text: str) -> str:
    """Returns a text of the script as one line of printable characters, shortened if it is long."""
    return cut_middle(" ".join(printable(text).split()), 300)


def main() -> None:
    """Runs the command: prints the config, or writes it to --out, with the notes as comments."""
    hold_standard_streams()
    parser = OneLineParser(
        prog="python -m grpo_spmd.port",
        description="Translate a script of TRL (.py, .yaml, .sh), verl or OpenRLHF (.sh) into a "
        "config, without running it.",
    )
    add = parser.add_argument
    add("--ranks", type=int, help="GPUs that it runs on: TRL's batch sizes are those of one GPU")
    add("--rows", type=int, help="rows of the training data, to make steps of epochs")
    add("--out", type=Path, metavar="FILE", help="file that does not exist yet (default: stdout)")
    add("script", type=Path, metavar="SCRIPT")
    add("words", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="those of the script itself")
    args = parser.parse_args()
    options = {name: vars(args)[name] for name in ("ranks", "rows") if vars(args)[name]}
    try:
        script = read_script(args.script, args.words)
        entries, notes = translate(script, options, args.script.stem)
    except ConfigError as error:
        refuse(error)
    # A note is "TITLE: TEXT". A setting without a note was translated.
    titles = [notes[name].partition(":")[0] for name in script.settings if name in notes]
    summary = (
        f"{args.script.name}: {len(script.settings)} settings of {script.trainer}: "
        f"{len(script.settings) - len(titles)} translated, {titles.count(_DECIDED)} {_DECIDED}, "
        f"{titles.count(_BY_HAND)} {_BY_HAND}"
    )
    lines = [summary]
    for name, note in sorted(notes.items(), key=lambda item: item[1].partition(":")[0]):
        title, _, reason = note.partition(": ")
        setting = f" = {script.settings[name]}" if name in script.settings else ""
        lines.append(f"{title}: {name}{setting}: {reason}")
    tree = as_tree({key: entry.value for key, entry in entries.items()})
    # The notes are comments at the top of the config.
    lines = [*(f"# {_one_line(line)}" for line in lines), *_lines(tree, entries, "")]
    if args.out is None:
        show("\n".join(lines))
    else:
        try:
            with args.out.open("x", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            refuse(ConfigError(f"--out: {args.out}: {error.strerror}"))
    say(_one_line(summary))


if __name__ == "__main__":
    main()
