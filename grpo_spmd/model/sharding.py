"""Which rows of a parameter this rank holds."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor import DTensor


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks that hold one copy of the policy between them: all, or with HSDP this rank's replica."""
    return parameter.device_mesh.get_group("shard")


def rows_per_rank(parameter: DTensor) -> int:
    """Rows of a full shard, ceil(rows / ranks of a replica)."""
    return -(-parameter.shape[0] // parameter.device_mesh.shape[-1])


def is_first_replica(parameter: DTensor) -> bool:
    """Whether this rank's shard is not a copy of another rank's that comes before it."""
    return parameter.device_mesh.ndim == 1 or parameter.device_mesh.get_local_rank("replicate") == 0


def first_row(parameter: DTensor) -> int:
    """First row of this rank's shard: FSDP2 deals rows in equal blocks, the last ranks may get fewer or none."""
    return min(parameter.device_mesh.get_local_rank("shard") * rows_per_rank(parameter), parameter.shape[0])
