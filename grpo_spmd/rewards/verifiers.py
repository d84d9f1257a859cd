"""This module has the shipped reward functions (`SHIPPED`).

Each returns a list of scores, one for each completion: 1.0 if it is right, 0.0 if it is wrong, None
if its row has nothing to compare with.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Annotated, Any, Literal

import msgspec

from grpo_spmd.records import Fields
from grpo_spmd.rewards.sandbox.sandbox import (
    Limits,
    each_within,
    passes_program_test,
    passes_statements,
)

# The default of `time_s` of the reward `code`; preflight compares it with reward_pool.timeout_s.
DEFAULT_TIME_S = 8.0
_MAX_EQUATION_CHARS = 256
# Seconds of CPU time for one completion: if a library is busy with its text for longer, it is
# wrong.
_TEXT_S = 1.0
Completion = str | list[Fields]
Completions = Sequence[Completion]
Column = Sequence[Any]
Scores = list[float | None]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


def completion_text(completion: Completion) -> str:
    """Returns the text of a completion: the string itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def values_in(columns: Mapping[str, Column], name: str) -> Column:
    """Returns the values of a column, or of a key inside the column's dicts if `name` is dotted
    ("reward_model.ground_truth").

    A value is None where a dict lacks the key. Raises KeyError if there is no such column."""
    column, *path = name.split(".")
    values = columns[column]
    for key in path:
        values = [value.get(key) if isinstance(value, Mapping) else None for value in values]
    return values


def exact(completions: Completions, *, column: str = "answer", **columns: Column) -> Scores:
    """Returns 1.0 where the completion, stripped of white space, equals the value of `column`."""
    golds = values_in(columns, column)
    return _compare(completions, golds, lambda text, gold: text.strip() == str(gold).strip())


def _compare(
    completions: Completions, golds: Column, is_right: Callable[[str, Any], bool]
) -> Scores:
    """Returns 1.0 where `is_right(text, gold)`, else 0.0, and None where the gold value is None."""
    return [
        None if gold is None else float(is_right(completion_text(completion), gold))
        for completion, gold in zip(completions, golds, strict=True)
    ]


def matches_format(completions: Completions, *, pattern: str, **_: Any) -> Scores:
    """Returns 1.0 where the regular expression `pattern` matches the whole completion.

    "." also matches a newline. A match that takes more than a second of CPU time scores 0.0: some
    patterns need years for some texts.
    """
    compiled = re.compile(pattern, re.DOTALL)
    texts = [completion_text(completion) for completion in completions]
    return [*each_within(_TEXT_S, lambda text: compiled.fullmatch(text) is not None, texts)]


def gsm8k(completions: Completions, *, column: str = "answer", **columns: Column) -> Scores:
    """Returns 1.0 where the last numbers of the completion and of `column` ("... #### 42") are
    equal."""
    golds = [last_number(str(gold)) for gold in values_in(columns, column)]
    return _compare(completions, golds, lambda text, gold: last_number(text) == gold)


def last_number(text: str) -> Fraction | None:
    """Returns the exact last number in `text` ("1,234.50", "-3"), or None if there is none."""
    numbers = re.findall(r"(?<![A-Za-z0-9.])-?\$?\d[\d,]*(?:\.\d+)?", text)
    try:
        return Fraction(re.sub(r"[,$]", "", numbers[-1])) if numbers else None
    # Python does not convert more than 4300 digits, which a model that repeats itself may write.
    except ValueError:
        return None


def countdown(
    completions: Completions,
    nums: Column,
    target: Column,
    *,
    answer_tag: str | None = "answer",
    **_: Any,
) -> Scores:
    """Returns 1.0 where the completion's equation uses each of `nums` once and equals `target`.

    This is TinyZero's task. The equation is the content of the last <answer>...</answer>, or the
    whole completion if `answer_tag` is null.
    """
    tasks = [countdown_task(numbers, goal) for numbers, goal in zip(nums, target, strict=True)]

    def is_solved(text: str, task: tuple[list[int], Fraction]) -> bool:
        """Returns True if the equation in a completion's text solves the task."""
        equation = tagged(text, answer_tag)
        return equation is not None and _reaches(equation, *task)

    return _compare(completions, tasks, is_solved)


def countdown_task(nums: Any, target: Any) -> tuple[list[int], Fraction] | None:
    """Returns the numbers and the target of a row, or None if the row lacks one of them.

    Raises ValueError, TypeError or ArithmeticError if they are not numbers.
    """
    if nums is None or target is None:
        return None
    is_list = isinstance(nums, list | tuple)
    if not is_list or any(isinstance(number, float) and number % 1 for number in nums):
        raise ValueError(f"'nums' must be a list of whole numbers; got {nums!r:.60}")
    return [int(number) for number in nums], Fraction(target)


