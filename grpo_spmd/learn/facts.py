"""What a rank tells rank 0 of the groups that it sampled: a record of a few numbers each, and what only sums count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.distributed.packed import Array, Unpacked, pack
from grpo_spmd.records import EPISODE_STATUSES, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.logged import Logged, logged_in, merge_logged

Records = npt.NDArray[np.void]  # one a group, as `record_type` has them
# Tokens of all segments, what is given among them; the numbers of segments and turns; the place of the status in
# EPISODE_STATUSES.
OF_EPISODES: list[tuple[str, type]] = [
    ("tokens", np.int32), ("segments", np.uint16), ("turns", np.uint16), ("status", np.uint8),
]  # fmt: skip


def record_type(num_rewards: int, group_size: int, are_episodes: bool = False) -> np.dtype[np.void]:
    """Bytes of a rollout: 13, 8 for each reward function, and 12 of its group's; 9 more of an episode."""
    of_completions: list[tuple[str, type]]
    of_completions = [("completion_tokens", np.int32), ("truncated", np.bool_), ("rewards", np.float64)]
    if are_episodes:
        of_completions += OF_EPISODES
    return np.dtype(
        [
            ("position", np.int64),  # of the prompt in the stream
            ("prompt_tokens", np.int32),
            *((name, kind, (group_size,)) for name, kind in of_completions),  # the weighted sums; NaN: unknown
            ("by_name", np.float64, (num_rewards, group_size)),  # of each function; NaN: does not apply, or unusable
        ]
    )


@dataclass
class Tally:
    """What is counted of a step's completions, whoever scored them."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)  # by reward function
    retried: dict[str, Counter[str]] = field(default_factory=dict)  # groups that it was called for again, by reason
    logged: Logged = field(default_factory=dict)
    first_errors: list[str] = field(default_factory=list)
    calls_s: list[npt.NDArray[np.float32]] = field(default_factory=list)  # seconds of each call of an environment

    def add(self, other: Tally) -> None:
        for mine, others in ((self.statuses, other.statuses), (self.retried, other.retried)):
            for name, counts in others.items():
                of_name = mine.setdefault(name, Counter())
                for what, number in counts.items():  # Counter.update takes ten times as long, thousands of times
                    of_name[what] += number
        merge_logged(self.logged, other.logged)
        self.first_errors += other.first_errors
        self.calls_s += other.calls_s


def encode_facts(groups: Sequence[RolloutGroup], scored: ScoredRollouts, group_size: int) -> bytes:
    """Of one round's groups of a rank. None of them: no byte."""
    if not groups:
        return b""
    completions = [completion for group in groups for completion in group.completions]
    assert len(completions) == len(scored.rewards) == len(groups) * group_size, (len(completions), len(scored.rewards))
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    records = np.zeros(len(groups), record_type(len(scored.by_name), group_size, bool(episodes)))
    records["position"] = [group.prompt.position for group in groups]
    records["prompt_tokens"] = [len(group.prompt.token_ids) for group in groups]
    shape = len(groups), group_size
    records["completion_tokens"] = np.reshape([len(c.token_ids) for c in completions], shape)
    records["truncated"] = np.reshape([c.finish_reason == "length" for c in completions], shape)
    records["rewards"] = np.array(scored.rewards, np.float64).reshape(shape)  # None: NaN
    for number, values in enumerate(scored.by_name.values()):
        records["by_name"][:, number] = np.array(values, np.float64).reshape(shape)
    calls_s: list[float] = []
    if episodes:
        lengths = [sum(len(segment.token_ids) for segment in episode.segments) for episode in episodes]
        alone = np.repeat(records["prompt_tokens"], group_size).tolist()  # all that there is of a failed one
        records["tokens"] = np.reshape([n or prompt for n, prompt in zip(lengths, alone, strict=True)], shape)
        records["segments"] = np.reshape([len(episode.segments) for episode in episodes], shape)
        records["turns"] = np.reshape([len(episode.turns) for episode in episodes], shape)
        records["status"] = np.reshape([EPISODE_STATUSES.index(episode.status) for episode in episodes], shape)
        calls_s = [seconds for episode in episodes for seconds in episode.calls_s]
    logged = logged_in(scored.notes.values())
    pairs = [(reward, name, *pair) for reward, by_name in logged.items() for name, pair in by_name.items()]
    retried: dict[str, Counter[str]] = {}
    for note in scored.notes.values():
        for name, how in note.get("retried", {}).items():
            retried.setdefault(name, Counter())[how] += 1
    counts = [len(groups), list(scored.by_name), scored.num_statuses(), retried]
    names = [(reward, name, len(sums), number) for reward, name, sums, number in pairs]
    sums = np.array([value for _, _, values, _ in pairs for value in values], np.float64)
    of_episodes = len(calls_s) if episodes else None
    return pack([*counts, names, scored.first_error, of_episodes], [records, sums, np.array(calls_s, np.float32)])


def decode_facts(payloads: Sequence[bytes], group_size: int) -> tuple[Records, list[int], list[str], Tally]:
    """What `encode_facts` made: the records in rank order, and how many are of each; the names of the functions; and
    the sums."""
    records, num_groups, names, tally = list[Array](), [0] * len(payloads), list[str](), Tally()
    kind = record_type(0, group_size)
    for rank, payload in enumerate(payloads):
        if not payload:
            continue
        packed = Unpacked(payload)
        num_groups[rank], own_names, statuses, retried, metrics, first_error, num_calls = packed.header
        if not records:
            names, kind = own_names, record_type(len(own_names), group_size, num_calls is not None)
        assert own_names == names, (own_names, names)
        records.append(packed.array(np.uint8, num_groups[rank] * kind.itemsize))
        logged: dict[str, Any] = {}
        for reward, name, num_sums, number in metrics:
            logged.setdefault(reward, {})[name] = (packed.array(np.float64, num_sums).tolist(), number)
        calls_s = [packed.array(np.float32, num_calls)] if num_calls else []
        assert not packed.rest(), (len(payload), num_groups[rank], names)
        tally.add(Tally(statuses, retried, logged, [first_error] if first_error else [], calls_s))
    # As bytes: np.concatenate compares the types of thousands of parts field by field.
    return np.frombuffer(b"".join(part.data for part in records), kind), num_groups, names, tally


def rollout_tokens(facts: Records) -> npt.NDArray[np.int64]:
    """[groups, G] Tokens of each rollout, those that are only context included."""
    if "tokens" in (facts.dtype.names or ()):
        return facts["tokens"].astype(np.int64)
    of_both: npt.NDArray[np.int64] = facts["prompt_tokens"][:, None] + facts["completion_tokens"].astype(np.int64)
    return of_both
