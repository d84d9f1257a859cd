"""Who gave rewards of a recorded step and is not asked again: servers, unless it is said so, since they cost and may be
gone; reward models, which took the run's devices; and the run's own engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo_spmd.config.schema import RewardConfig

if TYPE_CHECKING:
    from grpo_spmd.replay.read import RecordedStep


def unasked_rewards(recorded: RecordedStep) -> list[str]:
    """Names of the rewards that are not to be had again; with --ask-servers those of models and the engine alone."""
    return _servers(recorded) + _models(recorded) + _judges(recorded)


def notes_of(recorded: RecordedStep) -> list[str]:
    """A line for each kind."""
    kinds = {"servers, which were not asked (--ask-servers), gave": _servers(recorded)}
    kinds |= {"reward models, which do not score again, gave": _models(recorded)}
    kinds |= {"judges by the run's engine, which is not here, gave": _judges(recorded)}
    return [
        f"rewards are those that the run recorded: {who} {', '.join(names)}" for who, names in kinds.items() if names
    ]


def without_rubrics(rewards: Iterable[RewardConfig]) -> tuple[RewardConfig, ...]:
    """As they are where nobody is asked: a judge's rubric may be gone, and what else it is sent does not matter."""
    return tuple(
        dataclasses.replace(reward, name=reward.shown_name, judge=None, args={}) if reward.url is not None else reward
        for reward in rewards
    )


def _servers(recorded: RecordedStep) -> list[str]:
    rewards = () if recorded.asks_servers else recorded.config.rewards
    return [reward.shown_name for reward in rewards if reward.url is not None and not reward.by_engine]


def _models(recorded: RecordedStep) -> list[str]:
    return [reward.shown_name for reward in recorded.config.rewards if reward.model is not None]


def _judges(recorded: RecordedStep) -> list[str]:
    return [reward.shown_name for reward in recorded.config.rewards if reward.by_engine]
