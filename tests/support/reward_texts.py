"""Made-up rollouts for reward models to read, and a chat model's tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from grpo_spmd.demo.tools import make_tokenizer as make_chat_tokenizer
from grpo_spmd.records import Completion, Episode, Prompt, RolloutGroup, Segment, Turn

GROUP_SIZE, NUM_GROUPS = 3, 10
OTHER_TEMPLATE = (
    "{{- 'start,' -}}{%- for message in messages -%}{{- message.role + '=' + message.content + "
    "';' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant=' -}}{%- endif -%}"
)


def give_chat_tokenizer(folder: Path) -> None:
    """In place of the one in a model's folder, of whose vocabulary it has 265 tokens."""
    make_chat_tokenizer(folder)


def groups_of(kind: str, tokenizer: Any) -> list[RolloutGroup]:
    """`text`: plain prompts; `chat`: messages; `episodes`: of several turns, one of which never
    began."""
    rng = random.Random(7)

    def said(maximum: int) -> list[int]:
        ids = [rng.randrange(1, 17) for _ in range(rng.randrange(1, maximum))]
        return [*ids, tokenizer.eos_token_id] if rng.random() < 0.5 else ids

    groups = []
    for slot in range(NUM_GROUPS):
        ids = said(12)
        requests = tokenizer.decode(ids, skip_special_tokens=True)
        text: Any = requests if kind == "text" else [{"role": "user", "content": requests}]
        prompt = Prompt(slot, slot, ids, text, {})
        completions = [
            Completion(
                local := said(20),
                [0.0] * len(local),
                "stop",
                _episode(local, tokenizer, slot, n, kind),
            )
            for n in range(GROUP_SIZE)
        ]
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def _episode(ids: list[int], tokenizer: Any, slot: int, sample: int, kind: str) -> Episode | None:
    if kind != "episodes":
        return None
    if (slot, sample) == (1, 1):
        return Episode("env_error", (), (), [], {}, [], "down")
    words = tokenizer.decode(ids, skip_special_tokens=True)
    messages = [
        {"role": "assistant", "content": words[: len(words) // 2]},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": words[len(words) // 2 :]},
    ]
    segment = Segment(np.array(ids, np.int32), np.ones(len(ids), np.bool_))
    # reset() of the one sample in three began with a task of its own.
    task = f"{tokenizer.decode(ids[:3], skip_special_tokens=True)} go"
    opening = [{"role": "user", "content": task}] if sample == 2 else []
    turns = (Turn(len(ids), "stop"),)
    return Episode("ok", (segment,), turns, messages, {}, [], opening=opening)
