"""The shipped rewards. Each scores a list of completions: 1.0 right, 0.0 wrong, None "nothing to
compare with"."""

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
from collections.abc import Callable, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

from grpo_spmd.rewards.sandbox.sandbox import (
    Limits,
    each_within,
    passes_program_test,
    passes_statements,
)

DEFAULT_TIME_S = 8.0  # of `code`; preflight compares it with the pool's deadline
_TEXT_S = 1.0  # CPU time after which a completion's text, which keeps a library busy, is wrong
Completion = str | list[dict[str, Any]]
Completions = Sequence[Completion]
Column = Sequence[Any]
Scores = list[float | None]


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact(completions: Completions, answer: Column, **_: Any) -> Scores:
    """1.0 where the completion, stripped of white space, is the column `answer`."""
    pairs = ((completion_text(c).strip(), a) for c, a in zip(completions, answer, strict=True))
    return [None if gold is None else float(text == str(gold).strip()) for text, gold in pairs]


def matches_format(completions: Completions, *, pattern: str, **_: Any) -> Scores:
    """1.0 where the regular expression `pattern` matches the whole completion ("." also matches a
    newline), within a second of CPU time: many a pattern can be kept busy for years by the right
    text.
    """
    compiled, texts = re.compile(pattern, re.DOTALL), [completion_text(c) for c in completions]
    return [
        *each_within(_TEXT_S, lambda i: float(compiled.fullmatch(texts[i]) is not None), len(texts))
    ]


def gsm8k(completions: Completions, answer: Column, **_: Any) -> Scores:
    """1.0 where the last number of the completion equals the last number of the column `answer`
    ("... #### 42")."""
    pairs = (
        (completion_text(c), last_number(str(a))) for c, a in zip(completions, answer, strict=True)
    )
    return [None if gold is None else float(last_number(text) == gold) for text, gold in pairs]


def last_number(text: str) -> Fraction | None:
    """The last number in `text` ("1,234.50", "-3"; no full stop after it) as an exact fraction,
    None where none is."""
    found = re.findall(r"(?<![A-Za-z0-9.])-?\$?\d[\d,]*(?:\.\d+)?", text)
    try:
        return Fraction(re.sub(r"[,$]", "", found[-1])) if found else None
    except (
        ValueError
    ):  # more digits than Python reads (4300): a model that repeats itself may write them
        return None


def countdown(
    completions: Completions,
    nums: Column,
    target: Column,
    *,
    answer_tag: str | None = "answer",
    **_: Any,
) -> Scores:
    """1.0 where the equation in the last <answer>...</answer> (with `answer_tag: null`, the whole
    completion) uses each of `nums` exactly once and reaches `target` (TinyZero's task).
    """
    scores: Scores = []
    for completion, given, goal in zip(completions, nums, target, strict=True):
        if given is None or goal is None:
            scores.append(None)
            continue
        equation = tagged(completion_text(completion), answer_tag)
        scores.append(
            float(
                equation is not None and _reaches(equation, [int(n) for n in given], Fraction(goal))
            )
        )
    return scores


def tagged(text: str, tag: str | None) -> str | None:
    """What stands in the last `<tag>...</tag>`, stripped, or None; all of the text where `tag` is
    None."""
    if tag is None:
        return text.strip()
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if opening and closing else None


def _reaches(equation: str, given: Sequence[int], target: Fraction) -> bool:
    equation, equals, result = equation.partition("=")
    if equals and result.strip() != str(target):
        return False
    # Numbers, four operations and brackets. Its length is bounded because parsing nested brackets
    # recurses.
    if len(equation) > 256 or not re.fullmatch(r"[\d+\-*/() ]+", equation):
        return False
    try:
        tree = ast.parse(equation.strip(), mode="eval").body
        reached = _value(tree) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return reached and used == Counter(given)


