"""Builds the dataclasses of the schema from plain YAML values, and checks the values on the way.

For a value or key that cannot be used it raises a ConfigError of one line, with the key, the rule,
the value and, if one is known, the remedy. The last part of the file finds our config keys for the
keys of other trainers, by the table in aliases.tsv, which is read only when a config has an unknown
key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_spmd.config.describe import (
    UNIONS,
    default_of,
    flat,
    help_texts,
    is_section,
    join_key,
    type_name,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, FilePath, RewardConfig

# Control characters and line separators, which have no use in a path or a name.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Keys whose text may have several lines, and so line breaks.
_MULTILINE_KEYS = ("prompt_template", "system_prompt", "args", "rewards", "engine", "stop")
# Values that a section may have in YAML in the place of a mapping, and that stand for an empty one.
NULLS = (None, "None", "null")
_MAX_NUMBER = 1 << 63
# The limits of Linux.
_MAX_PATH_BYTES = 4000
_MAX_NAME_BYTES = 255
_CURLY_QUOTES = ("\u201c", "\u2018", "\u201e")
# Matches a run_dir that cannot be meant as a folder: it is a URL, holds a variable, or begins with
# "~", which is left after expanduser only if the user is unknown.
_NO_FOLDER = re.compile(r"~|[a-zA-Z][\w+.-]*://|.*\$[{\w]")


def build(cls: type, tree: Any, prefix: str) -> Any:
    """Returns a dataclass `cls` built from the mapping `tree`. `prefix` is the section's dotted
    key, "" for the whole config. Raises ConfigError."""
    tree = {} if tree in NULLS else tree
    if not isinstance(tree, Mapping):
        is_reward = prefix.startswith("rewards.")
        remedy = "; write {name: NAME} or {function: 'file.py:fn'}" if is_reward else ""
        raise ConfigError(f"{prefix}: expected a section (a mapping), got {tree!r}{remedy}")
    # The annotations of the schema are strings, which get_type_hints evaluates.
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls, include_extras=True)
    # Unknown keys come first, because a misspelt key is also a missing one.
    errors = [*_unknown_keys(cls, tree, prefix)]
    if errors:
        count = f"{len(errors)} unknown keys: " if len(errors) > 1 else ""
        raise ConfigError(count + "; ".join(errors))
    values = {}
    for name, field in fields.items():
        key = join_key(prefix, name)
        if name in tree:
            try:
                values[name] = _checked(coerce(hints[name], tree[name], key), field, key)
                if FilePath in _options(hints[name]):
                    values[name] = _expand_paths(values[name], key)
            except ConfigError as error:
                raise ConfigError(f"{error}{_value_remedy(key, tree[name], hints[name])}") from None
        elif is_section(hints[name]):
            values[name] = build(hints[name], {}, key)
        elif default_of(field) is dataclasses.MISSING:
            raise ConfigError(f"{key} is required and missing: {help_texts(cls)[name]}")
    return cls(**values)


def coerce(hint: Any, value: Any, key: str) -> Any:
    """Returns `value` converted to the type `hint`. "1e-6", which PyYAML reads as text, becomes a
    float. Raises ConfigError if it cannot be converted."""
    if is_section(hint):
        return build(hint, value, key)
    value = _interpret(hint, value)
    [item_hint, *_] = typing.get_args(hint) or [None]
    if is_section(item_hint) and isinstance(value, list | tuple):
        return tuple(build(item_hint, item, f"{key}.{i}") for i, item in enumerate(value))
    # strict=False lets msgspec read numbers from text and whole numbers from floats.
    with suppress(msgspec.ValidationError):
        result = msgspec.convert(value, hint, strict=False)
        # msgspec would also convert 0, 1 and "true" to bool, which is refused.
        if isinstance(value, bool) or not isinstance(result, bool):
            return result
    raise ConfigError(f"{key} must be {type_name(hint)}; got {value!r}")


_DTYPES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
}


def _interpret(hint: Any, value: Any) -> Any:
    """Returns `value` in the spelling that the type `hint` expects, if it has another usual one.

    For a type that allows it, "none" becomes None, a single name a list of names, a number its text
    and bf16 bfloat16. Other values are returned unchanged.
    """
    options, words = _options(hint), _words(hint)
    if isinstance(value, str):
        if type(None) in options and value.strip().lower() in ("none", "null"):
            return None
        # On the command line a list may be given as "wandb,tensorboard".
        if tuple[str, ...] in options and value not in words:
            return [name for name in re.split(r"[,\s]+", value) if name]
        return _DTYPES[value] if _DTYPES.get(value) in words else value
    if value is None and any(typing.get_origin(option) is dict for option in options):
        return {}
    # YAML reads 2024-01-01 as a date.
    is_number = isinstance(value, int | float | date) and not isinstance(value, bool)
    is_text = str in options or FilePath in options
    return str(value) if is_text and is_number else value


def _options(hint: Any) -> Sequence[Any]:
    """Returns the types of a union; for another type a sequence of this type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)


