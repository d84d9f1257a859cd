"""Sections of `--explain` for rewards that are models: sequence classifiers, and the run's own engine."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_spmd.config.schema import Config
from grpo_spmd.preflight.memory import Row


def model_sections(config: Config, num_ranks: int) -> Iterator[tuple[str, Iterator[Row]]]:
    """Titles and rows; nothing is imported for what there is none of."""
    if any(reward.model is not None for reward in config.rewards):
        from grpo_spmd.preflight.reward_models import reward_model_rows

        yield "memory of a rank: reward models", reward_model_rows(config, num_ranks)
    if any(reward.by_engine for reward in config.rewards):
        from grpo_spmd.preflight.engine_judge import engine_judge_rows

        yield "the engine as judge", engine_judge_rows(config)
