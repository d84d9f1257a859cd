"""Environments whose answers follow from their seeds and whose time does not, and a tiny model that
calls their tool.

PLAYED names a folder: `resets` there gets a byte for each episode that is begun. A file `kill` in
it holds a number of resets, behind which the rank of the next episode is killed, once, in the
middle of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.demo.making import Example, make_model, model_config
from grpo_spmd.demo.tools import make_examples, make_tokenizer, questions
from grpo_spmd.distributed import startup

_CLOCK = random.SystemRandom()  # another in each run, whatever the seed
_MOST_WAITED_S = 100


def make_caller(folder: Path) -> Path:
    """`folder`/model, which calls the tool more often than not, and its questions in
    `folder`/train.jsonl."""
    (folder / "model").mkdir()
    lessons = make_examples(make_tokenizer(folder / "model"), 0)

    def few(step: int) -> list[Example]:
        return lessons(step)[:16]

    config = model_config(vocab_size=272, max_position_embeddings=512)
    make_model(folder / "model", 0, config, few, [1e-2] * 40)
    startup.end()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    return folder / "model"


class Shelf:
    def reset(self, wanted: Sequence[str], **row: Any) -> None:
        self._shelf = {item: random.randint(0, 99) for item in wanted}
        self._is_last = _note_reset()

    def count(self, item: str) -> int:
        """
        Count.

        Args:
            item: A letter.
        """
        _pass_time()
        if self._is_last:
            _kill_rank()
        return self._shelf[item]

    def get_reward(self) -> float:
        if self._is_last:
            _kill_rank()
        return sum(self._shelf.values()) / 100 + random.random()


class Quiz:
    def reset(self, wanted: Sequence[str], **row: Any) -> str:
        self._num_left = random.randint(1, 3)
        return wanted[0]

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        _pass_time()
        self._num_left -= 1
        return str(random.randint(0, 99)), len(action) + random.random(), self._num_left == 0, {}


class Rough:
    """Fails as its row says."""

    def reset(self, method: str, **row: Any) -> str:
        self._how = method
        if method == "raises":
            raise KeyError("gone")
        if method == "hangs":
            time.sleep(1000)
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self._how == "dies":
            os._exit(3)
        return "", random.random(), True, {}


def _pass_time() -> None:
    time.sleep(_CLOCK.uniform(0, 0.05))


def _note_reset() -> bool:
    """Whether the rank is to be killed in this episode."""
    folder = Path(os.environ["PLAYED"])
    with open(folder / "resets", "ab") as file:
        file.write(b".")
    limit = folder / "kill"
    return limit.exists() and (folder / "resets").stat().st_size > int(limit.read_text())


def _kill_rank() -> None:
    """Once the checkpoint of the first step is there: the run is to go on from it."""
    folder = Path(os.environ["PLAYED"])
    deadline = time.monotonic() + _MOST_WAITED_S
    while not (folder / "run/checkpoints/step_000001").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        (folder / "kill").rename(folder / "killed")
    except FileNotFoundError:  # another one has
        return
    nursery_values = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(nursery_values[1]), signal.SIGKILL)
