"""Whether the policy's way through a model (packed rows, logprobs from its lm_head) is the model's own. Asked of the
code that transformers has for the model, on the meta device, before vLLM starts: no list of names could be complete."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.attention import PackedLayout, packed_attention
from grpo_spmd.model.dimensions import head_dim
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, one_line_for
from grpo_spmd.model.families.logits import logits_map
from grpo_spmd.model.families.refusals import refuse_head_bias, refuse_unsupported, refuse_window
from grpo_spmd.model.families.tensors import refuse_tensors
from grpo_spmd.model.hf_files import checkpoint_folder, load_config

_PROBE = "grpo_spmd_probe"
_LENGTHS = [9, 15]  # of two sequences in a row
# What carries values from one token of a row to the next, and so from one sequence into the next.
_ALONG_THE_ROW = "convolution|conv1d|cumsum|cumprod|cummax|cummin|logcumsumexp|roll|flip|_fft|lstm|gru"


def refuse_untrainable(path: str, longest: int = 0, *, is_policy: bool = True) -> None:
    """Raises ConfigError, which says why, unless the model of `path` can train on rollouts of `longest` tokens: all
    that can be known before vLLM starts. Of another model than a policy the lm_head may be missing."""
    hf_config = load_config(path)
    refuse_unsupported(hf_config, path, is_policy=is_policy)
    refuse_window(hf_config, path, longest)
    with torch.device("meta"):
        model = build_hf_model(hf_config, path, attn_implementation=_PROBE).eval()
    with one_line_for(path, "has sizes that differ from layer to layer"):
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
            raise ConfigError(f"model.path: {path} has experts ({name}): mixture of experts is not supported yet")
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
        raise ConfigError(f"model.path: the decoder of {type(model).__name__} ({path}) takes no position_ids: it {why}")


@torch.no_grad()
def refuse_other_maths(model: Any, path: str) -> None:
    """Raises ConfigError where the model, run on the meta device, attends in another way than through our function, or
    lets tokens of a row meet elsewhere."""
    name, decoder, trace = type(model).__name__, model.get_decoder(), _Trace()
    layout = _ProbeLayout(_LENGTHS, torch.device("meta"), "sdpa")
    ids = torch.zeros(1, sum(_LENGTHS), dtype=torch.long, device="meta")
    row = {"input_ids": ids, "position_ids": ids.clone()}
    with one_line_for(path, f"({name}) cannot be run over packed rows"), trace:
        out = decoder(**row, use_cache=False, packed_layout=layout)
        hidden = out.last_hidden_state
    num_layers = len(decoder_layers(model))
    if layout.num_calls != num_layers:
        how = f"{layout.num_calls} times in its {num_layers} layers, and packed rows need it once in each"
        raise ConfigError(f"model.path: {path} ({name}) attends through transformers' attention interface {how}")
    along = next((operator for operator in trace.operators if re.search(_ALONG_THE_ROW, operator)), None)
    if along is not None:
        kind = f"layers other than attention ({along})"
        raise ConfigError(f"model.path: {path} ({name}) has {kind}, which packed rows do not support")
    head = model.get_output_embeddings()
    if tuple(hidden.shape) != (*ids.shape, head.weight.shape[1]):
        raise ConfigError(f"model.path: {path} ({name}) does not put its lm_head on the decoder's hidden states")


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
        why = "is not told where the sequences of a packed row lie: its layers hand nothing on to it"
        raise ConfigError(f"model.path: {type(module).__name__} {why}")
    layout.count()
    if attention_mask is not None:
        why = "brings an attention mask of its own, which packed rows do not support"
        raise ConfigError(f"model.path: {type(module).__name__} {why}")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"model.path: {type(module).__name__} is not causal; only causal decoders train")
    out: tuple[Tensor, None] = packed_attention(module, query, key, value, attention_mask, **more)
    return out


AttentionInterface.register(_PROBE, _probe_attention)
