"""Triton kernels for the logprobs of sampled tokens: one pass over the logits in each direction.

The plain code of `logprobs.py` makes about ten passes over float32 copies of the logits in the
forward pass and eight in the backward pass: 114 bytes of memory traffic for each bfloat16 logit.
The kernels read the logits (lm_head's product) once in the forward pass, with an online softmax
(Milakov and Gimelshein 2018). In the backward pass they read them once and overwrite them with
their gradient. This makes 16 bytes, including the matrix products. The results equal the plain
code's within rounding; the tests compare both with float64.

This module imports triton, so import it only where a GPU uses it. The tests run it in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grpo_spmd.model.logprobs import (
    Cap,
    Chunks,
    Gradients,
    Head,
    Hidden,
    Scores,
    TargetIds,
    WholeTeacher,
    chunks,
    sum_gradients,
)

# Number of logits that a Triton program loads at a time. A program handles one row: the logits of
# one token.
BLOCK = 4096
_NUM_WARPS = 8


class FusedTokenLogprobs(torch.autograd.Function):
    """Computes the same as `TokenLogprobs`, with the kernels below and the same arguments.

    Each pass holds one [chunk, V] tensor, in the compute dtype."""

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
        # The four numbers that `score_rows` writes for each token.
        results = hidden.new_empty(len(hidden), 4, dtype=torch.float32)
        ctx.scaling = (temperature, softcap)
        ctx.chunk = chunk
        for rows, logits in _products(hidden, head, chunk):
            _launch(score_rows, logits, target_ids[rows], results[rows], SCALING=ctx.scaling)
        ctx.save_for_backward(hidden, head, target_ids, results)
        # Copies, since autograd forbids callers to change views of one tensor in place.
        return results[:, 0].clone(), results[:, 1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head, target_ids, results = ctx.saved_tensors
        numbers = torch.cat([results[:, 1:], torch.stack(grads, dim=1)], dim=1)

        def product_gradients() -> Chunks:
            """Yields the gradient with respect to the logits, chunk by chunk."""
            for rows, logits in _products(hidden, head, ctx.chunk):
                _launch(
                    replace_logits_by_gradient,
                    logits,
                    target_ids[rows],
                    numbers[rows],
                    SCALING=ctx.scaling,
                )
                yield rows, logits

        grad_hidden, grad_head = sum_gradients(ctx, hidden, head, product_gradients())
        return grad_hidden, grad_head, None, None, None, None


class FusedDivergence(torch.autograd.Function):
    """Computes the same as `Divergence` for a WholeTeacher, with the kernels below and the same
    arguments.

    Each pass holds two [chunk, V] tensors in the compute dtype: the policy's logits and the
    teacher's."""

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
        # The six numbers that `compare_rows` writes for each token.
        results = hidden.new_empty(len(hidden), 6, dtype=torch.float32)
        ctx.save_for_backward(hidden, head, results)
        ctx.teacher = teacher
        ctx.chunk = chunk
        ctx.options = {
            "SCALINGS": ((temperature, softcap), (teacher.temperature, teacher.softcap)),
            "BETA": beta,
        }
        for rows, logits, teacher_logits in _products_of_both(ctx, hidden, head):
            _launch(compare_rows, logits, teacher_logits, results[rows], **ctx.options)
        return results[:, 0].clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head, results = ctx.saved_tensors
        numbers = torch.cat([grad_output[:, None], results[:, 1:]], dim=1)

        def product_gradients() -> Chunks:
            """Yields the gradient with respect to the policy's logits, chunk by chunk."""
            for rows, logits, teacher_logits in _products_of_both(ctx, hidden, head):
                _launch(
                    replace_logits_by_divergence_gradient,
                    logits,
                    teacher_logits,
                    numbers[rows],
                    **ctx.options,
                )
                yield rows, logits

        grad_hidden, grad_head = sum_gradients(ctx, hidden, head, product_gradients())
        return grad_hidden, grad_head, None, None, None, None, None


