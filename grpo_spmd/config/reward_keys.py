"""The entries of `rewards` and the section `reward_pool`: what scores completions, and in which processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_spmd.config.key import key


# fmt: off
@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    name: str | None = key(None, "a shipped reward (math, gsm8k, countdown, code, format, exact), or `function`'s name")
    function: str | None = key(None, '"file.py:function": fn(prompts, completions, completion_ids, **columns)')
    weight: float = key(1.0, "factor of this reward in the sum")
    args: dict[str, Any] = key({}, "further keyword arguments for the function")


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    num_workers: int = key(4, "processes on each rank that score rewards", at_least=1, at_most=4096)
    timeout_s: float = key(10.0, "seconds that scoring one completion may take before its process is killed", above=0)
    max_error_frac: float = key(0.3,
        "share of a step's completions without a usable reward at which the run stops", above=0, at_most=1)
