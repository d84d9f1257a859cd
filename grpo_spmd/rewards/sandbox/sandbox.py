"""This module runs model-written Python in a limited process (jail.py) and judges it by given
tests.

A `Jail` is one such process that runs one piece of code. A `Session` is a jail whose interpreter
is kept for several pieces of code. The functions `passes_program_test` and
`passes_statements` give verdicts. How a test is judged depends on its kind:

- {"input": text, "output": text}: each test runs in its own process. The expected output never
  enters the process; what the code printed is compared in the trainer's process.
- `assert EXPRESSION == LITERAL` (either way round; if the literal is True or False, the expression
  must call a function of the code): only the expression enters the process. Its value comes out as
  plain data and is compared in the trainer's process. The code gains nothing by an object that
  claims to equal everything, a patched builtin, a printed success or an early exit.
- Any other statement (`assert abs(f(2) - 1.4) < 1e-3`, `check(f)`) is judged inside the jail, by
  the interpreter that has run the code. The statement arrives only after the code has run, and
  sees Python's original builtins. With it comes a secret, which is sent back if nothing was raised.
  Code can still cheat if it returns objects with forged comparisons, patches a library that the
  test uses, or digs the secret out of the interpreter's frames. Where that matters, write tests of
  the first two kinds.

Keeping an interpreter does not weaken the jail: its limits hold for all pieces of code together.
Between two pieces the interpreter may keep memory and threads and use CPU time, up to these limits.
The code may forge the interpreter's answers, but only the author of the code ever sees them.
"""

from __future__ import annotations

import ast
import builtins
import fcntl
import functools
import json
import os
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from grpo_spmd.files import hold_standard_streams

# Seconds in which the interpreter must start and isolate itself, before the code's own time begins.
_START_S = 20.0
_MAX_ANSWER_BYTES = 4 << 20
# The prefix of scratch folders.
_SCRATCH = "grpo_code_"
_AS = resource.RLIMIT_AS
_JAIL = Path(__file__).with_name("jail.py")


class SandboxError(RuntimeError):
    """Raised if the sandbox itself failed, rather than the code in it, so there is no verdict."""


@dataclass(frozen=True)
class Limits:
    """The limits of one `Jail`, a process in which model-written code runs."""

    time_s: float
    """Seconds of wall time and of CPU time, not counting the start of the process."""
    memory_mib: int
    isolation: str
    """"required", or "none": only resource limits, no protection from the code."""
    tell_time: Callable[[float], Any] = lambda seconds: None
    """Called at the end of each process with the wall seconds that it took after its start."""


@dataclass(frozen=True)
class _Statement:
    """One statement of a test, with what decides whether it holds."""

    source: str
    expected: Any = None
    # If True, `source` is an expression whose value is compared with `expected` in this process;
    # else `source` is a statement that is judged in the jail.
    is_compared_here: bool = False
    secret: str = field(default_factory=secrets.token_hex)


def check_isolation() -> list[str]:
    """Returns the names of the walls (isolation mechanisms) that work on this machine.

    Raises SandboxError with the reason if they cannot isolate code.
    """
    with Jail("print(1)", "program", Limits(10.0, 1024, "required")) as jail:
        if jail.output() != b"1\n":
            raise SandboxError("a program that prints 1 does not run in the sandbox")
        return jail.walls


def passes_program_test(code: str, stdin: str, expected: str, limits: Limits) -> bool:
    """Returns True if the program ends with code 0 and prints `expected`.

    The program gets `stdin` as its standard input. White space at the ends of lines does not count.
    """
    with Jail(code, "program", limits, stdin) as jail:
        output = jail.output()
    printed, end = (output or b"").decode(errors="replace").rstrip(), expected.rstrip()
    return (
        output is not None
        and printed.count("\n") == end.count("\n")
        and _lines(printed) == _lines(end)
    )


