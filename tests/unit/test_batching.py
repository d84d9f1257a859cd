"""Plans, packing, and the bytes in which rollouts cross ranks."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.balance import plan_of, ranks_of_a_group, trace
from grpo_spmd.config.schema import LossConfig
from grpo_spmd.learn.assemble import decode_rollouts, encode_rollouts, pack_rollouts
from grpo_spmd.learn.balance import attention_cost_ratio, plan_batch, plan_metrics, split_groups
from grpo_spmd.learn.losses import LossInputs, aggregation_weights, policy_loss
from grpo_spmd.proofs.batch_check import _hash_rollouts
from grpo_spmd.records import BatchPlan, MicroBatch, Rollout

CPU = torch.device("cpu")


def _random_case(seed: int) -> tuple[list[int], int, list[int], int]:
    rng = random.Random(seed)
    sizes, budget = (
        [rng.randint(0, 12) for _ in range(rng.choice([1, 2, 3, 4]))],
        rng.randint(8, 200),
    )
    sizes[0] += 1
    shape = rng.choice(["ragged", "equal", "one_giant"])
    size = sum(sizes)
    if shape == "equal":
        lengths = [rng.randint(1, budget)] * size
    else:
        lengths = [
            rng.randint(1, budget if shape == "ragged" else max(1, budget // 8))
            for _ in range(size)
        ]
    if shape == "one_giant":
        lengths[rng.randrange(size)] = budget
    return lengths, rng.randint(1, 9), sizes, budget


Case = tuple[BatchPlan, list[int], list[float], int, list[int], int]


@pytest.fixture(params=range(60))
def case(request: pytest.FixtureRequest) -> Case:
    """A plan with the tokens and costs that it was made of, and its ranks, mini-batches and
    budget."""
    lengths, num_ranks, sizes, budget = _random_case(request.param)
    ratio = [0.0, 0.003, 0.1][request.param % 3]
    costs = [n + ratio * n * n for n in lengths]
    plan = plan_batch(
        lengths, num_ranks=num_ranks, mini_batch_sizes=sizes, max_tokens=budget, costs=costs
    )
    return plan, lengths, costs, num_ranks, sizes, budget


SEEDS = range(60)


def test_every_rollout_is_trained_exactly_once(case: Case) -> None:
    plan, lengths, *_ = case
    assert sorted(
        i for mini_batch in plan for rank in mini_batch for row in rank for i in row
    ) == list(range(len(lengths)))


def test_all_ranks_have_the_same_number_of_micro_batches(case: Case) -> None:
    plan, _, _, num_ranks, sizes, _ = case
    assert [len(mini_batch) for mini_batch in plan] == [num_ranks] * len(sizes)
    assert all(
        len({len(rank) for rank in mini_batch}) == 1 and mini_batch[0] for mini_batch in plan
    )


def test_no_micro_batch_is_over_the_budget(case: Case) -> None:
    plan, lengths, *_, budget = case
    assert all(
        sum(lengths[i] for i in row) <= budget
        for mini_batch in plan
        for rank in mini_batch
        for row in rank
    )


def test_ranks_differ_by_at_most_the_costliest_rollout(case: Case) -> None:
    plan, _, costs, *_ = case
    for mini_batch in plan:
        loads = [sum(costs[i] for row in rank for i in row) for rank in mini_batch]
        costliest = max((costs[i] for rank in mini_batch for row in rank for i in row), default=0.0)
        assert max(loads) - min(loads) <= costliest * (1 + 1e-9)


def test_there_are_no_more_micro_batches_than_rollouts_of_the_greatest_length_would_need(
    case: Case,
) -> None:
    plan, lengths, _, num_ranks, _, budget = case
    for mini_batch in plan:
        members = [lengths[i] for rank in mini_batch for row in rank for i in row]
        if members:
            fewest = -(-sum(members) // (num_ranks * budget))
            assert (
                fewest
                <= len(mini_batch[0])
                <= -(-len(members) // (num_ranks * (budget // max(members))))
            )


def test_the_same_rollouts_are_planned_alike(case: Case) -> None:
    plan, lengths, costs, num_ranks, sizes, budget = case
    again = plan_batch(
        tuple(lengths),
        num_ranks=num_ranks,
        mini_batch_sizes=sizes,
        max_tokens=budget,
        costs=tuple(costs),
    )
    assert list(plan) == list(again)


@pytest.mark.parametrize("num_rollouts", [100, 1000, 10_000])
@pytest.mark.parametrize("num_ranks", [2, 8, 16, 64])
def test_a_long_tailed_trace_is_balanced(num_rollouts: int, num_ranks: int) -> None:
    for seed in range(3):
        lengths = trace(num_rollouts, seed=seed)
        costs = [n + 3e-5 * n * n for n in lengths]
        plan = plan_batch(
            lengths,
            num_ranks=num_ranks,
            mini_batch_sizes=[num_rollouts],
            max_tokens=16384,
            costs=costs,
        )
        metrics = plan_metrics(plan, lengths, costs)
        # By another way than plan_metrics: the time that ranks take in step, beside what no plan
        # can better.
        in_step = sum(
            max(sum(costs[i] for i in row) for row in rows) for rows in zip(*plan[0], strict=True)
        )
        fraction = sum(costs) / num_ranks
        assert metrics["packing_efficiency_frac"] == pytest.approx(fraction / in_step)
        assert in_step <= 1.02 * max(fraction, max(costs))
        if max(costs) <= 0.9 * fraction:
            assert metrics["packing_efficiency_frac"] >= 0.98
            assert metrics["rank_cost_spread_frac"] <= 0.02
        assert len(plan[0][0]) <= 1.03 * sum(lengths) / (num_ranks * 16384) + 2


def test_a_budget_of_one_long_rollout_costs_little() -> None:
    # a row of short rollouts is out of tokens before it costs as much as the longest rollout, and
    # its rank has to wait
    for num_ranks, efficiency in [(2, 0.99), (16, 0.97), (32, 0.94), (64, 0.85)]:
        lengths = trace(1000)
        costs = [n + 3e-5 * n * n for n in lengths]
        plan = plan_batch(
            lengths, num_ranks=num_ranks, mini_batch_sizes=[1000], max_tokens=8448, costs=costs
        )
        assert plan_metrics(plan, lengths, costs)["packing_efficiency_frac"] >= efficiency


def test_costs_decide_where_tokens_would_not() -> None:
    # One rollout of 10 tokens costs 10 + 0.1 * 100 = 20, one of 1 token 1.1: by tokens the long one
    # is worth 10 short
    # ones, by cost 18.
    lengths = [10] + [1] * 10
    costs = [n + 0.1 * n * n for n in lengths]
    by_tokens = plan_batch(lengths, num_ranks=2, mini_batch_sizes=[11], max_tokens=100)
    assert {len(rank[0]) for rank in by_tokens[0]} == {1, 10}
    lengths += [1] * 8
    costs += [1.1] * 8
    plan = plan_batch(lengths, num_ranks=2, mini_batch_sizes=[19], max_tokens=100, costs=costs)
    assert {len(rank[0]) for rank in plan[0]} == {1, 18}
    assert plan_metrics(plan, lengths, costs)["rank_cost_spread_frac"] == pytest.approx(0.01)
    assert plan_metrics(plan, lengths, costs)["rank_token_spread_frac"] == pytest.approx(8 / 18)


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens"), [(2, 10_000), (2, 600), (4, 400), (8, 100), (8, 300), (16, 100)]
)
def test_siblings_of_one_length_lie_on_different_ranks(num_ranks: int, max_tokens: int) -> None:
    plan = plan_batch([50] * 64, num_ranks=num_ranks, mini_batch_sizes=[64], max_tokens=max_tokens)
    rank_of = {i: number for number, rank in enumerate(plan[0]) for row in rank for i in row}
    for group in range(8):
        on = Counter(rank_of[8 * group + sample] for sample in range(8))
        assert max(on.values()) == -(-8 // num_ranks), (group, on)


def test_siblings_that_are_alike_are_not_drawn_to_one_rank() -> None:
    plan = plan_batch(trace(8000), num_ranks=8, mini_batch_sizes=[8000], max_tokens=16384)
    # 8 rollouts dealt to 8 ranks at random lie on 8 * (1 - (7/8)^8) = 5.25 ranks on average
    assert ranks_of_a_group(plan, 8000) > 5.1


@pytest.mark.parametrize(("rollouts_of_a_rank", "num_ranks"), [(500, (4, 40)), (20, (128, 1280))])
def test_planning_does_not_compare_every_rollout_with_every_row(
    rollouts_of_a_rank: int, num_ranks: tuple[int, int]
) -> None:
    """Counted, not timed: comparisons of rollouts and rows by the heap, the sorts and the exchanges
    grow as n log n.
    Where rows of hundreds of ranks are levelled, a look at all of them at each exchange would make
    it 42 times."""
    calls = []
    for ranks in num_ranks:
        lengths, count = trace(rollouts_of_a_rank * ranks), 0

        def tick(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(tick)
        plan_batch(lengths, num_ranks=ranks, mini_batch_sizes=[len(lengths)], max_tokens=16384)
        sys.setprofile(None)
        calls.append(count)
    assert calls[1] < 20 * calls[0], calls


def test_a_hundred_thousand_rollouts_can_be_planned() -> None:
    lengths = trace(100_000)
    plan = plan_batch(lengths, num_ranks=16, mini_batch_sizes=[50_000, 50_000], max_tokens=16384)
    metrics = plan_metrics(plan, lengths)
    assert metrics["packing_efficiency_frac"] > 0.995
    assert metrics["rank_token_spread_frac"] < 0.001
    assert (
        metrics["micro_batches"]
        == sum(len(mini_batch[0]) for mini_batch in plan)
        <= 1.02 * sum(lengths) / (16 * 16384) + 2
    )


@pytest.mark.parametrize(
    ("lengths", "num_ranks"),
    [([700], 8), ([1000, 1, 1], 4), ([16384] + [10] * 99, 8), ([5] * 33, 32)],
)
def test_degenerate_batches_take_one_micro_batch_and_the_time_of_the_bound(
    lengths: list[int], num_ranks: int
) -> None:
    plan = plan_batch(
        lengths, num_ranks=num_ranks, mini_batch_sizes=[len(lengths)], max_tokens=16384
    )
    assert {len(rank) for rank in plan[0]} == {1}
    in_step = max(sum(lengths[i] for i in rank[0]) for rank in plan[0])
    assert in_step == max(max(lengths), min(lengths) * -(-len(lengths) // num_ranks))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Qwen2.5-1.5B: 28 layers * 12 heads * 128 / 1,543,714,304
        (
            transformers.Qwen2Config(
                num_hidden_layers=28, hidden_size=1536, num_attention_heads=12
            ),
            2.786e-5,
        ),
        # a head's size that is not hidden / heads; 2 of 6 layers see all tokens
        (
            transformers.Qwen3Config(
                num_hidden_layers=2, hidden_size=64, num_attention_heads=4, head_dim=32
            ),
            2 * 4 * 32 / 1_543_714_304,
        ),
        (
            transformers.Gemma3TextConfig(
                num_hidden_layers=2,
                num_attention_heads=4,
                head_dim=8,
                layer_types=["sliding_attention", "full_attention"],
            ),
            4 * 8 / 1_543_714_304,
        ),
        (transformers.PretrainedConfig(), 0.0),
    ],
)
def test_attention_cost_ratio_by_hand(
    config: transformers.PretrainedConfig, expected: float
) -> None:
    assert attention_cost_ratio(1_543_714_304, config) == pytest.approx(expected, rel=1e-3)


def test_attention_cost_ratio_is_that_of_counted_flops() -> None:
    """torch's own counter on a forward and backward pass. Plain attention computes the masked half
    too, so twice what
    is needed."""
    config = transformers.Qwen3Config(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    flops = {}
    for length in (64, 128, 192):
        with FlopCounterMode(display=False) as counter:
            model(torch.arange(length)[None] % 64).logits.sum().backward()
        flops[length] = counter.get_total_flops()
    # a * L + b * L^2 through three lengths: it has no other term
    b = (flops[128] - 2 * flops[64]) / (128**2 - 2 * 64**2)
    a = flops[64] / 64 - b * 64
    assert flops[192] == pytest.approx(a * 192 + b * 192**2, rel=1e-6)
    parameters = sum(p.numel() for p in model.parameters())
    assert attention_cost_ratio(parameters, config) == pytest.approx(b / 2 / a, rel=0.02)


@pytest.mark.parametrize("seed", SEEDS)
def test_mini_batches_do_not_depend_on_the_world_size(seed: int) -> None:
    lengths, _, sizes, budget = _random_case(seed)

    def members(num_ranks: int, max_tokens: int) -> list[list[int]]:
        plan = plan_batch(
            lengths, num_ranks=num_ranks, mini_batch_sizes=sizes, max_tokens=max_tokens
        )
        return [
            sorted(i for rank in mini_batch for row in rank for i in row) for mini_batch in plan
        ]

    numbers = iter(range(len(lengths)))
    blocks = [[next(numbers) for _ in range(size)] for size in sizes]
    assert members(1, budget) == members(2, budget) == members(7, 3 * budget) == blocks


def test_plan_by_hand() -> None:
    # longest first: 6 -> rank 0 (6), 5 -> rank 1 (5), 4 -> rank 1 (9), 3 -> rank 0 (9); each pair
    # fits into a row of 9
    assert plan_batch([3, 4, 5, 6], num_ranks=2, mini_batch_sizes=[4], max_tokens=9)[0] == [
        [[3, 0]],
        [[2, 1]],
    ]


def test_more_ranks_than_rollouts_leaves_empty_rows() -> None:
    assert plan_batch([5], num_ranks=3, mini_batch_sizes=[1], max_tokens=5)[0] == [
        [[0]],
        [[]],
        [[]],
    ]


def test_mini_batches_of_unequal_sizes_by_hand() -> None:
    # the first block is rollout 0 alone, the second 1 and 2; the third has none, and each rank
    # still one row
    plan = plan_batch([5, 4, 3], num_ranks=2, mini_batch_sizes=[1, 2, 0], max_tokens=5)
    assert list(plan) == [[[[0]], [[]]], [[[1]], [[2]]], [[[]], [[]]]]
    # in step: 5, then 4, then nothing
    assert plan_metrics(plan, [5, 4, 3])["packing_efficiency_frac"] == pytest.approx(12 / (2 * 9))


def test_a_step_without_rollouts_can_be_planned_and_measured() -> None:
    plan = plan_batch([], num_ranks=2, mini_batch_sizes=[0, 0], max_tokens=5)
    assert list(plan) == [[[[]], [[]]]] * 2
    nothing = {
        "packing_efficiency_frac": 0.0,
        "rank_cost_spread_frac": 0.0,
        "rank_token_spread_frac": 0.0,
    }
    assert plan_metrics(plan, []) == {**nothing, "micro_batches": 2}


@pytest.mark.parametrize(
    ("num_groups", "num_mini_batches", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [2, 2, 2, 1]),
        (5, 2, [3, 2]),
        (1, 4, [1, 0, 0, 0]),
        (0, 2, [0, 0]),
        (3, 1, [3]),
    ],
)
def test_groups_are_split_over_mini_batches_as_evenly_as_can_be(
    num_groups: int, num_mini_batches: int, expected: list[int]
) -> None:
    assert split_groups(num_groups, num_mini_batches) == expected


def test_rank_with_less_work_gets_empty_rows() -> None:
    # 9 fills rank 0; 5 + 5 over the budget of 9 are two rows on rank 1
    assert plan_batch([9, 5, 5], num_ranks=2, mini_batch_sizes=[3], max_tokens=9)[0] == [
        [[0], []],
        [[1], [2]],
    ]


def test_rollout_over_the_budget_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(11, 10\)"):
        plan_batch([3, 11], num_ranks=1, mini_batch_sizes=[2], max_tokens=10)


def test_plan_metrics_by_hand() -> None:
    # rank 0 has rows of 9 and 0 tokens, rank 1 of 5 and 5: in step they take 9 + 5
    plan, lengths = plan_of([[[[0], []], [[1], [2]]]]), [9, 5, 5]
    assert plan_metrics(plan, lengths) == {
        "packing_efficiency_frac": pytest.approx(19 / (2 * 14)),
        "rank_cost_spread_frac": pytest.approx(0.1),
        "rank_token_spread_frac": pytest.approx(0.1),
        "micro_batches": 2,
    }
    # and with costs of 18, 5, 7: 18 | 5 and 0 | 7
    metrics = plan_metrics(plan, lengths, [18.0, 5.0, 7.0])
    assert metrics["packing_efficiency_frac"] == pytest.approx(30 / (2 * 25))
    assert metrics["rank_cost_spread_frac"] == pytest.approx(6 / 18)
    assert metrics["rank_token_spread_frac"] == pytest.approx(0.1)


def _rollout(
    number: int,
    prompt: list[int],
    completion: list[int],
    advantage: float = 1.0,
    counts: bool = True,
) -> Rollout:
    return Rollout(
        number,
        advantage,
        counts,
        prompt,
        completion,
        [-0.25 * (i + 1) for i in range(len(completion))],
    )


def _row() -> MicroBatch:
    return pack_rollouts(
        [
            _rollout(0, [1, 2], [3, 4, 5], 0.5),
            _rollout(1, [6], [7], -1.5, counts=False),
            _rollout(2, [8, 9], []),
        ],
        CPU,
    )


def test_pack_concatenates_without_padding() -> None:
    row = _row()
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.sequence_lengths == [5, 2, 2]
    # The first token of each, and the end: what the kernels for variable lengths read.
    assert row.sequence_starts.tolist() == [0, 5, 7, 9]
    assert row.sequence_starts.dtype == torch.int32


def test_pack_restarts_positions_in_each_sequence() -> None:
    assert _row().position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1]


def test_pack_predicts_each_completion_token_from_the_token_before_it() -> None:
    row = _row()
    # 3, 4, 5 are predicted at the places of 2, 3, 4; 7 at the place of 6; the empty completion
    # brings nothing
    assert row.predict_index.tolist() == [1, 2, 3, 5]
    assert row.target_ids.tolist() == [3, 4, 5, 7]


def test_pack_names_the_sequence_of_each_token() -> None:
    row = pack_rollouts(
        [
            _rollout(7, [1], []),
            _rollout(5, [1, 2], [3, 4]),
            _rollout(9, [1], []),
            _rollout(2, [6], [7]),
        ],
        CPU,
    )
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
        prompt, completion = (
            rng.choices(range(100), k=rng.randint(1, 5)),
            rng.choices(range(100), k=rng.randint(0, 5)),
        )
        rollouts.append(_rollout(number, prompt, completion))
    if not any(len(r.completion_ids) for r in rollouts):
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
    assert (
        len(row.target_ids)
        == len(row.predict_index)
        == len(row.loss_mask)
        == len(row.advantages)
        == len(row.rollout_logprobs)
        >= 1
    )


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
def test_row_of_empty_completions_counts_nothing_but_can_be_run(prompt: list[int]) -> None:
    row = pack_rollouts([_rollout(0, prompt, [])], CPU)
    assert row.loss_mask.tolist() == [False]
    assert (len(row.target_ids), row.rollout_ids) == (1, [])
    assert 0 <= int(row.predict_index[0]) < len(row.input_ids) == sum(row.sequence_lengths)


def test_number_of_loss_tokens_survives_any_plan() -> None:
    rng = random.Random(3)
    rollouts = [
        _rollout(i, [1] * rng.randint(1, 4), [2] * rng.randint(0, 6), counts=rng.random() < 0.7)
        for i in range(24)
    ]
    expected = sum(len(r.completion_ids) for r in rollouts if r.loss_mask)
    for num_ranks, max_tokens in [(1, 1000), (2, 10), (5, 13)]:
        plan = plan_batch(
            [r.num_tokens for r in rollouts],
            num_ranks=num_ranks,
            mini_batch_sizes=[8, 7, 9],
            max_tokens=max_tokens,
        )
        rows = [
            pack_rollouts([rollouts[i] for i in row], CPU)
            for mini_batch in plan
            for rank in mini_batch
            for row in rank
        ]
        assert sum(int(row.loss_mask.sum()) for row in rows) == expected


def test_rollouts_cross_ranks_unchanged() -> None:
    rollouts = [
        Rollout(0, 1 / 3, True, [1, 2, 3], [4, 5], [-0.125, -(2.0**-149)]),
        Rollout(7, -0.0, False, [2**31 - 1], [], []),
        Rollout(2**40, 1e-300, True, [0], [9], [-math.inf]),
    ]
    assert [_as_lists(r) for r in decode_rollouts(encode_rollouts(rollouts))] == rollouts


def _as_lists(rollout: Rollout) -> Rollout:
    prompt_ids, completion_ids, logprobs = map(
        list, (rollout.prompt_ids, rollout.completion_ids, rollout.rollout_logprobs)
    )
    return Rollout(
        rollout.rollout_id,
        rollout.advantages,
        rollout.loss_mask,
        prompt_ids,
        completion_ids,
        logprobs,
    )


def test_rollouts_that_crossed_are_packed_as_those_that_did_not() -> None:
    rollouts = [
        _rollout(0, [1, 2], [3, 4, 5], 0.5),
        _rollout(3, [9], []),
        _rollout(1, [6], [7], -1.5, counts=False),
    ]
    local, present = (
        pack_rollouts(rollouts, CPU),
        pack_rollouts(decode_rollouts(encode_rollouts(rollouts)), CPU),
    )
    for name, value in vars(local).items():
        assert (
            value.dtype == getattr(present, name).dtype if isinstance(value, torch.Tensor) else True
        )
        torch.testing.assert_close(getattr(present, name), value, rtol=0, atol=0)
    dtypes = {
        name: value.dtype for name, value in vars(local).items() if isinstance(value, torch.Tensor)
    }
    full, real = torch.int64, torch.float32
    assert dtypes == {
        **dict.fromkeys(
            ("input_ids", "position_ids", "predict_index", "target_ids", "sequence_index"), full
        ),
        **dict.fromkeys(("rollout_logprobs", "advantages"), real),
        "loss_mask": torch.bool,
        "sequence_starts": torch.int32,
    }


@pytest.mark.parametrize("name", ["sequence_starts", "position_ids", "target_ids"])
def test_a_row_whose_columns_disagree_is_seen_by_the_running_check(name: str) -> None:
    """Nothing on a CPU reads `sequence_starts`: of a GPU's attention only this would know early."""
    row = _row()
    assert -1 not in dict(_hash_rollouts(row)).values()
    shifted = getattr(row, name).clone()
    shifted[1] += 1
    hashes = dict(_hash_rollouts(dataclasses.replace(row, **{name: shifted})))
    assert -1 in hashes.values()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of 1e39
