"""Model-written Python against given tests: starts the limited process (jail.py) and judges.

What the verdict rests on, by the kind of test:
* {"input": text, "output": text}: a process for each. The expected output never enters it: what the
code printed is
  compared here.
* `assert EXPRESSION == LITERAL` (either way round; for True or False, the expression must call a
function of the code):
  only the expression goes in, its value comes out as plain data and is compared here. An object
  that claims to equal everything, a patched builtin, a printed success or an early exit gain
  nothing.
* Any other statement (`assert abs(f(2) - 1.4) < 1e-3`, `check(f)`) is judged inside, by the
interpreter that the code
  has run in. It arrives after the code has run, with a secret of its own that comes back if nothing
  was raised, and with Python's own builtins. Code that returns objects with forged comparisons,
  patches a library that the test uses, or digs the secret out of the interpreter's frames can still
  cheat: where that matters, write the first two kinds.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

_START_S = 20.0  # for the interpreter and the walls, before the code's own time begins
_MAX_ANSWER_BYTES = 4 << 20
_SCRATCH = "grpo_code_"
_AS = resource.RLIMIT_AS
_JAIL = Path(__file__).with_name("jail.py")


class SandboxError(RuntimeError):
    """The sandbox, not the code in it, failed: no verdict."""


@dataclass(frozen=True)
class Limits:
    time_s: float  # of one process, wall time and CPU time; start-up is not counted
    memory_mib: int
    isolation: str  # "required" or "none"
    tell_time: Callable[[float], Any] = lambda seconds: (
        None
    )  # gets what each process used of its time


@dataclass(frozen=True)
class _Statement:
    source: str
    expected: Any = None
    is_compared_here: bool = False


def check_isolation() -> list[str]:
    """Returns the walls that this machine gives, by name.

    Raises SandboxError with the reason where they are not enough.
    """
    with Jail("print(1)", "program", Limits(10.0, 1024, "required"), stdin="") as jail:
        if jail.output() != b"1\n":
            raise SandboxError("a program that prints 1 does not run in the sandbox")
        return jail.walls


def passes_program_test(code: str, stdin: str, expected: str, limits: Limits) -> bool:
    """Returns True if the program ends with code 0 and prints `expected`.

    It is given `stdin`. White space at line ends does not count.
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
    """Returns for each test whether all its statements hold after `code`.

    One process runs all, in order, within `limits`.
    """
    parsed = [_parse(test) for test in tests]
    flat = [(statement, secrets.token_hex(16)) for statements in parsed for statement in statements]
    verdicts = [False] * len(flat)
    with Jail(code, "statements", limits, stdin="") as jail:
        if jail.read() == {"loaded": True}:
            jail.write(
                [
                    {"value": s.source} if s.is_compared_here else {"run": s.source, "secret": x}
                    for s, x in flat
                ]
            )
            for number, (statement, secret) in enumerate(flat):
                answer = jail.read()
                if not isinstance(answer, dict) or answer.get("statement") != number:
                    # It ended, ran out of time, or forges answers.
                    break
                if statement.is_compared_here:
                    verdicts[number] = "value" in answer and _equals(
                        answer["value"], statement.expected
                    )
                else:
                    verdicts[number] = answer.get("secret") == secret
    results = iter(
        verdicts
    )  # each test takes its list: `all` alone would leave some for the next one
    return [all(list(islice(results, len(statements)))) for statements in parsed]


def each_within(cpu_s: float, function: Callable[[int], float], count: int) -> list[float]:
    """Returns `function(i)` for each i < `count`, computed in a child process.

    It is 0.0 where the function raises, or takes more than `cpu_s` of CPU time (a busy machine must
    not decide) or 1 GiB of memory. The kernel ends the child in whatever C code it is; another
    child goes on.
    """
    values: list[float] = []
    while len(values) < count:
        read_fd, write_fd = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                pages, hard = (
                    int(Path("/proc/self/statm").read_text().split()[0]),
                    resource.getrlimit(_AS)[1],
                )
                max_bytes = pages * resource.getpagesize() + (1 << 30)
                resource.setrlimit(_AS, (min(max_bytes, hard % 2**64), hard))  # infinity is -1
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                for number in range(len(values), count):
                    signal.setitimer(signal.ITIMER_PROF, cpu_s)
                    os.write(write_fd, struct.pack("d", function(number)))
            finally:
                os._exit(0)
        os.close(write_fd)
        with open(read_fd, "rb") as pipe:
            values += [value for (value,) in struct.iter_unpack("d", pipe.read())]
        os.waitpid(pid, 0)
        values += [0.0] if len(values) < count else []
    return values


def _parse(test: str) -> list[_Statement]:
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SandboxError(f"a test is not Python: {error}: {test[:200]!r}") from None
    if not body:
        raise SandboxError(f"a test says nothing: {test[:200]!r}")
    return [_statement(node) for node in body]


def _statement(node: ast.stmt) -> _Statement:
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
        is_long = len(json.dumps(encoded)) > 1000 + 40 * len(
            repr(expected)
        )  # perhaps of keys that all collide
        return not is_long and bool(_decode(encoded) == expected)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        # Nothing that encode_value would write.
        return False


