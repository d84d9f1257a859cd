"""This module runs model-written Python in a limited process (jail.py) and judges it by given
tests.

A `Jail` is one such process over one piece of code. A `Session` is a jail whose interpreter
(cells.py) is kept for several pieces of code. The functions `passes_program_test` and
`passes_statements` give verdicts. The basis of a verdict depends on the kind of test:

- {"input": text, "output": text}: each test has a process of its own. The expected output never
  enters the process: what the code printed is compared here.
- `assert EXPRESSION == LITERAL` (either way round; for True or False, the expression must call a
  function of the code): only the expression enters the process, its value comes out as plain data
  and is compared here. An object that claims to equal everything, a patched builtin, a printed
  success or an early exit gain nothing.
- Any other statement (`assert abs(f(2) - 1.4) < 1e-3`, `check(f)`) is judged inside, by the
  interpreter in which the code has run. The statement arrives after the code has run, together
  with a secret that comes back if nothing was raised, and with Python's own builtins. Code that
  returns objects with forged comparisons, patches a library that the test uses, or digs the secret
  out of the interpreter's frames can still cheat: where that matters, write the first two kinds.

A kept interpreter is no way out of the jail: the limits of the jail hold for all pieces of code
together. Between two pieces the interpreter may hold on to memory, threads and CPU time, up to
these limits. It may forge its own answers, which only the author of the code ever sees.
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
import shutil
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from grpo_spmd.files import hold_standard_streams

# Seconds for the interpreter and the walls to start, before the code's own time begins.
_START_S = 20.0
_MAX_ANSWER_BYTES = 4 << 20
_SCRATCH = "grpo_code_"
_AS = resource.RLIMIT_AS
_JAIL = Path(__file__).with_name("jail.py")
_CELLS = Path(__file__).with_name("cells.py")


class SandboxError(RuntimeError):
    """The sandbox itself failed, and not the code in it, so there is no verdict."""


@dataclass(frozen=True)
class Limits:
    """The limits of one limited process."""

    time_s: float
    """Seconds of wall time and of CPU time; the start of the process is not counted."""
    memory_mib: int
    isolation: str
    """"required" or "none"."""
    tell_time: Callable[[float], Any] = lambda seconds: None
    """Is called with the seconds that each process used of its time."""


@dataclass(frozen=True)
class _Statement:
    """One statement of a test, ready to be sent to the jail."""

    source: str
    expected: Any = None
    is_compared_here: bool = False


def check_isolation() -> list[str]:
    """Returns the names of the walls (isolation mechanisms) that this machine offers.

    Raises SandboxError with the reason where they are not enough.
    """
    with Jail("print(1)", "program", Limits(10.0, 1024, "required"), stdin="") as jail:
        if jail.output() != b"1\n":
            raise SandboxError("a program that prints 1 does not run in the sandbox")
        return jail.walls


def passes_program_test(code: str, stdin: str, expected: str, limits: Limits) -> bool:
    """Returns True if the program ends with code 0 and prints `expected`.

    The program reads `stdin`. White space at line ends does not count.
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
    """Returns for each test whether all its statements hold after `code` has run.

    One process runs all tests, in order, within `limits`.
    """
    parsed = [_parse(test) for test in tests]
    flat = [
        (test, statement, secrets.token_hex(16))
        for test, statements in enumerate(parsed)
        for statement in statements
    ]
    # How many statements of each test hold; those that are not reached do not.
    num_held = Counter[int]()
    with Jail(code, "statements", limits, stdin="") as jail:
        # The secrets and expressions are sent only after the code has run, so that the code cannot
        # read them at import.
        if jail.read() == {"loaded": True}:
            jail.write(
                [
                    {
                        "source": statement.source,
                        "mode": "eval" if statement.is_compared_here else "exec",
                        "secret": secret,
                    }
                    for _, statement, secret in flat
                ]
            )
            for number, (test, statement, secret) in enumerate(flat):
                answer = jail.read()
                if not isinstance(answer, dict) or answer.get("statement") != number:
                    # It ended, ran out of time, or forges answers.
                    break
                if statement.is_compared_here:
                    holds = "value" in answer and _equals(answer["value"], statement.expected)
                else:
                    holds = answer.get("secret") == secret
                num_held[test] += holds
    return [num_held[test] == len(statements) for test, statements in enumerate(parsed)]


def each_within(
    cpu_s: float, function: Callable[[Any], float], arguments: Sequence[Any]
) -> list[float]:
    """Returns `function(argument)` for each argument, computed in a child process.

    The value is 0.0 where the function raises, or takes more than `cpu_s` seconds of CPU time (wall
    time would let a busy machine decide) or 1 GiB of memory. The kernel ends the child even in the
    middle of C code; another child then continues with the next one.
    """
    values: list[float] = []
    while len(values) < len(arguments):
        read_fd, write_fd = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                hard = resource.getrlimit(_AS)[1]
                max_bytes = psutil.Process().memory_info().vms + (1 << 30)
                # An infinite hard limit is -1; modulo 2**64 it becomes the largest number.
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
        # The child was ended in the middle of the next one.
        values += [0.0]
    return values[: len(arguments)]


def _parse(test: str) -> list[_Statement]:
    """Returns the statements of a test. Raises SandboxError for a test that is not Python or
    empty."""
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SandboxError(f"a test is not Python: {error}: {test[:200]!r}") from None
    if not body:
        raise SandboxError(f"a test says nothing: {test[:200]!r}")
    return [_statement(node) for node in body]