def passes_statements(code: str, tests: Sequence[str], limits: Limits) -> list[bool]:
    """Returns for each test True if all its statements hold after `code` has run.

    One process runs `code` and all tests, in order, within `limits`. If it ends early or its time
    is up, the statements that it did not reach count as failed. Raises SandboxError for a test that
    is not Python.
    """
    parsed = [_parse(test) for test in tests]
    flat = [(test, statement) for test, statements in enumerate(parsed) for statement in statements]
    # By index of a test: how many of its statements hold.
    num_held = Counter[int]()
    with Jail(code, "statements", limits) as jail:
        # The secrets and expressions are sent only after the code has run, so that the code cannot
        # read them at import.
        if jail.read() == {"loaded": True}:
            jail.write(
                [
                    {
                        "source": statement.source,
                        "mode": "eval" if statement.is_compared_here else "exec",
                        "secret": statement.secret,
                    }
                    for _, statement in flat
                ]
            )
            for number, (test, statement) in enumerate(flat):
                answer = jail.read()
                if not isinstance(answer, dict) or answer.get("statement") != number:
                    # The process ended, ran out of time, or sent a forged message.
                    break
                if statement.is_compared_here:
                    holds = "value" in answer and _equals(answer["value"], statement.expected)
                else:
                    holds = answer.get("secret") == statement.secret
                num_held[test] += holds
    return [num_held[test] == len(statements) for test, statements in enumerate(parsed)]


def each_within(
    cpu_s: float, function: Callable[[Any], float], arguments: Sequence[Any]
) -> list[float]:
    """Returns `function(argument)` for each argument, computed in a child process.

    The value is 0.0 for an argument for which the function raises, or takes more than 1 GiB of
    memory or `cpu_s` seconds of CPU time (wall time would depend on how busy the machine is). The
    kernel can end the child even in the middle of C code; another child then continues with the
    next argument.
    """
    values: list[float] = []
    while len(values) < len(arguments):
        read_fd, write_fd = os.pipe()
        if (pid := os.fork()) == 0:
            # The child computes the values that are still missing, and writes each to the pipe.
            try:
                hard = resource.getrlimit(_AS)[1]
                max_bytes = psutil.Process().memory_info().vms + (1 << 30)
                # No hard limit is given as -1; modulo 2**64 that becomes the largest number.
                resource.setrlimit(_AS, (min(max_bytes, hard % 2**64), hard))
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                for argument in arguments[len(values) :]:
                    signal.setitimer(signal.ITIMER_PROF, cpu_s)
                    os.write(write_fd, struct.pack("d", function(argument)))
            finally:
                os._exit(0)
        os.close(write_fd)
        with open(read_fd, "rb") as pipe:
            values += [value for (value,) in struct.iter_unpack("d", pipe.read())]
        os.waitpid(pid, 0)
        # The child ended at the next argument. (If it has done all, the last line cuts this value.)
        values += [0.0]
    return values[: len(arguments)]


def _parse(test: str) -> list[_Statement]:
    """Returns the statements of a test. Raises SandboxError if it is not Python, or has none."""
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SandboxError(f"a test is not Python: {error}: {test[:200]!r}") from None
    if not body:
        raise SandboxError(f"a test has no statement: {test[:200]!r}")
    return [_statement(node) for node in body]


def _statement(node: ast.stmt) -> _Statement:
    """Returns a statement of a test as a _Statement, with the decision where it is judged.

    `assert EXPRESSION == LITERAL` is judged in this process, by the expression's value; any other
    statement is judged in the jail.
    """
    test = node.test if isinstance(node, ast.Assert) else None
    sides = []
    if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
        sides = [test.left, test.comparators[0]]
    for expression, literal in (sides, sides[::-1]) if sides else ():
        try:
            expected = ast.literal_eval(literal)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        # A bool is compared here only if a function of the code returns it, as in "f(2) == True".
        # In "(abs(f(2) - 1.4) < 1e-3) == True" the code could replace abs so that this is True.
        call = expression.func if isinstance(expression, ast.Call) else None
        calls_code = isinstance(call, ast.Name) and not hasattr(builtins, call.id)
        if not isinstance(expected, complex) and (calls_code or not isinstance(expected, bool)):
            return _Statement(ast.unparse(expression), expected, is_compared_here=True)
    return _Statement(ast.unparse(node))


