"""Gathers the policy's sharded tensors for an engine: casts them and all-gathers them in buckets.

A shard is one rank's rows of a tensor. A replica is a group of ranks that together hold the whole
policy once. A bucket is a buffer of bounded size for one all-gather.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for
from grpo_spmd.model.families.stored import SavedLayout, SavedTensor
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.sharding import as_matrix, num_shards, rows_per_rank, shard_group
from grpo_spmd.records import SyncStats


def gather_tensors(
    shards: Sequence[Shard], dtype: torch.dtype, bucket_bytes: int, stats: SyncStats
) -> Generator[tuple[str, Tensor], None, None]:
    """Collective. Yields (HF name, full tensor in `dtype`) of `shards`, one after the other.

    Every rank must draw all tensors, in step with the other ranks. vLLM keeps them until a layer is
    complete. They are therefore new tensors, never views of the buckets, which are overwritten, or
    of the parameters. The caller should drop a tensor before it draws the next one. The sent bytes
    and the collectives are added to `stats`.

    Each rank's shards of all parameters, cast to `dtype` and laid end to end, form one long row.
    The rows are all-gathered over the ranks of a replica in buckets of at most `bucket_bytes`,
    which may end in the middle of a tensor. While the tensors of one bucket are used, the next one
    is being gathered, so the extra memory is two buckets. There are none if one rank holds the
    whole policy.
    """
    # Do not decorate this with torch.no_grad: its wrapper would keep the yielded tensor alive while
    # the next one is made.
    if not shards:
        return
    num_ranks = num_shards(shards[0].parameter)
    if num_ranks == 1:
        for shard in shards:
            full = _local_values(shard).to(dtype, copy=True)
            stats.bytes += full.nbytes
            yield shard.name, full.view(shard.parameter.shape)
            # Merged adapters make a new tensor: free this one before the next one is made.
            del full
        return
    widths = [rows_per_rank(s.parameter, num_ranks) * s.parameter.shape[1:].numel() for s in shards]
    # Elements of its row that each rank puts into one bucket. All ranks compute the same number.
    room = min(max(1, bucket_bytes // (num_ranks * dtype.itemsize)), sum(widths))
    with closing(_gather_buckets(shards, widths, dtype, room, stats)) as buckets:
        # The columns of the current bucket that were not copied yet. None are left at the start.
        bucket = torch.empty(0, 0)
        for (name, parameter, _), width in zip(shards, widths, strict=True):
            full = torch.empty(num_ranks, width, dtype=dtype, device=parameter.device)
            start = 0
            while start < width:
                if not bucket.shape[1]:
                    bucket = next(buckets)
                count = min(width - start, bucket.shape[1])
                full[:, start : start + count] = bucket[:, :count]
                bucket = bucket[:, count:]
                start += count
            # The last ranks' rows end in padding, which the slice leaves out.
            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)
            # Free this tensor before the next one is made.
            del full


def saved_tensors(
    tensors: Iterable[tuple[str, Tensor]], layout: SavedLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) pairs as checkpoints store them: one tensor for each expert's matrix,
    where the policy has all experts of a layer in one parameter."""
    for name, tensor in tensors:
        matrix = as_matrix(tensor)
        for target in layout.get(name, [SavedTensor(name, 0, tuple(tensor.shape))]):
            rows = matrix[target.start : target.start + target.num_rows]
            yield target.name, rows.view(target.shape)
        # Free this tensor before the next one is made.
        del tensor, matrix, rows


def _local_values(shard: Shard) -> Tensor:
    """Returns this rank's values of a tensor, flattened to one dimension."""
    with torch.no_grad():
        return shard.local_rows().detach().reshape(-1)


def _gather_buckets(
    shards: Sequence[Shard], widths: list[int], dtype: torch.dtype, room: int, stats: SyncStats
) -> Generator[Tensor, None, None]:
    """Collective. Yields the long rows of all ranks in buckets [ranks, at most `room`].

    `widths` has the number of elements that each shard takes in the row, with its padding. A bucket
    is valid until the next one is drawn."""
    parameter = shards[0].parameter
    group = shard_group(parameter)
    rank = dist.get_rank(group)
    num_ranks = num_shards(parameter)
    total = sum(widths)
    num_buckets = -(-total // room)
    buffers = [
        torch.empty(num_ranks * room, dtype=dtype, device=parameter.device)
        for _ in range(min(2, num_buckets))
    ]
    row = _ShardRow(shards, widths)
    works: list[dist.Work] = []

    def start_bucket(number: int) -> Tensor:
        """Fills this rank's row of bucket `number`, starts the all-gather, and returns the
        bucket."""
        columns = min(room, total - number * room)
        bucket = buffers[number % 2][: num_ranks * columns].view(num_ranks, columns)
        row.fill(bucket[rank])
        works.extend(start_all_gather(bucket, group))
        stats.bytes += bucket.nbytes
        stats.num_collectives += 1
        return bucket

    try:
        next_bucket = start_bucket(0)
        for number in range(num_buckets):
            wait_for(works)
            bucket = next_bucket
            # Start the next all-gather first, so that it overlaps with the copies out of `bucket`.
            if number + 1 < num_buckets:
                next_bucket = start_bucket(number + 1)
            yield bucket
    finally:
        # If the caller failed, an all-gather is still in flight. Wait for it, or the next gather
        # would receive its messages. If another rank is gone, the wait raises RuntimeError, which
        # must not hide the caller's error.
        with suppress(RuntimeError):
            wait_for(works)


class _ShardRow:
    """This rank's long row: its shards end to end, each padded to full size.

    Shards are computed one at a time, as `fill` reads the row from start to end."""

    def __init__(self, shards: Iterable[Shard], widths: list[int]) -> None:
        self._shards = zip(shards, widths, strict=True)
        # The values of the current shard that were not written yet.
        self._unread = torch.empty(0)
        # Number of elements of the current shard, padding included, that were not written yet.
        self._num_unread = 0

    def fill(self, out: Tensor) -> None:
        """Writes the row's next `len(out)` elements into `out`, rounded to its dtype.

        Places of padding are skipped."""
        while len(out):
            if not self._num_unread:
                # Free this shard's values before the next shard's are computed.
                self._unread = torch.empty(0)
                shard, self._num_unread = next(self._shards)
                self._unread = _local_values(shard)
            count = min(len(out), self._num_unread)
            num_values = min(len(self._unread), count)
            # A local name for `self._unread` would keep the shard's memory alive.
            out[:num_values].copy_(self._unread[:num_values])
            out = out[count:]
            self._unread = self._unread[count:]
            self._num_unread -= count
