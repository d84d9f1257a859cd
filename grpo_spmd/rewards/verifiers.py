"""The shipped rewards. Each scores a list of completions; 1.0 is right, 0.0 is wrong, None is "this row has nothing to compare with"."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Completion = str | list[dict[str, Any]]


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the completion, stripped of white space, is the column `answer`."""
    return [None if a is None else float(completion_text(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def matches_format(completions: Sequence[Completion], *, pattern: str, **_: Any) -> list[float | None]:
    """1.0 where the regular expression `pattern` matches the whole completion ("." also matches a newline)."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(c)) is not None) for c in completions]


def gsm8k(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the last number of the completion equals the last number of the column `answer` ("... #### 42")."""
    return [
        None if (gold := last_number(str(a))) is None else float(last_number(completion_text(c)) == gold)
        for c, a in zip(completions, answer, strict=True)
    ]


def last_number(text: str) -> Fraction | None:
    """The last number in `text` as an exact fraction; "1,234.50" and "-3" are read, a full stop after a number is not part of it.

    None where there is none, and where its digits are more than Python reads (4300), as a model that repeats itself may write.
    """
    found = re.findall(r"(?<![A-Za-z0-9.])-?\$?\d[\d,]*(?:\.\d+)?", text)
    try:
        return Fraction(re.sub(r"[,$]", "", found[-1])) if found else None
    except ValueError:
        return None


def countdown(
    completions: Sequence[Completion], nums: Sequence[Sequence[int]], target: Sequence[Any], *, answer_tag: str | None = "answer", **_: Any
) -> list[float | None]:
    """1.0 where the equation uses each of `nums` exactly once and reaches `target` (TinyZero's task).

    The equation is what stands in the last <answer>...</answer>; with `answer_tag: null`, the whole completion.
    """
    scores: list[float | None] = []
    for completion, given, goal in zip(completions, nums, target, strict=True):
        if given is None or goal is None:
            scores.append(None)
            continue
        equation = _tagged(completion_text(completion), answer_tag)
        scores.append(0.0 if equation is None else float(_reaches(equation, [int(n) for n in given], Fraction(goal))))
    return scores


def _tagged(text: str, tag: str | None) -> str | None:
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
        value = _value(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return value == target and used == Counter(given)


def _value(node: ast.expr) -> Fraction:
    """Exact value of a tree of integers and + - * / with signs; no name, call or power is ever evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def equal_by_math_verify(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where math-verify finds the completion's final answer equal to the column `answer` (LaTeX or plain).

    A gold answer that math-verify cannot read gives None, and a comparison that runs out of time gives NaN, which is left out and
    counted: neither is taken for wrong. Its deadlines use SIGALRM, which works on the main thread alone; elsewhere this raises.
    """
    import threading

    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify's deadlines need the main thread (signal.alarm); call this reward there")
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        # A bare "x^2" is prose to the parser; boxed it is one expression.
        parsed_gold = [] if gold is None else parse(f"\\boxed{{{gold}}}") or parse(str(gold))
        if not parsed_gold:
            scores.append(None)
            continue
        try:
            parsed = parse(completion_text(completion), raise_on_error=True)
            scores.append(float(verify(parsed_gold, parsed, raise_on_error=True)))
        except TimeoutException:
            scores.append(float("nan"))
        except Exception:  # sympy choked on one of several readings of a strange completion: is any other one equal?
            scores.append(float(verify(parsed_gold, parse(completion_text(completion)))))
    return scores


SHIPPED: dict[str, Callable[..., Any]] = {
    "countdown": countdown,
    "exact": exact,
    "format": matches_format,
    "gsm8k": gsm8k,
    "math": equal_by_math_verify,
}
