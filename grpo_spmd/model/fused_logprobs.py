"""Triton kernels for the logprobs of sampled tokens: one pass over the logits in each direction.

The plain code of `logprobs.py` makes about ten passes over float32 copies of the logits forward and
eight backward, 114 bytes of memory traffic for each bfloat16 logit. The kernels read the product of
lm_head once forward, with an online softmax (Milakov and Gimelshein 2018), and read it once and
write its gradient in its place once backward: 16 bytes with the matrix products. The result is the
plain code's within rounding, which the tests hold against float64.

This module imports triton, so it is imported where a GPU uses it and nowhere else. The tests run it
in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_spmd.model.logprobs import (
    Cap,
    Head,
    Hidden,
    Scores,
    TargetIds,
    WholeTeacher,
    add_product,
    chunks,
    empty_head_gradient,
)

# Logits that a program loads at a time. A program has one row, that is one token.
BLOCK = 4096
_NUM_WARPS = 8


class FusedTokenLogprobs(torch.autograd.Function):
    """Computes what `TokenLogprobs` computes, by the kernels below.

    Each pass holds one [chunk, V] in the compute dtype and no float32 one. Arguments and results
    are those of `TokenLogprobs`."""

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
        """Returns the logprobs of `target_ids` and the entropies, float32 [C] each."""
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normalizer = torch.empty_like(logprobs)
        product = _product_buffer(hidden, head, chunk)
        for rows in chunks(len(hidden), chunk):
            logits = torch.mm(hidden[rows], head.T, out=product[: rows.stop - rows.start])
            score_rows[(len(logits),)](
                logits,
                target_ids[rows],
                logprobs[rows],
                entropy[rows],
                log_normalizer[rows],
                num_tokens=logits.shape[1],
                temperature=temperature,
                softcap=softcap or 1.0,
                HAS_CAP=softcap is not None,
                BLOCK=_block(logits),
                num_warps=_NUM_WARPS,
            )
        ctx.save_for_backward(hidden, head, target_ids, log_normalizer, entropy)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.softcap = softcap
        # An entropy that the loss does not use has the gradient None: the kernel skips its term.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head, target_ids, log_normalizer, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = (
            None if grad is None else grad.contiguous() for grad in grads
        )
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden)
        grad_head = empty_head_gradient(head, needed=ctx.needs_input_grad[1])
        product = _product_buffer(hidden, head, ctx.chunk)
        for rows in chunks(len(hidden), ctx.chunk):
            logits = torch.mm(hidden[rows], head.T, out=product[: rows.stop - rows.start])
            replace_logits_by_gradient[(len(logits),)](
                logits,
                target_ids[rows],
                log_normalizer[rows],
                entropy[rows],
                grad_logprobs[rows],
                # A pointer that the kernel does not follow without HAS_ENTROPY.
                (grad_logprobs if grad_entropy is None else grad_entropy)[rows],
                num_tokens=logits.shape[1],
                temperature=ctx.temperature,
                softcap=ctx.softcap or 1.0,
                HAS_CAP=ctx.softcap is not None,
                HAS_ENTROPY=grad_entropy is not None,
                BLOCK=_block(logits),
                num_warps=_NUM_WARPS,
            )
            torch.mm(logits, head, out=grad_hidden[rows])
            if grad_head is not None:
                add_product(grad_head, logits.T, hidden[rows])
        head_result = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, head_result, None, None, None, None


class FusedDivergence(torch.autograd.Function):
    """Computes what `Divergence` computes for a WholeTeacher, by the kernels below.

    Each pass holds one [chunk, V] for the policy and one for the teacher, in the compute dtype.
    Arguments and results are those of `Divergence`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Hidden,
        head: Head,
        teacher: WholeTeacher,
        beta: float,
        temperature: float,
        chunk: int,
        softcap: Cap = None,
    ) -> Tensor:
        """Returns the divergence at each token, float32 [C]."""
        results = [hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(4)]
        divergence, *saved = results
        ctx.save_for_backward(hidden, head, *saved)
        ctx.teacher = teacher
        ctx.beta = beta
        ctx.scaling = (temperature, chunk, softcap)
        for rows, logits, teacher_logits in _products(ctx, hidden, head):
            compare_rows[(len(logits),)](
                logits,
                teacher_logits,
                *(result[rows] for result in results),
                num_tokens=logits.shape[1],
                BETA=beta,
                **_both_scalings(ctx),
                BLOCK=_block(logits),
                num_warps=_NUM_WARPS,
            )
        return divergence

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head, *saved = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_hidden = torch.empty_like(hidden)
        grad_head = empty_head_gradient(head, needed=ctx.needs_input_grad[1])
        for rows, logits, teacher_logits in _products(ctx, hidden, head):
            replace_logits_by_divergence_gradient[(len(logits),)](
                logits,
                teacher_logits,
                *(tensor[rows] for tensor in (*saved, grad_output)),
                num_tokens=logits.shape[1],
                BETA=ctx.beta,
                **_both_scalings(ctx),
                BLOCK=_block(logits),
                num_warps=_NUM_WARPS,
            )
            torch.mm(logits, head, out=grad_hidden[rows])
            if grad_head is not None:
                add_product(grad_head, logits.T, hidden[rows])
        head_result = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, head_result, None, None, None, None, None