def _words(hint: Any) -> list[Any]:
    """Returns the type arguments of all options of a type: for a Literal, the words that it
    allows."""
    return [word for option in _options(hint) for word in typing.get_args(option)]


def _checked(value: Any, field: dataclasses.Field[Any], key: str) -> Any:
    """Returns the value of a key after checks that types cannot express.

    Numbers must be finite, required text must not be empty, and text may not hold control
    characters except in keys of several lines. Raises ConfigError.
    """
    for name, leaf in flat(list(value) if isinstance(value, tuple) else value, key).items():
        # YAML also has dates, sets and bytes, which cannot be written as JSON.
        if isinstance(leaf, date | set | bytes):
            raise ConfigError(f"{name} must be text or a number; got {leaf!r}")
        if isinstance(leaf, int | float) and not abs(leaf) < _MAX_NUMBER:
            raise ConfigError(f"{name} must be a finite number, and below 2^63; got {leaf}")
        if isinstance(leaf, str) and field.name not in _MULTILINE_KEYS and CONTROL.search(leaf):
            raise ConfigError(
                f"{name} must not contain a control character, as a line break is; got {leaf!r}"
            )
    is_required = default_of(field) is dataclasses.MISSING
    if is_required and isinstance(value, str) and not value.strip():
        raise ConfigError(f"{key} must not be empty; got {value!r}")
    return value


def _expand_paths(value: Any, key: str) -> Any:
    """Returns a path, or a mapping of names to paths, with `~` and `~user` replaced.

    Relative paths stay relative to the working folder. Variables such as $SCRATCH are not expanded,
    because the same file would mean another folder for each user; on the command line the shell
    expands them. Raises ConfigError.
    """
    if isinstance(value, dict):
        return {name: _expand_paths(path, join_key(key, name)) for name, path in value.items()}
    if not isinstance(value, str):
        return value
    sizes = [len(os.fsencode(name)) for name in value.split("/")]
    if max(sizes) > _MAX_NAME_BYTES or sum(sizes) > _MAX_PATH_BYTES:
        rule = f"a path has {_MAX_PATH_BYTES} bytes at the most, and a name in it {_MAX_NAME_BYTES}"
        raise ConfigError(f"{key}: {value[:40]}... is too long for a path: {rule}")
    if value.startswith(_CURLY_QUOTES):
        rule = "has the quotes of a text processor around it; write it without"
        raise ConfigError(f"{key}: {value} {rule}")
    expanded = os.path.expanduser(value)
    if key == "run_dir" and _NO_FOLDER.match(expanded):
        rule = "must be a folder: no URL, no variable (the shell expands it on the command line)"
        raise ConfigError(f"run_dir: {expanded} {rule}, and no unknown user's home")
    return expanded


def key_names(cls: type, prefix: str = "") -> list[str]:
    """Returns the dotted names of all keys and sections of the dataclass `cls`."""
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        names.append(join_key(prefix, name))
        if is_section(hint):
            names += key_names(hint, names[-1])
    return names


