"""Episodes in the rollout buffer: they come back whole, and for the same environment alone."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, EnvironmentConfig, RewardConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.records import FAILED_STATUSES, Completion, Prompt
from grpo_spmd.rollout.buffer import RolloutBuffer, encode_episode, environment_id
from tests.support.episodes import made_up_episode, same_episode
from tests.support.models import write_config

PROMPT, NUM = Prompt(7, 0, [1, 2, 3], "", {}), 200


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "tools.py").write_text("def add(a: int, b: int) -> int: ...")
    (tmp_path / "looks.py").write_text("def looks(environments, **_): ...")
    return load_config(write_config(tmp_path, tmp_path / "model"))


def environment(config: Config, **changes: Any) -> EnvironmentConfig:
    return EnvironmentConfig(tools=(f"{Path(config.run_dir).parent}/tools.py:add",), **changes)


def open_buffer(config: Config, session: Session, **changes: Any) -> RolloutBuffer:
    looks = RewardConfig(
        function=f"{Path(config.run_dir).parent}/looks.py:looks", weight=changes.pop("weight", 1.0)
    )
    pieces = config.run_dir, config.seed, config.model, config.rollout, session
    return RolloutBuffer(*pieces, environment(config, **changes), (looks,))


def read_back(
    config: Config, session: Session, **changes: Any
) -> dict[tuple[int, int], Completion]:
    buffer = open_buffer(config, session, **changes)
    return {
        slot: buffer.read(position)
        for slot, position in buffer.find(3, "these", [PROMPT], NUM).items()
    }


@pytest.fixture
def episodes() -> list[Completion]:
    draw = random.Random(0)
    return [made_up_episode(draw) for _ in range(NUM)]


@pytest.fixture
def written(config: Config, session: Session, episodes: list[Completion]) -> Path:
    """The one file of step 3."""
    buffer = open_buffer(config, session)
    assert buffer.find(3, "these", [PROMPT], NUM) == {}
    for sample, completion in enumerate(episodes):
        buffer.keep(PROMPT, sample, completion)
    buffer.write()
    [path] = Path(config.run_dir).rglob("*.*")
    return path


def test_whole_episodes_come_back_and_failed_ones_do_not(
    written: Path, config: Config, session: Session, episodes: list[Completion]
) -> None:
    back = read_back(config, session)
    statuses = {
        sample: c.episode.status for sample, c in enumerate(episodes) if c.episode is not None
    }
    assert set(back) == {
        (0, sample) for sample, status in statuses.items() if status not in FAILED_STATUSES
    }
    assert len(back) < NUM
    assert (
        sum(not completion.token_ids for completion in back.values()) > 5
    )  # among them some without a token
    for (_, sample), completion in back.items():
        created = episodes[sample]
        assert (completion.token_ids, completion.logprobs) == (created.token_ids, created.logprobs)
        assert completion.finish_reason == created.finish_reason
        assert completion.episode is not None
        assert created.episode is not None
        assert same_episode(completion.episode, created.episode)


def test_each_of_what_makes_an_episode_must_match(
    written: Path, config: Config, session: Session
) -> None:
    num_kept = len(read_back(config, session))
    for change in ({"max_turns": 3}, {"max_tokens": 99}, {"history": "fork"}, {"weight": 0.5}):
        assert read_back(config, session, **change) == {}, change
    for change in ({"timeout_s": 5.0}, {"call_timeout_s": 5.0}, {"num_workers": 3}):
        assert len(read_back(config, session, **change)) == num_kept, change
    for name in ("tools.py", "looks.py"):
        path = Path(config.run_dir).parent / name
        text = path.read_text()
        path.write_text(text + "\n")
        assert read_back(config, session) == {}, name
        path.write_text(text)
    assert len(read_back(config, session)) == num_kept
    pieces = config.run_dir, config.seed, config.model, config.rollout, session
    assert (
        RolloutBuffer(*pieces).find(3, "these", [PROMPT], NUM) == {}
    )  # a run without environments


@pytest.mark.parametrize(
    "odd", [float("nan"), {"a": {1: 2}}, {1, 2}, ("a",)], ids=["nan", "key", "set", "tuple"]
)
def test_what_is_no_json_is_not_kept(odd: Any, episodes: list[Completion]) -> None:
    created = next(c for c in episodes if c.episode is not None and c.episode.status == "ok")
    assert created.episode is not None
    for messages, is_kept in (([{"content": "4"}], True), ([{"content": odd}], False)):
        episode = dataclasses.replace(created.episode, messages=messages)
        assert (
            encode_episode(dataclasses.replace(created, episode=episode)) is not None
        ) == is_kept


def test_files_are_found_wherever_the_config_names_them(tmp_path: Path) -> None:
    names = [f"{tmp_path}/{name}.py" for name in "abcd"]
    for name in names:
        Path(name).write_text(name)
    a, b, c, d = names
    several = EnvironmentConfig(
        tools=(f"{a}:f", "python"), factory={"x": f"{b}:X", "y": "countdown"}
    )
    reward = RewardConfig(function=f"{c}:f", args={"other": [f"{d}:g"]})
    digests = environment_id(several, [reward])[-1]
    assert digests == {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert environment_id(EnvironmentConfig(gym=f"{tmp_path}/none.py:X"))[-1] == {
        f"{tmp_path}/none.py": "No such file or directory"
    }
