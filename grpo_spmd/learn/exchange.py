"""Rollouts as bytes, for the way from the rank that sampled them to the rank that trains on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.records import Rollout, Segment


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """A JSON header, then all token ids (int32; of an episode those of its segments) and all logprobs (float32 where
    each of them is one, else float64, so that they arrive unchanged), then the advantages (float64) and loss masks (a
    byte a token) of those rollouts that have not one value for all tokens, then which tokens of segments are sampled
    (a byte a token)."""
    masks = [_one_flag(r.loss_mask) for r in rollouts]
    advantages = [None if isinstance(r.advantages, np.ndarray) else r.advantages for r in rollouts]
    segments = [[len(segment.token_ids) for segment in r.segments] for r in rollouts]
    sizes = ((of or [len(r.prompt_ids), len(r.completion_ids)]) for r, of in zip(rollouts, segments, strict=True))
    columns = rollouts, advantages, masks, sizes, segments
    header = [[r.rollout_id, *rest, len(r.completion_ids), bool(of)] for r, *rest, of in zip(*columns, strict=True)]
    ids = np.fromiter(chain.from_iterable(ids for r in rollouts for ids in _token_ids(r)), np.int32)
    logprobs = _narrowest(np.fromiter(chain.from_iterable(r.rollout_logprobs for r in rollouts), np.float64))
    text = json.dumps([logprobs.dtype.name, header]).encode()
    arrays: list[npt.NDArray[Any]] = [ids, logprobs]
    arrays += [np.asarray(r.advantages, np.float64) for r, one in zip(rollouts, advantages, strict=True) if one is None]
    arrays += [np.asarray(r.loss_mask, np.bool_) for r, one in zip(rollouts, masks, strict=True) if one is None]
    arrays += [segment.sampled for rollout in rollouts for segment in rollout.segments]
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

    ids = next_arrays(np.int32, [n for *_, sizes, _, _ in header for n in sizes])
    logprobs = next_arrays(kind, [n for *_, n, _ in header])
    advantages = next_arrays(np.float64, [n for _, one, _, _, n, _ in header if one is None])
    masks = next_arrays(np.bool_, [n for _, _, one, _, n, _ in header if one is None])
    sampled = next_arrays(np.bool_, [n for *_, sizes, _, is_episode in header if is_episode for n in sizes])
    rollouts = []
    for rollout_id, advantage, in_loss, sizes, _, is_episode in header:
        per_token = next(advantages) if advantage is None else advantage, next(masks) if in_loss is None else in_loss
        if is_episode:
            segments = tuple(Segment(next(ids), next(sampled)) for _ in sizes)
            rollouts.append(rollout_of(rollout_id, *per_token, segments, next(logprobs)))
        else:
            rollouts.append(Rollout(rollout_id, *per_token, next(ids), next(ids), next(logprobs)))
    return rollouts


def rollout_of(
    rollout_id: int,
    advantages: float | npt.NDArray[np.float64],
    loss_mask: bool | npt.NDArray[np.bool_],
    segments: tuple[Segment, ...],
    logprobs: Any,
) -> Rollout:
    """Of an episode: its prompt is what the first segment begins with, its completion what is sampled in all."""
    first = segments[0]
    prompt = first.token_ids[: int(first.sampled.argmax()) if first.sampled.any() else len(first.sampled)]
    sampled = np.concatenate([segment.token_ids[segment.sampled] for segment in segments])
    return Rollout(rollout_id, advantages, loss_mask, prompt, sampled, logprobs, segments)


def _token_ids(rollout: Rollout) -> Iterable[Iterable[int]]:
    if rollout.segments:
        return [segment.token_ids for segment in rollout.segments]
    return rollout.prompt_ids, rollout.completion_ids


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