def evaluate(equation: str) -> Fraction:
    """The exact value of whole numbers, + - * / and brackets. Raises ValueError or SyntaxError for
    anything else."""
    return _value(ast.parse(equation.strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    """Exact value of a tree of integers and + - * / with signs; no name, call or power is ever
    evaluated."""
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


def equal_by_math_verify(completions: Completions, answer: Column, **_: Any) -> Scores:
    """1.0 where math-verify finds the completion's final answer equal to the column `answer` (LaTeX or plain).

    A gold answer that it cannot read gives None. What a completion says gives 1.0 or 0.0, and costs
    at most a second of CPU time. The deadline of the gold answer uses SIGALRM, for the main thread
    alone.
    """
    pass

    parse, texts, scores = load_math_verify(), [completion_text(c) for c in completions], Scores()
    to_judge: list[tuple[int, Any]] = []  # number, gold answer as sympy has it
    for number, (text, gold) in enumerate(zip(texts, answer, strict=True)):
        # A bare "x^2" is prose to the parser; boxed it is one expression.
        parsed_gold = [] if gold is None else parse(f"\\boxed{{{gold}}}") or parse(str(gold))
        boxed = last_boxed(text) or ""
        scores.append(float(boxed.strip() == str(gold).strip()) if parsed_gold else None)
        if parsed_gold and len(boxed) < 2000 + 4 * len(str(gold)) and not _keeps_sympy_busy(boxed):
            to_judge.append((number, parsed_gold))
    judged = each_within(
        _TEXT_S, lambda i: _equals(to_judge[i][1], texts[to_judge[i][0]]), len(to_judge)
    )
    for (number, _gold), score in zip(to_judge, judged, strict=True):
        scores[number] = score
    return scores


def _equals(parsed_gold: Any, text: str) -> float:
    from math_verify import parse, verify

    try:
        parsed = parse(text, parsing_timeout=0, raise_on_error=True)
        return float(verify(parsed_gold, parsed, timeout_seconds=0, raise_on_error=True))
    except (
        Exception
    ):  # sympy choked on one of several readings of a strange completion: is any other one equal?
        return float(verify(parsed_gold, parse(text, parsing_timeout=0), timeout_seconds=0))


def _keeps_sympy_busy(answer: str) -> bool:
    """Brackets in brackets in brackets, 9^{9^{9}}, powers and factorials of numbers beyond
    reason."""
    depths = itertools.accumulate((c in "{([") - (c in "})]") for c in answer)
    huge = r"\d\W{0,3}\^\W{0,3}\d+\W{0,3}\^\W{0,3}(\d\d|[4-9])|\^\W{0,3}\d{7}|\d{5}\W{0,3}!"
    return max(depths, default=0) > 40 or re.search(huge, answer) is not None


@functools.cache
def load_math_verify() -> Callable[..., Any]:
    """Its `parse`, after a first use of all of it, which takes half a second that would count as a
    completion's."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns where its own deadlines are off
    _equals(parse("\\boxed{(x+1)^2}", parsing_timeout=0), "\\boxed{x^2+2x+\\frac{2}{2}}")
    return parse  # type: ignore[no-any-return]


def run_tests(
    completions: Completions,
    *,
    tests_column: str = "tests",
    partial_credit: bool = False,
    time_s: float = DEFAULT_TIME_S,
    memory_mib: float = 1024,
    isolation: str = "required",
    _wall_s: float = math.inf,
    **columns: Any,
) -> Scores:
    """1.0 where the completion's Python passes every test of its row; with `partial_credit`, the share that it passes.

    A row's tests are statements ("assert f(2) == 4") or {"input": ..., "output": ...} pairs, one or
    a list of them, perhaps as JSON (sandbox.py says how far to trust each kind); without any, None.
    The code runs in a limited process, one for each pair and one for all statements: it can start
    threads but no process, and write only to a small folder. Where it cannot be shut in, this
    raises and does not run it, unless `isolation` is "none": then only time and memory are limited.
    `time_s` is for all of a completion's tests, start-up not counted; what they do not reach has
    failed: an endless loop is wrong, not unknown. So has what they do not reach within `_wall_s`,
    start-up counted: a second under reward_pool.timeout_s, of which each pair takes 0.1 to 0.3 s.
    """
    used: list[float] = []
    scores, limits = Scores(), Limits(time_s, int(memory_mib), isolation, used.append)
    for completion, given in zip(completions, columns[tests_column], strict=True):
        if not (tests := parse_tests(given)):
            scores.append(None)
            continue
        used.clear()
        code, wall_end = python_code(completion_text(completion)), time.monotonic() + _wall_s
        statements = [test for test in tests if isinstance(test, str)]
        passed = sum(passes_statements(code, statements, limits)) if statements else 0
        pairs = (test for test in tests if isinstance(test, dict))
        for num_before, pair in enumerate(pairs, start=len(statements)):
            left_s = min(time_s - sum(used), wall_end - time.monotonic())
            if left_s <= 0 or (not partial_credit and passed < num_before):
                break  # lost already
            own = dataclasses.replace(limits, time_s=left_s)
            passed += passes_program_test(code, str(pair["input"]), str(pair["output"]), own)
        scores.append(passed / len(tests) if partial_credit else float(passed == len(tests)))
    return scores


def python_code(text: str) -> str:
    """The last fenced block of Python in `text`, else its last fenced block without a language,
    else all of it."""
    blocks, opened = (
        dict[str, str](),
        None,
    )  # by language, the last one of each; a line at a time: no text takes long
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if opened is None:
            if (fence := re.match(r"[ \t]*```[ \t]*(\w*)", line)) is not None:
                opened = number + 1, fence[1].lower()
        elif line.strip(" \t") == "```":
            language = "python" if opened[1] in ("python", "py", "python3") else opened[1]
            blocks[language], opened = (
                "".join(f"{own}\n" for own in lines[opened[0] : number]),
                None,
            )
    return blocks.get("python", blocks.get("", text))


def parse_tests(given: Any) -> list[str | dict[str, Any]]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return [given] if given.strip() else []
    tests = given if isinstance(given, list) else [] if given is None else [given]
    for test in tests:
        if not (
            isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys())
        ):
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


# The final answer of a completion.


def final_answer(text: str) -> str:
    r"""What a completion answers, for a vote; as text, so that 1/2 and 0.5 are two.

    The last whole \boxed{...}, else what follows the last "####", else the last
    <answer>...</answer>, else all of it.
    """
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip()
    _, marker, after = text.rpartition("####")
    if marker:
        return after.strip()
    inside = tagged(text, "answer")
    return text.strip() if inside is None else inside


def last_boxed(text: str) -> str | None:
    r"""Inside the \boxed{...} that closes last. One pass: a completion may repeat an unclosed one a
    thousand times."""
    opened: list[
        int | None
    ] = []  # where the inside of each open bracket begins; None: an ordinary bracket
    last = None
    for token in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            opened.append(None)
        elif token[0] != "}":
            if token[0].startswith("\\boxed"):
                opened.append(token.end())
        elif opened:
            start = opened.pop()
            if start is not None:
                last = text[start : token.start()]
    return last
