"""Encodes the two messages of a step between a rank and rank 0 as bytes.

The first one has the numbers of the groups that the rank sampled (`encode_groups`). The second one
has the part of rank 0's decision that the rank needs (`encode_decisions`). `revise_decision` lets
rank 0 change the decision later in the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.distributed.collectives import scatter_from_rank0
from grpo_spmd.distributed.packed import Array, PackedReader, pack
from grpo_spmd.records import (
    EPISODE_STATUSES,
    Decision,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
)
from grpo_spmd.rewards.trl import Logged, logged_in, merge_logged

# One structured row for each group, of the dtype that `group_dtype` returns.
GroupRows = npt.NDArray[np.void]
# A rank's number takes two bytes in a message.
_MAX_RANKS = 1 << 16


def group_dtype(num_rewards: int, group_size: int, are_episodes: bool = False) -> np.dtype[np.void]:
    """Returns the dtype of one group: 12 bytes per group and 13 per rollout, 8 more per rollout and
    reward function, and 9 more per rollout that is an episode."""
    columns: list[tuple[str, type]] = [
        ("completion_tokens", np.int32),
        ("truncated", np.bool_),
        ("rewards", np.float64),  # the weighted sums; NaN: unknown
    ]
    if are_episodes:
        columns += [
            ("tokens", np.int32),  # of all segments, with those that the environment gave
            ("segments", np.uint16),
            ("turns", np.uint16),
            ("status", np.uint8),  # index in EPISODE_STATUSES
        ]
    return np.dtype(
        [
            ("position", np.int64),  # of the prompt in the stream
            ("prompt_tokens", np.int32),
            *((name, kind, (group_size,)) for name, kind in columns),
            # The rewards of each function. NaN: does not apply, or unusable.
            ("by_name", np.float64, (num_rewards, group_size)),
        ]
    )


def count_rollout_tokens(rows: GroupRows) -> npt.NDArray[np.int64]:
    """Returns the tokens [groups, G] of each rollout, prompt and context included."""
    if "tokens" in (rows.dtype.names or ()):
        return rows["tokens"].astype(np.int64)
    completion_tokens = rows["completion_tokens"].astype(np.int64)
    total: npt.NDArray[np.int64] = rows["prompt_tokens"][:, None] + completion_tokens
    return total


@dataclass
class StepCounts:
    """Sums over the completions of a step, of one rank or of all ranks."""

    status_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each reward function the number of completions with each status."""
    retried: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each reward function the number of groups that it was called for again, by reason."""
    logged: Logged = field(default_factory=dict)
    """The metrics that reward functions logged."""
    first_errors: list[str] = field(default_factory=list)
    """The first failure on each rank that had one."""
    calls_s: list[float] = field(default_factory=list)
    """Seconds of each call to an environment."""

    def add(self, addend: StepCounts) -> None:
        """Adds the sums of another rank or round."""
        for totals, added in (
            (self.status_counts, addend.status_counts),
            (self.retried, addend.retried),
        ):
            for name, counts in added.items():
                total = totals.setdefault(name, Counter())
                # Counter.update takes ten times as long, and there may be thousands of ranks.
                for status, number in counts.items():
                    total[status] += number
        merge_logged(self.logged, addend.logged)
        self.first_errors += addend.first_errors
        self.calls_s += addend.calls_s


def encode_groups(groups: Sequence[RolloutGroup], scored: ScoredRollouts, group_size: int) -> bytes:
    """Returns the message about one round's groups of a rank. Without groups it is empty."""
    if not groups:
        return b""
    completions = [completion for group in groups for completion in group.completions]
    assert len(completions) == len(scored.rewards) == len(groups) * group_size, (
        len(completions),
        len(scored.rewards),
    )
    shape = len(groups), group_size
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    rows = np.zeros(len(groups), group_dtype(len(scored.by_name), group_size, bool(episodes)))
    rows["position"] = [group.prompt.position for group in groups]
    rows["prompt_tokens"] = [len(group.prompt.token_ids) for group in groups]
    rows["completion_tokens"] = np.reshape([len(c.token_ids) for c in completions], shape)
    rows["truncated"] = np.reshape([c.finish_reason == "length" for c in completions], shape)
    # numpy turns None into NaN.
    rows["rewards"] = np.array(scored.rewards, np.float64).reshape(shape)
    for number, values in enumerate(scored.by_name.values()):
        rows["by_name"][:, number] = np.array(values, np.float64).reshape(shape)
    if episodes:
        # A failed episode has no segment: its prompt is all there is of it.
        prompt_tokens = np.repeat(rows["prompt_tokens"], group_size).tolist()
        rows["tokens"] = np.reshape(
            [
                sum(len(segment.token_ids) for segment in episode.segments) or num_prompt_tokens
                for episode, num_prompt_tokens in zip(episodes, prompt_tokens, strict=True)
            ],
            shape,
        )
        rows["segments"] = np.reshape([len(episode.segments) for episode in episodes], shape)
        rows["turns"] = np.reshape([len(episode.turns) for episode in episodes], shape)
        statuses = [EPISODE_STATUSES.index(episode.status) for episode in episodes]
        rows["status"] = np.reshape(statuses, shape)
    counts = StepCounts(
        {**scored.num_statuses()},
        logged=logged_in(scored.notes.values()),
        first_errors=[scored.first_error] if scored.first_error else [],
        calls_s=[seconds for episode in episodes for seconds in episode.calls_s],
    )
    for note in scored.notes.values():
        for name, reason in note.get("retried", {}).items():
            reasons = counts.retried.setdefault(name, {})
            reasons[reason] = reasons.get(reason, 0) + 1
    return pack([list(scored.by_name), vars(counts), bool(episodes)], [rows])