def _unknown_keys(cls: type, tree: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """Yields an error message for each key in `tree` and its sections that the schema lacks."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for name, value in tree.items():
        key = join_key(prefix, str(name))
        if name not in hints:
            yield unknown_key(key, prefix, value)
            continue
        [item_hint, *_] = typing.get_args(hints[name]) or [None]
        if is_section(hints[name]) and isinstance(value, Mapping):
            yield from _unknown_keys(hints[name], value, key)
        elif is_section(item_hint) and isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from _unknown_keys(item_hint, item, f"{key}.{index}")


def unknown_key(key: str, prefix: str, value: Any) -> str:
    """Returns the error message for a key that does not exist in section `prefix`.

    If the key is one of another trainer or is misspelt, the message has the key that was meant.
    """
    name = key.removeprefix(f"{prefix}.") if prefix else key
    # The most certain explanation comes first: a key of another trainer before a similar name.
    if "." in name and (key in key_names(Config) or name.startswith("rewards.")):
        section, _, last_name = key.rpartition(".")
        return (
            f"{key}: a key with a dot is for the command line; in the file write {section}: "
            f"{{{last_name}: {value}}}"
        )
    if translation := translate_key(key, value):
        return translation
    if not keys_named(name, key_names(Config)) and (translation := translate_last_part(key)):
        return translation
    if similar := _similar_key(name, prefix, is_section=isinstance(value, dict)):
        return f"{key}: unknown key; did you mean {similar}?"
    return translate_misspelt_key(key) or f"{key}: unknown key; --help lists them all"


# Two names count as similar if difflib's ratio is at least this, in the same section or in another.
_SAME_SECTION_RATIO = 0.7
_OTHER_SECTION_RATIO = 0.85


def _similar_key(name: str, prefix: str, *, is_section: bool) -> str | None:
    """Returns the key with a similar name in the same section, else in another section; None if
    there is none, or if several fit."""
    keys = key_names(Config)
    if prefix.startswith("rewards"):
        keys = key_names(RewardConfig, prefix)
    # If the unknown key has a plain value, no section was meant.
    sections = {key.rpartition(".")[0] for key in keys}
    keys = [key for key in keys if is_section or key not in sections]
    # A typo in the right section comes before the same name elsewhere.
    siblings = [key for key in keys if key.rpartition(".")[0] == prefix]
    for candidates, ratio in ((siblings, _SAME_SECTION_RATIO), (keys, _OTHER_SECTION_RATIO)):
        names = [key.rpartition(".")[2] for key in candidates]
        similar = difflib.get_close_matches(name, names, n=1, cutoff=ratio)
        if not similar and candidates is siblings:
            similar = [sibling for sibling in names if _is_cut_short(name, sibling)]
        # max_lr is spelt like min_lr, but it means the opposite.
        if similar and _extremes(similar[0]) == _extremes(name):
            matches = keys_named(similar[0], candidates)
            return matches[0] if len(matches) == 1 else None
    return None


def keys_named(name: str | None, all_keys: Iterable[str]) -> list[str]:
    """Returns the keys whose last part is `name`. Keys of the critic are left out if another
    section has the name too."""
    keys = [key for key in all_keys if key.rpartition(".")[2] == name]
    return [key for key in keys if not key.startswith("critic.")] or keys


def _is_cut_short(name: str, candidate: str) -> bool:
    """Returns True if one name is the other with letters added, as temp and temperature or lr and
    lrate, but not lr and lr_end."""
    short, long = sorted((name, candidate), key=len)
    return long.startswith(short) and long[len(short) :].isalpha()


def _extremes(name: str) -> list[str]:
    """Returns the words in a name, such as min and max, whose exchange would reverse its
    meaning."""
    return re.findall(r"min|max|low|high", name)


def find_remedy(key: str, value: str) -> str | None:
    """Returns the remedy in remedies.tsv for this value of a key, or None. Unknown command line
    options have the key "--"."""
    for known_key, pattern, remedy in read_table("remedies.tsv"):
        if known_key in (key, "*") and re.fullmatch(pattern, value, re.DOTALL):
            return remedy.replace("VALUE", value)
    return None


def _value_remedy(key: str, value: Any, hint: Any) -> str:
    """Returns a remedy to add to the error message about this value; "" if none is known."""
    if remedy := find_remedy(key, str(value)):
        return f"; {remedy}"
    words = [word for word in _words(hint) if isinstance(word, str)]
    similar = difflib.get_close_matches(str(value).lower(), words, n=1)
    return f"; did you mean {similar[0]}?" if similar and value not in words else ""


# Keys of other trainers

# Last parts of other trainers' keys that are ambiguous without the section before them.
_AMBIGUOUS_NAME = re.compile(r"name|path|enable|interval|type|len|dataset|env|freq|offline|steps")


class Alias(NamedTuple):
    """One row of aliases.tsv: the names of a setting in another trainer, and our keys for it."""

    trainer: str
    names: list[str]
    keys: list[str]  # our keys; empty if we have no such setting
    note: str  # how our setting differs; may be empty

    def __str__(self) -> str:
        """Returns the translation for an error message: our keys, and the note in brackets."""
        target = f"here {', '.join(self.keys)}" if self.keys else "nothing here"
        return f"{target} ({self.note})" if self.note else target


@functools.cache
def read_table(name: str) -> list[list[str]]:
    """Returns the rows of a .tsv file of this folder; lines that begin with # are comments."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


@functools.cache
def read_aliases() -> list[Alias]:
    """Returns the options of other trainers (TRL, verl, OpenRLHF) with our keys for them, as in
    aliases.tsv, in its order."""
    return [
        Alias(trainer, names.split(", "), keys.split(", ") if keys else [], note)
        for trainer, names, keys, note in read_table("aliases.tsv")
    ]


def translate_key(key: str, value: object = None) -> str | None:
    """Returns the error message for an unknown key that another trainer has, with our key for it.

    If `value` is a section, a key inside it may be the one that is found. Returns None if no
    trainer has the key."""
    # Keys inside the section come before the section, and longer suffixes before shorter ones,
    # because they are less ambiguous.
    for name in (*flat(value, key), key):
        for suffix in _suffixes(name):
            if line := _error_line(name, _find_aliases(suffix)):
                return line
    return None


def translate_last_part(key: str) -> str | None:
    """Returns the error message for a key without a section that ends another trainer's key, or
    None: "train_files" is the last part of verl's data.train_files."""
    if "." in key or _AMBIGUOUS_NAME.fullmatch(key):
        return None
    return _error_line(key, _find_aliases(key.replace("-", "_"), by_last_part=True))


def translate_misspelt_key(key: str) -> str | None:
    """Returns the error message for a misspelt key of another trainer, such as "num_generation", or
    None if no trainer has a similar key."""
    last_name = key.rpartition(".")[2].replace("-", "_")
    names = {name for alias in read_aliases() for name in alias.names}
    for name in difflib.get_close_matches(last_name, names, n=1, cutoff=0.9):
        if line := translate_key(name):
            return f"{key}: unknown key; did you mean {line.replace(': unknown key', '', 1)}?"
    return None


def _suffixes(name: str) -> list[str]:
    """Returns the dotted name, then the name without its first section, without its first two, ...

    Another trainer's key is found in the table by any of these. The name is normalized: no dash in
    front, "_" for "-", and no list index at the end.
    """
    names = re.sub(r"^-|(\.\d+)+$", "", name).replace("-", "_").split(".")
    return [".".join(names[start:]) for start in range(len(names))]


def find_alias(trainer: str, name: str) -> Alias | None:
    """Returns the trainer's row of aliases.tsv for `name`, or else for its longest known suffix;
    None if there is none."""
    for suffix in _suffixes(name):
        for alias in _find_aliases(suffix):
            if alias.trainer == trainer:
                return alias
    return None


def _find_aliases(name: str, *, by_last_part: bool = False) -> list[Alias]:
    """Returns for each trainer its first row of aliases.tsv that has this name, if there is one.

    With `by_last_part` only the part after the last dot of a row's names is compared."""
    aliases: dict[str, Alias] = {}
    for alias in read_aliases():
        names = [n.rpartition(".")[2] for n in alias.names] if by_last_part else alias.names
        if name in names:
            aliases.setdefault(alias.trainer, alias)
    return list(aliases.values())


def _error_line(key: str, aliases: list[Alias]) -> str | None:
    """Returns the error message for an unknown key, None if `aliases` is empty. Trainers with the
    same translation share a clause."""
    trainers: dict[str, list[str]] = {}
    for alias in aliases:
        trainers.setdefault(str(alias), []).append(f"{alias.trainer}'s")
    clauses = [f"{' and '.join(names)} name: {target}" for target, names in trainers.items()]
    return f"{key}: unknown key, {'; '.join(clauses)}" if clauses else None
