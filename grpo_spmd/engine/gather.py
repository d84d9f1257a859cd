"""Gathers the policy's shards for an engine: casts them and sends them in buckets.

A shard is one rank's rows of a tensor. A replica is a group of ranks that together hold the whole
policy once. A bucket is a buffer of bounded size for one all-gather. A piece is a stretch of one
tensor as it comes out of a bucket.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for
from grpo_spmd.model.families.stored import SavedLayout, SavedTensor
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.sharding import as_matrix, num_shards, rows_per_rank, shard_group
from grpo_spmd.records import SyncStats


class Piece(NamedTuple):
    """Holds the same stretch of every rank's block of rows of one tensor."""

    shard: Shard
    start: int
    """The element of each rank's block of rows at which the piece begins."""
    blocks: Tensor
    """[ranks, elements], in the engine's dtype, or as stored if one rank holds all rows."""


def gather_pieces(
    shards: Sequence[Shard], dtype: torch.dtype, bucket_bytes: int, stats: SyncStats
) -> Generator[Piece, None, None]:
    """Collective. Yields the tensors of `shards`, one after the other, in pieces.

    Every rank must draw all pieces, in step with the other ranks. A piece is valid until the next
    one is drawn, and must be released before. `stats` counts bytes and collectives.

    The shards of all parameters, cast to `dtype`, form one long row. It is gathered over the ranks
    of a replica in buckets of at most `bucket_bytes`, which may end inside a tensor or a row. While
    one bucket is in use, the next one is on its way. The extra memory is two buckets.

    If one rank holds the whole policy, there are no buckets. A piece is then the tensor itself,
    which is rounded as it is copied.
    """
    if not shards:
        return
    num_ranks = num_shards(shards[0].parameter)
    if num_ranks == 1:
        for shard in shards:
            values = _local_values(shard)
            stats.bytes += len(values) * dtype.itemsize
            if len(values):
                yield Piece(shard, 0, values[None])
            # The memory of this tensor must be free before the next one is made.
            del values
        return
    widths = [_width(shard.parameter, num_ranks) for shard in shards]
    # Elements that each rank puts into one bucket. All ranks compute the same number.
    room = min(max(1, bucket_bytes // (num_ranks * dtype.itemsize)), sum(widths))
    with closing(_gather_buckets(shards, widths, dtype, room, stats)) as buckets:
        # The columns of the current bucket that were not yielded yet: none at the start.
        bucket = torch.empty(0, 0)
        for shard, width in zip(shards, widths, strict=True):
            start = 0
            while start < width:
                if not bucket.shape[1]:
                    bucket = next(buckets)
                count = min(width - start, bucket.shape[1])
                yield Piece(shard, start, bucket[:, :count])
                bucket = bucket[:, count:]
                start += count


def full_tensors(pieces: Iterable[Piece], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Puts pieces together. Yields (name in the HF checkpoint, full tensor in `dtype`).

    vLLM keeps the tensors until a layer is complete. They are therefore new tensors, never views of
    the buckets, which are used again, or of the parameters."""
    # No torch.no_grad as a decorator: it would keep a tensor alive while the next one is made.
    full = torch.empty(0)
    for (name, parameter, _), start, blocks in pieces:
        if not start:
            width = _width(parameter, len(blocks))
            full = torch.empty(len(blocks), width, dtype=dtype, device=parameter.device)
        end = start + blocks.shape[1]
        full[:, start:end] = blocks
        del blocks
        # The last ranks' blocks end in padding, which the view leaves out.
        if end == full.shape[1]:
            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)
            # The memory of this tensor must be free before the next one is made.
            full = torch.empty(0)


def saved_tensors(
    tensors: Iterable[tuple[str, Tensor]], layout: SavedLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors as a checkpoint has them: those of each expert apart, under its names."""
    for name, tensor in tensors:
        matrix = as_matrix(tensor)
        for target in layout.get(name, [SavedTensor(name, 0, tuple(tensor.shape))]):
            rows = matrix[target.start : target.start + target.num_rows]
            yield target.name, rows.view(target.shape)
        # The memory of this tensor must be free before the next one is made.
        del tensor, matrix, rows


def _local_values(shard: Shard) -> Tensor:
    """Returns this rank's values of a shard as one dimension."""
    with torch.no_grad():
        return shard.local_rows().detach().reshape(-1)


def _width(parameter: DTensor, num_ranks: int) -> int:
    """Returns the number of elements in a full shard, which the first rank holds."""
    return rows_per_rank(parameter, num_ranks) * parameter.shape[1:].numel()


def _gather_buckets(
    shards: Sequence[Shard], widths: list[int], dtype: torch.dtype, room: int, stats: SyncStats
) -> Generator[Tensor, None, None]:
    """Collective. Yields the long rows of all ranks in buckets [ranks, `room` columns at most].

    Each shard takes its width of the row. A bucket is valid until the next one is drawn."""
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
        """Fills this rank's row of a bucket, and starts its all-gather."""
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
            # Started before the copies out of this bucket, so that they overlap.
            if number + 1 < num_buckets:
                next_bucket = start_bucket(number + 1)
            yield bucket
    finally:
        # If the receiver failed, an all-gather is still on its way. Wait for it: the next gather
        # would take its messages for its own. If another rank is gone, this raises; the receiver's
        # error matters more.
        with suppress(RuntimeError):
            wait_for(works)


class _ShardRow:
    """Reads this rank's shards end to end, one at a time, each padded to full size."""

    def __init__(self, shards: Iterable[Shard], widths: list[int]) -> None:
        self._shards = zip(shards, widths, strict=True)
        # The values of the current shard that were not written yet.
        self._unread = torch.empty(0)
        # The number of these values and of the shard's padding.
        self._num_unread = 0

    def fill(self, out: Tensor) -> None:
        """Writes the next `len(out)` elements, rounded to its dtype. Padding is not written."""
        while len(out):
            if not self._num_unread:
                # The memory of this shard must be free before the next one is made.
                self._unread = torch.empty(0)
                shard, self._num_unread = next(self._shards)
                self._unread = _local_values(shard)
            count = min(len(out), self._num_unread)
            num_values = min(len(self._unread), count)
            # No local name for the shard: it would keep it alive.
            out[:num_values].copy_(self._unread[:num_values])
            out = out[count:]
            self._unread = self._unread[count:]
            self._num_unread -= count
