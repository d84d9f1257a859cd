"""Logprobs and entropies of sampled tokens, without ever holding the [T, V] logits as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """Logprob of each target and entropy of its distribution, in float32, from `chunk` tokens of
    logits at a time.

    The backward pass computes the logits again. Each pass holds one float32 [chunk, V] and, where
    the compute dtype is another, one of that: arithmetic is in place, and where it takes two
    buffers (the entropy, its gradient, a soft cap's slope) they have half as many rows each. What
    is divided by the temperature are the logits, capped or not.
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
        for piece in chunks(len(hidden), rows):
            logits = buffers.logits(hidden[piece], head, temperature, softcap)
            largest = logits.amax(-1, keepdim=True)
            exponents = torch.exp(logits.sub_(largest), out=buffers.other[: len(logits)])
            normalizer = exponents.sum(-1, keepdim=True)
            log_p = logits.sub_(normalizer.log())
            log_normalizer[piece] = (largest + normalizer.log()).squeeze(-1)
            logprobs[piece] = log_p.gather(-1, target_ids[piece, None]).squeeze(-1)
            entropy[piece] = -(exponents.mul_(log_p).sum(-1, keepdim=True) / normalizer).squeeze(-1)
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
        for piece in chunks(len(hidden), rows):
            # d logprob / d logits = onehot - p; d entropy / d logits = -p * (log p + entropy); and
            # 1 / temperature
            outer, target, norm = (
                grad_logprobs[piece, None] / temperature,
                target_ids[piece, None],
                norms[piece, None],
            )
            log_p = buffers.logits(hidden[piece], head, temperature, softcap).sub_(norm)
            p = torch.exp(log_p, out=buffers.other[: len(log_p)] if two else log_p)
            slope = (
                1.0
                if softcap is None
                else times_slope(p, log_p, norm, temperature / softcap, target)
            )
            if grad_entropy is None:
                grad_logits = p.mul_(-outer)
            else:
                inner = grad_entropy[piece, None] / temperature
                grad_logits = (
                    log_p.add_(entropy[piece, None]).mul_(inner).add_(outer).mul_(p).neg_()
                )
            grad_logits.scatter_add_(-1, target, outer * slope)
            grad_product = buffers.in_compute_dtype(grad_logits)
            torch.mm(grad_product, head, out=grad_hidden[piece])
            if grad_head is not None:
                add_product(grad_head, grad_product.T, hidden[piece])
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(head.dtype),
            None,
            None,
            None,
            None,
        )


class _Buffers:
    """The [rows, V] tensors that all chunks share: one or two in float32; one in the compute dtype,
    if another."""

    def __init__(self, rows: int, hidden: Tensor, head: Tensor, *, two: bool) -> None:
        self._float = hidden.new_empty(rows, len(head), dtype=torch.float32)
        is_float = hidden.dtype == torch.float32
        self._product = (
            self._float if is_float else hidden.new_empty(rows, len(head), dtype=hidden.dtype)
        )
        if two:
            self.other = torch.empty_like(self._float)

    def logits(self, hidden: Tensor, head: Tensor, temperature: float, softcap: Cap) -> Tensor:
        # Product and cap are rounded to the compute dtype as the engine's are; what follows is
        # float32 on both sides.
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


def add_product(total: Tensor, left_factor: Tensor, right_factor: Tensor) -> None:
    """total += left @ right, with `total` in float32 whatever the others are."""
    if left_factor.dtype == total.dtype:
        total.addmm_(left_factor, right_factor)
    elif total.is_cuda:  # accumulated in float32 by the product itself
        torch.addmm(total, left_factor, right_factor, out_dtype=total.dtype, out=total)
    else:
        total += left_factor @ right_factor


def chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


# How far a policy's distribution of the next token is from a teacher's, at each sampled token,
# without ever holding
# the [T, V] logits as a whole.
#
# The generalized Jensen-Shannon divergence as TRL's DistillationTrainer has it (On-Policy
# Distillation, Agarwal et al.
# 2024), with s the policy's distribution and t the teacher's: beta 0 is KL(t || s), beta 1 is KL(s
# || t), and between
# them it is beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s, all in log
# space.


