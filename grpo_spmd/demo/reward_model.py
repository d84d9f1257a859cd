"""What the demo of reward models learns from: a tiny Qwen3 with a head for one score, trained to tell right countdown
equations from wrong ones. It sees pairs for one task, and the right one is to have the higher score (Bradley-Terry);
what is wrong is drawn as the policy may write it, near misses and strings of no sense among it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from grpo_spmd.demo.countdown import (
    make_countdown_model,
    make_rows,
    make_tokenizer,
    prompt_text,
    random_equation,
    right_equations,
    solvable_tasks,
)
from grpo_spmd.demo.making import code, make_folder, model_config
from grpo_spmd.distributed import startup
from grpo_spmd.rewards.verifiers import countdown

_BATCH, _WRONG, _STEPS, _LR = (
    32,
    5,
    800,
    5e-3,
)  # tasks of a step, and wrong answers beside each right one
_CHARACTERS = "0123456789+-*"
_LONGEST = 8  # characters of a completion
Task = tuple[int, int, int]


def is_right(task: Task, said: str) -> bool:
    a, b, target = task
    return countdown([said], [[a, b]], [target], answer_tag=None) == [1.0]


def wrong_answer(rng: random.Random, task: Task) -> str:
    """Of many kinds, none of them right."""
    while True:
        kind = rng.random()
        right = rng.choice(right_equations(*task))
        if kind < 0.2:
            said = random_equation(rng)
        elif (
            kind < 0.75
        ):  # one number of the task, or both or twice the same, which a policy soon tries
            pair = [
                rng.choice(task[:2]),
                rng.choice(task[:2]) if kind < 0.55 else rng.randint(1, 9),
            ]
            rng.shuffle(pair)
            said = f"{pair[0]}{rng.choice('+-*')}{pair[1]}"
        elif kind < 0.85:  # one character of a right one changed, left out or put in
            place = rng.randrange(len(right))
            middle = rng.choice(
                ["", rng.choice(_CHARACTERS), right[place] + rng.choice(_CHARACTERS)]
            )
            said = right[:place] + middle + right[place + 1 :]
        elif kind < 0.92:  # it goes on behind a right one
            said = right + "".join(
                rng.choices(_CHARACTERS + ",=:", k=rng.randint(1, _LONGEST - len(right)))
            )
        else:
            said = "".join(rng.choices(_CHARACTERS, k=rng.randint(1, _LONGEST)))
        if not is_right(task, said):
            return said


def make_reward_model(folder: Path, base: Path, seed: int) -> None:
    """Beside a tokenizer that is there, of the language model `base`, which knows some arithmetic by then. Its padding
    token is none, so that it reads the end of a text too."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    torch.manual_seed(seed)
    model = transformers.Qwen3ForSequenceClassification(
        model_config(num_labels=1, pad_token_id=None)
    )
    language_model = transformers.Qwen3ForCausalLM.from_pretrained(base, trust_remote_code=False)
    model.model.load_state_dict(language_model.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    rng, tasks, end = random.Random(seed), solvable_tasks(), tokenizer.eos_token_id

    def ids_of(task: Task, said: str) -> list[int]:
        ids: list[int] = tokenizer.convert_tokens_to_ids([*prompt_text(*task), *said])
        return (
            [*ids, end] if len(said) < _LONGEST else ids
        )  # as the policy's, which are cut off there

    def scores_of(texts: list[list[int]]) -> Any:
        longest, lengths = max(map(len, texts)), torch.tensor([len(ids) for ids in texts])
        rows = torch.tensor(
            [ids + [end] * (longest - len(ids)) for ids in texts]
        )  # the mask is causal
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
        return model.score(hidden[torch.arange(len(texts)), lengths - 1]).squeeze(-1)

    startup.begin("demo: the reward model")
    for step in range(_STEPS):
        startup.note(f", step {step + 1} of {_STEPS}")
        optimizer.param_groups[0]["lr"] = _LR * min(
            1.0, (step + 1) / 50, (_STEPS - step) / (_STEPS / 2)
        )
        batch = rng.choices(tasks, k=_BATCH)
        right = [ids_of(task, rng.choice(right_equations(*task))) for task in batch]
        wrong = [ids_of(task, wrong_answer(rng, task)) for _ in range(_WRONG) for task in batch]
        scores = scores_of(right + wrong).view(1 + _WRONG, _BATCH)
        margins = scores[0] - scores[1:]
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        f"demo: the reward model tells {float((margins > 0).float().mean()):.0%} of its last pairs apart",
        flush=True,
    )
    model.save_pretrained(folder)


def make_reward_model_demo(out: Path, seed: int) -> None:
    """Write `out`/model, `out`/reward_model and `out`/train.jsonl, unless the same seed and code made what is there;
    complete or absent."""

    def fill(model: Path) -> list[dict[str, Any]]:
        make_tokenizer(model)
        make_countdown_model(model, seed, "2")
        judge = model.parent / "reward_model"
        judge.mkdir()
        make_tokenizer(judge)
        make_reward_model(judge, model, seed)
        return make_rows("2", seed)

    make_folder(out, {"seed": seed, "demo": "rm", "code": code()}, fill)
