"""One rank of the families benchmark: the command itself, and before its run is closed 17 more
changes of all weights, each synced; then what the engine holds by direct copies is compared, to the
bit, with what vLLM's own loader makes of the same weights. Rank 0 prints how many tensors are
copied directly, and what differed on any rank.

python -m benchmarks.agreement.families_worker --config CONFIG [section.key=value ...]
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from grpo_spmd import train
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.model.policy import hf_named_parameters
from grpo_spmd.records import SyncStats

CHANGES = 17  # after the training's three steps: 20 updates


def main() -> None:
    train.prepare_torch()
    from grpo_spmd.parts import Run

    close = Run.close

    def compared(run: Run) -> None:
        compare(run)
        close(run)

    with patch.object(Run, "close", compared):
        train.main()


@torch.no_grad()
def compare(run: Any) -> None:
    """Collective."""
    sync, engine = run.weight_sync, run.engine
    for number in range(1, CHANGES + 1):
        generator = torch.Generator().manual_seed(number)
        for parameter in run.policy.model.parameters():
            rows = parameter.to_local()
            rows.add_(0.01 * torch.randn(rows.shape, generator=generator))
        sync.sync(run.config.training.num_steps + number)
        engine.sleep()
    names = [name for name, _ in hf_named_parameters(run.policy)]
    engine.wake_weights()
    sync._send(0, SyncStats(), sync._direct)
    copied = held(engine, names)
    sync._send(0, SyncStats(), None)
    loaded = held(engine, names)
    differ = sorted(
        name
        for name in copied.keys() | loaded.keys()
        if not _are_same(copied.get(name), loaded.get(name))
    )
    num_direct = len(sync._direct.names) if sync._direct is not None else 0
    everything = on_rank0(
        lambda per_rank: sorted({name for rank_values in per_rank for name in rank_values}), differ
    )
    if run.session.is_rank0:
        print(
            f"direct: {num_direct} of {len(names)} tensors; of {len(loaded)} of the engine's "
            f"differ: {everything}"
        )


def held(engine: Any, names: list[str]) -> dict[str, Tensor]:
    """All that this rank's engine has: what is plain as it is, what is packed as the products with
    a unit matrix."""
    result = {
        f"{name} as it is": tensor.detach().clone()
        for name, tensor in engine._model.named_parameters()
    }
    for tensor in engine.tensors(names, {}):
        if tensor.product is not None and tensor.gate_up is not None:
            generator = torch.Generator().manual_seed(0)
            hidden = tensor.layer.w13_weight.shape[-1]
            probe = torch.randn(hidden, generator=generator).to(engine.dtype)
            result[tensor.engine_name] = tensor.product(probe)
        # A packed convolution is a parameter as it is.
        elif tensor.values is None and not hasattr(tensor.layer, "_cpu_unpacked_conv_weight"):
            layer: Any = tensor.layer
            sizes = ("input_size_per_partition", "input_size", "embedding_dim")  # one rank's first
            columns = next(getattr(layer, name) for name in sizes if hasattr(layer, name))
            # GLM4-MoE's routers are float32 in a bfloat16 engine too.
            dtype = next(layer.parameters()).dtype
            result[tensor.engine_name] = layer.quant_method.apply(
                layer, torch.eye(columns, dtype=dtype), None
            )
    return result


def _are_same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


if __name__ == "__main__":
    main()
