"""Each attention back end that is there against the formula; and on a GPU the lm_head's gradient in
bfloat16."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model import attention
from grpo_spmd.model.attention import (
    Backend,
    PackedLayout,
    choose_backend,
    packed_attention,
    sequence_starts,
)
from grpo_spmd.model.families import logits
from grpo_spmd.model.logprobs import TokenLogprobs

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = [300, 300, 131, 64, 64, 7, 1]


def eager(
    qkv: list[torch.Tensor], scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Softmax attention written out, sequence by sequence, in float32; out [T, heads, head_dim]."""
    q, k, v = (x[0].transpose(0, 1) for x in qkv)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    pieces = []
    for one_q, one_k, one_v in zip(*(x.float().split(LENGTHS) for x in (q, k, v)), strict=True):
        position = torch.arange(len(one_q), device=q.device)
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance < (window or len(one_q)))
        scores = torch.einsum("qhd,khd->hqk", one_q, one_k) * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        pieces.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), one_v)
        )
    return torch.cat(pieces)


@pytest.mark.parametrize(
    ("backend", "location"),
    [
        ("sdpa", "cpu"),
        *(pytest.param(backend, "cuda", marks=on_gpu) for backend in ("sdpa", "varlen", "flash")),
    ],
)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_equals_the_formula_forward_and_backward(
    backend: Backend,
    location: str,
    kv_heads: int,
    window: int | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a soft cap in blocks of 26 queries and more, of which two sequences of 300 take
    twelve."""
    device, dtype = torch.device(location), torch.bfloat16 if location == "cuda" else torch.float32
    if backend == "flash":
        pytest.importorskip("flash_attn")
    if backend == "varlen" and softcap is not None:
        pytest.skip("varlen caps nothing")
    monkeypatch.setattr(logits, "_MAX_SCORES", 8 * 53 * 300)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, sum(LENGTHS), 64, device=device).to(dtype)
        for heads in (8, kv_heads, kv_heads)
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    layout = PackedLayout(LENGTHS, sequence_starts(LENGTHS).to(device), backend)
    changes = {"scaling": 0.1, "sliding_window": window, "softcap": softcap}
    out, _ = packed_attention(nn.Module(), *inputs, None, packed_layout=layout, **changes)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    expected = eager(exact, 0.1, window, softcap)
    weights = torch.randn_like(expected)
    (out[0].float() * weights).sum().backward()
    (expected * weights).sum().backward()
    bound = 1e-2 if location == "cuda" else 1e-5
    assert relative_difference(out[0], expected) < bound
    for local, theirs in zip(inputs, exact, strict=True):
        assert local.grad is not None
        assert theirs.grad is not None
        assert relative_difference(local.grad, theirs.grad) < 2 * bound


@pytest.mark.parametrize(
    ("backend", "changes", "expected"),
    [
        ("sdpa", {"s_aux": 1.0}, "has attention sinks"),
        ("varlen", {"softcap": 50.0}, "caps its attention logits"),
    ],
)
def test_what_a_back_end_cannot_do_is_refused(
    backend: Backend, changes: dict[str, float], expected: str
) -> None:
    query = torch.randn(1, 2, 5, 8)
    layout = PackedLayout([5], sequence_starts([5]), backend)
    with pytest.raises(ConfigError, match=expected):
        packed_attention(nn.Module(), query, query, query, None, packed_layout=layout, **changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_in_bfloat16_gets_a_kernel_for_variable_lengths() -> None:
    device = torch.device("cuda")
    assert choose_backend("auto", device, torch.bfloat16, 64) in ("flash", "varlen")
    assert choose_backend("auto", device, torch.float32, 64) == "sdpa"
    assert choose_backend("sdpa", device, torch.bfloat16, 64) == "sdpa"
    assert choose_backend("auto", device, torch.bfloat16, 64, capped=True) in ("flash", "sdpa")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_heads_gradient_is_accumulated_in_float32() -> None:
    """Over many chunks, rounding each chunk's share to bfloat16 would show."""
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(4096, 64, device="cuda").bfloat16(),
        torch.randn(500, 64, device="cuda").bfloat16(),
    )
    target = torch.randint(0, 500, (4096,), device="cuda")
    result = []
    for dtype, chunk in ((torch.float32, 4096), (torch.bfloat16, 16)):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, head)]
        TokenLogprobs.apply(*leaves, target, 1.0, chunk)[0].sum().backward()
        assert leaves[1].grad is not None
        result.append(leaves[1].grad)
    assert relative_difference(result[1], result[0]) < 5e-3


def relative_difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (result.float() - expected.float()).norm().detach() / expected.float().norm().detach()
    )


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_flash_attn_is_given_a_softcap_only_where_the_model_has_one(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    """Old versions of flash-attn do not know it."""
    settings: dict[str, Any] = {}

    def flash_attn_varlen_func(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        settings.update(options)
        return q

    module: Any = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, layout = torch.zeros(3, 2, 8), PackedLayout([3], torch.tensor([0, 3]), "flash")
    attention._flash(q, q, q, layout, attention._LogitOptions(0.1, None, softcap))
    assert settings.pop("softcap", None) == softcap
    assert settings == {"softmax_scale": 0.1, "causal": True, "window_size": (-1, 0)}
