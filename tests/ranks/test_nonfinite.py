"""Loss or gradient that is not finite: all ranks skip alike, say which rollouts, and stop after
several in a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.ranks import RanksJob, run_worker
from tests.support.workers.update import GROUP_SIZE, NUM_GROUPS, UNSCORED, fixed_groups

LR = 1e-3


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, dict[str, Any]]:
    sections: dict[str, Any] = {
        "data": {"max_prompt_tokens": 9},
        "rollout": {
            "num_prompts_per_step": NUM_GROUPS,
            "group_size": GROUP_SIZE,
            "max_completion_tokens": 28,
        },
        "training": {"max_tokens_per_micro_batch": 100},
        "optimizer": {"lr": LR, "warmup_steps": 10},
        "advantage": {"estimator": "dr_grpo"},
    }
    config = write_config(folder, folder / "model", **sections)
    run_worker(2, "nonfinite", str(config), str(folder / "out.pt"))
    result: dict[str, dict[str, Any]] = torch.load(folder / "out.pt", weights_only=True)
    return result


def test_a_clean_update_moves_everything(cases: dict[str, dict[str, Any]]) -> None:
    clean = cases["clean"]
    assert len(clean["moved"][0]) == len(clean["state"])
    assert [
        (r["optim/updates"], r["optim/skipped_updates"], r["nonfinite_rollouts"])
        for r in clean["returned"][0]
    ] == [(1, 0, []), (1, 0, [])]
    assert clean["learning_rates"] == [
        pytest.approx(0.2 * LR)
    ]  # of the next update, in a warm-up over ten


def test_an_update_given_up_before_its_first_optimizer_step_leaves_the_state_that_it_began_with(
    cases: dict[str, dict[str, Any]],
) -> None:
    """Asked after each micro-batch of the first mini-batch, and told which is its last; never after
    that."""
    result = cases["given up"]
    assert result["num_stopped"] == 2  # by the pass over old logprobs, by the update
    assert result["moved"] == []
    assert result["same_counts"]
    initial, second = result["sizes"]
    assert initial > 1
    assert second > 0
    assert result["asked"] == [False] * (initial - 1) + [True]


@pytest.mark.parametrize(
    "case", ["nan of the engine", "gradient alone", "inf in a parameter of rank 1"]
)
def test_all_ranks_skip_alike_and_nothing_moves(
    cases: dict[str, dict[str, Any]], case: str
) -> None:
    result = cases[case]
    for rank in (0, 1):
        sums = result["returned"][0][rank]
        assert (sums["optim/updates"], sums["optim/skipped_updates"], sums["skipped_in_a_row"]) == (
            0,
            1,
            1,
        )
        assert [sums[name] for name in ("policy", "kl", "entropy", "loss_tokens")] == [0.0] * 4
        means = (
            "loss/clip_frac",
            "rollout_correction/weight_mean",
            "rollout_correction/capped_frac",
        )
        assert [sums[name] for name in (*means, "optim/grad_norm", "optim/lr")] == [None] * 5
    assert result["moved"] == [[]]  # no parameter, no moment of the optimizer
    assert result["learning_rates"] == [pytest.approx(0.1 * LR)]


def test_a_nan_of_the_engine_is_on_one_rank_and_names_its_rollout(
    cases: dict[str, dict[str, Any]],
) -> None:
    result = cases["nan of the engine"]
    assert sorted(sums["nonfinite_rollouts"] for sums in result["returned"][0]) == [[], [2]]


def test_a_gradient_alone_is_enough_and_no_rollout_is_blamed(
    cases: dict[str, dict[str, Any]],
) -> None:
    result = cases["gradient alone"]
    assert result["loss_is_finite"] == [[True, True]]
    assert [sums["nonfinite_rollouts"] for sums in result["returned"][0]] == [[], []]


def test_a_spoilt_parameter_of_one_rank_shows_in_every_rollout_that_counts(
    cases: dict[str, dict[str, Any]],
) -> None:
    result = cases["inf in a parameter of rank 1"]
    assert result["loss_is_finite"] == [[False, False]]
    unscored = UNSCORED[0] * GROUP_SIZE + UNSCORED[1]
    actual = sorted(i for sums in result["returned"][0] for i in sums["nonfinite_rollouts"])
    assert actual == [i for i in range(NUM_GROUPS * GROUP_SIZE) if i != unscored]


def test_a_nan_in_a_masked_place_changes_nothing(cases: dict[str, dict[str, Any]]) -> None:
    masked, clean = cases["nan in a masked place"], cases["clean"]
    assert masked["returned"] == clean["returned"]
    assert all(torch.equal(value, clean["state"][name]) for name, value in masked["state"].items())


def test_the_count_in_a_row_goes_on_over_steps_and_a_finite_update_ends_it(
    cases: dict[str, dict[str, Any]],
) -> None:
    result = cases["in a row"]
    for rank in (0, 1):
        sums = [returned[rank] for returned in result["returned"]]
        assert [s["skipped_in_a_row"] for s in sums] == [1, 2, 0, 1, 0]
        assert [s["optim/skipped_updates"] for s in sums] == [1, 1, 0, 1, 0]
        assert [s["optim/updates"] for s in sums] == [0, 0, 1, 0, 1]
    assert [bool(moved) for moved in result["moved"]] == [False, False, True, False, True]
    assert result["learning_rates"] == pytest.approx(
        [0.1 * LR, 0.1 * LR, 0.2 * LR, 0.2 * LR, 0.3 * LR]
    )


def test_updates_around_a_skipped_one_are_as_if_it_had_not_been(
    cases: dict[str, dict[str, Any]],
) -> None:
    assert all(
        torch.equal(value, cases["clean twice"]["state"][name])
        for name, value in cases["in a row"]["state"].items()
    )


def test_the_other_mini_batch_is_trained_on(cases: dict[str, dict[str, Any]]) -> None:
    result = cases["one mini-batch of two"]
    tokens = [sum(len(c.token_ids) for c in group.completions) for group in fixed_groups()]
    counting = sum(tokens[3:]) - len(fixed_groups()[UNSCORED[0]].completions[UNSCORED[1]].token_ids)
    for sums in result["returned"][0]:
        assert (sums["optim/updates"], sums["optim/skipped_updates"], sums["skipped_in_a_row"]) == (
            1,
            1,
            1,
        )
    assert sum(sums["loss_tokens"] for sums in result["returned"][0]) == counting
    assert sum(sum(sums["mismatch_ratios"]) for sums in result["returned"][0]) == counting
    assert sorted(sums["nonfinite_rollouts"] for sums in result["returned"][0]) == [[], [2]]


def test_a_run_stops_after_several_in_a_row_with_the_rollouts_on_disk(folder: Path) -> None:
    """Steps 1, 3 and 4 have rewards whose gradients overflow; step 2 between them is trained on as
    ever."""
    (folder / "reward.py").write_text(
        "def reward(completion_ids, factor, **columns):\n    return [f * (ids[0] % 7) for ids, f "
        "in "
        "zip(completion_ids, factor)]\n"
    )
    rows = [{"prompt": "1,2=3:", "factor": 1.0 if row // 4 == 1 else 1e29} for row in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write_config(
        folder,
        folder / "model",
        data={"train": str(folder / "rows.jsonl"), "shuffle": False},
        rewards=[{"function": f"{folder}/reward.py:reward"}],
        advantage={"estimator": "dr_grpo"},
        optimizer={"lr": 1e-4},
        training={"num_steps": 6, "max_nonfinite_in_a_row": 2},
        logging={"rollouts_every_steps": 0},
    )
    code, output = RanksJob(2, "grpo_spmd.train", "--config", str(config)).wait(300)
    assert code == 1
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [m["optim/skipped_updates"] for m in metrics] == [1, 0, 1, 1], output
    assert [m["optim/updates"] for m in metrics] == [0, 1, 0, 0]
    for name in (
        "loss/total",
        "loss/clip_frac",
        "optim/grad_norm",
        "optim/lr",
        "weight_sync/mismatch_kl",
        "rollout_correction/weight_mean",
    ):
        assert [m[name] is None for m in metrics] == [True, False, True, True], (
            name
        )  # nothing was measured: not 0
    for step in (1, 3, 4):
        assert [rollout["rollout_id"] for rollout in dumped(folder / "run", step)] == list(
            range(16)
        )
    assert not (folder / "run/rollouts/step_000002.jsonl").exists()
    assert "step 1: 1 updates skipped, since loss or gradient was not finite" in output
    stop = (
        "step 4: 1 updates skipped, since loss or gradient was not finite; no single "
        "rollout's logprobs show it; see "
    )
    assert (
        f"FloatingPointError: {stop}{folder}/run/rollouts/step_000004.jsonl. That is 2 in a row"
        in output
    )
    assert not (folder / "run/checkpoints").exists()
