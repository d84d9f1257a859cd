"""Which rewards make a completion's reward, and that the running proof works them out by itself."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_spmd.config.schema import (
    AdvantageConfig,
    EnvironmentConfig,
    LossConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.learn.sampled_step import StepRules, _Rank0Step
from grpo_spmd.learn.step_messages import encode_groups
from grpo_spmd.proofs.batch_check import BatchCheck
from grpo_spmd.records import (
    Completion,
    Episode,
    Prompt,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
    Turn,
)
from grpo_spmd.rewards.protocol import RewardError, check_error_rate, watched_rewards
from grpo_spmd.rewards.scorers import sum_rewards

NAN = math.nan
# configs/REWARDS.md: a reward model has no score for too long a text, and `math` is watched.
MANUAL = {"liked": 1.0, "math": 0.0}


def _scored(by_name: dict[str, list[float | None]], weights: dict[str, float]) -> ScoredRollouts:
    def status(value: float | None) -> str:
        return "not_applicable" if value is None else "error" if math.isnan(value) else "ok"

    number = len(next(iter(by_name.values())))
    return ScoredRollouts(
        rewards=sum_rewards(by_name, weights, number),
        by_name=by_name,
        statuses={name: [*map(status, values)] for name, values in by_name.items()},
    )


def _group(number: int) -> RolloutGroup:
    completions = [Completion([1, 2], [-1.0] * 2, "stop") for _ in range(number)]
    return RolloutGroup(0, Prompt(0, 0, [1, 2, 3], "", {}), completions)


def _decide(scored: ScoredRollouts, weights: dict[str, float]) -> StepDecision:
    number = len(scored.rewards)
    step = _Rank0Step(
        StepRules(
            RolloutConfig(num_prompts_per_step=1, group_size=number),
            AdvantageConfig(),
            LossConfig(),
            TrainingConfig(),
            0.3,
            num_ranks=1,
            zero_advantages=not any(weights.values()),
            watched_rewards=watched_rewards(weights),
        )
    )
    step.add_round([encode_groups([_group(number)], scored, number)], 1)
    return step.decide()


def _proven(scored: ScoredRollouts, weights: dict[str, float], **settings: Any) -> list[float]:
    """The rewards of the running proof, from the functions' values and statuses alone."""
    groups = settings.pop("groups", [_group(len(next(iter(scored.by_name.values()))))])
    values: Any = SimpleNamespace(
        rollout=RolloutConfig(num_prompts_per_step=1, group_size=len(groups[0].completions)),
        advantage=AdvantageConfig(),
        loss=LossConfig(),
        reward_weights=[*weights.values()],
        stop_ids=frozenset(),
        environment=settings.pop("environment", EnvironmentConfig()),
    )
    assert not settings
    sampled: Any = SimpleNamespace(groups=groups, scored=scored)
    decision: Any = SimpleNamespace(rollout_ids=lambda group: range(len(group.completions)))
    return [*BatchCheck(values).rewards_of(sampled, decision).values()]


def test_a_watched_reward_scores_no_text_that_the_model_could_not_read() -> None:
    """The manual's own example. The third text was too long for `liked`; `math` says 0 of all but
    one. With a reward of 0.0 the third would be the best text of its group."""
    scored = _scored({"liked": [-3.0, -1.0, None], "math": [0.0, 1.0, 0.0]}, MANUAL)
    assert scored.rewards == [-3.0, -1.0, None]
    decision = _decide(scored, MANUAL)
    # mean -2, deviation sqrt(2): -1 / sqrt(2) and 1 / sqrt(2)
    np.testing.assert_allclose(decision.advantages, [-(0.5**0.5), 0.5**0.5, 0.0], rtol=1e-6)
    assert decision.in_loss.tolist() == [True, True, False]
    np.testing.assert_array_equal(_proven(scored, MANUAL), [-3.0, -1.0, NAN])


