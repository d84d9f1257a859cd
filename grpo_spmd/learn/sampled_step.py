"""The groups of one step, and what rank 0 decides about them from a few numbers a rollout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.distributed.collectives import on_rank0_bytes, scatter_from_rank0
from grpo_spmd.distributed.packed import Array, PackedReader, pack
from grpo_spmd.learn.advantages import batch_std, compute_advantages, overlong_penalties
from grpo_spmd.learn.balance import plan_batch, plan_metrics, split_groups
from grpo_spmd.records import (
    EPISODE_STATUSES,
    FAILED_STATUSES,
    Decision,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
)
from grpo_spmd.rewards.protocol import RewardError, check_error_rate
from grpo_spmd.rewards.trl import Logged, logged_in, mean_metrics, merge_logged, retried_fracs

# A refill round draws at most 1 / this times the missing prompts: what an early, unlucky round kept is a poor estimate.
_LOWEST_KEPT_FRAC = 0.25


@dataclass(frozen=True)
class StepRules:
    """What a step is put together by; the same for all steps of a run."""

    rollout: RolloutConfig
    advantage: AdvantageConfig
    loss: LossConfig
    training: TrainingConfig
    max_error_frac: float  # share of completions without a usable reward at which the run stops
    num_ranks: int
    attention_cost_ratio: float = 0.0  # what a rollout costs beside its tokens, see balance.py
    discount: float | None = None  # environment.discount, see turn_credit.py
    is_measured: bool = False  # rewards are there to be looked at: all advantages are 0


class SampledStep:
    """The groups of one step: one round of prompts, or with dynamic sampling as many as it takes to fill the step.

    Dynamic sampling (DAPO, Yu et al. 2025) drops groups whose rewards are all alike, since their advantages are 0. Of
    those that stay the first in the prompt stream are taken, never the first to finish: that favours short completions.
    """

    def __init__(self, rules: StepRules) -> None:
        self.rules, self._group_size = rules, rules.rollout.group_size
        self.num_missing = (
            rules.rollout.num_prompts_per_step
        )  # prompts to draw next; 0: the step is complete
        self.groups: list[RolloutGroup] = []  # this rank's, of all rounds
        self.scored = ScoredRollouts()  # aligned with them
        self._num_groups = 0  # over all ranks and rounds
        self._rank0 = _Decider(rules)

    @property
    def num_completions(self) -> int:
        """Of this step over all ranks, those of the round that is under way included."""
        return (self._num_groups + self.num_missing) * self._group_size

    def add(
        self, groups: Sequence[RolloutGroup], scored: ScoredRollouts, num_groups: int | None = None
    ) -> None:
        """Collective. Add one round's groups of this rank with their scores; rank 0 says how many are still missing.
        `num_groups`: of this round over all ranks, where it is not `num_missing`."""
        expected = self.num_missing if num_groups is None else num_groups
        facts = encode_facts(groups, scored, self._group_size)
        self.groups += groups
        self.scored.extend(scored)
        self._num_groups += expected
        self.num_missing = on_rank0_bytes(
            lambda parts: self._rank0.add_round(parts, expected), facts
        )

    def decide(self) -> Decision:
        """Collective. Rank 0's decision about the step, as much of it as this rank needs."""
        share = scatter_from_rank0(lambda _: encode_shares(self._rank0.decide()), b"")
        return decode_share(share, self.groups, self._group_size, self._rank0.decided)


