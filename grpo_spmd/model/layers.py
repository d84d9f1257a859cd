"""What a layer keeps for its backward pass, and whether it is compiled. Both change `layer.forward` alone."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Products and attention are nearly all of a layer's arithmetic; what lies between them is cheap to make again. By name:
# not every build of torch has every one, and flash-attn and varlen register theirs when they are imported.
_KEPT = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "torch_attn._varlen_attn",
    "flash_attn._flash_attn_varlen_forward",
)


def set_up_layer(layer: nn.Module, activation_checkpointing: bool | Literal["selective"], compile: bool) -> None:
    """Make `layer` recompute its activations (all of them, or all but its products and attention) and compile it,
    before FSDP wraps it: its hooks, which gather the parameters before the layer is run again, stay outside.

    A compiled layer keeps about what `selective` keeps by itself, since the compiler makes again what is cheap; to
    torch's selective checkpointing it would be one opaque operation, all of which is run again.
    """
    forward = layer.forward
    if compile:
        forward = torch.compile(forward, dynamic=True)  # one kernel for all lengths from the start
    # There is no dropout, so no random state to restore. Without gradients checkpoint() just calls the layer.
    if activation_checkpointing == "selective" and not compile:
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products)
    elif activation_checkpointing is True:
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    layer.forward = forward


def _keep_products() -> Any:
    found = (_operator(name) for name in _KEPT)
    return create_selective_checkpoint_contexts([operator for operator in found if operator is not None])


def _operator(name: str) -> Any:
    library, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, library), operator, None)
    return getattr(packet, "default", None)
