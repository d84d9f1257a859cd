"""Dynamic sampling: which prompts are drawn, which groups stay, what is trained on them, by hand
and in a whole run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.learn.advantages import compute_advantages
from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.ranks import run_worker, train
from tests.support.workers.sampling import GROUP_SIZE, SCENARIOS

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def by_ranks(folder: Path) -> dict[int, Results]:
    sections: dict[str, Any] = {"loss": {"aggregation": "sequence"}, "optimizer": {"lr": 1e-5}}
    config = write_config(folder, folder / "model", rollout={"group_size": GROUP_SIZE}, **sections)
    result = {}
    for num_ranks in (1, 2):
        out = folder / f"ranks_{num_ranks}.pt"
        run_worker(num_ranks, "sampling", str(config), str(out))
        result[num_ranks] = torch.load(out, weights_only=True)
    return result


@pytest.fixture(scope="module")
def steps(by_ranks: dict[int, Results]) -> Results:
    return by_ranks[1]


@pytest.mark.parametrize(
    ("scenario", "drawn", "positions"),
    [
        # 1 of 4 stayed: 3 missing / (1/4) = 12, but no more than a step's prompts at a time: 4.
        # Then 4, 6, 7 stay:
        # full.
        ("filled in two rounds", [[0, 1, 2, 3], [4, 5, 6, 7]], [2, 4, 6, 7]),
        # 6 of 8 stayed: 2 missing / (6/8) = 2.67, rounded up. All 3 stay: one is over, the last of
        # the stream, though
        # it is the shortest.
        ("surplus", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]], [0, 1, 3, 4, 5, 7, 8, 9]),
        # 0 of 4 stayed: taken as 1/4, again 4
        ("nothing kept at first", [[0, 1, 2, 3], [4, 5, 6, 7]], [4, 5, 6, 7]),
        # 3 of 8, 3 of 16, 3 of 24: 5 missing, so 8 each time. 7 of 32: 1 missing / (1/4), since
        # less is taken for bad
        # luck: 4.
        (
            "unlucky",
            [[*range(8)], [*range(8, 16)], [*range(16, 24)], [*range(24, 32)], [32, 33, 34, 35]],
            [0, 1, 2, 24, 25, 26, 27, 33],
        ),
        # 1 of 4: 4. 2 of 8: 2 missing / (1/4) = 8, so 4. The last round brings 1 of 4, and the cap
        # of 3 rounds is
        # reached.
        ("three rounds", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [0, 4, 9]),
        ("no dynamic sampling", [[0, 1, 2, 3]], [0, 1, 2, 3]),
        # 2 of 4: 2 missing / (1/2) = 4. One stays: 3 of 4, and the cap is reached.
        ("partly filled", [[0, 1, 2, 3], [4, 5, 6, 7]], [1, 3, 6]),
        ("empty", [[0, 1, 2, 3], [4, 5, 6, 7]], []),
        ("as many as stayed", [[1, 3, 6]], [1, 3, 6]),
    ],
)
def test_refill_by_hand(
    steps: Results, scenario: str, drawn: list[list[int]], positions: list[int]
) -> None:
    step = steps[scenario]
    assert step["drawn"] == drawn
    assert step["missing"] == [*map(len, drawn), 0]
    # What the share of failed rewards is taken of: the whole step so far, not the round.
    assert step["announced"] == [2 * sum(map(len, drawn[: i + 1])) for i in range(len(drawn))]
    assert step["decision"]["positions"] == positions


def test_every_prompt_of_the_stream_is_drawn_exactly_once(steps: Results) -> None:
    for scenario, step in steps.items():
        assert SCENARIOS[scenario].only or [
            p for prompts in step["drawn"] for p in prompts
        ] == list(range(step["stream_position"]))


def test_metrics_are_over_all_sampled_groups(steps: Results) -> None:
    metrics = steps["surplus"]["decision"]["metrics"]
    # 11 groups of 2: 9 with rewards 1 and 0, 2 with rewards 1 and 1
    assert metrics["reward/mean"] == pytest.approx((9 * 1 + 2 * 2) / 22)
    assert metrics["reward/made_up/mean"] == pytest.approx(13 / 22)
    assert metrics["reward/zero_std_groups_frac"] == pytest.approx(2 / 11)
    # lengths 12 - position, for positions 0 .. 10
    assert metrics["completion/tokens_mean"] == pytest.approx(sum(12 - p for p in range(11)) / 11)
    assert {
        n.split("/")[1]: v for n, v in metrics.items() if n.startswith("dynamic_sampling/")
    } == {
        "rounds": 2,
        "sampled_groups": 11,
        "alike_groups": 2,
        "surplus_groups": 1,
        "missing_groups": 0,
    }
    assert steps["surplus"]["decision"]["num_sampled_tokens"] == 2 * sum(12 - p for p in range(11))
    partly = steps["partly filled"]["decision"]["metrics"]
    assert (
        partly["dynamic_sampling/missing_groups"],
        partly["dynamic_sampling/surplus_groups"],
    ) == (1, 0)
    assert (partly["reward/mean"], partly["dynamic_sampling/alike_groups"]) == (
        (3 * 1 + 5 * 2) / 16,
        5,
    )
    assert not [
        name
        for name in steps["no dynamic sampling"]["decision"]["metrics"]
        if name.startswith("dynamic_sampling/")
    ]


def test_only_the_groups_that_stay_are_trained_with_their_own_advantages(steps: Results) -> None:
    # rewards 1 and 0: mean 1/2, std sqrt(1/2), so +-0.7071068; group i of those that stay is
    # rollouts 2i and 2i + 1
    for scenario in ("surplus", "partly filled"):
        step = steps[scenario]
        positions, trained = step["decision"]["positions"], step["advantages_trained"]
        assert [item[1] for item in trained] == list(range(2 * len(positions)))
        for _, rollout_id, token_ids, advantages in trained:
            assert len(token_ids) == 12 - positions[rollout_id // 2]
            assert advantages == [pytest.approx(-0.7071068 if rollout_id % 2 else 0.7071068)]


def test_a_partly_filled_step_divides_by_what_it_trains_on(steps: Results) -> None:
    decision, sums = steps["partly filled"]["decision"], steps["partly filled"]["sums"]
    # positions 1, 3, 6 have completions of 11, 9 and 6 tokens, two each
    assert (decision["num_loss_tokens"], decision["num_loss_sequences"], sums["loss_tokens"]) == (
        [52],
        [6],
        52,
    )
    assert decision["num_tokens"] == 52 + 6 * 2
    # as a step without dynamic sampling that drew these prompts and no others
    for name, expected in steps["as many as stayed"]["parameters"].items():
        assert torch.equal(steps["partly filled"]["parameters"][name], expected), name


def test_a_partly_filled_step_of_several_mini_batches_skips_those_without_groups(
    steps: Results,
) -> None:
    step = steps["partly filled, four mini-batches"]
    assert step["decision"]["positions"] == [1, 6]
    assert step["decision"]["num_loss_tokens"] == [22, 12, 0, 0]
    assert step["decision"]["num_loss_sequences"] == [2, 2, 0, 0]
    assert (step["sums"]["optim/updates"], step["lr_steps"]) == (2, 2)
    assert [item[0] for item in step["advantages_trained"]] == [0, 0, 1, 1]


@pytest.mark.parametrize("scenario", ["empty", "empty, two mini-batches"])
def test_an_empty_step_changes_nothing(steps: Results, scenario: str) -> None:
    step = steps[scenario]
    assert step["moved"] == []  # weight decay would have
    assert (
        step["optimizer_state"],
        step["lr_steps"],
        step["sums"]["optim/updates"],
        step["sums"]["optim/skipped_updates"],
    ) == (0, 0, 0, 0)
    assert step["decision"]["metrics"]["reward/mean"] == 1.0
    assert steps["partly filled"]["moved"]
    assert steps["partly filled"]["optimizer_state"] > 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_decide_and_train_as_one_does(
    by_ranks: dict[int, Results], scenario: str
) -> None:
    single, two = by_ranks[1][scenario], by_ranks[2][scenario]
    for name in ("drawn", "missing", "advantages_trained", "lr_steps"):
        assert single[name] == two[name], name
    for name, value in single["decision"].items():
        if name == "metrics":
            value, second = (
                {n: v for n, v in of.items() if not n.startswith("batching/")}
                for of in (value, two["decision"][name])
            )
            assert value == second
        else:
            assert value == two["decision"][name], name
    for name, expected in single["parameters"].items():
        assert (
            float((two["parameters"][name] - expected).norm().detach() / expected.norm().detach())
            < 1e-6
        ), name


# A whole run


@pytest.fixture(scope="module")
def run(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Three steps on two ranks with real vLLM: the reward is whether a completion of a random model
    begins with a low
    token id."""
    (folder / "reward.py").write_text(
        "def low(completion_ids, **columns):\n    return [float(ids[0] < 25) for ids in "
        "completion_ids]\n"
    )
    config = write_config(
        folder,
        folder / "model",
        rollout={
            "num_prompts_per_step": 6,
            "group_size": 3,
            "max_completion_tokens": 6,
            "dynamic_sampling": True,
            "dynamic_sampling_max_rounds": 3,
        },
        rewards=[{"function": f"{folder}/reward.py:low"}],
        optimizer={"lr": 1e-4},
        training={"num_steps": 3},
    )
    train(2, config)
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [(m, dumped(folder / "run", m["step"])) for m in metrics]


