"""YAML and overrides into a checked Config, and where each value came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_spmd.config.coerce import CONTROL, build
from grpo_spmd.config.dump import flat, flat_config, join_key
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.home import looked_for, with_home
from grpo_spmd.config.rules import check_rules
from grpo_spmd.config.schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, coerce by declared type, cross-check; or ConfigError."""
    return load_config_with_sources(path, overrides)[0]


def load_config_with_sources(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """The config, and for each key of `flat_config`, in order: "default", "FILE:LINE" or "command line"."""
    tree, given = read_tree(Path(path).expanduser())
    for override in overrides:
        name, value = _apply_override(tree, override)
        # What the file said below this key is gone with the value that held it.
        given = {known: source for known, source in given.items() if known != name and not known.startswith(f"{name}.")}
        given |= {join_key(name, inner) if inner else name: "command line" for inner in flat(value)}
    config = config_of(tree)
    return config, {name: given.get(name, "default") for name in flat_config(config)}


def config_of(tree: dict[str, Any]) -> Config:
    """Coerced by declared type and cross-checked. Raises ConfigError."""
    config: Config = build(Config, tree, "")
    check_rules(config)
    return with_home(config)


def read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What a YAML file says, unchecked, and {dotted key: "FILE:LINE"}. Raises ConfigError."""
    try:
        with path.open("rb") as file:  # a device has no end
            text = file.read(_MOST_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config: cannot read {path}: {why}{looked_for(path)}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"--config: {path} is larger than {_MOST_BYTES >> 20} MiB, which no config is")
    given: dict[str, str] = {}
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node is not None else None
        _mark_lines(node, "", path, given)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, got {type(tree).__name__}")
    return tree, given


# What PyYAML raises for 2024-13-45, deep nesting, "!!bool x", "!!timestamp x", '!!int ""', a set as key, 1:1:[...]:1.0
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError, ArithmeticError)
_MOST_BYTES, _MOST_VALUES = 1 << 20, 10_000


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML silently keeps the last, and what has no end: a few lines
    of aliases to aliases are billions of values."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._num_values, self._sizes = 0, dict[yaml.Node | None, int]()  # with every alias written out

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before, is_alias = self._num_values, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._num_values += self._sizes.get(node, _MOST_VALUES) if is_alias else 1  # an alias of what holds it: no size
        self._sizes[node] = self._num_values - before
        # Python takes long to make a number of "1:2:3:...", and refuses to print a long hexadecimal one.
        is_long = isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > 1000
        if node is not None and (is_long or self._num_values > _MOST_VALUES):
            rule = f"more than {_MOST_VALUES} values, aliases written out, or a number of more than 1000 digits"
            raise yaml.composer.ComposerError(None, None, rule, node.start_mark)
        return node


def _strict_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # "<<: *anchor", whose keys may be given again
            continue
        name = loader.construct_object(key_node)
        if isinstance(name, list | dict):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is given twice", key_node.start_mark)
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def _mark_lines(node: yaml.Node | None, where: str, path: Path, given: dict[str, str]) -> None:
    """Enter {dotted key: "FILE:LINE"} for all in `node`. Once it is constructed, merged keys are its own."""
    if isinstance(node, yaml.MappingNode):
        items = [(str(key_node.value), key_node, value) for key_node, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, marked, value in items:
        full = join_key(where, name)
        given[full] = f"{path}:{marked.start_mark.line + 1}"
        _mark_lines(value, full, path, given)


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, Any]:
    """Put one `section.key=value` into `tree`; returns its dotted key and value."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    if CONTROL.search(override):
        raise ConfigError(f'{name}: the value {text!r} holds a control character; write it as YAML does, as in "a\\nb"')
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except _YAML_ERRORS:
        raise ConfigError(f"{name}: the value {text!r} is not valid YAML") from None
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


def _list_index(node: list[Any], text: str, where: str) -> int:
    if not text.isdecimal() or int(text) >= len(node):
        raise ConfigError(f"{where}: {text!r} is not an index into a list of {len(node)}")
    return int(text)
