"""Episodes on their way to the update: what is trained on is what was sampled, and it is scored in
its own context."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_spmd.config.schema import (
    AdvantageConfig,
    LossConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.advantages import credited_tokens, returns_to_go, turn_advantages
from grpo_spmd.learn.assemble import (
    decode_rollouts,
    encode_rollouts,
    episode_rollout,
    pack_rollouts,
)
from grpo_spmd.learn.contexts import rollout_contexts
from grpo_spmd.learn.sampled_step import (
    SampledStep,
    StepRules,
    _Rank0Step,
    check_environment_errors,
    episode_metrics,
)
from grpo_spmd.learn.step_messages import (
    decode_decision,
    decode_groups,
    encode_decisions,
    encode_groups,
)
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import (
    EPISODE_STATUSES,
    Completion,
    Episode,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredRollouts,
    Segment,
    Turn,
)
from grpo_spmd.rewards.protocol import RewardError
from tests.support.models import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def segment(*pieces: tuple[list[int], bool]) -> Segment:
    ids = [token for tokens, _ in pieces for token in tokens]
    sampled = [is_sampled for tokens, is_sampled in pieces for _ in tokens]
    return Segment(np.array(ids, np.int32), np.array(sampled, np.bool_))


GIVEN, SAID = False, True
FIRST = segment(([1, 2, 3], GIVEN), ([4, 5], SAID), ([6], GIVEN), ([7], SAID))
FORK = segment(([1, 2, 9, 9], GIVEN), ([8, 8, 8], SAID))


def test_segments_are_sequences_of_one_rollout_by_hand() -> None:
    episode = episode_rollout(
        5, 2.0, True, (FIRST, FORK), np.array([-1, -2, -3, -4, -5, -6], np.float32)
    )
    plain = Rollout(6, -1.0, True, [10, 11], [12], [-7.0])
    batch = pack_rollouts([episode, plain], CPU)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 9, 9, 8, 8, 8, 10, 11, 12]
    assert batch.sequence_lengths == [7, 7, 3]
    assert batch.position_ids.tolist() == [*range(7), *range(7), *range(3)]
    assert batch.target_ids.tolist() == [4, 5, 7, 8, 8, 8, 12]
    assert batch.predict_index.tolist() == [2, 3, 5, 10, 11, 12, 15]
    assert batch.sequence_index.tolist() == [0] * 6 + [1]
    assert batch.rollout_ids == [5, 6]
    assert batch.rollout_logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert batch.advantages.tolist() == [2.0] * 6 + [-1.0]
    assert (episode.prompt_ids.tolist(), episode.num_tokens) == ([1, 2, 3], 14)  # type: ignore[union-attr]


def test_a_sequence_that_begins_with_a_sampled_token_is_refused() -> None:
    """The token before it is another sequence's, which would be trained to predict it."""
    odd = episode_rollout(0, 1.0, True, (segment(([4], SAID), ([5], GIVEN)),), [0.0])
    with pytest.raises(AssertionError, match="nothing to predict it"):
        pack_rollouts([odd], CPU)


def random_episode(rng: random.Random, max_length: int = 60) -> tuple[Segment, ...]:
    segments = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        pieces = [([rng.randrange(1, 97) for _ in range(rng.randint(1, 12))], GIVEN)]
        for _ in range(rng.randint(1, 4)):
            pieces.append(
                ([rng.randrange(1, 97) for _ in range(rng.choice([0, 1, 1, 2, 7]))], SAID)
            )
            pieces.append(
                ([rng.randrange(1, 97) for _ in range(rng.choice([0, 0, 1, 3, 9]))], GIVEN)
            )
        cut = max_length - sum(len(tokens) for tokens, _ in pieces)
        segments.append(segment(*pieces[: cut or None]))
    return tuple(segments)


