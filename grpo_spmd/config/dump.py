"""The resolved config as plain values, with secrets replaced."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from grpo_spmd.config.schema import Config


def flat_config(config: Config) -> dict[str, Any]:
    """`config_to_dict` as {dotted key: value}, list items by their number: "optimizer.betas.0", "rewards.0.name"."""
    return flat(config_to_dict(config))


def config_to_dict(section: Any) -> dict[str, Any]:
    """A config or section as plain YAML types; strings under names like api_key or password become "<redacted>"."""
    return dict(_plain(section))


def _plain(value: Any, name: str = "", free_form: bool = False) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {inner: _plain(item, f"{name}.{inner}", free_form=True) for inner, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, name, free_form) for item in value]
    # Only free-form mappings can hold a secret; declared keys (max_prompt_tokens, prompt_key) merely sound like one.
    if free_form and isinstance(value, str) and re.search(r"key|token(?!iz)|secret|password", name, re.IGNORECASE):
        return "<redacted>"
    return value


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """{dotted key: value} of what a tree of mappings and lists holds; an empty one is a value itself."""
    if not isinstance(value, dict | list) or not value:
        return {where: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {full: leaf for name, inner in items for full, leaf in flat(inner, join_key(where, str(name))).items()}


def join_key(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
