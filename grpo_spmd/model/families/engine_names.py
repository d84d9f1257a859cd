"""What tensors are called in an engine, and what in HF: vLLM's classes rename some, and fuse or split others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any


def hf_names_by_engine_name(model: Any, hf_names: Collection[str]) -> dict[str, str]:
    """By what the engine's model calls a tensor, or its part in a fused one, what HF does."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # from 0.30 on; 0.28; before, no mapper stacks
        mapper = getattr(mapper, name)() if hasattr(mapper, name) else mapper
    return {renamed: name for name in hf_names for renamed in (mapper.apply_list([name]) if mapper else [name])}


def as_in_hf(engine_name: str, parts: tuple[Any, ...], hf_names: Mapping[str, str]) -> tuple[Any, ...]:
    """The parts (`engine.weight_map.TensorPart`) of an engine's tensor under HF's names: those of the fused tensor
    where HF has that in their place (GLM4's gate_up_proj)."""
    fused = hf_names.get(engine_name)
    if fused is None or any(part.name in hf_names for part in parts):
        return tuple(replace(part, name=hf_names.get(part.name, part.name)) for part in parts)
    above = list(accumulate((part.num_hf_rows for part in parts), initial=0))
    places = zip(parts, above, strict=False)
    return tuple(replace(part, name=fused, num_hf_rows=above[-1], hf_start=top + part.hf_start) for part, top in places)
