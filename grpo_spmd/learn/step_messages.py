"""Encodes the two messages of a step between a rank and rank 0 as bytes.

The first one has the numbers of the groups that the rank sampled (`encode_groups`). The second one
has the part of rank 0's decision that the rank needs (`encode_decisions`). `revise_decision`
changes the decision later in the step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.learn.prefix_tree import count_shared
from grpo_spmd.records import (
    EPISODE_STATUSES,
    Decision,
    Episode,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
)
from grpo_spmd.rewards.trl import Logged, logged_in, merge_logged

# One structured row for each group, of the dtype that `group_dtype` returns.
GroupRows = npt.NDArray[np.void]
# The number of a rank is sent as uint16.
_MAX_RANKS = 1 << 16
# Stands for the episode of a completion that has none. Its status is encoded after all others.
_NO_EPISODE = Episode("", (), (), [], {}, [])
_STATUSES = (*EPISODE_STATUSES, _NO_EPISODE.status)


def group_dtype(num_rewards: int, group_size: int) -> np.dtype[np.void]:
    """Returns numpy's structured dtype for the numbers of one group in a message to rank 0.

    It has 12 bytes per group, 26 per rollout, and 8 per rollout and reward function."""
    columns: dict[str, type] = {
        "completion_tokens": np.int32,
        "tokens": np.int32,  # all tokens that the policy reads: prompt, completion, environment
        "tree_tokens": np.int32,  # the same; a prefix that several contexts share counts once
        "truncated": np.bool_,
        "rewards": np.float64,  # the weighted sums; NaN: unknown
        "segments": np.uint16,
        "turns": np.uint16,
        "status": np.uint8,  # index in EPISODE_STATUSES; len(EPISODE_STATUSES): no episode
    }
    return np.dtype(
        [
            ("position", np.int64),  # position of the prompt in the prompt stream
            ("prefix_tokens", np.int32),  # length of the prefix of all contexts of the group
            *((name, kind, (group_size,)) for name, kind in columns.items()),
            # The rewards of each function. NaN: it does not apply, or its value is unusable.
            ("by_name", np.float64, (num_rewards, group_size)),
        ]
    )


@dataclass
class StepCounts:
    """Sums over the completions of a step, of one rank or of all ranks."""

    status_counts: dict[str, Counter[str]] = field(default_factory=dict)
    """For each reward function the number of completions with each status."""
    retried: dict[str, Counter[str]] = field(default_factory=dict)
    """For each reward function the number of groups for which it was called again, by reason."""
    logged: Logged = field(default_factory=dict)
    """The metrics that reward functions logged."""
    first_errors: list[str] = field(default_factory=list)
    """The first failure on each rank that had one."""
    calls_s: list[float] = field(default_factory=list)
    """Seconds of each call to an environment."""
    tools: Counter[str] = field(default_factory=Counter)
    """"episodes": the number of episodes with tools; "calls", "errors": the sums over these."""

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
        self.tools.update(addend.tools)


def encode_groups(groups: Sequence[RolloutGroup], scored: ScoredRollouts, group_size: int) -> bytes:
    """Returns the message of a rank to rank 0 about its groups of one round: lengths, rewards and
    statuses, but no tokens. It is empty if the rank has no groups."""
    if not groups:
        return b""
    completions = [completion for group in groups for completion in group.completions]
    episodes = [completion.episode or _NO_EPISODE for completion in completions]
    prompt_tokens = [len(group.prompt.token_ids) for group in groups for _ in group.completions]
    completion_tokens = [len(completion.token_ids) for completion in completions]
    forks = [count_shared(group) for group in groups]
    columns: dict[str, Any] = {
        "completion_tokens": completion_tokens,
        "tree_tokens": [count for fork in forks for count in fork.tree_tokens],
        # A failed episode has no segments; the policy read no more than its prompt.
        "tokens": [
            sum(len(segment.token_ids) for segment in episode.segments) or num_prompt + num_sampled
            for episode, num_prompt, num_sampled in zip(
                episodes, prompt_tokens, completion_tokens, strict=True
            )
        ],
        "truncated": [completion.finish_reason == "length" for completion in completions],
        # numpy turns None into NaN.
        "rewards": np.array(scored.rewards, np.float64),
        "segments": [len(episode.segments) for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
        "status": [_STATUSES.index(episode.status) for episode in episodes],
    }
    shape = (len(groups), group_size)
    rows = np.zeros(len(groups), group_dtype(len(scored.by_name), group_size))
    rows["position"] = [group.prompt.position for group in groups]
    rows["prefix_tokens"] = [fork.prefix_tokens for fork in forks]
    for name, column in columns.items():
        rows[name] = np.reshape(column, shape)
    for number, values in enumerate(scored.by_name.values()):
        rows["by_name"][:, number] = np.array(values, np.float64).reshape(shape)
    counts = StepCounts(
        scored.num_statuses(),
        logged=logged_in(scored.notes.values()),
        first_errors=[scored.first_error] if scored.first_error else [],
        calls_s=[seconds for episode in episodes for seconds in episode.calls_s],
    )
    for episode in episodes:
        if episode.num_tool_calls is not None:
            counts.tools["episodes"] += 1
            counts.tools["calls"] += episode.num_tool_calls
            counts.tools["errors"] += episode.num_tool_errors
    for note in scored.notes.values():
        for name, reason in note.get("retried", {}).items():
            counts.retried.setdefault(name, Counter())[reason] += 1
    return pack([list(scored.by_name), vars(counts)], [rows])


@dataclass(frozen=True)
class SampledGroups:
    """The groups of one round over all ranks."""

    rows: GroupRows
    """The groups of rank 0, then those of rank 1, and so on."""
    num_groups: list[int]
    """The number of groups of each rank."""
    reward_names: list[str]
    """The names of the reward functions."""
    counts: StepCounts
    """The sums over all ranks."""


def decode_groups(messages: Sequence[bytes], group_size: int) -> SampledGroups:
    """Returns the groups of all ranks, decoded from one message of `encode_groups` per rank."""
    row_bytes: list[bytes] = []
    names: list[str] = []
    counts = StepCounts()
    for payload in messages:
        row_bytes.append(b"")
        if payload:
            reader = PackedReader(payload)
            rank_names, rank_counts = reader.header
            names = names or rank_names
            assert rank_names == names, (rank_names, names)
            row_bytes[-1] = reader.rest()
            counts.add(StepCounts(**rank_counts))
    dtype = group_dtype(len(names), group_size)
    num_groups = [len(rank_bytes) // dtype.itemsize for rank_bytes in row_bytes]
    # Joined as bytes: np.concatenate compares the dtypes of thousands of parts field by field.
    return SampledGroups(np.frombuffer(b"".join(row_bytes), dtype), num_groups, names, counts)


# The fields of StepDecision that every rank gets as they are.
_SHARED_FIELDS = (
    "num_loss_tokens",
    "num_loss_sequences",
    "num_tokens",
    "num_sampled_tokens",
    "advantage_slope",
    "shares_prefixes",
)
# The fields of a message to a rank, in this order. Arrays are sent as bytes. "slots" has the slot
# (place in the step) of each group that the rank sampled, -1 for one that is not trained on. The
# fields in _DTYPES have one entry for each rollout of the groups that have a slot.
_FIELDS = ("slots", "advantages", "in_loss", "trained_by", "rows", "num_rollouts", *_SHARED_FIELDS)
_DTYPES = {"advantages": np.float32, "in_loss": np.bool_, "trained_by": np.uint16}


def encode_decisions(step: StepDecision) -> list[bytes]:
    """Returns one message for each rank, with the part of the decision that the rank needs.

    Its size is 7 bytes per rollout and 4 per group that the rank sampled, at most 5 per rollout
    that it trains on, and about 60 more."""
    num_ranks = len(step.num_groups)
    assert num_ranks <= _MAX_RANKS, num_ranks
    trained_by = np.zeros(len(step.rewards), np.uint16)
    # The plan is for groups of ranks that share their rows; each has the number of its first rank.
    num_sharing = num_ranks // len(step.plan.lengths[0])
    for ids, lengths in step.plan.blocks():
        trained_by[ids] = np.repeat(np.arange(0, num_ranks, num_sharing), lengths.sum(axis=1))
    group_size = len(step.rewards) // max(len(step.positions), 1)
    slots_by_rank = np.split(step.slots, np.cumsum(step.num_groups)[:-1])
    messages = []
    shared = {name: vars(step)[name] for name in _SHARED_FIELDS}
    # `plan[mini_batch][rank]`; zip(*plan) gives, for each rank, its rows of every mini-batch.
    rows_by_rank = [rows for rows in zip(*step.plan, strict=True) for _ in range(num_sharing)]
    for slots, rows in zip(slots_by_rank, rows_by_rank, strict=True):
        sampled = _sampled_ids(slots, group_size)
        values = {
            **shared,
            "slots": slots.tobytes(),
            "advantages": step.advantages[sampled].tobytes(),
            "in_loss": step.in_loss[sampled].tobytes(),
            "trained_by": trained_by[sampled].tobytes(),
            "rows": rows,
            "num_rollouts": len(step.rewards),
        }
        messages.append(msgspec.msgpack.encode([values[name] for name in _FIELDS]))
    return messages


def decode_decision(
    message: bytes,
    groups: Sequence[RolloutGroup],
    group_size: int,
    rank0_decision: StepDecision | None,
) -> Decision:
    """Returns this rank's part of the decision, from its message of `encode_decisions`.

    `groups` are the groups that this rank sampled. `rank0_decision` is the whole decision on rank
    0, None on other ranks."""
    values = dict(zip(_FIELDS, msgspec.msgpack.decode(message), strict=True))
    slots = np.frombuffer(values["slots"], np.int32)
    ids = _sampled_ids(slots, group_size).tolist()
    for name, dtype in _DTYPES.items():
        column = np.frombuffer(values[name], dtype).tolist()
        values[name] = dict(zip(ids, column, strict=True))
    values["slots"] = {
        group.prompt.position: slot
        for group, slot in zip(groups, slots.tolist(), strict=True)
        if slot >= 0
    }
    return Decision(**values, rank0_decision=rank0_decision)


def _sampled_ids(slots: npt.NDArray[np.int32], group_size: int) -> npt.NDArray[np.int32]:
    """Returns the rollout ids of the groups with these slots, the groups' places in the step.

    The group in slot s has the ids from s * group_size on. Groups that are not trained on (slot -1)
    have none."""
    trained_slots = slots[slots >= 0]
    return (trained_slots[:, None] * group_size + np.arange(group_size, dtype=np.int32)).ravel()


def revise_decision(
    decision: Decision,
    metrics: dict[str, float | None],
    advantages: Sequence[float] | None = None,
) -> Decision:
    """Returns the decision with `metrics` added and, if given, with new `advantages`: a list with
    one for each rollout of the step, in the order of ids."""
    step = decision.rank0_decision
    if step is not None:
        step = dataclasses.replace(step, metrics=step.metrics | metrics)
    if advantages is None:
        return dataclasses.replace(decision, rank0_decision=step)
    if step is not None:
        step = dataclasses.replace(step, advantages=np.array(advantages, np.float32))
    sampled = {i: advantages[i] for i in decision.advantages}
    return dataclasses.replace(decision, advantages=sampled, rank0_decision=step)
