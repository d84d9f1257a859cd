"""What a checkpoint's tensors are called, and which of them are none of the policy's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.hf_files import tensor_files
from grpo_spmd.model.lora import hf_name, is_adapter

_FORMATS = ("F64", "F32", "F16", "BF16")
# Buffers that older checkpoints hold; a mask is a square or a number, never a row, as a bias of that name is.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb|rotary)\.inv_freq$")
_MASKS = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention)\.(bias|masked_bias)$")


def refuse_tensors(model: Any, folder: Path) -> dict[str, str]:
    """Raises ConfigError unless the checkpoint has each of the model's tensors in its shape, in a format that holds
    values, and no other: without that, the model that trains would not be the one that was stored. Returns the names on
    disk that differ (`stored_names`)."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    where, unused = tensor_files(folder), list[str]()
    stored_as = stored_names(model, where)
    names = {stored_as.get(name, name): name for name in shapes}
    no_matter = {name for name, _ in model.named_parameters(remove_duplicate=False)} - shapes.keys()  # tied
    no_matter |= {name for name, _ in model.named_buffers()}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for path in sorted(set(where.values())):
        with safe_open(path, framework="pt") as file:
            for name in sorted(name for name, of in where.items() if of == path):
                tensor = file.get_slice(name)
                shape, is_known = list(tensor.get_shape()), name in no_matter or _BUFFERS.search(name)
                if name in names:
                    _refuse_format(name, tensor.get_dtype(), shape, shapes[names[name]], folder)
                elif not (
                    is_known
                    or (_MASKS.search(name) and len(shape) != 1)
                    or any(pattern.search(name) for pattern in ignored)
                ):
                    unused.append(name)
    has_unused = f"{_and_others(unused)}, which {type(model).__name__} has no place for" if unused else ""
    if missing := [name for name in shapes if stored_as.get(name, name) not in where]:
        hint = f"; it has {has_unused}" if unused else ""
        raise ConfigError(f"model.path: {folder} has no tensor {_and_others(missing)}{hint}")
    if unused:
        why = "without them the model that trains is not the one that is stored"
        raise ConfigError(f"model.path: {folder} has {has_unused}: {why}")
    return stored_as


def stored_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Names on disk by those of the model's parameters, where they differ: what transformers renames when it loads
    (GPT-NeoX's lm_head), or a decoder that was stored by itself."""
    names, stored = {name for name, _ in model.named_parameters()}, set(stored)
    if not (missing := names - stored):
        return {}
    found, renamings = dict[str, str](), get_model_conversion_mapping(model)
    for name in stored - names:
        renamed = name
        for renaming in renamings:
            if isinstance(renaming, WeightRenaming):
                renamed = renaming.rename_source_key(renamed)[0]
        for candidate in (renamed, f"{model.base_model_prefix}.{renamed}"):
            if candidate in missing:
                found[candidate] = name
    return found


def refuse_holes(model: Any, tensors_of: Callable[[Collection[str]], Sequence[Any]], fits: Callable[..., bool]) -> None:
    """Raises ConfigError, on all ranks alike, where the policy's model would train a tensor that the engine has no
    place for, or the engine has one that no sync would fill. `tensors_of`: given HF's names, what the engine holds
    (`engine.weight_map.EngineTensor`). Tensors of a layout that is not known count by their rows."""
    named = model.named_parameters(remove_duplicate=False)
    of_policy = {hf_name(name): parameter for name, parameter in named if not is_adapter(name)}
    tensors = [tensor for tensor in tensors_of(of_policy) if not is_adapter(tensor.parts[0].name)]
    unknown = {tensor.engine_name: tensor.parts for tensor in tensors if not fits(tensor, of_policy)}
    found = {id(of_policy[part.name]) for tensor in tensors for part in tensor.parts if fits(tensor, of_policy)}
    lacking = {id(parameter): name for name, parameter in of_policy.items() if id(parameter) not in found}
    refuse_other_tensors(
        type(model).__name__,
        {name: len(of_policy[name]) for name in lacking.values()},
        {name: sum(part.num_hf_rows for part in parts) for name, parts in unknown.items()},
    )


def refuse_other_tensors(model_class: str, lacking: Mapping[str, int], unknown: Mapping[str, int]) -> None:
    """Given the rows of the policy's tensors that were not found in the engine, and of the engine's tensors that were
    not found in the policy, raises ConfigError where no layout, however strange, could hold the ones in the others."""
    if sum(lacking.values()) > sum(unknown.values()):
        what = f"{model_class} has {_and_others(sorted(lacking))}, which vLLM's model does not have"
        raise ConfigError(f"model.path: {what}: what is trained there would never be sampled from")
    if unknown and not lacking:
        what = f"vLLM's model has {_and_others(sorted(unknown))}, which {model_class} does not have"
        raise ConfigError(f"model.path: {what}: no sync would fill it")


def _refuse_format(name: str, dtype: str, found: list[int], asked: list[int], folder: Path) -> None:
    if dtype not in _FORMATS:
        why = "the raw codes of a quantised checkpoint; train the one in bfloat16 or float32 instead"
        raise ConfigError(f"model.path: {name} is stored as {dtype} in {folder}: {why}")
    if found != asked:
        raise ConfigError(f"model.path: {name} has shape {found} in {folder}, but config.json asks for {asked}")


def _and_others(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