Scaling = tuple[float, int, Cap]  # temperature, tokens of a chunk, cap of the logits
TokenIndices = Int[Tensor, " n"]  # of tokens [C]
MIN_LOGPROB = math.log(
    torch.finfo(torch.float32).tiny
)  # log of the least probability that a bucket counts as having


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher's distributions by what they are computed from: its last hidden states [C, D_T] and
    its lm_head, whose
    first V rows are those of the policy's."""

    hidden: Float[Tensor, "C D_T"]
    head: Float[Tensor, "V D_T"]
    temperature: float
    softcap: Cap

    def outcomes(self, log_p: Tensor, piece: slice) -> Tensor:
        """Logprobs of what is told apart, by those of all tokens [rows, V]: here each token by
        itself."""
        return log_p

    def logprobs_of(self, piece: slice) -> Tensor:
        """The teacher's of these outcomes."""
        return _log_softmax(self.hidden[piece], self.head, self.temperature, self.softcap)

    def spread(self, grad: Tensor, log_p: Tensor, piece: slice) -> Tensor:
        """From the gradient with respect to the outcomes to that with respect to the tokens."""
        return grad


@dataclass(frozen=True)
class TopTeacher:
    """The K tokens that a teacher finds likeliest, with their logprobs, and last the logprob of all
    others together."""

    ids: Int[Tensor, "C K"]
    logprobs: Float[Tensor, "C K+1"]

    def outcomes(self, log_p: Tensor, piece: slice) -> Tensor:
        """As WholeTeacher's; told apart are these K tokens and any other one, [rows, K + 1]."""
        return _outcomes(log_p, self.ids[piece])

    def logprobs_of(self, piece: slice) -> Tensor:
        return self.logprobs[piece]

    def spread(self, grad: Tensor, log_p: Tensor, piece: slice) -> Tensor:
        """As WholeTeacher's: the rest's gradient is dealt to its tokens by their probabilities."""
        ids = self.ids[piece]
        rest = _outcomes(log_p, ids)[:, -1:]
        return ((log_p - rest).exp() * grad[:, -1:]).scatter(-1, ids, grad[:, :-1])


