"""Soft caps, cap * tanh(x / cap), where no kernel has them: of attention logits on the CPU, in float32 and without
flash-attn; and the slope of the cap of the lm_head's logits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_MAX_SCORES = 1 << 24  # attention logits that exist at a time: 64 MiB in float32


def times_slope(p: Tensor, log_p: Tensor, log_normalizer: Tensor, factor: float, target: Tensor) -> Tensor:
    """Multiply `p` [C, V] in place by the slope 1 - tanh^2, where tanh is (log_p + log_normalizer) * factor; returns it
    at `target` [C, 1]. `log_p` is the only other [C, V], and comes back within rounding."""
    tanh = log_p.add_(log_normalizer).mul_(factor)
    p.addcmul_(p, tanh, value=-1).addcmul_(p, tanh)
    at_target = tanh.gather(-1, target)
    tanh.div_(factor).sub_(log_normalizer)
    return 1 - at_target.square()


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[int, int]], scale: float, window: int | None, softcap: float
) -> Tensor:
    """Causal attention within sequences, [T, heads, head_dim], with softmax written out in float32. `runs`: (number,
    length) of neighbours of equal length. Few logits exist at a time, and the backward pass makes them again."""
    tokens, heads, parts = [number * length for number, length in runs], q.shape[1], []
    # Split once and join once: slicing in the loop would make the backward pass write a whole row for each sequence.
    for (number, length), *qkv in zip(runs, *(x.split(tokens) for x in (q, k, v)), strict=True):
        # [number, heads, length, head_dim]
        query, key, value = (x.unflatten(0, (number, length)).transpose(1, 2) for x in qkv)
        rows = max(1, _MAX_SCORES // (number * heads * length))
        attend = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
        blocks = enumerate(query.split(rows, dim=2))
        out = torch.cat([attend(x, key, value, i * rows, scale, window, softcap) for i, x in blocks], dim=2)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, softcap: float) -> Tensor:
    """`q` [n, heads, R, head_dim]: queries from place `first` on; `k` and `v` [n, kv heads, L, head_dim]."""
    (number, heads, rows, _), kv_heads, length = q.shape, k.shape[1], k.shape[2]
    # Heads that share keys are further rows of queries: [n * kv heads, heads / kv heads * R, head_dim]
    query, key, value = (x.float().reshape(number * kv_heads, -1, x.shape[-1]) for x in (q, k, v))
    # Not bmm, whose results selective checkpointing keeps.
    logits = torch.baddbmm(query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=scale / softcap)
    distance = torch.arange(first, first + rows, device=q.device)[:, None] - torch.arange(length, device=q.device)
    unseen = (distance < 0) | (distance >= (window or length))
    logits = (logits.tanh() * softcap).unflatten(1, (-1, rows)).masked_fill(unseen, -torch.inf)
    out = torch.bmm(logits.softmax(-1).flatten(1, 2), value)
    return out.view(number, heads, rows, -1).to(q.dtype)
