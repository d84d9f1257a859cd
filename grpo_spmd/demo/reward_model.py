"""Makes the models of the reward-model demo; the reward model is a tiny Qwen3 with a score head.

It learns to tell correct countdown equations from wrong ones. It is trained on pairs of answers to
the same task, of which the correct one must get the higher score (Bradley-Terry). The wrong answers
are those that a policy may write: random equations, near misses and meaningless strings.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from grpo_spmd.demo.countdown import (
    MAX_NUMBER,
    Task,
    correct_equations,
    fill_demo,
    make_tokenizer,
    prompt_text,
    random_equation,
    solvable_tasks,
    token_ids,
)
from grpo_spmd.demo.making import model_config, padded, rise_and_fall, train
from grpo_spmd.rewards.verifiers import countdown

_TASKS_PER_STEP = 32
_WRONG_PER_TASK = 5
_STEPS = 800
_LR = 5e-3
_CHARACTERS = "0123456789+-*"
# The most characters of a completion.
_MAX_LENGTH = 8


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
        replaced = rng.choice(_CHARACTERS)
        inserted = correct[index] + rng.choice(_CHARACTERS)
        return correct[:index] + rng.choice(["", replaced, inserted]) + correct[index + 1 :]
    if kind < 0.92:
        # A correct answer with further characters behind it.
        num_more = rng.randint(1, _MAX_LENGTH - len(correct))
        return correct + "".join(rng.choices(_CHARACTERS + ",=:", k=num_more))
    return "".join(rng.choices(_CHARACTERS, k=rng.randint(1, _MAX_LENGTH)))


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
        ids = token_ids(prompt_text(*task) + text)
        # A completion of the full length was cut off, so it has no end token.
        return [*ids, 0] if len(text) < _MAX_LENGTH else ids

    def scores_of(sequences: list[list[int]]) -> torch.Tensor:
        lengths = [len(ids) for ids in sequences]
        hidden = model.model(input_ids=padded(sequences), use_cache=False).last_hidden_state
        ends = torch.tensor(lengths) - 1
        scores: torch.Tensor = model.score(hidden[torch.arange(len(sequences)), ends])
        return scores.squeeze(-1)

    # For each step, the fraction of pairs in which the correct answer got the higher score.
    fractions: list[float] = []

    def loss_of(_: int) -> torch.Tensor:
        batch = rng.choices(tasks, k=_TASKS_PER_STEP)
        sequences = [encode(task, rng.choice(correct_equations(*task))) for task in batch]
        for _ in range(_WRONG_PER_TASK):
            sequences += [encode(task, wrong_answer(rng, task)) for task in batch]
        # Row 0 has the correct answers, and each further row one wrong answer for each task.
        scores = scores_of(sequences).view(1 + _WRONG_PER_TASK, _TASKS_PER_STEP)
        margins = scores[0] - scores[1:]
        fractions.append(float((margins > 0).float().mean()))
        return -torch.nn.functional.logsigmoid(margins).mean()

    rates = [_LR * factor for factor in rise_and_fall(_STEPS)]
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
