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
from torch._subclasses.fake_tensor import FakeTensor

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
        # Rows: logprobs, entropies, largest logits, logs of the sums relative to these.
        results = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        product = _product_buffer(hidden, head, chunk)
        for rows in chunks(len(hidden), chunk):
            logits = torch.mm(hidden[rows], head.T, out=product[: rows.stop - rows.start])
            _launch(
                score_rows,
                logits,
                target_ids[rows],
                results[:, rows],
                column_length=len(hidden),
                SCALING=(temperature, softcap),
            )
        ctx.save_for_backward(hidden, head, target_ids, results[1:])
        ctx.scaling = (temperature, softcap)
        ctx.chunk = chunk
        # Copies: views of one tensor could not be changed in place by a caller.
        return results[0].clone(), results[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head, target_ids, saved = ctx.saved_tensors
        columns = torch.cat([saved, torch.stack(grads)])
        grad_hidden = torch.empty_like(hidden)
        grad_head = empty_head_gradient(head, needed=ctx.needs_input_grad[1])
        product = _product_buffer(hidden, head, ctx.chunk)
        for rows in chunks(len(hidden), ctx.chunk):
            logits = torch.mm(hidden[rows], head.T, out=product[: rows.stop - rows.start])
            _launch(
                replace_logits_by_gradient,
                logits,
                target_ids[rows],
                columns[:, rows],
                column_length=len(hidden),
                SCALING=ctx.scaling,
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
        # Rows: divergences, largest logit and log of the sum relative to it, of the policy and of
        # the teacher, mean log ratios.
        results = hidden.new_empty(6, len(hidden), dtype=torch.float32)
        ctx.save_for_backward(hidden, head, results)
        ctx.teacher = teacher
        ctx.beta = beta
        ctx.scaling = (temperature, softcap)
        ctx.chunk = chunk
        for rows, logits, teacher_logits in _products(ctx, hidden, head):
            _launch(
                compare_rows,
                logits,
                teacher_logits,
                results[:, rows],
                column_length=len(hidden),
                SCALINGS=(ctx.scaling, (teacher.temperature, teacher.softcap)),
                BETA=beta,
            )
        return results[0].clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head, results = ctx.saved_tensors
        teacher = ctx.teacher
        columns = torch.cat([grad_output[None], results[1:]])
        grad_hidden = torch.empty_like(hidden)
        grad_head = empty_head_gradient(head, needed=ctx.needs_input_grad[1])
        for rows, logits, teacher_logits in _products(ctx, hidden, head):
            _launch(
                replace_logits_by_divergence_gradient,
                logits,
                teacher_logits,
                columns[:, rows],
                column_length=len(hidden),
                SCALINGS=(ctx.scaling, (teacher.temperature, teacher.softcap)),
                BETA=ctx.beta,
            )
            torch.mm(logits, head, out=grad_hidden[rows])
            if grad_head is not None:
                add_product(grad_head, logits.T, hidden[rows])
        head_result = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, head_result, None, None, None, None, None


def _products(ctx: Any, hidden: Tensor, head: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields chunk by chunk the rows, and the logits [rows, V] of the policy and of the teacher."""
    teacher = ctx.teacher
    buffer = _product_buffer(hidden, head, ctx.chunk)
    teacher_buffer = _product_buffer(teacher.hidden, teacher.head, ctx.chunk)
    for rows in chunks(len(hidden), ctx.chunk):
        length = rows.stop - rows.start
        logits = torch.mm(hidden[rows], head.T, out=buffer[:length])
        teacher_logits = torch.mm(teacher.hidden[rows], teacher.head.T, out=teacher_buffer[:length])
        yield rows, logits, teacher_logits


def _product_buffer(hidden: Tensor, head: Tensor, chunk: int) -> Tensor:
    """Returns room for the logits of a chunk, [rows, V] in the compute dtype."""
    return hidden.new_empty(min(chunk, len(hidden)), len(head))


def _launch(kernel: Any, logits: Tensor, *arguments: Tensor, **options: Any) -> None:
    """Runs a kernel with one program for each row of logits [rows, V]."""
    # The planner counts the memory of a pass over fake tensors, which have no values.
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


# Triton's kernels. `SCALING` is (temperature, soft cap or None) of a model. A program works on one
# row of logits [rows, V]. Numbers of a row stand in columns: row k of the argument `columns` has
# the k-th number of all rows, and is `column_length` numbers long.


@triton.jit
def _tanh(x):
    """Returns tanh in float32. Near 0 the series, since 1 - 2 / (e^2x + 1) cancels there."""
    square = x * x
    series = 17.0 / 315 - square * (62.0 / 2835)
    series = 1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * series))
    return tl.where(tl.abs(x) < 0.25, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _load_scaled(row, offsets, num_tokens, SCALING: tl.constexpr):
    """Returns logits over the temperature and the tanh of their soft cap, float32 [BLOCK].

    Beyond the last token the logits are -inf. With a cap each operation is rounded to the compute
    dtype, as the engine rounds it, and as `logprobs.py` does."""
    dtype = row.dtype.element_ty
    logits = tl.load(row + offsets, mask=offsets < num_tokens, other=-float("inf")).to(tl.float32)
    tanh = logits
    if SCALING[1] is not None:
        tanh = _tanh((logits / SCALING[1]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        # The cap makes a finite number of the -inf that lies beyond the last token.
        capped = (tanh * SCALING[1]).to(dtype).to(tl.float32)
        logits = tl.where(offsets < num_tokens, capped, logits)
    return logits / SCALING[0], tanh


@triton.jit
def score_rows(
    logits,
    target_ids,
    columns,
    column_length,
    num_tokens,
    SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes four numbers of each row into `columns` [4, rows].

    They are logprob, entropy, the largest z = logit / temperature, and the log of sum(exp(z -
    largest)). The last two stay apart: their sum would be rounded by more than they are.
    The sums are relative to the largest z so far: `total` of exp(z - largest), and `weighted`
    of exp(z - largest) * (z - largest). When a larger one comes, both are moved to it."""
    # In 64 bits: rows times V may pass 2^31.
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, SCALING)
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
    target, _ = _load_scaled(row, tl.load(target_ids + index), num_tokens, SCALING)
    tl.store(columns + index, target - largest - log_total)
    tl.store(columns + column_length + index, log_total - weighted / total)
    tl.store(columns + 2 * column_length + index, largest)
    tl.store(columns + 3 * column_length + index, log_total)


@triton.jit
def replace_logits_by_gradient(
    logits,
    target_ids,
    columns,
    column_length,
    num_tokens,
    SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the loss's gradient by each logit in the logit's place, in the compute dtype.

    `columns` has the last three of `score_rows`, and the gradients by logprob and entropy.
    d logprob / d z = onehot - p, d entropy / d z = -p * (log p + entropy), and a cap's slope is
    1 - tanh^2."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    target = tl.load(target_ids + index)
    entropy = tl.load(columns + index)
    largest = tl.load(columns + column_length + index)
    log_total = tl.load(columns + 2 * column_length + index)
    logprob_factor = tl.load(columns + 3 * column_length + index) / SCALING[0]
    entropy_factor = tl.load(columns + 4 * column_length + index) / SCALING[0]
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
def _log_normalizer(row, num_tokens, SCALING: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest z = logit / temperature of a row, and the log of sum(exp(z - largest)).

    Apart, since their sum would be rounded by more than the z of a token that has nearly all of the
    probability, where the gradient is a small difference."""
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        scaled, _ = _load_scaled(row, offsets, num_tokens, SCALING)
        new_largest = tl.maximum(largest, tl.max(scaled, 0))
        origin = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - origin) + tl.sum(tl.exp(scaled - origin), 0)
        largest = new_largest
    return largest, tl.log(total)


@triton.jit
def _log_ratios(s, t, BETA: tl.constexpr):
    """Returns s - m and t - m for the log mixture m = log(beta e^t + (1 - beta) e^s).

    For beta 1 m is t, and for beta 0 these are s - t and t - s, as in `logprobs.py`. All are
    exactly 0 where s and t are equal."""
    distance = tl.where(s == t, 0.0, t - s)
    if BETA == 0.0 or BETA == 1.0:
        return -distance, distance
    # No argument of an exponential is positive, so that nothing overflows. expm1 and log1p are
    # computed by Kahan's quotients: Triton has neither, and 1 + x would cancel for small x.
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
    """Returns exp(logprobs) * values, 0 where the probability is 0."""
    p = tl.exp(logprobs)
    return tl.where(p > 0.0, p * values, 0.0)


@triton.jit
def compare_rows(
    logits,
    teacher_logits,
    columns,
    column_length,
    num_tokens,
    SCALINGS: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes six numbers of each row into `columns` [6, rows].

    They are the divergence, what `_log_normalizer` returns for policy and teacher, and the policy's
    mean log ratio to the mixture, which the gradient subtracts. `SCALINGS` are policy's and
    teacher's."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    teacher_row = teacher_logits + index * num_tokens
    largest, log_total = _log_normalizer(row, num_tokens, SCALINGS[0], BLOCK)
    teacher_largest, teacher_log_total = _log_normalizer(
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
    tl.store(columns + index, divergence)
    tl.store(columns + column_length + index, largest)
    tl.store(columns + 2 * column_length + index, log_total)
    tl.store(columns + 3 * column_length + index, teacher_largest)
    tl.store(columns + 4 * column_length + index, teacher_log_total)
    tl.store(columns + 5 * column_length + index, mean_ratio)


@triton.jit
def replace_logits_by_divergence_gradient(
    logits,
    teacher_logits,
    columns,
    column_length,
    num_tokens,
    SCALINGS: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the loss's gradient by each of the policy's logits in the logit's place.

    `columns` is that of `compare_rows`, but its row 0 has the gradients by the divergences. d KL(t
    || s) / d z = p - q, and for a mixture m it is (1 - beta) p (s - m - mean(s - m))."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * num_tokens
    teacher_row = teacher_logits + index * num_tokens
    factor = tl.load(columns + index) / SCALINGS[0][0]
    largest = tl.load(columns + column_length + index)
    log_total = tl.load(columns + 2 * column_length + index)
    teacher_largest = tl.load(columns + 3 * column_length + index)
    teacher_log_total = tl.load(columns + 4 * column_length + index)
    mean_ratio = tl.load(columns + 5 * column_length + index)
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
