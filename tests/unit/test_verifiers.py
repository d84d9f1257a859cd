"""Every shipped verifier."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig, RewardConfig
from grpo_spmd.data.rows import read_rows
from grpo_spmd.rewards.named import check_gold
from grpo_spmd.rewards.protocol import load_rewards
from grpo_spmd.rewards.sandbox.sandbox import each_within
from grpo_spmd.rewards.verifiers import SHIPPED, last_number, python_code


def _shipped(
    name: str, completion: str, args: dict[str, Any] | None = None, **columns: Any
) -> float | None:
    """What the shipped reward gives one completion, once as text and once as a chat message: both
    must agree."""
    (reward,) = load_rewards([RewardConfig(name=name, args=args or {})])
    lists = {column: [value] for column, value in columns.items()}
    (plain,) = reward.function(prompts=[""], completions=[completion], completion_ids=[[]], **lists)
    message = [{"role": "assistant", "content": completion}]
    (chat,) = reward.function(prompts=[[]], completions=[message], completion_ids=[[]], **lists)
    assert plain == chat
    assert plain is None or isinstance(plain, float)
    return plain


# The column of the right answer


@pytest.mark.parametrize("name", ["exact", "gsm8k", "math"])
def test_verls_rows_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    """A parquet of its examples/data_preprocess/gsm8k.py: the answer is inside of a column."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 2)},
            "extra_info": {"split": "train", "index": n, "answer": f"so #### {n + 2}"},
        }
        for n in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    read = read_rows(DataConfig(train=str(tmp_path / "train.parquet")))
    assert read[1].prompt == [{"role": "user", "content": "1 + 2?"}]
    columns = {key: [row.columns[key] for row in read] for key in read[0].columns}
    texts = ["2", "3", "9"] if name == "exact" else [r"\boxed{2}", r"\boxed{3}", r"\boxed{9}"]

    def scores(column: str) -> list[float | None]:
        config = RewardConfig(name=name, args={"column": column})
        (reward,) = load_rewards([config])
        assert reward.needs == (column.partition(".")[0],)
        assert [*check_gold([config], read)] == []
        result: list[float | None] = reward.function(
            prompts=[row.prompt for row in read], completions=texts, completion_ids=[[]], **columns
        )
        return result

    assert scores("reward_model.ground_truth") == [1.0, 1.0, 0.0]
    if name == "gsm8k":
        assert scores("extra_info.answer") == [1.0, 1.0, 0.0]
    # A name that is not there: seen before anything is sampled.
    for column in ("reward_model.truth", "data_source.truth"):
        with pytest.raises(ConfigError, match=rf"in '{column}' \(null\), as in 3 of 3 rows"):
            scores(column)
    # Without the option the column is `answer`, as ever.
    assert load_rewards([RewardConfig(name=name)])[0].needs == ("answer",)


# exact, format, gsm8k


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("Paris", "Paris", 1.0),
        ("  Paris \n", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("42", 42, 1.0),
        ("", "", 1.0),
        ("x", None, None),
    ],
)
def test_exact(completion: str, answer: Any, score: float | None) -> None:
    assert _shipped("exact", completion, answer=answer) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think><answer>1</answer>", 1.0),
        ("so: <think>a</think><answer>1</answer>", 0.0),
        ("<think>a</think><answer>1</answer> end", 0.0),
        ("", 0.0),
    ],
)
def test_format_matches_the_whole_completion(completion: str, score: float) -> None:
    assert (
        _shipped("format", completion, args={"pattern": "<think>.*</think><answer>.*</answer>"})
        == score
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", Fraction(7)),
        ("#### 1,234", Fraction(1234)),
        ("$1,234.50 in all", Fraction("1234.5")),
        ("it is -3", Fraction(-3)),
        ("-$20", Fraction(-20)),
        ("\u7b54\u6848\u662f18", Fraction(18)),  # Chinese puts no space before a number
        ("_18_", Fraction(18)),
        ("x18", None),
        ("5-3", Fraction(3)),
        ("**18** dollars", Fraction(18)),
        ("\\boxed{0.25}", Fraction(1, 4)),
        ("007", Fraction(7)),
        ("none at all", None),
        ("", None),
        ("step x2", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("the answer is 42", "6 * 7\n#### 42", 1.0),
        ("the answer is 42.0", "#### 42", 1.0),
        ("42, no, 43", "#### 42", 0.0),
        ("no idea", "#### 42", 0.0),
        ("1,000", "#### 1000", 1.0),
        ("3", 3, 1.0),
        ("3", "no number here", None),
        ("3", None, None),
        ("1" * 100_000, "#### 1", 0.0),  # a model that repeats itself is wrong and stops nothing
    ],
)
def test_gsm8k(completion: str, answer: Any, score: float | None) -> None:
    assert _shipped("gsm8k", completion, answer=answer) == score