def test_a_watched_reward_that_fails_takes_nothing_out_and_stops_nothing() -> None:
    scored = _scored({"liked": [1.0, 2.0, 3.0], "math": [NAN, NAN, NAN]}, MANUAL)
    assert scored.rewards == [1.0, 2.0, 3.0]
    decision = _decide(scored, MANUAL)
    assert decision.in_loss.all()
    # It is still counted, so that it is seen.
    assert decision.metrics["reward/math/error_frac"] == 1.0
    assert decision.metrics["reward/unscored_frac"] == 0.0
    assert _proven(scored, MANUAL) == [1.0, 2.0, 3.0]
    with pytest.raises(RewardError, match="reward 'math' gave no usable value for 3 of 3"):
        check_error_rate([scored.num_statuses()], [None], 0.3)


def test_beside_a_teacher_alone_the_loss_asks_no_reward() -> None:
    weights = {"format": 0.0, "math": 0.0}
    assert watched_rewards(weights) == frozenset()
    unknown = _scored({"format": [None] * 4, "math": [None, 1.0, 0.0, None]}, weights)
    assert unknown.rewards == [None, 1.0, 0.0, None]
    decision = _decide(unknown, weights)
    assert decision.in_loss.all()
    assert decision.advantages.tolist() == [0.0] * 4
    assert (decision.metrics["reward/mean"], decision.metrics["reward/unscored_frac"]) == (0.5, 0.5)
    np.testing.assert_array_equal(_proven(unknown, weights), [NAN, 1.0, 0.0, NAN])
    # None of them is known: the teacher teaches all the same.
    nothing = _scored({"format": [None] * 4, "math": [None] * 4}, weights)
    decision = _decide(nothing, weights)
    assert decision.in_loss.all()
    assert decision.metrics["reward/mean"] is None
    # Without a teacher the run stops.
    with pytest.raises(RewardError, match="none of the 4 completions"):
        _decide(nothing, {"format": 1.0, "math": 0.0})


def test_an_agent_that_asks_nothing_is_told_so() -> None:
    """Its 1.0 is a number: that every value was None would be no help."""
    completions = [
        Completion([], [], "stop", Episode("ok", rewards={"agent": 1.0})) for _ in range(3)
    ]
    completions.append(Completion([], [], "stop", Episode("env_error", error="raised")))
    group = RolloutGroup(0, Prompt(0, 0, [1], "x", {}), completions)
    step = _Rank0Step(
        StepRules(
            RolloutConfig(num_prompts_per_step=1, group_size=4),
            AdvantageConfig(),
            LossConfig(),
            TrainingConfig(),
            0.9,
            num_ranks=1,
        )
    )
    scored = _scored({"agent": [None] * 4}, {"agent": 1.0})
    step.add_round([encode_groups([group], scored, 4)], 1)
    with pytest.raises(RewardError, match="the agent made no request in 3 of 4 episodes"):
        step.decide()


def test_the_proof_works_a_gyms_reward_out_from_its_turns() -> None:
    """An episode that had a turn has a reward: 0.0 where none came. None only where it failed."""
    turns = [(1.0, None, 4.0), (None,), (None, 2.0), ()]
    completions = [
        Completion(
            [7] * len(rewards),
            [-1.0] * len(rewards),
            "stop",
            Episode(
                "ok" if rewards else "env_error", (), tuple(Turn(1, "stop", r) for r in rewards)
            ),
        )
        for rewards in turns
    ]
    groups = [RolloutGroup(0, Prompt(0, 0, [1], "", {}), completions)]
    # The values under proof are those of the neighbours: they are not believed.
    scored = _scored({"environment": [0.0, 2.0, None, 5.0]}, {"environment": 1.0})
    for discount, expected in ((None, [5.0, 0.0, 2.0, NAN]), (0.5, [2.0, 0.0, 1.0, NAN])):
        environment = EnvironmentConfig(gym="my.py:Game", discount=discount)
        proven = _proven(scored, {"environment": 1.0}, groups=groups, environment=environment)
        np.testing.assert_array_equal(proven, expected)
