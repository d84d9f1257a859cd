"""Turns plain YAML values into a dataclass of the schema: types, bounds, paths, unknown keys.

Whatever cannot be used becomes a ConfigError of one line: the key, the rule, the value and, where
one is known, the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal, Union

from grpo_spmd.config.aliases import translate_key, translate_last_part, translate_misspelt_key
from grpo_spmd.config.describe import default_of, flat, help_texts, join_key, type_name
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig

# Control characters and line separators. In a path or a name they only mislead.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MULTILINE_KEYS = ("prompt_template", "system_prompt", "args", "rewards", "engine")
_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_NULLS = (None, "None", "null")
# The limits of Linux.
_MAX_PATH_BYTES = 4000
_MAX_NAME_BYTES = 255
_CURLY_QUOTES = ("\u201c\u201d", "\u2018\u2019", "\u201e\u201c")

# Keys that people look for and that cannot exist, with the reason.
REFUSED_KEYS = {
    name: f"training samples from the whole distribution: with {name} the engine draws from a part "
    "of it, while the policy's logprobs are those of the whole, so that every ratio would be off "
    "by the mass that was cut away; take it out (temperature is rollout.temperature)"
    for name in [
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ]
}


def build(cls: type, tree: Any, prefix: str) -> Any:
    """Returns dataclass `cls` built from a mapping; `prefix` is its dotted key, "" at the root."""
    tree = {} if tree in _NULLS else tree
    if not isinstance(tree, Mapping):
        remedy = _section_remedy(prefix, tree)
        raise ConfigError(f"{prefix}: expected a section (a mapping), got {tree!r}{remedy}")
    # Hints are strings in the source, so they are evaluated in the schema's module.
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in tree:
        if name not in fields:
            raise ConfigError(unknown_key(join_key(prefix, str(name)), prefix, tree[name]))
    values = {}
    for name, field in fields.items():
        key = join_key(prefix, name)
        if name in tree:
            try:
                values[name] = _checked(coerce(hints[name], tree[name], key), field, key)
            except ConfigError as error:
                raise ConfigError(f"{error}{_value_remedy(key, tree[name])}") from None
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = build(typing.cast(type, hints[name]), {}, key)
        elif default_of(field) is dataclasses.MISSING:
            raise ConfigError(f"{key} is required and missing: {help_texts(cls)[name]}")
    return cls(**values)


def coerce(hint: Any, value: Any, prefix: str) -> Any:
    """Returns `value` as the declared type. PyYAML reads "lr: 1e-6" as text; here it is a float."""
    value = _interpret(hint, value)
    origin: Any = typing.get_origin(hint)
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, prefix)
    if origin is Literal:
        # 1 == True in Python, so the type is compared too.
        if any(value == option and type(value) is type(option) for option in args):
            return value
        raise ConfigError(f"{prefix} must be one of {', '.join(map(str, args))}; got {value!r}")
    if origin in (Union, types.UnionType):
        return _coerce_union(hint, value, prefix)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{prefix} must be a list; got {value!r}")
        hints = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(value) != len(hints):
            raise ConfigError(
                f"{prefix} must have {len(hints)} values; got {len(value)}: {value!r}"
            )
        return tuple(coerce(hints[i], item, f"{prefix}.{i}") for i, item in enumerate(value))
    if origin is dict:
        return _coerce_mapping(args[1], value, prefix)
    return _coerce_scalar(hint, value, prefix)


def _coerce_union(hint: Any, value: Any, prefix: str) -> Any:
    """Returns `value` as the first type of a union that accepts it."""
    args = typing.get_args(hint)
    if value is None and type(None) in args:
        return None
    # Literals first: one of their words must not be taken for a list with one name.
    options = [option for option in args if option is not type(None)]
    options.sort(key=_is_no_literal)
    for option in options:
        try:
            return coerce(option, value, prefix)
        except ConfigError:
            if len(options) == 1:
                raise
    raise ConfigError(f"{prefix} must be {type_name(hint)}; got {value!r}")


def _is_no_literal(hint: Any) -> bool:
    origin: Any = typing.get_origin(hint)
    return origin is not Literal


def _coerce_mapping(hint: Any, value: Any, prefix: str) -> dict[str, Any]:
    """Returns a mapping of names; `hint` is the type of its values."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{prefix} must be a mapping with names as keys; got {value!r}")
    if hint is not Any:
        return {name: coerce(hint, item, join_key(prefix, name)) for name, item in value.items()}
    for name, leaf in flat(value, prefix).items():
        # YAML also has dates, sets and bytes, which JSON has not.
        if leaf is not None and not isinstance(leaf, str | int | float | list | dict):
            raise ConfigError(f"{name} must be text or a number; got {leaf!r}")
    return value


