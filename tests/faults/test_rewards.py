"""Rewards in the pool: what a function gets, and what becomes of its result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.trl import TrainerState


class CharacterTokenizer:
    """Token ids are code points."""

    def batch_decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool
    ) -> list[str]:
        assert skip_special_tokens
        return ["".join(map(chr, ids)) for ids in token_ids]


def _group(
    slot: int, prompt: str | list[dict[str, Any]], texts: Sequence[str], **columns: Any
) -> RolloutGroup:
    completions = [Completion([ord(c) for c in text], [-1.0] * len(text), "stop") for text in texts]
    return RolloutGroup(slot, Prompt(slot, slot, [1], prompt, columns), completions)


SPY = """
import json, pathlib, threading
def spy(prompts, completions, completion_ids, **columns):
    state = columns.pop("trainer_state")
    columns.pop("log_metric")("tokens", sum(map(len, completion_ids)))
    columns.pop("log_extra")("tokens", [len(ids) + state.global_step for ids in completion_ids])
    got = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "columns": columns}
    with open(pathlib.Path(__file__).with_name("got.jsonl"), "a") as file:
        file.write(json.dumps(got) + "\\n")
    assert threading.current_thread() is threading.main_thread()  # signal-based deadlines work nowhere else
    return [float(len(ids)) for ids in completion_ids]

def part(completions, **columns):
    return [None if "none" in c else float("nan") if "nan" in c else 3.0 for c in completions]
"""  # noqa: E501


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RewardPool, Path]]:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "mine.py").write_text(SPY)
    weights = {"spy": 2.0, "part": -0.5}
    rewards = [
        RewardConfig(function=f"{folder}/mine.py:{name}", weight=weight)
        for name, weight in weights.items()
    ]
    with RewardPool(
        rewards, RewardPoolConfig(num_workers=1), folder / "log", columns=["a", "b"]
    ) as pool:
        yield pool, folder / "got.jsonl"


def _spy(
    pool: tuple[RewardPool, Path], *groups: RolloutGroup
) -> tuple[ScoredRollouts, list[dict[str, Any]]]:
    """What came out, and what the function got, call by call."""
    pool[1].unlink(missing_ok=True)
    scored = pool[0].score(groups, CharacterTokenizer())
    return scored, [json.loads(line) for line in pool[1].read_text().splitlines()]


# The protocol


def test_function_gets_what_trl_gives_it_a_group_at_a_time(pool: tuple[RewardPool, Path]) -> None:
    _, calls = _spy(
        pool, _group(0, "p", ["a", "bc"], a=1, b="x"), _group(1, "q", ["d", ""], a=2, b="y")
    )
    assert calls == [
        {
            "prompts": ["p", "p"],
            "completions": ["a", "bc"],
            "completion_ids": [[97], [98, 99]],
            "columns": {"a": [1, 1], "b": ["x", "x"]},
        },
        {
            "prompts": ["q", "q"],
            "completions": ["d", ""],
            "completion_ids": [[100], []],
            "columns": {"a": [2, 2], "b": ["y", "y"]},
        },
    ]


def test_chat_prompt_makes_chat_completions(pool: tuple[RewardPool, Path]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, (call,) = _spy(pool, _group(0, messages, ["yo"]))
    assert call["prompts"] == [messages]
    assert call["completions"] == [[{"role": "assistant", "content": "yo"}]]


def test_column_that_some_rows_lack_is_none_there(pool: tuple[RewardPool, Path]) -> None:
    """Whichever rows this rank happens to hold: the pool knows the data set's columns."""
    _, calls = _spy(pool, _group(0, "p", ["x", "y"], a=1), _group(1, "q", ["x", "y"], b=2))
    assert [call["columns"] for call in calls] == [
        {"a": [1, 1], "b": [None, None]},
        {"a": [None, None], "b": [2, 2]},
    ]


def test_column_named_like_an_argument_does_not_replace_it(pool: tuple[RewardPool, Path]) -> None:
    _, (call,) = _spy(pool, _group(0, "p", ["mine"], completions="the data's"))
    assert call["completions"] == ["mine"]


def test_scores_are_in_the_order_of_groups_and_their_completions(
    pool: tuple[RewardPool, Path],
) -> None:
    scored, _ = _spy(pool, _group(3, "p", ["a", "b"]), _group(1, "q", ["c", "d"]))
    assert scored.texts == ["a", "b", "c", "d"]


def test_reward_is_the_weighted_sum_of_what_applies(pool: tuple[RewardPool, Path]) -> None:
    scored, _ = _spy(pool, _group(0, "p", ["a", "ab", "none", "nan"]))
    assert scored.rewards == [2.0 - 1.5, 4.0 - 1.5, 8.0, None]
    assert scored.by_name["spy"] == [1.0, 2.0, 4.0, 3.0]
    assert scored.by_name["part"][:3] == [3.0, 3.0, None]
    assert scored.statuses == {"spy": ["ok"] * 4, "part": ["ok", "ok", "not_applicable", "error"]}


def test_what_a_function_logs_comes_with_the_scores(pool: tuple[RewardPool, Path]) -> None:
    """Whichever worker was first, and beside a call of the group that failed."""
    pool[0].begin_step(TrainerState(7, 100, 0.5))
    scored, _ = _spy(pool, _group(0, "p", ["a", "bc"]), _group(1, "q", ["d", ""]))
    pool[0].begin_step(TrainerState())
    assert scored.notes == {
        0: {"extra": {"spy": {"tokens": 8}}, "logged": {"spy": {"tokens": [3.0, 1]}}},
        1: {"extra": {"spy": {"tokens": 9}}},
        2: {"extra": {"spy": {"tokens": 8}}, "logged": {"spy": {"tokens": [1.0, 1]}}},
        3: {"extra": {"spy": {"tokens": 7}}},
    }
    both = ScoredRollouts()
    both.extend(scored)
    both.extend(scored)  # a second round
    assert both.notes == scored.notes | {4 + number: note for number, note in scored.notes.items()}


def test_no_function_that_applies_is_an_unknown_reward_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SPY)
    with RewardPool(
        [RewardConfig(function=f"{tmp_path}/mine.py:part")],
        RewardPoolConfig(num_workers=1),
        tmp_path / "log",
    ) as local:
        scored = local.score([_group(0, "p", ["none", "a"])], CharacterTokenizer())
    assert (scored.rewards, scored.first_error) == ([None, 3.0], None)
