"""Where the rows of a model's parameters lie in a checkpoint, if not in a tensor of the same name.

transformers renames some parameters, and keeps all experts of a layer in one: `gate_up_proj`
[experts, 2 * intermediate, hidden] has the tensors of two matrices of each expert. Its own
conversion says which; no name of a model stands here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.config_json import TEXT_PREFIX, has_experts, is_constant
from grpo_spmd.model.families.build import build_hf_model
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.sharding import as_matrix, num_rows


class SavedTensor(NamedTuple):
    """Describes a tensor of a checkpoint, which has rows of one of the model's parameters.

    All dimensions of a parameter but the last count as rows."""

    name: str
    """Name in the checkpoint."""
    start: int
    """Index of the first of the parameter's rows that it has."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""

    @property
    def num_rows(self) -> int:
        return num_rows(self.shape)


# The tensors of a checkpoint by the name of the parameter whose rows they have.
SavedLayout = dict[str, list[SavedTensor]]


def build_on_meta(path: str) -> Any:
    """Returns transformers' causal LM of a folder or hub id without memory for its weights."""
    with torch.device("meta"):
        return build_hf_model(load_config(path), path)


def is_mixture(model: Any) -> bool:
    """Returns True if a parameter has the matrices of several experts."""
    return any(has_experts(parameter.shape) for parameter in model.parameters())


def constants(model: Any, prefix: str = "") -> dict[str, Tensor]:
    """Returns the model's constants, by name: buffers that a checkpoint holds, alike on all
    ranks."""
    buffers = model.named_buffers(prefix)
    return {name: buffer for name, buffer in buffers if is_constant(name)}


def saved_layout(model: Any) -> SavedLayout:
    """Returns what transformers would write of each parameter that it does not write as it is.

    {} for a model without experts, whose engine takes the parameters' own names. Raises ConfigError
    if a tensor on disk has not consecutive rows of one parameter."""
    if not is_mixture(model):
        return {}
    with torch.device("cpu"):  # the model may be under construction on the meta device
        return _layout_of(model)


def _layout_of(model: Any) -> SavedLayout:
    parameters = dict(model.named_parameters())
    names = list(parameters)
    # Each row of the whole model gets a number, and the conversion shows where the numbers go.
    sizes = [num_rows(parameter.shape) for parameter in parameters.values()]
    starts = list(accumulate(sizes, initial=0))
    numbers = {}
    for (name, parameter), (start, end) in zip(parameters.items(), pairwise(starts), strict=True):
        dimensions = parameter.shape[:-1] or parameter.shape
        # Two columns, which take no memory: transformers drops a dimension of size 1.
        rows = torch.arange(start, end).view(*dimensions, 1)
        numbers[name] = rows.expand(*dimensions, 2)
    layout: SavedLayout = {}
    for name, converted in revert_weight_conversion(model, numbers).items():
        rows = converted[..., 0].flatten()
        row = int(rows[0])
        position = bisect_right(starts, row) - 1
        parameter_name = names[position]
        is_ordered = torch.equal(rows, torch.arange(row, row + len(rows)))
        if not is_ordered or rows[-1] >= starts[position + 1]:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {name} in another order than it is stored;"
                " only rows that stay together can be synced"
            )
        if name != parameter_name:
            parameter = parameters[parameter_name]
            columns = parameter.shape[-1:] if parameter.dim() > 1 else ()
            saved = SavedTensor(name, row - starts[position], (*converted.shape[:-1], *columns))
            layout.setdefault(parameter_name, []).append(saved)
    return layout


def stored_layout(model: Any, stored: Iterable[str], saved: SavedLayout) -> SavedLayout:
    """Returns where a checkpoint with tensors of these names has the model's parameters, if they
    differ. `saved` is the model's `saved_layout`.

    transformers renames some when it loads them (GPT-NeoX's lm_head), and a decoder may have been
    stored by itself."""
    parameters = dict(model.named_parameters())
    stored = set(stored)
    missing = parameters.keys() - stored
    if not missing:
        return {}
    # A decoder that was stored by itself lacks the prefix of the whole model, and one that is a
    # part of a larger model has a longer one.
    prefix = f"{model.base_model_prefix}."
    layout: SavedLayout = {}
    for name, tensors in saved.items():
        for other_prefix in (prefix, "", TEXT_PREFIX):
            candidates = [
                tensor._replace(name=tensor.name.replace(prefix, other_prefix, 1))
                for tensor in tensors
            ]
            if name in missing and all(tensor.name in stored for tensor in candidates):
                layout.setdefault(name, candidates)
    renamings = [
        renaming
        for renaming in get_model_conversion_mapping(model)
        if isinstance(renaming, WeightRenaming)
    ]
    for name in stored - parameters.keys():
        renamed = name
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        for candidate in (renamed, f"{prefix}{renamed}"):
            if candidate in missing:
                whole = SavedTensor(name, 0, tuple(parameters[candidate].shape))
                layout.setdefault(candidate, [whole])
    return layout


def read_rows(
    saved: SavedTensor, files: Mapping[str, Path], folder: Path, *, rows: Tensor, start: int
) -> None:
    """Fills those of a parameter's `rows` that a tensor on disk has. `start` is the index of the
    first of them.

    Raises ConfigError as `load_weights` does."""
    if saved.name not in files:
        raise ConfigError(f"model.path: {folder} has no tensor {saved.name}")
    begin = max(start, saved.start)
    end = min(start + len(rows), saved.start + saved.num_rows)
    # Opened again for each tensor: pages of a mapping count as resident until it is closed.
    with safe_open(files[saved.name], framework="pt") as file:
        tensor = file.get_slice(saved.name)
        shape = list(tensor.get_shape())
        if shape != list(saved.shape):
            raise ConfigError(
                f"model.path: {saved.name} has shape {shape} in {folder}, but the model asks for "
                f"{list(saved.shape)}"
            )
        if begin < end:
            # All dimensions but the last are rows: an index of the first may have several.
            height = saved.num_rows // shape[0]
            first, last = (begin - saved.start) // height, -(-(end - saved.start) // height)
            values = as_matrix(tensor[first:last])[begin - saved.start - first * height :]
            rows[begin - start : end - start] = values[: end - begin]