def _equals(encoded: Any, expected: Any) -> bool:
    """Returns True if a value that the jail sent (jail.encode_value) equals the expected one."""
    try:
        # Refuse a value that is much longer than expected: a dict of many keys with the same hash
        # would take very long to build.
        is_long = len(json.dumps(encoded)) > 1000 + 40 * len(repr(expected))
        return not is_long and bool(_decode(encoded) == expected)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        # encode_value does not write this, so the code has forged it.
        return False


def _decode(encoded: Any) -> Any:
    """Returns the value that jail.encode_value encoded.

    It has plain types only, even if the code has forged the message.
    """
    if encoded is None or isinstance(encoded, bool | str):
        return encoded
    tag, content = encoded
    match tag:
        case "b":
            return bytes.fromhex(content)
        case "i":
            return int(content, 16)
        case "f":
            return float.fromhex(content)
        case "d":
            return {_decode(key): _decode(value) for key, value in content}
        case "l" | "t" | "e":
            return {"l": list, "t": tuple, "e": set}[tag](_decode(item) for item in content)
    raise ValueError(tag)


def _lines(text: str) -> list[str]:
    """Returns the lines of a text without white space at their ends, for a comparison."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


class Jail(AbstractContextManager["Jail"]):
    """A limited process that runs one piece of code. Leaving its `with` block kills the process."""

    def __init__(self, code: str, mode: str, limits: Limits, stdin: str = "") -> None:
        """Starts the process and waits until it has isolated itself.

        `mode` says what the process does with `code`: "program" runs it as a script, "statements"
        runs tests after it (passes_statements), "cells" is for `Session`. Raises SandboxError if
        the process cannot isolate itself.
        """
        # Remove the scratch folders of trainers that were killed before they could do so.
        _remove_left_behind()
        # Popen replaces descriptors 0 to 2 in the child, so the child's end of the socket must not
        # get one of these numbers.
        hold_standard_streams()
        self._scratch = tempfile.mkdtemp(prefix=_SCRATCH)
        # The lock tells other processes that this one is alive and will remove the folder.
        self._lock = os.open(self._scratch, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._buffer, self._received = b"", 0
        self._stdin = tempfile.TemporaryFile()  # noqa: SIM115
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115
        self._stdin.write(stdin.encode(errors="surrogatepass"))
        self._stdin.seek(0)
        self._connection, child_end = socket.socketpair()
        with child_end:
            fd = child_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_JAIL), str(fd)],
                stdin=self._stdin,
                stdout=self._stdout if mode == "program" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self._scratch,
                env={},
                pass_fds=[fd],
                start_new_session=True,
            )
        try:
            self._tell_time, self._began = limits.tell_time, time.monotonic()
            # This first deadline is for the start only. The code's own time begins below, after the
            # process has isolated itself.
            self._deadline = self._began + _START_S
            self.write(
                {
                    "code": code,
                    "mode": mode,
                    "isolation": limits.isolation,
                    "readable": _readable(),
                    "scratch": self._scratch,
                    "site": _site(),
                    "memory_bytes": limits.memory_mib << 20,
                    "cpu_s": int(limits.time_s) + 1,
                }
            )
            # The code has not run yet, so this message comes from jail.py and can be trusted.
            answer = self.read() or {"refused": "its process did not start"}
            if "refused" in answer:
                raise SandboxError(
                    "model-written code cannot be isolated on this machine, and is not run: "
                    f"{answer['refused']}"
                )
            self.walls: list[str] = answer["walls"]
            self._began = time.monotonic()
            self._deadline = self._began + limits.time_s
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Kills the process and its group, and removes the scratch folder."""
        self._tell_time(time.monotonic() - self._began)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # The process group has ended, or has no leader any more.
            self._process.kill()
        self._process.wait()
        for file in (self._connection, self._stdin, self._stdout):
            file.close()
        _remove(self._scratch)
        os.close(self._lock)

    def _remaining_s(self) -> float:
        """Returns the seconds until the deadline, at least 0.001: a timeout of 0 would make the
        socket non-blocking."""
        return max(self._deadline - time.monotonic(), 0.001)

    def write(self, message: Any) -> None:
        """Sends a message, a JSON value, to the process."""
        # An OSError means that the process has ended; the next read then returns None.
        with suppress(OSError):
            self._connection.settimeout(self._remaining_s())
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Any:
        """Returns the next message of the process.

        Returns None if none came in time, or if it is too long or not JSON.
        """
        while b"\n" not in self._buffer:
            try:
                self._connection.settimeout(self._remaining_s())
                chunk = self._connection.recv(1 << 16)
            except OSError:
                return None
            # The limit is for the sum of all messages, so that the code cannot fill the trainer's
            # memory with many short ones.
            self._received += len(chunk)
            if not chunk or self._received > _MAX_ANSWER_BYTES:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    def output(self) -> bytes | None:
        """Waits for the end of the process and returns what it printed.

        Returns None if the process did not end in time with exit code 0.
        """
        try:
            code = self._process.wait(self._remaining_s())
        except subprocess.TimeoutExpired:
            return None
        self._stdout.seek(0)
        return self._stdout.read() if code == 0 else None


