"""Attention over packed rows: one function for HF models, with three back ends.

A packed row is several sequences end to end, without padding. Attention is causal within each
sequence, and no sequence sees another one. T is the number of tokens in a row.

The back ends:
flash: flash-attn's kernel for variable lengths. It needs bfloat16 on a GPU.
varlen: torch's own kernel for variable lengths. It needs the same, and cannot cap attention logits.
sdpa: torch's scaled_dot_product_attention, called for each group of equally long sequences. It
works everywhere. Capped attention logits (Gemma 2) use a softmax that is written out in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.families.logits import capped_attention
from grpo_spmd.model.families.recurrent import can_import
from grpo_spmd.records import RowRoutes

PACKED_ATTENTION = "grpo_spmd_packed"
Backend = Literal["flash", "varlen", "sdpa"]


class PackedLayout:
    """Says where the sequences of a packed row lie, and which back end computes their attention."""

    def __init__(
        self,
        lengths: list[int],
        starts: Tensor,
        backend: Backend,
        routes: RowRoutes | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> None:
        """`lengths` has the tokens of each sequence, in the order of the row; `starts` are their
        `sequence_starts` on the row's device. `routes` are for the routers of experts (routing.py),
        `sequence_group` are the ranks that share the row (sequence_parallel.py): transformers hands
        the layout to every layer."""
        self.backend = backend
        self.routes = routes
        self.sequence_group = sequence_group
        self.starts = starts
        # Pairs (number of sequences, their length) for neighbours of equal length. Packing sorts by
        # length, so that all sequences of one length are neighbours.
        self.runs = [(len(list(run)), length) for length, run in groupby(lengths)]
        if backend != "sdpa":
            longest = max(lengths)
            # The kernels take starts and longest length once for queries and once for keys.
            self.bounds = (starts, starts, longest, longest)


def sequence_starts(lengths: Iterable[int]) -> Tensor:
    """Returns the first token of each sequence, and the end of the row: int32 [S + 1], on the host.

    It is made once, when the row is packed. A forward pass that copied it to the device would wait
    for all that the device still has to do."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def choose_backend(
    choice: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, capped: bool = False
) -> Backend:
    """Returns the back end for `model.attention`, which is `choice`.

    `capped` says that the model caps its attention logits. Raises ConfigError if `choice` is flash
    and flash-attn cannot run here."""
    has_kernels = (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= (8, 0)
        # Both kernels take heads of at most 256 numbers, in multiples of 8.
        and head_dim % 8 == 0
        and head_dim <= 256
    )
    if has_kernels and choice != "sdpa" and can_import("flash_attn", "flash_attn_varlen_func"):
        return "flash"
    if choice == "flash":
        raise ConfigError(
            "model.attention: flash needs a GPU of compute capability 8.0, model.dtype: "
            "bfloat16, heads of a size that "
            "8 divides, 256 at most, and the flash-attn package; set auto or sdpa"
        )
    can_be_varlen = has_kernels and choice == "auto" and not capped
    if can_be_varlen and can_import("torch.nn.attention.varlen", "varlen_attn"):
        return "varlen"
    return "sdpa"


# torch.compile must not trace this: it would compile again for each set of lengths, and it cannot
# look into the kernels anyway.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_layout: PackedLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention within each sequence, in the signature that transformers calls.

    `query` is [1, heads, T, head_dim]; `key` and `value` are [1, kv heads, T, head_dim]. Returns
    the output [1, T, heads, head_dim], and None in place of the attention weights. The layout
    replaces `attention_mask`. Some models (AFMoE, Doge) pass the tensors by these names. Raises
    ConfigError if the model has attention sinks, or caps logits that varlen cannot cap."""
    # gpt-oss passes its attention sinks under this name.
    if options.get("s_aux") is not None:
        raise ConfigError(
            "model.path: this model has attention sinks, which packed rows do not support"
        )
    # From [1, heads, T, head_dim] to [T, heads, head_dim].
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = {"flash": _flash, "varlen": _varlen, "sdpa": _sdpa}[packed_layout.backend]
    logit_options = _LogitOptions(
        options.get("scaling"), options.get("sliding_window"), options.get("softcap")
    )
    return attend(query, key, value, packed_layout, logit_options)[None], None


class _LogitOptions(NamedTuple):
    """Says what a model does to its attention logits besides the causal mask."""

    scale: float | None
    """Factor of the logits. None: 1 / sqrt(head_dim)."""
    window: int | None
    """Tokens that a query sees, itself included. None: all earlier ones."""
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap). None: no cap."""

    @property
    def window_size(self) -> tuple[int, int]:
        """The window as the kernels take it: tokens to the left, -1 for all, and to the right."""
        return (-1 if self.window is None else self.window - 1, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: _LogitOptions) -> Tensor:
    """Computes attention [T, heads, head_dim] by flash-attn."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    settings = {"softmax_scale": options.scale, "causal": True, "window_size": options.window_size}
    # Old versions of flash-attn do not know this argument: pass it only if it is needed.
    if options.softcap is not None:
        settings["softcap"] = options.softcap
    out: Tensor = flash_attn_varlen_func(q, k, v, *layout.bounds, **settings)
    return out


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: _LogitOptions
) -> Tensor:
    """Computes attention [T, heads, head_dim] by torch's kernel for variable lengths."""
    from torch.nn.attention.varlen import varlen_attn

    if options.softcap is not None:
        raise ConfigError(
            "model.attention: this model caps its attention logits; set sdpa, or install flash-attn"
        )
    # torch 2.11 accepts fewer kv heads than heads as they are; from 2.12 on it needs enable_gqa.
    gqa: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    out = varlen_attn(
        q, k, v, *layout.bounds, scale=options.scale, window_size=options.window_size, **gqa
    )
    assert isinstance(out, Tensor)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: _LogitOptions) -> Tensor:
    """Computes attention [T, heads, head_dim] by SDPA, with one call for each run of equal
    lengths."""
    scale, window, softcap = options
    run_tokens = [number * length for number, length in layout.runs]
    has_fewer_kv_heads = q.shape[1] != k.shape[1]
    outputs = []
    # Split once and join once: slicing in the loop would make the backward pass write a whole row
    # for each sequence.
    for (number, length), *run_tensors in zip(
        layout.runs, *(tensor.split(run_tokens) for tensor in (q, k, v)), strict=True
    ):
        # [number, heads, length, head_dim]
        query, key, value = (
            tensor.unflatten(0, (number, length)).transpose(1, 2) for tensor in run_tensors
        )
        if softcap is not None:
            out = capped_attention(
                query, key, value, scale or q.shape[-1] ** -0.5, window, softcap=softcap
            )
        else:
            mask = None
            if window is not None and length > window:
                positions = torch.arange(length, device=q.device)
                distance = positions[:, None] - positions
                mask = (distance >= 0) & (distance < window)
            out = scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                # SDPA takes either a mask or is_causal. The mask is causal by itself.
                is_causal=mask is None,
                scale=scale,
                enable_gqa=has_fewer_kv_heads,
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
