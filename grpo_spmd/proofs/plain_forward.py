"""The forward pass of the plain recomputation: transformers' own, with attention written out.

Attention is in float32 whatever the compute dtype (`use_plain_attention`). All other arithmetic is
in the compute dtype, or in float32 too (`use_float32`): that shows how much bfloat16 itself rounds.

transformers' eager attention rounds the product of queries and keys to the compute dtype. In
bfloat16 that is too inexact to compare with: the key biases of Qwen2 and Qwen2.5 are of the order
of hundreds (a norm of 605 in the first layer of the 7B), so that scores lose all of their digits
(transformers#33317: perplexity 8.00 with eager attention, 7.13 with SDPA). Flash attention and SDPA
accumulate scores in float32 and keep them in float32; `attend` does the same with plain operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from grpo_spmd.learn.contexts import RowContext
from grpo_spmd.model.routing import RouterKind, layer_routers, router_kind
from grpo_spmd.records import Segment

_NAME = "grpo_spmd_plain"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns (attention output [S, L, heads, head_dim], None), as transformers expects of an
    attention function. None stands for the attention weights.

    `query` is [S, heads, L, head_dim]; `key` and `value` may have fewer heads. `attention_mask` is
    added to the scores: it expresses causality and sliding windows. `softcap` is used by Gemma 2.
    """
    num_shared = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(num_shared, dim=1).float()
    values = value.repeat_interleave(num_shared, dim=1).float()
    scores = (query.float() @ keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : keys.shape[2]].float()
    attended = scores.softmax(-1) @ values
    return attended.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, attend)
# The mask of transformers' eager attention, [S, 1, L, L]: 0 where a token is read, else the lowest
# number.
AttentionMaskInterface.register(_NAME, eager_mask)


@contextmanager
def use_plain_attention(model: Any) -> Iterator[None]:
    """Returns a context manager. Within it the model uses `attend`, and nothing is compiled.

    A backward pass must be within it too: activation checkpointing runs layers again."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    implementations = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _NAME
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for config, name in zip(configs, implementations, strict=True):
            config._attn_implementation = name


def padded_routes(
    contexts: Sequence[Segment | RowContext], num_tokens: int, device: torch.device
) -> Tensor | None:
    """Returns the routes [S, L, layers, k] of a batch with one context per row, padded with zeros
    to L = `num_tokens`; None if not all contexts have routes."""
    routes = [context.routes for context in contexts if context.routes is not None]
    if not routes or len(routes) < len(contexts):
        return None
    padded = torch.zeros(len(routes), num_tokens, *routes[0].shape[1:], dtype=torch.int64)
    for row, experts in zip(padded, routes, strict=True):
        num_rows = min(len(experts), num_tokens)
        row[:num_rows] = torch.from_numpy(experts[:num_rows].astype(np.int64))
    return padded.to(device)


@contextmanager
def use_plain_routes(model: Any, experts: Tensor | None) -> Iterator[dict[int, Tensor]]:
    """Returns a context manager. Within it the routers of a mixture of experts select the given
    `experts` [S, L, layers, k], and all passes must be over these S rows of L tokens.

    The experts' weights are computed plainly: the softmax of the router's logits at the given
    experts, divided by their sum if the model does so. Yields a dict in which each pass stores its
    router logits [S * L, E] by layer. Without `experts` the model selects experts itself, and the
    dict stays empty. A backward pass must be within it too."""
    logits: dict[int, Tensor] = {}
    kind = router_kind(model)
    if experts is None or kind is None:
        yield logits
        return
    routers = layer_routers(model)
    forwards = [router.forward for router in routers.values()]
    try:
        for number, router in routers.items():
            given = experts[:, :, number].flatten(0, 1)
            router.forward = partial(_route_plainly, router, kind, number, given, logits)
        yield logits
    finally:
        for router, forward in zip(routers.values(), forwards, strict=True):
            router.forward = forward


def _route_plainly(
    router: Any,
    kind: RouterKind,
    layer: int,
    experts: Tensor,
    logits: dict[int, Tensor],
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what the router's own forward pass returns, but for the given `experts` [tokens, k]:
    logits [tokens, E], weights and indices [tokens, k], in the order that its class has. Also
    stores the logits in `logits`."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    # GLM4-MoE routes in float32, by sigmoids; its correction bias only chooses the experts.
    has_sigmoids = hasattr(router, "e_score_correction_bias")
    states = hidden.float() if has_sigmoids else hidden
    logits[layer] = torch.nn.functional.linear(states, router.weight.to(states.dtype)).float()
    scores = logits[layer].sigmoid() if has_sigmoids else logits[layer].softmax(-1)
    weights = scores.gather(-1, experts)
    # Classes without the setting always divide.
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = (weights * getattr(router, "routed_scaling_factor", 1.0)).to(states.dtype)
    if kind.logits_index == 0:
        return logits[layer], weights, experts
    return experts, weights, logits[layer]


class _Float32Arguments(TorchFunctionMode):
    """Casts every bfloat16 tensor that a function of torch is called with to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_as_float32, (args, kwargs or {}))
        return func(*args, **kwargs)


def _as_float32(value: Any) -> Any:
    is_rounded = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_rounded else value


def _call_in_float32(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with _Float32Arguments():
        return forward(*args, **kwargs)


@contextmanager
def use_float32(policy: nn.Module) -> Iterator[None]:
    """Returns a context manager. Within it a model under FSDP computes in float32, with its
    bfloat16 weights. A backward pass must be within it too."""
    # Modules with parameters of their own: the experts of a layer are one, with an activation in
    # it. Operations between them follow the dtype of their results. FSDP's hooks run on modules
    # above these and must not be in the mode: they write into bfloat16 buffers, which the mode
    # would replace by float32 copies.
    leaves = [
        module
        for module in policy.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    forwards = [vars(leaf).get("forward") for leaf in leaves]
    states = [m._get_fsdp_state() for m in policy.modules() if isinstance(m, FSDPModule)]
    precisions = [state._mp_policy for state in states]
    try:
        for leaf in leaves:
            leaf.forward = partial(_call_in_float32, leaf.forward)
        for state in states:
            # FSDP casts the hidden states between two layers (torch 2.11 to 2.14).
            state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=False)
        yield
    finally:
        for leaf, forward in zip(leaves, forwards, strict=True):
            del leaf.forward
            if forward is not None:
                leaf.forward = forward
        for state, precision in zip(states, precisions, strict=True):
            state._mp_policy = precision