def random_rollout(number: int, rng: random.Random) -> Rollout:
    if rng.random() < 0.2:
        ids = [rng.randrange(1, 97) for _ in range(9)]
        return Rollout(number, 0.5, True, ids[:4], ids[4:], [-0.5] * 5)
    segments = random_episode(rng)
    count = sum(int(single.sampled.sum()) for single in segments)
    advantages: float | np.ndarray = (
        rng.random() if rng.random() < 0.5 else np.array([rng.random() for _ in range(count)])
    )
    logprobs = np.array([rng.gauss(-1, 1) for _ in range(count)], np.float32)
    return episode_rollout(number, advantages, rng.random() < 0.5, segments, logprobs)


def test_ten_thousand_episodes_cross_ranks_and_are_packed_with_exact_masks() -> None:
    """Against plain lists: the sampled tokens of each segment are the targets, in order, behind
    their own prefix."""
    rng = random.Random(0)
    for begin in range(0, 10_000, 20):
        rollouts = [random_rollout(begin + i, rng) for i in range(20)]
        crossed = decode_rollouts(encode_rollouts(rollouts))
        for ours, theirs in zip(rollouts, crossed, strict=True):
            for single, second in zip(rollout_contexts([ours]), theirs.segments, strict=True):
                assert np.array_equal(single.token_ids, second.token_ids)
                assert np.array_equal(single.sampled, second.sampled)
            for name in ("prompt_ids", "completion_ids", "rollout_logprobs", "advantages"):
                assert np.array_equal(
                    np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name))
                ), name
        batch = pack_rollouts(crossed, CPU)
        targets, contexts, owners = [], [], []
        for rollout in rollouts:
            pairs = [
                (single.token_ids.tolist(), single.sampled.tolist()) for single in rollout.segments
            ] or [([*rollout.prompt_ids, *rollout.completion_ids], [False] * 4 + [True] * 5)]
            for ids, sampled in pairs:
                for position, is_sampled in enumerate(sampled):
                    if is_sampled:
                        targets.append(ids[position])
                        contexts.append(ids[:position])
                        owners.append(rollout.rollout_id)
        assert batch.target_ids.tolist() == targets
        assert [batch.rollout_ids[i] for i in batch.sequence_index.tolist()] == owners
        ids, positions = batch.input_ids.tolist(), batch.position_ids.tolist()
        for position, context in zip(batch.predict_index.tolist(), contexts, strict=True):
            assert ids[position - positions[position] : position + 1] == context


def test_sampled_tokens_are_scored_as_plain_transformers_does_over_the_whole_conversation(
    tmp_path: Path, session: Session
) -> None:
    """In float32, with forks, several turns and given tokens in between: also the gradient of what
    is sampled alone."""
    folder = make_model(tmp_path, "qwen3", tied=True)
    policy = build_policy(ModelConfig(path=str(folder), dtype="float32"), 1.0, session)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    rng, worst = random.Random(1), 0.0
    for _ in range(12):
        rollouts = [random_rollout(i, rng) for i in range(10)]
        batch = pack_rollouts(rollouts, CPU)
        with torch.no_grad():
            ours, _ = policy(batch)
            expected = []
            for rollout in rollouts:
                pairs = [
                    (single.token_ids.tolist(), single.sampled) for single in rollout.segments
                ] or [
                    (
                        [*rollout.prompt_ids, *rollout.completion_ids],
                        np.array([False] * 4 + [True] * 5),
                    )
                ]
                for ids, sampled in pairs:
                    log_p = plain(torch.tensor([ids])).logits[0].double().log_softmax(-1)
                    expected += [
                        log_p[position - 1, ids[position]].item()
                        for position in np.flatnonzero(sampled)
                    ]
        worst = max(worst, (ours.double() - torch.tensor(expected)).abs().max().item())
    assert worst < 1e-5, worst


def episode(status: str, segments: tuple[Segment, ...], num_turns: int = 2) -> Completion:
    sampled = [int(token) for single in segments for token in single.token_ids[single.sampled]]
    turns = tuple(Turn(1, "stop") for _ in range(num_turns))
    error = "environment (row 0, sample 0): raised" if not segments else None
    record = Episode(status, segments, turns, [], {}, [0.1, 0.3], error)
    return Completion(
        sampled, [-1.0] * len(sampled), "length" if status == "truncated" else "stop", record
    )


