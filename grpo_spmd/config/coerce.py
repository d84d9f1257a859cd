"""Plain YAML values into the declared types, within their bounds, or one line: the key, the value, what it must be."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal, Union

from grpo_spmd.config.describe import type_name
from grpo_spmd.config.dump import flat, join_key
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.spelling import as_meant, remedy_for, remedy_for_section


def build(cls: type, tree: Any, where: str) -> Any:
    """Build dataclass `cls` from mapping `tree`; `where` is the dotted path for messages ("" at the root)."""
    tree = {} if tree in (None, "None", "null") else tree
    if not isinstance(tree, Mapping):
        rule = f"expected a section (a mapping), got {tree!r}"
        raise ConfigError(f"{where}: {rule}{remedy_for_section(where, tree)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in tree:
        if name not in fields:
            from grpo_spmd.config.unknown_key import unknown_key

            raise ConfigError(unknown_key(join_key(where, str(name)), where, tree[name]))
    values = {}
    for name, field in fields.items():
        full = join_key(where, name)
        if name in tree:
            try:
                values[name] = coerce(hints[name], tree[name], full)
                _check_bounds(values[name], field, full)
            except ConfigError as error:
                raise ConfigError(f"{error}{remedy_for(full, tree[name])}") from None
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = build(typing.cast(type, hints[name]), {}, full)
        elif field.metadata["required"]:
            raise ConfigError(f"{full} is required and missing: {field.metadata['doc']}")
    return cls(**values)


# A control character, or what ends a line: in a path or a name it only misleads.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_OF_SEVERAL_LINES = ("prompt_template", "system_prompt", "args", "rewards", "engine")
_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def _check_bounds(value: Any, field: dataclasses.Field[Any], full: str) -> None:
    """Every number in `value` keeps to the bounds beside its key, and the text of a required key is not empty."""
    bounds = field.metadata.get("bounds", {})
    leaves = flat(list(value) if isinstance(value, tuple) else value, full)
    for name, number in leaves.items() if bounds else ():
        is_number = isinstance(number, int | float)
        if is_number and not all(_COMPARISONS[sign](number, bound) for sign, bound in bounds.items()):
            text = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items())
            raise ConfigError(f"{name} must be {text}; got {number if list(bounds) == ['>='] else format(number, 'g')}")
    if field.metadata.get("required") and isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ConfigError(f"{full} must not be empty, nor contain a NUL character; got {value!r}")
    texts = leaves.items() if field.name not in _OF_SEVERAL_LINES else ()
    if bad := [name for name, text in texts if isinstance(text, str) and CONTROL.search(text)]:
        raise ConfigError(f"{bad[0]} must not contain a control character, as a line break is; got {leaves[bad[0]]!r}")


# What people look for and will not find, with the reason.
REFUSED_KEYS = {
    name: f"training samples from the whole distribution: with {name} the engine draws from a part of it, while the "
    "policy's logprobs are those of the whole, so that every ratio would be off by the mass that was cut away; take it "
    "out (temperature is rollout.temperature)"
    for name in ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "logit_bias")
}  # fmt: skip


def key_names(cls: type, where: str = "") -> list[str]:
    """Dotted names of all keys and sections."""
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        full = join_key(where, name)
        names += [full, *key_names(typing.cast(type, hint), full)] if dataclasses.is_dataclass(hint) else [full]
    return names


def _is_no_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is not Literal


def coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the declared type, or ConfigError: "lr: 1e-6" is a string for PyYAML and a float here."""
    value, origin, args = as_meant(hint, value), typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
        raise ConfigError(f"{where} must be one of {', '.join(map(str, args))}; got {value!r}")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        # A word of its own before a list, which one name can stand for.
        options = sorted((option for option in args if option is not type(None)), key=_is_no_literal)
        for option in options:
            try:
                return coerce(option, value, where)
            except ConfigError:
                if len(options) == 1:
                    raise
        raise ConfigError(f"{where} must be {type_name(hint)}; got {value!r}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list; got {value!r}")
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(value) != len(kinds):
            raise ConfigError(f"{where} must have {len(kinds)} values; got {len(value)}: {value!r}")
        return tuple(coerce(kinds[i], item, f"{where}.{i}") for i, item in enumerate(value))
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{where} must be a mapping with names as keys; got {value!r}")
        if args[1] is Any:
            for name, leaf in flat(value, where).items():
                if leaf is not None and not isinstance(leaf, str | int | float | list | dict):  # dates are not JSON
                    raise ConfigError(f"{name} must be text or a number; got {leaf!r}")
            return value
        return {name: coerce(args[1], item, join_key(where, name)) for name, item in value.items()}
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
            return value
    if hint is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise ConfigError(f"{where} must be a finite number; got {value!r}")
    if hint is str and isinstance(value, str | int | float | date) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{where} must be {type_name(hint)}; got {value!r}")
