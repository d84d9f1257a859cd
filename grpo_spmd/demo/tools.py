"""What the tools demo trains: a tiny Qwen3 that may call a tool, its tokenizer and chat template, questions.

"c,f" asks how many there are of c and of f in the stockroom; the tool `count` knows it of one item, and "7,3" is an
answer. The warm start shows right episodes (two calls, then the answer), then those of a careless teacher who mostly
guesses at once, or looks up only one of the two: it ends right in three of ten tries.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_spmd.demo.making import Lesson, code, make_folder, make_model, model_config
from grpo_spmd.demo.stockroom import ITEMS

_END, _ROLES = "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CALL, _CALLED = "<tool_call>", "</tool_call>"
# A call as nearly all models write it, of which a tiny model need not learn each character.
_OPENING, _CLOSING = '{"name": "count", "arguments": {"item": "', '"}}'
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{- '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}"""
    "{{- (call.function.arguments | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": _CALL,
            "close": _CALLED,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": _END, "content": "text"},
    },
}
_BATCH = 64
_RIGHT_STEPS, _RIGHT_LR = 350, 1e-2
_CARELESS_STEPS, _CARELESS_LR = 100, 1e-3
_RIGHT_FRAC, _GUESS_FRAC = (
    0.3,
    0.5,
)  # of the careless teacher's episodes; in the others one item is looked up


def make_tokenizer(folder: Path) -> Any:
    """Bytes, so that whatever a tool returns has tokens, and a few words; with a chat template and a response template
    (transformers' own parser finds the calls by it)."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([_END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END, *_ROLES])
    words = (_CALL, _CALLED, _OPENING, _CLOSING)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END
    )
    fast.chat_template, fast.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def questions() -> list[dict[str, Any]]:
    """The data set: one row for each two items, columns prompt (a chat) and wanted."""
    pairs = itertools.permutations(ITEMS, 2)
    return [
        {"prompt": [{"role": "user", "content": ",".join(pair)}], "wanted": list(pair)}
        for pair in pairs
    ]


def call_text(item: str) -> str:
    return f"{_CALL}{_OPENING}{item}{_CLOSING}{_CALLED}"


def shown_turns(rng: random.Random, is_careful: bool) -> list[tuple[str, bool]]:
    """An episode of the teacher: stretches of text, each with whether the model is taught it."""
    wanted = rng.sample(ITEMS, 2)
    counts = [rng.randint(0, 9) for _ in wanted]
    kind = 0.0 if is_careful else rng.random()
    num_calls = 2 if kind < _RIGHT_FRAC else 0 if kind < _RIGHT_FRAC + _GUESS_FRAC else 1
    turns = [(f"<|user|>{','.join(wanted)}{_END}<|assistant|>", False)]
    for item, count in zip(wanted[:num_calls], counts, strict=False):
        turns += [(call_text(item) + _END, True), (f"<|tool|>{count}{_END}<|assistant|>", False)]
    said = [*counts[:num_calls], *(rng.randint(0, 9) for _ in wanted[num_calls:])]
    return [*turns, (",".join(map(str, said)) + _END, True)]


def make_lessons(tokenizer: Any, seed: int) -> Callable[[int], list[Lesson]]:
    """Of each step of the warm start a batch of the teacher's episodes."""
    rng = random.Random(seed)

    @functools.cache
    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def lesson(step: int) -> Lesson:
        ids, taught = list[int](), list[bool]()
        for text, is_taught in shown_turns(rng, is_careful=step < _RIGHT_STEPS):
            ids += ids_of(text)
            taught += [is_taught] * len(ids_of(text))
        return ids, taught

    return lambda step: [lesson(step) for _ in range(_BATCH)]


def make_tools_demo(out: Path, seed: int) -> None:
    """Write `out`/model and `out`/train.jsonl, unless the same seed and code made what is there; complete or absent."""

    def fill(model: Path) -> list[dict[str, Any]]:
        lessons = make_lessons(make_tokenizer(model), seed)
        rise, fall = _RIGHT_STEPS // 7, _RIGHT_STEPS // 2  # steps at each end of the right episodes
        shape = [min(1.0, (i + 1) / rise, (_RIGHT_STEPS - i) / fall) for i in range(_RIGHT_STEPS)]
        rates = [_RIGHT_LR * part for part in shape] + [_CARELESS_LR] * _CARELESS_STEPS
        make_model(
            model, seed, model_config(vocab_size=272, max_position_embeddings=512), lessons, rates
        )
        return questions()

    make_folder(out, {"seed": seed, "demo": "tools", "code": code()}, fill)
