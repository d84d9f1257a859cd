"""Files of completions: what is written comes back, what does not match or is damaged does not."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.records import Completion, Prompt
from grpo_spmd.rollout.buffer import RolloutBuffer, delete_until, steps_on_disk
from tests.support.models import write_config

# Files alone.

PROMPT = Prompt(7, 0, [1, 2, 3], "", {})
COMPLETIONS = [Completion([5, 6 + n, 0], [-0.1, -1 / 3, -n / 7], "stop") for n in range(3)] + [
    Completion([9], [-1e-300], "length")
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_config(tmp_path, tmp_path / "model"))


def open_buffer(config: Config, session: Session) -> RolloutBuffer:
    return RolloutBuffer(config.run_dir, config.seed, config.model, config.rollout, session)


@pytest.fixture
def written(config: Config, session: Session) -> Path:
    """The one file of step 3, which holds the four completions of a prompt."""
    buffer = open_buffer(config, session)
    assert buffer.find(3, "these", [PROMPT], 4) == {}
    for sample, completion in enumerate(COMPLETIONS):
        buffer.keep(PROMPT, sample, completion)
    buffer.write()
    [path] = Path(config.run_dir).rglob("*.*")
    return path


def read_back(
    config: Config,
    session: Session,
    step: int = 3,
    prompt: Prompt = PROMPT,
    weights_id: str = "these",
) -> Any:
    buffer = open_buffer(config, session)
    return {
        position: buffer.read(retained)
        for position, retained in buffer.find(step, weights_id, [prompt], 4).items()
    }


def test_what_is_written_comes_back_bit_by_bit(
    written: Path, config: Config, session: Session
) -> None:
    assert read_back(config, session) == {
        (0, sample): completion for sample, completion in enumerate(COMPLETIONS)
    }
    assert all(type(token) is int for token in read_back(config, session)[0, 0].token_ids)


def test_each_of_what_makes_a_completion_must_match(
    written: Path, config: Config, session: Session
) -> None:
    def count(config: Config = config, **second: Any) -> int:
        return len(read_back(config, session, **second))

    def rollout(**values: Any) -> Config:
        return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **values))

    # the prompt's place, its tokens, the step
    assert count(prompt=dataclasses.replace(PROMPT, position=8)) == 0
    assert count(prompt=dataclasses.replace(PROMPT, token_ids=[1, 2, 4])) == 0
    assert count(step=4) == 0
    # how it was sampled
    for second in (
        dataclasses.replace(config, seed=1),
        rollout(temperature=0.9),
        rollout(max_completion_tokens=13),
        rollout(stop=(".",)),
    ):
        assert count(second) == 0
    assert (
        count(
            dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
        )
        == 0
    )
    assert count(weights_id="others") == 0
    # what has no part in it
    faster = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=0.5))
    assert count(faster) == count() == 4


def test_damaged_files_are_found_and_left_out(
    written: Path,
    config: Config,
    session: Session,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = written.read_bytes()
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    damages = {f"cut at {n}": good[:n] for n in (0, 7, 100, len(good) - 1)} | {
        "zeros": bytes(len(good)),
        "longer": good + b"\0",
    }
    damages |= {
        f"flipped at {n}": good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :]
        for n in range(0, len(good), 37)
    }
    for name, damaged in damages.items():
        caplog.clear()
        written.write_bytes(damaged)
        assert read_back(config, session) == {}, name
        assert "is not used: its contents are damaged" in caplog.text, name
    written.write_bytes(good)
    written.with_name("notes.msgpack").write_text("not ours")
    written.with_suffix(".tmp").write_bytes(good[:50])
    assert len(read_back(config, session)) == 4


def test_a_disk_that_takes_nothing_is_only_a_warning(
    config: Config, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    Path(config.run_dir).mkdir()
    Path(config.run_dir, "rollout_buffer").write_text("no folder")
    buffer = open_buffer(config, session)
    assert buffer.find(0, "these", [PROMPT], 4) == {}
    buffer.keep(PROMPT, 0, COMPLETIONS[0])
    buffer.write()
    assert "1 completions are not kept on disk (" in caplog.text


def test_long_generations_are_written_while_they_run(
    config: Config, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_spmd.rollout.buffer._WRITE_EVERY_S", 0.0)
    buffer = open_buffer(config, session)
    buffer.find(0, "these", [PROMPT], 4)
    for sample, completion in enumerate(COMPLETIONS[:3]):
        buffer.keep(PROMPT, sample, completion)
    assert len(read_back(config, session, step=0)) == 3


def test_steps_are_forgotten_once_they_are_saved(written: Path, config: Config) -> None:
    for step in (4, 12, 1_000_000):
        shutil.copytree(written.parent, written.parents[1] / f"step_{step:06d}")
    assert steps_on_disk(config.run_dir) == [3, 4, 12, 1_000_000]
    delete_until(config.run_dir, 4)
    assert steps_on_disk(config.run_dir) == [12, 1_000_000]
    delete_until(config.run_dir, 4)
    delete_until(config.run_dir + "/elsewhere", 12)


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("position", "7"),
        ("sample", 0.5),
        ("prompt_digest", None),
        ("token_ids", [5, 6, 0]),
        ("finish_reason", None),
    ],
)
def test_a_file_with_records_of_another_form_is_left_out(
    name: str, odd: Any, written: Path, config: Config, session: Session
) -> None:
    """Its name goes with its contents."""
    contents = msgspec.msgpack.decode(written.read_bytes())
    contents["records"][1][name] = odd
    payload = msgspec.msgpack.encode(contents)
    written.with_name(f"{hashlib.sha256(payload).hexdigest()}.msgpack").write_bytes(payload)
    written.unlink()
    assert read_back(config, session) == {}


@pytest.mark.parametrize("content", [b"", b"\x91" * 100_000, b"\x82\xa8identity" + b"\x81" * 9])
def test_a_file_of_another_form_is_left_out(
    content: bytes, written: Path, config: Config, session: Session
) -> None:
    written.with_name(f"{hashlib.sha256(content).hexdigest()}.msgpack").write_bytes(content)
    assert len(read_back(config, session)) == 4


@pytest.mark.parametrize("target", [None, "/dev/zero", "/etc/passwd"])
def test_what_is_no_file_is_left_out(
    target: str | None, written: Path, config: Config, session: Session
) -> None:
    second = written.with_name(f"{'0' * 64}.msgpack")
    if target is None:
        os.mkfifo(second)
    else:
        second.symlink_to(target)
    assert len(read_back(config, session)) == 4
