"""Environments by Gym's protocol over messages, in a worker, and what makes others' classes such: `reset(**row)` gives
what the policy is told, `step(action)` what comes of the text that it said.

An observation is text (a user message), a message, a list of messages, or None. A step gives (observation, reward,
terminated, truncated, info) as in Gymnasium, (observation, reward, done, info) as in ms-swift, a dict with
observations, reward and done as in SkyRL Gym, or an object with these attributes as in OpenEnv. All of it may be
async.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.trl import finished
from grpo_spmd.rewards.trl import BrokenContractError, as_number

REWARD = "environment"  # the name of the sum of its steps'


class GymDriver:
    """Serves one episode at a time, of one object each where it begins by `init` (SkyRL), else of one for all."""

    def __init__(self, make: Callable[[], Any], key: str = "environment.gym") -> None:
        """Raises ConfigError where `make` is a class that cannot be one."""
        self._make = make
        if inspect.isclass(make):
            for one_of in (("reset", "init"), ("step",)):
                if not any(callable(getattr(make, name, None)) for name in one_of):
                    raise ConfigError(f"{key}: {make.__name__} has no method {' or '.join(one_of)}")
        self.environment: Any = None
        self._said: list[dict[str, Any]] = []

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:
        """{"messages": what comes behind the prompt}."""
        prompt = row.get("prompt")
        self._said = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        )
        if self.environment is not None and not hasattr(self.environment, "reset"):
            finished(getattr(self.environment, "close", bool)())
            self.environment = None
        self.environment = self.environment if self.environment is not None else self._make()
        if not hasattr(self.environment, "reset"):  # SkyRL: it gives the whole prompt
            found, _ = finished(self.environment.init(self._said))
            messages = messages_of(found)
            return {
                "messages": messages[len(self._said) :]
                if messages[: len(self._said)] == self._said
                else messages
            }
        names = [*inspect.signature(self.environment.reset).parameters]
        if names == ["config"]:  # ms-swift: what is to come before the observation is its own
            observation, _, system = finished(self.environment.reset(row))
            before = [{"role": "system", "content": system}] if system else []
            return {"messages": [*before, *messages_of(observation)]}
        return {"messages": messages_of(_first(finished(self.environment.reset(**row))))}

    def act(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """One step, by what the policy said."""
        self._said.append(dict(message))
        step, text = self.environment.step, str(message.get("content") or "")
        found = step_of(finished(step(_action(step, text, self._said))))
        self._said += found["messages"]
        return found | {"num_calls": 0, "num_invalid": 0}

    def end(self) -> dict[str, float | None]:
        """Nothing: its reward is that of its turns."""
        return {}


def step_of(found: Any) -> dict[str, Any]:
    """{"messages", "reward", "done"} of what a step gave. Raises BrokenContractError."""
    if isinstance(found, Mapping):
        observation, reward = (
            found.get("observations", found.get("observation")),
            found.get("reward"),
        )
        done = found.get("done", found.get("terminated", False) or found.get("truncated", False))
    elif hasattr(found, "observation") and hasattr(found, "done"):
        observation, reward, done = found.observation, getattr(found, "reward", None), found.done
    elif isinstance(found, tuple) and len(found) == 5:
        observation, reward, done = found[0], found[1], bool(found[2] or found[3])
    elif isinstance(found, tuple) and len(found) in (3, 4):
        observation, reward, done = found[:3]
    else:
        kinds = "(observation, reward, terminated, truncated, info), (observation, reward, done, info), a dict or an object"
        raise BrokenContractError(
            f"step() returned {type(found).__name__}, and not {kinds} with these"
        )
    number = None if reward is None else as_number(reward)
    if isinstance(number, str) or (number is not None and not math.isfinite(number)):
        raise ValueError(f"step() gave the reward {number}")
    return {"messages": messages_of(observation), "reward": number, "done": bool(done)}


def messages_of(observation: Any) -> list[dict[str, Any]]:
    """An observation as messages. Raises BrokenContractError."""
    if observation is None:
        return []
    if isinstance(observation, Mapping) and "role" in observation:
        return [dict(observation)]
    if isinstance(observation, list) and all(
        isinstance(one, Mapping) and "role" in one for one in observation
    ):
        return [dict(one) for one in observation]
    for name in (
        "messages",
        "message",
        "text",
        "content",
        "prompt",
    ):  # an object of OpenEnv's that has some text
        inner = (
            observation.get(name)
            if isinstance(observation, Mapping)
            else getattr(observation, name, None)
        )
        if isinstance(inner, str | list):
            return messages_of(inner)
    if not isinstance(observation, str):
        what = f"an observation is {type(observation).__name__}"
        raise BrokenContractError(
            f"{what}: it must be text, messages, or have an attribute `messages` or `text`"
        )
    return [{"role": "user", "content": observation}]


def _first(found: Any) -> Any:
    """The observation of what `reset` gave: alone, with an info, or in an object."""
    if isinstance(found, tuple):
        return found[0]
    return found.observation if hasattr(found, "observation") else found


def _action(step: Callable[..., Any], text: str, said: list[dict[str, Any]]) -> Any:
    """The text; or, as the annotation of `step` has it, all messages so far, or a class with a text first."""
    function = getattr(step, "__func__", step)
    names = list(inspect.signature(step).parameters)
    try:
        hint = typing.get_type_hints(function).get(names[0], str) if names else str
    except Exception:  # names that are not there when it runs
        hint = str
    if typing.get_origin(hint) is list or getattr(hint, "__name__", "") == "Messages":
        return said
    is_own = (
        inspect.isclass(hint) and hint not in (str, object) and hasattr(hint, "__annotations__")
    )
    return (
        hint(**{next(iter(hint.__annotations__)): text})
        if is_own and hint.__annotations__
        else text
    )
