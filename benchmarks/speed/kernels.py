"""What the update's time on a device is made of: every kernel of one packed update, by kind, beside
the wall clock.

    python -m benchmarks.speed.kernels [--size 1.5b|0.5b|tiny] [--json FILE]

A random Qwen2 of benchmarks/speed/gpu.py, 64 rollouts, bfloat16; two updates warm up, a third is
timed and a fourth recorded by torch's profiler. "share" is of the time of all kernels; "busy" what
the kernels are of the timed update: the rest is the device waiting for the host. On a CPU the
operators of the process stand in for kernels, to see that it works. A kernel's kind is told by its
name; the longest ones are listed, so that a wrong guess shows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import gpu
from benchmarks.speed.update import packed, sized
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.distributed.session import end_session, start_session

_ROLLOUTS, _LONGEST = 64, 12
# The first whose word is in a kernel's name, in lower case. Products come after attention, whose
# names have them too.
_KINDS = (
    ("attention", ("flash", "fmha", "attention", "attn", "sdpa")),
    (
        "products",
        (
            "gemm",
            "gemv",
            "cublas",
            "cutlass",
            "nvjet",
            "xmma",
            "matmul",
            "::mm",
            "addmm",
            "bmm",
            "linear",
        ),
    ),
    ("collectives", ("nccl", "c10d", "all_gather", "reduce_scatter")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("copies and casts", ("memcpy", "memset", "copy", "cat", "to_copy", "fill")),
    ("softmax and sums", ("softmax", "logsumexp", "reduce", "sum", "mean", "norm", "amax")),
    (
        "elementwise",
        (
            "elementwise",
            "vectorized",
            "triton",
            "mul",
            "add",
            "sub",
            "div",
            "silu",
            "exp",
            "neg",
            "pow",
        ),
    ),
)


class Kernel(NamedTuple):
    """All calls of one name."""

    name: str
    seconds: float
    calls: int


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--size", choices=gpu.SIZES, default="1.5b")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    session = start_session()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = gpu.make_model(Path(folder), gpu.SIZES[args.size])
        config, rollouts = sized(args.size, folder, _ROLLOUTS)
        update = packed(config, rollouts, session)
    for _ in range(2):
        update()
    start = time.perf_counter()
    update()  # returns a figure, and so waits for the device
    seconds = time.perf_counter() - start
    on_gpu = session.device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as recorded:
        update()
    kernels = _kernels(recorded, on_gpu=on_gpu)
    end_session()
    ran = {
        "model": f"{args.size}, {num_parameters:,} parameters",
        "tokens": sum(item.num_tokens for item in rollouts),
    }
    ran |= {
        "device": torch.cuda.get_device_name()
        if on_gpu
        else "CPU (a smoke test, not a measurement)"
    }
    report("kernels", [row | ran for row in kind_rows(kernels, seconds)], args.json)
    max_length = sorted(kernels, key=lambda kernel: -kernel.seconds)[:_LONGEST]
    rows = [
        {"ms": 1e3 * k.seconds, "calls": k.calls, "kind": kind_of(k.name), "name": k.name[:90]}
        for k in max_length
    ]
    report("kernels_longest", rows, args.json)


def kind_rows(kernels: Iterable[Kernel], update_s: float) -> list[Row]:
    """One row a kind, the longest first, and one of all."""
    kind_values: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        kind_values.setdefault(kind_of(kernel.name), []).append(kernel)
    total = sum(kernel.seconds for result in kind_values.values() for kernel in result)
    rows = [_row(kind, result, total) for kind, result in kind_values.items()]
    every = _row("all", [kernel for result in kind_values.values() for kernel in result], total)
    rows = [*sorted(rows, key=lambda row: -row["ms"]), every]
    return [row | {"update_ms": 1e3 * update_s, "busy": total / update_s} for row in rows]


def _row(kind: str, kernels: list[Kernel], total_s: float) -> Row:
    seconds = sum(kernel.seconds for kernel in kernels)
    calls = sum(kernel.calls for kernel in kernels)
    return {"kind": kind, "ms": 1e3 * seconds, "share": seconds / total_s, "calls": calls}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in _KINDS if any(word in lower for word in words)), "other")


def _kernels(recorded: Any, *, on_gpu: bool) -> list[Kernel]:
    result = []
    for event in recorded.key_averages():
        own_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # An annotation (FSDP's, the optimizer's) spans kernels, and would count them twice.
        if own_us > 0 and not event.is_user_annotation:
            result.append(Kernel(event.key, own_us / 1e6, event.count))
    return result


if __name__ == "__main__":
    main()