def _coerce_scalar(hint: Any, value: Any, prefix: str) -> Any:
    """Returns `value` as a bool, int, float or text. Raises ConfigError if it is none of `hint`."""
    is_bool = isinstance(value, bool)
    if hint is bool and is_bool:
        return value
    if hint is int:
        # At most 18 digits: every such number fits into 63 bits.
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value):
            return int(value)
        if isinstance(value, int) and not is_bool and abs(value) < 1 << 63:
            return value
    # A bool is a number for Python. nan and inf cannot be meant.
    if hint is float and not is_bool:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise ConfigError(f"{prefix} must be a finite number; got {value!r}")
    if hint is str and isinstance(value, str | int | float | date) and not is_bool:
        return str(value)
    raise ConfigError(f"{prefix} must be {type_name(hint)}; got {value!r}")


_DTYPES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
}


def _interpret(hint: Any, value: Any) -> Any:
    """Returns what `value` can only mean for this type, else `value` itself.

    "null" is None, 1e3 is a whole number, one name is a list of names, bf16 is bfloat16.
    """
    origin: Any = typing.get_origin(hint)
    args = typing.get_args(hint)
    if isinstance(value, str):
        is_union = origin in (Union, types.UnionType)
        if is_union and type(None) in args and value.strip().lower() in ("none", "null"):
            return None
        # The command line has lists as "wandb,tensorboard".
        if origin is tuple and args[0] is str:
            return [name for name in re.split(r"[,\s]+", value) if name]
        if origin is Literal and value not in args and _DTYPES.get(value) in args:
            return _DTYPES[value]
        is_number = re.fullmatch(r"[+-]?\d{1,18}(\.\d{0,18})?([eE][+]?\d{1,2})?", value)
        if hint is int and is_number and re.search(r"[.eE]", value):
            value = float(value)
    # Above 2^53 a float no longer tells neighbouring whole numbers apart.
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _checked(value: Any, field: dataclasses.Field[Any], key: str) -> Any:
    """Returns the checked value of a declared key, with `~` in paths replaced.

    All numbers must be in bounds, required text must not be empty, and no text may hold control
    characters. Raises ConfigError.
    """
    bounds = field.metadata.get("bounds", {})
    leaves = flat(list(value) if isinstance(value, tuple) else value, key)
    for name, leaf in leaves.items():
        is_number = isinstance(leaf, int | float)
        if is_number and not all(_COMPARISONS[s](leaf, bound) for s, bound in bounds.items()):
            rule = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items())
            # Whole numbers are shown in full, others without trailing zeros.
            number = leaf if list(bounds) == [">="] else format(leaf, "g")
            raise ConfigError(f"{name} must be {rule}; got {number}")
    # A required text is a path, and no path has a NUL character.
    is_required = default_of(field) is dataclasses.MISSING and isinstance(value, str)
    if is_required and (not value.strip() or "\0" in value):
        raise ConfigError(f"{key} must not be empty, nor contain a NUL character; got {value!r}")
    if field.name not in _MULTILINE_KEYS:
        for name, text in leaves.items():
            if isinstance(text, str) and CONTROL.search(text):
                rule = "must not contain a control character, as a line break is"
                raise ConfigError(f"{name} {rule}; got {text!r}")
    return _expand_paths(value, key) if field.metadata.get("is_path") else value


