"""The policy's shards on their way to an engine: cast, gathered in buckets of bounded size, named as they pass."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import start_all_gather, wait_for
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.policy import Policy, hf_named_shards
from grpo_spmd.model.sharding import (
    first_row,
    is_first_replica,
    num_shards,
    rows_per_rank,
    shard_group,
)
from grpo_spmd.records import SyncStats

# (HF name, this rank's rows) -> what the engine is to get of them; rounded to its dtype on the way into the bucket.
Cast = Callable[[str, Tensor], Tensor]
# A tensor; where in each rank's block of its rows the piece begins, in elements; [ranks, elements] of these blocks, in
# the engine's dtype, or as they are where one rank has them all.
Piece = tuple[Shard, int, Tensor]


def no_cast(_: str, shard: Tensor) -> Tensor:
    return shard


def gather_pieces(
    entries: Sequence[Shard],
    dtype: torch.dtype,
    bucket_bytes: int,
    stats: SyncStats,
    cast: Cast = no_cast,
    digest: WeightDigest | None = None,
) -> Generator[Piece, None, None]:
    """Collective. Every rank must draw all of it, in step. The tensors of `entries`, one after the other, each in
    pieces that are valid until the next one is drawn, and are to be let go before.

    The shards of all parameters, cast to `dtype`, form one long row. It is gathered over the ranks of a replica in
    buckets of at most `bucket_bytes`, which may end inside a tensor or a row of it; the next is on its way while one is
    in use. Extra memory: two buckets. Where one rank holds the whole policy there is none: a piece is the tensor as it
    is, and rounded where it is copied to; or, named, a stretch of it in a small buffer. `digest` is given this rank's
    part, once for all replicas.
    """
    if not entries:
        return
    parameter = entries[0][1]
    digest = digest if is_first_replica(parameter) else None
    if (ranks := num_shards(parameter)) == 1:
        yield from _own_pieces(entries, dtype, stats, cast, digest)
        return
    widths = [_width(parameter, ranks) for _, parameter, _ in entries]
    total = sum(widths)
    room = min(max(1, bucket_bytes // (ranks * dtype.itemsize)), total)
    num_buckets = min(2, -(-total // room))
    buckets = [
        torch.empty(ranks, room, dtype=dtype, device=parameter.device) for _ in range(num_buckets)
    ]
    group = shard_group(parameter)
    row = _ShardRow(entries, widths, dist.get_rank(group), cast, digest)
    with closing(_gathered(row, buckets, total, group, stats)) as gathered:
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


def _own_pieces(
    entries: Sequence[Shard],
    dtype: torch.dtype,
    stats: SyncStats,
    cast: Cast,
    digest: WeightDigest | None,
) -> Iterator[Piece]:
    """Of one rank, [1, elements]. What is to be named comes in stretches, rounded, while the cache has them."""
    rounded = torch.empty(0)
    for entry in entries:
        values = _values(entry, cast)
        stats.bytes += len(values) * dtype.itemsize
        most, first = len(values) if digest is None else digest.stretch(dtype.itemsize), 0
        for piece in values.split(most) if len(values) else ():
            if digest is not None:
                if piece.dtype != dtype:
                    if not len(rounded):
                        rounded = torch.empty(most, dtype=dtype, device=piece.device)
                    piece = rounded[: len(piece)].copy_(piece)
                digest.add(entry[0], first, piece)
            first += len(piece)
            yield entry, first - len(piece), piece[None]
        values = piece = torch.empty(0)  # freed before the next one is made


def leading_pieces(pieces: Iterator[Piece], entries: Iterable[Shard]) -> Iterator[Piece]:
    """Those of `entries`, which come first in `pieces`; what comes after them is left to be drawn."""
    for _, parameter, _ in entries:
        is_whole = not parameter.numel()
        while not is_whole:
            entry, first, piece = next(pieces)
            is_whole = first + piece.shape[1] == _width(parameter, len(piece))
            yield entry, first, piece
            del piece


def gather_full_tensors(
    of: Policy | Sequence[Shard],
    dtype: torch.dtype,
    bucket_bytes: int,
    stats: SyncStats,
    cast: Cast = no_cast,
    digest: WeightDigest | None = None,
) -> Generator[tuple[str, Tensor], None, None]:
    """Collective. `full_tensors` of `gather_pieces`, of the whole policy or of some of its shards."""
    entries = list(hf_named_shards(of)) if isinstance(of, Policy) else of
    with closing(gather_pieces(entries, dtype, bucket_bytes, stats, cast, digest)) as pieces:
        yield from full_tensors(pieces, dtype)


def full_tensors(pieces: Iterable[Piece], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(HF checkpoint name, full tensor in `dtype`). vLLM keeps them until a layer is complete, so they are never views
    of the reused buckets, nor of the parameters. (torch.no_grad as a decorator would keep the tensor before alive while
    the next is made.)"""
    full = torch.empty(0)
    for (name, parameter, _), first, piece in pieces:
        if not first:
            full = torch.empty(
                len(piece), _width(parameter, len(piece)), dtype=dtype, device=parameter.device
            )
        end = first + piece.shape[1]
        full[:, first:end] = piece
        del piece
        if end == full.shape[1]:
            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)
            full = torch.empty(0)  # before the next one is made


