"""How FSDP2 shards a model: which rows of a parameter each rank holds, and how to gather them.

The device mesh has a dimension "shard", over which rows are split. With HSDP it has a dimension
"replicate" before that. A replica is a group of ranks that together hold one copy of the model."""

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

from grpo_spmd.distributed.collectives import gather_blocks


def shard_over_ranks(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute: torch.dtype,
    reshard_root: bool,
) -> None:
    """Collective. Applies FSDP2 to `model`, so that parameters are gathered in dtype `compute`.

    Each of the layers gathers its own parameters; the root gathers the remaining ones (embedding,
    lm_head). With `reshard_root` the root's are freed after the forward pass and gathered again in
    the backward pass, otherwise they stay gathered in between."""
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
    """Frees a model's gathered root parameters. Called after a forward pass that has no backward
    pass, if the model was sharded with `reshard_root` False."""
    cast(FSDPModule, model).reshard()


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """Returns the process group of this rank's replica: all ranks without HSDP."""
    return parameter.device_mesh.get_group("shard")


def num_shards(parameter: DTensor) -> int:
    """Returns the number of ranks in a replica."""
    return dist.get_world_size(shard_group(parameter))


def num_columns(shape: Sequence[int]) -> int:
    """Returns the number of columns of a tensor of this shape, seen as a matrix.

    The last dimension makes the columns, all others the rows. A vector has one column."""
    return shape[-1] if len(shape) > 1 else 1


def num_rows(shape: Sequence[int]) -> int:
    """Returns the number of rows of a tensor of this shape, seen as a matrix (`num_columns`)."""
    return math.prod(shape) // num_columns(shape)


def as_matrix(tensor: Tensor) -> Tensor:
    """Returns the tensor reshaped to a matrix [num_rows, num_columns]. It may be a local shard."""
    return tensor.reshape(num_rows(tensor.shape), num_columns(tensor.shape))


def rows_per_rank(parameter: DTensor, num_ranks: int | None = None) -> int:
    """Returns the number of rows in a full-size shard: ceil(rows / ranks of a replica).

    Rows are indices of the first dimension. Pass `num_ranks`, the ranks of a replica, if it is
    known: asking the device mesh takes longer than copying a small tensor."""
    return -(-parameter.shape[0] // (num_ranks or num_shards(parameter)))


def first_row(parameter: DTensor) -> int:
    """Returns the index of the first row of this rank's shard.

    FSDP2 splits rows into equal blocks, one for each rank; the last ranks may get fewer rows or
    none. A rank without rows gets the number of rows."""
    # This rank's position within its replica, not among all ranks.
    rank = parameter.device_mesh.get_local_rank("shard")
    return min(rank * rows_per_rank(parameter), parameter.shape[0])


def first_matrix_row(parameter: DTensor) -> int:
    """Returns the index of the first row of this rank's shard, in the parameter seen as a matrix
    (`num_columns`)."""
    return first_row(parameter) * parameter.shape[1:-1].numel()


def as_shard(whole: Tensor, parameter: DTensor) -> DTensor:
    """Returns `whole`, a tensor that is equal on all ranks, as a DTensor sharded like `parameter`.

    The result shares memory with this rank's rows of `whole`."""
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
    """Returns True if this rank belongs to the first replica: always without HSDP."""
    mesh = parameter.device_mesh
    return "replicate" not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank("replicate") == 0


def gather_rows(shards: Iterable[tuple[DTensor, Tensor]]) -> list[Tensor]:
    """Collective over the ranks of a replica: one all-gather. Returns full tensors [rows, n].

    Each item of `shards` is a pair: a parameter that is sharded by rows, and a tensor [local rows,
    n] with values for this rank's rows. n may differ from item to item; all have the same dtype."""
    parameters = []
    blocks = []
    for parameter, local_rows in shards:
        block = local_rows.new_zeros(rows_per_rank(parameter), local_rows.shape[1])
        block[: len(local_rows)] = local_rows
        parameters.append(parameter)
        blocks.append(block)
        del local_rows  # freed before the next one is made
    row = torch.cat([block.view(-1) for block in blocks])
    gathered = gather_blocks(row, shard_group(parameters[0]))
    # `gathered` has one row for each rank, and in it a range of columns for each item: the rank's
    # block of that item.
    columns = gathered.split([block.numel() for block in blocks], dim=1)
    return [
        values.reshape(-1, block.shape[1])[: parameter.shape[0]]
        for parameter, block, values in zip(parameters, blocks, columns, strict=True)
    ]
