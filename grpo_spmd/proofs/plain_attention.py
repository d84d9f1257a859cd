"""The attention of the plain recomputation: written out, in float32 whatever the compute dtype.

transformers' eager attention rounds the product of queries and keys to the compute dtype. In
bfloat16 that is no truth to compare with: the key biases of Qwen2 and Qwen2.5 are of the order of
hundreds (a norm of 605 in the first layer of the 7B), so that scores lose all of their digits
(transformers#33317: perplexity 8.00 with eager attention, 7.13 with SDPA). Flash attention and SDPA
accumulate scores in float32 and keep them so; this does the same with plain operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

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
    """Returns attention [S, L, heads, head_dim] and no weights, as transformers calls it.

    `query` is [S, heads, L, head_dim]; `key` and `value` may have fewer heads. `attention_mask` is
    added to the scores: it has causality and windows. A soft cap is Gemma 2's."""
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
# The mask of transformers' eager attention: 0 and the lowest number, [S, 1, L, L].
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
