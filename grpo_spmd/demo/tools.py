"""Data of the tools demo: a tiny Qwen3 that may call a tool, its tokenizer, template, questions.

"c,f" asks how many of c and of f are in the stockroom; the tool `count` knows the number of one
item, and "7,3" is an answer. The warm start trains on correct episodes (two calls, then the
answer), then on those of a careless teacher who mostly guesses at once, or looks up only one item.
After it the model is right in three of ten tries.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.demo.making import Example, make_model, model_config, rise_and_fall
from grpo_spmd.demo.stockroom import ITEMS

_END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CALL_BEGIN = "<tool_call>"
_CALL_END = "</tool_call>"
# A call as nearly all models write it. As two tokens, a tiny model need not learn each character.
_JSON_BEGIN = '{"name": "count", "arguments": {"item": "'
_JSON_END = '"}}'
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
            "open": _CALL_BEGIN,
            "close": _CALL_END,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": _END, "content": "text"},
    },
}
_BATCH_SIZE = 64
_CORRECT_STEPS = 350
_CORRECT_LR = 1e-2
_CARELESS_STEPS = 100
_CARELESS_LR = 1e-3
# Of the careless teacher's episodes. In the others one item is looked up.
_CORRECT_FRAC = 0.3
_GUESS_FRAC = 0.5
# Of the counts in a careless teacher's summary.
_NOTED_FRAC = 0.5
SUMMARISE = "?"
# The turns of a context: texts, and whether the model is trained on them.
Turns = list[tuple[str, bool]]
# Draws the turns of one context, of a careful or a careless teacher.
DrawTurns = Callable[[random.Random, bool], Turns]


def make_tokenizer(folder: Path) -> Any:
    """Writes and returns a tokenizer of bytes and a few words.

    With bytes, whatever a tool returns has tokens. It has a chat template, and a response template
    by which transformers' own parser finds the calls.
    """
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([_END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END, *_ROLES])
    words = (_CALL_BEGIN, _CALL_END, _JSON_BEGIN, _JSON_END)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_END
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def questions() -> list[dict[str, Any]]:
    """Returns the data set: one row for each two items, columns prompt (a chat) and wanted."""
    return [
        {"prompt": [{"role": "user", "content": ",".join(pair)}], "wanted": list(pair)}
        for pair in itertools.permutations(ITEMS, 2)
    ]


def call_text(item: str) -> str:
    return f"{_CALL_BEGIN}{_JSON_BEGIN}{item}{_JSON_END}{_CALL_END}"


def teacher_turns(rng: random.Random, is_careful: bool) -> Turns:
    """Returns one episode of the teacher as a list of (text, is trained).

    The texts alternate between the teacher's turns, which are trained, and those of user and tool.
    """
    wanted = rng.sample(ITEMS, 2)
    counts = [rng.randint(0, 9) for _ in wanted]
    kind = 0.0 if is_careful else rng.random()
    num_calls = 1
    if kind < _CORRECT_FRAC:
        num_calls = 2
    elif kind < _CORRECT_FRAC + _GUESS_FRAC:
        num_calls = 0
    guesses = [rng.randint(0, 9) for _ in wanted[num_calls:]]
    answer = ",".join(map(str, counts[:num_calls] + guesses))
    looked_up = _look_ups(wanted[:num_calls], counts)
    return [_question(",".join(wanted)), *looked_up, (answer + _END, True)]


def _question(text: str) -> tuple[str, bool]:
    # The model is trained on its own turns, not on what user and tool say.
    return f"<|user|>{text}{_END}<|assistant|>", False


def _look_ups(items: Sequence[str], counts: Sequence[int]) -> Turns:
    turns: Turns = []
    for item, count in zip(items, counts, strict=False):
        turns.append((call_text(item) + _END, True))
        turns.append((f"<|tool|>{count}{_END}<|assistant|>", False))
    return turns


def compacting_turns(rng: random.Random, is_careful: bool) -> Turns:
    """Returns one context of an episode of the compaction demo: it ends with a summary after each
    look-up, or with the answer.

    The careless teacher mostly writes down counts that it never read."""
    wanted = rng.sample(ITEMS, 2)
    counts = [rng.randint(0, 9) for _ in wanted]
    num_noted = rng.randint(0, 2)
    question = ",".join(wanted)
    if num_noted:
        question += f"|{','.join(map(str, counts[:num_noted]))}"
    noted = counts[: num_noted + 1]
    turns = [_question(question), *_look_ups(wanted[num_noted:][:1], counts[num_noted:])]
    if num_noted < 2:
        result, _ = turns.pop()
        request, _ = _question(SUMMARISE)
        turns.append((result.removesuffix("<|assistant|>") + request, False))
        if not is_careful and rng.random() > _NOTED_FRAC:
            noted[-1] = rng.randint(0, 9)
    return [*turns, (",".join(map(str, noted)) + _END, True)]


def make_examples(
    tokenizer: Any, seed: int, draw_turns: DrawTurns = teacher_turns
) -> Callable[[int], list[Example]]:
    """Returns a function that gives the teacher's episodes for each step of the warm start."""
    rng = random.Random(seed)

    # Few different texts occur, and each occurs often.
    @functools.cache
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def example(step: int) -> Example:
        ids: list[int] = []
        is_trained: list[bool] = []
        for text, is_answer in draw_turns(rng, step < _CORRECT_STEPS):
            ids += encode(text)
            is_trained += [is_answer] * len(encode(text))
        return Example(ids, is_trained)

    return lambda step: [example(step) for _ in range(_BATCH_SIZE)]


def fill_tools_demo(
    model: Path, seed: int, draw_turns: DrawTurns = teacher_turns
) -> list[dict[str, Any]]:
    """Writes the policy into `model`. Returns the rows."""
    examples = make_examples(make_tokenizer(model), seed, draw_turns)
    rates = [_CORRECT_LR * factor for factor in rise_and_fall(_CORRECT_STEPS)]
    # A small constant rate: the careless teacher must not undo how calls are written.
    rates += [_CARELESS_LR] * _CARELESS_STEPS
    config = model_config(vocab_size=272, max_position_embeddings=512)
    make_model(model, seed, config, batch_of=examples, learning_rates=rates)
    return questions()


def fill_compacting_demo(model: Path, seed: int) -> list[dict[str, Any]]:
    """Writes the policy of the compaction demo into `model`. Returns the rows."""
    return fill_tools_demo(model, seed, compacting_turns)
