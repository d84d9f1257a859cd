"""What the countdown demo trains: a tiny Qwen3, its tokenizer, countdown prompts.

The task is TinyZero's countdown, cut down to two numbers: "3,8=24:" wants an equation that uses 3 and 8 once each and
reaches 24, such as "3*8". A warm start of seconds shows right equations, then those of a careless teacher who often
writes random digits: it ends right in three of ten tries. From there GRPO sees only the reward. `--numbers 3-4` is
TinyZero's own task, with targets below 100; its warm start, of right equations alone, ends at one in five or ten.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from grpo_spmd.demo.making import Lesson, code, make_folder, make_model, model_config
from grpo_spmd.rewards.verifiers import evaluate

_CHARACTERS, _EOS = "0123456789+-*,=:", "<eos>"
_LARGEST, _BATCH = 9, 128
_RIGHT_STEPS, _RIGHT_LR = 300, 5e-3
_CARELESS_STEPS, _CARELESS_LR, _CARELESS_RIGHT_FRAC = 120, 1e-3, 0.55
_LONGER_STEPS, _LONGER_LR, _LONGER_ROWS = 500, 3e-3, 4096


def solvable_tasks() -> list[tuple[int, int, int]]:
    """All (a, b, target) with a and b from 1 to 9 and a positive target that a + b, a - b or a * b reaches."""
    numbers = range(1, _LARGEST + 1)
    return sorted(
        {
            (a, b, target)
            for a in numbers
            for b in numbers
            for target in (a + b, a - b, a * b)
            if target > 0
        }
    )


def prompt_text(*nums_and_target: int) -> str:
    *nums, target = nums_and_target
    return f"{','.join(map(str, nums))}={target}:"


def longer_task(rng: random.Random) -> tuple[list[int], int, str]:
    """Three or four numbers, a target from 1 to 99, and an equation over all of them that reaches it."""
    while True:
        nums = [rng.randint(1, _LARGEST) for _ in range(rng.choice((3, 4)))]
        equation = str(nums[0]) + "".join(rng.choice("+-*") + str(number) for number in nums[1:])
        target = evaluate(equation)
        if 0 < target < 100:
            rng.shuffle(nums)
            return nums, int(target), equation


def make_rows(numbers: str, seed: int) -> list[dict[str, Any]]:
    """The data set: one row a task, columns prompt, nums, target."""
    if numbers == "2":
        return [
            {"prompt": prompt_text(*task), "nums": task[:2], "target": task[2]}
            for task in solvable_tasks()
        ]
    rng = random.Random(f"rows/{seed}")
    tasks = [longer_task(rng) for _ in range(_LONGER_ROWS)]
    return [
        {"prompt": prompt_text(*nums, target), "nums": nums, "target": target}
        for nums, target, _ in tasks
    ]


def right_equations(a: int, b: int, target: int) -> list[str]:
    """Every equation over both numbers that reaches the target."""
    pairs = {(a, b), (b, a)}
    right = [f"{x}+{y}" for x, y in pairs if x + y == target]
    right += [f"{x}-{y}" for x, y in pairs if x - y == target]
    return sorted(right + [f"{x}*{y}" for x, y in pairs if x * y == target])


def random_equation(rng: random.Random) -> str:
    """What the careless teacher writes: any two digits around any operation."""
    return f"{rng.randint(1, _LARGEST)}{rng.choice('+-*')}{rng.randint(1, _LARGEST)}"


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters and an end-of-sequence token, without a chat template."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([_EOS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS
    )
    fast.save_pretrained(folder)


def make_countdown_model(folder: Path, seed: int, numbers: str) -> None:
    """A two-layer Qwen3 of 0.1 million parameters after the warm start."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = {
        character: tokenizer.convert_tokens_to_ids(character) for character in [*_CHARACTERS, _EOS]
    }
    rng = random.Random(seed)
    tasks = solvable_tasks()

    def lessons(
        step: int,
    ) -> list[Lesson]:  # a batch of prompts, each with the equation shown for it
        if numbers != "2":
            longer = [longer_task(rng) for _ in range(_BATCH)]
            return [
                lesson(prompt_text(*nums, target), equation) for nums, target, equation in longer
            ]
        shown = []
        for task in rng.choices(tasks, k=_BATCH):
            is_right = step < _RIGHT_STEPS or rng.random() < _CARELESS_RIGHT_FRAC
            equation = rng.choice(right_equations(*task)) if is_right else random_equation(rng)
            shown.append(lesson(prompt_text(*task), equation))
        return shown

    def lesson(prompt: str, equation: str) -> Lesson:
        said = [ids[character] for character in [*prompt, *equation, _EOS]]
        return said, [number >= len(prompt) for number in range(len(said))]

    peaks = [_RIGHT_LR] * _RIGHT_STEPS + [_CARELESS_LR] * _CARELESS_STEPS
    if numbers != "2":
        peaks = [_LONGER_LR] * _LONGER_STEPS
    rates = [peak * min(1.0, (step + 1) / 50) for step, peak in enumerate(peaks)]
    make_model(folder, seed, model_config(), lessons, rates)


def make_demo(out: Path, seed: int, numbers: str = "2") -> None:
    """Write `out`/model and `out`/train.jsonl, unless the same seed and code made what is there; complete or absent."""

    def fill(model: Path) -> list[dict[str, Any]]:
        make_tokenizer(model)
        make_countdown_model(model, seed, numbers)
        return make_rows(numbers, seed)

    make_folder(out, {"seed": seed, "numbers": numbers, "code": code()}, fill)
