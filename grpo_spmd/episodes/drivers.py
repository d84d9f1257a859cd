"""This module has the drivers, which run the user's code in a worker process, an episode at a time.

`TrlDriver` runs tools and environments written for TRL (1.16), unchanged. A tool is a function with
type hints and a docstring. An environment is a class with `reset(**row)`, with public methods,
which are its tools, and perhaps with `get_reward()`. If a tool raises, its error is the result that
the policy reads; if `reset` or `get_reward` raises, the environment has failed.

`GymDriver` runs environments with Gym's methods; observations are messages. `reset(**row)` returns
the first observation. It is passed the columns of the row that it names, or all of them if it takes
`**`. `step(action)` takes the policy's text and returns the next observation. An observation is
text (a user message), a message, a list of messages, or None. A step returns (observation, reward,
terminated, truncated, info) as in Gymnasium, (observation, reward, done, info) as in ms-swift (info
may be left out), a dict with observations, reward and done as in SkyRL Gym, or an object with these
attributes as in OpenEnv.

`AgentDriver` runs agents. An agent is a user's coroutine that requests the policy's turns from this
rank through OpenAI's API:

    async def rollout(task, base_url, api_key, model) -> float | {"reward": float} | None

`task` is a row of the data set: its `prompt` and its other columns. A result of None means that the
reward is unknown.

All of the user's functions may be async or not.
"""

from __future__ import annotations

import asyncio
import bdb
import functools
import inspect
import os
import threading
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.openai_api import LIMITS
from grpo_spmd.episodes.shipped import Factory
from grpo_spmd.records import Fields, Message
from grpo_spmd.rewards.pool.worker import describe_error
from grpo_spmd.rewards.trl import BrokenContractError, Function, as_reward, callable_name

_NO_TOOLS = ("reset", "get_reward")
# The column of a row that names one of several factories.
COLUMN = "environment"
# The name of an agent's reward.
REWARD = "agent"
# The arguments of `rollout` with which it reaches the endpoint.
_ACCESS = ("base_url", "api_key", "model")