def step_of(
    completions: list[list[Completion]], rewards: list[float | None]
) -> tuple[list[RolloutGroup], ScoredRollouts]:
    groups = [
        RolloutGroup(i, Prompt(i, i, [1, 2], "p", {}), group_values)
        for i, group_values in enumerate(completions)
    ]
    scored = ScoredRollouts(
        rewards=rewards, by_name={"r": rewards}, statuses={"r": ["ok"] * len(rewards)}
    )
    return groups, scored


def test_what_rank0_is_told_of_episodes_by_hand() -> None:
    failed = Completion(
        [], [], "stop", Episode("env_error", (), (), [], {}, [0.2], "environment (row 1): raised")
    )
    groups, scored = step_of(
        [
            [episode("ok", (FIRST, FORK)), episode("truncated", (FIRST,), 1)],
            [failed, episode("ok", (FORK,), 3)],
        ],
        [1.0, 0.0, None, 0.5],
    )
    payload = encode_groups(groups, scored, 2)
    sampled = decode_groups([b"", payload], 2)
    facts = sampled.rows
    assert (sampled.num_groups, sampled.reward_names) == ([0, 2], ["r"])
    assert facts["tokens"].tolist() == [
        [14, 7],
        [2, 7],
    ]  # the failed one has its prompt alone
    assert facts["completion_tokens"].tolist() == [[6, 3], [0, 3]]
    metrics = episode_metrics(facts, sampled.counts.calls_s, {}, num_ranks=2)
    expected = {
        "episode/turns_mean": 1.5,
        "episode/segments_mean": 1.0,
        "episode/given_tokens_mean": (8 + 4 + 2 + 4) / 4,
        "episode/ok_frac": 0.5,
        "episode/truncated_frac": 0.25,
        "episode/env_error_frac": 0.25,
        "environment/call_s_p50": 0.2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert {name for name in metrics if name.endswith("_frac")} == {
        f"episode/{name}_frac" for name in EPISODE_STATUSES
    }
    plain = encode_groups(*step_of([[Completion([1], [0.0], "stop")]], [1.0]), 1)
    assert episode_metrics(decode_groups([plain], 1).rows, [], {}, num_ranks=1) == {}


def test_environments_that_fail_too_often_stop_the_run_and_are_never_a_reward_of_zero(
    session: Session,
) -> None:
    failed = Completion(
        [], [], "stop", Episode("env_timeout", (), (), [], {}, [], "environment (row 1): hung")
    )
    good = [episode("ok", (FIRST,)), episode("ok", (FORK,)), episode("ok", (FIRST,))]
    groups, scored = step_of([[*good, failed]], [1.0, 0.0, 0.5, None])
    sampled = decode_groups([encode_groups(groups, ScoredRollouts(**vars(scored)), 4)], 4)
    check_environment_errors(sampled.rows, sampled.counts.first_errors, 0.3)
    scored.first_error = "environment (row 1): hung"
    sampled = decode_groups([encode_groups(groups, scored, 4)], 4)
    with pytest.raises(
        RewardError, match=r"hung; the environment failed in 1 of 4 episodes \(0 env_error, 1"
    ):
        check_environment_errors(sampled.rows, sampled.counts.first_errors, 0.25)
    sizes = RolloutConfig(num_prompts_per_step=1, group_size=4)
    step = SampledStep(
        StepRules(
            sizes, AdvantageConfig(normalize_std="none"), LossConfig(), TrainingConfig(), 0.3, 1
        )
    )
    step.add(groups, scored)
    decision = step.decide()
    assert [decision.in_loss[i] for i in range(4)] == [True, True, True, False]
    assert [decision.advantages[i] for i in range(4)] == pytest.approx(
        [0.5, -0.5, 0.0, 0.0]
    )  # the mean is of three
    assert decision.num_tokens == 7 + 7 + 7 + 2
    assert not math.isnan(decision.metrics["reward/mean"] or math.nan)


def played(*rewards: float | None) -> Episode:
    turns = tuple(Turn(2, "stop", reward) for reward in rewards)
    return Episode("ok", (), turns, [], {}, [])


def test_turns_are_credited_with_what_comes_of_them_by_hand() -> None:
    """Discount 0.5. Returns to go: (1 + 0.5 * 2, 2), (0, 0 of a turn that never came), (4, 0);
    whole ones 2, 0, 4."""
    episodes = [played(1.0, 2.0), played(None), played(4.0), None]
    rewards = [2.0, 0.0, 4.0, None]
    mean, scale = 2.0, 2.0  # of the three that are known
    advantages = [(r - mean) / scale if r is not None else 0.0 for r in rewards]
    initial, second, third, failed = turn_advantages(advantages, rewards, episodes, 0.5)
    # Of the second turn: returns 2, 0 and 0, whose mean is 2/3.
    assert np.asarray(initial).tolist() == pytest.approx(
        [0.0, 0.0, (2 - 2 / 3) / 2, (2 - 2 / 3) / 2]
    )
    assert np.asarray(second).tolist() == pytest.approx([-1.0, -1.0])
    assert np.asarray(third).tolist() == pytest.approx([1.0, 1.0])
    assert failed == 0.0
    assert returns_to_go(played(1.0, None, 4.0), 0.5) == [2.0, 2.0, 4.0]


def test_reinforce_pp_credits_turns_also_where_all_rewards_of_a_group_are_alike() -> None:
    """The step's rewards are 1, 1 and 0, 2: mean 1, deviation sqrt(2 / 3). The first group's turns
    earned 1 at different times. In its second turn the returns are 0 and 1, which are 1 and 0 less
    than the whole; around their mean -1/2 and 1/2."""
    episodes = [[played(1.0, 0.0), played(0.0, 1.0)], [played(0.0, 0.0), played(0.0, 2.0)]]
    rewards: list[list[float | None]] = [[1.0, 1.0], [0.0, 2.0]]
    groups = [
        RolloutGroup(
            0,
            Prompt(slot, slot, [1], "x", {}),
            [Completion([7] * 4, [-1.0] * 4, "stop", e) for e in episodes[slot]],
        )
        for slot in range(2)
    ]
    step = _Rank0Step(
        StepRules(
            RolloutConfig(num_prompts_per_step=2, group_size=2),
            AdvantageConfig(estimator="reinforce_pp"),
            LossConfig(),
            TrainingConfig(),
            0.3,
            num_ranks=1,
            discount=1.0,
        )
    )
    values = [value for group in rewards for value in group]
    scored = ScoredRollouts(values, {"environment": values}, {"environment": ["ok"] * 4})
    step.add_round([encode_groups(groups, scored, 2)], 2)
    (share,) = encode_decisions(step.decide())
    decision = decode_decision(share, groups, 2, None)
    deviation = (2 / 3) ** 0.5
    credits: list[Any] = [
        credited_tokens(
            [decision.advantages[i] for i in decision.rollout_ids(group)],
            rewards[slot],
            group.completions,
            discount=1.0,
            estimator="reinforce_pp",
            slope=decision.advantage_slope,
        )
        for slot, group in enumerate(groups)
    ]
    half = 0.5 / deviation
    expected = [[[0, 0, -half, -half], [0, 0, half, half]], [[-2 * half] * 4, [2 * half] * 4]]
    np.testing.assert_allclose(credits, expected, rtol=1e-5)


def test_without_a_discount_to_speak_of_or_a_spread_turns_are_credited_as_their_episode() -> None:
    equal = turn_advantages([0.0, 0.0], [1.0, 1.0], [played(1.0, 0.0), played(0.0, 1.0)], 1.0)
    assert [np.asarray(single).tolist() for single in equal] == [[0.0] * 4] * 2
    # Rewards at the end alone, undiscounted: every turn of an episode has the whole of them before
    # it.
    same = turn_advantages([-1.0, 1.0], [0.0, 2.0], [played(None, 0.0), played(None, 2.0)], 1.0)
    assert [np.asarray(single).tolist() for single in same] == [[-1.0] * 4, [1.0] * 4]