def _expand_paths(value: Any, key: str) -> Any:
    """Returns a path, or a mapping of names to paths, with `~` and `~user` replaced.

    Relative paths stay relative to the working folder. Variables ($SCRATCH) are left to the shell,
    which expands them on the command line: a config would mean another folder to each user.
    """
    if isinstance(value, dict):
        return {name: _expand_paths(path, join_key(key, name)) for name, path in value.items()}
    if not isinstance(value, str):
        return value
    names = value.split("/")
    if len(os.fsencode(value)) > _MAX_PATH_BYTES or any(
        len(os.fsencode(name)) > _MAX_NAME_BYTES for name in names
    ):
        rule = f"a path has {_MAX_PATH_BYTES} bytes at the most, and a name in it {_MAX_NAME_BYTES}"
        raise ConfigError(f"{key}: {value[:40]}... is too long for a path: {rule}")
    if value[:1] + value[-1:] in _CURLY_QUOTES:
        rule = "has the quotes of a text processor around it; write it without"
        raise ConfigError(f"{key}: {value} {rule}")
    expanded = os.path.expanduser(value)
    if key == "run_dir":
        _check_run_dir(value, expanded)
    return expanded


def _check_run_dir(text: str, expanded: str) -> None:
    """Raises ConfigError for a run_dir that names another place than its text says, or none."""
    if re.match(r"[a-zA-Z][\w+.-]*://", text):
        rule = "is a URL, and checkpoints are written to a folder; mount it, and name that"
        raise ConfigError(f"run_dir: {text} {rule}")
    if re.search(r"\$[{\w]", text):
        remedy = "give it on the command line, where the shell does"
        raise ConfigError(f"run_dir: {text}: variables are not expanded in a config: {remedy}")
    if expanded.startswith("~"):
        user = text.split("/")[0].removeprefix("~") or "with a home folder"
        raise ConfigError(f"run_dir: {text}: there is no user {user}; name the folder itself")


def key_names(cls: type, prefix: str = "") -> list[str]:
    """Returns the dotted names of all keys and sections."""
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        names.append(join_key(prefix, name))
        if dataclasses.is_dataclass(hint):
            names += key_names(typing.cast(type, hint), names[-1])
    return names


def unknown_key(key: str, prefix: str, value: Any) -> str:
    """Returns the error line for a key that does not exist in section `prefix`.

    It names our key for another trainer's name, or the key that was probably meant.
    """
    name = key.removeprefix(f"{prefix}.") if prefix else key
    # In the order of how sure the answer is.
    if name in REFUSED_KEYS and prefix in ("", "rollout"):
        return f"{key}: {REFUSED_KEYS[name]}"
    if "." in name and (key in key_names(Config) or name.startswith("rewards.")):
        section, _, last_name = key.rpartition(".")
        rule = "a key with a dot is for the command line; in the file write"
        return f"{key}: {rule} {section}: {{{last_name}: {value}}}"
    if translation := translate_key(key, value):
        return translation
    is_last_name = any(
        declared_key.rpartition(".")[2] == name for declared_key in key_names(Config)
    )
    if not is_last_name and (translation := translate_last_part(key)):
        return translation
    if similar := _similar_key(name, prefix, is_section=isinstance(value, dict)):
        return f"{key}: unknown key; did you mean {similar}?"
    return translate_misspelt_key(key) or f"{key}: unknown key; --help lists them all"


# Two names count as similar from this ratio of difflib on: in the same section, and in another.
_SAME_SECTION_RATIO = 0.7
_OTHER_SECTION_RATIO = 0.85


def _similar_key(name: str, prefix: str, *, is_section: bool) -> str | None:
    """Returns a key with a similar name in the same section, else one in another section."""
    known_values = key_names(Config)
    if prefix.startswith("rewards"):
        known_values = [join_key(prefix, field.name) for field in dataclasses.fields(RewardConfig)]
    sections = {key.rpartition(".")[0] for key in known_values}
    if not is_section:
        known_values = [key for key in known_values if key not in sections]
    # A typo in the right section comes before the same name elsewhere.
    siblings = {
        key.rpartition(".")[2]: key for key in known_values if key.rpartition(".")[0] == prefix
    }
    if similar := _similar_name(name, siblings, _SAME_SECTION_RATIO):
        return siblings[similar]
    last_names = {key.rpartition(".")[2] for key in known_values}
    similar = name if name in last_names else _similar_name(name, last_names, _OTHER_SECTION_RATIO)
    keys = keys_named(similar, known_values)
    return keys[0] if len(keys) == 1 else None


