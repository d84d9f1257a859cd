"""What limits of calls, headers and data show before anything is asked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig, WatchdogConfig
from grpo_spmd.data.table import PromptRow

LABELS = ("label", "answer")  # columns, the first that a row has


def check_calls(configs: Sequence[RewardConfig], num_ranks: int) -> None:
    """Raises ConfigError: a limit that leaves a rank without a call, a header whose variable is not there."""
    for index, config in enumerate(configs):
        for name in ("max_concurrent", "max_per_minute"):
            if (limit := getattr(config, name)) is not None and limit < num_ranks:
                why = "each of which makes its own share of the calls; raise it, or take fewer ranks"
                raise ConfigError(
                    f"rewards.{index}.{name} ({limit}) must be >= the number of ranks ({num_ranks}), {why}"
                )
        if config.headers_env:
            from grpo_spmd.rewards.remote.client import headers_of

            headers_of(config.headers_env, f"rewards.{index}.headers_env")
        if config.url is not None and not _is_json(config.args):
            raise ConfigError(f"rewards.{index}.args: a server is sent JSON, which has no NaN and no infinity")


def check_sent(configs: Sequence[RewardConfig], rows: Sequence[PromptRow]) -> None:
    """Raises ConfigError, which names file:line, for a column that cannot be sent: a metadata's, or a label."""
    for index, config in enumerate(configs):
        if config.url is None or config.judge is not None:  # a rubric is text
            continue
        for row in rows:
            sent = row.columns if config.form == "slime" else {key: row.columns.get(key) for key in LABELS}
            if odd := [name for name, value in sent.items() if not _is_json(value)]:
                what = f"the column {odd[0]!r} holds NaN or infinity, which JSON has not"
                raise ConfigError(f"{row.where}: {what}, and rewards.{index}.url is sent it; fill it, or take it out")


def _is_json(value: Any) -> bool:
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    try:
        json.dumps(value, allow_nan=False, default=str)
    except (ValueError, RecursionError):
        return False
    return True


def check_pace(
    configs: Sequence[RewardConfig],
    num_ranks: int,
    watchdog: WatchdogConfig,
    *,
    of_step: tuple[int, int],
    num_evaluated: int = 0,
) -> None:
    """Raises ConfigError where max_per_minute alone makes scoring outlast its phase, which the watchdog would stop.
    `of_step`: a step's groups, and the size of each; `num_evaluated`: completions of an evaluation."""
    for index, config in enumerate(configs):
        if (limit := config.max_per_minute) is None:
            continue
        whole_groups = config.url is not None and config.form == "openrlhf"
        phases = {"reward": (of_step[0], 1 if whole_groups else of_step[1]), "eval": (num_evaluated, 1)}
        for phase, (num_groups, calls_each) in phases.items():
            groups = [num_groups // num_ranks + (rank < num_groups % num_ranks) for rank in range(num_ranks)]
            shares = [limit // num_ranks + (rank < limit % num_ranks) for rank in range(num_ranks)]
            took_s = max((n * calls_each - 1) * 60 / share for n, share in zip(groups, shares, strict=True))
            if took_s >= (limit_s := watchdog.phase_timeouts_s.get(phase, watchdog.timeout_s)):
                calls = f"the {num_groups * calls_each:,} calls of {'a step' if phase == 'reward' else 'an evaluation'}"
                enough = f"set watchdog.phase_timeouts_s: {{{phase}: {math.ceil(took_s * 1.2 / 60) * 60}}}"
                raise ConfigError(
                    f"rewards.{index}.max_per_minute ({limit}): {calls} take {took_s:,.0f} s, and the watchdog "
                    f"stops phase {phase} after {limit_s:,.0f} s; raise it, or {enough}"
                )
