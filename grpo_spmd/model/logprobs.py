"""Computes logprobs, entropies and divergences of sampled tokens, chunk by chunk.

The logits [T, V] of T tokens over V token ids never exist as a whole: only those of one chunk of
tokens exist at a time, and the backward pass computes each chunk's logits again.

A divergence says how far the policy's distribution of the next token is from a teacher's. It is the
generalized Jensen-Shannon divergence of TRL's DistillationTrainer (On-Policy Distillation, Agarwal
et al. 2024). With s for the policy's distribution (the student's) and t for the teacher's:
beta 0 is KL(t || s), beta 1 is KL(s || t), and between them it is
beta KL(t || m) + (1 - beta) KL(s || m) with the mixture m = beta t + (1 - beta) s.
All of it is computed in log space.

The outcomes are the events over which a divergence sums: each token by itself (WholeTeacher), or
the teacher's K likeliest tokens and "any other token" (TopTeacher).

`rows` is a slice of the tokens, or in a shape its length. s and t also stand for the logarithms of
the two distributions in code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_spmd.model.families.logits import times_slope

# C tokens, D hidden dimensions, V token ids, K likely tokens.
Hidden = Float[Tensor, "C D"]
Head = Float[Tensor, "V D"]
TargetIds = Int[Tensor, " C"]
Scores = tuple[Float[Tensor, " C"], Float[Tensor, " C"]]  # logprobs and entropies
# Slices of the tokens, each with a tensor [rows, V].
Chunks = Iterator[tuple[slice, Tensor]]
Gradients = tuple[Tensor | None, ...]  # of the arguments of an autograd function
Cap = float | None
"""The soft cap of the logits: logits become cap * tanh(logits / cap)."""
TokenIndices = Int[Tensor, " n"]  # positions among the C tokens
# Lower bound on the logprob of "any other token". If its probability is rounded to 0, log(0) would
# give -inf, and NaN in further arithmetic.
MIN_LOGPROB = math.log(torch.finfo(torch.float32).tiny)


class TokenLogprobs(torch.autograd.Function):
    """Computes the logprob of each target token, and the entropy of the distribution over all V
    tokens at its position.

    Both are float32. The logits are capped if there is a soft cap, and divided by the temperature.
    The backward pass computes them again. Each pass holds one float32 [chunk, V] tensor, and one in
    the compute dtype if that is not float32. Arithmetic is in place. Where it takes two float32
    buffers (for the entropy, its gradient, or a soft cap's derivative), each has half as many rows.
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
        """Returns the logprobs of `target_ids` and the entropies, float32 [C] each."""
        log_normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty_like(log_normalizer)
        entropy = torch.empty_like(log_normalizer)
        # Half a chunk, since the logits and their exponentials take a buffer each.
        buffers = _Buffers(max(1, chunk // 2), hidden, head, two=True)
        for rows, logits in buffers.scaled_logits(hidden, head, temperature, softcap):
            # Subtract the largest logit, so that exp() does not overflow.
            largest = logits.amax(-1, keepdim=True)
            exponentials = torch.exp(logits.sub_(largest), out=buffers.other[: len(logits)])
            normalizer = exponentials.sum(-1, keepdim=True)
            log_p = logits.sub_(normalizer.log())
            log_normalizer[rows] = (largest + normalizer.log()).squeeze(-1)
            logprobs[rows] = log_p.gather(-1, target_ids[rows, None]).squeeze(-1)
            weighted = exponentials.mul_(log_p).sum(-1, keepdim=True)
            entropy[rows] = -(weighted / normalizer).squeeze(-1)
        ctx.save_for_backward(hidden, head, target_ids, log_normalizer, entropy)
        ctx.settings = (temperature, chunk, softcap)
        # If the loss does not use the entropy, its gradient in `backward` is then None instead of
        # zeros, which saves a buffer.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        grad_logprobs, grad_entropy = grads
        hidden, head, target_ids, log_normalizer, entropy = ctx.saved_tensors
        temperature, chunk, softcap = ctx.settings
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        needs_two = grad_entropy is not None or softcap is not None
        buffers = _Buffers(max(1, chunk // 2) if needs_two else chunk, hidden, head, two=needs_two)

        def product_gradients() -> Chunks:
            """Yields the gradient with respect to lm_head's product, chunk by chunk."""
            for rows, logits in buffers.scaled_logits(hidden, head, temperature, softcap):
                # d logprob / d logits = onehot - p, and d entropy / d logits =
                # -p * (log p + entropy). Both are multiplied by 1 / temperature.
                logprob_factor = grad_logprobs[rows, None] / temperature
                target = target_ids[rows, None]
                normalizer = log_normalizer[rows, None]
                log_p = logits.sub_(normalizer)
                p = torch.exp(log_p, out=buffers.other[: len(log_p)] if needs_two else log_p)
                target_slope: Tensor | float = 1.0
                if softcap is not None:
                    target_slope = times_slope(p, log_p, normalizer, temperature / softcap, target)
                if grad_entropy is None:
                    grad_logits = p.mul_(-logprob_factor)
                else:
                    entropy_factor = grad_entropy[rows, None] / temperature
                    # -p * ((log p + entropy) * entropy_factor + logprob_factor), in place.
                    grad_logits = log_p.add_(entropy[rows, None]).mul_(entropy_factor)
                    grad_logits = grad_logits.add_(logprob_factor).mul_(p).neg_()
                grad_logits.scatter_add_(-1, target, logprob_factor * target_slope)
                yield rows, buffers.in_compute_dtype(grad_logits)

        grad_hidden, grad_head = sum_gradients(ctx, hidden, head, product_gradients())
        return grad_hidden, grad_head, None, None, None, None


def sum_gradients(
    ctx: Any, hidden: Tensor, head: Tensor, product_gradients: Chunks
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients with respect to the hidden states and to the head.

    `product_gradients` yields the gradient with respect to their product, the logits, in chunks:
    (slice of the tokens, [rows, V] in the compute dtype). The head's gradient is None if the head
    is frozen (LoRA), which saves a third of the backward pass."""
    grad_hidden = torch.empty_like(hidden)
    grad_head = None
    if ctx.needs_input_grad[1]:
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
    for rows, grad_product in product_gradients:
        torch.mm(grad_product, head, out=grad_hidden[rows])
        if grad_head is not None:
            _add_product(grad_head, grad_product.T, hidden[rows])
        # Free it before the next one is made.
        del grad_product
    return grad_hidden, None if grad_head is None else grad_head.to(head.dtype)


class _Buffers:
    """Buffers [rows, V] that all chunks of a pass use in turn.

    One or two are float32. If the compute dtype is not float32, one more has the compute dtype."""

    def __init__(self, rows: int, hidden: Tensor, head: Tensor, *, two: bool) -> None:
        """With `two` there is a second float32 buffer, `other`."""
        rows = min(rows, len(hidden))
        self._float = hidden.new_empty(rows, len(head), dtype=torch.float32)
        self._product = self._float
        if hidden.dtype != torch.float32:
            self._product = hidden.new_empty(rows, len(head))
        if two:
            self.other = torch.empty_like(self._float)

    def scaled_logits(
        self, hidden: Tensor, head: Tensor, temperature: float, softcap: Cap
    ) -> Chunks:
        """Yields for each chunk (slice of the tokens, `_scaled_logits` in the first float32
        buffer)."""
        # A rank without predictions has no rows: its slice of shared rows may be all prompt.
        for rows in chunks(len(hidden), max(1, len(self._float))):
            buffers = [buffer[: rows.stop - rows.start] for buffer in (self._product, self._float)]
            yield rows, _scaled_logits(hidden[rows], head, temperature, softcap, *buffers)

    def in_compute_dtype(self, grad_logits: Tensor) -> Tensor:
        """Returns `grad_logits` cast to the compute dtype, in the buffer of that dtype."""
        if self._product is self._float:
            return grad_logits
        return self._product[: len(grad_logits)].copy_(grad_logits)


def _add_product(total: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    """Adds `lhs` @ `rhs` to `total` in place. `total` is float32, the factors may have less
    precision."""
    if lhs.dtype == total.dtype:
        total.addmm_(lhs, rhs)
    # On CUDA the float32 product can be added directly, without rounding it to the factors' dtype.
    elif total.is_cuda:
        torch.addmm(total, lhs, rhs, out_dtype=total.dtype, out=total)
    else:
        total += lhs @ rhs


def chunks(length: int, chunk: int) -> Iterator[slice]:
    """Yields consecutive slices of at most `chunk` elements that together cover `length`
    elements."""
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher's distributions over all V tokens. Each token is an outcome.

    They are computed from the teacher's last hidden states and its lm_head when they are needed.
    Row i of the teacher's and of the policy's lm_head must belong to the same token."""

    hidden: Float[Tensor, "C D_T"]
    head: Float[Tensor, "V D_T"]
    temperature: float
    softcap: Cap

    def outcomes(self, log_p: Tensor, rows: slice) -> Tensor:
        """Returns the policy's logprobs of the outcomes: `log_p` [rows, V] itself, its logprobs of
        all tokens."""
        return log_p

    def logprobs_of(self, rows: slice) -> Tensor:
        """Returns the teacher's logprobs of the outcomes [rows, V], at the slice `rows` of the C
        tokens."""
        return _log_softmax(self.hidden[rows], self.head, self.temperature, self.softcap)

    def spread(self, grad: Tensor, log_p: Tensor, rows: slice) -> Tensor:
        """Returns the gradient with respect to the logits [rows, V] of all tokens: `grad` itself,
        since each token is an outcome."""
        return grad


@dataclass(frozen=True)
class TopTeacher:
    """A teacher's distributions over K + 1 outcomes: its K likeliest tokens, and "any other"."""

    ids: Int[Tensor, "C K"]
    """The K likeliest tokens by the teacher's distribution."""
    logprobs: Float[Tensor, "C K+1"]
    """The teacher's logprobs of `ids`, and in the last column that of all other tokens together."""

    def outcomes(self, log_p: Tensor, rows: slice) -> Tensor:
        """Returns the policy's logprobs of the outcomes [rows, K + 1], from its logprobs `log_p`
        [rows, V] of all tokens."""
        return _top_and_rest(log_p, self.ids[rows])

    def logprobs_of(self, rows: slice) -> Tensor:
        """Returns the teacher's logprobs of the outcomes [rows, K + 1], at the slice `rows` of the
        C tokens."""
        return self.logprobs[rows]

    def spread(self, grad: Tensor, log_p: Tensor, rows: slice) -> Tensor:
        """Turns the gradient `grad` with respect to the outcomes' logits into that with respect to
        the logits [rows, V] of all tokens.

        The gradient of "any other token" is divided among these in proportion to the policy's
        probabilities."""
        ids = self.ids[rows]
        rest_logprob = _top_and_rest(log_p, ids)[:, -1:]
        # No local name for the [rows, V] probabilities: it would keep them alive during scatter.
        spread_grad = (log_p - rest_logprob).exp() * grad[:, -1:]
        return spread_grad.scatter(-1, ids, grad[:, :-1])


class Divergence(torch.autograd.Function):
    """Computes the policy's divergence from a teacher at each token, float32 [C], chunk by chunk.

    The backward pass computes the logits again and returns gradients for the policy's hidden states
    and head, none for the teacher. Each pass holds about 7 float32 [chunk / 4, V] tensors. Where
    both distributions are equal the gradient is exactly 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Hidden,
        head: Head,
        teacher: WholeTeacher | TopTeacher,
        beta: float,
        temperature: float,
        chunk: int,
        softcap: Cap = None,
    ) -> Tensor:
        """Returns the divergence at each token, float32 [C].

        `temperature` and `softcap` are the policy's. A WholeTeacher has its own, and the logprobs
        of a TopTeacher were computed with them."""
        divergence = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in chunks(len(hidden), _num_rows(chunk)):
            log_p = _log_softmax(hidden[rows], head, temperature, softcap)
            # A local name for the terms would keep them alive while the next chunk is computed.
            divergence[rows] = _divergence_terms(
                teacher.outcomes(log_p, rows), teacher.logprobs_of(rows), beta
            ).sum(-1)
        ctx.save_for_backward(hidden, head)
        ctx.teacher = teacher
        ctx.beta = beta
        ctx.settings = (temperature, chunk, softcap)
        return divergence

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        """Returns the gradients of the hidden states and the head, and None for the rest."""
        hidden, head = ctx.saved_tensors
        temperature, chunk, softcap = ctx.settings
        teacher = ctx.teacher

        def product_gradients() -> Chunks:
            """Yields the gradient with respect to lm_head's product, chunk by chunk."""
            for rows in chunks(len(hidden), _num_rows(chunk)):
                scaled = _scaled_logits(hidden[rows], head, temperature, softcap)
                log_p = scaled.log_softmax(-1)
                grad = _divergence_gradient(
                    teacher.outcomes(log_p, rows), teacher.logprobs_of(rows), ctx.beta
                )
                grad = teacher.spread(grad, log_p, rows).mul_(grad_output[rows, None] / temperature)
                # The cap's derivative is 1 - tanh^2, where tanh = scaled * temperature / softcap.
                if softcap is not None:
                    grad.mul_(1 - scaled.mul_(temperature / softcap).square_())
                yield rows, grad.to(hidden.dtype)

        grad_hidden, grad_head = sum_gradients(ctx, hidden, head, product_gradients())
        return grad_hidden, grad_head, None, None, None, None, None


@dataclass(frozen=True)
class LogitSettings:
    """Settings for computing logprobs and divergences from hidden states and the lm_head."""

    temperature: float
    chunk: int
    """Number of tokens whose logits exist at a time."""
    softcap: Cap = None
    token_logprobs: type[torch.autograd.Function] = TokenLogprobs
    """TokenLogprobs, or FusedTokenLogprobs, which does the same with Triton kernels."""
    whole_divergence: type[torch.autograd.Function] = Divergence
    """The function for a WholeTeacher: Divergence, or FusedDivergence with Triton kernels."""

    def score(self, hidden: Hidden, head: Head, target_ids: TargetIds) -> Scores:
        """Returns the logprobs of the C `target_ids`, and the entropy of the distribution over all
        V tokens at each of their positions, float32 [C] each."""
        scores: Scores = self.token_logprobs.apply(
            hidden, head, target_ids, self.temperature, self.chunk, self.softcap
        )
        return scores

    def divergence(
        self, hidden: Hidden, head: Head, teacher: WholeTeacher | TopTeacher, beta: float
    ) -> Float[Tensor, " C"]:
        """Returns the divergence of the policy from a teacher at each token, float32 [C]."""
        # For a TopTeacher the logprobs of some tokens are picked out of all logprobs, and no kernel
        # keeps these.
        function = self.whole_divergence if isinstance(teacher, WholeTeacher) else Divergence
        distance: Tensor = function.apply(
            hidden, head, teacher, beta, self.temperature, self.chunk, self.softcap
        )
        return distance


@dataclass(frozen=True)
class TeacherDivergence:
    """Computes each token's divergence from its teachers, as a function of the policy's hidden
    states and head. An instance is a term of the loss (`Term` of policy.py)."""

    parts: Sequence[tuple[Tensor | None, WholeTeacher | TopTeacher]]
    """Pairs (token indices, teacher). The indices, int64 [n], say at which of the C tokens the
    teacher has a distribution. None: at all of them."""
    beta: float
    settings: LogitSettings
    """The settings for the policy's logits."""

    def __call__(self, hidden: Hidden, head: Head) -> Float[Tensor, " C"]:
        """Returns the sum of the divergences from all teachers at each token, float32 [C]."""
        total = torch.zeros(len(hidden), device=hidden.device)
        for indices, teacher in self.parts:
            scored_hidden = hidden if indices is None else hidden[indices]
            distance = self.settings.divergence(scored_hidden, head, teacher, self.beta)
            total = distance if indices is None else total.index_add(0, indices, distance)
        return total


@torch.no_grad()
def top_outcomes(
    hidden: Hidden, head: Head, k: int, temperature: float, chunk: int, softcap: Cap = None
) -> tuple[Int[Tensor, "C K"], Float[Tensor, "C K+1"]]:
    """Returns the two fields of a TopTeacher, computed from a teacher's hidden states and head: the
    ids of the `k` likeliest tokens, and the logprobs of the outcomes."""
    ids = list[Tensor]()
    logprobs = list[Tensor]()
    for rows in chunks(len(hidden), _num_rows(chunk)):
        log_p = _log_softmax(hidden[rows], head, temperature, softcap)
        top_ids = log_p.topk(k, dim=-1).indices
        ids.append(top_ids)
        logprobs.append(_top_and_rest(log_p, top_ids))
    return torch.cat(ids), torch.cat(logprobs)


def _top_and_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Returns [rows, K + 1]: the logprobs of `ids` [rows, K], and in the last column that of all
    other tokens together. `log_p` [rows, V] has the logprobs of all tokens."""
    # Sum over the other tokens: 1 - (sum of the K) would cancel if that sum is nearly 1.
    others = log_p.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    rest_logprob = others.log().clamp(min=MIN_LOGPROB)
    return torch.cat([log_p.gather(-1, ids), rest_logprob], dim=-1)


def _divergence_terms(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Returns the term that each outcome adds to the divergence, [rows, outcomes].

    `s` and `t` are the outcomes' logprobs by the policy and by the teacher, [rows, outcomes]."""
    if beta == 0.0:
        return t.exp() * (t - s)
    if beta == 1.0:
        return s.exp() * (s - t)
    policy_ratio, teacher_ratio = _mixture_ratios(s, t, beta)
    return beta * t.exp() * teacher_ratio + (1 - beta) * s.exp() * policy_ratio


def _divergence_gradient(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Returns the divergence's gradient with respect to the policy's logits of the outcomes, [rows,
    outcomes]. It is exactly 0 if `s` and `t` are equal.

    `s` and `t` are logprobs as in `_divergence_terms`."""
    if beta == 0.0:
        return s.exp() - t.exp()
    p = s.exp()
    ratio = s - t
    scale = 1.0
    if beta != 1.0:
        ratio = _mixture_ratios(s, t, beta)[0]
        scale = 1 - beta
    return scale * p * (ratio - (p * ratio).sum(-1, keepdim=True))


def _mixture_ratios(s: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns s - m and t - m for the log mixture m = log(beta e^t + (1 - beta) e^s).

    Both are exactly 0 if s and t are equal."""
    distance = t - s
    # Factor the larger of s and t out of the logarithm, so that no argument of an exponential is
    # positive and nothing overflows. `excess` is m - max(s, t).
    fraction = torch.where(distance > 0, 1 - beta, beta)
    excess = torch.log1p(fraction * torch.expm1(-distance.abs()))
    return -excess - distance.clamp(min=0), -excess + distance.clamp(max=0)


def _log_softmax(hidden: Tensor, head: Tensor, temperature: float, softcap: Cap) -> Tensor:
    """Returns the logprobs of all tokens, float32 [rows, V]."""
    return _scaled_logits(hidden, head, temperature, softcap).log_softmax(-1)


def _scaled_logits(
    hidden: Tensor,
    head: Tensor,
    temperature: float,
    softcap: Cap,
    product: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns capped logits / temperature, float32 [rows, V].

    `out` is a float32 buffer for the result, `product` a buffer for the product in the compute
    dtype; None: a new tensor. If the compute dtype is float32, both may be the same buffer."""
    # The product and the cap are rounded to the compute dtype, as in the engine. From there on
    # both compute in float32.
    logits = torch.mm(hidden, head.T, out=product)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if logits.dtype != torch.float32:
        logits = logits.float() if out is None else out.copy_(logits)
    return logits.div_(temperature)


def _num_rows(chunk: int) -> int:
    """Returns the number of tokens that a divergence handles at a time: a quarter of `chunk`, since
    it holds more tensors of this size."""
    return max(1, chunk // 4)