@dataclass
class TrlDriver:
    """Runs the episodes of tools and environments in TRL's form, one at a time in each worker.

    An environment is made once in each worker and reset for each episode, as in TRL.
    """

    kind = "tools"
    tools: Mapping[str, Function]
    """The functions in `environment.tools` by name."""
    helper_factories: Sequence[Factory]
    """The functions that make the *helpers*: the shipped objects in `environment.tools`, which have
    tools and no reward, and take part in every episode."""
    factories: Mapping[str, Factory]
    """The functions that make environments, by name. There is one with the name "", or there are
    several, and each row of the data names one of them."""
    reward_names: Sequence[str] = ()
    schemas: Sequence[Fields] = ()
    """JSON schemas of all tools."""
    report_tool: Callable[[str], None] = lambda name: None
    """Called with the name of each tool before the tool is called."""
    environment: Any = None
    """The environment of the running episode."""
    environments: dict[str, Any] = field(default_factory=dict)
    """The environments that were made so far, by the names of their factories."""
    has_printed: bool = False
    """True after one traceback of a tool was printed to the environments' log; no more are."""
    episode_tools: dict[str, Function] = field(default_factory=dict)
    """The tools of the running episode by name."""

    @functools.cached_property
    def helpers(self) -> list[Any]:
        """Returns the helpers, which are made once in each worker, for all of its episodes."""
        return [make() for make in self.helper_factories]

    def begin(self, row: Fields) -> Fields:
        """Begins an episode.

        Returns {"messages": what reset() returned, "tools": the schemas of this episode's tools}.
        """
        # Helpers keep no state from one episode to the next.
        for helper in self.helpers:
            resolve(helper.reset(**row))
        messages = None
        self.environment = None
        owners = list(self.helpers)
        if self.factories:
            self.environment = self._environment_of(row)
            messages = resolve(self.environment.reset(**row))
            owners.append(self.environment)
        # A tool of the environment replaces a tool of the config with the same name.
        self.episode_tools = dict(self.tools)
        for owner in owners:
            self.episode_tools |= {name: getattr(owner, name) for name in tool_names(type(owner))}
        tools = self.episode_tools.values()
        return {"messages": messages, "tools": [checked_schema(tool, "tools") for tool in tools]}

    def _environment_of(self, row: Fields) -> Any:
        """Returns the environment for a row. Removes the column that names it from the row."""
        name = "" if "" in self.factories else str(row.pop(COLUMN, None))
        if name not in self.factories:
            factories = ", ".join(self.factories)
            raise ValueError(
                f"the row's column {COLUMN!r} is {name!r}, and environment.factory has {factories}"
            )
        if name not in self.environments:
            self.environments[name] = self.factories[name]()
        return self.environments[name]

    def act(self, message: Message) -> Fields:
        """Calls the tools that a message asks for. Returns the fields of pool._ActValues.

        Async tools run concurrently; as in TRL, their results come after those of the other tools.
        """
        results = []
        pending: list[tuple[str, Awaitable[Any]]] = []
        calls = message.get("tool_calls") or []
        num_invalid = 0
        tool_errors = []
        for call in calls:
            name = call["function"]["name"]
            arguments = call["function"]["arguments"]
            tool = self.episode_tools.get(name)
            # Reported before the call, so that the error about a tool that hangs names the tool.
            self.report_tool(name)
            try:
                if tool is None:
                    raise ValueError(f"Tool {name} not found.")
                result = tool(**arguments)
            except bdb.BdbQuit:
                # The user has left the debugger.
                raise
            except Exception as error:
                # A TypeError comes from inside the tool, unless the arguments do not fit the tool.
                is_misfit = isinstance(error, TypeError) and not _fits(tool, arguments)
                # An unknown tool and misfitting arguments are the policy's mistake; other errors
                # are the tool's.
                if tool is None or is_misfit:
                    num_invalid += 1
                else:
                    tool_errors.append(f"tool {name!r} raised {describe_error(error)}")
                result = {"error": str(error)}
            if inspect.isawaitable(result):
                pending.append((name, result))
            else:
                results.append(_tool_message(name, result))
        outcomes = _outcomes([awaitable for _, awaitable in pending]) if pending else []
        for (name, _), (result, raised) in zip(pending, outcomes, strict=True):
            # The policy gets the errors of tools. SystemExit and the debugger's end are raised.
            if isinstance(raised, Exception) and not isinstance(raised, bdb.BdbQuit):
                tool_errors.append(f"tool {name!r} raised {describe_error(raised)}")
                result = {"error": str(raised)}
            elif raised is not None:
                raise raised
            results.append(_tool_message(name, result))
        if tool_errors and not self.has_printed:
            self.has_printed = True
            print(tool_errors[0], flush=True)
        return {
            "messages": results,
            "reward": None,
            "done": not calls,
            "num_calls": len(calls),
            "num_invalid": num_invalid,
            "num_errors": len(tool_errors),
            "first_error": tool_errors[0].partition("\n")[0] if tool_errors else "",
        }

    def end(self) -> dict[str, float | None]:
        """Returns {name of the environment's class: result of get_reward()}, the episode's reward;
        {} if the class has no get_reward()."""
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is None:
            return {}
        return {type(self.environment).__name__: resolve(get_reward())}


def tool_names(environment_class: type) -> list[str]:
    """Returns the names of an environment's tools: the public functions of its class."""
    functions = inspect.getmembers(environment_class, inspect.isfunction)
    return [name for name, _ in functions if not name.startswith("_") and name not in _NO_TOOLS]


def check_class(make: Factory, key: str) -> type:
    """Returns the class of the objects that `make` makes; `make` is called only if it is no class.

    Raises ConfigError for a class that is no environment.
    """
    environment_class = make if inspect.isclass(make) else type(make())
    if not callable(getattr(environment_class, "reset", None)):
        raise ConfigError(f"{key}: {environment_class.__name__} has no method reset(**row)")
    return environment_class


def class_schemas(environment_class: type, key: str) -> list[Fields]:
    """Returns the schemas of a class's tools, without running its __init__. Raises ConfigError."""
    blank: Any = object.__new__(environment_class)
    names = tool_names(environment_class)
    # Bound methods, because their signatures have no `self`.
    methods = [getattr(environment_class, name).__get__(blank) for name in names]
    return [checked_schema(method, key) for method in methods]


