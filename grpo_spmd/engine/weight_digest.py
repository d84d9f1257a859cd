"""A name for weights, to the bit, taken while they are on their way and still in the cache."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.model.sharding import first_row, is_first_replica

_COLUMNS, _TOTALS = 128, 16
_ROWS = {"cpu": 1 << 10, "cuda": 1 << 14}  # of words of 8 bytes in one stretch: a CPU's cache holds a MiB


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
                padded = part.new_zeros(-(-(before + len(part)) // per_row) * per_row)  # of the rows' other elements
                padded[before : before + len(part)] = part
                part = padded
            words = part.view(torch.int64).view(-1, _COLUMNS)
            which = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=16).digest()
            factor, places = int.from_bytes(which[:8], "little", signed=True) | 1, int.from_bytes(which[8:], "little")
            row, column = row + places % self._num_rows, places // self._num_rows % _COLUMNS
            self._of_rows[row : row + len(words)].add_(words.sum(1), alpha=factor)
            self._of_columns[column : column + _COLUMNS].add_(words.sum(0), alpha=factor)

    def add_shard(self, name: str, parameter: DTensor, shard: Tensor) -> None:
        """This rank's rows of it, once for all replicas."""
        if is_first_replica(parameter):
            self.add(name, first_row(parameter) * parameter.shape[1:].numel(), shard.detach().reshape(-1))

    def totals(self) -> list[int]:
        """Of what was added on this rank; `weights_id` of all ranks' is the name."""
        products: Tensor = (_factors(len(self._sums), self._sums.device) * self._sums[:, None]).sum(0)
        return products.tolist()


def weights_id(of_ranks: list[list[int]]) -> str:
    """The name of weights whose parts gave these totals."""
    sums = (sum(totals) % 2**64 for totals in zip(*of_ranks, strict=True))
    return hashlib.blake2b(b"".join(total.to_bytes(8, "little") for total in sums), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=2)
def _factors(num_sums: int, device: torch.device) -> Tensor:
    """[sums, totals]. In the first total those of rows are odd and those of columns even, so that any one bit of a
    word, whose row and column change alike, is in it."""
    factors = torch.randint(-(2**62), 2**62, (num_sums, _TOTALS), generator=torch.Generator().manual_seed(0))
    factors[:, 0] *= 2
    factors[2 * _COLUMNS :, 0] += 1
    return factors.to(device)
