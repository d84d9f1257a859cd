"""`section.key=value` put into the tree of a config."""

from __future__ import annotations

import re
from typing import Any

import yaml

from grpo_spmd.config.coerce import CONTROL
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.yaml_reader import YAML_ERRORS, StrictLoader


def apply_override(tree: dict[str, Any], override: str) -> tuple[str, Any]:
    """Put one `section.key=value` into `tree`; returns its dotted key and value."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    _check_name(name, text)
    if CONTROL.search(override):
        raise ConfigError(f'{name}: the value {text!r} holds a control character; write it as YAML does, as in "a\\nb"')
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except YAML_ERRORS as error:
        why = getattr(error, "problem", None) or ""
        why = f": {why}" if "base 8" in why else ""
        raise ConfigError(f"{name}: the value {text!r} is not valid YAML{why}") from None
    node: Any = tree
    *parents, last = name.split(".")
    for depth, parent in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(node, list):
            node = node[_list_index(node, parent, where)]
        elif isinstance(node, dict):
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{name}: {where} is a value, not a section")
    if isinstance(node, list):
        node[_list_index(node, last, name)] = value
    else:
        node[last] = value
    return name, value


def _check_name(name: str, text: str) -> None:
    """Names as Hydra and Python write them."""
    ours = re.sub(r"\[(\d+)\]", r".\1", name).lstrip("+~")
    if ours != name and ours:
        rule = "no + or ~ stands before a key" if name[0] in "+~" else "an index stands after a dot"
        raise ConfigError(f"{name}: {rule}: {ours}={text}")


def _list_index(node: list[Any], text: str, where: str) -> int:
    if not text.isdecimal() or int(text) >= len(node):
        rule = f"{text!r} is not an index into a list of {len(node)}"
        whole = "[{name: exact}, {name: gsm8k}]" if where.startswith("rewards.") else "[...]"
        raise ConfigError(f"{where}: {rule}; to add one, give the whole list: {where.split('.')[0]}={whole}")
    return int(text)
