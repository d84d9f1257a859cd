"""Refuses models that would silently train on wrong logprobs.

Other such models are found at step 0 by proofs/logprob_check.py, which compares logprobs with the
engine's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import read_header
from grpo_spmd.model.attention import PackedLayout, packed_attention, sequence_starts
from grpo_spmd.model.config_json import (
    checkpoint_folder,
    head_dim,
    is_constant,
    load_config,
    refuse_by_config,
    tensor_files,
)
from grpo_spmd.model.families.build import (
    SavedLayout,
    SavedTensor,
    SequenceWise,
    as_config_error,
    build_hf_model,
    constants,
    decoder_layers,
    saved_layout,
    stored_layout,
)
from grpo_spmd.model.families.logits import logits_map

# Formats that hold values. Others are the codes of a quantised checkpoint.
_FORMATS = ("F64", "F32", "F16", "BF16")
# Buffers that older checkpoints hold. A mask is a square or a number. A tensor of the same name
# with one dimension is a bias.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb|rotary)\.inv_freq$")
_MASKS = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention)\.(bias|masked_bias)$")
# Operators that carry values from one token of a row to the next, and so into the next sequence.
_ALONG_THE_ROW = re.compile(
    "convolution|conv1d|cumsum|cumprod|cummax|cummin|logcumsumexp|roll|flip|_fft|lstm|gru"
)
# The probe runs a model on the meta device with an attention function of this name, over a row of
# two sequences with so many tokens.
_PROBE = "grpo_spmd_probe"
_PROBE_LENGTHS = [9, 15]


def trainable_config(path: str, max_rollout_tokens: int, *, is_policy: bool = True) -> Any:
    """Returns the model's config with dropout off, for rollouts of at most `max_rollout_tokens`
    tokens.

    With dropout the policy would differ from the engine. Raises ConfigError if the config shows
    that the model cannot train; a model that is no policy (a teacher, critic or reward model) may
    have any head."""
    hf_config = load_config(path)
    contents = hf_config.to_dict()
    if not is_policy:
        # Their heads are ours: the architecture may be a classifier's.
        contents["architectures"] = None
    refuse_by_config(contents, path)
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")
    window = getattr(hf_config, "sliding_window", None)
    if hf_config.model_type == "cohere2" and window is not None and max_rollout_tokens > window:
        raise ConfigError(
            f"model.path: {path} ({hf_config.model_type}): beyond its window of {window} tokens "
            "vLLM lets it see one token more than transformers does; data.max_prompt_tokens + "
            f"rollout.max_completion_tokens ({max_rollout_tokens}) may be {window} at most"
        )
    for name, value in vars(hf_config).items():
        if isinstance(value, int | float) and re.search("dropout|pdrop|layerdrop", name):
            setattr(hf_config, name, 0.0)
    return hf_config


def refuse_untrainable(path: str, max_rollout_tokens: int = 0, *, is_policy: bool = True) -> None:
    """Raises ConfigError if the model cannot train on rollouts of at most `max_rollout_tokens`
    tokens.

    It checks all that can be known before vLLM starts. A model that is no policy may lack an
    lm_head."""
    hf_config = trainable_config(path, max_rollout_tokens, is_policy=is_policy)
    with torch.device("meta"):
        # The loop over experts asks for numbers that the meta device does not have.
        model = build_hf_model(
            hf_config, path, attn_implementation=_PROBE, experts_implementation="batched_mm"
        ).eval()
    with as_config_error(path, "has sizes that differ from layer to layer"):
        head_dim(hf_config)
    refuse_structure(model, path)
    saved = saved_layout(model)
    if is_policy:
        refuse_tensors(model, checkpoint_folder(path), saved)
    logits_map(model)
    _refuse_other_maths(model, path)


def refuse_structure(model: Any, path: str) -> None:
    """Raises ConfigError if the model's modules show that it cannot train."""
    decoder_layers(model)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(
            f"model.path: {path} has a bias in its lm_head, which chunked logprobs do not support"
        )
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__:
            _refuse_other_experts(module, f"{path} ({name})")
        if type(module) is Conv1D:
            raise ConfigError(
                f"model.path: {path} ({name}) has its weights transposed (Conv1D), in which the "
                "proof of the weight sync cannot compare them"
            )
    # A buffer that is saved with the model is part of what it computes, and no optimizer moves it.
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.state_dict().items():
        if name not in parameters and buffer.is_floating_point() and not is_constant(name):
            raise ConfigError(
                f"model.path: {path} has {name} in its checkpoint, which is no parameter: the "
                "weight sync would not bring it to the engine"
            )
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ConfigError(
            f"model.path: the decoder of {path} takes no position_ids, so that sequences cannot "
            "share a row"
        )


