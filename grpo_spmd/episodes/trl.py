"""Tools and environments by TRL's protocol (1.16), in a worker: people's code as it is.

A tool is a function with types and a docstring. An environment is a class: `reset(**row)`, public methods, which are
tools, and perhaps `get_reward()`. All of it may be async. What a tool raises is its result, for the policy to read;
what `reset` or `get_reward` raises is a failure of the environment.
"""

from __future__ import annotations

import asyncio
import bdb
import functools
import inspect
import threading
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.rewards.trl import callable_name

Tool = Callable[..., Any]
_NO_TOOLS = ("reset", "get_reward")
COLUMN = "environment"  # of the row, which names one of several factories


class TrlDriver:
    """Serves one episode at a time. An environment is made once a worker and reset for each episode, as TRL does."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        helpers: Sequence[Callable[[], Any]],
        factories: Mapping[str, Callable[[], Any]],
        by_column: bool,
        tell: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`helpers` make environments that only have tools, for every episode; of `factories` there is one, or with
        `by_column` the row names one. `tell` hears which tool is called. Raises ConfigError."""
        self._tools, self._makers, self._factories, self._by_column = (
            tools,
            helpers,
            factories,
            by_column,
        )
        self._tell = tell
        self._helpers: list[Any] | None = None
        self._made: dict[str, Any] = {}
        self._called: dict[str, Tool] = {}  # by name, in the episode under way
        self.environment: Any = None  # that of the episode under way

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:
        """{"messages": what reset gave, "tools": the schemas of this episode's}."""
        self._helpers = (
            self._helpers if self._helpers is not None else [make() for make in self._makers]
        )
        for helper in self._helpers:
            finished(helper.reset(**row))
        said, self.environment = None, None
        if self._factories:
            name = str(row.pop(COLUMN, None)) if self._by_column else next(iter(self._factories))
            if name not in self._factories:
                there = ", ".join(self._factories)
                raise ValueError(
                    f"the row's column {COLUMN!r} is {name!r}, and environment.factory has {there}"
                )
            if name not in self._made:
                self._made[name] = self._factories[name]()
            self.environment = self._made[name]
            said = finished(self.environment.reset(**row))
        owners = [*self._helpers, *([self.environment] if self.environment is not None else [])]
        self._called = {
            **self._tools,
            **{name: tool for owner in owners for name, tool in methods_of(owner).items()},
        }
        return {"messages": said, "tools": [schema_of(tool) for tool in self._called.values()]}

    def act(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Call the tools that the message asks for. TRL's order: the results of async ones, which run together, come
        behind the others'."""
        results: list[dict[str, Any]] = []
        waiting: list[tuple[str, Awaitable[Any]]] = []
        calls, num_invalid = message.get("tool_calls") or [], 0
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            tool = self._called.get(name)
            self._tell(name)
            try:
                if tool is None:
                    raise ValueError(f"Tool {name} not found.")
                found = tool(**arguments)
            except bdb.BdbQuit:  # the user left the debugger
                raise
            except Exception as error:
                num_invalid += tool is None or (
                    isinstance(error, TypeError) and not _fits(tool, arguments)
                )
                found = {"error": str(error)}
            if inspect.isawaitable(found):
                waiting.append((name, found))
            else:
                results.append(_result(name, found))
        if waiting:
            for (name, _), (given, raised) in zip(
                waiting, _outcomes([one for _, one in waiting]), strict=True
            ):
                if raised is not None and (
                    isinstance(raised, bdb.BdbQuit) or not isinstance(raised, Exception)
                ):
                    raise raised
                results.append(_result(name, given if raised is None else {"error": str(raised)}))
        counts = {"num_calls": len(calls), "num_invalid": num_invalid}
        return {"messages": results, "reward": None, "done": not calls, **counts}

    def end(self) -> dict[str, float | None]:
        """What get_reward gives, under the name of its class."""
        if (get_reward := getattr(self.environment, "get_reward", None)) is None:
            return {}
        return {type(self.environment).__name__: finished(get_reward())}


def methods_of(environment: Any) -> dict[str, Tool]:
    """The tools of an environment: the public functions of its class."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return {
        name: getattr(environment, name)
        for name in names
        if not name.startswith("_") and name not in _NO_TOOLS
    }


def checked_class(make: Callable[[], Any], key: str) -> type:
    """The class of what `make` makes, which is asked only where it is none. Raises ConfigError where that is no
    environment."""
    found = make if inspect.isclass(make) else type(make())
    if not callable(getattr(found, "reset", None)):
        raise ConfigError(f"{key}: {found.__name__} has no method reset(**row)")
    return found


def schemas_of(found: type, key: str) -> list[dict[str, Any]]:
    """Of the tools of a class, without an object of it. Raises ConfigError."""
    blank: Any = object.__new__(found)
    functions = inspect.getmembers(found, inspect.isfunction)
    named = [types.MethodType(function, blank) for name, function in functions]
    names = [name for name, _ in functions]
    public = [
        tool
        for name, tool in zip(names, named, strict=True)
        if not name.startswith("_") and name not in _NO_TOOLS
    ]
    return [checked_schema(tool, key) for tool in public]


def checked_schema(tool: Tool, key: str) -> dict[str, Any]:
    try:
        return schema_of(tool)
    except (
        Exception
    ) as error:  # transformers raises several kinds, for types and docstrings that say too little
        what = f"{callable_name(tool)} has no schema: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{key}: {what}; give it types and a docstring of Google's style"
        ) from None


def schema_of(tool: Tool) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    found: dict[str, Any] = get_json_schema(tool)
    return found


def _fits(tool: Tool, arguments: Any) -> bool:
    """Whether it can be called so."""
    try:
        inspect.signature(tool).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def _result(name: str, found: Any) -> dict[str, Any]:
    is_blocks = (
        isinstance(found, list)
        and found
        and all(isinstance(one, dict) and one.get("type") == "text" for one in found)
    )
    return {"role": "tool", "name": name, "content": found if is_blocks else str(found)}


def finished(found: Any) -> Any:
    """What it is, or what comes of it where it is to be awaited."""
    if not inspect.isawaitable(found):
        return found
    ((value, error),) = _outcomes([found])
    if error is not None:
        raise error
    return value


def _outcomes(awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, BaseException | None]]:
    """What each of them, which run together, gives or raises."""

    async def outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except (
            BaseException
        ) as error:  # SystemExit too, which would end the loop and leave the caller waiting
            return None, error

    async def together() -> list[tuple[Any, BaseException | None]]:
        return await asyncio.gather(*map(outcome, awaitables))

    return asyncio.run_coroutine_threadsafe(together(), _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for the process, in a thread of its own, as TRL has it: a client that reset() made is bound to its loop, and
    its background tasks go on between calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async tools", daemon=True).start()
    return loop
