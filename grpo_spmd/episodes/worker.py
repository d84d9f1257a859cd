"""This module is the program of the environments' worker processes: it imports the user's code and
runs episodes.

python -m grpo_spmd.episodes.worker SOCKET_FD SETUP_FD PARENT_PID      (by pool.py; see nursery.py)
"""

from __future__ import annotations

import bdb
import functools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig
from grpo_spmd.episodes.drivers import (
    AgentDriver,
    GymDriver,
    TrlDriver,
    check_class,
    checked_schema,
    class_schemas,
)
from grpo_spmd.episodes.shipped import shipped_factory
from grpo_spmd.records import Fields
from grpo_spmd.rewards.named import Modules, load_named
from grpo_spmd.rewards.pool.nursery import Answer, Worker, run_nursery
from grpo_spmd.rewards.pool.worker import call_reward, reply_to_error
from grpo_spmd.rewards.protocol import Reward, load_rewards
from grpo_spmd.rewards.trl import BrokenContractError, as_reward, callable_name

Driver = TrlDriver | GymDriver | AgentDriver


def load(setup: Fields) -> tuple[Fields, Callable[[Worker], Answer]]:
    """Loads the user's code; runs in the nursery. Returns (facts, function): the fields of
    EnvironmentFacts, and the function that makes a worker's Answer.

    Raises ConfigError.
    """
    config = setup["environment"]
    # Shared, so that each file is imported once. Otherwise an environment would not be an instance
    # of the class that a reward function from the same file knows.
    modules: Modules = {}
    rewards = load_rewards(setup["rewards"], modules=modules)
    # For each name in `takes`, `call_reward` passes an argument of its own: None for
    # `environments`. Here the environment is passed as a column, so the name is removed.
    rewards = [
        replace(reward, takes=[name for name in reward.takes if name != "environments"])
        for reward in rewards
    ]
    driver = _load_driver(config, modules)
    if driver.kind == "agent" and rewards:
        raise ConfigError(
            f"environment.agent: reward {rewards[0].name!r} takes `environments`, and an agent "
            "has none; return the reward in rollout()"
        )
    weights = dict.fromkeys(driver.reward_names, 1.0)
    for reward in rewards:
        if reward.name in weights:
            raise ConfigError(
                f"environment: two rewards are called {reward.name!r}; give one another name"
            )
        weights[reward.name] = reward.weight
    facts = {"kind": driver.kind, "weights": weights, "tools": driver.schemas}

    def make_answer(worker: Worker) -> Answer:
        """Returns the function with which a forked worker answers the pool's calls."""
        # With tools, the driver tells the pool which tool it calls, for reports of hanging calls.
        reporting: Driver = driver
        if isinstance(driver, TrlDriver):
            reporting = replace(driver, report_tool=lambda name: worker.say({"tool": name}))
        return functools.partial(answer, reporting, rewards, setup["max_chars"])

    return facts, make_answer


def _load_driver(config: EnvironmentConfig, modules: Modules) -> Driver:
    """Returns the driver of the environment that the config describes. Each forked worker has a
    copy of it. Raises ConfigError."""
    if config.agent:
        return AgentDriver(load_named(config.agent, "environment.agent", "function", modules))
    if config.gym:
        return GymDriver(load_named(config.gym, "environment.gym", "Class", modules))
    tools = {}
    helpers = []
    schemas = []
    for number, spec in enumerate(config.tools):
        key = f"environment.tools.{number}"
        factory = shipped_factory(spec)
        if factory is not None:
            helpers.append(factory)
            schemas += class_schemas(check_class(factory, key), key)
            continue
        tool = load_named(spec, key, "function", modules)
        name = callable_name(tool)
        if name in tools:
            raise ConfigError(f"{key}: there is a tool {name!r} already")
        tools[name] = tool
        schemas.append(checked_schema(tool, key))
    specs = config.factory if isinstance(config.factory, Mapping) else {"": config.factory}
    factories = {}
    reward_names = []
    for name, spec in specs.items():
        key = f"environment.factory.{name}" if name else "environment.factory"
        factories[name] = shipped_factory(spec) or load_named(spec, key, "Class", modules)
        environment_class = check_class(factories[name], key)
        schemas += class_schemas(environment_class, key)
        if hasattr(environment_class, "get_reward"):
            reward_names.append(environment_class.__name__)
    if not schemas:
        raise ConfigError(
            "environment: there is no tool; a factory's class needs public methods, or name "
            "some in tools"
        )
    return TrlDriver(tools, helpers, factories, reward_names=reward_names, schemas=schemas)


def answer(driver: Driver, rewards: list[Reward], max_chars: int, message: Fields) -> Fields:
    """Runs one call of the pool. Returns the reply, with the serial number of the call.

    The reply is {"values": ...}, {"failed": an error with its traceback}, {"broken": a fault of the
    code that does not depend on the episode}, or {"quit": True} if the user left the debugger.
    """
    call = {"serial": message["serial"]}
    try:
        values = _values(driver, rewards, message)
        # Huge messages are replaced by their size, so that the frame stays within its bound.
        num_chars = len(str(values.get("messages")))
        if num_chars > max_chars:
            if message["method"] != "act":
                raise ValueError(
                    f"reset() gave {num_chars:,} characters, and {max_chars:,} are the most"
                )
            values = {**values, "messages": [], "too_long": num_chars}
        # Values that are not JSON must raise here, as a failure of the environment, and not when
        # the frame is sent.
        json.dumps(values)
        return {"values": values, **call}
    # SystemExit and KeyboardInterrupt too: only the environment shall fail, and not the worker.
    except BaseException as error:
        return {**reply_to_error(error), **call}


def _values(driver: Driver, rewards: list[Reward], message: Fields) -> Fields:
    """Runs the driver's method (begin, act or end) that the message names; returns the reply's
    values, in the form that pool._FORMS has for the method."""
    if message["method"] == "begin":
        # Seeded for each episode, so that it does not depend on the process or the attempt.
        random.seed(message["seed"])
        numpy.random.seed(message["seed"] % 2**32)
        row = message["row"]
        if isinstance(driver, AgentDriver):
            return driver.begin(row, message["access"])
        return {"tools": [], **driver.begin(row)}
    assert not isinstance(driver, AgentDriver), "an agent's episode is one call"
    if message["method"] == "act":
        return driver.act(message["message"])
    # The environment's own rewards come first, then the rewards that look at environments.
    values = {name: as_reward(value) for name, value in driver.end().items()}
    lost = ""
    columns = {**message["columns"], "environments": [driver.environment]}
    for reward in rewards:
        reply = call_reward(reward, columns)
        if "broken" in reply:
            raise BrokenContractError(f"reward {reward.name!r} {reply['broken']}")
        if "quit" in reply:
            raise bdb.BdbQuit
        values[reward.name] = reply["values"][0] if "values" in reply else str(reply["failed"])
        if "metrics" in reply or "extra" in reply:
            lost = f"what reward {reward.name!r} logs is lost, because it takes `environments`"
    return {"rewards": values, "lost": lost}


if __name__ == "__main__":
    run_nursery(load)
