"""Makes the tools demo: a tiny Qwen3 that can call a tool, its tokenizer, templates and questions.

"c,f" asks how many of c and of f are in the stockroom; the tool `count` tells the number of one
item, and "7,3" is an answer. The warm start trains first on correct episodes (two calls, then the
answer), then on those of a careless teacher, who mostly guesses both counts at once or looks up
only one item. After the warm start three answers of ten are correct, so that RL can improve the
model.
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
from grpo_spmd.records import Fields

_END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CALL_BEGIN = "<tool_call>"
_CALL_END = "</tool_call>"
# The JSON of a call, as nearly all models write it, without the item. Each half is one token of the
# tokenizer, so that the tiny model need not learn to write it character by character.
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
# Of the careless teacher's episodes, the fractions that are correct and that guess both counts. In
# the others one item is looked up.
_CORRECT_FRAC = 0.3
_GUESS_FRAC = 0.5
# The fraction of the careless teacher's summaries that note the count that was just read.
_NOTED_FRAC = 0.5
# The user message that asks for a summary.
SUMMARISE = "?"
# The turns of one context, each with its text and whether the model is trained on it.
Turns = list[tuple[str, bool]]
# A function (rng, is_careful) that draws the turns of one context of the teacher.
DrawTurns = Callable[[random.Random, bool], Turns]


def make_tokenizer(folder: Path) -> Any:
    """Writes and returns a tokenizer whose tokens are the bytes and a few words.

    The bytes can encode whatever a tool returns. The tokenizer has a chat template, and a response
    template with which transformers' own parser finds the calls.
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


def questions() -> list[Fields]:
    """Returns the data set: one row for each ordered pair of items.

    The columns are prompt (a chat) and wanted (the two items).
    """
    return [
        {"prompt": [{"role": "user", "content": ",".join(pair)}], "wanted": list(pair)}
        for pair in itertools.permutations(ITEMS, 2)
    ]


def call_text(item: str) -> str:
    """Returns a call of the tool for `item`, as the model writes it."""
    return f"{_CALL_BEGIN}{_JSON_BEGIN}{item}{_JSON_END}{_CALL_END}"


def teacher_turns(rng: random.Random, is_careful: bool) -> Turns:
    """Draws one episode of the teacher.

    The texts alternate between the teacher's turns, which are trained on, and the messages of the
    user and the tool, which are not.
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
    """Returns a user message, up to the beginning of the model's reply."""
    # The model is trained on its own turns, not on the messages of user and tool.
    return f"<|user|>{text}{_END}<|assistant|>", False


def _look_ups(items: Sequence[str], counts: Sequence[int]) -> Turns:
    """Returns a call for each item and the tool's reply to it; `counts` may be longer."""
    turns: Turns = []
    for item, count in zip(items, counts, strict=False):
        turns.append((call_text(item) + _END, True))
        turns.append((f"<|tool|>{count}{_END}<|assistant|>", False))
    return turns


def compacting_turns(rng: random.Random, is_careful: bool) -> Turns:
    """Draws one context of the teacher's episode in the compaction demo.

    It begins with the question and, if there was a summary, the counts noted in it. If a count is
    missing, the teacher looks up one item and ends with a summary of the counts so far; else it
    ends with the answer. In half of its summaries the careless teacher writes a random number
    instead of the count that it has just read.
    """
    wanted = rng.sample(ITEMS, 2)
    counts = [rng.randint(0, 9) for _ in wanted]
    num_noted = rng.randint(0, 2)
    question = ",".join(wanted)
    if num_noted:
        question += f"|{','.join(map(str, counts[:num_noted]))}"
    noted = counts[: num_noted + 1]
    turns = [_question(question), *_look_ups(wanted[num_noted:][:1], counts[num_noted:])]
    if num_noted < 2:
        # The request for a summary follows the tool's reply, in the place of the model's next turn.
        result, _ = turns.pop()
        request, _ = _question(SUMMARISE)
        turns.append((result.removesuffix("<|assistant|>") + request, False))
        if not is_careful and rng.random() > _NOTED_FRAC:
            noted[-1] = rng.randint(0, 9)
    return [*turns, (",".join(map(str, noted)) + _END, True)]


def make_examples(
    tokenizer: Any, seed: int, draw_turns: DrawTurns = teacher_turns
) -> Callable[[int], list[Example]]:
    """Returns a function that draws the examples of a step of the warm start.

    The teacher is careful for the first _CORRECT_STEPS steps and careless afterwards.
    """
    rng = random.Random(seed)

    # Cached: there are few different texts, and each occurs often.
    @functools.cache
    def encode(text: str) -> list[int]:
        """Returns the tokens of a turn's text."""
        return list(tokenizer.encode(text, add_special_tokens=False))

    def example(step: int) -> Example:
        """Draws one context of the teacher and returns it as an example for the warm start."""
        ids = []
        is_trained = []
        for text, is_answer in draw_turns(rng, step < _CORRECT_STEPS):
            ids += encode(text)
            is_trained += [is_answer] * len(encode(text))
        return Example(ids, is_trained)

    return lambda step: [example(step) for _ in range(_BATCH_SIZE)]


def fill_tools_demo(model: Path, seed: int, draw_turns: DrawTurns = teacher_turns) -> list[Fields]:
    """Writes the policy and its tokenizer into the folder `model`; returns the data set's rows."""
    examples = make_examples(make_tokenizer(model), seed, draw_turns)
    rates = [_CORRECT_LR * factor for factor in rise_and_fall(_CORRECT_STEPS)]
    # A small constant rate, so that the model does not forget from the careless teacher how calls
    # are written.
    rates += [_CARELESS_LR] * _CARELESS_STEPS
    config = model_config(vocab_size=272, max_position_embeddings=512)
    make_model(model, seed, config, batch_of=examples, learning_rates=rates)
    return questions()


def fill_compacting_demo(model: Path, seed: int) -> list[Fields]:
    """Writes the policy of the compaction demo into the folder `model`, and returns the rows."""
    return fill_tools_demo(model, seed, compacting_turns)
