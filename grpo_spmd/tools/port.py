"""Translates a training script of TRL, verl or OpenRLHF into a config, without running it.

python -m grpo_spmd.port [--ranks N] [--rows N] [--out x.yaml] SCRIPT [ARGUMENTS OF THE SCRIPT ...]
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_spmd.config.coerce import find_alias, find_remedy, key_names, keys_named, read_table
from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.describe import flatten_config, join_key
from grpo_spmd.config.errors import ConfigError, cut_middle, printable, refuse, say
from grpo_spmd.config.load import YAML_ERRORS, StrictLoader, apply_override, build_config
from grpo_spmd.config.rules import met_conditions
from grpo_spmd.config.schema import TRACKERS, Config
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.rewards.verifiers import evaluate
from grpo_spmd.tools.scripts import Script, Unreadable, read_script

_NAME = re.compile(r"[a-z_][\w.]*")
_MAX_COMMENT = 300
_DECIDED, _BY_HAND = "decided here", "by hand"


class Entry(NamedTuple):
    """The value of one of our keys, how it was worked out, and the settings that it comes of."""

    value: Any
    comment: str
    settings: frozenset[str]


class Port(NamedTuple):
    """A config that the loader takes, and what is to be said of other settings and of open keys."""

    entries: dict[str, Entry]
    notes: dict[str, str]


class _Values(dict[str, Any]):
    """Values by name: those that the script sets, and those that port.tsv works out of them."""

    def __init__(self, script: Script, options: dict[str, int]) -> None:
        super().__init__()
        self._defaults = script.defaults | options
        self.used: set[str] = set()  # settings that were looked at
        self.rules: dict[str, list[list[str]]] = {}
        self._settings = script.settings
        for trainer, name, *rule in read_table("port.tsv"):
            if trainer == script.trainer:
                self.rules.setdefault(name, []).append(rule)

    def __missing__(self, name: str) -> Any:
        for setting, value in self._settings.items():
            # -1 stands for a value that is not set.
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
        """Returns a value by port.tsv, and its arithmetic. Raises KeyError with the reason."""
        error = KeyError(name)
        for conditions, formula in self.rules.get(name, ()):
            try:
                facts = met_conditions(conditions, self) if conditions else formula.lstrip("=")
                if facts:
                    return self._compute(formula, facts)
            except KeyError as missing:
                # What is no plain value says more than a name that is absent.
                error = error if " " in error.args[0] else missing
        raise error

    def _compute(self, formula: str, facts: str) -> tuple[Any, str]:
        if formula.startswith("="):
            return yaml.load(formula[1:], Loader=StrictLoader), facts
        if _NAME.fullmatch(formula):
            return self[formula], formula
        text = re.sub(r"\{([\w.]+)\}", lambda match: str(self[match[1]]), formula)
        if text != formula:
            return yaml.load(text, Loader=StrictLoader) if text[0] == "[" else text, formula
        # Fractions are exact: 0.1 * 30 is 3.
        text = formula.removeprefix("ceil ")
        number = evaluate(_NAME.sub(lambda name: f"({Fraction(str(float(self[name[0]])))})", text))
        is_whole = number.denominator == 1 or text != formula
        arithmetic = _NAME.sub(lambda name: f"{name[0]} ({self[name[0]]})", text)
        return math.ceil(number) if is_whole else float(number), arithmetic


def translate(script: Script, options: dict[str, int], stem: str) -> Port:
    """Returns the config that a script stands for; `options` may give ranks and rows.

    A value that the loader refuses is left out and noted.
    """
    their = _Values(script, options)
    keys = key_names(Config)
    file = f"{stem}_functions.py"
    required = {
        "run_dir": f"runs/{stem}",
        "model.path": "MODEL",
        "data.train": f"{stem}.jsonl",
        "rewards": [{"function": f"{file}:reward"}],
    }
    defaults = flatten_config(build_config(as_tree(required)))
    entries: dict[str, Entry] = {}
    notes: dict[str, str] = {}
    settings_off: set[str] = set()

    def put(key: str, value: Any, comment: str) -> None:
        if isinstance(value, list) and value:
            value = _adapted(key, value, file, their)
        # "low_var_kl is k3": the table of remedies translates words.
        remedy = re.fullmatch(r".* is (\w+)", find_remedy(key, str(value)) or "", re.DOTALL)
        value = remedy[1] if remedy else value
        if their.used or defaults.get(key, 0) != value:
            comment += "" if their.used else f": {script.trainer}'s default"
            entries[key] = Entry(value, comment, frozenset(their.used))

    for key in (key for key in their.rules if key in keys):
        their.used.clear()
        try:
            put(key, *their.work_out(key))
        except YAML_ERRORS as error:
            reason = str(error.args[0] if error.args else error)
            reason = "--rows is not given" if reason == "rows" else reason
            # One name alone: no condition was met, or it is not set.
            if " " in reason:
                reason = f"{_DECIDED}: {key} is left as it is: {reason}"
                notes |= dict.fromkeys(their.used or {key}, reason)
            settings_off |= {name for name in their.used if script.settings[name] is False}
    for name, value in script.settings.items():
        is_used = any(name in entry.settings for entry in entries.values())
        if is_used or name in notes or name in settings_off:
            continue
        alias = find_alias(script.trainer, name)
        sampling = find_alias("vLLM", name)
        same = keys_named(name.rpartition(".")[2], keys)
        targets = alias.keys if alias else same if len(same) == 1 and not sampling else []
        # A True is no value of most keys.
        is_plain = len(targets) == 1 and targets[0] in keys and targets[0] not in their.rules
        if is_plain and value is True:
            is_plain = False
            with suppress(ConfigError):
                build_config(as_tree(required | {targets[0]: True}))
                is_plain = True
        # A rule has weighed the setting, or a note says what happens in its place.
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
    """Returns a list of theirs in the form that our key has."""
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
        with suppress(KeyError):
            reward = their[f"reward:{name}"]
        with suppress(LookupError):
            reward = reward | {"weight": their["reward_weights"][index]}
        rewards.append(reward)
    return rewards


def _leave_out_refused(
    entries: dict[str, Entry], notes: dict[str, str], required: dict[str, Any]
) -> None:
    """Takes the values out of `entries` that the loader refuses, and notes why."""
    while True:
        values = {key: entry.value for key, entry in entries.items()}
        try:
            build_config(as_tree(required | values))
            return
        except ConfigError as error:
            text = str(error)
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
    """Returns the sections of values by dotted key, in the order of the schema."""
    tree: dict[str, Any] = {}
    for key in sorted(values, key=key_names(Config).index):
        apply_override(tree, f"{key}={json.dumps(values[key], default=str)}")
    return tree


def _lines(tree: Mapping[str, Any], entries: Mapping[str, Entry], prefix: str) -> Iterator[str]:
    """Yields the lines of YAML, each value with its comment."""
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
    return cut_middle(" ".join(printable(text).split()), _MAX_COMMENT)


def main() -> None:
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
    titles = [notes[name].partition(":")[0] for name in script.settings if name in notes]
    summary = (
        f"{args.script.name}: {len(script.settings)} settings of {script.trainer}: "
        f"{len(script.settings) - len(titles)} translated, {titles.count(_DECIDED)} {_DECIDED}, "
        f"{titles.count(_BY_HAND)} {_BY_HAND}"
    )
    lines = [summary]
    for name, note in sorted(notes.items(), key=lambda item: item[1].partition(":")[0]):
        title, _, reason = note.partition(": ")
        value = script.settings.get(name)
        text = value.text if isinstance(value, Unreadable) else value
        lines.append(f"{title}: {name}{f' = {text}' if name in script.settings else ''}: {reason}")
    tree = as_tree({key: entry.value for key, entry in entries.items()})
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
