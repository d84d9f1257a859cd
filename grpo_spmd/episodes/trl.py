"""This module runs tools and environments written for TRL (1.16), unchanged, in a worker process.

A tool is a function with type hints and a docstring. An environment is a class with `reset(**row)`,
with public methods, which are its tools, and perhaps with `get_reward()`. All of them may be async.
If a tool raises, its error is the result that the policy reads; if `reset` or `get_reward` raises,
the environment has failed.
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

    An environment is made once in each worker and reset for each episode, as in TRL.
    """

    kind = "tools"
    tools: Mapping[str, Tool]
    """The functions in `environment.tools` by name."""
    helper_factories: Sequence[Factory]
    """They make the *helpers*: the shipped objects in `environment.tools`, which have tools and no
    reward, and take part in every episode."""
    factories: Mapping[str, Factory]
    """They make environments. There is one entry with the name "", or several, of which each row
    names one."""
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
    episode_tools: dict[str, Tool] = field(default_factory=dict)
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

    def act(self, message: Mapping[str, Any]) -> Fields:
        """Calls the tools that a message asks for. Returns the fields of pool._ActValues.

        Async tools run concurrently; as in TRL, their results come after those of the other tools.
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
        """Returns {name of the environment's class: result of get_reward()}, or {} without it."""
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


def checked_schema(tool: Tool, key: str) -> Fields:
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


def _fits(tool: Tool | None, arguments: Any) -> bool:
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