def _values(entry: Shard, cast: Cast) -> Tensor:
    """This rank's, flat."""
    name, _, shard = entry
    with torch.no_grad():
        return cast(name, shard().detach()).reshape(-1)


def _width(parameter: DTensor, ranks: int) -> int:
    """Elements of a full shard."""
    return rows_per_rank(parameter, ranks) * parameter.shape[1:].numel()


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
        on_its_way.extend(start_all_gather(piece, group))
        stats.bytes += piece.nbytes
        stats.num_collectives += 1
        return piece

    try:
        following = start(0)
        for number in range(num_pieces):
            wait_for(on_its_way)
            piece = following
            if number + 1 < num_pieces:  # before the copies out of this one, which it overlaps with
                following = start(number + 1)
            yield piece
    finally:  # where the receiver failed: leave no message behind that the next gather would take for its own
        with suppress(
            RuntimeError
        ):  # from a peer that is gone; the receiver has an error of its own to tell
            wait_for(on_its_way)


class _ShardRow:
    """This rank's shards end to end, each padded to full size; one is asked for, and cast, when its turn comes."""

    def __init__(
        self,
        entries: Iterable[Shard],
        widths: list[int],
        rank: int,
        cast: Cast,
        digest: WeightDigest | None,
    ) -> None:
        self._coming, self._rank, self._cast, self._digest = (
            zip(entries, widths, strict=True),
            rank,
            cast,
            digest,
        )
        self._shard, self._left = (
            torch.empty(0),
            0,
        )  # what is still to be read of one; that with its padding
        self._name, self._place = (
            "",
            0,
        )  # its own, and where in the tensor what is to be read begins

    def fill(self, out: Tensor) -> None:
        """The next `len(out)` elements, rounded to its dtype; those of padding are left as they are."""
        stretch = (
            len(out) if self._digest is None else self._digest.stretch(out.itemsize)
        )  # named in the cache
        while len(out):
            if not self._left:
                self._shard = torch.empty(0)  # freed before the next one is made
                entry, self._left = next(self._coming)
                self._name, self._place = entry[0], self._rank * self._left
                self._shard = _values(entry, self._cast)
            most = len(out) if self._digest is None else stretch - self._place % stretch
            held = min(len(self._shard), len(out), most)
            # no name for the shard: it would keep it alive
            out[:held].copy_(self._shard[:held])
            if self._digest is not None and held:
                self._digest.add(self._name, self._place, out[:held])
            count = held or min(len(out), self._left)
            out, self._shard, self._left = out[count:], self._shard[count:], self._left - count
            self._place += count


# A name for weights, to the bit, taken while they are on their way and still in the cache.