# countdown


@pytest.mark.parametrize(
    ("equation", "nums", "target", "score"),
    [
        ("3*8", [3, 8], 24, 1.0),
        ("8 * 3", [3, 8], 24, 1.0),
        ("3*8=24", [3, 8], 24, 1.0),
        ("(1+2)*(3+4)", [4, 3, 2, 1], 21, 1.0),
        ("3/2*4", [2, 3, 4], 6, 1.0),  # by way of a fraction
        ("1/3+2/3", [1, 2, 3, 3], 1, 1.0),  # in floating point too, but 1/49*49 is not
        ("1/49*49", [1, 49, 49], 1, 1.0),
        ("3+3", [3, 3], 6, 1.0),
        ("3*8", [3, 8], 25, 0.0),
        ("3*8", [3, 8, 1], 24, 0.0),  # leaves one out
        ("3*3+8-8", [3, 8], 9, 0.0),  # uses one twice
        ("4*6", [3, 8], 24, 0.0),  # other numbers
        ("24", [3, 8], 24, 0.0),
        ("38", [3, 8], 38, 0.0),  # digits glued together
        ("24=3*8", [3, 8], 24, 0.0),
        ("3*8=1", [3, 8], 24, 0.0),  # says that it reaches something else
        ("-3+8", [3, 8], 5, 1.0),  # a sign, as TinyZero's eval accepts it
        ("--3+8", [3, 8], 11, 1.0),
        ("+3+8", [3, 8], 11, 0.0),  # no plus sign
        ("+3+5", [3, 5], 8, 0.0),
        ("8--3", [3, 8], 11, 1.0),
        ("03*8", [3, 8], 24, 0.0),  # a leading zero
        ("3**8", [3, 8], 6561, 0.0),
        ("8//3", [3, 8], 2, 0.0),
        ("8%3", [3, 8], 2, 0.0),
        ("3*8.0", [3, 8], 24, 0.0),
        ("3(8)", [3, 8], 24, 0.0),
        ("3*8)", [3, 8], 24, 0.0),
        ("3 8", [3, 8], 24, 0.0),
        ("3/(8-8)", [3, 8, 8], 0, 0.0),
        ("", [3, 8], 24, 0.0),
        ("()", [3, 8], 24, 0.0),
        ("=24", [3, 8], 24, 0.0),
        ("3*8 # 24", [3, 8], 24, 0.0),
        ("\uff13*8", [3, 8], 24, 0.0),
    ],
)
def test_countdown(equation: str, nums: list[int], target: int, score: float) -> None:
    assert (
        _shipped("countdown", equation, args={"answer_tag": None}, nums=nums, target=target)
        == score
    )


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9",
        "9**9**9**9",
        "__import__('os').system('false')",
        "().__class__",
        "lambda: 1",
        "[1]*10**9",
        "(" * 120 + "1" + ")" * 120,
        "(" * 5000,
        "1+" * 5000 + "1",
        "9" * 200_000,
        "9" * 250 + "*" + "9" * 5,
        "\0",
        "\ud800",
        "1\n+1",
        "1 if 1 else 1",
        "((((1))))*" * 20,
    ],
)
def test_countdown_scores_hostile_strings_zero(hostile: str) -> None:
    assert (
        _shipped("countdown", hostile, args={"answer_tag": None}, nums=[9, 9, 9], target=27) == 0.0
    )