def keys_named(name: str | None, all_keys: Iterable[str]) -> list[str]:
    """Returns the keys with this last part. Where policy and critic both have it, the policy's."""
    keys = [key for key in all_keys if key.rpartition(".")[2] == name]
    return [key for key in keys if not key.startswith("critic.")] or keys


def _similar_name(name: str, names: Iterable[str], ratio: float) -> str | None:
    names = list(names)
    similar = difflib.get_close_matches(name, names, n=1, cutoff=ratio)
    if not similar and ratio == _SAME_SECTION_RATIO:
        similar = [candidate for candidate in names if _is_cut_short(name, candidate)]
    # max_lr looks like min_lr, but it means the opposite.
    return similar[0] if similar and _extremes(similar[0]) == _extremes(name) else None


def _is_cut_short(name: str, candidate: str) -> bool:
    """True for temp and temperature, or lrate and lr; lr_end is another thing than lr."""
    short, long = sorted((name, candidate), key=len)
    return long.startswith(short) and long[len(short) :].isalpha()


def _extremes(name: str) -> list[str]:
    return re.findall(r"min|max|low|high", name)


# How people write numbers, for any key: a pattern and the number as YAML has it.
_NUMBERS = (
    (r"[+-]?[1-9]\d{0,2}([,_ ]\d{3})+", lambda text: re.sub(r"[,_ ]", "", text)),
    (r"[+-]?\d+,\d+", lambda text: f"{text.replace(',', '.')}, with a point"),
    (
        r"\d+(\.\d+)?[kK]",
        lambda text: f"{float(text[:-1]) * 1000:.0f}, or {float(text[:-1]) * 1024:.0f}",
    ),
    (r"\d+(\.\d+)?[mM]", lambda text: f"{float(text[:-1]) * 1e6:.0f}"),
    (r"\d+(\.\d+)? ?%", lambda text: f"{float(text.rstrip(' %')) / 100:g}, as a share"),
)


@functools.cache
def _read_remedies() -> list[list[str]]:
    """Returns the rows of remedies.tsv: key, pattern of a value, remedy."""
    path = Path(__file__).with_name("remedies.tsv")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def _value_remedy(key: str, value: Any) -> str:
    """Returns what is added to the line that refuses this value; "" where its rule is enough."""
    for known_key, pattern, remedy in _read_remedies():
        if known_key == key and re.fullmatch(pattern, str(value), re.DOTALL):
            return f"; {remedy.replace('VALUE', str(value))}"
    for pattern, rewrite in _NUMBERS:
        if isinstance(value, str) and re.fullmatch(pattern, value):
            return f"; write {rewrite(value)}"
    return ""


def _section_remedy(prefix: str, value: Any) -> str:
    """Returns what is added where a section is expected and something else is written."""
    if not isinstance(value, str):
        return ""
    if prefix.startswith("rewards."):
        return f"; {{function: '{value}'}}" if ".py:" in value else f"; {{name: {value}}}"
    match = re.fullmatch(r"(\w+):(\S+)", value)
    return f"; a blank is missing after the colon: {match[1]}: {match[2]}" if match else ""


# Parameters of reward functions in other trainers. No column of a row has such a name.
_FOREIGN_PARAMETERS = [
    "data_source",
    "solution_str",
    "ground_truth",
    "extra_info",
    "queries",
    "labels",
    "completion",
    "prompt",
    "response",
    "responses",
    "reward_kwargs",
]


def foreign_parameter_hint(parameter: str) -> str:
    """Returns what is added to the line for a reward function that asks for an unknown column."""
    if parameter not in _FOREIGN_PARAMETERS:
        return ""
    signature = "fn(prompts, completions, completion_ids, **columns)"
    return (
        f"; {parameter!r} is of another trainer's signature: "
        f"here it is {signature}, lists in, a list of numbers out"
    )