def _statement(node: ast.stmt) -> _Statement:
    """Returns how a statement is judged: here by its value, or inside the jail."""
    test = node.test if isinstance(node, ast.Assert) else None
    sides: list[ast.expr] = []
    if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
        sides = [test.left, test.comparators[0]]
    for expression, literal in (sides, sides[::-1]) if sides else ():
        try:
            expected = ast.literal_eval(literal)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        # "(abs(f(2) - 1.4) < 1e-3) == True": True is easily guessed, and abs may be the code's; not
        # so f's own answer.
        call = expression.func if isinstance(expression, ast.Call) else None
        is_own = isinstance(call, ast.Name) and not hasattr(builtins, call.id)
        if not isinstance(expected, complex) and (is_own or not isinstance(expected, bool)):
            return _Statement(ast.unparse(expression), expected, is_compared_here=True)
    return _Statement(ast.unparse(node))


def _equals(encoded: Any, expected: Any) -> bool:
    try:
        # A long answer is refused: its keys may all have the same hash, which takes long.
        is_long = len(json.dumps(encoded)) > 1000 + 40 * len(repr(expected))
        return not is_long and bool(_decode(encoded) == expected)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        # Nothing that encode_value would write.
        return False


def _decode(encoded: Any) -> Any:
    """Returns the value that jail.encode_value wrote. Only plain types come out, whoever wrote the
    text."""
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
    return [line.rstrip() for line in text.rstrip().split("\n")]


class Jail(AbstractContextManager["Jail"]):
    """One limited process that runs one piece of code; it is killed at the end of the block at the
    latest."""

    def __init__(self, code: str, mode: str, limits: Limits, stdin: str) -> None:
        # A killed trainer cannot remove its scratch folders, so the next process does.
        _remove_left_behind()
        # Popen replaces descriptors 0 to 2 in the child: the child's end must not be one of them.
        hold_standard_streams()
        self._scratch = tempfile.mkdtemp(prefix=_SCRATCH)
        # The lock says that a living process will remove the folder.
        self._lock = os.open(self._scratch, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._buffer, self._received = b"", 0
        self._stdin = tempfile.TemporaryFile()  # noqa: SIM115
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115
        self._stdin.write(stdin.encode(errors="surrogatepass"))
        self._stdin.seek(0)
        self._connection, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
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
            # The first deadline covers the start alone. The code's own clock begins below, when the
            # walls stand.
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
            # No code has run yet: this is our own message.
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
        self._tell_time(time.monotonic() - self._began)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # The group has ended, or its leader is gone.
            self._process.kill()
        self._process.wait()
        for file in (self._connection, self._stdin, self._stdout):
            file.close()
        _remove(self._scratch)
        os.close(self._lock)

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def write(self, message: Any) -> None:
        # An OSError means that the process has ended; the next read reports it as None.
        with suppress(OSError):
            self._connection.settimeout(self._remaining_s())
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Any:
        """Returns the next message, or None if none came in time, or if it is too long or not
        JSON."""
        while b"\n" not in self._buffer:
            try:
                self._connection.settimeout(self._remaining_s())
                chunk = self._connection.recv(1 << 16)
            except OSError:
                return None
            # The bound is on all bytes received, so that code cannot fill the trainer's memory line
            # by line.
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

        Returns None if the process did not end with code 0 in time.
        """
        try:
            code = self._process.wait(self._remaining_s())
        except subprocess.TimeoutExpired:
            return None
        self._stdout.seek(0)
        return self._stdout.read() if code == 0 else None


def _remove(scratch: str | Path) -> None:
    """Removes a scratch folder.

    Without namespaces the code may leave folders that are too deep for Python, unreadable, or very
    many. Then a shell removes them, and no verdict waits longer than a second for that.
    """
    with suppress(RecursionError):
        shutil.rmtree(scratch, ignore_errors=True)
    if os.path.lexists(scratch):
        command = ["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', scratch]
        with suppress(subprocess.TimeoutExpired):
            subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True).wait(1.0)


@functools.cache
def _remove_left_behind() -> None:
    """Removes scratch folders of processes that were killed before they could remove them.

    No living process holds the locks of these folders.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        # The folder may be another user's, or just removed.
        with suppress(OSError):
            # A folder this young may not be locked yet by its owner.
            if folder.lstat().st_mtime > time.time() - 5.0:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            os.close(lock)


def _site() -> list[str]:
    """Returns the folders of installed packages: code may use numpy if the trainer has it."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _readable() -> list[str]:
    """Returns the paths that code must read in order to run at all.

    These are Python's library, installed packages and the system's libraries.
    """
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return [path for path in dict.fromkeys([*library, *_site(), *system]) if os.path.exists(path)]


class _CellAnswer(msgspec.Struct):
    """The answer of cells.run_cells, or of code that forges it."""

    number: int
    printed: str
    num_cut: int
    error: str


class Session(Jail):
    """One interpreter in the jail that is kept for several pieces of model-written code.

    `limits.time_s` is the CPU time of all pieces together. Raises SandboxError where code cannot be
    isolated.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(_CELLS.read_text(encoding="utf-8"), "cells", limits, stdin="")
        self._number = 0

    def run(self, code: str, time_s: float, max_chars: int) -> str | None:
        """Runs `code` and returns what it printed and its error, at most about `max_chars`
        characters.

        A note says how many characters were cut. Returns None if the code ended the interpreter or
        took more than `time_s` seconds: then there is no interpreter to go on with.
        """
        self._deadline, self._received = time.monotonic() + time_s, 0
        self._number += 1
        self.write({"code": code, "number": self._number, "limit": max_chars})
        # The number tells this call's answer from an answer that earlier code forged in advance.
        try:
            answer = msgspec.convert(self.read(), _CellAnswer)
        except ValueError:
            return None
        if answer.number != self._number:
            return None
        cut = answer.num_cut
        note = f"\n... [{cut:,} more characters were cut]\n" if cut > 0 else ""
        return f"{answer.printed[:max_chars]}{note}{answer.error[: max_chars + 100]}"