def _products(hidden: Tensor, head: Tensor, chunk: int) -> Chunks:
    """Yields for each chunk of tokens (slice of the chunk, logits [rows, V] in the compute dtype).

    All chunks share one buffer, so that a chunk's logits are valid only until the next one."""
    buffer = hidden.new_empty(min(chunk, len(hidden)), len(head))
    for rows in chunks(len(hidden), chunk):
        yield rows, torch.mm(hidden[rows], head.T, out=buffer[: rows.stop - rows.start])


def _products_of_both(
    ctx: Any, hidden: Tensor, head: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields for each chunk of tokens (slice of the chunk, the policy's logits, the teacher's
    logits), as `_products` does. `ctx` has the teacher and the chunk size."""
    teacher = ctx.teacher
    products = _products(hidden, head, ctx.chunk)
    teacher_products = _products(teacher.hidden, teacher.head, ctx.chunk)
    for (rows, logits), (_, teacher_logits) in zip(products, teacher_products, strict=True):
        yield rows, logits, teacher_logits


def _launch(kernel: Any, logits: Tensor, *arguments: Tensor, **options: Any) -> None:
    """Runs a kernel on `logits` [rows, V], with one program for each row."""
    # The memory planner runs a pass over fake tensors, which have no values for a kernel.
    if isinstance(logits, FakeTensor):
        return
    rows, num_tokens = logits.shape
    block = min(BLOCK, int(triton.next_power_of_2(num_tokens)))
    kernel[(rows,)](
        logits,
        *arguments,
        num_tokens=num_tokens,
        BLOCK=block,
        num_warps=_NUM_WARPS,
        **options,
    )


# The Triton kernels. `SCALING` is (temperature, soft cap or None) of a model. A program handles one
# row of the logits [rows, V], that is one token. The other numbers of each token are in a row, too.


@triton.jit
def _tanh(x):
    """Returns tanh(x) in float32 as 1 - 2 / (e^2x + 1). Near 0, where that formula loses precision
    by cancellation, the Taylor series is used."""
    square = x * x
    series = 17.0 / 315 - square * (62.0 / 2835)
    series = 1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * series))
    return tl.where(tl.abs(x) < 0.25, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _load_scaled(row, offsets, num_tokens, SCALING: tl.constexpr):
    """Loads logits at `offsets`. Returns (capped logit / temperature, tanh(logit / cap)), float32
    [BLOCK].

    The second result is unused without a soft cap. Offsets beyond the last token id give -inf. Each
    operation of the cap is rounded to the compute dtype, as in the engine and in `logprobs.py`."""
    dtype = row.dtype.element_ty
    logits = tl.load(row + offsets, mask=offsets < num_tokens, other=-float("inf")).to(tl.float32)
    tanh = logits
    if SCALING[1] is not None:
        tanh = _tanh((logits / SCALING[1]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        # The cap turned the -inf beyond the last token id into a finite number: keep the -inf.
        capped = (tanh * SCALING[1]).to(dtype).to(tl.float32)
        logits = tl.where(offsets < num_tokens, capped, logits)
    return logits / SCALING[0], tanh


@triton.jit
def _normalize(row, num_tokens, SCALING: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest z = logit / temperature of a row, log(sum(exp(z - largest))), and the
    entropy.

    The first two are not added up, since the rounding of their sum would matter: for a token with
    nearly all of the probability the gradient is a small difference of large numbers.
    The loop keeps two sums that are relative to the largest z so far: `total`, the sum of
    exp(z - largest), and `weighted`, the sum of exp(z - largest) * (z - largest). When a larger z
    comes, both are converted to it."""
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, SCALING)
        new_largest = tl.maximum(largest, tl.max(scaled, 0))
        # While all logits were -inf there is nothing to convert, and -inf - -inf would be NaN.
        origin = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        shift = tl.where(largest == -float("inf"), 0.0, largest - origin)
        distance = scaled - origin
        exponentials = tl.exp(distance)
        decay = tl.exp(shift)
        # A token of probability 0 adds 0 to the entropy, but 0 * -inf would be NaN.
        terms = tl.where(exponentials > 0.0, exponentials * distance, 0.0)
        weighted = (weighted + total * shift) * decay + tl.sum(terms, 0)
        total = total * decay + tl.sum(exponentials, 0)
        largest = new_largest
    log_total = tl.log(total)
    return largest, log_total, log_total - weighted / total


