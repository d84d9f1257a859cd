"""Every config key in words: for --help, and as Markdown for configs/README.md.

python -m grpo_spmd.config.describe      prints the Markdown
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

from grpo_spmd.config.dump import join_key
from grpo_spmd.config.schema import Config, RewardConfig

_LONGEST_WORD = 50
_KeyText = tuple[str, str, str, str]  # name; default as YAML has it, "" if required; type and bounds; meaning


def describe_keys(columns: int = 80) -> str:
    """Every config key for `--help`, in lines of at most `columns`: its name with what it may be, its meaning below."""
    lines = []
    for name, default, values, meaning in _keys(Config, ""):
        if len(values) > _LONGEST_WORD:  # which no line would be broken in
            values = values.replace("|", " | ")
        head = f"{name}  ({values}; {f'default {default}' if default else 'required'})"
        for text, first in ((head, "  "), (meaning, "      ")):
            lines += textwrap.wrap(
                text, columns, initial_indent=first, subsequent_indent="      ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    return "\n".join(lines)


def keys_as_markdown() -> str:
    """Every config key as Markdown: a table of the keys without a section, then one for each section."""
    lines, section = [], None
    for name, default, values, meaning in sorted(_keys(Config, ""), key=lambda key: "." in key[0]):
        of = name.split(".")[0] if "." in name else "Without a section"
        if of != section:
            section = of
            lines += ["", f"### {of}", "", "| key | default | value | meaning |", "|---|---|---|---|"]
        cells = (f"`{name}`", f"`{default}`" if default else "required", values, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in typing.get_args(hint))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null",
             tuple: "a list", dict: "a mapping"}  # fmt: skip
    return names[origin or hint]


def _keys(cls: type, where: str) -> Iterator[_KeyText]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, full = hints[field.name], join_key(where, field.name)
        if dataclasses.is_dataclass(hint):
            yield from _keys(typing.cast(type, hint), full)
        elif full == "rewards":
            yield from _keys(RewardConfig, "rewards.N")
        else:
            kind, null, _ = type_name(hint).partition(" or null")
            bounds = "".join(f" and {sign} {bound:g}" for sign, bound in field.metadata["bounds"].items())
            values = kind + bounds.replace(" and", "", 1) + null
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = "" if field.metadata["required"] else value if isinstance(value, str) else json.dumps(value)
            yield full, default, values, field.metadata["doc"]


if __name__ == "__main__":
    print(keys_as_markdown())