def test_logprobs_cross_ranks_as_the_float32_that_a_row_holds() -> None:
    rng = np.random.default_rng(0)
    odd = [-0.0, math.inf, -math.inf, 2.0**-149, 2.0**-150, -3.4028234663852886e38, 1e39, math.nan]
    values = [*odd, -0.1, *(-rng.exponential(size=1000)).tolist()]
    sent = Rollout(0, 0.5, True, [1], [2] * len(values), values)
    payload = encode_rollouts([sent])
    # Ids and logprobs of 4 bytes each, a bit of the mask, and a few bytes around them.
    assert 0 < len(payload) - len(values) * 8.125 < 60
    assert pack_rollouts([sent], CPU).rollout_logprobs.numpy().tobytes() == (
        pack_rollouts(decode_rollouts(payload), CPU).rollout_logprobs.numpy().tobytes()
    )


def test_no_rollouts_cross_ranks_as_none() -> None:
    assert decode_rollouts(encode_rollouts([])) == []


def test_masks_and_advantages_per_token_cross_ranks_and_enter_the_loss() -> None:
    """A rollout of which two middle tokens do not count; an ordinary one; one of which no token
    counts. Masks are made on the rank that trains, advantages cross ranks."""
    logprobs = [-1.0, -2.0, -3.0, -4.0]
    mixed = Rollout(
        4,
        np.array([1.0, 9.0, 9.0, -2.0]),
        np.array([True, False, False, True]),
        [1],
        [2, 3, 4, 5],
        logprobs,
    )
    none = Rollout(6, np.array([7.0, 8.0]), False, [1], [2, 3], logprobs[:2])
    crossed = decode_rollouts(encode_rollouts([Rollout(5, 0.5, True, [1], [6], [-0.5]), none]))
    assert (crossed[0].loss_mask, crossed[0].advantages, crossed[1].loss_mask) == (True, 0.5, False)
    row = pack_rollouts([mixed, *crossed], CPU)
    assert row.loss_mask.tolist() == [True, False, False, True, True, False, False]
    assert row.advantages.tolist() == [1.0, 9.0, 9.0, -2.0, 0.5, 7.0, 8.0]

    # The first token's ratio is 1.1, all others' are 1. Tokens: -(1.1 * 1 - 2 + 0.5) / 3, and the
    # gradient -A r / 3.
    # Sequences: -((1.1 - 2) / 2 + 0.5) / 2.
    old = row.rollout_logprobs.double()
    for aggregation, expected, gradient in (
        ("token", 0.4 / 3, [-1.1 / 3, 0.0, 0.0, 2 / 3, -0.5 / 3, 0.0, 0.0]),
        ("sequence", -0.025, [-0.275, 0.0, 0.0, 0.5, -0.25, 0.0, 0.0]),
    ):
        policy = (
            old + torch.tensor([math.log(1.1), *[0.0] * 6], dtype=torch.float64)
        ).requires_grad_()
        weights = aggregation_weights(aggregation, row.loss_mask, row.sequence_index, 3, 2, 10)
        advantages = row.advantages.double()
        entropy = torch.zeros_like(old)
        inputs = LossInputs(
            policy, entropy, old, None, advantages, row.loss_mask, row.sequence_index, weights
        )
        loss, sums = policy_loss(inputs, LossConfig())
        assert float(loss.detach()) == pytest.approx(expected)
        assert torch.autograd.grad(loss, policy)[0].tolist() == pytest.approx(gradient)
        assert int(sums["loss_tokens"].value) == 3
