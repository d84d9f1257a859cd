"""The sizes of a decoder, as its config.json names them. Imports no torch, so that preflight can use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dimensions:
    """What config.json says of a decoder with attention and a gated MLP in each layer."""

    hidden: int  # D
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # F
    vocabulary: int  # V


def dimensions(config: Mapping[str, Any]) -> Dimensions | None:
    """The sizes in a config.json, or None where it does not name them all."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = [config.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    hidden, layers, heads, intermediate, vocabulary = (int(str(size)) for size in sizes)
    kv_heads, width = config.get("num_key_value_heads") or heads, config.get("head_dim") or 1
    if not isinstance(kv_heads, int) or not isinstance(width, int):  # some have one for each layer
        return None
    return Dimensions(hidden, layers, heads, kv_heads, head_dim(config), intermediate, vocabulary)


def head_dim(config: Any) -> int:
    """Width of an attention head, by what config.json holds or by transformers' config; 0 where it names no heads."""

    def size(name: str) -> Any:  # transformers knows other names for some, which only its attributes lead to
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    heads = size("num_attention_heads")
    return int(size("head_dim") or (size("hidden_size") // heads if heads else 0))
