"""The final answer of a completion."""

from __future__ import annotations

import re

from grpo_spmd.rewards.verifiers import tagged


def final_answer(text: str) -> str:
    r"""What a completion answers, for a vote; as text, so that 1/2 and 0.5 are two.

    The last whole \boxed{...}, else what follows the last "####", else the last <answer>...</answer>, else all of it.
    """
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip()
    _, marker, after = text.rpartition("####")
    if marker:
        return after.strip()
    inside = tagged(text, "answer")
    return text.strip() if inside is None else inside


def last_boxed(text: str) -> str | None:
    r"""Inside the \boxed{...} that closes last. One pass: a completion may repeat an unclosed one a thousand times."""
    opened: list[int | None] = []  # where the inside of each open bracket begins; None: an ordinary bracket
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
