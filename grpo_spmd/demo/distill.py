"""What the distillation demo trains: the countdown demo's careless model, and a teacher that has only seen right
equations, for longer. The student sees no reward: it is taught by the teacher's distribution on its own completions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from grpo_spmd.demo.countdown import (
    make_countdown_model,
    make_rows,
    make_tokenizer,
    prompt_text,
    right_equations,
    solvable_tasks,
)
from grpo_spmd.demo.making import Lesson, code, make_folder, make_model, model_config

_STEPS, _LR, _BATCH = 600, 5e-3, 128


def make_teacher(folder: Path, seed: int) -> None:
    """A model like the student, which is right in nearly all tries."""
    import transformers

    make_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rng, tasks = random.Random(f"teacher/{seed}"), solvable_tasks()

    def lesson(task: tuple[int, int, int]) -> Lesson:
        prompt, equation = prompt_text(*task), rng.choice(right_equations(*task))
        said = [*tokenizer.convert_tokens_to_ids([*prompt, *equation]), tokenizer.eos_token_id]
        return said, [number >= len(prompt) for number in range(len(said))]

    def lessons(_: int) -> list[Lesson]:
        return [lesson(task) for task in rng.choices(tasks, k=_BATCH)]

    rates = [_LR * min(1.0, (step + 1) / 50) * (1 - step / _STEPS) for step in range(_STEPS)]
    make_model(folder, seed + 1000, model_config(), lessons, rates)


def make_distillation_demo(out: Path, seed: int) -> None:
    """Write `out`/model, `out`/teacher and `out`/train.jsonl, as make_demo does."""

    def fill(model: Path) -> list[dict[str, Any]]:
        make_tokenizer(model)
        make_countdown_model(model, seed, "2")
        teacher = model.with_name("teacher")
        teacher.mkdir()
        make_teacher(teacher, seed)
        return make_rows("2", seed)

    make_folder(out, {"seed": seed, "code": code()}, fill)
