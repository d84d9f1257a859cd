"""One row of the loss_memory benchmark.

python -m benchmarks.speed.loss_memory_worker HOW CHUNK DTYPE FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.support.ranks import peak_bytes, tell
from grpo_spmd.model.logprobs import TokenLogprobs

_TOKENS, _VOCABULARY, _HIDDEN, _TEMPERATURE, _ROUNDS = 4096, 32_000, 256, 0.8, 3


def main() -> None:
    method, chunk, dtype, folder = sys.argv[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(
        _TOKENS, _HIDDEN, generator=generator
    ).bfloat16()  # values that both dtypes can hold
    head = (0.05 * torch.randn(_VOCABULARY, _HIDDEN, generator=generator)).bfloat16()
    target_ids = torch.randint(0, _VOCABULARY, (_TOKENS,), generator=generator).to(device)
    weights = torch.randn(_TOKENS, generator=generator).to(device)  # as advantages would weigh them

    def logprobs(hidden: Tensor, head: Tensor) -> Tensor:
        if method == "chunked":
            scores: tuple[Tensor, Tensor] = TokenLogprobs.apply(
                hidden, head, target_ids, _TEMPERATURE, int(chunk)
            )
            return scores[0]
        logits = (hidden @ head.T).float() / _TEMPERATURE
        if method == "full":
            return logits.log_softmax(-1).gather(-1, target_ids[:, None])[:, 0]
        return logits.gather(-1, target_ids[:, None])[:, 0] - torch.stack(
            [row.logsumexp(-1) for row in logits]
        )

    seconds: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        (logprobs(*leaves) * weights).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    leaves = [x.to(device, getattr(torch, dtype)).requires_grad_() for x in (hidden, head)]
    # the libraries' own first allocations belong to what was there before
    torch.mm(leaves[0].detach()[:2], leaves[1].detach()[:8].T)
    peak = 0
    for _ in range(_ROUNDS):
        for leaf in leaves:
            leaf.grad = None
        peak = max(peak, peak_bytes(step))

    got = [leaf.grad.float().cpu() for leaf in leaves if leaf.grad is not None]
    file = Path(folder, "gradients.safetensors")
    if method == "full" and dtype == "float32":
        save_file({"hidden": got[0], "head": got[1]}, file)
    exact = load_file(file)
    off_by = [
        float((local - exact[name]).norm() / exact[name].norm())
        for name, local in zip(("hidden", "head"), got, strict=True)
    ]
    tell({"peak_bytes": peak, "seconds": seconds, "gradients_off_by": max(off_by)})


if __name__ == "__main__":
    main()
