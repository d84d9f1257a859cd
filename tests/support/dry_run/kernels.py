"""Values of operators that torch has for CUDA alone, and a stand-in for the package flash-attn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 - it registers its operators


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    scale: float | None,
    window: int,
) -> Tensor:
    """Causal attention [T, heads, size] within sequences from one of `starts` to the next, of
    queries and of keys, over `window` keys before each query; -1: over all. The last query sees the
    last key. In float32, rounded at the end."""
    pieces = [
        (shares @ value).transpose(0, 1)
        for _, _, value, shares, _, _ in _sequences(q, k, v, starts, scale, window)
    ]
    return torch.cat(pieces).to(q.dtype)


def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    scale: float | None,
    window: int,
) -> tuple[Tensor, ...]:
    """Of q, k and v. Written out: an operator's kernel runs below autograd."""
    q_values, k_values, v_values = (torch.zeros(x.shape) for x in (q, k, v))
    for query, key, value, shares, queries, keys in _sequences(q, k, v, starts, scale, window):
        out = grad[queries].transpose(0, 1).float()
        shares_values = out @ value.transpose(1, 2)
        logits_values = (
            shares
            * (shares_values - (shares_values * shares).sum(-1, keepdim=True))
            * _scale(q, scale)
        )
        q_values[queries] = (logits_values @ key).transpose(0, 1)
        for total, heads_values in (
            (k_values, logits_values.transpose(1, 2) @ query),
            (v_values, shares.transpose(1, 2) @ out),
        ):
            groups = heads_values.unflatten(0, (k.shape[1], -1)).sum(
                1
            )  # query heads share one of keys and values
            total[keys] = groups.transpose(0, 1)
    return q_values.to(q.dtype), k_values.to(k.dtype), v_values.to(v.dtype)


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    scale: float | None,
    window: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, slice, slice]]:
    """Of each sequence query, key, value [heads, length, size], attention's shares [heads, queries,
    keys], places of queries and of keys."""
    spans = [[slice(*bounds) for bounds in pairwise(side.tolist())] for side in starts]
    for queries, keys in zip(*spans, strict=True):
        query, key, value = (
            x[span].transpose(0, 1).float() for x, span in ((q, queries), (k, keys), (v, keys))
        )
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
        position = torch.arange(key.shape[1])
        distance = position[-query.shape[1] :, None] - position
        hidden = distance < 0 if window < 0 else (distance < 0) | (distance > window)
        logits = (query @ key.transpose(1, 2) * _scale(q, scale)).masked_fill(hidden, -torch.inf)
        yield query, key, value, logits.softmax(-1), queries, keys


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, *starts_and_more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    starts = starts_and_more[:2]
    _, _, _, scale, window, *_ = starts_and_more[2:]  # longest of both, is_causal
    return attention(q, k, v, starts, scale, window[0]), torch.zeros(q.shape[1], len(q)), _state()


def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    _, _, starts_q, starts_k, _, _, _, _, scale, window = (
        more  # out, its statistics; starts, longest, is_causal, state
    )
    return attention_gradients(grad, q, k, v, (starts_q, starts_k), scale, window[0])


def _state() -> Tensor:
    return torch.zeros(2, dtype=torch.uint64)


def _add_product(
    total: Tensor, remaining: Tensor, correct: Tensor, dtype: torch.dtype, *, out: Tensor
) -> Tensor:
    # The product is rounded as on a CPU, where ours adds it up by another branch: values stay
    # comparable to the bit.
    return out.copy_(total + remaining @ correct)


def _add_any_product(*inputs: Any, **options: Any) -> Tensor:
    is_typed = len(inputs) == 4  # the one with an `out_dtype`
    return _add_product(*inputs, **options) if is_typed else torch.addmm(*inputs, **options)


# By name, overloads alike.
KERNELS: dict[str, Callable[..., Any]] = {
    "torch_attn._varlen_attn": _varlen,
    "torch_attn._varlen_attn_backward": _varlen_backward,
    "aten.addmm": _add_any_product,
    # A CPU has none for whole numbers, in which experts count their tokens.
    "aten.histc": lambda x, *args: torch.histc(x.double(), *args).to(x.dtype),
    "aten._fused_sdp_choice": lambda *_, **__: (
        0
    ),  # attention written out: the way that has values without CUDA
}


def _fake_add_product(
    total: Tensor, lhs: Tensor, rhs: Tensor, dtype: torch.dtype, *, out: Tensor
) -> Tensor:
    return torch.add(total, torch.mm(lhs, rhs, out_dtype=dtype), out=out)


# Shapes and devices of operators whose own fake is wrong. torch 2.11 takes the dtype of this one
# for `beta`; its CUDA kernel does not.
FAKES: dict[Any, Callable[..., Any]] = {torch.ops.aten.addmm.dtype_out: _fake_add_product}


def install_flash_attn() -> None:
    """A module `flash_attn` with the one function that ours calls, whose operators have the
    package's names."""

    @torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
    def forward(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,  # noqa: E501
        scale: float, window: int,
    ) -> Tensor:  # fmt: skip
        return attention(q, k, v, (starts_q, starts_k), scale, window)

    @torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=())
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_values, k_values, v_values = attention_gradients(
            grad, q, k, v, (starts, starts), scale, window
        )
        return q_values, k_values, v_values

    forward.register_fake(lambda q, *_: torch.empty_like(q))
    backward.register_fake(
        lambda _, q, k, v, *__: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.how = inputs[7:]

    def gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (*backward(grad, *ctx.saved_tensors, *ctx.how), *[None] * 6)

    forward.register_autograd(gradients, setup_context=keep)

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int, *,  # noqa: E501
        softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert causal
        method = _scale(q, softmax_scale), window_size[0]
        out: Tensor = forward(q, k, v, starts_q, starts_k, longest_q, longest_k, *method)
        return out

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = module
