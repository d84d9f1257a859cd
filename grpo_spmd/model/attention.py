"""Causal attention within each sequence of a packed row, nothing padded: one function for HF
models, three back ends.

flash: flash-attn's kernel for variable lengths. varlen: torch's own. Both are for bfloat16 on a
GPU. sdpa: SDPA sequence by sequence, for everything else; neighbours of equal length share a call.
Capped attention logits (Gemma 2)
are for flash, and for softmax written out in place of SDPA."""

from __future__ import annotations

import importlib
import inspect
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.families.logits import capped_attention

PACKED_ATTENTION = "grpo_spmd_packed"
Backend = Literal["flash", "varlen", "sdpa"]


class PackedLayout:
    """Where the sequences of a packed row lie, and which back end attends over them."""

    def __init__(self, lengths: list[int], device: torch.device, backend: Backend) -> None:
        self.backend = backend
        if backend == "sdpa":
            # (number, length) of neighbours of equal length: packing puts the longest first, so
            # that these are all.
            self.runs = [(len(list(run)), length) for length, run in groupby(lengths)]
        else:
            starts = torch.tensor([0, *lengths], device=device).cumsum(
                0, dtype=torch.int32
            )  # [S + 1]
            self.bounds = (
                starts,
                starts,
                max(lengths),
                max(lengths),
            )  # of queries and of keys, as the kernels ask


def choose_backend(
    choice: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, capped: bool = False
) -> Backend:
    """The back end for `model.attention`, maybe of a model that caps its logits there. Raises
    ConfigError where flash
    was asked for and cannot be had."""
    kernels = (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    kernels = kernels and head_dim % 8 == 0 and head_dim <= 256
    if kernels and choice != "sdpa" and _found("flash_attn", "flash_attn_varlen_func"):
        return "flash"
    if choice == "flash":
        raise ConfigError(
            "model.attention: flash needs a GPU of compute capability 8.0, model.dtype: "
            "bfloat16, heads of a size that "
            "8 divides, 256 at most, and the flash-attn package; set auto or sdpa"
        )
    kernels = kernels and choice == "auto" and not capped
    return "varlen" if kernels and _found("torch.nn.attention.varlen", "varlen_attn") else "sdpa"


def _found(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:  # also one that was built for another torch
        return False


# Not traced by torch.compile: ragged lengths would compile anew, and the kernels are opaque to it
# anyway.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_layout: PackedLayout,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention in the signature of HF's attention functions. `query` [1, heads, T, head_dim],
    `key` and `value` the same with kv heads -> [1, T, heads, head_dim]. Raises ConfigError where
    the model has attention sinks, or caps
    logits that varlen cannot. Some models (AFMoE, Doge) pass tensors by these names."""
    if more.get("s_aux") is not None:
        raise ConfigError(
            "model.path: this model has attention sinks, which packed rows do not support"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
    attend = {"flash": _flash, "varlen": _varlen, "sdpa": _sdpa}[packed_layout.backend]
    changes = _Changes(more.get("scaling"), more.get("sliding_window"), more.get("softcap"))
    return attend(query, key, value, packed_layout, changes)[None], None


class _Changes(NamedTuple):
    """What a model does to attention logits beside causality."""

    scale: float | None
    window: int | None
    softcap: float | None

    @property
    def sides(self) -> tuple[int, int]:
        return (-1 if self.window is None else self.window - 1, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, changes: _Changes) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    settings = {"softmax_scale": changes.scale, "causal": True, "window_size": changes.sides}
    if changes.softcap is not None:  # not known to old versions
        settings["softcap"] = changes.softcap
    out: Tensor = flash_attn_varlen_func(q, k, v, *layout.bounds, **settings)
    return out


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, changes: _Changes) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if changes.softcap is not None:
        raise ConfigError(
            "model.attention: this model caps its attention logits; set sdpa, or install flash-attn"
        )
    # torch 2.11 takes fewer kv heads as they are; from 2.12 on it wants to be told.
    gqa: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    out = varlen_attn(
        q, k, v, *layout.bounds, scale=changes.scale, window_size=changes.sides, **gqa
    )
    assert isinstance(out, Tensor)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, changes: _Changes) -> Tensor:
    scale, window, softcap = changes
    if softcap is not None:
        return capped_attention(q, k, v, layout.runs, scale or q.shape[-1] ** -0.5, window, softcap)
    tokens, gqa = [number * length for number, length in layout.runs], q.shape[1] != k.shape[1]
    pieces = []
    # Split once and join once: slicing in the loop would make the backward pass write a whole row
    # for each sequence.
    for (number, length), *qkv in zip(
        layout.runs, *(x.split(tokens) for x in (q, k, v)), strict=True
    ):
        mask = None
        if window is not None and length > window:
            position = torch.arange(length, device=q.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < window)
        # [number, heads, length, head_dim]
        query, key, value = (x.unflatten(0, (number, length)).transpose(1, 2) for x in qkv)
        out = scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
        )
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
