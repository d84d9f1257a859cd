"""A name for weights, to the bit, taken while they are on their way and still in the cache."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.model.sharding import first_row, is_first_replica

_WORDS = {"cpu": 1 << 15, "cuda": 1 << 21}  # of one stretch: a CPU's cache holds it, its factors and their product


class WeightDigest:
    """The sum modulo 2^64 of all weights' bits, in words of 8 bytes, times factors that stand for tensor and place.

    Parts may be added in any pieces and any order, by any number of ranks, whose totals are added. Each word of a
    stretch has a random factor, each stretch of a tensor another: weights that differ by chance, in words' low bits
    too, differ in name but for one chance in 2^60 or so. It is no signature: an even number of flips of words' highest
    bits leaves the name as it is, and whoever picks weights by these factors can make more of one name.
    """

    def __init__(self, device: torch.device) -> None:
        self.words = _WORDS.get(device.type, _WORDS["cuda"])
        random = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(-(2**62), 2**62, (self.words,), generator=random) * 2 + 1).to(device)
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, name: str, first: int, values: Tensor) -> None:
        """The elements of tensor `name`, in its flat order, from the `first` on."""
        per_word = 8 // values.itemsize
        before = first % per_word
        if before or len(values) % per_word or values.storage_offset() % per_word:
            padded = values.new_zeros(-(-(before + len(values)) // per_word) * per_word)  # of the word's other elements
            padded[before : before + len(values)] = values
            values = padded
        words, place = values.view(torch.int64), first // per_word
        while len(words):
            stretch, start = divmod(place, self.words)
            part = words[: self.words - start]
            factor = hashlib.blake2b(f"{name}/{stretch}".encode(), digest_size=8).digest()
            of_part = (part * self._factors[start : start + len(part)]).sum()
            self._total += of_part * (int.from_bytes(factor, "little", signed=True) | 1)
            words, place = words[len(part) :], place + len(part)

    def add_shard(self, name: str, parameter: DTensor, shard: Tensor) -> None:
        """This rank's rows of it, once for all replicas."""
        if is_first_replica(parameter):
            self.add(name, first_row(parameter) * parameter.shape[1:].numel(), shard.detach().reshape(-1))

    def total(self) -> int:
        """Of what was added on this rank; `weights_id` of the sum of all ranks' is the name."""
        return int(self._total)


def weights_id(totals: list[int]) -> str:
    """The name of weights whose parts gave these totals."""
    return f"{sum(totals) % 2**64:016x}"
