"""TRL's tools and environments, and Gym's, as a worker serves them: orders, texts and names are TRL
1.16's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, RewardConfig
from grpo_spmd.episodes.drivers import GymDriver, TrlDriver, read_step
from grpo_spmd.episodes.worker import load
from grpo_spmd.rewards.named import Modules, load_named


class BackwardStep(NamedTuple):
    done: bool
    reward: float
    observation: str


class LongStep(NamedTuple):
    observation: str
    reward: float
    done: bool
    info: dict[str, Any]
    extra: int


def alone(text: str) -> str:
    """
    Echoes.

    Args:
        text: What.
    """
    return f"alone {text}"


class World:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, **row: Any) -> str | None:
        self.row = row
        answer: str | None = row.get("say")
        return answer

    async def begin(self) -> str:
        """Begins what another call ends."""
        self.future: asyncio.Task[str] = asyncio.get_running_loop().create_task(
            asyncio.sleep(0.01, "from the task")
        )
        return "begun"

    async def finish(self) -> str:
        """Ends it."""
        return await self.future

    def count(self, number: int) -> int:
        """
        Counts.

        Args:
            number: From.
        """
        if number < 0:
            raise ValueError("below 0")
        return number + 1

    def _hidden(self) -> None: ...

    async def get_reward(self) -> float:
        return 0.5


class Other(World):
    pass


class Gymnasium:
    """With the signature of gymnasium.Env.reset, and a column of the row that it names."""

    def reset(self, *, seed: int | None = None, options: Any = None, start: int = 0) -> Any:
        return f"{seed} {options} {start}", {}

    def step(self, action: str) -> Any:
        return action, 1.0, True, False, {}


def test_reset_gets_the_columns_that_it_names() -> None:
    driver = GymDriver(Gymnasium)
    row = {"prompt": "p", "answer": "a", "start": 3}
    assert driver.begin(row) == {"messages": [{"role": "user", "content": "None None 3"}]}


def _calls(*calls: tuple[str, Any]) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls
        ]
    }


def test_tools_in_trls_order_and_one_loop_for_all_calls() -> None:
    driver = TrlDriver({"alone": alone}, [], {"": World})
    started = driver.begin({"say": "hello", "environment": "a column like others"})
    assert started["messages"] == "hello"
    assert driver.environment.row == {"say": "hello", "environment": "a column like others"}
    assert [tool["function"]["name"] for tool in started["tools"]] == [
        "alone",
        "begin",
        "count",
        "finish",
    ]
    # What an async call leaves running goes on, and another one may await it.
    assert driver.act(_calls(("begin", {})))["messages"] == [
        {"role": "tool", "name": "begin", "content": "begun"}
    ]
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("finish", {}),
        ("count", {"number": 1}),
        ("nothing", {}),
        ("count", {"number": -1}),
        ("count", {"a": 1}),
    )
    result = driver.act(_calls(*calls))
    assert [(message["name"], message["content"]) for message in result["messages"]] == [
        ("count", "2"),
        ("nothing", "{'error': 'Tool nothing not found.'}"),
        ("count", "{'error': 'below 0'}"),
        ("count", "{'error': \"World.count() got an unexpected keyword argument 'a'\"}"),
        ("finish", "from the task"),  # async ones come behind
    ]
    assert (result["num_calls"], result["num_invalid"]) == (5, 2)
    assert driver.end() == {"World": 0.5}


def test_the_column_chooses_one_of_several_which_are_made_once() -> None:
    World.made = Other.made = 0
    driver = TrlDriver({}, [], {"a": World, "b": Other})
    for name, reward in (("a", "World"), ("b", "Other"), ("a", "World")):
        driver.begin({"environment": name, "x": 1})
        assert driver.environment.row == {"x": 1}
        assert driver.end() == {reward: 0.5}
    assert (World.made, Other.made) == (1, 1)
    with pytest.raises(ValueError, match=r"is 'c', and environment\.factory has a, b"):
        driver.begin({"environment": "c"})


@pytest.mark.parametrize(
    "found",
    [
        ("seen", 0.5, False, True, {}),
        ("seen", 0.5, True, {}),
        {
            "observations": [{"role": "user", "content": "seen"}],
            "reward": 0.5,
            "done": True,
            "metadata": {},
        },
        SimpleNamespace(observation="seen", reward=0.5, done=True),
        BackwardStep(True, 0.5, "seen"),
        LongStep("seen", 0.5, True, {}, 0),
    ],
)
def test_what_a_step_may_give(found: Any) -> None:
    expected = {"messages": [{"role": "user", "content": "seen"}], "reward": 0.5, "done": True}
    assert read_step(found) == expected


def test_a_named_tuple_of_five_that_is_not_done() -> None:
    assert read_step(LongStep("seen", 0.5, False, {"a": 1}, 0))["done"] is False


def test_an_async_gym_keeps_its_loop() -> None:
    class Client:
        async def reset(self, **row: Any) -> Any:
            self.loop = asyncio.get_running_loop()
            return SimpleNamespace(observation=f"row {row['x']}", reward=None, done=False)

        async def step(self, action: str) -> Any:
            assert self.loop is asyncio.get_running_loop()
            return SimpleNamespace(observation=action.upper(), reward=1, done=True)

    driver = GymDriver(Client)
    assert driver.begin({"prompt": "p", "x": 3})["messages"] == [
        {"role": "user", "content": "row 3"}
    ]
    result = driver.act({"role": "assistant", "content": "go"})
    assert (result["messages"][0]["content"], result["reward"], result["done"]) == ("GO", 1.0, True)


def test_a_reward_that_looks_at_environments_has_none_to_look_at_with_an_agent(
    tmp_path: Path,
) -> None:
    """It would never be called, and the rewards be others than the config says."""
    file = tmp_path / "mine.py"
    file.write_text(
        "async def rollout(task, base_url, api_key, model): return 1.0\n"
        "def judge(completions, environments): return []\n"
    )
    setup = {
        "environment": EnvironmentConfig(agent=f"{file}:rollout"),
        "rewards": [RewardConfig(function=f"{file}:judge")],
        "max_chars": 9,
    }
    with pytest.raises(
        ConfigError,
        match=r"environment.agent: reward 'judge' takes `environments`, and an agent has",
    ):
        load(setup)
    assert load({**setup, "rewards": []})[0]["kind"] == "agent"


def test_a_file_that_is_named_twice_is_run_once_so_that_its_classes_are_the_same(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text("class World:\n    pass\ndef looks(environments, **_):\n    return [World]\n")
    modules: Modules = {}
    world = load_named(f"{file}:World", "environment.factory", "Class", modules)
    assert load_named(f"{file}:looks", "rewards.0", "function", modules)([]) == [world]
    assert load_named(f"{file}:World", "environment.factory", "Class") is not world
