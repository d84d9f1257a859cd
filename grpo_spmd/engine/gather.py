"""The policy's shards on their way to an engine: cast, gathered in buckets of bounded size, named as they pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for
from grpo_spmd.engine.weight_digest import WeightDigest
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.policy import Policy, hf_named_shards
from grpo_spmd.model.sharding import first_row, is_first_replica, num_shards, rows_per_rank, shard_group
from grpo_spmd.records import SyncStats

# (HF name, this rank's rows) -> what the engine is to get of them; rounded to its dtype on the way into the bucket.
Cast = Callable[[str, Tensor], Tensor]
# A tensor; where in each rank's block of its rows the piece begins, in elements; [ranks, elements] of these blocks.
Piece = tuple[Shard, int, Tensor]


def as_it_is(_: str, shard: Tensor) -> Tensor:
    return shard


def gather_pieces(
    entries: Sequence[Shard],
    dtype: torch.dtype,
    bucket_bytes: int,
    stats: SyncStats,
    cast: Cast = as_it_is,
    digest: WeightDigest | None = None,
) -> Generator[Piece, None, None]:
    """Collective. Every rank must draw all of it, in step. The tensors of `entries` in `dtype`, one after the other,
    each in pieces that are valid until the next one is drawn.

    The shards of all parameters, cast, form one long row. It is gathered over the ranks of a replica in buckets of at
    most `bucket_bytes`, which may end inside a tensor or a row of it; the next is on its way while one is in use. Extra
    memory: two buckets, or one where one rank holds the whole policy. `digest` is given this rank's part, once for all
    replicas.
    """
    if not entries:
        return
    parameter = entries[0][1]
    ranks = num_shards(parameter)
    widths = [rows_per_rank(parameter) * parameter.shape[1:].numel() for _, parameter, _ in entries]
    total = sum(widths)
    room = min(max(1, bucket_bytes // (ranks * dtype.itemsize)), total)
    num_buckets = min(2 if ranks > 1 else 1, -(-total // room))
    buckets = [torch.empty(ranks, room, dtype=dtype, device=parameter.device) for _ in range(num_buckets)]
    row = _ShardRow(entries, widths, cast, digest if is_first_replica(parameter) else None)
    with closing(_gathered(row, buckets, total, shard_group(parameter), stats)) as gathered:
        bucket = buckets[0][:, :0]  # what is left of the current one
        for entry, width in zip(entries, widths, strict=True):
            first = 0
            while first < width:
                if not bucket.shape[1]:
                    bucket = next(gathered)
                count = min(width - first, bucket.shape[1])
                yield entry, first, bucket[:, :count]
                bucket = bucket[:, count:]
                first += count


def gather_full_tensors(
    of: Policy | Sequence[Shard],
    dtype: torch.dtype,
    bucket_bytes: int,
    stats: SyncStats,
    cast: Cast = as_it_is,
    digest: WeightDigest | None = None,
) -> Generator[tuple[str, Tensor], None, None]:
    """Collective. As `gather_pieces`, whole: (HF checkpoint name, full tensor in `dtype`), of the whole policy or of
    some of its shards. vLLM keeps them until a layer is complete, so they are never views of the reused buckets, nor of
    the parameters. (torch.no_grad as a decorator would keep the tensor before alive while the next is made.)"""
    entries, full = list(hf_named_shards(of)) if isinstance(of, Policy) else of, torch.empty(0)
    with closing(gather_pieces(entries, dtype, bucket_bytes, stats, cast, digest)) as pieces:
        for (name, parameter, _), first, piece in pieces:
            if not first:
                width = rows_per_rank(parameter) * parameter.shape[1:].numel()
                full = torch.empty(len(piece), width, dtype=dtype, device=parameter.device)
            full[:, first : first + piece.shape[1]] = piece
            if first + piece.shape[1] == full.shape[1]:
                yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)
                full = torch.empty(0)  # before the next one is made


def _gathered(
    row: _ShardRow, buckets: list[Tensor], total: int, group: dist.ProcessGroup, stats: SyncStats
) -> Generator[Tensor, None, None]:
    """The rows of all ranks, `total` elements each, in pieces [ranks, columns] that are valid until the next one."""
    ranks, room = buckets[0].shape
    num_pieces = -(-total // room)
    on_its_way: list[dist.Work] = []

    def start(number: int) -> Tensor:
        columns = min(room, total - number * room)
        piece = buckets[number % len(buckets)].view(-1)[: ranks * columns].view(ranks, columns)
        row.fill(piece[dist.get_rank(group)])
        stats.bytes += piece.nbytes
        if ranks > 1:
            on_its_way.extend(start_all_gather(piece, group))
            stats.num_collectives += 1
        return piece

    try:
        following = start(0)
        for number in range(num_pieces):
            wait_for(on_its_way)
            piece = following
            if len(buckets) == 2 and number + 1 < num_pieces:
                following = start(number + 1)
            yield piece
            if len(buckets) == 1 and number + 1 < num_pieces:
                following = start(number + 1)
    finally:  # where the receiver failed: leave no message behind that the next gather would take for its own
        with suppress(RuntimeError):  # from a peer that is gone; the receiver has an error of its own to tell
            wait_for(on_its_way)


class _ShardRow:
    """This rank's shards end to end, each padded to full size; one is asked for, and cast, when its turn comes."""

    def __init__(self, entries: Iterable[Shard], widths: list[int], cast: Cast, digest: WeightDigest | None) -> None:
        self._coming, self._cast, self._digest = zip(entries, widths, strict=True), cast, digest
        self._shard, self._left = torch.empty(0), 0  # what is still to be read of one; that with its padding
        self._name, self._place = "", 0  # its own, and where in the tensor what is to be read begins

    def fill(self, out: Tensor) -> None:
        """The next `len(out)` elements, rounded to its dtype; those of padding are left as they are."""
        most = len(out) if self._digest is None else self._digest.words * 8 // out.itemsize  # named in the cache
        while len(out):
            if not self._left:
                self._shard = torch.empty(0)  # freed before the next one is made
                (self._name, parameter, shard), self._left = next(self._coming)
                self._place = first_row(parameter) * parameter.shape[1:].numel()
                self._shard = self._cast(self._name, shard().detach()).reshape(-1)
            held = min(len(self._shard), len(out), most)
            # no name for the shard: it would keep it alive
            out[:held].copy_(self._shard[:held])
            if self._digest is not None and held:
                self._digest.add(self._name, self._place, out[:held])
            count = held or min(len(out), self._left)
            out, self._shard, self._left = out[count:], self._shard[count:], self._left - count
            self._place += count
