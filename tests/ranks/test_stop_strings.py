"""Completions that end at a text (`rollout.stop`), with the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.model.config_json import load_tokenizer
from tests.support.dumps import dumped, logprobs_of
from tests.support.models import make_model, write_config
from tests.support.played import make_caller
from tests.support.ranks import train

# A digit, and a text that two tokens make.
STOPS = ["7", "1="]
NUM_TOKENS = 24
# The reward sees the text with the string that ended it.
REWARD = """
def score(completions, **columns):
    return [float(text.endswith(("7", "1="))) for text in completions]
"""
# Each turn's reward says what the environment was given.
ENVIRONMENT = """
class Echo:
    def reset(self, wanted):
        self.turns = 0
        return "go"

    def step(self, action):
        self.turns += 1
        return f"more {self.turns}", float(action.endswith((",", "b"))), self.turns == 3, False, {}
"""
TURN_STOPS = [",", "b"]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    make_model(folder / "model", "qwen3", tied=True)
    (folder / "reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in range(4) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(rows))
    return folder


def _trained(folder: Path, name: str, num_ranks: int, stop: list[str]) -> Path:
    """Two steps with the running proofs in both, and an evaluation before them."""
    source = str(folder / "train.jsonl")
    (folder / name).mkdir()
    config = write_config(
        folder / name,
        folder / "model",
        data={"train": source, "eval": {"held": source}, "max_prompt_tokens": 8},
        rewards=[{"function": f"{folder}/reward.py:score"}],
        rollout={
            "num_prompts_per_step": 8,
            "group_size": 4,
            "max_completion_tokens": NUM_TOKENS,
            "stop": stop,
        },
        training={"num_steps": 2, "max_tokens_per_micro_batch": 256},
        eval={"every_steps": 2, "num_samples": 2},
        proofs={"every_steps": 1},
    )
    train(num_ranks, config)
    return folder / name / "run"


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Path, Path]:
    return _trained(folder, "stopped", 2, STOPS), _trained(folder, "free", 1, [])


def _cut(ids: list[int], tokenizer: Any) -> int:
    """The tokens of a completion up to and with the one that completes a stop string."""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if any(stop in text for stop in STOPS):
            return end
    return len(ids)


def test_a_completion_is_the_free_one_up_to_the_string(
    folder: Path, runs: tuple[Path, Path]
) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))
    # The first step samples from the same weights with the same seeds.
    stopped, free = (dumped(run, 1) for run in runs)
    assert len(stopped) == len(free) == 32
    num_cut = dict.fromkeys(STOPS, 0)
    for row, whole in zip(stopped, free, strict=True):
        ids = whole["completion_ids"]
        end = _cut(ids, tokenizer)
        assert row["completion_ids"] == ids[:end]
        np.testing.assert_array_equal(logprobs_of(row), logprobs_of(whole)[:end])
        for stop in STOPS:
            num_cut[stop] += end < len(ids) and row["completion"].endswith(stop)
        is_ended = any(row["completion"].endswith(stop) for stop in STOPS)
        assert row["reward"] == float(is_ended)
        # A completion that a string ended is not cut off.
        assert row["finish_reason"] == ("stop" if is_ended else whole["finish_reason"])
    assert all(num_cut.values()), num_cut


def test_an_evaluation_ends_at_the_strings_too(runs: tuple[Path, Path]) -> None:
    texts: list[list[str]] = []
    for run in runs:
        files = (run / "rollouts").glob("eval_held_step_000000*.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        lines.sort(key=lambda line: (line["row"], line["sample"]))
        texts.append([line["completion"] for line in lines])
    assert len(texts[0]) == 32
    assert texts[0] != texts[1]
    for text, whole in zip(*texts, strict=True):
        assert whole.startswith(text)
        ends = [whole.find(stop) + len(stop) for stop in STOPS if stop in whole]
        assert text == whole[: min(ends, default=len(whole))]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows, Rows]:
    """The model, and the episodes of one step with stop strings and without."""
    folder = tmp_path_factory.mktemp("stopped_episodes")
    model = make_caller(folder)
    (folder / "echo.py").write_text(ENVIRONMENT)
    rows = []
    for name, stop in (("stopped", TURN_STOPS), ("free", [])):
        (folder / name).mkdir()
        config = write_config(
            folder / name,
            model,
            data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
            rollout={
                "num_prompts_per_step": 8,
                "group_size": 4,
                "max_completion_tokens": 12,
                "stop": stop,
            },
            environment={
                "gym": f"{folder}/echo.py:Echo",
                "max_turns": 4,
                "max_tokens": 120,
                "num_workers": 2,
            },
            rewards=[],
            training={"num_steps": 1, "max_tokens_per_micro_batch": 512},
            proofs={"every_steps": 1},
        )
        train(1, config)
        rows.append(dumped(folder / name / "run", 1))
    return model, rows[0], rows[1]


def test_a_turn_of_an_episode_ends_at_the_string_and_the_template_closes_it(
    episodes: tuple[Path, Rows, Rows],
) -> None:
    model, stopped, free = episodes
    tokenizer = load_tokenizer(str(model))
    num_stopped_turns = 0
    for row, whole in zip(stopped, free, strict=True):
        turns = [turn for turn in row["turns"] if turn["sampled"]]
        first, first_free = (
            next(turn["token_ids"] for turn in r["turns"] if turn["sampled"]) for r in (row, whole)
        )
        # The same weights, seed and context: the free turn up to the first string.
        cut = next(
            (
                end
                for end in range(1, len(first_free) + 1)
                if any(stop in tokenizer.decode(first_free[:end]) for stop in TURN_STOPS)
            ),
            len(first_free),
        )
        assert first == first_free[:cut]
        replies = [message for message in row["messages"] if message["role"] == "assistant"]
        for turn, reply in zip(turns, replies, strict=True):
            text = tokenizer.decode(turn["token_ids"])
            is_stopped = text.endswith(tuple(TURN_STOPS))
            num_stopped_turns += is_stopped
            if is_stopped and "tool_calls" not in reply:
                # The string is part of what the environment was given, and of what is trained.
                assert turn["finish_reason"] == "stop"
                assert turn["reward"] == 1.0
                assert reply["content"].endswith(tuple(TURN_STOPS))
        # The contexts are what the template makes of the conversation: the end of a turn that a
        # string ended follows as a token that was not sampled.
        tokens = [token for turn in row["turns"] for token in turn["token_ids"]]
        if row["status"] == "ok":
            conversation = tokenizer.apply_chat_template(
                [*row["prompt"], *row["messages"]], tokenize=False
            )
            assert conversation.startswith(tokenizer.decode(tokens))
    assert num_stopped_turns > len(stopped) // 2
    assert any(len([t for t in row["turns"] if t["sampled"]]) == 3 for row in stopped)
