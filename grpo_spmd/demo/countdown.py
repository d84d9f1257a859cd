"""Makes the data of three demos: countdown, distillation from a better countdown model, and GRPO by
a reward model.

The data are a tiny Qwen3, its tokenizer and prompts.

The task is TinyZero's countdown with two numbers: "3,8=24:" asks for an equation that uses 3 and 8
once each and reaches 24, such as "3*8". A warm start of a few seconds trains first on correct
equations, then on those of a careless teacher, who often writes random digits. After the warm start
three answers of ten are correct; GRPO improves the model with the reward alone.

`--numbers 3-4` is TinyZero's own task, with three or four numbers and targets below 100. Its warm
start has correct equations only, and after it one answer of five to ten is correct.

In the distillation demo the same model, trained by the careless teacher, is the student. The model
that it learns from was trained longer, on correct equations only. The student gets no reward: on
its own completions it learns the distribution of that model.

In the reward-model demo a tiny Qwen3 with a score head learns to tell correct equations from wrong
ones. It is trained on pairs of answers to the same task, of which the correct one must get the
higher score (Bradley-Terry). The wrong answers are those that a policy may write: random equations,
near misses and meaningless strings.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.demo.making import (
    Example,
    make_folder,
    make_model,
    model_config,
    padded,
    rise_and_fall,
    train,
    warm_up,
)
from grpo_spmd.records import Fields
from grpo_spmd.rewards.verifiers import countdown, evaluate

CHARACTERS = "0123456789+-*,=:"
EOS = "<eos>"
MAX_NUMBER = 9
_BATCH_SIZE = 128
_CORRECT_STEPS = 300
_CORRECT_LR = 5e-3
_CARELESS_STEPS = 120
_CARELESS_LR = 1e-3
# The fraction of the careless teacher's equations that are correct; the others are random.
_CARELESS_CORRECT_FRAC = 0.55
# For tasks of three or four numbers.
_LONG_STEPS = 500
_LONG_LR = 3e-3
_LONG_ROWS = 4096
# The teacher of the distillation demo is trained longer than its student.
_TEACHER_STEPS = 600
_TEACHER_LR = 5e-3
_SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
# For the reward model.
_TASKS_PER_STEP = 32
_WRONG_PER_TASK = 5
_REWARD_STEPS = 800
_REWARD_LR = 5e-3
_ANSWER_CHARACTERS = "0123456789+-*"
# The most characters of a completion.
_MAX_LENGTH = 8
# A task is two numbers and the target.
Task = tuple[int, int, int]


def solvable_tasks() -> list[Task]:
    """Returns all tasks with numbers from 1 to 9 and a positive target that +, - or * reaches."""
    numbers = range(1, MAX_NUMBER + 1)
    tasks = {(a, b, compute(a, b)) for a in numbers for b in numbers for compute in _SIGNS.values()}
    return sorted(task for task in tasks if task[2] > 0)


def prompt_text(*nums_and_target: int) -> str:
    """Returns the prompt for some numbers and a target: "3,8=24:"."""
    *nums, target = nums_and_target
    return f"{','.join(map(str, nums))}={target}:"


def long_task(rng: random.Random) -> tuple[list[int], int, str]:
    """Draws a task: three or four numbers, a target from 1 to 99, and an equation for them."""
    while True:
        # Draw an equation first, so that the task has a solution.
        nums = [rng.randint(1, MAX_NUMBER) for _ in range(rng.choice((3, 4)))]
        equation = str(nums[0]) + "".join(rng.choice("+-*") + str(number) for number in nums[1:])
        target = evaluate(equation)
        if 0 < target < 100:
            rng.shuffle(nums)
            return nums, int(target), equation


def make_rows(numbers: str, seed: int) -> list[Fields]:
    """Returns the data set: one row for each task, with the columns prompt, nums and target.

    `numbers` is the command's option: "2" or "3-4".
    """
    tasks: list[tuple[Sequence[int], int]] = [(task[:2], task[2]) for task in solvable_tasks()]
    if numbers != "2":
        # A separate generator, so that the rows do not depend on what the warm start draws.
        rng = random.Random(f"rows/{seed}")
        tasks = [long_task(rng)[:2] for _ in range(_LONG_ROWS)]
    return [
        {"prompt": prompt_text(*nums, target), "nums": nums, "target": target}
        for nums, target in tasks
    ]


def correct_equations(a: int, b: int, target: int) -> list[str]:
    """Returns every equation that uses both numbers and reaches the target."""
    return sorted(
        f"{x}{sign}{y}"
        for x, y in {(a, b), (b, a)}
        for sign, compute in _SIGNS.items()
        if compute(x, y) == target
    )


def random_equation(rng: random.Random) -> str:
    """Returns a random sign between two random digits, as the careless teacher often writes."""
    return f"{rng.randint(1, MAX_NUMBER)}{rng.choice('+-*')}{rng.randint(1, MAX_NUMBER)}"


def make_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of single characters and an end token, without a chat template."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS
    ).save_pretrained(folder)


def token_ids(text: str) -> list[int]:
    """Returns the token ids of `text`, one for each character, as the tokenizer would."""
    return [1 + CHARACTERS.index(character) for character in text]


def make_example(prompt: str, equation: str) -> Example:
    """Returns prompt, equation and end token as one Example; the prompt is not trained on."""
    # The end token has id 0.
    ids = [*token_ids(prompt + equation), 0]
    return Example(ids, [position >= len(prompt) for position in range(len(ids))])


def _draw_batch(rng: random.Random, correct_frac: float) -> list[Example]:
    """Draws tasks of two numbers with an equation each; `correct_frac` of these are correct."""
    batch = []
    for task in rng.choices(solvable_tasks(), k=_BATCH_SIZE):
        is_solved = correct_frac == 1 or rng.random() < correct_frac
        equation = rng.choice(correct_equations(*task)) if is_solved else random_equation(rng)
        batch.append(make_example(prompt_text(*task), equation))
    return batch


def make_countdown_model(folder: Path, seed: int, numbers: str, config: Any) -> None:
    """Makes a model with this config, warm-starts it on countdown and saves it in `folder`.

    `numbers` is the command's option: "2" or "3-4".
    """
    rng = random.Random(seed)
    has_two = numbers == "2"

    def batch_of(step: int) -> list[Example]:
        """Draws the examples of a step. With two numbers, those of later steps are the careless
        teacher's; else all are correct."""
        if has_two:
            return _draw_batch(rng, 1 if step < _CORRECT_STEPS else _CARELESS_CORRECT_FRAC)
        # The tasks of three or four numbers are too many to list, so each batch draws new ones.
        batch = [long_task(rng) for _ in range(_BATCH_SIZE)]
        return [make_example(prompt_text(*nums, target), text) for nums, target, text in batch]

    peaks = [_LONG_LR] * _LONG_STEPS
    if has_two:
        peaks = [_CORRECT_LR] * _CORRECT_STEPS + [_CARELESS_LR] * _CARELESS_STEPS
    rates = [peak * warm_up(step) for step, peak in enumerate(peaks)]
    make_model(folder, seed, config, batch_of=batch_of, learning_rates=rates)


