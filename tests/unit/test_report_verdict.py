"""What a report says of a run: each trouble is found in the metrics that a run writes, at the step
where it began; and
a run that learns is left in peace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.diagnosis.curves import Check, Finding
from grpo_spmd.diagnosis.findings import list_checks, list_findings
from grpo_spmd.diagnosis.run import read_run
from tests.support.reported import LAUNCH, healthy, make_run

Lines = list[dict[str, Any]]
STEPS, FIRST = 200, 120  # of the run; at which a trouble begins


def _found(folder: Path, lines: Lines, **method: Any) -> list[Finding]:
    return list_findings(read_run(make_run(folder, lines, **method)))


def _checked(folder: Path, lines: Lines, **method: Any) -> dict[str, Check]:
    return {check.name: check for check in list_checks(read_run(make_run(folder, lines, **method)))}


@pytest.mark.parametrize("num_steps", [1, 3, 20, STEPS, 1000])
def test_a_run_that_learns_is_left_in_peace(num_steps: int, tmp_path: Path) -> None:
    for seed in range(3):
        run = read_run(make_run(tmp_path, healthy(num_steps, seed)))
        assert [(result.level, result.title) for result in list_findings(run)] == [
            ("ok", "nothing stands out")
        ]
        assert {check.level for check in list_checks(run)} == {"ok"}


def _set(key: str, value: float | Callable[[int], float]) -> Callable[[dict[str, Any]], None]:
    def plant(line: dict[str, Any]) -> None:
        line[key] = value(line["step"] - FIRST) if callable(value) else value

    return plant


def _all(*plants: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def plant(line: dict[str, Any]) -> None:
        for single in plants:
            single(line)

    return plant


_LOST = _set("reward/mean", 0.2)  # it had come to 0.54
# title, level, metric, what is planted from step FIRST on, how many steps later it may be seen
TROUBLES: list[tuple[str, str, str, Callable[[dict[str, Any]], None], int]] = [
    ("groups are alike", "bad", "reward/zero_std_groups_frac", _set("reward/zero_std_groups_frac", 0.97), 0),  # noqa: E501
    ("groups are alike", "warning", "reward/zero_std_groups_frac", _set("reward/zero_std_groups_frac", 0.85), 0),  # noqa: E501
    ("completions have no "
     "reward", "bad", "reward/unscored_frac", _set("reward/unscored_frac", 0.4), 0),
    ("completions have no "
     "reward", "warning", "reward/unscored_frac", _set("reward/unscored_frac", 0.1), 0),
    ("the reward falls", "bad", "reward/mean", _LOST, 0),
    ("the reward falls", "bad", "reward/mean", _set("reward/mean", lambda i: 0.54 - 0.01 * i), 30),
    ("reward math fails", "warning", "reward/math/error_frac", _set("reward/math/error_frac", 0.02), 0),  # noqa: E501
    ("reward math fails", "bad", "reward/math/error_frac", _set("reward/math/error_frac", 0.2), 0),
    ("reward math times out", "warning", "reward/math/timeout_frac", _set("reward/math/timeout_frac", 0.02), 0),  # noqa: E501
    ("the environment fails", "warning", "episode/env_error_frac", _set("episode/env_error_frac", 0.05), 0),  # noqa: E501
    ("the environment times "
     "out", "bad", "episode/env_timeout_frac", _set("episode/env_timeout_frac", 0.2), 0),
    ("completions are cut off", "warning", "completion/truncated_frac", _set("completion/truncated_frac", 0.35), 0),  # noqa: E501
    ("completions are cut off", "bad", "completion/truncated_frac", _set("completion/truncated_frac", 0.95), 0),  # noqa: E501
    ("lengths explode", "warning", "completion/tokens_mean",
     _all(_set("completion/tokens_mean", 2600.0), _set("reward/mean", 0.3)), 0),
    ("lengths collapse", "warning", "completion/tokens_mean", _all(_set("completion/tokens_mean", 20.0), _LOST), 0),  # noqa: E501
    ("the entropy is gone", "bad", "loss/entropy", _set("loss/entropy", 0.005), 0),
    ("the entropy collapses", "warning", "loss/entropy", _all(_set("loss/entropy", 0.03), _LOST), 0),  # noqa: E501
    ("the entropy explodes", "warning", "loss/entropy", _all(_set("loss/entropy", 3.0), _LOST), 0),
    ("updates are skipped", "bad", "optim/skipped_updates", _set("optim/skipped_updates", 1.0), 0),
    ("no update is made", "bad", "optim/grad_norm", _set("optim/updates", 0.0), 0),
    ("the gradient is 0", "bad", "optim/grad_norm", _set("optim/grad_norm", 0.0), 0),
    ("engine and policy drift apart", "warning", "weight_sync/mismatch_abs_mean",
     _set("weight_sync/mismatch_abs_mean", lambda i: 0.002 + 0.0001 * i), 30),
    ("engine and policy near their bound", "warning", "weight_sync/mismatch_abs_mean",
     _set("weight_sync/mismatch_abs_mean", 0.02), 0),
    ("engine and policy differ", "bad", "weight_sync/mismatch_abs_mean",
     _set("weight_sync/mismatch_abs_mean", 0.2), 0),
    ("engine and policy near their bound", "warning", "weight_sync/mismatch_abs_max",
     _set("weight_sync/mismatch_abs_max", 10.0), 0),
    ("memory grows", "warning", "memory/sleep/left_gib",
     _set("memory/sleep/left_gib", lambda i: 3 + 0.05 * i), 30),
    ("ranks wait for the slowest completion", "warning", "rollout/tail_waste_frac",
     _set("rollout/tail_waste_frac", 0.5), 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("title", "level", "metric", "plant", "late"),
    TROUBLES,
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_trouble_is_found_where_it_began(
    title: str,
    level: str,
    metric: str,
    plant: Callable[[dict[str, Any]], None],
    late: int,
    tmp_path: Path,
) -> None:
    for seed in range(2):
        lines = healthy(STEPS, seed)
        for line in lines[FIRST - 1 :]:
            plant(line)
        result = [
            single
            for single in _found(tmp_path, lines)
            if (single.title, single.metric) == (title, metric)
        ]
        assert [single.level for single in result] == [level], _found(tmp_path, lines)
        early = (
            8 if late or "wait" in title else 1
        )  # curves have noise, and of ranks' waiting a mean is judged
        assert FIRST - early <= (result[0].step or 0) <= FIRST + late, result


def test_a_single_spike_of_the_gradient(tmp_path: Path) -> None:
    lines = healthy(STEPS)
    lines[FIRST - 1]["optim/grad_norm"] = 40.0
    (result,) = _found(tmp_path, lines)
    assert (result.level, result.title, result.step) == ("warning", "the gradient spikes", FIRST)


def test_one_step_of_bad_luck_is_nothing(tmp_path: Path) -> None:
    lines = healthy(STEPS)
    lines[FIRST - 1] |= {
        "reward/zero_std_groups_frac": 1.0,
        "completion/truncated_frac": 0.9,
        "reward/mean": 0.0,
    }
    assert [result.title for result in _found(tmp_path, lines)] == ["nothing stands out"]


def test_what_is_over_is_said_with_its_end(tmp_path: Path) -> None:
    lines = healthy(STEPS)
    for line in lines[49:90]:
        line["completion/truncated_frac"] = 0.95
    (result,) = _found(tmp_path, lines)
    assert (result.level, result.title, result.step) == ("warning", "completions are cut off", 50)
    assert "from step 50 to 90" in result.text


@pytest.mark.parametrize("taught_by", ["teacher/kl", "critic/loss"])
def test_alike_groups_are_nothing_where_something_else_teaches_them(
    taught_by: str, tmp_path: Path
) -> None:
    lines = [
        line | {"reward/zero_std_groups_frac": 0.97, taught_by: 0.1} for line in healthy(STEPS)
    ]
    assert "groups are alike" not in [result.title for result in _found(tmp_path, lines)]


def test_alike_groups_of_a_task_that_was_learned_are_no_warning(tmp_path: Path) -> None:
    lines = healthy(STEPS)
    for line in lines:
        line["reward/mean"] = min(0.2 + 0.01 * line["step"], 0.99)
        line["reward/zero_std_groups_frac"] = 0.95 if line["step"] >= FIRST else 0.2
        line["reward/std"] = (line["reward/mean"] * (1 - line["reward/mean"])) ** 0.5
    assert [(result.level, result.title, result.step) for result in _found(tmp_path, lines)][
        :1
    ] == [("ok", "the prompts are nearly solved", FIRST)]


def test_an_evaluation_that_falls_while_the_training_reward_rises(tmp_path: Path) -> None:
    lines = healthy(STEPS)
    # the best is after step 80
    values = {0: 0.3, 40: 0.5, 80: 0.6, 120: 0.45, 160: 0.4, 200: 0.35}
    retained = [
        {"step": step, "eval/held/mean": value, "eval/held/num_prompts": 400}
        for step, value in values.items()
    ]
    (result,) = _found(tmp_path, [*lines, *retained])
    assert (result.level, result.title, result.step) == ("warning", "evaluation held falls", 120)
    few = [
        line | {"eval/held/num_prompts": 10} for line in retained
    ]  # 2 standard errors of 10 prompts are 0.32
    assert [result.title for result in _found(tmp_path, [*lines, *few])] == ["nothing stands out"]


def test_how_it_ended_comes_first(tmp_path: Path) -> None:
    reason = "rank 1 failed first, in phase update, step 3: ValueError: nope"
    (initial, *_) = _found(
        tmp_path, healthy(80), launch=LAUNCH | {"outcome": "failed", "why": reason}
    )
    assert (initial.level, initial.title, initial.step) == ("bad", "the run failed", 80)
    assert reason in initial.text


def test_checks_have_the_margins_of_the_proofs(tmp_path: Path) -> None:
    lines = healthy(STEPS)
    lines[0]["weight_sync/mismatch_abs_mean"] = 0.01
    lines[99]["weight_sync/mismatch_abs_mean"] = 0.03
    lines[49]["reward/math/error_frac"], lines[49]["reward/math/timeout_frac"] = 0.1, 0.08
    checked = _checked(tmp_path, lines)
    mean = checked[
        "logprobs, mean"
    ]  # bfloat16: later bounds are 4 times the first mean, which is 0.01
    assert (mean.level, mean.value, mean.bound) == ("warning", "0.03 at step 100", "0.04")
    errors = checked["reward math"]
    assert (errors.level, errors.value, errors.bound) == ("bad", "18.00% at step 50", "30%")
    assert (
        checked["weight sync"].value == "passed 8 times, last at step 200"
    )  # 1, 50, 51, 100, 101, 150, 151, 200
    assert (checked["finite updates"].level, checked["finite updates"].value) == ("ok", "0 skipped")
    assert checked["tokens trained on"].value == "passed 200 times, last at step 200"


def test_a_check_that_is_switched_off_is_named(tmp_path: Path) -> None:
    lines = [{**line, "proofs/update_check_s": 0.0} for line in healthy(20)]
    config = "run_dir: r\nmodel: {path: m, dtype: bfloat16}\nproofs: {update: false}\n"
    assert "update" not in _checked(tmp_path, lines, config=config)
    (finding,) = list_findings(read_run(tmp_path))
    assert (finding.level, finding.title) == ("warning", "proofs.update is false")
    assert finding.text == "nothing compares the update with a plain recomputation."
    _checked(tmp_path / "on", lines)
    assert "proofs" not in str(list_findings(read_run(tmp_path / "on")))


def test_the_bound_that_the_config_sets_is_the_bound(tmp_path: Path) -> None:
    config = "run_dir: r\nmodel: {path: m, dtype: float32}\nproofs: {max_mismatch: 0.01}\n"
    checked = _checked(tmp_path, healthy(20), config=config)
    assert checked["logprobs, mean"].bound == "0.01"
    assert "logprobs, largest" not in checked  # proofs.max_mismatch leaves the largest unbounded


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (
            "step 40: the engine does not hold the policy's weights in 1 of 25 tensors",
            "weight sync",
        ),
        ("step 4: trained on 12 tokens where rank 0 had decided on 13", "tokens trained on"),
    ],
)
def test_the_check_that_stopped_a_run_is_broken(reason: str, name: str, tmp_path: Path) -> None:
    checked = _checked(tmp_path, healthy(40), launch=LAUNCH | {"outcome": "failed", "why": reason})
    assert [check.name for check in checked.values() if check.level != "ok"] == [name]
    assert checked[name].value == "broken"


def test_a_reward_that_only_jumps_about_does_not_fall(tmp_path: Path) -> None:
    for seed in range(10):
        rng, lines = np.random.default_rng(seed), healthy(STEPS, seed)
        for line in lines:
            line |= {"reward/mean": 0.4 + 0.3 * rng.normal(), "reward/std": 0.1}
        assert [result.title for result in _found(tmp_path, lines)] == ["nothing stands out"], seed


def test_a_single_step_near_a_bound_is_not_passed_over(tmp_path: Path) -> None:
    lines = healthy(60)
    lines[40]["weight_sync/mismatch_abs_mean"] = 0.029  # the bound is 0.03
    (result,) = _found(tmp_path, lines)
    assert (result.level, result.title) == (
        "warning",
        "the check of logprobs, mean is not far from its bound",
    )
    assert "0.029 at step 41; its bound is 0.03" in result.text