@triton.jit
def score_rows(
    logits,
    target_ids,
    numbers,
    num_tokens,
    SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes four numbers for each row of logits, so for each token, into `numbers` [rows, 4].

    They are the target's logprob, the entropy, the largest scaled logit, and the log of the sum of
    exp(scaled logit - largest). The backward pass reads the last three."""
    # 64 bits, since rows * V may exceed 2^31.
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    number = numbers + index * 4
    largest, log_total, entropy = _normalize(row, num_tokens, SCALING, BLOCK)
    target, _ = _load_scaled(row, tl.load(target_ids + index), num_tokens, SCALING)
    tl.store(number, target - largest - log_total)
    tl.store(number + 1, entropy)
    tl.store(number + 2, largest)
    tl.store(number + 3, log_total)


@triton.jit
def replace_logits_by_gradient(
    logits,
    target_ids,
    numbers,
    num_tokens,
    SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrites each logit with the gradient of the loss with respect to it, in the compute dtype.

    `numbers` [rows, 5] has the last three of `score_rows`, then the gradients with respect
    to the logprob and to the entropy. With z = capped logit / temperature:
    d logprob / d z = onehot - p, d entropy / d z = -p * (log p + entropy). The cap's derivative is
    1 - tanh^2."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    number = numbers + index * 5
    target = tl.load(target_ids + index)
    entropy = tl.load(number)
    largest = tl.load(number + 1)
    log_total = tl.load(number + 2)
    logprob_factor = tl.load(number + 3) / SCALING[0]
    entropy_factor = tl.load(number + 4) / SCALING[0]
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, tanh = _load_scaled(row, offsets, num_tokens, SCALING)
        log_p = (scaled - largest) - log_total
        p = tl.exp(log_p)
        surprise = tl.where(p > 0.0, log_p + entropy, 0.0)
        gradient = tl.where(offsets == target, logprob_factor, 0.0)
        gradient -= p * (surprise * entropy_factor + logprob_factor)
        if SCALING[1] is not None:
            gradient = gradient * (1.0 - tanh * tanh)
        tl.store(row + offsets, gradient.to(row.dtype.element_ty), mask=offsets < num_tokens)


@triton.jit
def _log_ratios(s, t, BETA: tl.constexpr):
    """Returns s - m and t - m, where m = log(beta e^t + (1 - beta) e^s) is the logprob of a token
    by the mixture of policy and teacher.

    `s` and `t` are the token's logprobs by policy and teacher. If BETA is 0 or 1 there is no
    mixture, and the results are s - t and t - s. All are exactly 0 where s and t are equal."""
    distance = tl.where(s == t, 0.0, t - s)
    if BETA == 0.0 or BETA == 1.0:
        return -distance, distance
    # No argument of exp() is positive, so that nothing overflows. Triton has neither expm1 nor
    # log1p, and the plain formulas would cancel for small arguments: compute both by Kahan's
    # quotients.
    negative = -tl.abs(distance)
    power = tl.exp(negative)
    is_small = power == 1.0
    expm1 = (power - 1.0) * (negative / tl.log(tl.where(is_small, 2.0, power)))
    expm1 = tl.where(is_small, negative, tl.where(power > 0.0, expm1, -1.0))
    change = tl.where(distance > 0, 1.0 - BETA, BETA) * expm1
    argument = 1.0 + change
    is_small = argument == 1.0
    quotient = change / tl.where(is_small, 1.0, argument - 1.0)
    excess = tl.where(is_small, change, tl.log(argument) * quotient)
    return -excess - tl.maximum(distance, 0.0), -excess + tl.minimum(distance, 0.0)


@triton.jit
def _weighted(logprobs, values):
    """Returns exp(logprobs) * values, and 0 where exp(logprobs) is 0."""
    p = tl.exp(logprobs)
    return tl.where(p > 0.0, p * values, 0.0)


@triton.jit
def compare_rows(
    logits,
    teacher_logits,
    numbers,
    num_tokens,
    SCALINGS: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes six numbers for each row into `numbers` [rows, 6].

    They are: the divergence; for the policy the largest scaled logit and log(sum(exp(scaled logit -
    largest))), the first two results of `_normalize`; the same two for the teacher; and the mean
    over the policy's distribution of the log ratio policy / mixture, which the gradient needs.
    `SCALINGS` are (SCALING of the policy, SCALING of the teacher)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    teacher_row = teacher_logits + index * num_tokens
    number = numbers + index * 6
    largest, log_total, _entropy = _normalize(row, num_tokens, SCALINGS[0], BLOCK)
    teacher_largest, teacher_log_total, _entropy = _normalize(
        teacher_row, num_tokens, SCALINGS[1], BLOCK
    )
    divergence = tl.full((), 0.0, tl.float32)
    mean_ratio = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, SCALINGS[0])
        teacher_scaled, _ = _load_scaled(teacher_row, offsets, num_tokens, SCALINGS[1])
        s = (scaled - largest) - log_total
        t = (teacher_scaled - teacher_largest) - teacher_log_total
        policy_ratio, teacher_ratio = _log_ratios(s, t, BETA)
        policy_term = tl.sum(_weighted(s, policy_ratio), 0)
        teacher_term = tl.sum(_weighted(t, teacher_ratio), 0)
        if BETA == 0.0:
            divergence += teacher_term
        elif BETA == 1.0:
            divergence += policy_term
        else:
            divergence += BETA * teacher_term + (1.0 - BETA) * policy_term
        mean_ratio += policy_term
    tl.store(number, divergence)
    tl.store(number + 1, largest)
    tl.store(number + 2, log_total)
    tl.store(number + 3, teacher_largest)
    tl.store(number + 4, teacher_log_total)
    tl.store(number + 5, mean_ratio)


@triton.jit
def replace_logits_by_divergence_gradient(
    logits,
    teacher_logits,
    numbers,
    num_tokens,
    SCALINGS: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrites each of the policy's logits with the gradient of the loss with respect to it.

    `numbers` [rows, 6] has what `compare_rows` wrote, except in column 0: the loss's gradient with
    respect to the divergence. For z = capped logit / temperature and the probabilities p of the
    policy and q of the teacher, the divergence's derivative is p - q for beta 0,
    p (s - t - mean(s - t)) for beta 1, and (1 - beta) p (s - m - mean(s - m)) between them, with
    means over p."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    teacher_row = teacher_logits + index * num_tokens
    number = numbers + index * 6
    factor = tl.load(number) / SCALINGS[0][0]
    largest = tl.load(number + 1)
    log_total = tl.load(number + 2)
    teacher_largest = tl.load(number + 3)
    teacher_log_total = tl.load(number + 4)
    mean_ratio = tl.load(number + 5)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, tanh = _load_scaled(row, offsets, num_tokens, SCALINGS[0])
        teacher_scaled, _ = _load_scaled(teacher_row, offsets, num_tokens, SCALINGS[1])
        s = (scaled - largest) - log_total
        t = (teacher_scaled - teacher_largest) - teacher_log_total
        if BETA == 0.0:
            gradient = tl.exp(s) - tl.exp(t)
        else:
            policy_ratio, _ = _log_ratios(s, t, BETA)
            gradient = _weighted(s, policy_ratio - mean_ratio)
            if BETA < 1.0:
                gradient = gradient * (1.0 - BETA)
        gradient = gradient * factor
        if SCALINGS[0][1] is not None:
            gradient = gradient * (1.0 - tanh * tanh)
        tl.store(row + offsets, gradient.to(row.dtype.element_ty), mask=offsets < num_tokens)
