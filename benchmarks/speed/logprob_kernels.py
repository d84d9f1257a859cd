"""The Triton kernels for logprobs beside the plain code: errors, time and memory.

python -m benchmarks.speed.logprob_kernels [--size 1.5b|tiny] [--json FILE]

On a GPU, with the vocabulary and width of Qwen2.5-1.5B and bfloat16; without one the kernels run in
Triton's interpreter at a tiny size, which shows that all of this works and no speed. Errors are of
logprobs, entropies and gradients, relative to the norm of what float64 gives. Both compute a
forward and a backward pass over the same hidden states, in turns. Memory is the peak beyond the
inputs, in bytes a logit of one chunk, with the gradients of hidden states and lm_head left out.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.report import Row, arguments_parser, report, spread

# Before the kernels are imported: Triton reads it then.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from grpo_spmd.model.fused_logprobs import FusedTokenLogprobs
from grpo_spmd.model.logprobs import TokenLogprobs, chunks

_KERNELS: dict[str, Any] = {"plain": TokenLogprobs, "fused": FusedTokenLogprobs}
# Tokens, width, vocabulary, and tokens of a chunk.
_SHAPES = {
    "1.5b": ((2048, 1536, 151_936, 512), (8192, 1536, 151_936, 512), (8192, 1536, 151_936, 2048)),
    "tiny": ((9, 16, 1000, 4),),
}
_ROUNDS = 7
_TEMPERATURE = 0.7


def main() -> None:
    parser = arguments_parser(__doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--size", choices=list(_SHAPES), default="1.5b" if has_gpu else "tiny", help="of the model"
    )
    args = parser.parse_args()
    rows: list[Row] = []
    # numpy warns of 0 * -inf in an arm of tl.where that is not taken.
    warnings.simplefilter("ignore", RuntimeWarning)
    for shape in _SHAPES[args.size]:
        rows += _measure(*shape, device=torch.device("cuda" if has_gpu else "cpu"))
        print(*(list(row.values()) for row in rows[-2:]), sep="\n", flush=True)
    report("logprob_kernels", rows, args.json)


def _measure(
    num_tokens: int, width: int, vocabulary: int, chunk: int, *, device: torch.device
) -> list[Row]:
    """Returns the row of the plain code and that of the kernels for one shape."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    hidden = random(num_tokens, width).bfloat16().requires_grad_()
    head = (random(vocabulary, width) / width**0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator, device=device)
    weights = random(2, num_tokens) / num_tokens
    truth = _float64(hidden, head, targets, weights, chunk=chunk)
    times: dict[str, list[float]] = {name: [] for name in _KERNELS}
    errors: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for _ in range(_ROUNDS):
        for name, kernel in _KERNELS.items():
            hidden.grad = head.grad = None
            start, used = _start(device)
            scores = kernel.apply(hidden, head, targets, _TEMPERATURE, chunk)
            (torch.stack(scores) * weights).sum().backward()
            seconds, peak = _end(device, start, used)
            times[name].append(seconds)
            assert hidden.grad is not None
            assert head.grad is not None
            results = (*scores, hidden.grad, head.grad)
            errors[name] = [_off_by(a, b) for a, b in zip(results, truth, strict=True)]
            gradients = sum(2 * tensor.numel() for tensor in (hidden, head))
            peaks[name] = (peak - gradients) / (min(chunk, num_tokens) * vocabulary)
    columns = ("logprobs off by", "entropies off by", "gradient off by", "head's off by")
    return [
        {
            "kernel": name,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "tokens": num_tokens,
            "vocabulary": vocabulary,
            "chunk": chunk,
            **dict(zip(columns, errors[name], strict=True)),
            **spread("seconds", times[name]),
            "plain / this": statistics.median(times["plain"]) / statistics.median(times[name]),
            "bytes a logit": peaks[name] if device.type == "cuda" else "-",
        }
        for name in _KERNELS
    ]


def _start(device: torch.device) -> tuple[float, int]:
    """Returns (time, bytes in use)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    used = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    return time.perf_counter(), used


def _end(device: torch.device, start: float, used: int) -> tuple[float, int]:
    """Returns (seconds since `start`, peak bytes beyond `used`)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - used if device.type == "cuda" else 0
    return time.perf_counter() - start, peak


def _float64(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, *, chunk: int
) -> tuple[Tensor, ...]:
    """Returns logprobs, entropies, and the gradients of hidden states and head, in float64."""
    exact_head = head.detach().double().requires_grad_()
    pieces: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in chunks(len(hidden), chunk):
        exact = hidden[rows].detach().double().requires_grad_()
        # The logits are rounded to the compute dtype, as both kinds of kernels get them.
        product = (hidden[rows].detach() @ head.detach().T).double()
        logits = exact @ exact_head.T
        logits = logits + (product - logits).detach()
        logprobs = (logits / _TEMPERATURE).log_softmax(-1)
        chosen = logprobs.gather(-1, targets[rows, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        (torch.stack((chosen, entropy)) * weights[:, rows]).sum().backward()
        assert exact.grad is not None
        pieces.append((chosen.detach(), entropy.detach(), exact.grad))
    assert exact_head.grad is not None
    chosen, entropy, grad = (torch.cat(columns) for columns in zip(*pieces, strict=True))
    return chosen, entropy, grad, exact_head.grad


def _off_by(values: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference over the norm of what is exact."""
    return float((values.detach().double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
