"""YAML and overrides into a checked Config, and where each value came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_spmd.config.algorithm import check_needs, of_recipe, recipe_of, source_of, with_recipe
from grpo_spmd.config.coerce import build
from grpo_spmd.config.devices import fitted_to_cpu
from grpo_spmd.config.dump import flat, flat_config, join_key
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.home import looked_for, with_home
from grpo_spmd.config.overrides import apply_override
from grpo_spmd.config.rules import check_rules
from grpo_spmd.config.schema import Config
from grpo_spmd.config.yaml_reader import YAML_ERRORS, StrictLoader, not_a_mapping, not_yaml

_MOST_BYTES = 1 << 20


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, coerce by declared type, cross-check; or ConfigError."""
    return load_config_with_sources(path, overrides)[0]


def load_config_with_sources(
    path: str | Path, overrides: Sequence[str] = (), *, on_cpu: bool = False
) -> tuple[Config, dict[str, str]]:
    """The config, and for each key of `flat_config`, in order: "default", "FILE:LINE", "command line" or "from
    algorithm: NAME"; and behind the first two what of the algorithm's they stand in for."""
    tree, given = read_tree(Path(path).expanduser())
    for override in overrides:
        name, value = apply_override(tree, override)
        # What the file said below this key is gone with the value that held it.
        given = {known: source for known, source in given.items() if known != name and not known.startswith(f"{name}.")}
        given |= {join_key(name, inner) if inner else name: "command line" for inner in flat(value)}
    config = config_of(tree, on_cpu=on_cpu)
    values = flat_config(config).items()
    return config, {name: source_of(name, value, given.get(name, "default"), tree) for name, value in values}


def config_of(tree: dict[str, Any], *, on_cpu: bool = False) -> Config:
    """Coerced by declared type and cross-checked; `on_cpu`: with a CPU's defaults. Raises ConfigError."""
    recipe = recipe_of(tree)
    config: Config = build(Config, with_recipe(tree, recipe), "")
    if on_cpu:
        config = fitted_to_cpu(config, tree)
    check_needs(config)
    try:
        check_rules(config)
    except ConfigError as error:
        raise ConfigError(f"{error}{of_recipe(str(error), tree, recipe)}") from None
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
        loader = StrictLoader(text)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node is not None else None
        _mark_lines(node, "", path, given)
    except YAML_ERRORS as error:
        raise not_yaml(error, text, path) from None
    if not isinstance(tree, dict):
        raise not_a_mapping(tree, text, path)
    return tree, given


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
