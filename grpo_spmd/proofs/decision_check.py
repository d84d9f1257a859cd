"""Rank 0's side of the batch check: its decision beside what the ranks have found by themselves. Plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from grpo_spmd.distributed.packed import Unpacked, pack
from grpo_spmd.records import StepDecision

NOTHING = -2  # the name of a rollout without a sampled token, which is in no micro-batch
_SAMPLED = np.dtype([("id", np.int32), ("name", np.int64), ("reward", np.float64)])
_TRAINED = np.dtype([("id", np.int32), ("name", np.int64)])
_KINDS: tuple[npt.DTypeLike, ...] = _SAMPLED, _TRAINED, np.int64


def told(
    sampled: Sequence[tuple[int, int, float]], trained: Sequence[tuple[int, int]], dropped: Sequence[int]
) -> bytes:
    """What a rank tells rank 0: of the rollouts that it sampled (id, name, reward), of those that it trains on (id,
    name), and the positions of groups with a spread that are not trained on."""
    arrays = [np.array(values, kind) for values, kind in zip((sampled, trained, dropped), _KINDS, strict=True)]
    return pack([len(array) for array in arrays], arrays)


def misplaced(of_ranks: list[bytes], of_all: StepDecision | None, wanted: float) -> list[str]:
    """On rank 0: what it decided, the ranks that sampled say, and those that train."""
    assert of_all is not None
    parts = [
        [packed.array(kind, number).tolist() for kind, number in zip(_KINDS, packed.header, strict=True)]
        for packed in map(Unpacked, of_ranks)
    ]
    sampled, trained, dropped = ([each for part in parts for each in part[which]] for which in (0, 1, 2))
    found, used = list[str](), of_all.positions.tolist()
    for position in dropped:
        if not (len(used) == wanted and position > max(used)):
            found.append(f"the group at position {position} is not trained on")
    for i, _, reward in sampled:
        if not same(there := float(of_all.rewards[i]), reward):
            found.append(f"rollout {i} has the reward {there:.6g}, here {reward:.6g}")
    if sorted(i for i, _, _ in sampled) != list(range(len(of_all.rewards))):
        found.append("not each rollout of the step was sampled once")
    if sorted(of_all.plan.ids.tolist()) != list(range(len(of_all.rewards))):
        found.append("the plan does not have each rollout once")
    twice = [i for i, count in Counter(i for i, _ in trained).items() if count > 1]
    known: Mapping[int, int] = dict(trained)
    other = [i for i, name, _ in sampled if known.get(i, name) != name]
    missing = [i for i, name, _ in sampled if i not in known and name != NOTHING]
    for what, ids in (("twice", twice), ("with other tokens, logprobs or advantages", other), ("not", missing)):
        if ids:
            found.append(f"rollouts {sorted(ids)[:5]} are trained on {what}")
    return found


def moments_of_all(of_ranks: Sequence[bytes]) -> tuple[float, float]:
    """Of float64s."""
    return moments(np.frombuffer(b"".join(of_ranks)).tolist())


def kl_shares(of_ranks: Sequence[bytes]) -> list[bytes]:
    """On rank 0, of each rank's trained ids (int32), what is taken off their rewards (float64) and sampled ids (int32):
    for each what is taken off those that it sampled, wherever they are trained on."""
    taken, sampled = dict[int, float](), list[list[int]]()
    for packed in map(Unpacked, of_ranks):
        num_trained, num_sampled = packed.header
        ids, values = packed.array(np.int32, num_trained).tolist(), packed.array(np.float64, num_trained).tolist()
        taken |= zip(ids, values, strict=True)
        sampled.append(packed.array(np.int32, num_sampled).tolist())
    return [np.array([taken.get(i, 0.0) for i in ids], np.float64).tobytes() for ids in sampled]


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased deviation; 0 where there are too few."""
    mean = math.fsum(values) / max(len(values), 1)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
