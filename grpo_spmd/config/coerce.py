"""Turns plain YAML values into a dataclass of the schema: types, bounds, paths, unknown keys.

Whatever cannot be used becomes a ConfigError of one line: the key, the rule, the value and, where
one is known, the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

import msgspec

from grpo_spmd.config.aliases import (
    read_table,
    translate_key,
    translate_last_part,
    translate_misspelt_key,
)
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

# Control characters and line separators. In a path or a name they only mislead.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MULTILINE_KEYS = ("prompt_template", "system_prompt", "args", "rewards", "engine", "stop")
NULLS = (None, "None", "null")
_MAX_NUMBER = 1 << 63
# The limits of Linux.
_MAX_PATH_BYTES = 4000
_MAX_NAME_BYTES = 255
_CURLY_QUOTES = ("\u201c", "\u2018", "\u201e")
# A run_dir that is a URL or holds a variable. A `~` is still there only if its user is unknown.
_NO_FOLDER = re.compile(r"~|[a-zA-Z][\w+.-]*://|.*\$[{\w]")


def build(cls: type, tree: Any, prefix: str) -> Any:
    """Returns dataclass `cls` built from a mapping; `prefix` is its dotted key, "" at the root."""
    tree = {} if tree in NULLS else tree
    if not isinstance(tree, Mapping):
        is_reward = prefix.startswith("rewards.")
        remedy = "; write {name: NAME} or {function: 'file.py:fn'}" if is_reward else ""
        raise ConfigError(f"{prefix}: expected a section (a mapping), got {tree!r}{remedy}")
    # Hints are strings in the source, so they are evaluated in the schema's module.
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls, include_extras=True)
    # Unknown keys first: a misspelt key would else be reported as one that is missing.
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
    """Returns `value` as the declared type. PyYAML reads "lr: 1e-6" as text; here it is a float."""
    if is_section(hint):
        return build(hint, value, key)
    value = _interpret(hint, value)
    [item_hint, *_] = typing.get_args(hint) or [None]
    if is_section(item_hint) and isinstance(value, list | tuple):
        return tuple(build(item_hint, item, f"{key}.{i}") for i, item in enumerate(value))
    # strict=False lets msgspec read numbers from text and whole numbers from floats.
    with suppress(msgspec.ValidationError):
        result = msgspec.convert(value, hint, strict=False)
        # 0, 1 and "true" are bools for msgspec.
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
    """Returns the one reading of `value` that fits this type, or `value` unchanged without one.

    "none" is None, one name is a list of names, a number where text is expected is its digits, and
    bf16 is bfloat16.
    """
    options, words = _options(hint), _words(hint)
    if isinstance(value, str):
        if type(None) in options and value.strip().lower() in ("none", "null"):
            return None
        # The command line has lists as "wandb,tensorboard".
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
    """Returns the types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)


def _words(hint: Any) -> list[Any]:
    """Returns the words that a type lists as its values, and the types of a list's elements."""
    return [word for option in _options(hint) for word in typing.get_args(option)]


def _checked(value: Any, field: dataclasses.Field[Any], key: str) -> Any:
    """Returns the checked value of a declared key.

    All numbers must be finite, required text must not be empty, and no text may hold control
    characters. Raises ConfigError.
    """
    for name, leaf in flat(list(value) if isinstance(value, tuple) else value, key).items():
        # YAML also has dates, sets and bytes, which JSON has not.
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

    Relative paths stay relative to the working folder. Variables ($SCRATCH) are left to the shell,
    which expands them on the command line: a config would mean another folder to each user.
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
    """Returns the dotted names of all keys and sections."""
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        names.append(join_key(prefix, name))
        if is_section(hint):
            names += key_names(hint, names[-1])
    return names


def _unknown_keys(cls: type, tree: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """Yields the error line of each key in `tree` and its sections that the schema lacks."""
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
    """Returns the error line for a key that does not exist in section `prefix`.

    It names our key for another trainer's name, or the key that was probably meant.
    """
    name = key.removeprefix(f"{prefix}.") if prefix else key
    # In the order of how sure the answer is: a name of another trainer comes before a guess.
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


# Two names count as similar from this ratio of difflib on: in the same section, and in another.
_SAME_SECTION_RATIO = 0.7
_OTHER_SECTION_RATIO = 0.85


def _similar_key(name: str, prefix: str, *, is_section: bool) -> str | None:
    """Returns a key with a similar name in the same section, else one in another section."""
    keys = key_names(Config)
    if prefix.startswith("rewards"):
        keys = key_names(RewardConfig, prefix)
    # A value is never meant for a section.
    sections = {key.rpartition(".")[0] for key in keys}
    keys = [key for key in keys if is_section or key not in sections]
    # A typo in the right section comes before the same name elsewhere.
    siblings = [key for key in keys if key.rpartition(".")[0] == prefix]
    for candidates, ratio in ((siblings, _SAME_SECTION_RATIO), (keys, _OTHER_SECTION_RATIO)):
        names = [key.rpartition(".")[2] for key in candidates]
        similar = difflib.get_close_matches(name, names, n=1, cutoff=ratio)
        if not similar and candidates is siblings:
            similar = [sibling for sibling in names if _is_cut_short(name, sibling)]
        # max_lr looks like min_lr, but it means the opposite.
        if similar and _extremes(similar[0]) == _extremes(name):
            matches = keys_named(similar[0], candidates)
            return matches[0] if len(matches) == 1 else None
    return None


def keys_named(name: str | None, all_keys: Iterable[str]) -> list[str]:
    """Returns the keys with this last part. Where policy and critic both have it, the policy's."""
    keys = [key for key in all_keys if key.rpartition(".")[2] == name]
    return [key for key in keys if not key.startswith("critic.")] or keys


def _is_cut_short(name: str, candidate: str) -> bool:
    """True for temp and temperature, or lrate and lr; lr_end is another thing than lr."""
    short, long = sorted((name, candidate), key=len)
    return long.startswith(short) and long[len(short) :].isalpha()


def _extremes(name: str) -> list[str]:
    return re.findall(r"min|max|low|high", name)


def find_remedy(key: str, value: str) -> str | None:
    """Returns what remedies.tsv advises for this value of a key; "--" is the key of options."""
    for known_key, pattern, remedy in read_table("remedies.tsv"):
        if known_key in (key, "*") and re.fullmatch(pattern, value, re.DOTALL):
            return remedy.replace("VALUE", value)
    return None


def _value_remedy(key: str, value: Any, hint: Any) -> str:
    """Returns what is added to the line that refuses this value; "" where its rule is enough."""
    if remedy := find_remedy(key, str(value)):
        return f"; {remedy}"
    words = [word for word in _words(hint) if isinstance(word, str)]
    similar = difflib.get_close_matches(str(value).lower(), words, n=1)
    return f"; did you mean {similar[0]}?" if similar and value not in words else ""
