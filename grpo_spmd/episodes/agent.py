"""This module runs agents in a worker: a user's coroutine that asks this rank for turns over
OpenAI's API.

    async def rollout(task, base_url, api_key, model) -> float | {"reward": float} | None

`task` is the row: its `prompt` and its other columns. A result of None means that the reward is
unknown. A plain function is accepted too.
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
_ACCESS = ("base_url", "api_key", "model")
# OpenAI's own code.
TOO_LONG = "context_length_exceeded"
# Error codes of the endpoint that end an episode, with the status of the episode.
LIMITS = {
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_max_all_tokens": "context_overflow",
    TOO_LONG: "context_overflow",
}


class AgentDriver:
    """Runs one episode at a time; an agent's episode is one call of the user's function."""

    kind = "agent"
    reward_names = (REWARD,)
    schemas: Sequence[Fields] = ()

    def __init__(self, rollout: Callable[..., Any]) -> None:
        """Raises ConfigError if `rollout` does not take these arguments."""
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
        # A cluster's proxy cannot reach this host's loopback.
        for variable in ("no_proxy", "NO_PROXY"):
            hosts = [host for host in os.environ.get(variable, "").split(",") if host]
            os.environ[variable] = ",".join(dict.fromkeys([*hosts, "127.0.0.1"]))

    def begin(self, row: Mapping[str, Any], access: Mapping[str, str]) -> Fields:
        """Runs the agent to its end.

        Returns {"rewards": {"agent": a number, None, or a string that says why it is unusable}}.
        What the agent raises goes to the caller, except after a turn was refused by a limit of the
        episode: it would be refused again. Raises BrokenContractError for a return value that is
        no reward.
        """
        try:
            result = self._rollout(task=dict(row), **{name: access[name] for name in _ACCESS})
            if inspect.isawaitable(result):
                # One loop for all episodes: a client that nobody closed closes itself in its loop
                # whenever it is collected.
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
    """Returns the result of an awaitable, and cancels tasks that it left running.

    Such tasks would otherwise run in the next episode.
    """
    try:
        return await awaitable
    finally:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reward(result: Any) -> float | str | None:
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
    """Returns the code of the endpoint's refusal, if an error or one of its causes is such a
    refusal."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        code = getattr(error, "code", None)
        if isinstance(code, str) and code in LIMITS:
            return code
        error = error.__cause__ or error.__context__
    return None
