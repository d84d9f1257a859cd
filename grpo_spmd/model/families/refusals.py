"""Refuses models that would train on wrong logprobs without a word. Whatever else does, the engine's logprobs show at
step 0 (proofs/logprob_check.py)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.attention import PackedLayout, packed_attention
from grpo_spmd.model.config_json import head_dim, refuse_by_config
from grpo_spmd.model.families.build import as_config_error, build_hf_model, decoder_layers
from grpo_spmd.model.families.logits import logits_map
from grpo_spmd.model.hf_files import checkpoint_folder, load_config, tensor_files
from grpo_spmd.model.lora import hf_name, is_adapter


def refuse_unsupported(hf_config: Any, path: str, *, is_policy: bool = True) -> None:
    """Raises ConfigError for what config.json shows. Of another model than a policy any head will do."""
    refuse_by_config(hf_config.to_dict() | ({} if is_policy else {"architectures": None}), path)
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")


def refuse_window(hf_config: Any, path: str, longest: int) -> None:
    """`longest`: tokens of a rollout at most."""
    window = getattr(hf_config, "sliding_window", None)
    if hf_config.model_type == "cohere2" and window is not None and longest > window:
        why = f"beyond its window of {window} tokens vLLM lets it see one token more than transformers does"
        how = f"data.max_prompt_tokens + rollout.max_completion_tokens ({longest}) may be {window} at most"
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}): {why}; {how}")


def refuse_head_bias(model: Any, path: str) -> None:
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(
            f"model.path: {path} has a bias in its lm_head, which the chunked logprobs do not support"
        )


def trainable_config(path: str, longest: int, *, is_policy: bool = True) -> Any:
    """Of the model of `path`, for rollouts of `longest` tokens, with dropout off: it would make the policy differ from
    the engine that sampled. Raises ConfigError."""
    hf_config = load_config(path)
    refuse_unsupported(hf_config, path, is_policy=is_policy)
    refuse_window(hf_config, path, longest)
    for name, value in vars(hf_config).items():
        if isinstance(value, int | float) and re.search("dropout|pdrop|layerdrop", name):
            setattr(hf_config, name, 0.0)
    return hf_config


# What a checkpoint's tensors are called, and which of them are none of the policy's.


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
    no_matter = {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    } - shapes.keys()  # tied
    no_matter |= {name for name, _ in model.named_buffers()}
    ignored = [
        re.compile(pattern)
        for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    for path in sorted(set(where.values())):
        with safe_open(path, framework="pt") as file:
            for name in sorted(name for name, of in where.items() if of == path):
                tensor = file.get_slice(name)
                shape, is_known = (
                    list(tensor.get_shape()),
                    name in no_matter or _BUFFERS.search(name),
                )
                if name in names:
                    _refuse_format(name, tensor.get_dtype(), shape, shapes[names[name]], folder)
                elif not (
                    is_known
                    or (_MASKS.search(name) and len(shape) != 1)
                    or any(pattern.search(name) for pattern in ignored)
                ):
                    unused.append(name)
    has_unused = (
        f"{_and_others(unused)}, which {type(model).__name__} has no place for" if unused else ""
    )
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


def refuse_unsynced_tensors(
    model: Any, tensors_of: Callable[[Collection[str]], Sequence[Any]], fits: Callable[..., bool]
) -> None:
    """Raises ConfigError, on all ranks alike, where the policy's model would train a tensor that the engine has no
    place for, or the engine has one that no sync would fill. `tensors_of`: given HF's names, what the engine holds
    (`engine.weight_map.EngineTensor`). Tensors of a layout that is not known count by their rows."""
    named = model.named_parameters(remove_duplicate=False)
    of_policy = {hf_name(name): parameter for name, parameter in named if not is_adapter(name)}
    tensors = [tensor for tensor in tensors_of(of_policy) if not is_adapter(tensor.parts[0].name)]
    unknown = {
        tensor.engine_name: tensor.parts for tensor in tensors if not fits(tensor, of_policy)
    }
    found = {
        id(of_policy[part.name])
        for tensor in tensors
        for part in tensor.parts
        if fits(tensor, of_policy)
    }
    lacking = {
        id(parameter): name for name, parameter in of_policy.items() if id(parameter) not in found
    }
    refuse_unmatched_names(
        type(model).__name__,
        {name: len(of_policy[name]) for name in lacking.values()},
        {name: sum(part.num_hf_rows for part in parts) for name, parts in unknown.items()},
    )


def refuse_unmatched_names(
    model_class: str, lacking: Mapping[str, int], unknown: Mapping[str, int]
) -> None:
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
        why = (
            "the raw codes of a quantised checkpoint; train the one in bfloat16 or float32 instead"
        )
        raise ConfigError(f"model.path: {name} is stored as {dtype} in {folder}: {why}")
    if found != asked:
        raise ConfigError(
            f"model.path: {name} has shape {found} in {folder}, but config.json asks for {asked}"
        )


def _and_others(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


# Whether the policy's way through a model (packed rows, logprobs from its lm_head) is the model's own. Asked of the
# code that transformers has for the model, on the meta device, before vLLM starts: no list of names could be complete.


_PROBE = "grpo_spmd_probe"
_LENGTHS = [9, 15]  # of two sequences in a row
# What carries values from one token of a row to the next, and so from one sequence into the next.
_ALONG_THE_ROW = (
    "convolution|conv1d|cumsum|cumprod|cummax|cummin|logcumsumexp|roll|flip|_fft|lstm|gru"
)


def refuse_untrainable(path: str, longest: int = 0, *, is_policy: bool = True) -> None:
    """Raises ConfigError, which says why, unless the model of `path` can train on rollouts of `longest` tokens: all
    that can be known before vLLM starts. Of another model than a policy the lm_head may be missing."""
    hf_config = load_config(path)
    refuse_unsupported(hf_config, path, is_policy=is_policy)
    refuse_window(hf_config, path, longest)
    with torch.device("meta"):
        model = build_hf_model(hf_config, path, attn_implementation=_PROBE).eval()
    with as_config_error(path, "has sizes that differ from layer to layer"):
        head_dim(hf_config)
    refuse_structure(model, path)
    if is_policy:
        refuse_tensors(model, checkpoint_folder(path))
    logits_map(model)
    refuse_other_maths(model, path)


def refuse_structure(model: Any, path: str) -> None:
    """Raises ConfigError for a model whose modules show that it cannot train."""
    decoder_layers(model)
    refuse_head_bias(model, path)
    for name, module in model.named_modules():
        if re.search("Experts|SparseMoe", type(module).__name__):
            raise ConfigError(
                f"model.path: {path} has experts ({name}): mixture of experts is not supported yet"
            )
        if type(module) is Conv1D:
            why = "has its weights transposed (Conv1D), in which the proof of the weight sync cannot compare them"
            raise ConfigError(f"model.path: {path} ({name}) {why}")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.state_dict().items():
        if name not in parameters and buffer.is_floating_point():
            why = "which is no parameter: the weight sync would not bring it to the engine"
            raise ConfigError(f"model.path: {path} has {name} in its checkpoint, {why}")
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        why = "counts positions from the start of a row, so that sequences cannot share one"
        raise ConfigError(
            f"model.path: the decoder of {type(model).__name__} ({path}) takes no position_ids: it {why}"
        )


@torch.no_grad()
def refuse_other_maths(model: Any, path: str) -> None:
    """Raises ConfigError where the model, run on the meta device, attends in another way than through our function, or
    lets tokens of a row meet elsewhere."""
    name, decoder, trace = type(model).__name__, model.get_decoder(), _Trace()
    layout = _ProbeLayout(_LENGTHS, torch.device("meta"), "sdpa")
    ids = torch.zeros(1, sum(_LENGTHS), dtype=torch.long, device="meta")
    row = {"input_ids": ids, "position_ids": ids.clone()}
    with as_config_error(path, f"({name}) cannot be run over packed rows"), trace:
        out = decoder(**row, use_cache=False, packed_layout=layout)
        hidden = out.last_hidden_state
    num_layers = len(decoder_layers(model))
    if layout.num_calls != num_layers:
        how = f"{layout.num_calls} times in its {num_layers} layers, and packed rows need it once in each"
        raise ConfigError(
            f"model.path: {path} ({name}) attends through transformers' attention interface {how}"
        )
    along = next(
        (operator for operator in trace.operators if re.search(_ALONG_THE_ROW, operator)), None
    )
    if along is not None:
        kind = f"layers other than attention ({along})"
        raise ConfigError(
            f"model.path: {path} ({name}) has {kind}, which packed rows do not support"
        )
    head = model.get_output_embeddings()
    if tuple(hidden.shape) != (*ids.shape, head.weight.shape[1]):
        raise ConfigError(
            f"model.path: {path} ({name}) does not put its lm_head on the decoder's hidden states"
        )


class _Trace(TorchDispatchMode):
    """The names of torch's operators as they are called; a number read out of a tensor, which has none on the meta
    device, is that of tokens in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.operators.append(name)
        if name in ("_local_scalar_dense", "item", "is_nonzero"):
            return bool(sum(_LENGTHS)) if args[0].dtype == torch.bool else sum(_LENGTHS)
        return func(*args, **(kwargs or {}))


class _ProbeLayout(PackedLayout):
    """Counts the calls of the attention function that it was given to."""

    num_calls = 0

    def count(self) -> None:
        self.num_calls += 1


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    layout = more.get("packed_layout")
    if not isinstance(layout, _ProbeLayout):
        why = (
            "is not told where the sequences of a packed row lie: its layers hand nothing on to it"
        )
        raise ConfigError(f"model.path: {type(module).__name__} {why}")
    layout.count()
    if attention_mask is not None:
        why = "brings an attention mask of its own, which packed rows do not support"
        raise ConfigError(f"model.path: {type(module).__name__} {why}")
    if not getattr(module, "is_causal", True):
        raise ConfigError(
            f"model.path: {type(module).__name__} is not causal; only causal decoders train"
        )
    out: tuple[Tensor, None] = packed_attention(module, query, key, value, attention_mask, **more)
    return out


AttentionInterface.register(_PROBE, _probe_attention)
