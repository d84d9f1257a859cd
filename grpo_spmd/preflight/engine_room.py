"""How long a text the engine has room for: what vLLM calls max_model_len."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_spmd.config.schema import Config
from grpo_spmd.data.table import PromptRow


def engine_tokens(config: Config) -> int:
    """The longest rollout, or what a judge that is the engine reads and says, in tokens. Raises ConfigError for a
    rubric that cannot be read."""
    if not any(reward.by_engine for reward in config.rewards):
        return config.max_rollout_tokens
    from grpo_spmd.preflight.engine_judge import room_of_judges

    return max(config.max_rollout_tokens, *room_of_judges(config).values())


def check_engine_room(config: Config, folder: Path | None, row_sets: Sequence[Sequence[PromptRow]]) -> None:
    """As check_engine_judges, where there are any."""
    if any(reward.by_engine for reward in config.rewards):
        from grpo_spmd.preflight.engine_judge import check_engine_judges

        check_engine_judges(config, folder, row_sets)
