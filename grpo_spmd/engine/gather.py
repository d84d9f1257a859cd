"""Gathers the policy's shards for an engine: casts them, sends them in buckets, and hashes them.

A shard is one rank's rows of a tensor. A replica is a group of ranks that together hold the whole
policy once. A bucket is a buffer of bounded size for one all-gather. A piece is a stretch of one
tensor as it comes out of a bucket. A digest is a hash of all weights.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.sharding import (
    first_row,
    is_first_replica,
    num_shards,
    rows_per_rank,
    shard_group,
)
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


def leading_pieces(pieces: Iterator[Piece], shards: Iterable[Shard]) -> Iterator[Piece]:
    """Yields the pieces of `shards`, which come first in `pieces`. It draws no other pieces."""
    for shard in shards:
        is_complete = not shard.parameter.numel()
        while not is_complete:
            piece = next(pieces)
            num_ranks, count = piece.blocks.shape
            is_complete = piece.start + count == _width(shard.parameter, num_ranks)
            yield piece
            del piece


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


# A digest lays a stretch of a tensor out as words of 8 bytes in rows of so many columns.
_WORD_COLUMNS = 128
_NUM_TOTALS = 16
# Rows of words in one stretch. On a CPU a stretch has a MiB, which fits in the cache.
_WORD_ROWS = {"cpu": 1 << 10, "cuda": 1 << 14}


class WeightDigest:
    """Hashes all bits of all weights.

    It reads a tensor as words of 8 bytes. Each stretch of a tensor is laid out in rows and columns
    of words, which are summed modulo 2^64. The sums are multiplied by a factor and shifted by a
    number of rows and columns. Both depend on the tensor's name and the stretch. The totals are 16
    products of these sums with random numbers. Sums cost much less than products of all words.

    Elements may be added in any pieces, in any order and by any number of ranks, whose totals are
    then added. Any single bit changes the hash. Weights that differ by chance have the same hash
    with a chance of about 1 in 2^60, or 1 in 2^14 if they differ only in the highest bits of two
    words. It is no signature: changes that cancel out in each row and column of a stretch leave the
    hash as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_rows = _WORD_ROWS.get(device.type, _WORD_ROWS["cuda"])
        # Each has twice as many sums as there are rows or columns, which leaves room for the shift.
        self._sums = torch.zeros(
            2 * (self._num_rows + _WORD_COLUMNS), dtype=torch.int64, device=device
        )
        self._column_sums, self._row_sums = self._sums.split(
            [2 * _WORD_COLUMNS, 2 * self._num_rows]
        )

    def stretch(self, itemsize: int) -> int:
        """Returns the number of elements of this size in a stretch.

        Pieces that end where a stretch ends are fastest."""
        return self._num_rows * _WORD_COLUMNS * 8 // itemsize

    def add(self, name: str, start: int, values: Tensor) -> None:
        """Adds elements of tensor `name`, in its flat order, from element `start` on."""
        stretch = self.stretch(values.itemsize)
        row_length = _WORD_COLUMNS * 8 // values.itemsize
        while len(values):
            number, offset = divmod(start, stretch)
            row, column = divmod(offset, row_length)
            elements = values[: stretch - offset]
            start += len(elements)
            values = values[len(elements) :]
            # Words need whole rows at an address that 8 divides: copy, with zeros around.
            is_aligned = elements.storage_offset() * elements.itemsize % 8 == 0
            if column or len(elements) % row_length or not is_aligned:
                num_rows = -(-(column + len(elements)) // row_length)
                padded = elements.new_zeros(num_rows * row_length)
                padded[column : column + len(elements)] = elements
                elements = padded
            words = elements.view(torch.int64).view(-1, _WORD_COLUMNS)
            # The factor is odd: an even one would lose the highest bit modulo 2^64.
            key = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=16).digest()
            factor = int.from_bytes(key[:8], "little", signed=True) | 1
            shift = int.from_bytes(key[8:], "little")
            first_row_sum = row + shift % self._num_rows
            first_column_sum = shift // self._num_rows % _WORD_COLUMNS
            row_sums = self._row_sums[first_row_sum : first_row_sum + len(words)]
            row_sums.add_(words.sum(1), alpha=factor)
            column_sums = self._column_sums[first_column_sum : first_column_sum + _WORD_COLUMNS]
            column_sums.add_(words.sum(0), alpha=factor)

    def add_shard(self, shard: Shard, dtype: torch.dtype) -> None:
        """Adds this rank's rows of a tensor, rounded to `dtype`. Only the first replica counts."""
        # All replicas hold the same weights, and the totals of all ranks are added up.
        if is_first_replica(shard.parameter):
            start = first_row(shard.parameter) * shard.parameter.shape[1:].numel()
            # Rounded in stretches: there may be no room for a second copy of a large tensor.
            for values in _local_values(shard).split(self.stretch(dtype.itemsize)):
                self.add(shard.name, start, values.to(dtype))
                start += len(values)

    def totals(self) -> list[int]:
        """Returns the 16 totals of the elements that this rank added.

        `weights_id` hashes the totals of all ranks."""
        factors = _factors(len(self._sums), self._sums.device)
        products: Tensor = (factors * self._sums[:, None]).sum(0)
        return products.tolist()


def weights_id(rank_totals: list[list[int]]) -> str:
    """Returns the hash of the weights, 16 hexadecimal digits, from the totals of all ranks."""
    sums = (sum(totals) % 2**64 for totals in zip(*rank_totals, strict=True))
    return hashlib.blake2b(
        b"".join(total.to_bytes(8, "little") for total in sums), digest_size=8
    ).hexdigest()


@functools.lru_cache(maxsize=2)
def _factors(num_sums: int, device: torch.device) -> Tensor:
    """Returns random factors [sums, totals], equal on all ranks.

    A single bit of a word changes the sum of its row and the sum of its column. In the first total
    rows have odd factors and columns even ones, so that the two changes cannot cancel out."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (num_sums, _NUM_TOTALS), generator=generator)
    factors[:, 0] *= 2
    factors[2 * _WORD_COLUMNS :, 0] += 1
    return factors.to(device)