@dataclass(frozen=True)
class SampledGroups:
    """The groups of one round over all ranks."""

    rows: GroupRows
    """Rank after rank."""
    num_groups: list[int]
    """The number of groups of each rank."""
    reward_names: list[str]
    """The names of the reward functions."""
    counts: StepCounts
    """The sums over all ranks."""


def decode_groups(messages: Sequence[bytes], group_size: int) -> SampledGroups:
    """Reads the messages of `encode_groups`, one of each rank."""
    row_bytes: list[bytes] = []
    num_groups = [0] * len(messages)
    names: list[str] = []
    counts = StepCounts()
    dtype = group_dtype(0, group_size)
    for rank, payload in enumerate(messages):
        if not payload:
            continue
        reader = PackedReader(payload)
        rank_names, rank_counts, are_episodes = reader.header
        if not row_bytes:
            names = rank_names
            dtype = group_dtype(len(names), group_size, are_episodes)
        assert rank_names == names, (rank_names, names)
        row_bytes.append(reader.rest())
        num_groups[rank] = len(row_bytes[-1]) // dtype.itemsize
        counts.add(StepCounts(**rank_counts))
    # Joined as bytes: np.concatenate compares the dtypes of thousands of parts field by field.
    return SampledGroups(np.frombuffer(b"".join(row_bytes), dtype), num_groups, names, counts)


def encode_decisions(step: StepDecision) -> list[bytes]:
    """Returns one message for each rank. It takes 7 bytes per rollout and 4 per group that the rank
    sampled, 4 per rollout and 4 per row that it trains on, and about 60 more."""
    assert len(step.num_groups) <= _MAX_RANKS, len(step.num_groups)
    trained_by = np.zeros(len(step.rewards), np.uint16)
    # By rollout id, as the other [B] columns.
    trained_by[step.plan.ids] = _trainers(step)
    lengths = np.hstack(step.plan.lengths)
    header = pack(
        [
            len(step.rewards),
            step.num_tokens,
            step.num_sampled_tokens,
            step.num_loss_tokens,
            step.num_loss_sequences,
            [block_lengths.shape[1] for block_lengths in step.plan.lengths],
        ]
    )
    columns = [
        split_by_rank(step.slots, step.num_groups),
        split_sampled(step, trained_by),
        split_sampled(step, step.advantages),
        split_sampled(step, step.in_loss),
        split_by_rank(lengths.ravel(), np.full(len(lengths), lengths.shape[1])),
        split_by_rank(*trained_ids(step)),
    ]
    return [b"".join([header, *columns_of_rank]) for columns_of_rank in zip(*columns, strict=True)]


