"""Texts of all ranks dealt to rows and ranks: who forwards which, alike whichever rank sampled them, so that a score
does not hang on which engine was fast, and no rank waits for another's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from grpo_spmd.distributed.collectives import exchange_bytes, shares_of_rank0
from grpo_spmd.distributed.packed import Unpacked, pack
from grpo_spmd.learn.rows import fill_rows

Texts = Sequence[Sequence[int]]


def score_over_ranks(
    keys: Sequence[int], texts: Texts, max_tokens: int, score: Callable[[list[list[int]]], list[float]]
) -> list[float]:
    """Collective. The score of each of this rank's `texts`, perhaps none, named by `keys` over all ranks. `score` takes
    the texts of a row, no longer than `max_tokens` together, equal lengths side by side, perhaps none; it is called
    equally often on all ranks."""
    arrays = np.array(keys, np.int64), np.array([len(text) for text in texts], np.int64)
    share = json.loads(shares_of_rank0(lambda parts: _deal(parts, max_tokens), pack(len(texts), arrays)))
    sent = [_packed([texts[i] for i in numbers]) for numbers in share["give"]]
    received = [_unpacked(payload) for payload in exchange_bytes(sent)]
    scores = [[0.0] * len(of_source) for of_source in received]
    for row in share["rows"]:
        places = sorted(row, key=lambda place: -len(received[place[0]][place[1]]))
        found = score([received[source][number] for source, number in places])
        for (source, number), value in zip(places, found, strict=False):  # of an empty row one that counts nothing
            scores[source][number] = value
    returned = exchange_bytes([np.array(of_source, np.float64).tobytes() for of_source in scores])
    mine = [0.0] * len(texts)
    for numbers, payload in zip(share["give"], returned, strict=True):
        for i, value in zip(numbers, np.frombuffer(payload).tolist(), strict=True):
            mine[i] = value
    return mine


def _deal(parts: list[bytes], max_tokens: int) -> list[bytes]:
    """On rank 0. Each rank's: `give`, of its texts the numbers of those for each rank, in the order in which they are
    sent; `rows`, of the texts that it forwards (rank that sent it, number in what that one sent)."""
    found = [(unpacked := Unpacked(part), int(unpacked.header)) for part in parts]
    columns = [(unpacked.array(np.int64, number), unpacked.array(np.int64, number)) for unpacked, number in found]
    sources = np.repeat(np.arange(len(parts)), [number for _, number in found])
    numbers = np.concatenate([np.arange(number) for _, number in found])
    keys, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
    give: list[list[list[int]]] = [[[] for _ in parts] for _ in parts]
    rows: list[list[list[tuple[int, int]]]] = [[] for _ in parts]
    if len(keys):
        order = np.argsort(keys)
        places, counts = fill_rows(lengths[order].astype(np.float64), lengths[order], len(parts), max_tokens)
        following = iter(order[places].tolist())
        for target, of_rank in enumerate(counts.tolist()):
            for count in of_rank:
                row = []
                for place in (next(following) for _ in range(count)):
                    source = int(sources[place])
                    row.append((source, len(give[source][target])))
                    give[source][target].append(int(numbers[place]))
                rows[target].append(row)
    return [json.dumps({"give": give[rank], "rows": rows[rank]}).encode() for rank in range(len(parts))]


def _packed(texts: Texts) -> bytes:
    ids = [np.asarray(text, np.int32) for text in texts]
    return pack([len(text) for text in texts], ids)


def _unpacked(payload: bytes) -> list[list[int]]:
    packed = Unpacked(payload)
    return [packed.array(np.int32, length).tolist() for length in packed.header]
