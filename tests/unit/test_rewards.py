"""The reward protocol, and its policy for what goes wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.pool.worker import call_reward
from grpo_spmd.rewards.protocol import Reward, load_rewards, weighted_sum
from grpo_spmd.rewards.verifiers import SHIPPED


def _call(function: Callable[..., Any], num_completions: int = 1) -> dict[str, Any]:
    return call_reward(Reward(name="f", weight=1.0, function=function), {"prompts": ["p"] * num_completions})


def _returning(values: Any) -> Callable[..., Any]:
    return lambda **_: values


def _load(tmp_path: Path, source: str, name: str = "reward", args: dict[str, Any] | None = None) -> Reward:
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    (reward,) = load_rewards([RewardConfig(function=f"{tmp_path}/mine.py:{name}", args=args or {})])
    return reward


def test_sum_that_overflows_makes_that_sample_unknown() -> None:
    assert weighted_sum([(10.0, 1e308)]) is None


def test_async_function_is_awaited() -> None:
    async def reward(prompts: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(p)) for p in prompts]

    assert _call(reward, 2) == {"values": [1.0, 1.0]}


def test_sync_function_may_run_its_own_event_loop() -> None:
    async def ask_a_judge() -> float:
        await asyncio.sleep(0)
        return 0.75

    assert _call(lambda **_: [asyncio.run(ask_a_judge())]) == {"values": [0.75]}


# What goes wrong (tests/faults/test_reward_pool.py has what only a process can do)


class _Strange:
    def __float__(self) -> float:
        raise SystemError("no")


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "1.0", b"1", [1.0], {}, object(), _Strange(), 10**400, torch.tensor([1.0, 2.0])],
)
def test_unusable_value_is_said_and_leaves_the_others(value: Any) -> None:
    unusable, usable = _call(_returning([value, 1.0]), 2)["values"]
    assert unusable.startswith("returned")
    assert usable == 1.0


@pytest.mark.parametrize(
    "values",
    [[1, True, Fraction(1, 2)], (1.0, 1.0, 0.5), torch.tensor([1.0, 1.0, 0.5])],
    ids=["list", "tuple", "tensor"],
)
def test_number_types_become_floats(values: Any) -> None:
    got = _call(_returning(values), 3)["values"]
    assert got == [1.0, 1.0, 0.5]
    assert all(type(value) is float for value in got)


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 3])
def test_wrong_length_is_said_with_both_numbers(values: list[float]) -> None:
    assert _call(_returning(values), 2) == {"failed": f"must return one value a completion: 2; got {len(values)}"}


@pytest.mark.parametrize("values", [None, 1.0, "ab", b"ab", {"a": 1.0, "b": 2.0}, {1.0, 2.0}, torch.tensor(1.0)])
def test_result_that_is_no_list_is_said_with_its_type(values: Any) -> None:
    assert _call(_returning(values), 2)["failed"].startswith(
        f"must return a list of numbers or None; got {type(values).__name__}"
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_exception_is_said_with_its_traceback(is_async: bool) -> None:
    def sync_reward(**_: Any) -> list[float]:
        raise KeyError("gone")

    async def async_reward(**_: Any) -> list[float]:
        raise KeyError("gone")

    failed = _call(async_reward if is_async else sync_reward)["failed"]
    assert failed.startswith("raised KeyError: 'gone'\nTraceback (most recent call last)")
    assert __file__ in failed


def test_a_long_error_is_cut() -> None:
    def reward(**_: Any) -> list[float]:
        raise ValueError("x" * 1_000_000)

    assert len(_call(reward)["failed"]) < 5000


# Loading


def test_function_without_columns_gets_what_it_names(tmp_path: Path) -> None:
    reward = _load(
        tmp_path, "def reward(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert reward.function(prompts=["p"] * 2, completions=["x", "y"], answer=["y"] * 2, other=[1] * 2) == [0.0, 1.0]


def test_args_reach_the_function(tmp_path: Path) -> None:
    reward = _load(
        tmp_path,
        "def reward(completions, scale, **columns):\n    return [scale] * len(completions)\n",
        args={"scale": 2.5},
    )
    assert reward.function(prompts=["p"], completions=["x"], completion_ids=[[1]]) == [2.5]


def test_reward_is_named_after_its_function_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fn(**_):\n    return []\n", encoding="utf-8")
    spec = f"{tmp_path}/mine.py:fn"
    configs = [RewardConfig(function=spec), RewardConfig(function=spec, name="other", weight=0.5)]
    assert [(r.name, r.weight) for r in load_rewards(configs)] == [("fn", 1.0), ("other", 0.5)]


def test_columns_that_a_function_cannot_do_without_are_known(tmp_path: Path) -> None:
    source = (
        "def reward(prompts, completions, completion_ids, answer, scale, level=3, *, hint, **columns):\n    return []\n"
    )
    assert _load(tmp_path, source, args={"scale": 1}).needs == ("answer", "hint")


@pytest.mark.parametrize(
    ("name", "needs"),
    [("gsm8k", ("answer",)), ("countdown", ("nums", "target")), ("math", ("answer",)), ("exact", ("answer",))],
)
def test_columns_that_a_shipped_reward_cannot_do_without_are_known(name: str, needs: tuple[str, ...]) -> None:
    assert load_rewards([RewardConfig(name=name)])[0].needs == needs


def test_edited_file_is_loaded_anew(tmp_path: Path) -> None:
    before = _load(tmp_path, "def reward(**_):\n    return [1.0]\n")
    after = _load(tmp_path, "def reward(**_):\n    return [2.0]\n")  # as many bytes, within the same second
    assert (before.function(), after.function()) == ([1.0], [2.0])


def test_loading_leaves_no_cache_beside_the_file(tmp_path: Path) -> None:
    _load(tmp_path, "def reward(**_):\n    return [1.0]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_import_error_names_the_line_also_for_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n\nimport no_such_module_here\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"rewards\.0\.function: mine\.py:3 cannot be imported: ModuleNotFoundError"):
        load_rewards([RewardConfig(function="mine.py:reward")])


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.1\.name: 'exact' is given twice"):
        load_rewards([RewardConfig(name="exact"), RewardConfig(name="exact")])


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_unknown_argument_of_a_shipped_reward_is_refused(name: str) -> None:
    args = {"pattern": "x", "no_such": 1} if name == "format" else {"no_such": 1}
    with pytest.raises(ConfigError, match=rf"rewards\.0\.args: {name} does not take 'no_such'"):
        load_rewards([RewardConfig(name=name, args=args)])
