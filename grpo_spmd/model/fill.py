"""Fills the shards of a policy that was built on the meta device from safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.hf_files import tensor_files
from grpo_spmd.model.sharding import first_row


@torch.no_grad()
def load_weights(parameters: Iterable[tuple[str, DTensor]], folder: Path) -> None:
    """Fill every shard, given with its HF name: each rank reads its own rows of each tensor and nothing else. Raises
    ConfigError that names a tensor which is missing or has another shape."""
    where = tensor_files(folder)
    for name, parameter in parameters:
        if name not in where:
            raise ConfigError(f"model.path: {folder} has no tensor {name}")
        # opened anew for each tensor: pages of a mapping count as resident memory until it is closed
        with safe_open(where[name], framework="pt") as file:
            stored = file.get_slice(name)
            found, asked = list(stored.get_shape()), list(parameter.shape)
            if found != asked:
                shapes = f"has shape {found} in {folder}, but config.json asks for {asked}"
                raise ConfigError(f"model.path: {name} {shapes}")
            local, first = parameter.to_local(), first_row(parameter)
            if len(local):
                local.copy_(stored[first : first + len(local)])