def tagged(text: str, tag: str | None) -> str | None:
    """Returns the stripped text in the last `<tag>...</tag>`, or None if there is none.

    Returns the whole text, stripped, if `tag` is None.
    """
    if tag is None:
        return text.strip()
    start, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = start.rpartition(f"<{tag}>")
    return inside.strip() if opening and closing else None


def _reaches(equation: str, numbers: Sequence[int], target: Fraction) -> bool:
    """Returns True if the equation, such as "3 * (5 + 2) = 21" or "3 * (5 + 2)", uses each of
    `numbers` once and equals `target`."""
    equation, equals, result = equation.partition("=")
    if equals and result.strip() != str(target):
        return False
    # Only numbers, four operations and brackets are allowed. The length is limited, since parsing
    # recurses into nested brackets.
    if len(equation) > _MAX_EQUATION_CHARS or not re.fullmatch(r"[\d+\-*/() ]+", equation):
        return False
    try:
        is_reached = evaluate(equation) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return is_reached and Counter(map(int, re.findall(r"\d+", equation))) == Counter(numbers)


def evaluate(equation: str) -> Fraction:
    """Returns the exact value of an expression made of whole numbers, + - * / and brackets.

    Raises ValueError or SyntaxError for anything else.
    """
    return _value(ast.parse(equation.strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    """Returns the exact value of a syntax tree of integers, + - * / and minus signs.

    Raises ValueError for any other node, so names, calls and powers are never evaluated.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


_OPERATIONS: dict[type, Callable[..., Fraction]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
}


def equal_by_math_verify(
    completions: Completions, *, column: str = "answer", **columns: Column
) -> Scores:
    """Returns 1.0 where math-verify finds the completion's final answer equal to the gold answer in
    `column` (LaTeX or plain text).

    The score is None if math-verify cannot read the gold answer, and 0.0 for a completion that
    takes more than one second of CPU time. Must be called in the main thread: math-verify limits
    the time for the gold answer by SIGALRM.
    """
    parse = load_math_verify()
    texts = [completion_text(completion) for completion in completions]
    scores = {}
    # For the completions that math-verify must compare: by index, the gold answer as sympy objects.
    golds = {}
    for number, (text, gold) in enumerate(zip(texts, values_in(columns, column), strict=True)):
        # The parser takes a bare "x^2" for prose, and \boxed{x^2} for an expression.
        parsed_gold = [] if gold is None else parse(f"\\boxed{{{gold}}}") or parse(str(gold))
        boxed = last_boxed(text) or ""
        scores[number] = float(boxed.strip() == str(gold).strip()) if parsed_gold else None
        # An answer that is much longer than the gold one, or too hard for sympy, keeps this score.
        if parsed_gold and len(boxed) < 2000 + 4 * len(str(gold)) and not _keeps_sympy_busy(boxed):
            golds[number] = parsed_gold
    equal = each_within(_TEXT_S, lambda number: _equals(golds[number], texts[number]), [*golds])
    return [*(scores | dict(zip(golds, equal, strict=True))).values()]


def _equals(parsed_gold: Any, text: str) -> float:
    """Returns 1.0 if math-verify finds the final answer of `text` equal to the gold answer.

    `parse` may return several readings of the answer. One at which sympy fails counts as unequal.
    """
    from math_verify import parse, verify

    # 0 turns math-verify's own time limits off; the caller limits the time (each_within).
    return float(verify(parsed_gold, parse(text, parsing_timeout=0), timeout_seconds=0))


def _keeps_sympy_busy(answer: str) -> bool:
    """Returns True for answers that would take sympy too long.

    These have deeply nested brackets, powers like 9^{9^{9}}, exponents of 7 digits, or factorials
    of 5 digits.
    """
    depths = itertools.accumulate((c in "{([") - (c in "})]") for c in answer)
    huge = r"\d\W{0,3}\^\W{0,3}\d+\W{0,3}\^\W{0,3}(\d\d|[4-9])|\^\W{0,3}\d{7}|\d{5}\W{0,3}!"
    return max(depths, default=0) > 40 or re.search(huge, answer) is not None


@functools.cache
def load_math_verify() -> Callable[..., Any]:
    """Returns math-verify's `parse` after using the library once.

    Its first use takes half a second more, which would otherwise count as a completion's time.
    """
    from math_verify import parse

    # Else math_verify warns that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _equals(parse("\\boxed{(x+1)^2}", parsing_timeout=0), "\\boxed{x^2+2x+\\frac{2}{2}}")
    return parse  # type: ignore[no-any-return]


def run_tests(
    completions: Completions,
    *,
    tests_column: str = "tests",
    partial_credit: bool = False,
    time_s: _Positive = DEFAULT_TIME_S,
    memory_mib: _Positive = 1024,
    isolation: Literal["required", "none"] = "required",
    _wall_s: float = math.inf,
    **columns: Any,
) -> Scores:
    """Returns 1.0 where the completion's Python code passes all tests of its row, else 0.0.

    With `partial_credit` the score is the fraction of tests that it passes.

    `tests_column` has for each row one test or a list of tests, perhaps as JSON. A test is a
    statement ("assert f(2) == 4") or a pair {"input": ..., "output": ...}; sandbox.py says how far
    to trust each kind. The score of a row without tests is None. Each pair runs the code in its own
    limited process, all statements together in one. The code can start threads but no processes,
    and write only to a small folder. If it cannot be isolated, this function raises and does not
    run it, unless `isolation` is "none": then only time and memory are limited.

    `time_s` is the time for all tests of a completion, not counting the start of processes.
    `_wall_s`, a second less than reward_pool.timeout_s, counts these starts, which take 0.1 to
    0.3 s for each pair. Tests that are not reached within both have failed: an endless loop is
    wrong, not unknown.
    """
    # Seconds that the processes of the current completion took.
    used: list[float] = []
    limits = Limits(time_s, int(memory_mib), isolation, used.append)
    scores: Scores = []
    for completion, entry in zip(completions, values_in(columns, tests_column), strict=True):
        tests = parse_tests(entry)
        if not tests:
            scores.append(None)
            continue
        used.clear()
        wall_end = time.monotonic() + _wall_s
        code = python_code(completion_text(completion))
        statements = [test for test in tests if isinstance(test, str)]
        pairs = [test for test in tests if isinstance(test, dict)]
        num_passed = sum(passes_statements(code, statements, limits)) if statements else 0
        for num_done, pair in enumerate(pairs, start=len(statements)):
            remaining_s = min(time_s - sum(used), wall_end - time.monotonic())
            # One failed test decides the score 0.0, so the others need not run.
            is_lost = not partial_credit and num_passed < num_done
            if remaining_s <= 0 or is_lost:
                break
            pair_limits = dataclasses.replace(limits, time_s=remaining_s)
            num_passed += passes_program_test(
                code, str(pair["input"]), str(pair["output"]), pair_limits
            )
        is_all = num_passed == len(tests)
        scores.append(num_passed / len(tests) if partial_credit else float(is_all))
    return scores


def python_code(text: str) -> str:
    """Returns the content of the last fenced block of Python in `text`.

    If there is none, returns the last fenced block without a language, or else the whole text. The
    text is read line by line, since a regular expression may take very long for some texts.
    """
    # By language: the content of the last block.
    blocks = {}
    # The number of the line that opened a block, or 0 outside blocks.
    start = 0
    language = ""
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not start:
            fence = re.match(r"[ \t]*```[ \t]*(\w*)", line)
            if fence is not None:
                start = number
                language = fence[1].lower()
        elif line.strip(" \t") == "```":
            if language in ("py", "python3"):
                language = "python"
            blocks[language] = "".join(f"{code}\n" for code in lines[start : number - 1])
            start = 0
    return blocks.get("python", blocks.get("", text))


def parse_tests(entry: Any) -> list[str | Fields]:
    """Returns the tests of a row as a list.

    `entry` is one test or a list of tests, or that as JSON. Raises ValueError for anything else.
    """
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except ValueError:
            return [entry] if entry.strip() else []
    if entry is None:
        return []
    tests = entry if isinstance(entry, list) else [entry]
    for test in tests:
        is_pair = isinstance(test, dict) and {"input", "output"} <= test.keys()
        if not (isinstance(test, str) or is_pair):
            raise ValueError(
                f'a test is a statement or {{"input": ..., "output": ...}}; got {str(test)[:200]}'
            )
    return tests


SHIPPED: dict[str, Callable[..., Any]] = {
    "code": run_tests,
    "countdown": countdown,
    "exact": exact,
    "format": matches_format,
    "gsm8k": gsm8k,
    "math": equal_by_math_verify,
}


def final_answer(text: str) -> str:
    r"""Returns the final answer of a completion for a majority vote.

    It is the content of the last complete \boxed{...}, or else the text after the last "####", or
    else the content of the last <answer>...</answer>, or else the whole text. Answers are compared
    as text, so 1/2 and 0.5 differ.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    _, marker, answer = text.rpartition("####")
    if marker:
        return answer.strip()
    inside = tagged(text, "answer")
    return text.strip() if inside is None else inside


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the \boxed{...} that closes last, or None if there is none.

    It reads the text once, so that a completion with a thousand unclosed \boxed{ takes no longer.
    """
    # For each open bracket: where the content of a \boxed{ begins, or None for another bracket.
    open_brackets: list[int | None] = []
    inside = None
    for token in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            open_brackets.append(None)
        elif token[0].startswith("\\boxed"):
            open_brackets.append(token.end())
        elif token[0] == "}" and open_brackets:
            start = open_brackets.pop()
            if start is not None:
                inside = text[start : token.start()]
    return inside