def decode_decision(
    message: bytes,
    groups: Sequence[RolloutGroup],
    group_size: int,
    rank0_decision: StepDecision | None,
) -> Decision:
    """Reads this rank's message of `encode_decisions`. `groups` are those that this rank
    sampled."""
    reader = PackedReader(message)
    num_rollouts, num_tokens, num_sampled_tokens, num_loss_tokens, num_loss_sequences, num_rows = (
        reader.header
    )
    # The columns in the order in which encode_decisions wrote them.
    slots = reader.array(np.int32, len(groups))
    ids = sampled_ids(slots, group_size).tolist()

    def read_column(dtype: npt.DTypeLike) -> dict[int, Any]:
        return dict(zip(ids, reader.array(dtype, len(ids)).tolist(), strict=True))

    trained_by = read_column(np.uint16)
    advantages = read_column(np.float32)
    in_loss = read_column(np.bool_)
    lengths = reader.array(np.int32, sum(num_rows)).tolist()
    row_ids: Iterator[int] = iter(reader.array(np.int32, sum(lengths)).tolist())
    row_lengths = iter(lengths)
    assert not reader.rest(), (len(message), len(groups), num_rows)
    return Decision(
        slots={
            group.prompt.position: slot
            for group, slot in zip(groups, slots.tolist(), strict=True)
            if slot >= 0
        },
        advantages=advantages,
        in_loss=in_loss,
        trained_by=trained_by,
        rows=[
            [[next(row_ids) for _ in range(next(row_lengths))] for _ in range(number)]
            for number in num_rows
        ],
        num_rollouts=num_rollouts,
        num_loss_tokens=num_loss_tokens,
        num_loss_sequences=num_loss_sequences,
        num_tokens=num_tokens,
        num_sampled_tokens=num_sampled_tokens,
        rank0_decision=rank0_decision,
    )


def sampled_ids(slots: npt.NDArray[np.int32], group_size: int) -> npt.NDArray[np.int32]:
    """Returns the rollout ids of groups with these slots, without groups that are not trained on
    (-1)."""
    trained_slots = slots[slots >= 0]
    return (trained_slots[:, None] * group_size + np.arange(group_size, dtype=np.int32)).ravel()


def split_sampled(step: StepDecision, values: Array) -> list[bytes]:
    """Splits `values` [B] by the rank that sampled each rollout. Each part is in the order of
    `sampled_ids`."""
    group_size = len(step.rewards) // max(len(step.positions), 1)
    ranks = np.arange(len(step.num_groups))
    trained_groups = np.repeat(ranks, step.num_groups)[step.slots >= 0]
    num_rollouts = np.bincount(trained_groups, minlength=len(ranks)) * group_size
    return split_by_rank(values[sampled_ids(step.slots, group_size)], num_rollouts)


def trained_ids(step: StepDecision) -> tuple[npt.NDArray[np.int32], Array]:
    """Returns (rollout ids in the order in which ranks train on them, rank after rank; the number
    of each rank's ids)."""
    trainers = _trainers(step)
    ids = step.plan.ids[np.argsort(trainers, kind="stable")]
    return ids, np.bincount(trainers, minlength=len(step.num_groups))


def split_by_rank(values: Array, counts: Array) -> list[bytes]:
    """Splits `values`, which are in rank order, into one part of `counts[rank]` values for each
    rank."""
    payload = values.tobytes()
    ends = np.cumsum(counts) * values.itemsize
    return [payload[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


def _trainers(step: StepDecision) -> npt.NDArray[np.uint16]:
    """Returns the rank that trains on each of the plan's ids."""
    ranks = np.arange(len(step.num_groups), dtype=np.uint16)
    return np.concatenate([np.repeat(ranks, lengths.sum(axis=1)) for lengths in step.plan.lengths])


def revise_decision(
    decision: Decision,
    message: bytes,
    revise: Callable[[StepDecision, list[bytes]], tuple[StepDecision, list[bytes]]],
) -> tuple[bytes, StepDecision | None]:
    """Collective. Lets rank 0 revise its decision from one message of each rank.

    `revise` runs on rank 0 and returns (new decision, one reply for each rank). The function
    returns (this rank's reply, the new decision on rank 0 and None on other ranks).
    """
    revised: list[StepDecision] = []

    def answer(messages: list[bytes]) -> list[bytes]:
        assert decision.rank0_decision is not None
        step, replies = revise(decision.rank0_decision, messages)
        revised.append(step)
        return replies

    reply = scatter_from_rank0(answer, message)
    return reply, next(iter(revised), None)
