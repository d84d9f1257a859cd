"""Logprobs and entropies of sampled tokens, without ever holding the [T, V] logits as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_spmd.model.families.logits import times_slope

Hidden = Float[Tensor, "C D"]
Head = Float[Tensor, "V D"]
TargetIds = Int[Tensor, " C"]
Scores = tuple[Float[Tensor, " C"], Float[Tensor, " C"]]  # logprobs and entropies
Cap = float | None


class TokenLogprobs(torch.autograd.Function):
    """Logprob of each target and entropy of its distribution, in float32, from `chunk` tokens of logits at a time.

    The backward pass computes the logits again. Each pass holds one float32 [chunk, V] and, where the compute dtype is
    another, one of that: arithmetic is in place, and where it takes two buffers (the entropy, its gradient, a soft
    cap's slope) they have half as many rows each. What is divided by the temperature are the logits, capped or not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Hidden,
        head: Head,
        target_ids: TargetIds,
        temperature: float,
        chunk: int,
        softcap: Cap = None,
    ) -> Scores:
        log_normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.empty_like(log_normalizer), torch.empty_like(log_normalizer)
        rows = max(1, chunk // 2)
        buffers = _Buffers(min(rows, len(hidden)), hidden, head, two=True)
        for part in chunks(len(hidden), rows):
            logits = buffers.logits(hidden[part], head, temperature, softcap)
            largest = logits.amax(-1, keepdim=True)
            exponents = torch.exp(logits.sub_(largest), out=buffers.other[: len(logits)])
            normalizer = exponents.sum(-1, keepdim=True)
            log_p = logits.sub_(normalizer.log())
            log_normalizer[part] = (largest + normalizer.log()).squeeze(-1)
            logprobs[part] = log_p.gather(-1, target_ids[part, None]).squeeze(-1)
            entropy[part] = -(exponents.mul_(log_p).sum(-1, keepdim=True) / normalizer).squeeze(-1)
        ctx.save_for_backward(hidden, head, target_ids, log_normalizer, entropy)
        ctx.temperature, ctx.chunk, ctx.softcap = temperature, chunk, softcap
        ctx.set_materialize_grads(
            False
        )  # an entropy that the loss does not use has no gradient, not one of zeros
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, head, target_ids, norms, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden)
        trains_head = ctx.needs_input_grad[
            1
        ]  # not where the head is frozen (LoRA): a third of the work here
        grad_head = (
            torch.zeros(head.shape, dtype=torch.float32, device=head.device)
            if trains_head
            else None
        )
        two, softcap, temperature = (
            grad_entropy is not None or ctx.softcap is not None,
            ctx.softcap,
            ctx.temperature,
        )
        rows = max(1, ctx.chunk // 2) if two else ctx.chunk
        buffers = _Buffers(min(rows, len(hidden)), hidden, head, two=two)
        for part in chunks(len(hidden), rows):
            # d logprob / d logits = onehot - p; d entropy / d logits = -p * (log p + entropy); and 1 / temperature
            outer, target, norm = (
                grad_logprobs[part, None] / temperature,
                target_ids[part, None],
                norms[part, None],
            )
            log_p = buffers.logits(hidden[part], head, temperature, softcap).sub_(norm)
            p = torch.exp(log_p, out=buffers.other[: len(log_p)] if two else log_p)
            slope = (
                1.0
                if softcap is None
                else times_slope(p, log_p, norm, temperature / softcap, target)
            )
            if grad_entropy is None:
                grad_logits = p.mul_(-outer)
            else:
                inner = grad_entropy[part, None] / temperature
                grad_logits = log_p.add_(entropy[part, None]).mul_(inner).add_(outer).mul_(p).neg_()
            grad_logits.scatter_add_(-1, target, outer * slope)
            grad_product = buffers.in_compute_dtype(grad_logits)
            torch.mm(grad_product, head, out=grad_hidden[part])
            if grad_head is not None:
                add_product(grad_head, grad_product.T, hidden[part])
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(head.dtype),
            None,
            None,
            None,
            None,
        )


class _Buffers:
    """The [rows, V] tensors that all chunks share: one or two in float32; one in the compute dtype, if another."""

    def __init__(self, rows: int, hidden: Tensor, head: Tensor, *, two: bool) -> None:
        self._float = hidden.new_empty(rows, len(head), dtype=torch.float32)
        is_float = hidden.dtype == torch.float32
        self._product = (
            self._float if is_float else hidden.new_empty(rows, len(head), dtype=hidden.dtype)
        )
        if two:
            self.other = torch.empty_like(self._float)

    def logits(self, hidden: Tensor, head: Tensor, temperature: float, softcap: Cap) -> Tensor:
        # Product and cap are rounded to the compute dtype as the engine's are; what follows is float32 on both sides.
        logits = torch.mm(hidden, head.T, out=self._product[: len(hidden)])
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if self._product is not self._float:
            logits = self._float[: len(hidden)].copy_(logits)
        return logits.div_(temperature)

    def in_compute_dtype(self, grad_logits: Tensor) -> Tensor:
        return (
            grad_logits
            if self._product is self._float
            else self._product[: len(grad_logits)].copy_(grad_logits)
        )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, with `total` in float32 whatever the others are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # accumulated in float32 by the product itself
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))
