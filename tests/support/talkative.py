"""A tiny model that calls tools from the start, so that runs of episodes need no long warm start: a
call is one token
of its vocabulary, and a few steps teach it which tokens begin a turn."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from grpo_spmd.demo import making
from grpo_spmd.demo.tools import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from grpo_spmd.distributed import startup


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = (
    call("multiply", a=3, b=4),
    call("multiply", c=3),  # which it cannot be called with
    call("add", a=1, b=2),
    call("increment", step=2),
    call("guess", word="hm"),
    call("guess", word="no"),
)
_END, _ROLES = "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TURNS = [*((one,) for one in CALLS), *itertools.permutations(CALLS, 2)]


def make_talkative(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate([_END, *alphabet])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END, *_ROLES])
    words = ("<tool_call>", "</tool_call>", "<think>", "</think>", *CALLS)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END
    )
    fast.chat_template, fast.response_template = chat_template, RESPONSE_TEMPLATE
    fast.save_pretrained(folder)
    draw = random.Random(0)

    def lesson() -> making.Example:
        ids, taught = list[int](), list[bool]()
        for old in ("<|user|>go", "<|tool|>12"):
            for text, is_said in ((f"{old}{_END}<|assistant|>", False), (said() + _END, True)):
                new = fast.encode(text, add_special_tokens=False)
                ids, taught = ids + new, taught + [is_said] * len(new)
        return making.Example(ids, taught)

    def said() -> str:
        text = "".join(draw.choice("abc") for _ in range(draw.randint(1, 3)))
        return "".join(draw.choice(_TURNS)) if draw.random() < 0.6 else text

    config = making.model_config(vocab_size=280, max_position_embeddings=512)
    making.make_model(folder, 0, config, lambda step: [lesson() for _ in range(32)], [5e-3] * 60)
    startup.end()
    return folder