_COLUMNS, _TOTALS = 128, 16
_ROWS = {
    "cpu": 1 << 10,
    "cuda": 1 << 14,
}  # of words of 8 bytes in one stretch: a CPU's cache holds a MiB


class WeightDigest:
    """Sums modulo 2^64 of all weights' bits, in words of 8 bytes: of the rows and of the columns that each stretch of a
    tensor is laid out in, times a factor and shifted by places that stand for tensor and stretch.

    Parts may be added in any pieces and any order, by any number of ranks, whose totals are added: 16 products of these
    sums with random numbers. Sums cost a fraction of what products of all words would. Any one bit shows. Weights that
    differ by chance differ in name but for one chance in 2^60 or so; where they do in the highest bits of two words and
    in nothing else, for one in 2^14. It is no signature: changes that add up to nothing in each row and each column of
    a stretch leave the name as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_rows = _ROWS.get(device.type, _ROWS["cuda"])
        # twice as long as there are rows and columns, so that they can be shifted
        self._sums = torch.zeros(2 * (self._num_rows + _COLUMNS), dtype=torch.int64, device=device)
        self._of_columns, self._of_rows = self._sums.split([2 * _COLUMNS, 2 * self._num_rows])

    def stretch(self, itemsize: int) -> int:
        """Elements of one: what is added in pieces that end where stretches do is added fastest."""
        return self._num_rows * _COLUMNS * 8 // itemsize

    def add(self, name: str, first: int, values: Tensor) -> None:
        """The elements of tensor `name`, in its flat order, from the `first` on."""
        stretch, per_row = self.stretch(values.itemsize), _COLUMNS * 8 // values.itemsize
        while len(values):
            number, start = divmod(first, stretch)
            row, before = divmod(start, per_row)
            part = values[: stretch - start]
            first, values = first + len(part), values[len(part) :]
            if before or len(part) % per_row or part.storage_offset() * part.itemsize % 8:
                padded = part.new_zeros(
                    -(-(before + len(part)) // per_row) * per_row
                )  # of the rows' other elements
                padded[before : before + len(part)] = part
                part = padded
            words = part.view(torch.int64).view(-1, _COLUMNS)
            which = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=16).digest()
            factor, places = (
                int.from_bytes(which[:8], "little", signed=True) | 1,
                int.from_bytes(which[8:], "little"),
            )
            row, column = row + places % self._num_rows, places // self._num_rows % _COLUMNS
            self._of_rows[row : row + len(words)].add_(words.sum(1), alpha=factor)
            self._of_columns[column : column + _COLUMNS].add_(words.sum(0), alpha=factor)

    def add_shard(self, name: str, parameter: DTensor, shard: Tensor) -> None:
        """This rank's rows of it, once for all replicas."""
        if is_first_replica(parameter):
            self.add(
                name, first_row(parameter) * parameter.shape[1:].numel(), shard.detach().reshape(-1)
            )

    def totals(self) -> list[int]:
        """Of what was added on this rank; `weights_id` of all ranks' is the name."""
        products: Tensor = (_factors(len(self._sums), self._sums.device) * self._sums[:, None]).sum(
            0
        )
        return products.tolist()


def weights_id(of_ranks: list[list[int]]) -> str:
    """The name of weights whose parts gave these totals."""
    sums = (sum(totals) % 2**64 for totals in zip(*of_ranks, strict=True))
    return hashlib.blake2b(
        b"".join(total.to_bytes(8, "little") for total in sums), digest_size=8
    ).hexdigest()


@functools.lru_cache(maxsize=2)
def _factors(num_sums: int, device: torch.device) -> Tensor:
    """[sums, totals]. In the first total those of rows are odd and those of columns even, so that any one bit of a
    word, whose row and column change alike, is in it."""
    factors = torch.randint(
        -(2**62), 2**62, (num_sums, _TOTALS), generator=torch.Generator().manual_seed(0)
    )
    factors[:, 0] *= 2
    factors[2 * _COLUMNS :, 0] += 1
    return factors.to(device)