def _refuse_other_experts(experts: Any, where: str) -> None:
    """Raises ConfigError unless each expert of an MoE layer is two matrices without biases:
    gate_up_proj (the gate's rows above those of up) and down_proj, neither of them transposed."""
    names = {name for name, _ in experts.named_parameters(recurse=False)}
    is_known = (
        names == {"gate_up_proj", "down_proj"}
        and not getattr(experts, "is_transposed", False)
        and getattr(experts, "is_concatenated", True)
    )
    if not is_known:
        raise ConfigError(
            f"model.path: {where} has experts with {', '.join(sorted(names))} in a layout of their "
            "own (gpt-oss has biases and interleaves gate and up); vLLM's reload writes such past "
            "its own loaders, so that no sync would be right"
        )


def refuse_tensors(model: Any, folder: Path, saved: SavedLayout) -> SavedLayout:
    """Raises ConfigError unless the checkpoint in `folder` has exactly the model's tensors.

    Each tensor must have the model's shape and a floating point dtype (no codes of a quantised
    checkpoint): else the model that trains would not be the one that is stored. Returns the
    checkpoint's `stored_layout`: which tensors hold the parameters that it has under other
    names."""
    files = tensor_files(folder)
    stored = {
        name: entry
        for path in sorted(set(files.values()))
        for name, entry in read_header(path).items()
        if name in files
    }
    layout = stored_layout(model, stored, saved)
    shapes = {
        tensor.name: list(tensor.shape)
        for name, parameter in model.named_parameters()
        for tensor in layout.get(name, [SavedTensor(name, 0, tuple(parameter.shape))])
    }
    shapes |= {name: list(constant.shape) for name, constant in constants(model).items()}
    for name, shape in shapes.items():
        entry = stored.get(name)
        if entry is not None and entry["dtype"] not in _FORMATS:
            raise ConfigError(
                f"model.path: {name} is stored as {entry['dtype']} in {folder}: the raw codes of a "
                "quantised checkpoint; train the one in bfloat16 or float32 instead"
            )
        if entry is not None and entry["shape"] != shape:
            raise ConfigError(
                f"model.path: {name} has shape {entry['shape']} in {folder}, but config.json asks "
                f"for {shape}"
            )
    # Tied parameters and buffers may be stored too, and are not read.
    ignored = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ignored |= {name for name, _ in model.named_buffers()}
    ignored_patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [
        name
        for name in sorted(stored.keys() - shapes.keys() - ignored)
        if not (
            _BUFFERS.search(name)
            or (_MASKS.search(name) and len(stored[name]["shape"]) != 1)
            or any(re.search(pattern, name) for pattern in ignored_patterns)
        )
    ]
    missing = [name for name in shapes if name not in stored]
    problems = []
    if missing:
        problems.append(f"has no tensor {_first_and_count(missing)}")
    if unused:
        problems.append(
            f"has {_first_and_count(unused)}, which {type(model).__name__} has no place for"
        )
    if problems:
        raise ConfigError(
            f"model.path: {folder} {' and '.join(problems)}: the model that trains would not be "
            "the one that is stored"
        )
    return layout


def refuse_unmatched_names(
    model_class: str, missing: Mapping[str, int], unknown: Mapping[str, int]
) -> None:
    """Raises ConfigError if policy and engine cannot have the same tensors.

    `missing` has, by name, the number of rows of the policy's tensors that were not found in the
    engine; `unknown` that of the engine's tensors that were not found in the policy. An unknown
    tensor may hold missing ones in a layout that we do not know, if it has rows enough."""
    # A tensor of unknown layout may hold any of the missing ones, as long as it has room for them.
    if sum(missing.values()) > sum(unknown.values()):
        raise ConfigError(
            f"model.path: {model_class} has {_first_and_count(sorted(missing))}, which vLLM's model"
            " does not have: what is trained there would never be sampled from"
        )
    if unknown and not missing:
        raise ConfigError(
            f"model.path: vLLM's model has {_first_and_count(sorted(unknown))}, which "
            f"{model_class} does not have: no sync would fill it"
        )


