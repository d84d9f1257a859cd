"""Every config key in words, for --help."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

from grpo_spmd.config.dump import join_key
from grpo_spmd.config.schema import Config, RewardConfig


def describe_keys() -> str:
    """Every config key with its type, default and meaning, one a line, for `--help`."""
    return "\n".join(_describe(Config, ""))


def type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in typing.get_args(hint))
    if hint is type(None):
        return "null"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(hint) or str(hint).replace("typing.", "")


def _describe(cls: type, where: str) -> list[str]:
    lines = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, full = hints[field.name], join_key(where, field.name)
        if dataclasses.is_dataclass(hint):
            lines += _describe(typing.cast(type, hint), full)
            continue
        if full == "rewards":
            lines += _describe(RewardConfig, "rewards.N")
            continue
        if field.default_factory is not dataclasses.MISSING:
            default = f"default {field.default_factory()}"
        else:
            default = "required" if field.default is dataclasses.MISSING else f"default {field.default}"
        lines.append(f"  {full:36} {field.metadata['doc']} ({type_name(hint)}; {default})")
    return lines
