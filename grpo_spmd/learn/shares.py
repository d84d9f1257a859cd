"""Each rank's share of what rank 0 decided, as bytes: its own rows, and what it must know of what it sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from grpo_spmd.distributed.packed import Array, Unpacked, pack
from grpo_spmd.records import Decision, RolloutGroup, StepDecision

_MOST_RANKS = 1 << 16  # a rank's number takes two bytes


def encode_shares(step: StepDecision) -> list[bytes]:
    """One for each rank. Bytes: 7 for each rollout that it sampled and 4 for each group, 4 for each rollout that it
    trains on and 4 for each row, and about 60."""
    assert len(step.slots) <= _MOST_RANKS, len(step.slots)
    trained_by = np.zeros(len(step.rewards), np.uint16)
    shares = []
    rows_of_ranks = [[ranks[rank] for ranks in step.plan] for rank in range(len(step.slots))]
    ids_of_ranks = [_flat(rows) for rows in rows_of_ranks]
    for rank, ids in enumerate(ids_of_ranks):
        trained_by[ids] = rank
    num_rows = [len(ranks[0]) for ranks in step.plan]
    counts = len(step.rewards), step.num_tokens, step.num_sampled_tokens
    header = pack([*counts, step.num_loss_tokens, step.num_loss_sequences, num_rows])  # of all ranks
    for slots, rows, ids in zip(step.slots, rows_of_ranks, ids_of_ranks, strict=True):
        sampled = sampled_ids(slots, group_size_of(step))
        lengths = np.array([len(row) for of_mini_batch in rows for row in of_mini_batch], np.int32)
        arrays = slots, trained_by[sampled], step.advantages[sampled], step.in_loss[sampled], lengths, ids
        shares.append(b"".join([header, *(array.tobytes() for array in arrays)]))
    return shares


def decode_share(
    payload: bytes, groups: Sequence[RolloutGroup], group_size: int, of_all: StepDecision | None
) -> Decision:
    """This rank's, of `encode_shares`. `groups`: those that it sampled."""
    share = Unpacked(payload)
    num_rollouts, num_tokens, num_sampled_tokens, num_loss_tokens, num_loss_sequences, num_rows = share.header
    slots = share.array(np.int32, len(groups))
    ids = sampled_ids(slots, group_size)
    of_sampled = (share.array(kind, len(ids)).tolist() for kind in (np.uint16, np.float32, np.bool_))
    trained_by, advantages, in_loss = (dict(zip(ids.tolist(), values, strict=True)) for values in of_sampled)
    lengths = share.array(np.int32, sum(num_rows)).tolist()
    trained, of_rows = iter(share.array(np.int32, sum(lengths)).tolist()), iter(lengths)
    assert not share.rest(), (len(payload), len(groups), num_rows)
    return Decision(
        slots={group.prompt.position: slot for group, slot in zip(groups, slots.tolist(), strict=True) if slot >= 0},
        advantages=advantages,
        in_loss=in_loss,
        trained_by=trained_by,
        rows=[[[next(trained) for _ in range(next(of_rows))] for _ in range(number)] for number in num_rows],
        num_rollouts=num_rollouts,
        num_loss_tokens=num_loss_tokens,
        num_loss_sequences=num_loss_sequences,
        num_tokens=num_tokens,
        num_sampled_tokens=num_sampled_tokens,
        of_all=of_all,
    )


def trained_ids(step: StepDecision, rank: int) -> Array:
    """Of the rollouts that a rank trains on, in the order of its rows."""
    return _flat([ranks[rank] for ranks in step.plan])


def sampled_ids(slots: npt.NDArray[np.int32], group_size: int) -> Array:
    """Of the rollouts that are trained on, whoever does, of a rank's groups with these slots."""
    used = slots[slots >= 0].astype(np.int64)
    ids: Array = (used[:, None] * group_size + np.arange(group_size)).ravel()
    return ids


def group_size_of(step: StepDecision) -> int:
    return len(step.rewards) // max(len(step.positions), 1)


def _flat(rows: Sequence[Sequence[Sequence[int]]]) -> Array:
    ids = [i for of_mini_batch in rows for row in of_mini_batch for i in row]
    return np.array(ids, np.int32)