class _Decider:
    """Rank 0's side of a step: the facts of all ranks' groups, and what follows from them."""

    def __init__(self, rules: StepRules) -> None:
        self._rules = rules
        self._rounds: list[JudgedGroups] = []
        self._kept = np.empty(0, np.int64)  # positions
        self._num_groups = np.zeros(rules.num_ranks, np.int64)  # of each rank
        self._names: list[str] = []  # of the reward functions
        self._tally = Tally()
        self._error_rates: dict[str, float] = {}
        self.decided: StepDecision | None = None

    def add_round(self, parts: list[bytes], num_groups: int) -> int:
        """How many prompts are still missing."""
        rollout = self._rules.rollout
        facts, of_ranks, self._names, tally = decode_facts(parts, rollout.group_size)
        assert len(facts) == num_groups, (of_ranks, num_groups)
        ranks = np.repeat(np.arange(len(parts)), of_ranks)
        first = (
            self._num_groups + of_ranks - np.cumsum(of_ranks)
        )  # what the first of a rank's has over its place here
        places = np.arange(num_groups) + np.repeat(first, of_ranks)
        self._num_groups += of_ranks
        in_order = np.argsort(facts["position"])
        judged = judge(
            facts[in_order], ranks[in_order], places[in_order], rollout, self._rules.advantage
        )
        positions = judged.facts["position"]
        assert (np.diff(positions) > 0).all(), "a group was sampled twice, and another not at all"
        self._rounds.append(judged)
        self._tally.add(tally)
        so_far = sum(map(len, self._rounds))
        counted, first_errors = self._tally.statuses, self._tally.first_errors
        check_environment_errors(facts, first_errors, self._rules.max_error_frac)
        self._error_rates = check_error_rate([counted], first_errors, self._rules.max_error_frac)
        self._error_rates |= retried_fracs(counted, self._tally.retried, so_far, first_errors)
        dropped = judged.without_spread & rollout.dynamic_sampling
        self._kept = np.append(self._kept, positions[~dropped])
        missing = rollout.num_prompts_per_step - len(self._kept)
        if (
            missing <= 0
            or not rollout.dynamic_sampling
            or len(self._rounds) == rollout.dynamic_sampling_max_rounds
        ):
            return 0
        kept_frac = len(self._kept) / so_far
        return min(
            rollout.num_prompts_per_step, math.ceil(missing / max(kept_frac, _LOWEST_KEPT_FRAC))
        )

    def decide(self) -> StepDecision:
        rules, group_size = self._rules, self._rules.rollout.group_size
        num_rounds, groups = len(self._rounds), joined(self._rounds)
        self._rounds.clear()  # a step of 100,000 rollouts has 6 MB of them, and lasts
        if np.isnan(groups.facts["rewards"]).all():
            raise RewardError(
                f"none of the {len(groups) * group_size} completions of this step has a usable reward: every "
                "value was None, NaN or not a number; see the module docstring of grpo_spmd.rewards for what these mean"
            )
        positions = np.sort(self._kept)[: rules.rollout.num_prompts_per_step]
        in_order = np.argsort(groups.facts["position"])
        used = in_order[np.searchsorted(groups.facts["position"], positions, sorter=in_order)]
        facts, rewards = groups.facts[used], groups.penalised[used]
        completion_tokens = facts["completion_tokens"].astype(np.int64)
        num_tokens = rollout_tokens(facts).ravel()
        in_loss = ~(np.isnan(rewards) | (facts["truncated"] & rules.loss.mask_truncated))
        sizes = [n * group_size for n in split_groups(len(used), rules.training.num_mini_batches)]
        blocks = np.split(np.where(in_loss, completion_tokens, 0).ravel(), np.cumsum(sizes)[:-1])
        num_loss_tokens, num_loss_sequences = (
            [int(b.sum()) for b in blocks],
            [int((b > 0).sum()) for b in blocks],
        )
        metrics = (
            group_metrics(groups, self._names, self._tally.logged, rules.advantage)
            | self._error_rates
        )
        metrics |= episode_metrics(groups.facts, self._tally.calls_s)
        if rules.rollout.dynamic_sampling:
            wanted = rules.rollout.num_prompts_per_step
            metrics |= refill_metrics(groups, num_rounds, len(used), wanted)
        num_sampled_tokens, slots = (
            int(groups.facts["completion_tokens"].sum(dtype=np.int64)),
            _slots(groups, used),
        )
        del (
            groups,
            facts,
            completion_tokens,
            blocks,
        )  # rank 0 never holds them and a plan in the making
        costs = num_tokens + rules.attention_cost_ratio * num_tokens * num_tokens
        plan = plan_batch(
            num_tokens,
            num_ranks=rules.num_ranks,
            mini_batch_sizes=sizes,
            max_tokens=rules.training.max_tokens_per_micro_batch,
            costs=costs,
        )
        metrics |= {
            f"batching/{name}": value
            for name, value in plan_metrics(plan, num_tokens, costs).items()
        }
        self.decided = StepDecision(
            positions=positions,
            rewards=rewards.ravel(),
            advantages=advantages_of(rewards, rules.advantage) * np.float32(not rules.is_measured),
            in_loss=in_loss.ravel(),
            plan=plan,
            num_groups=self._num_groups,
            slots=slots,
            num_loss_tokens=num_loss_tokens,
            num_loss_sequences=num_loss_sequences,
            num_tokens=int(num_tokens.sum()),
            num_sampled_tokens=num_sampled_tokens,
            metrics=metrics,
        )
        return self.decided


