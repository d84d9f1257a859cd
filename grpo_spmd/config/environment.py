"""The section `environment`: what the policy talks to between its turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.key import key


# fmt: off
@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    tools: tuple[str, ...] = key((),
        'functions that the policy may call, as TRL has them: "file.py:function", or a shipped one (python)')
    factory: dict[str, str] | str = key({},
        'TRL\'s environment_factory: "file.py:Class" or a shipped one (countdown, search:CORPUS); or {name: ...}, of '
        "which the row's column `environment` names one")
    gym: str | None = key(None, '"file.py:Class" with reset(**row) and step(action), over messages')
    agent: str | None = key(None,
        '"file.py:function": async def rollout(task, base_url, api_key, model), which talks to an OpenAI-like server')
    max_turns: int = key(8, "turns of the policy in an episode, at most", at_least=1)
    max_tokens: int | None = key(None,
        "tokens of an episode behind its prompt, sampled and given; null: rollout.max_completion_tokens, which is the "
        "most of one turn", at_least=1)
    call_timeout_s: float = key(30.0, "seconds that one call of an environment may take before it is killed", above=0)
    timeout_s: float = key(600.0,
        "seconds that all calls of one episode may take together; time in the engine does not count", above=0)
    history: Literal["append", "fork"] = key("append",
        "where the chat template rewrites earlier turns: append to them as they were, or begin another segment, which "
        "shares rollout and reward")
    num_workers: int = key(16,
        "processes of environments on each rank, of one episode at a time each", at_least=1, at_most=4096)
    discount: float | None = key(None,
        "null: an episode's reward is the sum of its turns'; a number: each turn is credited with the rewards from it "
        "on, those of k turns later times this to the power k", at_least=0, at_most=1)

    @property
    def is_on(self) -> bool:
        return bool(self.tools or self.factory or self.gym or self.agent)

    @property
    def may_reward(self) -> bool:
        """Whether rewards of its own are to be expected; bare tools give none."""
        return bool(self.factory or self.gym or self.agent)


# fmt: on
def check_environment(
    environment: EnvironmentConfig, tail_batching: float, overlong_buffer_tokens: int, kl_in: str
) -> None:
    """Raises ConfigError for what does not go together."""
    named = [name for name in ("gym", "agent") if getattr(environment, name)]
    if environment.tools or environment.factory:
        named.insert(0, "tools" if environment.tools else "factory")
    if len(named) > 1:
        rule = "are two ways to run an episode; leave one out (tools and factory go together)"
        raise ConfigError(f"environment.{named[0]} and environment.{named[1]} {rule}")
    if environment.is_on and tail_batching > 1:
        why = "an episode that waits for its environment would be dropped as a slow one; set tail_batching: 1"
        raise ConfigError(f"rollout.tail_batching and environment.{named[0]} do not go together: {why}")
    if environment.is_on and overlong_buffer_tokens:
        why = "which measures one completion, not the turns of an episode; set it to 0"
        raise ConfigError(
            f"advantage.overlong_buffer_tokens ({overlong_buffer_tokens}) with environment.{named[0]}: {why}"
        )
    if environment.discount is not None and kl_in == "reward":
        why = "the KL is taken from an episode's reward as a whole; set kl_in: loss, or leave discount out"
        raise ConfigError(f"loss.kl_in: reward and environment.discount ({environment.discount:g}): {why}")
    if environment.discount is not None and environment.is_on and not environment.gym:
        rule = "credits turns with rewards of their own, which only a step of environment.gym gives; leave it out"
        raise ConfigError(f"environment.discount ({environment.discount:g}) {rule}")