def _products(ctx: Any, hidden: Tensor, head: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields chunk by chunk the rows, and the logits [rows, V] of the policy and of the teacher."""
    teacher = ctx.teacher
    chunk = ctx.scaling[1]
    buffer = _product_buffer(hidden, head, chunk)
    teacher_buffer = _product_buffer(teacher.hidden, teacher.head, chunk)
    for rows in chunks(len(hidden), chunk):
        length = rows.stop - rows.start
        yield (
            rows,
            torch.mm(hidden[rows], head.T, out=buffer[:length]),
            torch.mm(teacher.hidden[rows], teacher.head.T, out=teacher_buffer[:length]),
        )


def _both_scalings(ctx: Any) -> dict[str, Any]:
    """Returns temperatures and soft caps of policy and teacher, as arguments of a kernel."""
    temperature, _, softcap = ctx.scaling
    teacher = ctx.teacher
    return {
        "temperature": temperature,
        "softcap": softcap or 1.0,
        "HAS_CAP": softcap is not None,
        "teacher_temperature": teacher.temperature,
        "teacher_softcap": teacher.softcap or 1.0,
        "TEACHER_HAS_CAP": teacher.softcap is not None,
    }


def _product_buffer(hidden: Tensor, head: Tensor, chunk: int) -> Tensor:
    """Returns room for the logits of a chunk, [rows, V] in the compute dtype."""
    return hidden.new_empty(min(chunk, len(hidden)), len(head))


def _block(logits: Tensor) -> int:
    """Returns the logits of a program's block: a power of two, no larger than a row needs."""
    return min(BLOCK, triton.next_power_of_2(logits.shape[1]))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Returns tanh in float32. Near 0 the series, since 1 - 2 / (e^2x + 1) cancels there."""
    square = x * x
    series = 1.0 - square * (
        1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * 62.0 / 2835))
    )
    return tl.where(tl.abs(x) < 0.25, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _load_scaled(row, offsets, num_tokens, temperature, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns logits over the temperature and the tanh of their soft cap, float32 [BLOCK].

    Beyond the last token the logits are -inf. With a cap each operation is rounded to the compute
    dtype, as the engine rounds it, and as `logprobs.py` does."""
    dtype = row.dtype.element_ty
    logits = tl.load(row + offsets, mask=offsets < num_tokens, other=-float("inf")).to(tl.float32)
    tanh = logits
    if HAS_CAP:
        tanh = _tanh((logits / softcap).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        # The cap would make a finite number of -inf, which is what lies beyond the last token.
        logits = tl.where(offsets < num_tokens, (tanh * softcap).to(dtype).to(tl.float32), logits)
    return logits / temperature, tanh


@triton.jit
def score_rows(  # type: ignore[no-untyped-def]
    logits,
    target_ids,
    logprobs,
    entropies,
    log_normalizers,
    num_tokens,
    temperature,
    softcap,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes logprob, entropy and log normalizer of each row of `logits` [rows, V].

    The sums are relative to the largest logit so far: `total` of exp(z - largest), and `weighted`
    of exp(z - largest) * (z - largest). When a larger logit comes, both are moved to it."""
    # In 64 bits: rows times V may pass 2^31.
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, temperature, softcap, HAS_CAP)
        new_largest = tl.maximum(largest, tl.max(scaled, 0))
        # While all logits are -inf there is nothing to move, and -inf - -inf would be NaN.
        origin = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        shift = tl.where(largest == -float("inf"), 0.0, largest - origin)
        distance = scaled - origin
        exponentials = tl.exp(distance)
        decay = tl.exp(shift)
        # A token without probability adds 0 to the entropy: 0 * -inf would be NaN.
        terms = tl.where(exponentials > 0.0, exponentials * distance, 0.0)
        weighted = (weighted + total * shift) * decay + tl.sum(terms, 0)
        total = total * decay + tl.sum(exponentials, 0)
        largest = new_largest
    log_total = tl.log(total)
    target = tl.load(target_ids + index)
    scaled, _ = _load_scaled(row, target, num_tokens, temperature, softcap, HAS_CAP)
    tl.store(logprobs + index, scaled - largest - log_total)
    tl.store(entropies + index, log_total - weighted / total)
    tl.store(log_normalizers + index, largest + log_total)


@triton.jit
def replace_logits_by_gradient(  # type: ignore[no-untyped-def]
    logits,
    target_ids,
    log_normalizers,
    entropies,
    grad_logprobs,
    grad_entropies,
    num_tokens,
    temperature,
    softcap,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the loss's gradient by each logit in the logit's place, in the compute dtype.

    d logprob / d z = onehot - p and d entropy / d z = -p * (log p + entropy), with z the logits
    over the temperature. A cap's slope is 1 - tanh^2."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    target = tl.load(target_ids + index)
    log_normalizer = tl.load(log_normalizers + index)
    logprob_factor = tl.load(grad_logprobs + index) / temperature
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, tanh = _load_scaled(row, offsets, num_tokens, temperature, softcap, HAS_CAP)
        log_p = scaled - log_normalizer
        p = tl.exp(log_p)
        factor = logprob_factor
        if HAS_ENTROPY:
            entropy_factor = tl.load(grad_entropies + index) / temperature
            surprise = tl.where(p > 0.0, log_p + tl.load(entropies + index), 0.0)
            factor = surprise * entropy_factor + logprob_factor
        gradient = tl.where(offsets == target, logprob_factor, 0.0) - p * factor
        if HAS_CAP:
            gradient = gradient * (1.0 - tanh * tanh)
        tl.store(row + offsets, gradient.to(row.dtype.element_ty), mask=offsets < num_tokens)


@triton.jit
def _log_normalizer(
    row, num_tokens, temperature, softcap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Returns the log of the sum of exp(logit / temperature) over a row."""
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, temperature, softcap, HAS_CAP)
        new_largest = tl.maximum(largest, tl.max(scaled, 0))
        origin = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - origin) + tl.sum(tl.exp(scaled - origin), 0)
        largest = new_largest
    return largest + tl.log(total)


@triton.jit
def _log_ratios(s, t, BETA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns s - m and t - m for the log mixture m = log(beta e^t + (1 - beta) e^s).

    For beta 1 m is t, and for beta 0 these are s - t and t - s, as in `logprobs.py`. All are
    exactly 0 where s and t are equal."""
    distance = tl.where(s == t, 0.0, t - s)
    if BETA == 0.0 or BETA == 1.0:
        return -distance, distance
    # No argument of an exponential is positive, so that nothing overflows.
    fraction = tl.where(distance > 0, 1.0 - BETA, BETA)
    excess = tl.log(1.0 + fraction * (tl.exp(-tl.abs(distance)) - 1.0))
    return -excess - tl.maximum(distance, 0.0), -excess + tl.minimum(distance, 0.0)


@triton.jit
def _weighted(logprobs, values):  # type: ignore[no-untyped-def]
    """Returns exp(logprobs) * values, 0 where the probability is 0."""
    p = tl.exp(logprobs)
    return tl.where(p > 0.0, p * values, 0.0)


@triton.jit
def compare_rows(  # type: ignore[no-untyped-def]
    logits,
    teacher_logits,
    divergences,
    log_normalizers,
    teacher_log_normalizers,
    mean_ratios,
    num_tokens,
    BETA: tl.constexpr,
    temperature,
    softcap,
    HAS_CAP: tl.constexpr,
    teacher_temperature,
    teacher_softcap,
    TEACHER_HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the divergence of each row, both log normalizers, and the policy's mean log ratio.

    Two passes: the log normalizers come first. The mean of log(p / mixture) under the policy is
    what the gradient subtracts."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    teacher_row = teacher_logits + index * num_tokens
    normalizer = _log_normalizer(row, num_tokens, temperature, softcap, HAS_CAP, BLOCK)
    teacher_normalizer = _log_normalizer(
        teacher_row, num_tokens, teacher_temperature, teacher_softcap, TEACHER_HAS_CAP, BLOCK
    )
    divergence = tl.full((), 0.0, tl.float32)
    mean_ratio = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, temperature, softcap, HAS_CAP)
        teacher_scaled, _ = _load_scaled(
            teacher_row, offsets, num_tokens, teacher_temperature, teacher_softcap, TEACHER_HAS_CAP
        )
        s = scaled - normalizer
        t = teacher_scaled - teacher_normalizer
        policy_ratio, teacher_ratio = _log_ratios(s, t, BETA)
        policy_terms = _weighted(s, policy_ratio)
        teacher_terms = _weighted(t, teacher_ratio)
        if BETA == 0.0:
            divergence += tl.sum(teacher_terms, 0)
        elif BETA == 1.0:
            divergence += tl.sum(policy_terms, 0)
        else:
            divergence += tl.sum(BETA * teacher_terms + (1.0 - BETA) * policy_terms, 0)
        mean_ratio += tl.sum(policy_terms, 0)
    tl.store(divergences + index, divergence)
    tl.store(log_normalizers + index, normalizer)
    tl.store(teacher_log_normalizers + index, teacher_normalizer)
    tl.store(mean_ratios + index, mean_ratio)


@triton.jit
def replace_logits_by_divergence_gradient(  # type: ignore[no-untyped-def]
    logits,
    teacher_logits,
    log_normalizers,
    teacher_log_normalizers,
    mean_ratios,
    grad_divergences,
    num_tokens,
    BETA: tl.constexpr,
    temperature,
    softcap,
    HAS_CAP: tl.constexpr,
    teacher_temperature,
    teacher_softcap,
    TEACHER_HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the loss's gradient by each of the policy's logits in the logit's place.

    d KL(t || s) / d z = p - q, and for a mixture m it is (1 - beta) p (s - m - mean(s - m))."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    teacher_row = teacher_logits + index * num_tokens
    factor = tl.load(grad_divergences + index) / temperature
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, tanh = _load_scaled(row, offsets, num_tokens, temperature, softcap, HAS_CAP)
        teacher_scaled, _ = _load_scaled(
            teacher_row, offsets, num_tokens, teacher_temperature, teacher_softcap, TEACHER_HAS_CAP
        )
        s = scaled - tl.load(log_normalizers + index)
        t = teacher_scaled - tl.load(teacher_log_normalizers + index)
        if BETA == 0.0:
            gradient = tl.exp(s) - tl.exp(t)
        else:
            policy_ratio, _ = _log_ratios(s, t, BETA)
            gradient = _weighted(s, policy_ratio - tl.load(mean_ratios + index))
            if BETA < 1.0:
                gradient = gradient * (1.0 - BETA)
        gradient = gradient * factor
        if HAS_CAP:
            gradient = gradient * (1.0 - tanh * tanh)
        tl.store(row + offsets, gradient.to(row.dtype.element_ty), mask=offsets < num_tokens)