def checked_schema(tool: Function, key: str) -> Fields:
    """Returns the JSON schema of a tool. Raises ConfigError if none can be made."""
    # Imported late: transformers takes seconds, and gym environments and agents have no tools.
    from transformers.utils import get_json_schema

    try:
        schema: Fields = get_json_schema(tool)
    # transformers raises several types of exceptions if type hints or docstrings are incomplete.
    except Exception as error:
        raise ConfigError(
            f"{key}: {callable_name(tool)} has no schema: {' '.join(str(error).split())}; give "
            "it type hints and a Google-style docstring"
        ) from None
    return schema


def _fits(tool: Function | None, arguments: Any) -> bool:
    """Returns whether the tool's signature accepts the arguments."""
    try:
        inspect.signature(tool).bind(**arguments)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _tool_message(name: str, result: Any) -> Message:
    """Returns a tool's result as a message. Blocks of text stay blocks; all else becomes text."""
    is_text_blocks = (
        isinstance(result, list)
        and result
        and all(isinstance(block, dict) and block.get("type") == "text" for block in result)
    )
    return {"role": "tool", "name": name, "content": result if is_text_blocks else str(result)}


def resolve(value: Any) -> Any:
    """Returns the value itself or, if it is an awaitable, its result."""
    if not inspect.isawaitable(value):
        return value
    ((result, error),) = _outcomes([value])
    if error is not None:
        raise error
    return result


def _outcomes(awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, BaseException | None]]:
    """Runs awaitables concurrently. Returns (result, None) or (None, error) for each of them."""

    async def outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        """Returns (result, None), or (None, error) if the awaitable raised."""
        try:
            return await awaitable, None
        # SystemExit too: it would end the loop, and the caller would wait for ever.
        except BaseException as error:
            return None, error

    async def gather() -> list[tuple[Any, BaseException | None]]:
        return await asyncio.gather(*map(outcome, awaitables))

    return asyncio.run_coroutine_threadsafe(gather(), _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the process's one event loop, which runs in a thread of its own, as in TRL.

    An async client that reset() makes is bound to the loop, and its tasks must go on running
    between calls.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async tools", daemon=True).start()
    return loop


class GymDriver:
    """Runs the episodes of an environment with Gym's methods, one at a time in each worker.

    An environment that has no `reset` and begins with `init` (SkyRL) is made anew for each episode;
    others are made once for each worker.
    """

    kind = "gym"
    # The reward of an episode, which is the sum of its steps' rewards (environments.py).
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
        self._messages = to_messages(row.get("prompt"))
        if self.environment is not None and not hasattr(self.environment, "reset"):
            # An environment without close() is just dropped: bool() does nothing.
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

    def act(self, message: Message) -> Fields:
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
    # Asked first, since a named tuple with these attributes may have them in any order.
    if isinstance(result, Mapping) or (hasattr(result, "observation") and hasattr(result, "done")):
        observation = _get(result, "observations", _get(result, "observation"))
        reward = _get(result, "reward")
        ended = _get(result, "terminated") or _get(result, "truncated")
        done = _get(result, "done", ended)
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
        inner = _get(observation, name)
        if isinstance(inner, str | list):
            return to_messages(inner)
    raise BrokenContractError(
        f"an observation is {type(observation).__name__}: it must be text, messages, or have an "
        "attribute `messages` or `text`"
    )


def _get(value: Any, name: str, default: Any = None) -> Any:
    """Returns the entry `name` of a mapping, or the attribute `name` of another object."""
    if isinstance(value, Mapping):
        return value.get(name, default)
    return getattr(value, name, default)


def _action(step: Function, text: str, messages: list[Message]) -> Any:
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


class AgentDriver:
    """Runs an agent's episodes one at a time. Each episode is one call of the user's function."""

    kind = "agent"
    reward_names = (REWARD,)
    schemas: Sequence[Fields] = ()

    def __init__(self, rollout: Function) -> None:
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

    def begin(self, row: Fields, access: Mapping[str, str]) -> Fields:
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
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        code = getattr(error, "code", None)
        if isinstance(code, str) and code in LIMITS:
            return code
        error = error.__cause__ or error.__context__
    return None
