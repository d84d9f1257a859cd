"""Rollouts as bytes, for the way from the rank that sampled them to the rank that trains on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain

import numpy as np

from grpo_spmd.records import Rollout


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """Rollouts as bytes: a JSON header, then all token ids (int32), then all logprobs (float64, so that they arrive
    unchanged)."""
    header = [[r.rollout_id, r.advantage, r.counts, len(r.prompt_ids), len(r.completion_ids)] for r in rollouts]
    text = json.dumps(header).encode()
    ids = np.fromiter(chain.from_iterable(ids for r in rollouts for ids in (r.prompt_ids, r.completion_ids)), np.int32)
    logprobs = np.fromiter(chain.from_iterable(r.rollout_logprobs for r in rollouts), np.float64)
    return b"".join([len(text).to_bytes(8, "little"), text, ids.tobytes(), logprobs.tobytes()])


def decode_rollouts(payload: bytes) -> list[Rollout]:
    """What `encode_rollouts` made, with arrays that lie in `payload`."""
    end = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8:end])
    num_ids = sum(prompt + completion for *_, prompt, completion in header)
    ids = np.frombuffer(payload, np.int32, num_ids, end)
    logprobs = np.frombuffer(payload, np.float64, offset=end + 4 * num_ids)
    rollouts, at, scored = [], 0, 0
    for rollout_id, advantage, counts, prompt, completion in header:
        prompt_ids, completion_ids = ids[at : at + prompt], ids[at + prompt : at + prompt + completion]
        rollouts.append(
            Rollout(rollout_id, advantage, counts, prompt_ids, completion_ids, logprobs[scored : scored + completion])
        )
        at, scored = at + prompt + completion, scored + completion
    return rollouts
