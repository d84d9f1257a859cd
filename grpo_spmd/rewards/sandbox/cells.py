"""This module runs several pieces of code, one after the other, in one interpreter inside the jail.

As in a notebook, a name that one piece defines is visible to the next one. sandbox.py sends this
file into the jail as text, so it may import the standard library only.
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
    """A text stream that keeps the first `limit` characters and only counts the rest, so that
    endless printing does not fill the memory."""

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
    """Runs the code of each message that `read` returns and writes what it printed and its error.

    A message has "code", "number" (which the answer repeats) and "limit" (in characters). As in a
    notebook, the value of the code's last expression is printed. Never returns: the trainer kills
    the process.
    """
    module = types.ModuleType("__main__")
    # Classes that the code defines get __module__ = "__main__", which must resolve to this module.
    sys.modules["__main__"] = module
    while True:
        job = read()
        out = Head(job["limit"])
        sys.stdout = sys.stderr = out
        error = _run(job["code"], f"<call {job['number']}>", module.__dict__)
        # The error may be half as long as the output. Its end is kept: the last line of a traceback
        # names the exception.
        limit = job["limit"] // 2
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
    """Runs one piece of code and prints the value of its last expression.

    Returns the traceback as Python would print it, or "" if nothing was raised. `name` stands for
    the file name in the traceback.
    """
    try:
        body = ast.parse(code, name).body
        # Tracebacks take the lines of the code from this cache. The mtime None keeps linecache from
        # dropping the entry because there is no such file.
        linecache.cache[name] = (
            len(code),
            None,
            code.splitlines(keepends=True),
            name,
        )
        last_expression = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        # Calling a function made of a code object runs it with `scope` as its globals, as exec and
        # eval do, and returns the value of an expression.
        types.FunctionType(compile(ast.Module(body, []), name, "exec"), scope)()
        if isinstance(last_expression, ast.Expr):
            value = types.FunctionType(
                compile(ast.Expression(last_expression.value), name, "eval"), scope
            )()
            if value is not None:
                print(repr(value))
    except BaseException as error:
        # SystemExit is caught too: the interpreter is kept for the next piece of code.
        try:
            frames = error.__traceback__
            # The outermost frames belong to this file; leave them out of the traceback.
            while frames is not None and frames.tb_frame.f_code.co_filename != name:
                frames = frames.tb_next
            return "".join(traceback.format_exception(type(error), error, frames, limit=20))
        except BaseException:
            # Formatting the error failed, for instance in its __str__.
            return f"{type(error).__name__}\n"
    return ""