def _slots(groups: JudgedGroups, used: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """As StepDecision has them; `used`: the groups that are trained on."""
    slots = np.full(len(groups), -1, np.int32)
    slots[used] = np.arange(len(used))
    as_sampled: npt.NDArray[np.int32] = slots[np.lexsort((groups.places, groups.ranks))]
    return as_sampled


def advantages_of(
    rewards: npt.NDArray[np.float64], advantage: AdvantageConfig
) -> npt.NDArray[np.float32]:
    """The advantages of rewards [P, G], in the order of rollout ids."""
    advantages, _ = compute_advantages(
        torch.from_numpy(rewards), advantage.estimator, advantage.normalize_std
    )
    values: npt.NDArray[np.float32] = advantages.flatten().numpy()
    return values


# A step's groups as rank 0 judges them from a few numbers a rollout, and what the metrics say of them. Pure.


@dataclass(frozen=True)
class JudgedGroups:
    """g groups of G completions each, a row each in every array."""

    facts: Records
    ranks: npt.NDArray[np.int64]  # who sampled them, and as which of its groups
    places: npt.NDArray[np.int64]
    overlong: npt.NDArray[
        np.float64
    ]  # [g, G] what completions lose of their rewards for their length
    penalised: npt.NDArray[np.float64]  # [g, G] rewards as the advantages take them; NaN: unknown
    without_spread: npt.NDArray[np.bool_]  # rewards all alike, before the penalty

    def __len__(self) -> int:
        return len(self.facts)


def judge(
    facts: Records,
    ranks: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    rollout: RolloutConfig,
    advantage: AdvantageConfig,
) -> JudgedGroups:
    buffer, penalty = advantage.overlong_buffer_tokens, advantage.overlong_penalty
    overlong = overlong_penalties(
        grid(facts["completion_tokens"]), rollout.max_completion_tokens, buffer, penalty
    )
    rewards = grid(facts["rewards"])
    # Before the penalty, as DAPO has it: four wrong answers, one a little long, have nothing to teach but length.
    _, without_spread = compute_advantages(rewards, "dr_grpo", "none")
    penalised = (rewards - overlong).numpy()
    return JudgedGroups(facts, ranks, places, overlong.numpy(), penalised, without_spread.numpy())


def joined(rounds: Sequence[JudgedGroups]) -> JudgedGroups:
    if len(rounds) == 1:
        return rounds[0]
    columns = zip(*(vars(groups).values() for groups in rounds), strict=True)
    return JudgedGroups(*(np.concatenate(column) for column in columns))


def group_metrics(
    groups: JudgedGroups, names: Sequence[str], logged: Logged, advantage: AdvantageConfig
) -> dict[str, float | None]:
    """Of all groups that were sampled: those that dynamic sampling keeps would say little about the policy."""
    facts, rewards = groups.facts, grid(groups.facts["rewards"])
    lengths, size = (
        facts["completion_tokens"].ravel().astype(np.int64),
        facts["completion_tokens"].size,
    )
    metrics: dict[str, float | None] = {
        "reward/mean": float(rewards[~rewards.isnan()].mean()),
        "reward/std": float(batch_std(rewards)),
        "reward/zero_std_groups_frac": int(groups.without_spread.sum()) / len(groups),
        "reward/unscored_frac": float(rewards.isnan().double().mean()),
        "completion/tokens_mean": int(lengths.sum()) / size,
        "completion/tokens_p50": float(np.percentile(lengths, 50)),
        "completion/tokens_p95": float(np.percentile(lengths, 95)),
        "completion/tokens_max": int(lengths.max()),
        "completion/truncated_frac": int(facts["truncated"].sum()) / size,
    }
    if advantage.overlong_buffer_tokens:
        # One by one, as a plain sum adds them: numpy's adds pairs.
        metrics["reward/overlong_penalty_mean"] = sum(groups.overlong.ravel().data) / size
    metrics |= mean_metrics(logged)
    for number, name in enumerate(names):
        values = grid(facts["by_name"][:, number])
        usable = values[~values.isnan()]
        metrics[f"reward/{name}/mean"] = float(usable.mean()) if len(usable) else None
        metrics[f"reward/{name}/std"] = float(batch_std(values)) if len(usable) else None
    return metrics


def refill_metrics(
    groups: JudgedGroups, num_rounds: int, num_used: int, wanted: int
) -> dict[str, float]:
    """Of dynamic sampling: what it took to find `num_used` groups with a spread of the `wanted` ones."""
    alike = int(groups.without_spread.sum())
    return {
        "dynamic_sampling/rounds": num_rounds,
        "dynamic_sampling/sampled_groups": len(groups),
        "dynamic_sampling/alike_groups": alike,
        "dynamic_sampling/surplus_groups": len(groups) - alike - num_used,
        "dynamic_sampling/missing_groups": wanted - num_used,
    }


def grid(rows: npt.NDArray[Any]) -> Tensor:
    """float64 [groups, G]"""
    return torch.from_numpy(
        np.array(rows, np.float64, order="C")
    )  # a copy: torch takes no field of a record


# What a rank tells rank 0 of the groups that it sampled: a record of a few numbers each, and what only sums count.


Records = npt.NDArray[np.void]  # one a group, as `record_type` has them
# Tokens of all segments, what is given among them; the numbers of segments and turns; the place of the status in
# EPISODE_STATUSES.
OF_EPISODES: list[tuple[str, type]] = [
    ("tokens", np.int32), ("segments", np.uint16), ("turns", np.uint16), ("status", np.uint8),
]  # fmt: skip


def record_type(num_rewards: int, group_size: int, are_episodes: bool = False) -> np.dtype[np.void]:
    """Bytes of a rollout: 13, 8 for each reward function, and 12 of its group's; 9 more of an episode."""
    of_completions: list[tuple[str, type]]
    of_completions = [
        ("completion_tokens", np.int32),
        ("truncated", np.bool_),
        ("rewards", np.float64),
    ]
    if are_episodes:
        of_completions += OF_EPISODES
    return np.dtype(
        [
            ("position", np.int64),  # of the prompt in the stream
            ("prompt_tokens", np.int32),
            *(
                (name, kind, (group_size,)) for name, kind in of_completions
            ),  # the weighted sums; NaN: unknown
            (
                "by_name",
                np.float64,
                (num_rewards, group_size),
            ),  # of each function; NaN: does not apply, or unusable
        ]
    )


@dataclass
class Tally:
    """What is counted of a step's completions, whoever scored them."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)  # by reward function
    retried: dict[str, Counter[str]] = field(
        default_factory=dict
    )  # groups that it was called for again, by reason
    logged: Logged = field(default_factory=dict)
    first_errors: list[str] = field(default_factory=list)
    calls_s: list[npt.NDArray[np.float32]] = field(
        default_factory=list
    )  # seconds of each call of an environment

    def add(self, other: Tally) -> None:
        for mine, others in ((self.statuses, other.statuses), (self.retried, other.retried)):
            for name, counts in others.items():
                of_name = mine.setdefault(name, Counter())
                for (
                    what,
                    number,
                ) in counts.items():  # Counter.update takes ten times as long, thousands of times
                    of_name[what] += number
        merge_logged(self.logged, other.logged)
        self.first_errors += other.first_errors
        self.calls_s += other.calls_s


def encode_facts(groups: Sequence[RolloutGroup], scored: ScoredRollouts, group_size: int) -> bytes:
    """Of one round's groups of a rank. None of them: no byte."""
    if not groups:
        return b""
    completions = [completion for group in groups for completion in group.completions]
    assert len(completions) == len(scored.rewards) == len(groups) * group_size, (
        len(completions),
        len(scored.rewards),
    )
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
        lengths = [
            sum(len(segment.token_ids) for segment in episode.segments) for episode in episodes
        ]
        alone = np.repeat(
            records["prompt_tokens"], group_size
        ).tolist()  # all that there is of a failed one
        records["tokens"] = np.reshape(
            [n or prompt for n, prompt in zip(lengths, alone, strict=True)], shape
        )
        records["segments"] = np.reshape([len(episode.segments) for episode in episodes], shape)
        records["turns"] = np.reshape([len(episode.turns) for episode in episodes], shape)
        records["status"] = np.reshape(
            [EPISODE_STATUSES.index(episode.status) for episode in episodes], shape
        )
        calls_s = [seconds for episode in episodes for seconds in episode.calls_s]
    logged = logged_in(scored.notes.values())
    pairs = [
        (reward, name, *pair)
        for reward, by_name in logged.items()
        for name, pair in by_name.items()
    ]
    retried: dict[str, Counter[str]] = {}
    for note in scored.notes.values():
        for name, how in note.get("retried", {}).items():
            retried.setdefault(name, Counter())[how] += 1
    counts = [len(groups), list(scored.by_name), scored.num_statuses(), retried]
    names = [(reward, name, len(sums), number) for reward, name, sums, number in pairs]
    sums = np.array([value for _, _, values, _ in pairs for value in values], np.float64)
    of_episodes = len(calls_s) if episodes else None
    return pack(
        [*counts, names, scored.first_error, of_episodes],
        [records, sums, np.array(calls_s, np.float32)],
    )


def decode_facts(
    payloads: Sequence[bytes], group_size: int
) -> tuple[Records, list[int], list[str], Tally]:
    """What `encode_facts` made: the records in rank order, and how many are of each; the names of the functions; and
    the sums."""
    records, num_groups, names, tally = list[Array](), [0] * len(payloads), list[str](), Tally()
    kind = record_type(0, group_size)
    for rank, payload in enumerate(payloads):
        if not payload:
            continue
        packed = PackedReader(payload)
        num_groups[rank], own_names, statuses, retried, metrics, first_error, num_calls = (
            packed.header
        )
        if not records:
            names, kind = own_names, record_type(len(own_names), group_size, num_calls is not None)
        assert own_names == names, (own_names, names)
        records.append(packed.array(np.uint8, num_groups[rank] * kind.itemsize))
        logged: dict[str, Any] = {}
        for reward, name, num_sums, number in metrics:
            logged.setdefault(reward, {})[name] = (
                packed.array(np.float64, num_sums).tolist(),
                number,
            )
        calls_s = [packed.array(np.float32, num_calls)] if num_calls else []
        assert not packed.rest(), (len(payload), num_groups[rank], names)
        tally.add(Tally(statuses, retried, logged, [first_error] if first_error else [], calls_s))
    # As bytes: np.concatenate compares the types of thousands of parts field by field.
    return np.frombuffer(b"".join(part.data for part in records), kind), num_groups, names, tally


def rollout_tokens(facts: Records) -> npt.NDArray[np.int64]:
    """[groups, G] Tokens of each rollout, those that are only context included."""
    if "tokens" in (facts.dtype.names or ()):
        return facts["tokens"].astype(np.int64)
    of_both: npt.NDArray[np.int64] = facts["prompt_tokens"][:, None] + facts[
        "completion_tokens"
    ].astype(np.int64)
    return of_both


# Each rank's share of what rank 0 decided, as bytes: its own rows, and what it must know of what it sampled.


_MOST_RANKS = 1 << 16  # a rank's number takes two bytes


def encode_shares(step: StepDecision) -> list[bytes]:
    """One for each rank. Bytes: 7 for each rollout that it sampled and 4 for each group, 4 for each rollout that it
    trains on and 4 for each row, and about 60."""
    assert len(step.num_groups) <= _MOST_RANKS, len(step.num_groups)
    trained_by, lengths = np.zeros(len(step.rewards), np.uint16), np.hstack(step.plan.lengths)
    trained_by[step.plan.ids] = _trainers(step)
    counts = len(step.rewards), step.num_tokens, step.num_sampled_tokens
    num_rows = [of_ranks.shape[1] for of_ranks in step.plan.lengths]
    header = pack(
        [*counts, step.num_loss_tokens, step.num_loss_sequences, num_rows]
    )  # of all ranks
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
    share = PackedReader(payload)
    num_rollouts, num_tokens, num_sampled_tokens, num_loss_tokens, num_loss_sequences, num_rows = (
        share.header
    )
    slots = share.array(np.int32, len(groups))
    ids = sampled_ids(slots, group_size)
    columns = (share.array(kind, len(ids)).tolist() for kind in (np.uint16, np.float32, np.bool_))
    trained_by, advantages, in_loss = (
        dict(zip(ids.tolist(), values, strict=True)) for values in columns
    )
    lengths = share.array(np.int32, sum(num_rows)).tolist()
    trained, of_rows = iter(share.array(np.int32, sum(lengths)).tolist()), iter(lengths)
    assert not share.rest(), (len(payload), len(groups), num_rows)
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
            [[next(trained) for _ in range(next(of_rows))] for _ in range(number)]
            for number in num_rows
        ],
        num_rollouts=num_rollouts,
        num_loss_tokens=num_loss_tokens,
        num_loss_sequences=num_loss_sequences,
        num_tokens=num_tokens,
        num_sampled_tokens=num_sampled_tokens,
        rank0_decision=of_all,
    )


