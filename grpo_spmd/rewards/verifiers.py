"""The shipped rewards. Each scores a list of completions: 1.0 right, 0.0 wrong, None "nothing to compare with"."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

from grpo_spmd.rewards.sandbox.sandbox import Limits, passes_program_test, passes_statements

DEFAULT_TIME_S = 8.0  # of `code`; preflight compares it with the pool's deadline
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
    """1.0 where the regular expression `pattern` matches the whole completion ("." also matches a newline)."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(c)) is not None) for c in completions]


def gsm8k(completions: Completions, answer: Column, **_: Any) -> Scores:
    """1.0 where the last number of the completion equals the last number of the column `answer` ("... #### 42")."""
    pairs = ((completion_text(c), last_number(str(a))) for c, a in zip(completions, answer, strict=True))
    return [None if gold is None else float(last_number(text) == gold) for text, gold in pairs]


def last_number(text: str) -> Fraction | None:
    """The last number in `text` ("1,234.50", "-3"; no full stop after it) as an exact fraction, None where none is."""
    found = re.findall(r"(?<![A-Za-z0-9.])-?\$?\d[\d,]*(?:\.\d+)?", text)
    try:
        return Fraction(re.sub(r"[,$]", "", found[-1])) if found else None
    except ValueError:  # more digits than Python reads (4300): a model that repeats itself may write them
        return None


def countdown(
    completions: Completions, nums: Column, target: Column, *, answer_tag: str | None = "answer", **_: Any
) -> Scores:
    """1.0 where the equation in the last <answer>...</answer> (with `answer_tag: null`, the whole completion) uses each
    of `nums` exactly once and reaches `target` (TinyZero's task).
    """
    scores: Scores = []
    for completion, given, goal in zip(completions, nums, target, strict=True):
        if given is None or goal is None:
            scores.append(None)
            continue
        equation = tagged(completion_text(completion), answer_tag)
        scores.append(float(equation is not None and _reaches(equation, [int(n) for n in given], Fraction(goal))))
    return scores


def tagged(text: str, tag: str | None) -> str | None:
    """What stands in the last `<tag>...</tag>`, stripped, or None; all of the text where `tag` is None."""
    if tag is None:
        return text.strip()
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if opening and closing else None


def _reaches(equation: str, given: Sequence[int], target: Fraction) -> bool:
    equation, equals, result = equation.partition("=")
    if equals and result.strip() != str(target):
        return False
    # Numbers, four operations and brackets. Its length is bounded because parsing nested brackets recurses.
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
    """The exact value of whole numbers, + - * / and brackets. Raises ValueError or SyntaxError for anything else."""
    return _value(ast.parse(equation.strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    """Exact value of a tree of integers and + - * / with signs; no name, call or power is ever evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


_OPERATIONS: dict[type, Callable[..., Fraction]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


def equal_by_math_verify(completions: Completions, answer: Column, **_: Any) -> Scores:
    """1.0 where math-verify finds the completion's final answer equal to the column `answer` (LaTeX or plain).

    A gold answer that it cannot read gives None, and a comparison that runs out of time gives NaN, which is left out
    and counted: neither is taken for wrong. Its deadlines use SIGALRM, for the main thread alone.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify's deadlines need the main thread (signal.alarm); call this reward there")
    scores: Scores = []
    for completion, gold in zip(completions, answer, strict=True):
        # A bare "x^2" is prose to the parser; boxed it is one expression.
        parsed_gold = [] if gold is None else parse(f"\\boxed{{{gold}}}") or parse(str(gold))
        if not parsed_gold:
            scores.append(None)
            continue
        text = completion_text(completion)
        try:
            scores.append(float(verify(parsed_gold, parse(text, raise_on_error=True), raise_on_error=True)))
        except TimeoutException:
            scores.append(float("nan"))
        except Exception:  # sympy choked on one of several readings of a strange completion: is any other one equal?
            scores.append(float(verify(parsed_gold, parse(text))))
    return scores


def run_tests(
    completions: Completions,
    *,
    tests_column: str = "tests",
    partial_credit: bool = False,
    time_s: float = DEFAULT_TIME_S,
    memory_mib: float = 1024,
    isolation: str = "required",
    **columns: Any,
) -> Scores:
    """1.0 where the completion's Python passes every test of its row; with `partial_credit`, the share that it passes.

    A row's tests are statements ("assert f(2) == 4") or {"input": ..., "output": ...} pairs, one or a list of them,
    perhaps as JSON (sandbox.py says how far to trust each kind); without any, None. The code runs in a limited process,
    one for each pair and one for all statements: it can start threads but no process, and write only to a small folder.
    Where it cannot be shut in, this raises and does not run it, unless `isolation` is "none": then only time and memory
    are limited. `time_s` is for all of a completion's tests, start-up not counted; what they do not reach has failed:
    an endless loop is wrong, not unknown. Keep it under reward_pool.timeout_s by 0.1 to 0.3 s for each pair.
    """
    limits = Limits(time_s, int(memory_mib), isolation)
    scores: Scores = []
    for completion, given in zip(completions, columns[tests_column], strict=True):
        if not (tests := _tests(given)):
            scores.append(None)
            continue
        code = python_code(completion_text(completion))
        statements = [test for test in tests if isinstance(test, str)]
        started = time.monotonic()
        passed = sum(passes_statements(code, statements, limits)) if statements else 0
        left_s = time_s - _own_time(started, passed == len(statements))
        pairs = (test for test in tests if isinstance(test, dict))
        for num_before, pair in enumerate(pairs, start=len(statements)):
            if not partial_credit and passed < num_before:
                break  # lost already
            started = time.monotonic()
            own = dataclasses.replace(limits, time_s=left_s)
            ok = left_s > 0 and passes_program_test(code, str(pair["input"]), str(pair["output"]), own)
            left_s -= _own_time(started, ok)
            passed += ok
        scores.append(passed / len(tests) if partial_credit else float(passed == len(tests)))
    return scores


def _own_time(started: float, ended: bool) -> float:
    """Seconds since `started`; of a run that ended well, without what starting the interpreter takes at most."""
    return max(0.0, time.monotonic() - started - (0.5 if ended else 0.0))


def python_code(text: str) -> str:
    """The last fenced block of Python in `text`, else its last fenced block without a language, else all of it."""
    blocks = re.findall(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", text, re.DOTALL | re.MULTILINE)
    for languages in (("python", "py", "python3"), ("",)):
        for language, code in reversed(blocks):
            if language.lower() in languages:
                return str(code)
    return text


def _tests(given: Any) -> list[str | dict[str, Any]]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return [given] if given.strip() else []
    tests = given if isinstance(given, list) else [] if given is None else [given]
    for test in tests:
        if not (isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= test.keys())):
            raise ValueError(f'a test is a statement or {{"input": ..., "output": ...}}; got {str(test)[:200]}')
    return tests


SHIPPED: dict[str, Callable[..., Any]] = {
    "code": run_tests,
    "countdown": countdown,
    "exact": exact,
    "format": matches_format,
    "gsm8k": gsm8k,
    "math": equal_by_math_verify,
}
