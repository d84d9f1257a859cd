"""The tools and environments that the config may name without a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.shipped.countdown import Countdown
from grpo_spmd.episodes.shipped.python_tool import PythonTool, check_sandbox
from grpo_spmd.episodes.shipped.search import Search
from grpo_spmd.rewards.sandbox.sandbox import SandboxError

Factory = Callable[[], Any]


def shipped_factory(name: str) -> Factory | None:
    """Returns what makes a shipped environment in TRL's form; None for a name that is not shipped.

    Raises ConfigError if the environment lacks what it needs.
    """
    kind, _, path = name.partition(":")
    if kind == "search" and not path.endswith(".py"):
        if not path:
            rule = "search needs the file that it looks into, JSON lines of title and text"
            raise ConfigError(f"{rule}: search:CORPUS")
        return functools.partial(Search, path)
    if name == "python":
        try:
            check_sandbox()
        except SandboxError as error:
            raise ConfigError(f"the tool python: {error}") from None
        return PythonTool
    return {"countdown": Countdown}.get(name)
