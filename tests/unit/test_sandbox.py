"""What the code reward reads of a completion and its arguments, without running anything."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.protocol import load_rewards
from grpo_spmd.rewards.verifiers import python_code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1", "a = 1"),
        ("```python\na = 1\n```\nor\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\n```\n```text\nout\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```python\na = 1", "```python\na = 1"),
    ],
)
def test_code_is_the_last_python_block(text: str, code: str) -> None:
    assert python_code(text) == code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"time_s": 0}, r"rewards\.0\.args\.time_s \(0\): Expected `float` > 0"),
        ({"time_s": math.inf}, r"rewards\.0\.args\.time_s \(inf\): Expected `float` <= 1"),
        ({"time_s": True}, r"rewards\.0\.args\.time_s \(True\): Expected `float`, got `bool`"),
        ({"memory_mib": "much"}, r"rewards\.0\.args\.memory_mib \('much'\): Expected `float`"),
        ({"partial_credit": "yes"}, r"rewards\.0\.args\.partial_credit \('yes'\): Expected `bool`"),
        ({"tests_column": 3}, r"rewards\.0\.args\.tests_column \(3\): Expected `str`"),
        ({"isolation": "some"}, r"rewards\.0\.args\.isolation \('some'\): Invalid enum value"),
    ],
)
def test_bad_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rewards([RewardConfig(name="code", args=args)])


def test_the_tests_column_is_needed() -> None:
    assert load_rewards([RewardConfig(name="code", args={"tests_column": "asserts"})])[0].needs == (
        "asserts",
    )
