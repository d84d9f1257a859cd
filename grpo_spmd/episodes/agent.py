"""An agent in its worker: a coroutine of the user's that asks this rank for turns, as it would ask OpenAI.

    async def rollout(task, base_url, api_key, model) -> float | {"reward": float} | None

`task` is the row: its `prompt` and its other columns. None: the reward is not known. A plain function is called too.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.rewards.trl import BrokenContractError, as_number

REWARD = "agent"  # the name of what it returns
_GIVEN = ("task", "base_url", "api_key", "model")


class AgentDriver:
    """An episode of it is one call: `act` and `end` have nothing to do."""

    def __init__(self, rollout: Callable[..., Any], where: str = "environment.agent") -> None:
        """ConfigError where it cannot be called so."""
        self._rollout = rollout
        try:
            inspect.signature(rollout).bind(**dict.fromkeys(_GIVEN))
        except TypeError as error:
            rule = f"must be called as rollout({', '.join(_GIVEN)})"
            raise ConfigError(
                f"{where}: {getattr(rollout, '__name__', rollout)!r} {rule}: {error}"
            ) from None
        self._runner: asyncio.Runner | None = None
        _leave_out_proxies()

    def begin(self, row: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, Any]:
        """Run it to its end: {"rewards": {"agent": a number, None, or a string that says why it is unusable}}. What it
        raises goes on to the caller, but for a turn that was refused by a limit of the episode: it would be refused
        again. Raises BrokenContractError where it returns something else than a reward."""
        try:
            found = self._rollout(task=dict(row), **{name: extra[name] for name in _GIVEN[1:]})
            if inspect.isawaitable(found):
                # One loop for all episodes: a client that nobody closed closes itself in it, whenever it is collected.
                self._runner = self._runner or asyncio.Runner()
                found = self._runner.run(_finish(found))
        except Exception as error:
            if (code := _limit_of(error)) is None:
                raise
            remedy = "catch openai.BadRequestError in it and return a reward"
            return {
                "rewards": {
                    REWARD: f"is unknown: rollout() was refused a turn ({code}) and raised; {remedy}"
                }
            }
        return {"rewards": {REWARD: _reward_of(found)}}


async def _finish(found: Any) -> Any:
    """What it gives; tasks that it left are ended, as they would go on in the next episode."""
    try:
        return await found
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _reward_of(found: Any) -> float | str | None:
    if isinstance(found, Mapping):
        if set(found) != {"reward"}:
            raise BrokenContractError(
                f"rollout() returned a dict with the keys {sorted(map(str, found))}, not `reward`"
            )
        found = found["reward"]
    if found is None:
        return None
    number = as_number(found)
    return (
        number
        if isinstance(number, float) and math.isfinite(number)
        else f"rollout() returned {number}"
    )


def _limit_of(error: BaseException | None) -> str | None:
    """The code of the endpoint's refusal that an error of a client comes from, through what was raised from it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        code = getattr(error, "code", None)
        if isinstance(code, str) and code in (*LIMITS, TOO_LONG):
            return code
        error = error.__cause__ or error.__context__
    return None


def _leave_out_proxies() -> None:
    """A cluster's HTTP proxy knows nothing of this host's loopback, and clients ask it for what is not left out."""
    for name in ("no_proxy", "NO_PROXY"):
        others = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*others, "127.0.0.1"]))


# Codes of the errors that end an agent's episode, known on both sides of its endpoint.


LIMITS = {
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_max_all_tokens": "context_overflow",
}
"""To the status of the episode."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's."""
