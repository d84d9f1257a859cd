"""One row of the loss_memory benchmark.

python -m benchmarks.speed.loss_memory_worker HOW CHUNK DTYPE FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.speed.init_worker import status_bytes
from grpo_spmd.logprobs import TokenLogprobs

_TOKENS, _VOCABULARY, _HIDDEN, _TEMPERATURE, _ROUNDS = 4096, 32_000, 256, 0.8, 3


def main() -> None:
    how, chunk, dtype, folder = sys.argv[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TOKENS, _HIDDEN, generator=generator).bfloat16()  # values that both dtypes can hold
    head = (0.05 * torch.randn(_VOCABULARY, _HIDDEN, generator=generator)).bfloat16()
    target_ids = torch.randint(0, _VOCABULARY, (_TOKENS,), generator=generator).to(device)
    weights = torch.randn(_TOKENS, generator=generator).to(device)  # as advantages would weigh them

    def logprobs(hidden: Tensor, head: Tensor) -> Tensor:
        if how == "chunked":
            scores: tuple[Tensor, Tensor] = TokenLogprobs.apply(hidden, head, target_ids, _TEMPERATURE, int(chunk))
            return scores[0]
        logits = (hidden @ head.T).float() / _TEMPERATURE
        if how == "full":
            return logits.log_softmax(-1).gather(-1, target_ids[:, None])[:, 0]
        return logits.gather(-1, target_ids[:, None])[:, 0] - torch.stack([row.logsumexp(-1) for row in logits])

    def step(hidden: Tensor, head: Tensor) -> None:
        (logprobs(hidden, head) * weights[: len(hidden)]).sum().backward()

    leaves = [x.to(device, getattr(torch, dtype)).requires_grad_() for x in (hidden, head)]
    torch.mm(leaves[0].detach()[:2], leaves[1].detach()[:8].T)  # the libraries' own first allocations belong to what was there before
    peak = 0
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        for leaf in leaves:
            leaf.grad = None
        more, taken = _measured(lambda: step(*leaves), device)
        peak = max(peak, more)
        seconds.append(taken)

    got = [leaf.grad.float().cpu() for leaf in leaves if leaf.grad is not None]
    file = Path(folder, "gradients.safetensors")
    if how == "full" and dtype == "float32":
        save_file({"hidden": got[0], "head": got[1]}, file)
    exact = load_file(file)
    off_by = [float((mine - exact[name]).norm() / exact[name].norm()) for name, mine in zip(("hidden", "head"), got, strict=True)]
    print(json.dumps({"peak_bytes": peak, "seconds": seconds, "gradients_off_by": max(off_by)}))


def _measured(work: Callable[[], None], device: torch.device) -> tuple[int, float]:
    """Bytes held at the most beyond those before it, and seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return (torch.cuda.max_memory_allocated() if device.type == "cuda" else status_bytes("VmHWM")) - before, seconds


if __name__ == "__main__":
    main()
