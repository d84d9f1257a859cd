"""This module runs environments with Gym's methods, in a worker process. Observations are messages.

`reset(**row)` returns the first observation. It is passed the columns of the row that it names, or
all of them if it takes `**`. `step(action)` takes the policy's text and returns the next
observation. An observation is text (a user message), a message, a list of messages, or None. A step
returns (observation, reward, terminated, truncated, info) as in Gymnasium, (observation, reward,
done, info) as in ms-swift (info may be left out), a dict with observations, reward and done as in
SkyRL Gym, or an object with these attributes as in OpenEnv. All methods may be async.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.trl import resolve
from grpo_spmd.records import Fields, Message
from grpo_spmd.rewards.trl import BrokenContractError, as_reward


class GymDriver:
    """Runs one episode at a time.

    An environment that has no `reset` and begins with `init` (SkyRL) is made anew for each episode;
    others are made once for each worker.
    """

    kind = "gym"
    # The reward of an episode, which is the sum of its steps' rewards (episodes.py).
    reward_names = ("environment",)
    schemas: Sequence[Fields] = ()

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` is a class or a function that returns an environment.

        Raises ConfigError for a class that cannot be an environment.
        """
        self._make = make
        if inspect.isclass(make):
            for names in (("reset", "init"), ("step",)):
                if not any(callable(getattr(make, name, None)) for name in names):
                    raise ConfigError(
                        f"environment.gym: {make.__name__} has no method {' or '.join(names)}"
                    )
        self.environment: Any = None
        self._messages: list[Message] = []

    def begin(self, row: Fields) -> Fields:
        """Begins an episode. Returns {"messages": the messages to add to the prompt}."""
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            self._messages = [{"role": "user", "content": prompt}]
        else:
            self._messages = list(prompt or [])
        if self.environment is not None and not hasattr(self.environment, "reset"):
            resolve(getattr(self.environment, "close", bool)())
            self.environment = None
        if self.environment is None:
            self.environment = self._make()
        if not hasattr(self.environment, "reset"):
            # SkyRL's init() takes the prompt and returns it with the messages that it adds.
            start, _ = resolve(self.environment.init(self._messages))
            messages = to_messages(start)
            num_known = len(self._messages)
            is_known = messages[:num_known] == self._messages
            return {"messages": messages[num_known:] if is_known else messages}
        parameters = inspect.signature(self.environment.reset).parameters
        # ms-swift's reset(config) also returns a system prompt, which comes before the observation.
        if [*parameters] == ["config"]:
            observation, _, system = resolve(self.environment.reset(row))
            system_messages = [{"role": "system", "content": system}] if system else []
            return {"messages": [*system_messages, *to_messages(observation)]}
        # Without ** reset() gets only the columns that it names: Gymnasium's own
        # reset(*, seed, options) takes none.
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        result = resolve(self.environment.reset(**row))
        # The result is an observation, a tuple (observation, info), or OpenEnv's object.
        if isinstance(result, tuple):
            result = result[0]
        elif hasattr(result, "observation"):
            result = result.observation
        return {"messages": to_messages(result)}

    def act(self, message: Mapping[str, Any]) -> Fields:
        """Runs one step with the policy's turn. Returns the fields of pool._ActValues."""
        self._messages.append(dict(message))
        step = self.environment.step
        text = str(message.get("content") or "")
        values = read_step(resolve(step(_action(step, text, self._messages))))
        self._messages += values["messages"]
        return {**values, "num_calls": 0, "num_invalid": 0}

    def end(self) -> dict[str, float | None]:
        """Returns no reward, because the steps have returned the rewards of their turns."""
        return {}


def read_step(result: Any) -> Fields:
    """Returns {"messages", "reward", "done"} from the return value of step().

    The value may have any form in the module's docstring; BrokenContractError is raised for others,
    and ValueError for a reward that is neither a finite number nor None.
    """
    if isinstance(result, Mapping):
        observation = result.get("observations", result.get("observation"))
        reward = result.get("reward")
        ended = result.get("terminated", False) or result.get("truncated", False)
        done = result.get("done", ended)
    elif hasattr(result, "observation") and hasattr(result, "done"):
        observation = result.observation
        reward = getattr(result, "reward", None)
        done = result.done
    elif isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        done = terminated or truncated
    elif isinstance(result, tuple) and len(result) in (3, 4):
        observation, reward, done = result[:3]
    else:
        raise BrokenContractError(
            f"step() returned {type(result).__name__}, and not (observation, reward, terminated, "
            "truncated, info), (observation, reward, done, info), a dict or an object with "
            "these"
        )
    # Rewards may be numpy's or torch's numbers.
    number = as_reward(reward)
    if isinstance(number, str):
        raise ValueError(f"step() {number} as its reward")
    return {"messages": to_messages(observation), "reward": number, "done": bool(done)}


def to_messages(observation: Any) -> list[Message]:
    """Returns an observation as messages. Raises BrokenContractError if it has no known form."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    items = observation if isinstance(observation, list) else [observation]
    if all(isinstance(item, Mapping) and "role" in item for item in items):
        return [dict(item) for item in items]
    # An observation of OpenEnv, whose text or messages are in an attribute with one of these names.
    for name in ("messages", "message", "text", "content", "prompt"):
        if isinstance(observation, Mapping):
            inner = observation.get(name)
        else:
            inner = getattr(observation, name, None)
        if isinstance(inner, str | list):
            return to_messages(inner)
    raise BrokenContractError(
        f"an observation is {type(observation).__name__}: it must be text, messages, or have an "
        "attribute `messages` or `text`"
    )


def _action(step: Callable[..., Any], text: str, messages: list[Message]) -> Any:
    """Returns the argument for `step`, according to the annotation of its first parameter.

    For a list it is all messages so far; for a class with annotated fields it is an object made
    with the policy's text as the first field; otherwise it is the text.
    """
    function = getattr(step, "__func__", step)
    parameters = list(inspect.signature(step).parameters)
    try:
        hint = typing.get_type_hints(function).get(parameters[0], str) if parameters else str
    except Exception:
        # Annotations may use names that exist only for type checkers.
        hint = str
    if typing.get_origin(hint) is list or getattr(hint, "__name__", "") == "Messages":
        return messages
    if not inspect.isclass(hint) or hint in (str, object):
        return text
    fields = getattr(hint, "__annotations__", None)
    return hint(**{next(iter(fields)): text}) if fields else text
