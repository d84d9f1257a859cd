"""The tools demo's model, before any training: what it is taught is what its template writes and
its parser reads."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import transformers

from grpo_spmd.demo.stockroom import Stockroom, right_counts
from grpo_spmd.demo.tools import call_text, make_examples, make_tokenizer, questions, teacher_turns


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As a run reads it, from its folder."""
    folder = tmp_path_factory.mktemp("tools")
    make_tokenizer(folder)
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def call_of(item: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "count", "arguments": {"item": item}}}


def test_a_right_episode_is_taught_as_the_template_writes_it(tokenizer: Any) -> None:
    """A space more in the lessons, and the policy would start on contexts that it never saw."""
    turns = teacher_turns(random.Random(3), is_careful=True)
    wanted = turns[0][0].removeprefix("<|user|>").removesuffix("<|end|><|assistant|>").split(",")
    message = turns[-1][0].removesuffix("<|end|>")
    messages: list[dict[str, Any]] = [{"role": "user", "content": ",".join(wanted)}]
    for item, count in zip(wanted, message.split(","), strict=True):
        messages += [{"role": "assistant", "content": "", "tool_calls": [call_of(item)]}]
        messages += [{"role": "tool", "name": "count", "content": count}]
    messages += [{"role": "assistant", "content": message}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "".join(
        text for text, _ in turns
    )
    ids, taught = make_examples(tokenizer, 3)(0)[0]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
    # of "<user>c,f<end><assistant>" 6 tokens, of a call 6, of a result 4, of the answer 4
    assert taught == [False] * 6 + ([True] * 6 + [False] * 4) * 2 + [True] * 4


def test_transformers_parser_finds_the_calls_and_the_text(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(
        questions()[0]["prompt"], add_generation_prompt=True, return_dict=False
    )

    def parsed(text: str) -> dict[str, Any]:
        return dict(tokenizer.parse_response(tokenizer.encode(text), prefix=prompt))

    assert parsed(call_text("c") + "<|end|>")["tool_calls"] == [call_of("c")]
    assert parsed(call_text("c") + call_text("f") + "<|end|>")["tool_calls"] == [
        call_of("c"),
        call_of("f"),
    ]
    assert parsed("7,3<|end|>") == {"role": "assistant", "content": "7,3"}


def test_any_text_has_tokens_that_give_it_back(tokenizer: Any) -> None:
    for text in ("", " a  b\n", "naïve 数 \U0001f600", "{'error': \"'x'\"}", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_careless_teacher_is_right_in_few_episodes_and_never_without_two_calls() -> None:
    rng, num_right = random.Random(0), 0
    for _ in range(2000):
        turns = teacher_turns(rng, is_careful=False)
        num_right += len(turns) == 6
    assert 0.27 < num_right / 2000 < 0.33  # 0.3, and 3 standard deviations of 0.01


def test_the_answer_is_in_no_row_and_differs_between_episodes() -> None:
    row = questions()[0]
    assert set(row) == {"prompt", "wanted"}
    answers = set()
    for seed in range(20):
        random.seed(seed)
        stockroom = Stockroom()
        stockroom.reset(**json.loads(json.dumps(row)))
        message = ",".join(str(stockroom.count(item)) for item in row["wanted"])
        assert right_counts([[{"role": "assistant", "content": message}]], [stockroom]) == [1.0]
        assert right_counts([[{"role": "assistant", "content": "x"}]], [stockroom]) == [0.0]
        answers.add(message)
    assert len(answers) > 10  # of 100


def test_the_tool_has_a_schema_and_refuses_what_is_not_in_stock() -> None:
    schema = transformers.utils.get_json_schema(Stockroom().count)
    assert schema["function"]["parameters"]["required"] == ["item"]
    stockroom = Stockroom()
    stockroom.reset(wanted=["a"])
    with pytest.raises(KeyError):
        stockroom.count("z")


def test_a_last_message_without_content_is_wrong() -> None:
    stockroom = Stockroom()
    stockroom.reset(wanted=["a", "b"])
    assert right_counts([[{"role": "assistant"}]], [stockroom]) == [0.0]