def test_countdown_reads_nested_brackets() -> None:
    assert (
        _shipped(
            "countdown",
            "(" * 30 + "3" + ")" * 30 + "*8",
            args={"answer_tag": None},
            nums=[3, 8],
            target=24,
        )
        == 1.0
    )


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>3+8</think> <answer> 3*8 </answer>", 1.0),
        ("<answer>3+8</answer> no: <answer>\n3*8\n</answer> done", 1.0),  # the last one counts
        ("<answer>3*8</answer><answer>3+8</answer>", 0.0),
        ("3*8", 0.0),
        ("<answer>3*8", 0.0),
        ("</answer>3*8<answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>" * 20_000, 0.0),
    ],
)
def test_countdown_reads_the_last_answer_tag(completion: str, score: float) -> None:
    assert _shipped("countdown", completion, nums=[3, 8], target=24) == score


def test_countdown_answer_tag_is_no_regular_expression() -> None:
    assert (
        _shipped("countdown", "<a+>3*8</a+>", args={"answer_tag": "a+"}, nums=[3, 8], target=24)
        == 1.0
    )


@pytest.mark.parametrize(
    "columns", [{"nums": None, "target": 24}, {"nums": [3, 8], "target": None}]
)
def test_countdown_without_a_task_does_not_apply(columns: dict[str, Any]) -> None:
    assert _shipped("countdown", "<answer>3*8</answer>", **columns) is None


def test_countdown_reads_numbers_given_as_text() -> None:
    assert _shipped("countdown", "<answer>3*8</answer>", nums=["3", "8"], target="24") == 1.0


# math


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("so \\boxed{\\dfrac{2}{4}}", "1/2", 1.0),
        ("$\\frac{3}{4}$", "\\frac{1}{2}", 0.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{x^2}", "x^3", 0.0),
        ("The answer is 42.", 42, 1.0),
        ("The answer is 41.", "42", 0.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("\\boxed{\\frac{1}{", "42", 0.0),
        ("42", "", None),
        ("42", None, None),
    ],
)
def test_math(completion: str, answer: Any, score: float | None) -> None:
    assert _shipped("math", completion, answer=answer) == score


def test_math_off_the_main_thread_raises() -> None:
    caught: list[BaseException] = []

    def score() -> None:
        try:
            SHIPPED["math"](["42"], answer=["42"])
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert "threaded environment" in str(caught[0])


# Hostile text: 0.0, soon, whatever it says


def _nested(old: str, inside: str, after: str, times: int) -> str:
    return "\\boxed{" + old * times + inside + after * times + "}"


HOSTILE = {
    "backticks": "`" * 64_000,
    "fences": "```\n" * 16_000,
    "opened fences": "```python\n" * 6_000,
    "spaced fences": ("```" + " " * 600) * 100,
    "blanks": " " * 64_000 + "x",
    "blank lines": " \n" * 32_000,
    "digits": "9" * 64_000,
    "boxed digits": "\\boxed{" + "9" * 64_000 + "}",
    "numbers": "1 " * 32_000,
    "commas": "1," * 32_000,
    "dollars": "$" * 64_000,
    "tower": "\\boxed{9^{9^{9}}}",
    "tower in prose": "the final answer is 9^9^9^9",
    "power": "\\boxed{7^{99999999}}",
    "factorial": "\\boxed{((9!)!)!}",
    "fractions": _nested("\\frac{1}{1+", "1", "}", 300),
    "roots": _nested("\\sqrt{", "2", "}", 300),
    "brackets": _nested("(", "1", ")", 500),
    "opened boxes": "\\boxed{" * 8_000,
    "sum": "\\boxed{" + "1+" * 30_000 + "1}",
    "powers of x": "\\boxed{" + "x^" * 500 + "2}",
    "unicode": "\ud800\u202e\u0661\u0662" * 16_000,
    "zeros": "\0" * 64_000,
    "answers": "<answer>" * 4_000 + "</answer>" * 4_000,
    "aaaa": "a" * 64_000 + "!",
}
VERIFIERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {"answer": "42"}),
    "format": (
        {"pattern": "(a+|a?)*(b|`|1| )*c|<answer>.*</answer>"},
        {},
    ),  # a pattern that many texts keep busy
    "gsm8k": ({}, {"answer": "#### 42"}),
    "countdown": ({}, {"nums": [3, 8], "target": 24}),
    "math": ({}, {"answer": "42"}),
}


