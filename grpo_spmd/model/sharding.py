"""How FSDP2 shards a model over ranks: which rows of a parameter a rank holds, and their gather.

The mesh has the axis "shard", over which rows are split, and with HSDP "replicate" before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for


def shard_over_ranks(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute: torch.dtype,
    reshard_root: bool,
) -> None:
    """Collective. Applies FSDP2: each layer gathers its parameters by itself, in dtype `compute`.

    The root gathers the remaining ones. `reshard_root` False keeps them from the forward to the
    backward pass."""
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_root)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global token count: sum gradients, do not average them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def reshard(model: nn.Module) -> None:
    """Frees the gathered root parameters of a model, after a pass that no backward pass follows."""
    cast(FSDPModule, model).reshard()


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Returns the ranks that together hold one copy: all, or with HSDP this rank's replica."""
    return parameter.device_mesh.get_group("shard")


def num_shards(parameter: DTensor) -> int:
    """Returns the number of ranks that together hold one copy."""
    return dist.get_world_size(shard_group(parameter))


def num_columns(shape: Sequence[int]) -> int:
    """Returns the columns of a tensor of this shape seen as a matrix.

    All dimensions but the last are its rows. A vector has one column."""
    return shape[-1] if len(shape) > 1 else 1


def num_rows(shape: Sequence[int]) -> int:
    """Returns the rows of a tensor of this shape seen as a matrix."""
    return math.prod(shape) // num_columns(shape)


def as_matrix(tensor: Tensor) -> Tensor:
    """Returns the tensor as a matrix [`num_rows`, `num_columns`], of a shard too."""
    return tensor.reshape(num_rows(tensor.shape), num_columns(tensor.shape))


def rows_per_rank(parameter: DTensor, num_ranks: int | None = None) -> int:
    """Returns the rows of a full shard, ceil(rows / ranks of a replica).

    Give `num_ranks` if known: the question to the mesh takes longer than a small tensor's copy."""
    return -(-parameter.shape[0] // (num_ranks or num_shards(parameter)))


def first_row(parameter: DTensor) -> int:
    """Returns the first row of this rank's shard.

    FSDP2 deals rows in equal blocks; the last ranks may get fewer rows or none."""
    # The position among the ranks of one replica, not among all ranks.
    rank = parameter.device_mesh.get_local_rank("shard")
    return min(rank * rows_per_rank(parameter), parameter.shape[0])


def first_matrix_row(parameter: DTensor) -> int:
    """Returns the first row of this rank's shard in the parameter seen as a matrix."""
    return first_row(parameter) * parameter.shape[1:-1].numel()


def as_shard(whole: Tensor, parameter: DTensor) -> DTensor:
    """Returns a whole tensor, the same on all ranks, as sharded in the way that `parameter` is. It
    shares memory with this rank's rows."""
    rows = -(-len(whole) // num_shards(parameter))
    start = parameter.device_mesh.get_local_rank("shard") * rows
    return DTensor.from_local(
        whole[start : start + rows],
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def is_first_replica(parameter: DTensor) -> bool:
    """Returns True unless this rank's shard is a copy of an earlier rank's."""
    mesh = parameter.device_mesh
    return "replicate" not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank("replicate") == 0


def gather_rows(shards: Iterable[tuple[DTensor, Tensor]]) -> list[Tensor]:
    """Collective over the ranks of a replica: one all-gather. Returns full tensors [rows, n].

    Each item is a parameter that is sharded by rows, and this rank's tensor [local rows, n]. n may
    differ from item to item; the dtype is one."""
    parameters = []
    blocks = []
    for parameter, local_rows in shards:
        block = local_rows.new_zeros(rows_per_rank(parameter), local_rows.shape[1])
        block[: len(local_rows)] = local_rows
        parameters.append(parameter)
        blocks.append(block)
        del local_rows  # freed before the next one is made
    row = torch.cat([block.view(-1) for block in blocks])
    group = shard_group(parameters[0])
    gathered = row.new_empty(dist.get_world_size(group), len(row))
    gathered[dist.get_rank(group)] = row
    wait_for(start_all_gather(gathered, group))
    # Each parameter is a range of columns, with one rank's block of it in each row.
    columns = gathered.split([block.numel() for block in blocks], dim=1)
    return [
        values.reshape(-1, block.shape[1])[: parameter.shape[0]]
        for parameter, block, values in zip(parameters, blocks, columns, strict=True)
    ]
