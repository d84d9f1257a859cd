"""A pass over a step's rollouts that measures the policy and leaves it as it is, while a critic warms up."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.distributed.reductions import Max, Reductions, merge
from grpo_spmd.records import RolloutBatch


@torch.no_grad()
def measured(
    policy: nn.Module,
    score: Callable[..., tuple[Reductions, Tensor]],
    sums: Reductions,
    batch: RolloutBatch,
    check: Callable[[bool], None] | None,
) -> Reductions:
    """Collective. `sums` with what `score` finds of each micro-batch; "measured": the mini-batches that count."""
    num_measured = 0
    try:
        for number, mini_batch in enumerate(batch.mini_batches):
            if not batch.num_loss_tokens[number]:
                continue
            num_measured += 1
            counts = batch.num_loss_tokens[number], batch.num_loss_sequences[number]
            for micro_batch in mini_batch:
                if check is not None:
                    check(False)
                sums = merge([sums, score(micro_batch, *counts, True)[0]])
    finally:
        cast(FSDPModule, policy).reshard()
    return {name: each.on_host() for name, each in sums.items()} | {"measured": Max(float(num_measured))}
