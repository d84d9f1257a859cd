"""This module runs pieces of code one after the other in one interpreter inside the jail.

As in a notebook, a name that one piece defines exists for the next one. sandbox.py sends this file
into the jail as text, so it uses the standard library alone.
"""

from __future__ import annotations

import ast
import io
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any


class Head(io.TextIOBase):
    """Keeps the first `limit` characters that are written and counts the others, so that endless
    printing costs no memory."""

    def __init__(self, limit: int) -> None:
        self._parts, self._room, self.num_cut = list[str](), limit, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        head = text[: self._room]
        if head:
            self._parts.append(head)
        self._room -= len(head)
        self.num_cut += len(text) - len(head)
        return len(text)

    def getvalue(self) -> str:
        return "".join(self._parts)


def run_cells(read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Answers each message {"code", "number", "limit"} with the output of the code, the value of
    its last expression (as in a notebook), and its error."""
    module = types.ModuleType("__main__")
    # Where classes of the code say they are from.
    sys.modules["__main__"] = module
    while True:
        job = read()
        out = Head(job["limit"])
        sys.stdout = sys.stderr = out
        error = _run(job["code"], f"<call {job['number']}>", module.__dict__)
        limit = job["limit"] // 2
        # The end of an error says which one it is.
        cut = len(error) - limit
        error = f"... [{cut:,} characters left out]\n{error[-limit:]}" if cut > 0 else error
        write(
            {
                "number": job["number"],
                "printed": out.getvalue(),
                "num_cut": out.num_cut,
                "error": error,
            }
        )


def _run(code: str, name: str, scope: dict[str, Any]) -> str:
    """Runs one piece of code. Returns its error as Python would print it, or "" without an
    error."""
    try:
        body = ast.parse(code, name).body
        # The traceback shows the lines of the code from here.
        linecache.cache[name] = (
            len(code),
            None,
            code.splitlines(keepends=True),
            name,
        )
        last_expression = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        # FunctionType runs a code object in a given scope, as exec does, and gives back an
        # expression's value.
        types.FunctionType(compile(ast.Module(body, []), name, "exec"), scope)()
        if isinstance(last_expression, ast.Expr):
            value = types.FunctionType(
                compile(ast.Expression(last_expression.value), name, "eval"), scope
            )()
            if value is not None:
                print(repr(value))
    except BaseException as error:
        # SystemExit comes here too: the interpreter stays for the next call.
        try:
            frames = error.__traceback__
            # The outer frames are those of this file, and say nothing about the code.
            while frames is not None and frames.tb_frame.f_code.co_filename != name:
                frames = frames.tb_next
            return "".join(traceback.format_exception(type(error), error, frames, limit=20))
        except BaseException:
            # The error cannot even be printed.
            return f"{type(error).__name__}\n"
    return ""
