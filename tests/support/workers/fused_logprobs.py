"""Worker: the Triton kernels of model/fused_logprobs.py, without a GPU.

`interpret` runs them in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported)
and compares logprobs, entropies, divergences and all gradients with float64. `compile` compiles
each kernel for real GPUs, down to machine code, which needs no GPU either. `some` takes the larger
vocabulary alone, and one GPU.

python -m tests.support.workers.fused_logprobs (interpret|compile) (some|all)
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.model import fused_logprobs
from grpo_spmd.model.fused_logprobs import FusedDivergence, FusedTokenLogprobs
from grpo_spmd.model.logprobs import Divergence, TokenLogprobs, WholeTeacher

NUM_TOKENS = 9  # no multiple of the chunk
CHUNK = 4
WIDTH = 16
TEMPERATURE = 0.7
# Relative to the norm of the float64 result. The kernels may be worse than this only as the plain
# code is: 1.5 times the plain code's own error is allowed, and 4 times with a soft cap in bfloat16,
# since the interpreter cuts a float32 to bfloat16 where torch and a GPU round to nearest.
BOUND = 1e-6


def main() -> None:
    method = {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]
    method(takes_all=sys.argv[2] == "all")


def interpret(*, takes_all: bool) -> None:
    # numpy warns of 0 * -inf in an arm of tl.where that is not taken.
    warnings.simplefilter("ignore", RuntimeWarning)
    # Small blocks, so that a row has several, and the last one is cut.
    fused_logprobs.BLOCK = 256
    torch.manual_seed(0)
    dtypes, caps = (torch.float32, torch.bfloat16), (None, 3.0)
    vocabularies = (7, 256, 1000) if takes_all else (600,)
    uses = (True, False) if takes_all else (True,)
    for dtype, vocabulary, cap, uses_entropy in itertools.product(dtypes, vocabularies, caps, uses):
        check_logprobs(dtype, vocabulary, cap, uses_entropy)
    for dtype, beta, cap in itertools.product(
        dtypes[: 1 + takes_all], (0.0, 0.3, 1.0), caps if takes_all else (3.0,)
    ):
        check_divergence(dtype, beta, cap)
    check_large_and_infinite_logits()
    check_frozen_head()


def plain_logprobs(hidden: Tensor, head: Tensor, temperature: float, cap: float | None) -> Tensor:
    """The logprobs [C, V] of all tokens, in float64 with a graph."""
    logits = hidden @ head.T
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return (logits / temperature).log_softmax(-1)


def compare(
    subject: str, fused: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor]
) -> None:
    """Asserts that each fused result is as near to the truth as the plain one, within the bound."""
    is_rounded = fused[-1].dtype == torch.bfloat16
    factor = 4.0 if is_rounded else 1.5
    for number, (a, b, exact) in enumerate(zip(fused, plain, truth, strict=True)):
        norm = exact.norm()
        error, plain_error = ((x.double() - exact).norm() / norm for x in (a, b))
        floor = 5e-3 if is_rounded else 10 * BOUND
        text = (
            f"{subject}, result {number}: off by {error:.2g}, the plain code by {plain_error:.2g}"
        )
        assert error <= max(factor * plain_error, floor), text


def check_logprobs(
    dtype: torch.dtype, vocabulary: int, cap: float | None, uses_entropy: bool
) -> None:
    hidden = torch.randn(NUM_TOKENS, WIDTH).to(dtype)
    head = torch.randn(vocabulary, WIDTH).to(dtype)
    ids = torch.randint(vocabulary, (NUM_TOKENS,))
    weights = torch.randn(2, NUM_TOKENS)
    if not uses_entropy:
        weights[1] = 0.0
    results: list[Any] = []
    for function in (FusedTokenLogprobs, TokenLogprobs):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        logprobs, entropy = function.apply(*leaves, ids, TEMPERATURE, CHUNK, cap)
        loss = (weights[0] * logprobs).sum()
        if uses_entropy:
            loss = loss + (weights[1] * entropy).sum()
        loss.backward()
        results.append([logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)])
    leaves = [hidden.double().requires_grad_(), head.double().requires_grad_()]
    log_p = plain_logprobs(leaves[0], leaves[1], TEMPERATURE, cap)
    logprobs = log_p.gather(-1, ids[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (weights.double() * torch.stack([logprobs, entropy])).sum().backward()
    truth: list[Any] = [logprobs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)]
    fused, plain = results
    compare(f"{dtype}, V {vocabulary}, cap {cap}, entropy {uses_entropy}", fused, plain, truth)


def check_divergence(dtype: torch.dtype, beta: float, cap: float | None) -> None:
    vocabulary = 700
    hidden = torch.randn(NUM_TOKENS, WIDTH).to(dtype)
    head = torch.randn(vocabulary, WIDTH).to(dtype)
    teacher = WholeTeacher(
        torch.randn(NUM_TOKENS, 8).to(dtype), torch.randn(vocabulary, 8).to(dtype), 1.3, None
    )
    weights = torch.randn(NUM_TOKENS)
    results: list[Any] = []
    for function in (FusedDivergence, Divergence):
        leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        divergence = function.apply(*leaves, teacher, beta, TEMPERATURE, CHUNK, cap)
        (weights * divergence).sum().backward()
        results.append([divergence.detach(), *(leaf.grad for leaf in leaves)])
    leaves = [hidden.double().requires_grad_(), head.double().requires_grad_()]
    s = plain_logprobs(leaves[0], leaves[1], TEMPERATURE, cap)
    t = plain_logprobs(teacher.hidden.double(), teacher.head.double(), 1.3, None)
    if beta == 0.0:
        divergence = (t.exp() * (t - s)).sum(-1)
    elif beta == 1.0:
        divergence = (s.exp() * (s - t)).sum(-1)
    else:
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        divergence = (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)
    (weights.double() * divergence).sum().backward()
    truth: list[Any] = [divergence.detach(), *(leaf.grad for leaf in leaves)]
    fused, plain = results
    compare(f"divergence, {dtype}, beta {beta}, cap {cap}", fused, plain, truth)
    # A teacher that is the policy teaches nothing, exactly.
    leaf = hidden.clone().requires_grad_()
    same = WholeTeacher(hidden, head, TEMPERATURE, cap)
    value = FusedDivergence.apply(leaf, head, same, beta, TEMPERATURE, CHUNK, cap)
    value.sum().backward()
    assert not value.any(), value
    assert leaf.grad is not None
    assert not leaf.grad.any()


def check_large_and_infinite_logits() -> None:
    """Logits of 1e4 overflow no exponential, and a token of probability 0 makes no NaN."""
    inf = math.inf
    # Worked by hand: logits, target, logprob, entropy.
    for logits, target, logprob, entropy in (
        ([1e4, 1e4, 3.0], 0, -math.log(2), math.log(2)),
        ([-1e4, 1e4, -1e4], 1, 0.0, 0.0),
        ([5.0, 5.0, 5.0], 2, -math.log(3), math.log(3)),
        ([2.0, -inf, 2.0], 2, -math.log(2), math.log(2)),
        ([-inf, -inf, 1.0], 0, -inf, 0.0),
        # The largest logit comes last, after a block of -inf alone.
        ([-inf] * 4 + [7.0, 7.0], 5, -math.log(2), math.log(2)),
    ):
        row = torch.tensor([logits])
        numbers = torch.empty(1, 4)
        arguments: dict[str, Any] = {
            "num_tokens": len(logits),
            "SCALING": (1.0, None),
            "BLOCK": 4,
        }
        fused_logprobs.score_rows[(1,)](row, torch.tensor([target]), numbers, **arguments)
        results = numbers[0].tolist()
        for result, expected in zip(results, (logprob, entropy), strict=False):
            assert result == expected or abs(result - expected) < 1e-6, (logits, results)
        saved = torch.cat([numbers[:, 1:], torch.ones(1, 2)], 1)
        fused_logprobs.replace_logits_by_gradient[(1,)](
            row, torch.tensor([target]), saved, **arguments
        )
        assert row.isfinite().all(), (logits, row)
        # A shift of all logits changes nothing, so that their gradients cancel.
        if math.isfinite(logprob):
            assert abs(float(row.sum())) < 1e-5, (logits, row)


def check_frozen_head() -> None:
    """With LoRA the head needs no gradient, and an entropy that is not used has none."""
    hidden = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
    head = torch.randn(50, WIDTH)
    ids = torch.randint(50, (NUM_TOKENS,))
    logprobs, _ = FusedTokenLogprobs.apply(hidden, head, ids, 1.0, CHUNK)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def compile_for_gpus(*, takes_all: bool) -> None:
    """Compiles every kernel, in each of its forms for A100, H100 and B200, or in one for H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"num_tokens": "i32", "numbers": "*fp32", "target_ids": "*i64"}
    forms = (
        (90, "bf16", 30.0, 0.5),
        (80, "bf16", None, 0.0),
        (90, "bf16", None, 0.5),
        (90, "bf16", 30.0, 1.0),
        (90, "fp32", 30.0, 0.5),
        (100, "bf16", 30.0, 0.5),
    )
    for capability, dtype, cap, beta in forms if takes_all else forms[:1]:
        constants: dict[str, Any] = {
            "SCALING": (0.7, cap),
            "SCALINGS": ((0.7, cap), (1.0, None)),
            "BETA": beta,
            "BLOCK": fused_logprobs.BLOCK,
        }
        for kernel in (
            fused_logprobs.score_rows,
            fused_logprobs.replace_logits_by_gradient,
            fused_logprobs.compare_rows,
            fused_logprobs.replace_logits_by_divergence_gradient,
        ):
            names = kernel.arg_names
            signature = {
                name: "constexpr" if name in constants else types.get(name, f"*{dtype}")
                for name in names
            }
            source = ASTSource(
                fn=kernel,
                signature=signature,
                constexprs={name: value for name, value in constants.items() if name in names},
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"], kernel
    print("compiled")


if __name__ == "__main__":
    main()
