"""This module runs agents in a worker process.

An agent is a user's coroutine that requests the policy's turns from this rank through OpenAI's API:

    async def rollout(task, base_url, api_key, model) -> float | {"reward": float} | None

`task` is a row of the data set: its `prompt` and its other columns. A result of None means that the
reward is unknown. A plain function is accepted too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.records import Fields
from grpo_spmd.rewards.trl import BrokenContractError, as_reward

REWARD = "agent"
# The arguments of `rollout` with which it reaches the endpoint.
_ACCESS = ("base_url", "api_key", "model")
# OpenAI's own error code for a context that is too long.
TOO_LONG = "context_length_exceeded"
# By error code: the status of an episode in which the endpoint refused a turn because of a limit.
LIMITS = {
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_max_all_tokens": "context_overflow",
    TOO_LONG: "context_overflow",
}


class AgentDriver:
    """Runs an agent's episodes one at a time. Each episode is one call of the user's function."""

    kind = "agent"
    reward_names = (REWARD,)
    schemas: Sequence[Fields] = ()

    def __init__(self, rollout: Callable[..., Any]) -> None:
        """Raises ConfigError if `rollout` cannot be called with task, base_url, api_key, model."""
        self._rollout = rollout
        parameters = ("task", *_ACCESS)
        try:
            inspect.signature(rollout).bind(**dict.fromkeys(parameters))
        except TypeError as error:
            name = getattr(rollout, "__name__", rollout)
            raise ConfigError(
                f"environment.agent: {name!r} must be called as rollout({', '.join(parameters)}): "
                f"{error}"
            ) from None
        self._runner: asyncio.Runner | None = None
        # HTTP clients must bypass a cluster's proxy, which cannot reach this host's loopback.
        for variable in ("no_proxy", "NO_PROXY"):
            hosts = [host for host in os.environ.get(variable, "").split(",") if host]
            os.environ[variable] = ",".join(dict.fromkeys([*hosts, "127.0.0.1"]))

    def begin(self, row: Mapping[str, Any], access: Mapping[str, str]) -> Fields:
        """Runs a whole episode: calls the user's function and waits for its result.

        Returns {"rewards": {"agent": reward}}. The reward is a number, None (unknown), or a string
        that says why it is unusable. Exceptions of the agent are passed on, except for one that
        follows from a turn refused because of a limit of the episode: a second attempt would be
        refused too, so only the reward is unusable. Raises BrokenContractError for a returned dict
        without `reward` or with other keys.
        """
        try:
            result = self._rollout(task=dict(row), **{name: access[name] for name in _ACCESS})
            if inspect.isawaitable(result):
                # All episodes share one event loop: an HTTP client that the agent left open closes
                # itself in its loop when it is garbage-collected, maybe in a later episode.
                self._runner = self._runner or asyncio.Runner()
                result = self._runner.run(_run_alone(result))
        except Exception as error:
            code = _limit_code(error)
            if code is None:
                raise
            return {
                "rewards": {
                    REWARD: f"is unknown: rollout() was refused a turn ({code}) and raised; catch "
                    "openai.BadRequestError in it and return a reward"
                }
            }
        return {"rewards": {REWARD: _reward(result)}}


async def _run_alone(awaitable: Any) -> Any:
    """Returns the result of an awaitable, and cancels the tasks that it left running.

    Otherwise they would go on running during the next episode.
    """
    try:
        return await awaitable
    finally:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reward(result: Any) -> float | str | None:
    """Returns the reward that rollout() returned, as a number or as {"reward": number}.

    It is None if unknown, or a string that says why it is unusable.
    """
    if isinstance(result, Mapping):
        if set(result) != {"reward"}:
            keys = sorted(map(str, result))
            raise BrokenContractError(
                f"rollout() returned a dict with the keys {keys}, not `reward`"
            )
        result = result["reward"]
    reward = as_reward(result)
    return f"rollout() {reward}" if isinstance(reward, str) else reward


def _limit_code(error: BaseException | None) -> str | None:
    """Returns the endpoint's error code (a key of LIMITS) if an exception, or one of its causes, is
    a turn refused because of a limit. Otherwise returns None."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        code = getattr(error, "code", None)
        if isinstance(code, str) and code in LIMITS:
            return code
        error = error.__cause__ or error.__context__
    return None
