"""Rewards to advantages, against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig, TrainingConfig
from grpo_spmd.learn.advantages import batch_std, compute_advantages, overlong_penalties
from grpo_spmd.learn.sampled_step import StepRules, _Rank0Step
from grpo_spmd.learn.step_messages import encode_groups
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts

NAN = math.nan


def _advantages(
    rewards: list[list[float]], estimator: str = "grpo", normalize_std: str = "group"
) -> list[list[float]]:
    advantages, _ = compute_advantages(
        torch.tensor(rewards, dtype=torch.float64), estimator, normalize_std
    )
    result: list[list[float]] = advantages.tolist()
    return result


def _close(got: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_grpo_divides_by_the_unbiased_group_std() -> None:
    # mean 1/2, every deviation 1/2, variance (4 * 1/4) / (4 - 1) = 1/3, so +-(1/2) * sqrt(3) =
    # +-0.8660254
    _close(_advantages([[1.0, 0.0, 0.0, 1.0]]), [[0.8660254, -0.8660254, -0.8660254, 0.8660254]])


def test_each_group_has_its_own_mean_and_std() -> None:
    # [0, 2]: mean 1, std sqrt(2). [10, 16]: mean 13, std sqrt(18) = 3 sqrt(2). Both give
    # +-1/sqrt(2).
    _close(
        _advantages([[0.0, 2.0], [10.0, 16.0]]),
        [[-0.70710678, 0.70710678], [-0.70710678, 0.70710678]],
    )


def test_normalize_std_batch_divides_by_the_std_of_all_rewards() -> None:
    # all four: mean 5/4, squares 1/16 + 25/16 + 49/16 + 1/16 = 4.75, over 3, root: 1.2583057.
    # Centred in the group:
    # +-0.5 and +-1.
    _close(
        _advantages([[1.0, 0.0], [3.0, 1.0]], normalize_std="batch"),
        [[0.3973597, -0.3973597], [0.7947194, -0.7947194]],
    )


def test_normalize_std_none_only_centres() -> None:
    _close(_advantages([[1.0, 0.0], [3.0, 1.0]], normalize_std="none"), [[0.5, -0.5], [1.0, -1.0]])


@pytest.mark.parametrize("normalize_std", ["group", "batch", "none"])
def test_dr_grpo_is_never_scaled(normalize_std: str) -> None:
    _close(_advantages([[4.0, 0.0, 2.0]], "dr_grpo", normalize_std), [[2.0, -2.0, 0.0]])


@pytest.mark.parametrize("normalize_std", ["group", "batch", "none"])
def test_rloo_subtracts_the_mean_of_the_others(normalize_std: str) -> None:
    # 4 - (0 + 2)/2 = 3, 0 - (4 + 2)/2 = -3, 2 - (4 + 0)/2 = 0
    _close(_advantages([[4.0, 0.0, 2.0]], "rloo", normalize_std), [[3.0, -3.0, 0.0]])


@pytest.mark.parametrize("normalize_std", ["group", "batch", "none"])
def test_max_rl_divides_by_the_mean_of_the_group(normalize_std: str) -> None:
    # one right of four: mean 1/4, (1 - 1/4) / (1/4) = 3 and -1. Three right: mean 3/4, 1/3 and -1.
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
    _close(
        _advantages(rewards, "max_rl", normalize_std),
        [[3.0, -1.0, -1.0, -1.0], [1 / 3, 1 / 3, -1.0, 1 / 3]],
    )


def test_nan_reward_enters_no_mean_of_max_rl() -> None:
    # the known ones are 1 and 0: mean 1/2
    _close(_advantages([[1.0, NAN, 0.0]], "max_rl"), [[1.0, 0.0, -1.0]])


@pytest.mark.parametrize("group", [[-1.0, -3.0, -2.0], [1.0, -1.0, 0.0], [3e-6, -3e-6, 1e-7]])
def test_max_rl_learns_nothing_from_a_group_whose_mean_is_not_above_zero(
    group: list[float],
) -> None:
    """Over -2 the best of the first group would be pushed down; over nearly nothing any difference
    would be huge."""
    assert _advantages([group], "max_rl") == [[0.0, 0.0, 0.0]]


def test_nan_reward_enters_no_mean_and_no_std() -> None:
    # the known ones are 2 and 0: mean 1, std sqrt(2)
    _close(_advantages([[2.0, NAN, 0.0]]), [[0.70710678, 0.0, -0.70710678]])


def test_nan_reward_is_not_one_of_the_others_of_rloo() -> None:
    _close(_advantages([[2.0, NAN, 0.0, 1.0]], "rloo"), [[1.5, 0.0, -1.5, 0.0]])


def test_nan_reward_enters_no_batch_std() -> None:
    # known: 2, 0, 1, 1: mean 1, squares 1 + 1 = 2, over 3: 0.8164966; 1 / that = 1.2247449
    _close(
        _advantages([[2.0, 0.0, NAN], [1.0, 1.0, NAN]], normalize_std="batch"),
        [[1.2247449, -1.2247449, 0.0], [0.0, 0.0, 0.0]],
    )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "max_rl"])
@pytest.mark.parametrize(
    "group", [[NAN, NAN, NAN], [NAN, 5.0, NAN]], ids=["none_known", "one_known"]
)
def test_group_with_fewer_than_two_known_rewards_teaches_nothing(
    estimator: str, group: list[float]
) -> None:
    assert _advantages([group], estimator) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "max_rl"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1e9 + 0.1, -7.7])
def test_equal_rewards_give_exactly_zero(estimator: str, reward: float) -> None:
    # the mean of seven times 0.1 is not 0.1 in floating point, and 1e-17 over 1e-17 is not small
    assert _advantages([[reward] * 7], estimator) == [[0.0] * 7]


def test_mask_names_the_groups_without_spread() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [NAN, 1.0], [NAN, NAN]])
    assert compute_advantages(rewards, "grpo", "group")[1].tolist() == [True, False, True, True]


def test_group_without_spread_leaves_other_groups_alone() -> None:
    _close(_advantages([[1.0, 1.0], [0.0, 2.0]]), [[0.0, 0.0], [-0.70710678, 0.70710678]])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "max_rl"])
def test_advantages_of_a_group_sum_to_zero(estimator: str) -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    advantages, _ = compute_advantages(rewards, estimator, "group")
    torch.testing.assert_close(advantages.sum(1), torch.zeros(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_adding_a_constant_to_a_group_changes_nothing(estimator: str) -> None:
    rewards = torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shift = torch.tensor([[0.0], [1.0], [-100.0]], dtype=torch.float64)
    old, new = (compute_advantages(r, estimator, "group")[0] for r in (rewards, rewards + shift))
    torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-6)


def test_advantages_are_float32_whatever_the_rewards_were() -> None:
    rewards: Tensor = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert compute_advantages(rewards, "grpo", "group")[0].dtype == torch.float32


def test_batch_std_of_one_known_reward_is_zero() -> None:
    assert float(batch_std(torch.tensor([[NAN, 3.0]]))) == 0.0


def test_batch_std_is_unbiased() -> None:
    # 1, 3: mean 2, (1 + 1) / (2 - 1) = 2
    assert float(batch_std(torch.tensor([[1.0], [3.0]]))) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("normalize_std", ["group", "batch", "none"])
def test_reinforce_pp_by_hand(normalize_std: str) -> None:
    # all six: mean 2, squares 4 + 4 + 0 + 0 + 4 + 4 = 16, over 5: 3.2, root 1.7888544; 2 / that =
    # 1.1180340
    got = _advantages([[4.0, 0.0], [2.0, 2.0], [4.0, 0.0]], "reinforce_pp", normalize_std)
    _close(got, [[1.1180340, -1.1180340], [0.0, 0.0], [1.1180340, -1.1180340]])


def test_reinforce_pp_teaches_by_a_group_whose_rewards_are_alike() -> None:
    # mean 1, squares 4 * 1, over 3, root 1.1547005; 1 / that = 0.8660254: the baseline is the
    # step's, not the group's
    advantages, equal = compute_advantages(
        torch.tensor([[2.0, 2.0], [0.0, 0.0]]), "reinforce_pp", "group"
    )
    _close(advantages.tolist(), [[0.8660254, 0.8660254], [-0.8660254, -0.8660254]])
    assert equal.tolist() == [True, True]


def test_reinforce_pp_leaves_unknown_rewards_out_of_mean_and_std() -> None:
    # known: 3, 1, 2: mean 2, std 1
    _close(
        _advantages([[3.0, NAN], [1.0, 2.0], [NAN, NAN]], "reinforce_pp"),
        [[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]],
    )


@pytest.mark.parametrize(
    "rewards", [[[0.1] * 7], [[NAN, NAN]], [[NAN, 5.0]], [[0.1, 0.1], [0.1, NAN]]]
)
def test_reinforce_pp_without_any_spread_teaches_nothing(rewards: list[list[float]]) -> None:
    assert _advantages(rewards, "reinforce_pp") == [[0.0] * len(group) for group in rewards]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "max_rl"])
def test_no_groups_have_no_advantages(estimator: str) -> None:
    advantages, equal = compute_advantages(torch.zeros(0, 4), estimator, "batch")
    assert (list(advantages.shape), list(equal.shape)) == ([0, 4], [0])


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    # DAPO, equation 13, with L_max = 20 and L_cache = 8: 0 up to 12; then ((20 - 8) - length) / 8;
    # -1 at 20. Here as
    # what is taken off.
    [(0, 0.0), (12, 0.0), (13, 0.125), (16, 0.5), (19, 0.875), (20, 1.0)],
)
def test_overlong_penalties_are_dapos_soft_punishment(num_tokens: int, expected: float) -> None:
    lengths = torch.tensor([[float(num_tokens)]])
    assert overlong_penalties(lengths, 20, 8, 1.0).tolist() == [[expected]]
    assert overlong_penalties(lengths, 20, 8, 0.5).tolist() == [[0.5 * expected]]
    assert overlong_penalties(lengths, 20, 0, 1.0).tolist() == [[0.0]]


def test_dynamic_sampling_judges_a_group_before_the_length_penalty() -> None:
    """Four wrong answers, one of them a little long, have no spread (DAPO): the group is dropped
    and refilled. Judged
    after the penalty they would have, and three wrong answers would be worth +0.5."""
    rollout = RolloutConfig(
        num_prompts_per_step=2, group_size=4, max_completion_tokens=20, dynamic_sampling=True
    )
    advantage = AdvantageConfig(overlong_buffer_tokens=8)
    rank0_step = _Rank0Step(
        StepRules(rollout, advantage, LossConfig(), TrainingConfig(), 0.3, num_ranks=1)
    )

    def group(
        position: int, rewards: list[float | None], lengths: list[int]
    ) -> tuple[RolloutGroup, ScoredRollouts]:
        completions = [Completion([1] * n, [-1.0] * n, "stop") for n in lengths]
        scored = ScoredRollouts(rewards, {"r": list(rewards)}, {"r": ["ok"] * 4})
        return RolloutGroup(0, Prompt(position, 0, [1, 2, 3], "", {}), completions), scored

    def told(*groups: tuple[RolloutGroup, ScoredRollouts]) -> list[bytes]:
        scored = ScoredRollouts()
        for _, group_values in groups:
            scored.extend(group_values)
        return [encode_groups([group for group, _ in groups], scored, 4)]

    # 16 tokens are 4 of the 8 that are punished: -0.5. The group with one right answer and one long
    # one stays.
    initial = told(
        group(0, [0.0] * 4, [5, 5, 5, 16]), group(1, [1.0, 0.0, 0.0, 0.0], [5, 5, 5, 16])
    )
    assert rank0_step.add_round(initial, 2) == 2  # one is missing, and half of them stay
    assert (
        rank0_step.add_round(
            told(group(2, [1.0, 1.0, 0.0, 0.0], [5] * 4), group(3, [1.0] * 4, [5] * 4)), 2
        )
        == 0
    )
    decision = rank0_step.decide()
    assert decision.positions.tolist() == [1, 2]
    assert decision.rewards[:4].tolist() == [1.0, 0.0, 0.0, -0.5]  # the penalty itself counts
    assert decision.metrics["dynamic_sampling/alike_groups"] == 2
