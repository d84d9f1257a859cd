"""The learning rate of each optimizer step, beside torch's and transformers' own schedules and
numbers by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from transformers import get_scheduler

from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, OptimizerConfig, TrainingConfig
from grpo_spmd.model.schedule import changed_schedule, lr_fraction, schedule_rows
from grpo_spmd.proofs import update_check
from tests.support.models import write_config

_N = 40


def _rates(config: OptimizerConfig, num_all: int = _N) -> list[float]:
    return [config.lr * lr_fraction(config, created, num_all) for created in range(num_all)]


def _plain_optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def _of_scheduler(
    optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> list[float]:
    rates = []
    for _ in range(_N):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


def test_cosine_with_a_floor_is_torchs() -> None:
    optimizer = _plain_optimizer(3e-4)
    theirs = _of_scheduler(optimizer, CosineAnnealingLR(optimizer, _N, eta_min=1e-5))
    assert _rates(OptimizerConfig(lr=3e-4, schedule="cosine", min_lr=1e-5)) == pytest.approx(
        theirs, rel=1e-9
    )


def test_linear_with_a_floor_is_torchs() -> None:
    optimizer = _plain_optimizer(1.0)
    theirs = _of_scheduler(optimizer, LinearLR(optimizer, 1.0, 0.25, total_iters=_N))
    assert _rates(OptimizerConfig(lr=1.0, schedule="linear", min_lr=0.25)) == pytest.approx(
        theirs, rel=1e-9
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "floor"),
    [("linear", "linear", 0.0), ("cosine", "cosine", 0.0), ("cosine", "cosine_with_min_lr", 0.2)],
)
def test_after_the_warmup_it_is_transformers(ours: str, theirs: str, floor: float) -> None:
    optimizer = _plain_optimizer(2.0)
    inputs = {"scheduler_specific_kwargs": {"min_lr": floor}} if floor else {}
    expected_names = _of_scheduler(optimizer, get_scheduler(theirs, optimizer, 8, _N, **inputs))
    rates = _rates(OptimizerConfig(lr=2.0, schedule=ours, min_lr=floor, warmup_steps=8))  # type: ignore[arg-type]
    assert rates[8:] == pytest.approx(expected_names[8:], rel=1e-9)
    # Theirs begins at 0, where the first update would be none: ours rises to lr at the last step of
    # the warm-up.
    assert rates[:8] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0])
    assert expected_names[:8] == pytest.approx([0.0, *rates[:7]])


def test_a_constant_rate_is_exactly_lr_and_a_long_warmup_never_divides_by_zero() -> None:
    assert _rates(OptimizerConfig(lr=1e-6, warmup_steps=2), 4) == [5e-7, 1e-6, 1e-6, 1e-6]
    assert _rates(OptimizerConfig(lr=4.0, schedule="linear", warmup_steps=4), 4) == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    assert _rates(OptimizerConfig(lr=0.0, schedule="cosine"), 3) == [0.0, 0.0, 0.0]
    # More steps than the run has would be a mistake of ours, and still never climb again.
    assert lr_fraction(OptimizerConfig(lr=1.0, schedule="cosine", min_lr=0.5), 99, 10) == 0.5


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_check_of_the_update_expects_the_same_rates(schedule: str) -> None:
    floor = 0.0 if schedule == "constant" else 3e-6
    config = OptimizerConfig(lr=1e-5, schedule=schedule, min_lr=floor, warmup_steps=5)  # type: ignore[arg-type]
    expected = [update_check._learning_rate(config, t, _N) for t in range(1, _N + 1)]
    assert _rates(config) == pytest.approx(expected, rel=1e-12)


def test_the_run_is_all_optimizer_steps_of_all_steps() -> None:
    assert (
        TrainingConfig(num_steps=7, num_mini_batches=3, num_epochs=2).num_run_optimizer_steps == 42
    )


def _config(folder: Path, *overrides: str) -> Config:
    return load_config(write_config(folder, folder), ["optimizer.lr=0.01", *overrides])


def test_a_critics_warmup_holds_the_policys_schedule_and_explain_says_so(tmp_path: Path) -> None:
    """8 steps, of which 4 are the critic's alone: the rate falls over the other 4 as over a run of
    4. Over 8 it would end at 0.00625."""
    gae = ["critic.path=policy", "critic.warmup_steps=4", "training.num_steps=8"]
    gae += ["optimizer.schedule=linear", "advantage={estimator: gae, normalize_std: batch}"]
    config = _config(tmp_path, *gae)
    num_updates = config.policy_training.num_run_optimizer_steps
    assert num_updates == 4
    rates = _rates(config.optimizer, num_updates)
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    [(_, value, reason)] = schedule_rows(config.optimizer, num_updates)
    assert (value, "over 4 optimizer steps" in reason) == ("0.0025", True)
    # A resume at half of the schedule: 2 of 4 updates, where without the critic it were 2 of 8.
    held, plain = flatten_config(config), flatten_config(_config(tmp_path, *gae[2:4]))
    said = changed_schedule(plain, held, 2) or ""
    assert said.startswith("the learning rate goes on at 0.005, where it would have been 0.0075")


def test_a_floor_needs_a_schedule_and_lies_below_lr(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"optimizer.min_lr is 1e-07 and optimizer.schedule is constant",
    ):
        _config(tmp_path, "optimizer.min_lr=1e-7")
    with pytest.raises(
        ConfigError, match=r"optimizer.min_lr \(0.1\) must be <= optimizer.lr \(0.01\)"
    ):
        _config(tmp_path, "optimizer.min_lr=0.1", "optimizer.schedule=linear")
    assert (
        _config(tmp_path, "optimizer.min_lr=0.01", "optimizer.schedule=cosine").optimizer.min_lr
        == 0.01
    )


def test_a_resume_that_asks_for_another_schedule_says_what_it_comes_to(tmp_path: Path) -> None:
    shorter, longer = (
        flatten_config(_config(tmp_path, "optimizer.schedule=linear", f"training.num_steps={n}"))
        for n in (10, 20)
    )
    assert changed_schedule(shorter, shorter, 5) is None
    # 5 of 10 steps: half of lr is left; 5 of 20: three quarters.
    expected = (
        "the learning rate goes on at 0.0075, where it would have been 0.005 (the "
        "schedule now runs over 20"
    )
    assert (changed_schedule(shorter, longer, 5) or "").startswith(expected)
    constant = [flatten_config(_config(tmp_path, f"training.num_steps={n}")) for n in (10, 20)]
    assert changed_schedule(constant[0], constant[1], 5) is None
    assert (
        changed_schedule(constant[0], shorter, 5)
        == "the learning rate goes on at 0.005, where it would have been 0.01"
    )
    # One written before there were schedules was constant.
    old = {
        key: value
        for key, value in constant[0].items()
        if key not in ("optimizer.schedule", "optimizer.min_lr")
    }
    assert changed_schedule(old, constant[1], 5) is None
    with pytest.raises(ConfigError, match=r"optimizer.schedule must be constant"):
        changed_schedule({**old, "optimizer.schedule": [1]}, constant[1], 5)


def test_explain_says_where_the_rate_ends(tmp_path: Path) -> None:
    config = _config(
        tmp_path, "optimizer.schedule=linear", "optimizer.min_lr=0.002", "optimizer.warmup_steps=2"
    )
    # The last of 10 has p = 7 / 8: 0.002 + 0.008 / 8
    ((_, final, method),) = schedule_rows(config.optimizer, 10)
    assert final == "0.003"
    assert (
        method == "linear from lr 0.01 to min_lr 0.002 over 10 optimizer steps after 2 of warm-up"
    )
    assert list(schedule_rows(_config(tmp_path).optimizer, 10)) == []