@pytest.mark.parametrize("name", VERIFIERS)
def test_hostile_text_is_worth_nothing_and_takes_no_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_spmd.rewards.verifiers._TEXT_S", 0.2)
    args, columns = VERIFIERS[name]
    (reward,) = load_rewards([RewardConfig(name=name, args=args)])
    lists = {column: [value] * len(HOSTILE) for column, value in columns.items()}
    old, texts = time.process_time(), list(HOSTILE.values())
    result = reward.function(
        prompts=[""] * len(texts), completions=texts, completion_ids=[[]] * len(texts), **lists
    )
    correct = ["answers"] if name == "format" else []
    assert {
        text: value for text, value in zip(HOSTILE, result, strict=True) if value != 0.0
    } == dict.fromkeys(correct, 1.0)
    assert time.process_time() - old < 5  # not this process's: what it does itself is linear


def test_the_code_of_hostile_text_is_found_at_once() -> None:
    old = time.process_time()
    for text in HOSTILE.values():
        python_code(text)
    assert time.process_time() - old < 5  # a hang was 13 to 25 s a text


def test_the_last_code_block_is_what_the_regular_expression_found() -> None:
    """The scan by lines against the expression that it replaces, on texts small enough for both."""
    fence = re.compile(
        r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
    )
    pieces = [
        "```",
        "```python",
        " ```py x",
        "\t``` \t",
        "````",
        "x = 1",
        "",
        "```text",
        "```Python3\r",
        "a ``` b",
        "``` ```",
    ]
    random = Random(0)
    for _ in range(3000):
        text = "\n".join(random.choice(pieces) for _ in range(random.randrange(9)))
        blocks, expected = fence.findall(text), text
        for languages in ((""), ("python", "py", "python3")):
            for language, code in blocks:
                if language.lower() in languages and (language or languages == ""):
                    expected = code
        assert python_code(text) == expected, text


def test_a_text_that_ends_its_process_costs_itself_alone() -> None:
    def function(number: int) -> float:
        if number == 1:
            sum(iter(int, 1))  # without end, in C
        if number == 2:
            raise ValueError("no")
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 4:
            return float(len(bytearray(1 << 31)))  # more memory than it may have
        return 1.0

    assert each_within(0.2, function, range(6)) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (
            "\\boxed{9^{9^{9}}}",
            "9^{9^{9}}",
            1.0,
        ),  # refused unread, but for the gold answer's own text
        ("\\boxed{2^{3^{2}}}", "512", 1.0),
        ("\\boxed{2^{10}}", "1024", 1.0),
        ("\\boxed{5!}", "120", 1.0),
        ("\\boxed{41} or \\boxed{42}", "42", 0.0),  # as math-verify has it
        (
            "$x = " + "(" * 2 + "3" + ")" * 2 + "$",
            "3",
            1.0,
        ),  # 0.2 s of its 1 s; each level takes half as long again
    ],
)
def test_what_is_only_large_or_nested_is_judged(completion: str, answer: str, score: float) -> None:
    assert _shipped("math", completion, answer=answer) == score