def _decode(encoded: Any) -> Any:
    """Returns what jail.encode_value wrote: plain types only, whoever wrote it."""
    tag, content = encoded
    match tag:
        case "c" if content is None or isinstance(content, bool):
            return content
        case "s" if isinstance(content, str):
            return content
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
    """One limited process over one piece of code, killed at the end of the block at the latest."""

    def __init__(self, code: str, mode: str, limits: Limits, stdin: str) -> None:
        _remove_left_behind()
        self._scratch = tempfile.mkdtemp(prefix=_SCRATCH)
        # Says that somebody is there to remove it.
        self._lock = os.open(self._scratch, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._buffer, self._received = b"", 0
        self._stdin = tempfile.TemporaryFile()  # noqa: SIM115
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115
        self._stdin.write(stdin.encode(errors="surrogatepass"))
        self._stdin.seek(0)
        self._connection, pair = socket.socketpair()
        with (
            pair,
            socket.socket(fileno=fcntl.fcntl(pair, fcntl.F_DUPFD_CLOEXEC, 3)) as theirs,
        ):  # 0 to 2 may be closed
            fd, out = theirs.fileno(), self._stdout if mode == "program" else subprocess.DEVNULL
            command = [sys.executable, "-I", "-S", "-X", "utf8", str(_JAIL), str(fd)]
            options: dict[str, Any] = {
                "cwd": self._scratch,
                "env": {},
                "pass_fds": [fd],
                "start_new_session": True,
            }
            self._process = subprocess.Popen(
                command, stdin=self._stdin, stdout=out, stderr=subprocess.DEVNULL, **options
            )
        try:
            self._tell_time, self._began = limits.tell_time, time.monotonic()
            self._deadline = self._began + _START_S
            bounds = {"memory_bytes": limits.memory_mib << 20, "cpu_s": int(limits.time_s) + 1}
            folders = {"readable": _readable(), "scratch": self._scratch, "site": _site()}
            self.write(
                {"code": code, "mode": mode, "isolation": limits.isolation, **folders, **bounds}
            )
            answer = self.read()
            if not isinstance(answer, dict) or "walls" not in answer:
                reason = (
                    answer.get("refused")
                    if isinstance(answer, dict)
                    else "its process did not start"
                )
                raise SandboxError(
                    f"model-written code cannot be isolated on this machine, and is not run: "
                    f"{reason}"
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
        except (ProcessLookupError, PermissionError):  # it has ended, or died with its leader
            self._process.kill()
        self._process.wait()
        for file in (self._connection, self._stdin, self._stdout):
            file.close()
        _remove(self._scratch)
        os.close(self._lock)

    def write(self, message: Any) -> None:
        # It has ended: the next read says so.
        with suppress(OSError):
            self._connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Any:
        """Returns the next message; None if none came in time, it is too long, or is not JSON."""
        while b"\n" not in self._buffer:
            try:
                self._connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
                chunk = self._connection.recv(1 << 16)
            except OSError:
                return None
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
        """Waits for the end and returns what was printed.

        None if it did not end with code 0 in time.
        """
        try:
            code = self._process.wait(max(self._deadline - time.monotonic(), 0.001))
        except subprocess.TimeoutExpired:
            return None
        self._stdout.seek(0)
        return self._stdout.read() if code == 0 else None


def _remove(scratch: str | Path) -> None:
    """Removes a scratch folder.

    Without namespaces code may leave folders too deep for Python, closed, or many: no verdict waits
    for them.
    """
    with suppress(RecursionError):
        shutil.rmtree(scratch, ignore_errors=True)
    if os.path.lexists(scratch):
        command = ["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', scratch]
        with suppress(subprocess.TimeoutExpired):
            subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True).wait(1.0)


@functools.cache
def _remove_left_behind() -> None:
    """Removes scratch folders whose processes were killed before they could do it.

    Nobody holds the locks of these.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        # Another user's, or just removed.
        with suppress(OSError):
            # Perhaps not locked yet.
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
    """Returns what code must read in order to run at all.

    That is Python's library, installed packages and the system's libraries.
    """
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return [path for path in dict.fromkeys([*library, *_site(), *system]) if os.path.exists(path)]


# One interpreter in the jail that is kept for several pieces of model-written code.
#
# That it is kept is no way out of the jail: its walls are those of one piece of code, and stand for
# all. It may hold on to memory, threads and CPU time between two pieces, up to the limits of the
# jail, and may forge its own answers, which are only ever shown to who wrote the code.


_CELLS = Path(__file__).with_name("cells.py")


class Session(Jail):
    """`limits.time_s` is the CPU time of all pieces together. Raises SandboxError where code cannot
    be shut in."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(_CELLS.read_text(encoding="utf-8"), "cells", limits, stdin="")
        self._number = 0

    def run(self, code: str, time_s: float, max_chars: int) -> str | None:
        """Returns what `code` printed and its error, at most about `max_chars` characters.

        A note says how much more was cut. None if the code ended the interpreter or took over
        `time_s` seconds: there is none to go on with.
        """
        self._deadline, self._received = time.monotonic() + time_s, 0
        self._number += 1
        self.write({"code": code, "number": self._number, "limit": max_chars})
        answer = self.read()
        if not isinstance(answer, dict) or answer.get("number") != self._number:
            return None
        printed, error, num_cut = answer.get("printed"), answer.get("error"), answer.get("num_cut")
        if not (isinstance(printed, str) and isinstance(error, str) and isinstance(num_cut, int)):
            return None
        note = f"\n... [{num_cut:,} more characters were cut]\n" if num_cut > 0 else ""
        return f"{printed[:max_chars]}{note}{error[: max_chars + 100]}"
