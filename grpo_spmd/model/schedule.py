"""The learning rate as a function of the number of optimizer steps so far. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_spmd.config.coerce import build
from grpo_spmd.config.schema import OptimizerConfig, TrainingConfig


def lr_fraction(config: OptimizerConfig, num_updates: int, num_steps: int) -> float:
    """Returns the learning rate of the next optimizer step, as a fraction of `config.lr`.

    Let n be `num_updates`, the steps so far, W `warmup_steps`, and N `num_steps`, the steps of the
    whole run. During the warm-up, while n < W, the fraction is (n + 1) / W. Then, with
    f = `min_lr` / `lr` and p = min(1, (n - W) / (N - W)), it depends on `schedule`:
    constant: 1;  linear: f + (1 - f) (1 - p);  cosine: f + (1 - f) (1 + cos(pi p)) / 2.
    A mini-batch that is skipped or has no tokens does not count as a step. If there are any, the
    run ends at a learning rate above `min_lr`.
    """
    if num_updates < config.warmup_steps:
        return (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant" or not config.lr:
        return 1.0
    # At least 1: if the warm-up takes the whole run, there is no step to decay in.
    decay_steps = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, (num_updates - config.warmup_steps) / decay_steps)
    # The part of the decay that is still to come: falls from 1 to 0.
    remaining = 1.0 - progress
    if config.schedule == "cosine":
        remaining = (1.0 + math.cos(math.pi * progress)) / 2
    floor = config.min_lr / config.lr
    return floor + (1.0 - floor) * remaining


def schedule_rows(config: OptimizerConfig, num_steps: int) -> Iterator[tuple[str, str, str]]:
    """Yields the row (label, value, reason) of `--explain` about the learning rate's schedule;
    nothing if the schedule is constant."""
    if config.schedule != "constant":
        final = config.lr * lr_fraction(config, num_steps - 1, num_steps)
        warmup = f" after {config.warmup_steps} of warm-up" if config.warmup_steps else ""
        yield (
            "learning rate of the last",
            f"{final:.3g}",
            f"{config.schedule} from lr {config.lr:g} to min_lr {config.min_lr:g} over {num_steps} "
            f"optimizer steps{warmup}",
        )


def changed_schedule(
    saved: Mapping[str, Any], current: Mapping[str, Any], num_updates: int
) -> str | None:
    """Returns a message if a resumed run goes on at another learning rate than its checkpoint's run
    would have, None otherwise.

    The new config's schedule applies as if the run had had it from the start. `saved` and `current`
    are the flat configs of the checkpoint and of this run. Raises ConfigError if `saved` is no
    valid config."""
    # The rates of the next step, after `num_updates` steps, by the old and by the new schedule.
    saved_rate, saved_steps = _rate(saved, num_updates)
    rate, num_steps = _rate(current, num_updates)
    if saved_rate == rate:
        return None
    text = f"the learning rate goes on at {rate:.3g}, where it would have been {saved_rate:.3g}"
    if num_steps != saved_steps:
        text += (
            f" (the schedule now runs over {num_steps} optimizer steps, before over {saved_steps})"
        )
    return text


def _rate(flat: Mapping[str, Any], num_updates: int) -> tuple[float, int]:
    """Returns (the learning rate of the next optimizer step, the number of optimizer steps of the
    whole run) by a flat config, whose keys are "optimizer.lr" and so on."""

    def section(cls: type, name: str, *keys: str) -> Any:
        """Returns section `name` of the config with these keys, and defaults for all others."""
        return build(
            cls, {key: flat[f"{name}.{key}"] for key in keys if f"{name}.{key}" in flat}, name
        )

    optimizer = section(OptimizerConfig, "optimizer", "lr", "min_lr", "schedule", "warmup_steps")
    training = section(TrainingConfig, "training", "num_steps", "num_mini_batches", "num_epochs")
    # As in Config.policy_training: the policy is not updated during a critic's warm-up.
    num_held_steps = flat.get("critic.warmup_steps", 0) if flat.get("critic.path") else 0
    num_steps = (training.num_steps - num_held_steps) * training.num_optimizer_steps
    return optimizer.lr * lr_fraction(optimizer, num_updates, num_steps), num_steps
