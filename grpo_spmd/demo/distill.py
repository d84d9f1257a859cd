"""Data of the distillation demo: the countdown demo's careless model and a better teacher.

The teacher was trained longer, on correct equations only. The student gets no reward: it learns the
teacher's distribution on its own completions.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from grpo_spmd.demo.countdown import (
    correct_equations,
    make_countdown_model,
    make_example,
    make_rows,
    make_tokenizer,
    prompt_text,
    solvable_tasks,
)
from grpo_spmd.demo.making import Example, make_folder, make_model, model_config, warm_up

_STEPS = 600
_LR = 5e-3
_BATCH_SIZE = 128


def make_teacher(folder: Path, seed: int) -> None:
    """Writes a model like the student that is right in nearly all tries, with its tokenizer."""
    make_tokenizer(folder)
    rng = random.Random(f"teacher/{seed}")
    tasks = solvable_tasks()

    def batch_of(_: int) -> list[Example]:
        return [
            make_example(prompt_text(*task), rng.choice(correct_equations(*task)))
            for task in rng.choices(tasks, k=_BATCH_SIZE)
        ]

    rates = [_LR * warm_up(step) * (1 - step / _STEPS) for step in range(_STEPS)]
    make_model(folder, seed + 1000, model_config(), batch_of=batch_of, learning_rates=rates)


def make_distillation_demo(out: Path, seed: int) -> None:
    """Writes `out`/model, `out`/teacher and `out`/train.jsonl, as make_folder does."""

    def fill(model: Path) -> list[dict[str, Any]]:
        make_tokenizer(model)
        make_countdown_model(model, seed, "2")
        teacher = model.with_name("teacher")
        teacher.mkdir()
        make_teacher(teacher, seed)
        return make_rows("2", seed)

    make_folder(out, {"seed": seed}, fill)
