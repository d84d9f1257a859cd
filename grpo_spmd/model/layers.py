"""What a layer keeps for its backward pass, and whether it is compiled. Both change `layer.forward` alone."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Products and attention are nearly all of a layer's arithmetic; what lies between them is cheap to make again. By name:
# not every build of torch has every one, and flash-attn and varlen register theirs when they are imported.
_SDPA = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_KEPT = [("aten", name) for name in ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{kernel}" for kernel in _SDPA))]
_KEPT += [("torch_attn", "_varlen_attn"), ("flash_attn", "_flash_attn_varlen_forward")]


def set_up_layer(layer: nn.Module, activation_checkpointing: bool | Literal["selective"], compile: bool) -> None:
    """Make `layer` recompute its activations (all, or all but products and attention) and compile it, before FSDP wraps
    it: FSDP's hooks, which gather the parameters before the layer is run again, stay outside."""
    forward = layer.forward
    if compile:
        forward = torch.compile(forward, dynamic=True)  # one kernel for all lengths from the start
    # There is no dropout, so no random state to restore. Without gradients checkpoint() just calls the layer.
    # A compiled layer keeps about what `selective` keeps by itself, since the compiler makes again what is cheap; to
    # torch's selective checkpointing it would be one opaque operation, all of which is run again.
    if activation_checkpointing == "selective" and not compile:
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products)
    elif activation_checkpointing is True:
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    layer.forward = forward


def _keep_products() -> Any:
    packets = (getattr(getattr(torch.ops, library), name, None) for library, name in _KEPT)
    found = [getattr(packet, "default", None) for packet in packets]
    return create_selective_checkpoint_contexts([operator for operator in found if operator is not None])