def test_a_whole_run_keeps_the_first_groups_that_differ(
    run: list[tuple[dict[str, Any], list[dict[str, Any]]]],
) -> None:
    assert len(run) == 3
    position = 0
    for metrics, rollouts in run:
        groups = [rollouts[i : i + 3] for i in range(0, len(rollouts), 3)]
        positions = [group[0]["position"] for group in groups]
        # the stream goes on where the step before left it
        assert positions == list(range(position, position + len(groups)))
        position += len(groups)
        assert all(
            [r["sample"] for r in group] == [0, 1, 2] and len({r["position"] for r in group}) == 1
            for group in groups
        )
        differ = [group for group in groups if len({r["reward"] for r in group}) > 1]
        retained = differ[:6]
        for group in groups:
            expected = (
                [3 * retained.index(group) + sample for sample in range(3)]
                if group in retained
                else [None] * 3
            )
            assert [r["rollout_id"] for r in group] == expected
            advantages, _ = compute_advantages(
                torch.tensor([[r["reward"] for r in group]]), "grpo", "group"
            )
            if group in retained:
                assert [r["advantage"] for r in group] == pytest.approx(advantages[0].tolist())
            else:
                assert [r["advantage"] for r in group] == [None] * 3
        assert metrics["dynamic_sampling/sampled_groups"] == len(groups)
        assert metrics["dynamic_sampling/alike_groups"] == len(groups) - len(differ)
        assert metrics["dynamic_sampling/surplus_groups"] == len(differ) - len(retained)
        assert metrics["dynamic_sampling/missing_groups"] == 6 - len(retained)
        assert metrics["reward/mean"] == pytest.approx(
            sum(r["reward"] for r in rollouts) / len(rollouts)
        )
        # the engine is not put to sleep between rounds, nor left awake
        assert metrics["weight_sync/mismatch_abs_mean"] < 1e-5
        assert math.isfinite(metrics["optim/grad_norm"])


def test_the_whole_run_did_refill_and_did_drop(
    run: list[tuple[dict[str, Any], list[dict[str, Any]]]],
) -> None:
    assert max(metrics["dynamic_sampling/rounds"] for metrics, _ in run) > 1
    assert all(any(r["rollout_id"] is None for r in rollouts) for _, rollouts in run)
