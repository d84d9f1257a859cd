"""What limits of calls and headers show before anything is asked."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig


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
