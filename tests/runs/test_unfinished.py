"""Longer is better, and unfinished is worth nothing: a real training that has to end its turns.

Its environment is never asked about an episode that is cut off in its first turn. Were such an
episode left out of its group, the policy would learn to be cut off, and its reward would rise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from grpo_spmd.demo.making import Example, make_model, model_config
from grpo_spmd.demo.tools import make_tokenizer
from grpo_spmd.distributed import startup
from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.ranks import train

MAX_TOKENS = 12  # 11 digits and the end of the turn
NUM_STEPS = 50
LETTERS = "abcdefghijklmnop"  # the prompts
ENVIRONMENT = f"""
class Longer:
    def reset(self):
        return None

    def step(self, action):
        return None, len(action) / {MAX_TOKENS}, True, False, {{}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training of a model that writes 2 to 14 digits at first, of which three in thirteen are
    too many."""
    folder = tmp_path_factory.mktemp("unfinished")
    (folder / "model").mkdir()
    tokenizer = make_tokenizer(folder / "model")
    rng = random.Random(0)

    def batch(_: int) -> list[Example]:
        examples = []
        for _ in range(32):
            prompt = tokenizer.encode(f"<|user|>{rng.choice(LETTERS)}<|end|><|assistant|>")
            digits = "".join(rng.choices("0123456789", k=rng.randint(2, 14)))
            answer = tokenizer.encode(f"{digits}<|end|>")
            is_trained = [False] * len(prompt) + [True] * len(answer)
            examples.append(Example(prompt + answer, is_trained))
        return examples

    config = model_config(vocab_size=272, max_position_embeddings=64)
    make_model(folder / "model", 0, config, batch, [5e-3] * 150)
    startup.end()
    rows = [{"prompt": [{"role": "user", "content": item}]} for item in LETTERS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "longer.py").write_text(ENVIRONMENT)
    file = write_config(
        folder,
        folder / "model",
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
        rollout={
            "num_prompts_per_step": 16,
            "group_size": 8,
            "max_completion_tokens": MAX_TOKENS,
        },
        environment={
            "gym": f"{folder}/longer.py:Longer",
            "max_turns": 2,
            "max_tokens": 40,
            "num_workers": 2,
        },
        rewards=[],
        optimizer={"lr": 1e-3},
        training={"num_steps": NUM_STEPS, "max_tokens_per_micro_batch": 4096},
        logging={"rollouts_every_steps": 1},
    )
    train(1, file)
    return folder / "run"


def _true_rewards(run: Path, step: int) -> list[float]:
    """What each completion is worth: its digits if it has ended, else nothing."""
    return [
        (len(row["completion_ids"]) - 1) / MAX_TOKENS if row["finish_reason"] == "stop" else 0.0
        for row in dumped(run, step)
    ]


def test_an_unfinished_episode_counts_as_nothing_in_group_and_mean(run: Path) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for step in (1, 2, 10, NUM_STEPS):
        rows = dumped(run, step)
        truth = _true_rewards(run, step)
        assert [row["reward"] for row in rows] == pytest.approx(truth)
        assert metrics[step - 1]["reward/mean"] == pytest.approx(sum(truth) / len(truth))
    # There was something to get wrong.
    assert sum(row["finish_reason"] == "length" for row in dumped(run, 1)) > 10


def test_it_learns_to_be_long_and_to_finish(run: Path) -> None:
    first = _true_rewards(run, 1)
    final = [
        value for step in range(NUM_STEPS - 9, NUM_STEPS + 1) for value in _true_rewards(run, step)
    ]
    cut_fracs = [
        sum(row["finish_reason"] == "length" for row in dumped(run, step)) / 128
        for step in range(NUM_STEPS - 9, NUM_STEPS + 1)
    ]
    before, after = sum(first) / len(first), sum(final) / len(final)
    print(f"reward {before:.2f} -> {after:.2f}, cut off {max(cut_fracs):.2f} at the most")
    # 11 digits and the end are 0.92.
    assert before < 0.5
    assert after > 0.75
    assert max(cut_fracs) < 0.2
