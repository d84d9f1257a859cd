"""This module runs tools and environments in TRL's form (1.16), in a worker: existing code runs
unchanged.

A tool is a function with types and a docstring. An environment is a class with `reset(**row)`,
public methods, which are its tools, and perhaps `get_reward()`. All of them may be async. An error
of a tool is its result, for the policy to read; an error of `reset` or `get_reward` is a failure of
the environment.
"""

from __future__ import annotations

import asyncio
import bdb
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.shipped.catalog import Factory
from grpo_spmd.records import Fields, Message
from grpo_spmd.rewards.pool.worker import describe_error
from grpo_spmd.rewards.trl import callable_name

Tool = Callable[..., Any]
_NO_TOOLS = ("reset", "get_reward")
# The column of a row that names one of several factories.
COLUMN = "environment"


@dataclass
class TrlDriver:
    """Runs one episode at a time.

    An environment is made once in a worker and reset for each episode, as in TRL.
    """

    kind = "tools"
    tools: Mapping[str, Tool]
    helper_factories: Sequence[Factory]
    """They make environments that only have tools, for every episode."""
    factories: Mapping[str, Factory]
    """One entry with the name "", or several of which each row names one."""
    reward_names: Sequence[str] = ()
    schemas: Sequence[Fields] = ()
    """JSON schemas of all tools."""
    report_tool: Callable[[str], None] = lambda name: None
    """It gets the name of each called tool."""
    environment: Any = None
    """The environment of the running episode."""
    environments: dict[str, Any] = field(default_factory=dict)
    has_printed: bool = False
    """True after the first traceback of a tool, which goes to the log of the environments."""
    episode_tools: dict[str, Tool] = field(default_factory=dict)

    @functools.cached_property
    def helpers(self) -> list[Any]:
        """Returns the helpers, which are made in the worker once for all of its episodes."""
        return [make() for make in self.helper_factories]

    def begin(self, row: Fields) -> Fields:
        """Returns {"messages": what reset returned, "tools": the schemas of this episode}."""
        # Shipped tools keep state for one episode alone.
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
        """Returns a row's environment; takes the column that names it out of the row."""
        name = "" if "" in self.factories else str(row.pop(COLUMN, None))
        if name not in self.factories:
            factories = ", ".join(self.factories)
            raise ValueError(
                f"the row's column {COLUMN!r} is {name!r}, and environment.factory has {factories}"
            )
        if name not in self.environments:
            self.environments[name] = self.factories[name]()
        return self.environments[name]

    def act(self, message: Mapping[str, Any]) -> Fields:
        """Calls the tools that a message asks for.

        As in TRL, the results of async tools, which run together, come after those of the others.
        """
        results: list[Message] = []
        pending: list[tuple[str, Awaitable[Any]]] = []
        calls = message.get("tool_calls") or []
        num_invalid = 0
        tool_errors: list[str] = []
        for call in calls:
            name = call["function"]["name"]
            arguments = call["function"]["arguments"]
            tool = self.episode_tools.get(name)
            # The report comes first, so that a tool that hangs is named in the error.
            self.report_tool(name)
            try:
                if tool is None:
                    raise ValueError(f"Tool {name} not found.")
                result = tool(**arguments)
            except bdb.BdbQuit:
                # The user left the debugger.
                raise
            except Exception as error:
                # A TypeError may come from inside the tool, or from arguments that do not fit it.
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
            # Errors of a tool go to the policy; SystemExit and the debugger's end go to the worker.
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
        """Returns the result of get_reward under the name of its class."""
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
    # Bound methods, as their schemas have no `self`.
    methods = [getattr(environment_class, name).__get__(blank) for name in names]
    return [checked_schema(method, key) for method in methods]


def checked_schema(tool: Tool, key: str) -> Fields:
    """Returns the schema of a tool. Raises ConfigError if it has none."""
    # Imported late: transformers takes seconds, and a gym environment or an agent has no tools.
    from transformers.utils import get_json_schema

    try:
        schema: Fields = get_json_schema(tool)
    # transformers raises several kinds, for types and docstrings that say too little.
    except Exception as error:
        raise ConfigError(
            f"{key}: {callable_name(tool)} has no schema: {' '.join(str(error).split())}; give "
            "it types and a docstring of Google's style"
        ) from None
    return schema


def _fits(tool: Tool | None, arguments: Any) -> bool:
    """Returns whether the tool's signature accepts the arguments."""
    try:
        inspect.signature(tool).bind(**arguments)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _tool_message(name: str, result: Any) -> Message:
    is_text_blocks = (
        isinstance(result, list)
        and result
        and all(isinstance(block, dict) and block.get("type") == "text" for block in result)
    )
    return {"role": "tool", "name": name, "content": result if is_text_blocks else str(result)}


def resolve(value: Any) -> Any:
    """Returns a value, or the result of an awaitable."""
    if not inspect.isawaitable(value):
        return value
    ((result, error),) = _outcomes([value])
    if error is not None:
        raise error
    return result


def _outcomes(awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, BaseException | None]]:
    """Returns (result, error) for each awaitable; one of them is None. The awaitables run
    together."""

    async def outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        # SystemExit too, which would end the loop and leave the caller waiting.
        except BaseException as error:
            return None, error

    async def gather() -> list[tuple[Any, BaseException | None]]:
        return await asyncio.gather(*map(outcome, awaitables))

    return asyncio.run_coroutine_threadsafe(gather(), _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the process's event loop, which runs in a thread of its own, as in TRL.

    A client that reset() made is bound to its loop, and its tasks go on between calls.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async tools", daemon=True).start()
    return loop
