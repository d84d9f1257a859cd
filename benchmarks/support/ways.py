"""Ways to start the engine: the default, and fallbacks for a GPU on which the default fails.

The smoke step of `gpu_day` finds a way that passes, and the later steps inherit it by `WAY`.
Imports no torch, since the driver of `gpu_day` reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

WAY = "GRPO_SPMD_GPU_DAY_WAY"


@dataclass(frozen=True)
class Way:
    """What differs from the default: variables of the environment, keys of section `rollout`."""

    environment: dict[str, str] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "default": Way(),
    "v1_runner": Way(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "no_async_scheduling": Way(rollout={"engine": {"async_scheduling": False}}),
    "enforce_eager": Way(rollout={"engine": {"enforce_eager": True}}),
    "sleep_level_1": Way(rollout={"sleep_level": 1}),
}


def way_environment(name: str) -> dict[str, str]:
    """The variables that make a process, and the processes it starts, go this way."""
    return WAYS[name].environment | {WAY: name}


def current_rollout() -> dict[str, Any]:
    """The keys of `rollout` by which this process's way differs from the default."""
    return WAYS[os.environ.get(WAY, "default")].rollout
