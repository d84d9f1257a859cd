"""What ranks tell rank 0 and what it answers, through the bytes, beside a plain computation from
the same groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.speed.rank0 import memory, simulated_step
from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.learn.advantages import compute_advantages
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.learn.sampled_step import (
    StepRules,
    _Rank0Step,
)
from grpo_spmd.learn.step_messages import (
    decode_decision,
    decode_groups,
    encode_decisions,
    encode_groups,
)
from grpo_spmd.proofs.batch_check import find_misplaced
from grpo_spmd.records import (
    Completion,
    Decision,
    Prompt,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
)

G, LONGEST, BUFFER = 4, 20, 8
RATIO = 0.003
NAMES = ("first", "second")
Scored = tuple[RolloutGroup, ScoredRollouts]  # of one group


def _made_up(position: int, rng: random.Random) -> Scored:
    completions, scored = (
        [],
        ScoredRollouts(by_name={n: [] for n in NAMES}, statuses={n: [] for n in NAMES}),
    )
    for _ in range(G):
        length = rng.choice([0, 3, rng.randint(1, LONGEST), LONGEST])
        completions.append(
            Completion([1] * length, [-1.0] * length, "length" if length == LONGEST else "stop")
        )
        values = [rng.choice([None, math.nan, 0.0, -0.0, 1.0, rng.gauss(0, 1)]) for _ in NAMES]
        for name, value in zip(NAMES, values, strict=True):
            scored.by_name[name].append(value)
            unusable = value is not None and math.isnan(value)
            scored.statuses[name].append(
                "not_applicable" if value is None else "timeout" if unusable else "ok"
            )
        total = sum(value for value in values if value is not None)
        scored.rewards.append(total if values != [None, None] and math.isfinite(total) else None)
    if rng.random() < 0.3:
        scored.notes = {
            2: {
                "logged": {"second": {"worth": [rng.gauss(0, 1e3), 3]}},
                "extra": {"second": {"a": 1}},
            }
        }
        scored.notes[0] = {"retried": {"first": "error"}}
    group = RolloutGroup(0, Prompt(position, 0, [1] * rng.randint(1, 9), "", {}), completions)
    return group, scored


def _on_rank(local: list[Scored]) -> tuple[list[RolloutGroup], ScoredRollouts]:
    scored = ScoredRollouts()
    for _, group_values in local:
        scored.extend(group_values)
    return [group for group, _ in local], scored


def _bits(values: Any) -> bytes:
    return np.asarray(list(values), np.float64).tobytes()


def _decided(
    seed: int,
) -> tuple[StepDecision, list[Decision], list[list[Scored]], list[Scored], StepRules]:
    """The whole decision, each rank's, and the groups as the ranks have them and in the order of
    the stream."""
    rng = random.Random(seed)
    num_groups, num_ranks = rng.randint(3, 25), rng.choice([1, 2, 5, 40])
    rank_values: list[list[Scored]] = [[] for _ in range(num_ranks)]
    created = [_made_up(position, rng) for position in range(num_groups)]
    for item in rng.sample(created, num_groups):
        rng.choice(rank_values).append(item)
    rules = StepRules(
        RolloutConfig(num_prompts_per_step=num_groups, group_size=G, max_completion_tokens=LONGEST),
        AdvantageConfig(overlong_buffer_tokens=BUFFER, overlong_penalty=0.3),
        LossConfig(mask_truncated=seed % 2 == 0),
        TrainingConfig(num_mini_batches=2, max_tokens_per_micro_batch=64),
        max_error_frac=1.1,
        num_ranks=num_ranks,
        attention_cost_ratio=RATIO,
    )
    rank0_step = _Rank0Step(rules)
    assert (
        rank0_step.add_round(
            [encode_groups(*_on_rank(local), G) for local in rank_values], num_groups
        )
        == 0
    )
    step = rank0_step.decide()
    shares = encode_decisions(step)
    return step, [
        decode_decision(fraction, _on_rank(local)[0], G, None) for fraction, local in zip(shares, rank_values, strict=True)  # noqa: E501
    ], rank_values, created, rules  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_a_decision_is_to_the_bit_that_of_plain_lists(seed: int) -> None:
    step, _, _, created, rules = _decided(seed)
    lengths = [len(c.token_ids) for group, _ in created for c in group.completions]
    rewards = [
        math.nan if reward is None else reward for _, scored in created for reward in scored.rewards
    ]
    lost = [0.3 * min(max((n - (LONGEST - BUFFER)) / BUFFER, 0.0), 1.0) for n in lengths]
    shorter = [reward - penalty for reward, penalty in zip(rewards, lost, strict=True)]
    advantages, _ = compute_advantages(
        torch.tensor(shorter, dtype=torch.float64).view(-1, G), "grpo", "group"
    )
    in_loss = [
        not math.isnan(reward) and not (rules.loss.mask_truncated and n == LONGEST)
        for reward, n in zip(rewards, lengths, strict=True)
    ]
    tokens = [
        len(group.prompt.token_ids) + len(c.token_ids)
        for group, _ in created
        for c in group.completions
    ]
    half = G * -(-len(created) // 2)
    costs = [n + RATIO * n * n for n in tokens]
    plan = plan_batch(
        tokens,
        num_ranks=rules.num_ranks,
        mini_batch_sizes=[half, len(tokens) - half],
        max_tokens=64,
        costs=costs,
    )
    assert step.positions.tolist() == [group.prompt.position for group, _ in created]
    assert _bits(step.rewards) == _bits(shorter)
    assert _bits(step.advantages) == _bits(advantages.flatten())
    assert (step.in_loss.tolist(), list(step.plan)) == (in_loss, list(plan))
    counted = [n if counts else 0 for n, counts in zip(lengths, in_loss, strict=True)]
    assert step.num_loss_tokens == [sum(counted[:half]), sum(counted[half:])]
    assert step.num_loss_sequences == [
        sum(n > 0 for n in piece) for piece in (counted[:half], counted[half:])
    ]
    assert (step.num_tokens, step.num_sampled_tokens) == (sum(tokens), sum(lengths))


@pytest.mark.parametrize("seed", range(12))
def test_metrics_are_to_the_bit_those_of_plain_lists(seed: int) -> None:
    step, _, _, created, _ = _decided(seed)
    lengths = [len(c.token_ids) for group, _ in created for c in group.completions]
    expected_names = [
        reward for _, scored in created for reward in scored.rewards if reward is not None
    ]
    lost = [0.3 * min(max((n - (LONGEST - BUFFER)) / BUFFER, 0.0), 1.0) for n in lengths]
    size, result = len(lengths), step.metrics
    expected: dict[str, Any] = {
        "reward/mean": float(torch.tensor(expected_names, dtype=torch.float64).mean()),
        "reward/unscored_frac": float(
            torch.tensor([len(expected_names) < n for n in range(1, size + 1)]).double().mean()
        ),
        "reward/overlong_penalty_mean": sum(lost) / size,
        "completion/tokens_mean": sum(lengths) / size,
        "completion/tokens_p50": float(np.percentile(lengths, 50)),
        "completion/tokens_p95": float(np.percentile(lengths, 95)),
        "completion/tokens_max": max(lengths),
        "completion/truncated_frac": lengths.count(LONGEST) / size,
    }
    pairs = [
        note["logged"]["second"]["worth"]
        for _, s in created
        for note in s.notes.values()
        if "logged" in note
    ]
    if pairs:
        expected["reward/second/worth"] = math.fsum(value for value, _ in pairs) / sum(
            n for _, n in pairs
        )
    expected["reward/first/retried_frac"] = sum(bool(scored.notes) for _, scored in created) / len(
        created
    )
    for name in NAMES:
        values = [
            v
            for _, scored in created
            for v in scored.by_name[name]
            if v is not None and not math.isnan(v)
        ]
        expected[f"reward/{name}/mean"] = float(torch.tensor(values, dtype=torch.float64).mean())
        statuses = Counter(status for _, scored in created for status in scored.statuses[name])
        expected |= {
            f"reward/{name}/{s}_frac": statuses[s] / size
            for s in ("error", "timeout", "not_applicable")
        }
    assert {name: result[name] for name in expected} == expected
    assert {name: type(result[name]) for name in expected} == {
        name: type(value) for name, value in expected.items()
    }


@pytest.mark.parametrize("seed", range(12))
def test_each_rank_gets_what_is_its_own(seed: int) -> None:
    step, decisions, rank_values, _, _ = _decided(seed)
    trained_by = {
        i: rank
        for ranks in step.plan
        for rank, rows in enumerate(ranks)
        for row in rows
        for i in row
    }
    for rank, (decision, local) in enumerate(zip(decisions, rank_values, strict=True)):
        assert decision.slots == {
            group.prompt.position: group.prompt.position for group, _ in local
        }  # all stay
        ids = [group.prompt.position * G + sample for group, _ in local for sample in range(G)]
        assert (
            list(decision.advantages) == list(decision.in_loss) == list(decision.trained_by) == ids
        )
        assert _bits(decision.advantages.values()) == _bits(step.advantages[ids])
        assert list(decision.in_loss.values()) == step.in_loss[ids].tolist()
        assert decision.trained_by == {i: trained_by[i] for i in ids}
        assert decision.rows == [ranks[rank] for ranks in step.plan]
        assert decision.num_rollouts == len(step.rewards)
        for name in ("num_loss_tokens", "num_loss_sequences", "num_tokens", "num_sampled_tokens"):
            assert getattr(decision, name) == getattr(step, name)
        assert decision.metrics == {}
    assert sorted(i for decision in decisions for i in decision.advantages) == list(
        range(len(step.rewards))
    )


def test_a_group_sampled_twice_and_another_not_at_all_is_seen() -> None:
    rng = random.Random(0)
    groups = [_made_up(position, rng) for position in (0, 1, 1)]
    rollout = RolloutConfig(num_prompts_per_step=3, group_size=G, max_completion_tokens=LONGEST)
    rank0_step = _Rank0Step(
        StepRules(rollout, AdvantageConfig(), LossConfig(), TrainingConfig(), 1.1, num_ranks=2)
    )
    with pytest.raises(AssertionError, match="a group was sampled twice"):
        rank0_step.add_round(
            [encode_groups(*_on_rank(groups[:2]), G), encode_groups(*_on_rank(groups[2:]), G)], 3
        )


def test_a_rank_without_groups_sends_nothing_and_ranks_must_name_their_rewards_alike() -> None:
    rng = random.Random(0)
    facts = encode_groups(*_on_rank([_made_up(0, rng)]), G)
    assert encode_groups([], ScoredRollouts(), G) == b""
    sampled = decode_groups([b"", facts, b""], G)
    assert len(sampled.rows) == 1
    assert (sampled.num_groups, sampled.reward_names) == ([0, 1, 0], list(NAMES))
    group, scored = _made_up(1, rng)
    scored.by_name = dict(reversed(scored.by_name.items()))
    with pytest.raises(AssertionError, match="second"):
        decode_groups([facts, encode_groups([group], scored, G)], G)


@pytest.mark.parametrize(("num_rollouts", "num_ranks"), [(1_000, 8), (10_000, 64), (10_000, 1_024)])
def test_bytes_of_a_rollout_are_bounded(num_rollouts: int, num_ranks: int) -> None:
    """With two rewards that are real numbers: at most 64 to rank 0 and 16 from it, beside about 70
    for each rank."""
    facts, rules = simulated_step(num_rollouts, num_ranks)
    rank0_step = _Rank0Step(rules)
    rank0_step.add_round(facts, num_rollouts // rules.rollout.group_size)
    shares = encode_decisions(rank0_step.decide())
    assert sum(map(len, facts)) <= 64 * num_rollouts
    assert sum(map(len, shares)) <= 16 * num_rollouts + 90 * num_ranks
    # Each gets its own and no more: nobody is sent what grows with the step.
    assert max(map(len, shares)) <= 90 + 3 * 16 * num_rollouts / num_ranks + 16 * 8 * 2


def test_what_rank0_holds_of_a_step_is_a_few_bytes_a_rollout() -> None:
    facts, rules = simulated_step(20_000, 64)
    retained, peak = memory(facts, rules)
    # A reward of 8, an advantage of 4, a mask of 1, an id of 4; of a group of 8 twice its position
    # and its slot: 2.5.
    assert 19.5 < retained < 30
    assert (
        peak < 160
    )  # before, rollouts were tuples of Python's numbers while they were planned: 365


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_reads_as_the_nested_lists_that_it_is(seed: int) -> None:
    step, *_ = _decided(seed)
    ids = [i for mini_batch in step.plan for rank in mini_batch for row in rank for i in row]
    assert ids == step.plan.ids.tolist()
    assert sorted(ids) == list(range(len(step.rewards)))
    assert len(list(step.plan)) == 2
    with pytest.raises(IndexError):
        step.plan[2]


def _told(
    sampled: list[tuple[int, int, float]],
    trained: list[tuple[int, int]],
    dropped: list[int],
    num_groups: int = 2,
) -> list[str]:
    """What rank 0 finds wrong, of a step of rollouts 0 to 3, when two ranks say this. `num_groups`
    1: they share their rows."""
    none: Any = np.zeros(0)
    plan = plan_batch([1] * 4, num_ranks=num_groups, mini_batch_sizes=[4], max_tokens=4)
    rewards = np.array([0.1, math.nan, 2.0, 3.0])
    everything = StepDecision(
        np.array([5, 7]), rewards, none, none, plan, none, none, [], [], 0, 0, {}
    )
    pieces = [
        [sampled[:1], trained[:3], dropped],
        [sampled[1:], trained[3:], []],
    ]
    return find_misplaced(pieces, everything, 2)


def test_what_two_ranks_say_of_a_decision_by_hand() -> None:
    sampled = [(2, 2**32 - 1, 2.0), (0, 11, 0.1), (3, 13, 3.0), (1, 12, math.nan)]
    trained = [(i, name) for i, name, _ in sampled]
    assert _told(sampled, trained, []) == []
    assert _told(sampled, trained, [8]) == []  # a surplus group: 5 and 7 are as many as were wanted
    assert _told(sampled, trained, [6]) == ["the group at position 6 is not trained on"]
    second = [(2, 2**32 - 1, 2.5), *sampled[1:]]
    assert _told(second, trained, []) == ["rollout 2 has the reward 2, not 2.5"]
    assert _told(sampled[:3], trained, []) == ["not each rollout of the step was sampled once"]
    assert _told(sampled, trained[:3], []) == ["rollouts [1] are not trained on"]
    assert _told(sampled, [*trained, trained[0]], []) == ["rollouts [2] are trained on twice"]
    assert _told(sampled, [*trained[:3], (1, -1)], []) == [
        "rollouts [1] are trained on with other tokens, logprobs or advantages"
    ]


def test_what_two_ranks_that_share_rows_say_by_hand() -> None:
    sampled = [(2, 14, 2.0), (0, 11, 0.1), (3, 13, 3.0), (1, 12, math.nan)]
    trained = [(i, name) for i, name, _ in sampled] * 2
    assert _told(sampled, trained, [], num_groups=1) == []
    # One of the two has none of rollout 1, or another.
    assert _told(sampled, trained[:-1], [], num_groups=1) == ["rollouts [1] are not trained on"]
    assert _told(sampled, [(2, 99), *trained[1:]], [], num_groups=1) == [
        "rollouts [2] are trained on with other tokens, logprobs or advantages"
    ]


def test_ranks_that_share_rows_get_the_same_ones() -> None:
    """Of 4 ranks two share each row: rank 0 plans for two, and a rollout goes to the first of its
    ranks, 0 or 2."""
    facts, rules = simulated_step(64, 4)
    rank0_step = _Rank0Step(replace(rules, sequence_ranks=2))
    rank0_step.add_round(facts, 64 // rules.rollout.group_size)
    step = rank0_step.decide()
    assert all(len(mini_batch) == 2 for mini_batch in step.plan)
    groups: list[Any] = [[], [], [], []]
    slots = np.split(step.slots, np.cumsum(step.num_groups)[:-1])
    for number, local in enumerate(slots):
        groups[number] = [
            RolloutGroup(0, Prompt(int(slot), 0, [], "", {}), []) for slot in local.tolist()
        ]
    size = rules.rollout.group_size
    decisions = [
        decode_decision(message, local, size, None)
        for message, local in zip(encode_decisions(step), groups, strict=True)
    ]
    for rank, decision in enumerate(decisions):
        assert decision.rows == [mini_batch[rank // 2] for mini_batch in step.plan]
        for i, trainer in decision.trained_by.items():
            assert trainer in (0, 2)
            assert any(i in row for rows in decisions[trainer].rows for row in rows)
    ids = [i for decision in decisions for i in decision.trained_by]
    assert sorted(ids) == list(range(64))
