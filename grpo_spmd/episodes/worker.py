"""What the processes of environments run: the user's code, imported once, and one episode after the other.

python -m grpo_spmd.episodes.worker SOCKET_FD PARENT_PID      (by pool.py; nursery.py says the rest)
"""

from __future__ import annotations

import bdb
import functools
import json
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, RewardConfig
from grpo_spmd.episodes.agent import REWARD as AGENT_REWARD
from grpo_spmd.episodes.agent import AgentDriver
from grpo_spmd.episodes.gym import REWARD, GymDriver
from grpo_spmd.episodes.shipped.catalog import shipped_factory
from grpo_spmd.episodes.trl import TrlDriver, checked_class, checked_schema, schemas_of
from grpo_spmd.rewards.named import Modules, load_named, unpack
from grpo_spmd.rewards.pool.nursery import MAX_ERROR_CHARS, Answer, Worker, run_nursery
from grpo_spmd.rewards.pool.worker import call_reward
from grpo_spmd.rewards.protocol import Reward, load_rewards
from grpo_spmd.rewards.trl import BrokenContractError, as_number, callable_name

Driver = TrlDriver | GymDriver | AgentDriver


def load(setup: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Worker], Answer]]:
    """In the nursery: EnvironmentFacts, and what answers the pool's calls in a worker. Raises ConfigError."""
    if (functions := setup.get("functions")) is not None:
        unpack(functions)
    config = EnvironmentConfig(**setup["environment"])
    modules: Modules = {}  # a reward may ask of which class an environment is: their file is run once
    loaded = load_rewards([RewardConfig(**reward) for reward in setup["rewards"]], modules=modules)
    # They are given here what a reward pool has none of.
    rewards = [
        replace(reward, takes=[name for name in reward.takes if name != "environments"])
        for reward in loaded
    ]
    kind, names, tools, make = _kind_of(config, modules)
    names += [reward.name for reward in rewards]
    if kind == "agent" and rewards:
        why = "takes `environments`, and an agent has none"
        raise ConfigError(
            f"environment.agent: reward {rewards[0].name!r} {why}; return the reward in rollout()"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"environment: two rewards are called {twice[0]!r}; give one another name"
        )
    weights = [1.0] * (len(names) - len(rewards)) + [reward.weight for reward in rewards]
    facts = {"kind": kind, "reward_names": names, "weights": weights, "tools": tools}
    most = setup["max_chars"]
    return facts, lambda worker: functools.partial(answer, make(worker), rewards, most)


def _kind_of(
    config: EnvironmentConfig, modules: Modules
) -> tuple[str, list[str], list[dict[str, Any]], Callable[[Worker], Driver]]:
    """What it is, the names of the rewards that it gives, the schemas of its tools, and what makes it."""
    if config.agent:
        rollout = load_named(config.agent, "environment.agent", "function", modules)
        driver = AgentDriver(rollout)
        return "agent", [AGENT_REWARD], [], lambda worker: driver
    if config.gym:
        environment = load_named(config.gym, "environment.gym", "Class", modules)
        GymDriver(environment)  # which refuses what cannot be one
        return "gym", [REWARD], [], lambda worker: GymDriver(environment)
    tools, helpers, schemas = {}, [], list[dict[str, Any]]()
    for number, spec in enumerate(config.tools):
        key = f"environment.tools.{number}"
        if (maker := shipped_factory(spec)) is not None:
            helpers.append(maker)
            schemas += schemas_of(checked_class(maker, key), key)
            continue
        tool = load_named(spec, key, "function", modules)
        if callable_name(tool) in tools:
            raise ConfigError(f"{key}: there is a tool {callable_name(tool)!r} already")
        tools[callable_name(tool)] = tool
        schemas.append(checked_schema(tool, key))
    by_column = isinstance(config.factory, Mapping)
    specs = config.factory if isinstance(config.factory, Mapping) else {"": config.factory}
    factories = {name: _factory(spec, _key(name), modules) for name, spec in specs.items()}
    classes = {name: checked_class(make, _key(name)) for name, make in factories.items()}
    schemas += [
        schema for name, found in classes.items() for schema in schemas_of(found, _key(name))
    ]
    if not schemas:
        raise ConfigError(
            "environment: there is no tool; a factory's class needs public methods, or name some in tools"
        )
    names = list(
        dict.fromkeys(found.__name__ for found in classes.values() if hasattr(found, "get_reward"))
    )

    def make_driver(worker: Worker) -> Driver:
        return TrlDriver(
            tools, helpers, factories, by_column, lambda name: worker.say({"at": name})
        )

    return "tools", names, schemas, make_driver


def _key(name: str) -> str:
    return f"environment.factory.{name}" if name else "environment.factory"


def _factory(spec: str, key: str, modules: Modules) -> Callable[[], Any]:
    return shipped_factory(spec) or load_named(spec, key, "Class", modules)


def answer(
    driver: Driver, rewards: list[Reward], max_chars: int, message: dict[str, Any]
) -> dict[str, Any]:
    """A call's reply: {"values": ...}, {"failed": why, with the traceback}, {"broken": what is wrong whatever the
    episode is}, {"quit": True} where the user left the debugger; with the place and the number of its call."""
    which = {"place": message["place"], "serial": message["serial"]}
    try:
        values = _values(driver, rewards, message)
        told = values.get("messages")
        if (num_chars := len(str(told))) > max_chars:
            if message["what"] != "act":
                raise ValueError(
                    f"reset() gave {num_chars:,} characters, and {max_chars:,} are the most"
                )
            values |= {"messages": [], "too_long": num_chars}
        json.dumps(values)
        return {"values": values, **which}
    except BrokenContractError as error:
        return {"broken": str(error), **which}
    except bdb.BdbQuit:
        return {"quit": True, **which}
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt too: the environment fails, not the worker
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next
        what = traceback.format_exception_only(error)[-1].strip()[:500]
        return {
            "failed": f"raised {what}\n{''.join(traceback.format_exception(error))[-MAX_ERROR_CHARS:]}",
            **which,
        }


def _values(driver: Driver, rewards: list[Reward], message: dict[str, Any]) -> dict[str, Any]:
    if message["what"] == "begin":
        random.seed(message["seed"])
        numpy.random.seed(message["seed"] % 2**32)
        row = message["row"]
        if isinstance(driver, AgentDriver):
            return driver.begin(row, message["extra"])
        return {"tools": [], **driver.begin(row)}
    assert not isinstance(driver, AgentDriver), "an agent's episode is one call"
    if message["what"] == "act":
        return driver.act(json.loads(message["message"]))
    found: dict[str, float | str | None] = {
        name: _as_reward(value) for name, value in driver.end().items()
    }
    for reward in rewards:
        reply = call_reward(
            reward,
            message["given"] | json.loads(message["said"]) | {"environments": [driver.environment]},
        )
        if "broken" in reply:
            raise BrokenContractError(f"reward {reward.name!r} {reply['broken']}")
        if "quit" in reply:
            raise bdb.BdbQuit
        found[reward.name] = reply["values"][0] if "values" in reply else str(reply["failed"])
    return {"rewards": found}


def _as_reward(value: Any) -> float | str | None:
    number = None if value is None else as_number(value)
    is_finite = not isinstance(number, str) and number is not None and abs(number) < float("inf")
    return number if number is None or is_finite else f"is {number}"


if __name__ == "__main__":
    run_nursery(load)