def sampled_ids(slots: npt.NDArray[np.int32], group_size: int) -> npt.NDArray[np.int32]:
    """Of the rollouts that are trained on, whoever does, of groups with these slots."""
    used = slots[slots >= 0]
    return (used[:, None] * group_size + np.arange(group_size, dtype=np.int32)).ravel()


def of_sampled(step: StepDecision, values: Array) -> tuple[Array, Array]:
    """Of `values` [B] those of what ranks sampled, in their order, rank behind rank; and how many are each's."""
    group_size, ranks = (
        len(step.rewards) // max(len(step.positions), 1),
        np.arange(len(step.num_groups)),
    )
    used = np.repeat(ranks, step.num_groups)[step.slots >= 0]
    return values[sampled_ids(step.slots, group_size)], np.bincount(
        used, minlength=len(ranks)
    ) * group_size


def of_trained(step: StepDecision) -> tuple[npt.NDArray[np.int32], Array]:
    """The ids of what ranks train on, in the order of their rows, rank behind rank; and how many are each's."""
    trainers = _trainers(step)
    return step.plan.ids[np.argsort(trainers, kind="stable")], np.bincount(
        trainers, minlength=len(step.num_groups)
    )


def cut(values: Array, counts: Array) -> list[bytes]:
    """Each rank's of `values`, of which `counts` says how many they are."""
    data, ends = values.tobytes(), np.cumsum(counts) * values.itemsize
    return [data[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


def _trainers(step: StepDecision) -> npt.NDArray[np.uint16]:
    """The rank that trains on each of the plan's ids."""
    ranks = np.arange(len(step.num_groups), dtype=np.uint16)
    return np.concatenate([np.repeat(ranks, lengths.sum(axis=1)) for lengths in step.plan.lengths])


# What rank 0 finds in a step's episodes: how they ended, and whether their environments work. Pure.


def statuses_of(facts: Records) -> npt.NDArray[np.int64] | None:
    """[len(EPISODE_STATUSES)] How many rollouts ended in each; None where they are no episodes."""
    if "status" not in (facts.dtype.names or ()):
        return None
    return np.bincount(facts["status"].ravel(), minlength=len(EPISODE_STATUSES))


def check_environment_errors(
    facts: Records, first_errors: Sequence[str], max_error_frac: float
) -> None:
    """Raises RewardError where environments failed, twice each, for `max_error_frac` of the episodes of a round."""
    if (counts := statuses_of(facts)) is None:
        return
    failed = {status: int(counts[EPISODE_STATUSES.index(status)]) for status in FAILED_STATUSES}
    num_failed, num_episodes = sum(failed.values()), int(counts.sum())
    if num_failed and num_failed / num_episodes >= max_error_frac:
        how = ", ".join(f"{number} {status}" for status, number in failed.items())
        first = next(
            (error for error in first_errors if error.startswith("environment")), "not recorded"
        )
        raise RewardError(
            f"the environment failed in {num_failed} of {num_episodes} episodes ({how}), each tried twice: "
            f"{num_failed / num_episodes:.3g} is not under reward_pool.max_error_frac={max_error_frac:g}. "
            f"The first failure:\n{first}"
        )


def episode_metrics(
    facts: Records, calls_s: Sequence[npt.NDArray[np.float32]]
) -> dict[str, float | None]:
    """`episode/...` and `environment/...`; none where rollouts are no episodes."""
    if (counts := statuses_of(facts)) is None:
        return {}
    num_episodes = int(counts.sum())
    metrics: dict[str, float | None] = {
        f"episode/{name}_mean": int(facts[name].sum(dtype=np.int64)) / num_episodes
        for name in ("turns", "segments")
    }
    metrics |= {
        f"episode/{name}_frac": int(n) / num_episodes
        for name, n in zip(EPISODE_STATUSES, counts, strict=True)
    }
    given = facts["tokens"].astype(np.int64) - facts["completion_tokens"]
    metrics["episode/given_tokens_mean"] = int(given.sum()) / num_episodes
    seconds = np.concatenate([*calls_s, np.empty(0, np.float32)])
    for percentile in (50, 95):
        value = float(np.percentile(seconds, percentile)) if len(seconds) else None
        metrics[f"environment/call_s_p{percentile}"] = value
    return metrics
