"""Worker: the real training, on whose last rank 100 MiB a step are kept and the third update asks
for more memory than there is.

python -m tests.support.workers.out_of_memory --config CONFIG
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

import grpo_spmd.engine.engine
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.engine.start import SleepCheck
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.train import main

_kept: list[torch.Tensor] = []
_update = PolicyUpdater.update


def leaking_update(self: PolicyUpdater, batch: Any, *rest: Any, **options: Any) -> Reductions:
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        _kept.append(torch.ones(100 << 20, dtype=torch.uint8))
        if len(_kept) == 3:
            torch.empty(1 << 50)
    return _update(self, batch, *rest, **options)


if __name__ == "__main__":
    grpo_spmd.engine.engine.SleepCheck = functools.partial(SleepCheck, growth_bytes=64 << 20)  # type: ignore[misc, assignment]
    PolicyUpdater.update = leaking_update  # type: ignore[method-assign]
    main()
