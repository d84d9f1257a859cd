"""Where the rows of a model's parameters lie in a checkpoint, if not in a tensor of the same name.

transformers renames some parameters, and keeps all experts of a layer in one: `gate_up_proj`
[experts, 2 * intermediate, hidden] has the tensors of two matrices of each expert. Its own
conversion says which; no name of a model stands here."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.sharding import num_columns


class StoredPart(NamedTuple):
    """Describes rows of a parameter that are one tensor in a checkpoint.

    All dimensions of a parameter but the last count as rows."""

    name: str
    """Name in the checkpoint."""
    start: int
    """First of the parameter's rows."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape) // num_columns(self.shape)


# By the parameter's name.
StoredParts = dict[str, list[StoredPart]]


def has_experts(model: Any) -> bool:
    """Returns True if a parameter has the matrices of several experts."""
    return any(parameter.dim() == 3 for parameter in model.parameters())


def saved_parts(model: Any) -> StoredParts:
    """Returns what transformers would write of each parameter that it does not write as it is.

    {} for a model without experts, whose engine takes the parameters' own names. Raises ConfigError
    if a tensor on disk has not consecutive rows of one parameter."""
    if not has_experts(model):
        return {}
    with torch.device("cpu"):  # the model may be under construction on the meta device
        return _saved_parts(model)


def _saved_parts(model: Any) -> StoredParts:
    parameters = dict(model.named_parameters())
    # Each row of the whole model gets a number, and the conversion shows where the numbers go. Two
    # columns, which take no memory: transformers drops a dimension of size 1.
    starts = list(
        accumulate((p.numel() // num_columns(p.shape) for p in parameters.values()), initial=0)
    )
    numbers = {
        name: torch.arange(start, end)
        .view(*parameter.shape[:-1] or (len(parameter),), 1)
        .expand(*[-1] * max(1, parameter.dim() - 1), 2)
        for (name, parameter), (start, end) in zip(
            parameters.items(), pairwise(starts), strict=True
        )
    }
    names = list(parameters)
    parts: StoredParts = {}
    for name, converted in revert_weight_conversion(model, numbers).items():
        rows = converted[..., 0].flatten()
        position = bisect_right(starts, int(rows[0])) - 1
        owner = names[position]
        in_order = torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows)))
        if not in_order or rows[-1] >= starts[position + 1]:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {name} in another order than it is stored;"
                " only rows that stay together can be synced"
            )
        if name != owner:
            columns = parameters[owner].shape[-1:] if parameters[owner].dim() > 1 else ()
            shape = (*converted.shape[:-1], *columns)
            part = StoredPart(name, int(rows[0]) - starts[position], shape)
            parts.setdefault(owner, []).append(part)
    return parts


def stored_parts(model: Any, stored: Iterable[str]) -> StoredParts:
    """Returns where a checkpoint with the tensors `stored` has the model's parameters, if they
    differ.

    transformers renames some when it loads them (GPT-NeoX's lm_head), and a decoder may have been
    stored by itself."""
    parameters = dict(model.named_parameters())
    stored = set(stored)
    missing = parameters.keys() - stored
    if not missing:
        return {}
    prefix = f"{model.base_model_prefix}."
    on_disk: StoredParts = {}
    for name, parts in saved_parts(model).items():
        for alone in (False, True):
            candidates = [
                part._replace(name=part.name.removeprefix(prefix)) if alone else part
                for part in parts
            ]
            if name in missing and all(part.name in stored for part in candidates):
                on_disk.setdefault(name, candidates)
    renamings = [
        renaming
        for renaming in get_model_conversion_mapping(model)
        if isinstance(renaming, WeightRenaming)
    ]
    for name in stored - parameters.keys():
        renamed = name
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        # A decoder that was stored by itself lacks the prefix of the whole model.
        for candidate in (renamed, f"{prefix}{renamed}"):
            if candidate in missing:
                part = StoredPart(name, 0, tuple(parameters[candidate].shape))
                on_disk.setdefault(candidate, [part])
    return on_disk
