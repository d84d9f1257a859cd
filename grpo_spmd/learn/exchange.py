"""Rollouts as bytes, for the way from the rank that sampled them to the rank that trains on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.records import Rollout


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """A JSON header, then all token ids (int32) and all logprobs (float32 where each of them is one, else float64, so
    that they arrive unchanged), then the advantages (float64) and loss masks (a byte a token) of those rollouts that
    have not one value for all tokens."""
    masks = [_one_flag(r.loss_mask) for r in rollouts]
    advantages = [None if isinstance(r.advantages, np.ndarray) else r.advantages for r in rollouts]
    sizes = ((len(r.prompt_ids), len(r.completion_ids)) for r in rollouts)
    header = [[r.rollout_id, *rest] for r, *rest in zip(rollouts, advantages, masks, sizes, strict=True)]
    ids = np.fromiter(chain.from_iterable(ids for r in rollouts for ids in (r.prompt_ids, r.completion_ids)), np.int32)
    logprobs = _narrowest(np.fromiter(chain.from_iterable(r.rollout_logprobs for r in rollouts), np.float64))
    text = json.dumps([logprobs.dtype.name, header]).encode()
    arrays: list[npt.NDArray[Any]] = [ids, logprobs]
    arrays += [np.asarray(r.advantages, np.float64) for r, one in zip(rollouts, advantages, strict=True) if one is None]
    arrays += [np.asarray(r.loss_mask, np.bool_) for r, one in zip(rollouts, masks, strict=True) if one is None]
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays)])


def decode_rollouts(payload: bytes) -> list[Rollout]:
    """What `encode_rollouts` made, with arrays that lie in `payload`."""
    end = 8 + int.from_bytes(payload[:8], "little")
    kind, header = json.loads(payload[8:end])

    def next_arrays(dtype: npt.DTypeLike, lengths: list[int]) -> Iterator[npt.NDArray[Any]]:
        nonlocal end
        values = np.frombuffer(payload, dtype, sum(lengths), end)
        end += values.nbytes
        return iter([values[stop - n : stop] for n, stop in zip(lengths, accumulate(lengths), strict=True)])

    ids = next_arrays(np.int32, [n for *_, sizes in header for n in sizes])
    logprobs = next_arrays(kind, [completion for *_, (_, completion) in header])
    advantages = next_arrays(np.float64, [n for _, one, _, (_, n) in header if one is None])
    masks = next_arrays(np.bool_, [n for _, _, one, (_, n) in header if one is None])
    rollouts = []
    for rollout_id, advantage, in_loss, _ in header:
        per_token = next(advantages) if advantage is None else advantage, next(masks) if in_loss is None else in_loss
        rollouts.append(Rollout(rollout_id, *per_token, next(ids), next(ids), next(logprobs)))
    return rollouts


def _one_flag(mask: bool | npt.NDArray[np.bool_]) -> bool | None:
    """The value that a mask has for all tokens; None where it has both."""
    if isinstance(mask, bool):
        return mask
    return True if mask.all() else None if mask.any() else False


def _narrowest(values: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """As float32 where that loses no bit: an engine's values are float32 in Python's floats. NaN, which equals nothing
    and may have bits beyond float32's, stays."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values
