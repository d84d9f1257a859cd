"""A dumped step of episodes, replayed: logprobs are those of plain transformers over each whole
conversation, turns are
shown, and what was changed in the dump shows."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import dumped_episode_fields, to_line
from grpo_spmd.records import Completion, Episode, Segment, Turn
from grpo_spmd.tools.replay.__main__ import replay, report
from grpo_spmd.tools.replay.read import Replay, read_step
from tests.support.episodes import segment
from tests.support.models import make_model, write_config
from tests.unit.test_rollout_record import RECORD

REWARDS: list[list[float | None]] = [
    [1.0, 0.25, None, 0.0],
    [0.5, 0.5, 2.0, 1.0],
]  # None: its environment failed


@pytest.fixture(autouse=True)
def _environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # replay sets it, and pytest puts it back


def plain_logprobs(model: Any, segments: tuple[Segment, ...]) -> list[float]:
    """Of the sampled tokens, by a pass over each context."""
    result = []
    for single in segments:
        with torch.no_grad():
            logits = model(torch.tensor([single.token_ids.tolist()])).logits[0].float()
        logprobs = logits.log_softmax(-1)
        result += [
            float(logprobs[t - 1, single.token_ids[t]]) for t in np.flatnonzero(single.sampled)
        ]
    return result


def made_up(draw: random.Random, model: Any, reward: float | None) -> Completion:
    """A tool is called and answers, then its answer is repeated, in every second episode in a
    segment of its own."""
    if reward is None:
        return Completion(
            [], [], "stop", Episode("env_error", (), (), [], {}, [0.5], "reset raised\nKeyError")
        )
    prompt, initial, inputs, second = (
        [draw.randrange(1, 40) for _ in range(n)] for n in (4, 3, 5, 2)
    )
    appended = segment([*prompt, *initial, *inputs, *second], [4, 5, 6, 12, 13])
    fork = segment([*prompt, *initial], [4, 5, 6]), segment([*prompt, *inputs, *second], [9, 10])
    segments = (appended,) if draw.random() < 0.5 else fork
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "\x1b[31m<|im_end|>\u00fc"},
        {"role": "assistant", "content": "it is\n7"},
    ]
    turns = Turn(3, "stop"), Turn(2, "stop", 0.5)
    episode = Episode("ok", segments, turns, messages, {"sums": reward}, [0.01])
    return Completion(initial + second, plain_logprobs(model, segments), "stop", episode)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    model_path = make_model(folder / "model", "qwen3", tied=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, trust_remote_code=False
    )
    config = write_config(
        folder, model_path, rewards=[{"function": f"{folder}/looks.py:sums"}],
        rollout={"temperature": 1.0, "num_prompts_per_step": 2, "group_size": 4},
        data={"train": "/nowhere.jsonl", "max_prompt_tokens": 8}, reward_pool={"max_error_frac": 0.5},  # noqa: E501
    )  # fmt: skip
    (folder / "looks.py").write_text(
        "def sums(completions, environments, **_):\n    raise RuntimeError\n"
    )
    (folder / "run/rollouts").mkdir(parents=True)
    (folder / "run/config.yaml").write_bytes(config.read_bytes())
    draw, lines = random.Random(0), list[bytes]()
    for position, rewards in enumerate(REWARDS):
        for sample, reward in enumerate(rewards):
            created = made_up(draw, model, reward)
            assert created.episode is not None
            pieces: dict[str, Any] = {
                "completion_ids": created.token_ids,
                "rollout_logprobs": created.logprobs,
            }
            record = dataclasses.replace(
                RECORD, rollout_id=4 * position + sample, position=position, sample=sample, num_rollouts=8,  # noqa: E501
                reward=reward, rewards={"sums": reward}, completion="said",
                statuses={"sums": "ok" if reward is not None else "not_applicable"}, advantage=0.0, **pieces,  # noqa: E501
                **dumped_episode_fields(created.episode),
            )  # fmt: skip
            lines.append(to_line(record) + b"\n")
    (folder / "run/rollouts/step_000001.jsonl").write_bytes(b"".join(lines))
    return folder / "run"


def replayed(run: Path) -> tuple[Replay, str]:
    recorded = read_step(run, 1)
    result = replay(recorded)
    return result, "\n".join(report(recorded, result, 3))


def changed(run: Path, folder: Path, number: int, change: Any) -> Path:
    """A copy whose line `number` is changed."""
    (folder / "run/rollouts").mkdir(parents=True)
    (folder / "run/config.yaml").write_bytes((run / "config.yaml").read_bytes())
    lines = (run / "rollouts/step_000001.jsonl").read_bytes().splitlines()
    values = json.loads(lines[number])
    change(values)
    lines[number] = json.dumps(values).encode()
    (folder / "run/rollouts/step_000001.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder / "run"


def test_episodes_are_trained_on_as_plain_transformers_scores_them(run: Path) -> None:
    result, text = replayed(run)
    assert len(result.rollouts) == 8
    for rollout, reward in zip(
        result.rollouts, [r for group in REWARDS for r in group], strict=True
    ):
        assert rollout.replayed.reward == reward
        assert rollout.in_loss == (reward is not None)
        if reward is not None:
            assert rollout.logprobs == pytest.approx(rollout.recorded.rollout_logprobs, abs=1e-6)
    # GRPO of 1, 0.25 and 0: mean 0.41667, deviation 0.52042; 0.5, 0.5, 2, 1: mean 1, deviation
    # 0.70711
    expected = [1.12090, -0.32026, 0.0, -0.80064, -0.70711, -0.70711, 1.41421, 0.0]
    assert [r.replayed.advantage for r in result.rollouts] == pytest.approx(expected, abs=1e-4)
    assert (
        "rewards are those that the run recorded: environments, which are not here, gave sums"
        in text
    )
    assert (
        "episodes, of 8 those with the largest |advantage|:\n        1/2 ok: '2 turns, 5 tokens "
        "sampled'" in text
    )
    assert (
        " tokens, given\n    segment 1: 3 tokens, sampled, in the loss, stop, reward None" in text
    )
    assert "'name': 'add', 'arguments': {'a': 1}" in text
    assert r"tool content: '\x1b[31m<|im_end|>\xfc'" in text
    assert r"assistant content: 'it is\n7'" in text
    assert ": 2 tokens, sampled, in the loss, stop, reward 0.5, logprob -" in text


def test_an_answer_given_to_a_sibling_shows_in_the_logprobs(run: Path, tmp_path: Path) -> None:
    """What is sampled is what it was, what was given is not: no rule of a line is broken."""

    def other_answer(values: dict[str, Any]) -> None:
        inputs = [turn for turn in values["turns"] if not turn["sampled"]]
        inputs[-1]["token_ids"][-5:] = [1, 2, 3, 4, 5]

    result, text = replayed(changed(run, tmp_path, 4, other_answer))
    _, list_of_far = text.split("furthest from the engine, largest |policy - engine| of a token:\n")
    assert list_of_far.split()[0] == "1/0"
    off = [
        max(abs(a - b) for a, b in zip(r.logprobs or (), r.recorded.rollout_logprobs, strict=True))
        for r in result.rollouts
        if r.in_loss
    ]
    assert sum(single > 1e-4 for single in off) == 1


def test_a_mask_that_is_off_by_one_is_refused(run: Path, tmp_path: Path) -> None:
    def late(values: dict[str, Any]) -> None:
        """The first turn ends a token late, as the counts say too."""
        sampled = next(n for n, turn in enumerate(values["turns"]) if turn["sampled"])
        inputs = values["turns"][sampled + 1]["token_ids"]
        values["turns"][sampled]["token_ids"].append(inputs.pop(0))

    with pytest.raises(
        ConfigError, match=r"step_000001\.jsonl:5: the tokens that its segments mark as"
    ):
        read_step(changed(run, tmp_path, 4, late), 1)