def _remove(scratch: str | Path) -> None:
    """Removes a scratch folder.

    Code that is not isolated may leave folders that are unreadable, nested too deeply for Python,
    or very many. No verdict waits longer than a second; the shell goes on until all are removed.
    """
    command = ["sh", "-c", 'rm -rf "$0" || { chmod -R u+rwx "$0"; rm -rf "$0"; }', scratch]
    with suppress(subprocess.TimeoutExpired):
        subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True).wait(1.0)


@functools.cache
def _remove_left_behind() -> None:
    """Removes scratch folders of processes that were killed before they could remove them.

    These are the folders whose lock no living process holds.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        # The folder may belong to another user, or may have been removed just now.
        with suppress(OSError):
            # The owner of so new a folder may not have locked it yet.
            if folder.lstat().st_mtime > time.time() - 5.0:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            os.close(lock)


def _site() -> list[str]:
    """Returns the folders of installed packages, so that code may import what the trainer has."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _readable() -> list[str]:
    """Returns the paths that Python must be able to read in order to run code.

    These are its standard library, installed packages and the system's libraries.
    """
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return [path for path in dict.fromkeys([*library, *_site(), *system]) if os.path.exists(path)]


class _CellAnswer(msgspec.Struct):
    """The message that jail.py sends after a piece of code. The code may have forged it."""

    number: int
    printed: str
    num_cut: int
    error: str


class Session(Jail):
    """A jail whose interpreter is kept for several pieces of model-written code.

    `limits.time_s` bounds the CPU time of all pieces together. Raises SandboxError if code cannot
    be isolated on this machine.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__("", "cells", limits)
        self._number = 0

    def run(self, code: str, time_s: float, max_chars: int) -> str | None:
        """Runs `code` and returns what it printed and the traceback of its error.

        At most `max_chars` characters of the output are kept, with a note of how many were cut, and
        about half as many of the traceback. Returns None if the code ended the interpreter or took
        more than `time_s` seconds: the session is then of no further use.
        """
        self._deadline, self._received = time.monotonic() + time_s, 0
        self._number += 1
        self.write({"code": code, "number": self._number, "limit": max_chars})
        # By the number, an answer that earlier code has forged in advance is not taken for the
        # answer to this call.
        try:
            answer = msgspec.convert(self.read(), _CellAnswer)
        except ValueError:
            return None
        if answer.number != self._number:
            return None
        cut = answer.num_cut
        note = f"\n... [{cut:,} more characters were cut]\n" if cut > 0 else ""
        return f"{answer.printed[:max_chars]}{note}{answer.error[: max_chars + 100]}"
