"""Each rank's share of what rank 0 decided, as bytes: its own rows, and what it must know of what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from grpo_spmd.distributed.packed import Array, Unpacked, pack
from grpo_spmd.records import Decision, RolloutGroup, StepDecision

_MOST_RANKS = 1 << 16  # a rank's number takes two bytes


def encode_shares(step: StepDecision) -> list[bytes]:
    """One for each rank. Bytes: 7 for each rollout that it sampled and 4 for each group, 4 for each rollout that it
    trains on and 4 for each row, and about 60."""
    assert len(step.num_groups) <= _MOST_RANKS, len(step.num_groups)
    trained_by, lengths = np.zeros(len(step.rewards), np.uint16), np.hstack(step.plan.lengths)
    trained_by[step.plan.ids] = _trainers(step)
    counts = len(step.rewards), step.num_tokens, step.num_sampled_tokens
    num_rows = [of_ranks.shape[1] for of_ranks in step.plan.lengths]
    header = pack([*counts, step.num_loss_tokens, step.num_loss_sequences, num_rows])  # of all ranks
    columns = [
        cut(step.slots, step.num_groups),
        *(cut(*of_sampled(step, values)) for values in (trained_by, step.advantages, step.in_loss)),
        cut(lengths.ravel(), np.full(len(lengths), lengths.shape[1])),
        cut(*of_trained(step)),
    ]
    return [b"".join([header, *parts]) for parts in zip(*columns, strict=True)]


def decode_share(
    payload: bytes, groups: Sequence[RolloutGroup], group_size: int, of_all: StepDecision | None
) -> Decision:
    """This rank's, of `encode_shares`. `groups`: those that it sampled."""
    share = Unpacked(payload)
    num_rollouts, num_tokens, num_sampled_tokens, num_loss_tokens, num_loss_sequences, num_rows = share.header
    slots = share.array(np.int32, len(groups))
    ids = sampled_ids(slots, group_size)
    columns = (share.array(kind, len(ids)).tolist() for kind in (np.uint16, np.float32, np.bool_))
    trained_by, advantages, in_loss = (dict(zip(ids.tolist(), values, strict=True)) for values in columns)
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


def sampled_ids(slots: npt.NDArray[np.int32], group_size: int) -> npt.NDArray[np.int32]:
    """Of the rollouts that are trained on, whoever does, of groups with these slots."""
    used = slots[slots >= 0]
    return (used[:, None] * group_size + np.arange(group_size, dtype=np.int32)).ravel()


def of_sampled(step: StepDecision, values: Array) -> tuple[Array, Array]:
    """Of `values` [B] those of what ranks sampled, in their order, rank behind rank; and how many are each's."""
    group_size, ranks = len(step.rewards) // max(len(step.positions), 1), np.arange(len(step.num_groups))
    used = np.repeat(ranks, step.num_groups)[step.slots >= 0]
    return values[sampled_ids(step.slots, group_size)], np.bincount(used, minlength=len(ranks)) * group_size


def of_trained(step: StepDecision) -> tuple[npt.NDArray[np.int32], Array]:
    """The ids of what ranks train on, in the order of their rows, rank behind rank; and how many are each's."""
    trainers = _trainers(step)
    return step.plan.ids[np.argsort(trainers, kind="stable")], np.bincount(trainers, minlength=len(step.num_groups))


def cut(values: Array, counts: Array) -> list[bytes]:
    """Each rank's of `values`, of which `counts` says how many they are."""
    data, ends = values.tobytes(), np.cumsum(counts) * values.itemsize
    return [data[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


def _trainers(step: StepDecision) -> npt.NDArray[np.uint16]:
    """The rank that trains on each of the plan's ids."""
    ranks = np.arange(len(step.num_groups), dtype=np.uint16)
    return np.concatenate([np.repeat(ranks, lengths.sum(axis=1)) for lengths in step.plan.lengths])