class Divergence(torch.autograd.Function):
    """The divergence at each token, float32 [C], from `chunk` tokens of logits at a time.

    The backward pass computes the logits of both again, and gives gradients to the policy's hidden
    states and head. Each pass holds about 7 float32 [chunk / 4, V]. Equal distributions have a
    gradient of exactly 0.
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
        matches = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for piece in chunks(len(hidden), _rows(chunk)):
            log_p = _log_softmax(hidden[piece], head, temperature, softcap)
            matches[piece] = _terms(
                teacher.outcomes(log_p, piece), teacher.logprobs_of(piece), beta
            ).sum(-1)
        ctx.save_for_backward(hidden, head)
        ctx.teacher, ctx.beta, ctx.scaling = teacher, beta, (temperature, chunk, softcap)
        return matches

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head = ctx.saved_tensors
        temperature, chunk, softcap = ctx.scaling
        grad_hidden = torch.empty_like(hidden)
        trains_head = ctx.needs_input_grad[1]  # not where the head is frozen (LoRA)
        grad_head = (
            torch.zeros(head.shape, dtype=torch.float32, device=head.device)
            if trains_head
            else None
        )
        for piece in chunks(len(hidden), _rows(chunk)):
            scaled = _scaled_logits(hidden[piece], head, temperature, softcap)
            log_p = scaled.log_softmax(-1)
            grad = _gradient(
                ctx.teacher.outcomes(log_p, piece), ctx.teacher.logprobs_of(piece), ctx.beta
            )
            grad = ctx.teacher.spread(grad, log_p, piece).mul_(
                grad_output[piece, None] / temperature
            )
            if softcap is not None:  # its slope is 1 - tanh^2
                grad.mul_(1 - scaled.mul_(temperature / softcap).square_())
            logits_values = grad.to(hidden.dtype)
            torch.mm(logits_values, head, out=grad_hidden[piece])
            if grad_head is not None:
                add_product(grad_head, logits_values.T, hidden[piece])
        head_values = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, head_values, None, None, None, None, None


@dataclass(frozen=True)
class TeacherDivergence:
    """The divergence from the teachers that each token has, as a function of the policy's hidden
    states and head."""

    parts: Sequence[tuple[Tensor | None, WholeTeacher | TopTeacher]]
    """For each teacher the int64 indices of its tokens, of any number; None: all tokens."""
    beta: float
    scaling: Scaling  # of the policy
    num_tokens: int  # V

    def __call__(self, hidden: Hidden, head: Head) -> Float[Tensor, " C"]:
        total = torch.zeros(len(hidden), device=hidden.device)
        for positions, teacher in self.parts:
            local_piece = hidden if positions is None else hidden[positions]
            distance: Tensor = Divergence.apply(
                local_piece, head, teacher, self.beta, *self.scaling
            )
            total = distance if positions is None else total.index_add(0, positions, distance)
        return total


@torch.no_grad()
def top_outcomes(
    hidden: Hidden, head: Head, k: int, temperature: float, chunk: int, softcap: Cap = None
) -> tuple[Int[Tensor, "C K"], Float[Tensor, "C K+1"]]:
    """What a TopTeacher is made of."""
    found_ids, matches = list[Tensor](), list[Tensor]()
    for piece in chunks(len(hidden), _rows(chunk)):
        log_p = _log_softmax(hidden[piece], head, temperature, softcap)
        ids = log_p.topk(k, dim=-1).indices
        found_ids.append(ids)
        matches.append(_outcomes(log_p, ids))
    return torch.cat(found_ids), torch.cat(matches)


def _outcomes(log_p: Tensor, ids: Tensor) -> Tensor:
    """[rows, K + 1]: logprobs of `ids`, and of all other tokens together: their sum, not 1 less the
    others', which
    would cancel."""
    rest = log_p.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).log().clamp(min=MIN_LOGPROB)
    return torch.cat([log_p.gather(-1, ids), rest], dim=-1)


def _terms(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """What each outcome adds to the divergence."""
    if beta == 0.0:
        return t.exp() * (t - s)
    if beta == 1.0:
        return s.exp() * (s - t)
    policy_values, teacher_values = _above_mixture(s, t, beta)
    return beta * t.exp() * teacher_values + (1 - beta) * s.exp() * policy_values


def _gradient(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """With respect to the logits of the outcomes, exactly 0 where `s` and `t` are the same."""
    if beta == 0.0:
        return s.exp() - t.exp()
    p, ratio, scale = s.exp(), s - t, 1.0
    if beta != 1.0:
        ratio, scale = _above_mixture(s, t, beta)[0], 1 - beta
    return scale * p * (ratio - (p * ratio).sum(-1, keepdim=True))


def _above_mixture(s: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """s - m and t - m, where m = log(beta e^t + (1 - beta) e^s): exactly 0 where they are the same,
    and no exponential
    is of more than 0."""
    distance = t - s
    fraction = torch.where(distance > 0, 1 - beta, beta)
    over = torch.log1p(fraction * torch.expm1(-distance.abs()))  # m less the larger of s and t
    return -over - distance.clamp(min=0), -over + distance.clamp(max=0)


def _log_softmax(hidden: Tensor, head: Tensor, temperature: float, softcap: Cap) -> Tensor:
    return _scaled_logits(hidden, head, temperature, softcap).log_softmax(-1)


def _scaled_logits(hidden: Tensor, head: Tensor, temperature: float, softcap: Cap) -> Tensor:
    # Product and cap are rounded to the compute dtype, as where logprobs are computed; what follows
    # is float32.
    logits = torch.mm(hidden, head.T)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.float().div_(temperature)


def _rows(chunk: int) -> int:
    return max(1, chunk // 4)