def fill_demo(model: Path, seed: int, numbers: str = "2", **sizes: Any) -> list[Fields]:
    """Writes the policy and its tokenizer into the folder `model`, and returns the data set's rows.

    `sizes` replace values of the model's config.
    """
    make_tokenizer(model)
    make_countdown_model(model, seed, numbers, model_config(**sizes))
    return make_rows(numbers, seed)


def fill_experts_demo(model: Path, seed: int) -> list[Fields]:
    """Writes a mixture of experts (eight in each layer, two for each token); returns the rows."""
    return fill_demo(
        model,
        seed,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )


def fill_hybrid_demo(model: Path, seed: int) -> list[Fields]:
    """Writes a policy of the Qwen3.5 family: a gated delta net, then attention. Returns rows."""
    return fill_demo(
        model,
        seed,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def make_demo(out: Path, seed: int, numbers: str = "2") -> None:
    """Writes `out`/model and `out`/train.jsonl, as make_folder does."""
    fill = functools.partial(fill_demo, seed=seed, numbers=numbers)
    make_folder(out, {"seed": seed, "numbers": numbers}, fill)


# The distillation demo


def make_teacher(folder: Path, seed: int) -> None:
    """Writes a model of the student's size that solves nearly all tasks, and its tokenizer."""
    make_tokenizer(folder)
    rng = random.Random(f"teacher/{seed}")
    # The learning rate falls to zero, so that the teacher becomes confident in its answers.
    rates = [
        _TEACHER_LR * warm_up(step) * (1 - step / _TEACHER_STEPS) for step in range(_TEACHER_STEPS)
    ]
    config = model_config()
    make_model(
        folder, seed + 1000, config, batch_of=lambda _: _draw_batch(rng, 1), learning_rates=rates
    )


def fill_distillation_demo(model: Path, seed: int) -> list[Fields]:
    """Writes the student into `model` and the teacher into a folder beside it; returns the rows."""
    rows = fill_demo(model, seed)
    teacher = model.with_name("teacher")
    teacher.mkdir()
    make_teacher(teacher, seed)
    return rows


# The reward-model demo


def is_correct(task: Task, text: str) -> bool:
    """Returns True if `text` is a correct equation for the task."""
    a, b, target = task
    return countdown([text], [[a, b]], [target], answer_tag=None) == [1.0]


def wrong_answer(rng: random.Random, task: Task) -> str:
    """Draws answers until one is wrong, and returns it."""
    while True:
        text = _draw_answer(rng, task)
        if not is_correct(task, text):
            return text


def _draw_answer(rng: random.Random, task: Task) -> str:
    """Returns a random answer to the task, which is usually wrong."""
    # Uniform in [0, 1). The bounds below are cumulative: 0.2 and 0.75 give the second kind 55 %.
    kind = rng.random()
    correct = rng.choice(correct_equations(*task))
    if kind < 0.2:
        return random_equation(rng)
    if kind < 0.75:
        # With one number of the task, with both, or with the same twice: a policy soon tries these.
        a = rng.choice(task[:2])
        b = rng.choice(task[:2]) if kind < 0.55 else rng.randint(1, MAX_NUMBER)
        pair = [a, b]
        rng.shuffle(pair)
        return f"{pair[0]}{rng.choice('+-*')}{pair[1]}"
    if kind < 0.85:
        # One character of a correct answer removed, replaced or followed by another.
        index = rng.randrange(len(correct))
        replaced = rng.choice(_ANSWER_CHARACTERS)
        inserted = correct[index] + rng.choice(_ANSWER_CHARACTERS)
        return correct[:index] + rng.choice(["", replaced, inserted]) + correct[index + 1 :]
    if kind < 0.92:
        # A correct answer with further characters behind it.
        num_more = rng.randint(1, _MAX_LENGTH - len(correct))
        return correct + "".join(rng.choices(_ANSWER_CHARACTERS + ",=:", k=num_more))
    return "".join(rng.choices(_ANSWER_CHARACTERS, k=rng.randint(1, _MAX_LENGTH)))


def make_reward_model(folder: Path, base: Path, seed: int) -> None:
    """Trains a reward model and writes it into `folder`, which already has its tokenizer.

    Training starts from the layers of the language model in `base`, which knows some arithmetic.
    The config has no padding token: the tokenizer pads with the end token, and transformers would
    take the score before the first end token instead of at it.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config = model_config(num_labels=1, pad_token_id=None)
    model = transformers.Qwen3ForSequenceClassification(config)
    language_model = transformers.Qwen3ForCausalLM.from_pretrained(base, trust_remote_code=False)
    # Only the layers are taken over: the score head is new.
    model.model.load_state_dict(language_model.model.state_dict())
    rng = random.Random(seed)
    tasks = solvable_tasks()

    def encode(task: Task, text: str) -> list[int]:
        """Returns the tokens of a task's prompt and an answer, as the reward model reads them."""
        ids = token_ids(prompt_text(*task) + text)
        # A completion of the full length was cut off, so it has no end token.
        return [*ids, 0] if len(text) < _MAX_LENGTH else ids

    def scores_of(sequences: list[list[int]]) -> torch.Tensor:
        """Returns the score of each sequence, at its last token, as a tensor [sequences]."""
        lengths = [len(ids) for ids in sequences]
        hidden = model.model(input_ids=padded(sequences), use_cache=False).last_hidden_state
        ends = torch.tensor(lengths) - 1
        scores: torch.Tensor = model.score(hidden[torch.arange(len(sequences)), ends])
        return scores.squeeze(-1)

    # For each step, the fraction of pairs in which the correct answer got the higher score.
    fractions = []

    def loss_of(_: int) -> torch.Tensor:
        """Returns the Bradley-Terry loss of new pairs of a correct and a wrong answer."""
        batch = rng.choices(tasks, k=_TASKS_PER_STEP)
        sequences = [encode(task, rng.choice(correct_equations(*task))) for task in batch]
        for _ in range(_WRONG_PER_TASK):
            sequences += [encode(task, wrong_answer(rng, task)) for task in batch]
        # Row 0 has the correct answers, and each further row one wrong answer for each task.
        scores = scores_of(sequences).view(1 + _WRONG_PER_TASK, _TASKS_PER_STEP)
        margins = scores[0] - scores[1:]
        fractions.append(float((margins > 0).float().mean()))
        return -torch.nn.functional.logsigmoid(margins).mean()

    rates = [_REWARD_LR * factor for factor in rise_and_fall(_REWARD_STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    train("demo: the reward model", optimizer, loss_of, learning_rates=rates)
    print(f"demo: the reward model tells {fractions[-1]:.0%} of its last pairs apart", flush=True)
    model.save_pretrained(folder)


def fill_reward_model_demo(model: Path, seed: int) -> list[dict[str, Any]]:
    """Writes the policy into `model` and the reward model beside it; returns the rows."""
    rows = fill_demo(model, seed)
    reward_model = model.with_name("reward_model")
    reward_model.mkdir()
    make_tokenizer(reward_model)
    make_reward_model(reward_model, model, seed)
    return rows
