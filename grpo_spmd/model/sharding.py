"""How FSDP2 deals a policy to ranks: which rows of a parameter a rank holds, and one gather of rows. The mesh has the
axis "shard", over which rows are dealt, and with HSDP "replicate" before it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for


def shard_over_ranks(
    policy: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute: torch.dtype,
    reshard_root: bool,
) -> None:
    """Collective. FSDP2: each of `layers` gathers its parameters by itself, in `compute`, and the root those left."""
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_root)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global token count already: sum gradients over ranks, do not average them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that hold one copy of the policy between them: all, or with HSDP this rank's replica."""
    return parameter.device_mesh.get_group("shard")


def num_shards(parameter: DTensor) -> int:
    return dist.get_world_size(shard_group(parameter))


def rows_per_rank(parameter: DTensor, ranks: int | None = None) -> int:
    """Rows of a full shard, ceil(rows / ranks of a replica). `ranks`, where they are known: to ask the parameter's mesh
    takes longer than to copy a small tensor."""
    return -(-parameter.shape[0] // (ranks or num_shards(parameter)))


def first_row(parameter: DTensor) -> int:
    """First row of this rank's shard: FSDP2 deals rows in equal blocks, the last ranks may get fewer or none."""
    return min(
        parameter.device_mesh.get_local_rank("shard") * rows_per_rank(parameter), parameter.shape[0]
    )


def is_first_replica(parameter: DTensor) -> bool:
    """Whether this rank's shard is not a copy of another rank's that comes before it."""
    mesh = parameter.device_mesh
    return "replicate" not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank("replicate") == 0


def gather_rows(shards: Iterable[tuple[DTensor, Tensor]]) -> list[Tensor]:
    """Collective over the ranks of a replica, one all-gather: for each parameter the whole [rows, n], from each rank's
    own rows. What stands in the columns is the caller's; the dtype is one for all."""
    parameters, padded = [], []
    for parameter, mine in shards:
        block = mine.new_zeros(rows_per_rank(parameter), mine.shape[1])
        block[: len(mine)] = mine
        parameters.append(parameter)
        padded.append(block)
        del mine  # before the next one is made
    row, group = torch.cat([block.view(-1) for block in padded]), shard_group(parameters[0])
    gathered = row.new_empty(dist.get_world_size(group), len(row))
    gathered[dist.get_rank(group)] = row
    wait_for(start_all_gather(gathered, group))
    parts = zip(
        parameters, padded, gathered.split([block.numel() for block in padded], dim=1), strict=True
    )
    return [
        part.reshape(-1, block.shape[1])[: parameter.shape[0]] for parameter, block, part in parts
    ]
