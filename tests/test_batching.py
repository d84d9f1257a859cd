"""Plans, packing, and the bytes in which rollouts cross ranks."""

from __future__ import annotations

import random

import pytest
import torch

from grpo_spmd.assemble import decode_rollouts, encode_rollouts
from grpo_spmd.batching import Plan, pack_rollouts, plan_batch, plan_metrics, split_groups
from grpo_spmd.data_types import MicroBatch, Rollout

CPU = torch.device("cpu")


def _random_case(seed: int) -> tuple[list[int], int, list[int], int]:
    rng = random.Random(seed)
    sizes, budget = [rng.randint(0, 12) for _ in range(rng.choice([1, 2, 3, 4]))], rng.randint(8, 200)
    sizes[0] += 1
    shape = rng.choice(["ragged", "equal", "one_giant"])
    size = sum(sizes)
    if shape == "equal":
        lengths = [rng.randint(1, budget)] * size
    else:
        lengths = [rng.randint(1, budget if shape == "ragged" else max(1, budget // 8)) for _ in range(size)]
    if shape == "one_giant":
        lengths[rng.randrange(size)] = budget
    return lengths, rng.randint(1, 9), sizes, budget


def _random_plan(seed: int) -> tuple[Plan, list[int], int, list[int], int]:
    lengths, num_ranks, sizes, budget = _random_case(seed)
    return plan_batch(lengths, num_ranks=num_ranks, mini_batch_sizes=sizes, max_tokens=budget), lengths, num_ranks, sizes, budget


SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rollout_is_trained_exactly_once(seed: int) -> None:
    plan, lengths, *_ = _random_plan(seed)
    assert sorted(i for mini_batch in plan for rank in mini_batch for row in rank for i in row) == list(range(len(lengths)))


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_have_the_same_number_of_micro_batches(seed: int) -> None:
    plan, _, num_ranks, sizes, _ = _random_plan(seed)
    assert [len(mini_batch) for mini_batch in plan] == [num_ranks] * len(sizes)
    assert all(len({len(rank) for rank in mini_batch}) == 1 and mini_batch[0] for mini_batch in plan)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_micro_batch_is_over_the_budget(seed: int) -> None:
    plan, lengths, _, _, budget = _random_plan(seed)
    assert all(sum(lengths[i] for i in row) <= budget for mini_batch in plan for rank in mini_batch for row in rank)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_differ_by_at_most_the_longest_rollout(seed: int) -> None:
    plan, lengths, *_ = _random_plan(seed)
    for mini_batch in plan:
        loads = [sum(lengths[i] for row in rank for i in row) for rank in mini_batch]
        assert max(loads) - min(loads) <= max((lengths[i] for rank in mini_batch for row in rank for i in row), default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_micro_batches_of_a_rank_would_not_fit_into_one(seed: int) -> None:
    plan, lengths, _, _, budget = _random_plan(seed)
    for rank in (rank for mini_batch in plan for rank in mini_batch):
        tokens = sorted(sum(lengths[i] for i in row) for row in rank if row)
        assert len(tokens) < 2 or tokens[0] + tokens[1] > budget


@pytest.mark.parametrize("seed", SEEDS)
def test_mini_batches_do_not_depend_on_the_world_size(seed: int) -> None:
    lengths, _, sizes, budget = _random_case(seed)

    def members(num_ranks: int, max_tokens: int) -> list[list[int]]:
        plan = plan_batch(lengths, num_ranks=num_ranks, mini_batch_sizes=sizes, max_tokens=max_tokens)
        return [sorted(i for rank in mini_batch for row in rank for i in row) for mini_batch in plan]

    numbers = iter(range(len(lengths)))
    blocks = [[next(numbers) for _ in range(size)] for size in sizes]
    assert members(1, budget) == members(2, budget) == members(7, 3 * budget) == blocks


def test_plan_by_hand() -> None:
    # longest first: 6 -> rank 0 (6), 5 -> rank 1 (5), 4 -> rank 1 (9), 3 -> rank 0 (9); each pair fits into a row of 9
    assert plan_batch([3, 4, 5, 6], num_ranks=2, mini_batch_sizes=[4], max_tokens=9) == [[[[3, 0]], [[2, 1]]]]


def test_more_ranks_than_rollouts_leaves_empty_rows() -> None:
    assert plan_batch([5], num_ranks=3, mini_batch_sizes=[1], max_tokens=5) == [[[[0]], [[]], [[]]]]


def test_mini_batches_of_unequal_sizes_by_hand() -> None:
    # the first block is rollout 0 alone, the second 1 and 2; the third has none, and each rank still one row
    plan = plan_batch([5, 4, 3], num_ranks=2, mini_batch_sizes=[1, 2, 0], max_tokens=5)
    assert plan == [[[[0]], [[]]], [[[1]], [[2]]], [[[]], [[]]]]
    assert plan_metrics(plan, [5, 4, 3])["packing_efficiency_frac"] == pytest.approx(12 / (6 * 5))


def test_a_step_without_rollouts_can_be_planned_and_measured() -> None:
    plan = plan_batch([], num_ranks=2, mini_batch_sizes=[0, 0], max_tokens=5)
    assert plan == [[[[]], [[]]]] * 2
    assert plan_metrics(plan, []) == {"packing_efficiency_frac": 0.0, "rank_token_spread_frac": 0.0}


@pytest.mark.parametrize(
    ("num_groups", "num_mini_batches", "expected"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (5, 2, [3, 2]), (1, 4, [1, 0, 0, 0]), (0, 2, [0, 0]), (3, 1, [3])],
)
def test_groups_are_split_over_mini_batches_as_evenly_as_can_be(num_groups: int, num_mini_batches: int, expected: list[int]) -> None:
    assert split_groups(num_groups, num_mini_batches) == expected


def test_rank_with_less_work_gets_empty_rows() -> None:
    # 9 fills rank 0; 5 + 5 over the budget of 9 are two rows on rank 1
    assert plan_batch([9, 5, 5], num_ranks=2, mini_batch_sizes=[3], max_tokens=9) == [[[[0], []], [[1], [2]]]]


def test_rollout_over_the_budget_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(11, 10\)"):
        plan_batch([3, 11], num_ranks=1, mini_batch_sizes=[2], max_tokens=10)


def test_plan_metrics_by_hand() -> None:
    # rows of 9, 0, 5, 5 tokens: 19 of 4 * 9; ranks hold 9 and 10
    metrics = plan_metrics([[[[0], []], [[1], [2]]]], [9, 5, 5])
    assert metrics == {"packing_efficiency_frac": pytest.approx(19 / 36), "rank_token_spread_frac": pytest.approx(0.1)}


def _rollout(number: int, prompt: list[int], completion: list[int], advantage: float = 1.0, counts: bool = True) -> Rollout:
    return Rollout(number, advantage, counts, prompt, completion, [-0.25 * (i + 1) for i in range(len(completion))])


def _row() -> MicroBatch:
    return pack_rollouts([_rollout(0, [1, 2], [3, 4, 5], 0.5), _rollout(1, [6], [7], -1.5, counts=False), _rollout(2, [8, 9], [])], CPU)


def test_pack_concatenates_without_padding() -> None:
    row = _row()
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.sequence_lengths == [5, 2, 2]


def test_pack_restarts_positions_in_each_sequence() -> None:
    assert _row().position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1]


def test_pack_predicts_each_completion_token_from_the_token_before_it() -> None:
    row = _row()
    # 3, 4, 5 are predicted at the places of 2, 3, 4; 7 at the place of 6; the empty completion brings nothing
    assert row.predict_index.tolist() == [1, 2, 3, 5]
    assert row.target_ids.tolist() == [3, 4, 5, 7]


def test_pack_names_the_sequence_of_each_token() -> None:
    row = pack_rollouts([_rollout(7, [1], []), _rollout(5, [1, 2], [3, 4]), _rollout(9, [1], []), _rollout(2, [6], [7])], CPU)
    assert row.rollout_ids == [5, 2]  # those without a token are in neither
    assert row.sequence_index.tolist() == [0, 0, 1]
    assert pack_rollouts([], CPU).rollout_ids == []


def test_pack_aligns_logprobs_advantages_and_mask_with_targets() -> None:
    row = _row()
    assert row.rollout_logprobs.tolist() == [-0.25, -0.5, -0.75, -0.25]
    assert row.advantages.tolist() == [0.5, 0.5, 0.5, -1.5]
    assert row.loss_mask.tolist() == [True, True, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_packed_targets_are_the_next_tokens_of_their_own_sequence(seed: int) -> None:
    rng = random.Random(seed)
    rollouts = []
    for number in range(rng.randint(1, 6)):
        prompt, completion = rng.choices(range(100), k=rng.randint(1, 5)), rng.choices(range(100), k=rng.randint(0, 5))
        rollouts.append(_rollout(number, prompt, completion))
    if not any(r.completion_ids for r in rollouts):
        rollouts.append(_rollout(99, [1], [2]))
    row = pack_rollouts(rollouts, CPU)
    torch.testing.assert_close(row.input_ids[row.predict_index + 1], row.target_ids)
    # a place predicts the token after it, which is at place 1 or later of the same sequence
    assert int(row.position_ids[row.predict_index + 1].min()) >= 1
    assert row.target_ids.tolist() == [i for r in rollouts for i in r.completion_ids]


def test_row_without_rollouts_counts_nothing_but_can_be_run() -> None:
    row = pack_rollouts([], CPU)
    assert not row.loss_mask.any()
    assert sum(row.sequence_lengths) == len(row.input_ids) == len(row.position_ids)
    assert len(row.target_ids) == len(row.predict_index) == len(row.loss_mask) == len(row.advantages) == len(row.rollout_logprobs) >= 1


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
def test_row_of_empty_completions_counts_nothing_but_can_be_run(prompt: list[int]) -> None:
    row = pack_rollouts([_rollout(0, prompt, [])], CPU)
    assert row.input_ids.tolist() == prompt
    assert row.loss_mask.tolist() == [False]
    assert 0 <= int(row.predict_index[0]) < len(prompt)


def test_number_of_loss_tokens_survives_any_plan() -> None:
    rng = random.Random(3)
    rollouts = [_rollout(i, [1] * rng.randint(1, 4), [2] * rng.randint(0, 6), counts=rng.random() < 0.7) for i in range(24)]
    expected = sum(len(r.completion_ids) for r in rollouts if r.counts)
    for num_ranks, max_tokens in [(1, 1000), (2, 10), (5, 13)]:
        plan = plan_batch([r.num_tokens for r in rollouts], num_ranks=num_ranks, mini_batch_sizes=[8, 7, 9], max_tokens=max_tokens)
        rows = [pack_rollouts([rollouts[i] for i in row], CPU) for mini_batch in plan for rank in mini_batch for row in rank]
        assert sum(int(row.loss_mask.sum()) for row in rows) == expected


def test_rollouts_cross_ranks_unchanged() -> None:
    rollouts = [
        Rollout(0, 1 / 3, True, [1, 2, 3], [4, 5], [-0.1, -1e-17]),
        Rollout(7, -0.0, False, [2**31 - 1], [], []),
        Rollout(2**40, 1e-300, True, [0], [9], [-123.45678901234567]),
    ]
    assert decode_rollouts(encode_rollouts(rollouts)) == rollouts


def test_random_floats_cross_ranks_to_the_last_bit() -> None:
    rng = random.Random(0)
    logprobs = [-rng.expovariate(1.0) for _ in range(1000)]
    (back,) = decode_rollouts(encode_rollouts([Rollout(0, rng.gauss(0, 1), True, [1], [2] * 1000, logprobs)]))
    assert [x.hex() for x in back.rollout_logprobs] == [x.hex() for x in logprobs]


def test_no_rollouts_cross_ranks_as_none() -> None:
    assert decode_rollouts(encode_rollouts([])) == []
