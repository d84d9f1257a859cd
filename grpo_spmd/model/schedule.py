"""The learning rate over a run, as a function of the optimizer steps made so far. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_spmd.config.coerce import build
from grpo_spmd.config.schema import OptimizerConfig, TrainingConfig


def lr_fraction(config: OptimizerConfig, num_made: int, num_all: int) -> float:
    """The learning rate of the next optimizer step, as a share of `config.lr`.

    With n = `num_made` steps made, W = `warmup_steps` and N = `num_all` steps of the whole run: (n + 1) / W while
    n < W; from then on, with f = `min_lr` / `lr` and p = (n - W) / (N - W), at most 1, it is
    constant: 1;  linear: f + (1 - f) (1 - p);  cosine: f + (1 - f) (1 + cos(pi p)) / 2.
    A mini-batch that was skipped, or that had no tokens to train on, is no step: where there were some, the run ends
    that much above `min_lr`.
    """
    if num_made < config.warmup_steps:
        return (num_made + 1) / config.warmup_steps
    if config.schedule == "constant" or not config.lr:
        return 1.0
    progress = min(1.0, (num_made - config.warmup_steps) / max(1, num_all - config.warmup_steps))
    left = (
        1.0 - progress if config.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    )
    floor = config.min_lr / config.lr
    return floor + (1.0 - floor) * left


def schedule_rows(config: OptimizerConfig, num_all: int) -> Iterator[tuple[str, str, str]]:
    """For `--explain`: where the learning rate changes, what the last optimizer step has, and how it comes there."""
    if config.schedule != "constant":
        last = config.lr * lr_fraction(config, num_all - 1, num_all)
        warmup = f" after {config.warmup_steps} of warm-up" if config.warmup_steps else ""
        how = f"{config.schedule} from lr {config.lr:g} to min_lr {config.min_lr:g} over {num_all} optimizer steps"
        yield "learning rate of the last", f"{last:.3g}", how + warmup


def changed_schedule(
    before: Mapping[str, Any], now: Mapping[str, Any], num_made: int
) -> str | None:
    """What a resumed run that asks for another learning rate comes to: the new schedule counts, as if it had always
    been asked for. `before`, `now`: flat configs of whoever wrote the checkpoint, and of the run that goes on. Raises
    ConfigError where the first is none."""
    (was, old_steps), (rate, steps) = (_rate_of(flat, num_made) for flat in (before, now))
    if was == rate:
        return None
    of = (
        f" (the schedule now runs over {steps} optimizer steps, before over {old_steps})"
        if steps != old_steps
        else ""
    )
    return f"the learning rate goes on at {rate:.3g}, where it would have been {was:.3g}{of}"


def _rate_of(flat: Mapping[str, Any], num_made: int) -> tuple[float, int]:
    """Of the next optimizer step, and how many the whole run has."""
    names = (
        ("lr", "min_lr", "schedule", "warmup_steps"),
        ("num_steps", "num_mini_batches", "num_epochs"),
    )
    of_optimizer, of_training = (
        {name: flat[f"{section}.{name}"] for name in known if f"{section}.{name}" in flat}
        for section, known in zip(("optimizer", "training"), names, strict=True)
    )
    optimizer: OptimizerConfig = build(OptimizerConfig, of_optimizer, "optimizer")
    training: TrainingConfig = build(TrainingConfig, of_training, "training")
    num_all = training.num_run_optimizer_steps
    return optimizer.lr * lr_fraction(optimizer, num_made, num_all), num_all