def _first_and_count(names: Sequence[str]) -> str:
    """Returns the first name, and how many more there are, for a message."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@torch.no_grad()
def _refuse_other_maths(model: Any, path: str) -> None:
    """Raises ConfigError if the model mixes tokens of a packed row elsewhere than in one call of
    transformers' attention interface per layer, or if its lm_head does not read the decoder's
    hidden states.

    To find out, transformers' own code of the model runs over a packed row on the meta device: a
    list of the names of such models could never be complete."""
    model_class = type(model).__name__
    trace = _Trace()
    sequence_wise = [
        module.forward.__self__
        for module in model.modules()
        if isinstance(getattr(module.forward, "__self__", None), SequenceWise)
    ]
    for sequences in sequence_wise:
        sequences.observe(trace.compute_sequences)
    layout = _ProbeLayout()
    ids = torch.zeros(1, sum(_PROBE_LENGTHS), dtype=torch.long, device="meta")
    with as_config_error(path, f"({model_class}) cannot be run over packed rows"), trace:
        states = model.get_decoder()(
            input_ids=ids, position_ids=ids.clone(), use_cache=False, packed_layout=layout
        )
        hidden = states.last_hidden_state
    layers = decoder_layers(model)
    recurrent = {id(sequences.layer) for sequences in sequence_wise}
    num_calls = [
        sum(id(module) in layout.attention_called for module in layer.modules()) for layer in layers
    ]
    if len(layout.attention_called) != sum(num_calls) or not all(
        calls == 1 or (not calls and id(layer) in recurrent)
        for calls, layer in zip(num_calls, layers, strict=True)
    ):
        raise ConfigError(
            f"model.path: {path} ({model_class}) calls transformers' attention interface "
            f"{len(layout.attention_called)} times in its {len(layers)} layers, and not once in "
            "each"
        )
    for operator in trace.operators:
        if _ALONG_THE_ROW.search(operator):
            raise ConfigError(
                f"model.path: {path} ({model_class}) has layers other than attention ({operator}), "
                "which packed rows do not support"
            )
    head = model.get_output_embeddings()
    if tuple(hidden.shape) != (*ids.shape, head.weight.shape[1]):
        raise ConfigError(
            f"model.path: the lm_head of {path} ({model_class}) does not read its hidden states"
        )


class _Trace(TorchDispatchMode):
    """Records the names of torch's operators as they are called.

    A tensor on the meta device has no values. If the model reads a number out of a tensor (`item`),
    it gets the number of tokens in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        # True while `compute_sequences` runs a recurrent module on whole sequences.
        self._is_within_sequences = False

    def compute_sequences(self, forward: Any, states: Tensor, *args: Any, **options: Any) -> Any:
        """Returns what a recurrent module computes of sequences [number of sequences, length, D].

        Its operators may mix the tokens of one sequence, so they are not among `operators`, which
        must treat each token of a packed row by itself."""
        self._is_within_sequences = states.shape[1] in _PROBE_LENGTHS
        try:
            return forward(states, *args, **options)
        finally:
            self._is_within_sequences = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of each operator: records its name and runs it, but for the
        operators that read a number out of a tensor."""
        name = func.overloadpacket.__name__
        if not self._is_within_sequences:
            self.operators.append(name)
        if name in ("_local_scalar_dense", "item", "is_nonzero"):
            num_tokens = sum(_PROBE_LENGTHS)
            return bool(num_tokens) if args[0].dtype == torch.bool else num_tokens
        return func(*args, **(kwargs or {}))


class _ProbeLayout(PackedLayout):
    """A layout of the probe's packed row, which records the ids of the attention modules that
    received it."""

    def __init__(self) -> None:
        super().__init__(_PROBE_LENGTHS, sequence_starts(_PROBE_LENGTHS), "sdpa")
        self.attention_called: list[int] = []


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Counts a layer's call, refuses what packed rows do not support, and computes the attention.

    The signature is the one that transformers calls."""
    name = type(module).__name__
    layout = options.get("packed_layout")
    if not isinstance(layout, _ProbeLayout):
        raise ConfigError(f"model.path: {name} is not told where the sequences of a packed row lie")
    layout.attention_called.append(id(module))
    if attention_mask is not None:
        raise ConfigError(
            f"model.path: {name} brings an attention mask, which packed rows do not support"
        )
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"model.path: {name} is not causal; only causal decoders train")
    output: tuple[Tensor, None] = packed_attention(
        module, query, key, value, attention_mask, **options
    )
    return output


AttentionInterface.register(_PROBE, _probe_attention)
