"""This module has the tools and environments that the config may name without a file.

They are `python` (a tool that runs the policy's code in the sandbox and keeps its variables for the
next call), `countdown` (a game: reach a target by arithmetic with some numbers) and `search:CORPUS`
(a tool that ranks the passages of a local corpus by BM25; its index is a full-text index of sqlite,
made once for each corpus on each host). The docstrings of tool methods are sent to the policy as
the tools' descriptions.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.cache import cache_folders, digest_of, entry_name, read_note, write_note
from grpo_spmd.files import UntrustedError, open_regular, sync_path
from grpo_spmd.rewards import verifiers
from grpo_spmd.rewards.sandbox.sandbox import Limits, SandboxError, Session, check_isolation

Factory = Callable[[], Any]

# Limits of the tool `python`, and of an expression in `countdown`.
_CALL_S = 8.0
_EPISODE_CPU_S = 120.0
_MEMORY_MIB = 1024
_MAX_CHARS = 8000
_MAX_CODE_CHARS = 100_000
_MAX_EXPRESSION_CHARS = 256
_EXPRESSION = "whole numbers, + - * / and brackets"
# Raise this number with every change of what an index contains.
_FORMAT = 1
# Limits of the tool `search`: passages returned, words of a query, and lengths in characters.
_MAX_RESULTS = 20
_MAX_WORDS = 32
_MAX_WORD_CHARS = 64
_MAX_QUERY_CHARS = 2000
_PASSAGE_CHARS = 2000
_SEARCH_S = 10.0


class SandboxDown(BaseException):
    """Raised if the sandbox itself failed, and not the code in it.

    This is a BaseException, because an Exception would be the tool's result for the policy, as if
    the policy's code had failed.
    """


class PythonTool:
    """The shipped tool `python`: runs the policy's code in the sandbox, with one interpreter for
    each episode.

    The interpreter is started at the first call.
    """

    def __init__(self, isolation: str = "required") -> None:
        """Raises SandboxError if this machine cannot isolate code."""
        if isolation == "required":
            check_sandbox()
        self._limits = Limits(_EPISODE_CPU_S, _MEMORY_MIB, isolation)
        self._session: Session | None = None

    def reset(self, **columns: Any) -> None:
        """Begins a new episode: the variables of the last one are gone."""
        self._end()

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Variables are
        kept between calls.

        Args:
            code: The code to run.

        Returns:
            What was printed, with the error if there was one.
        """
        if not isinstance(code, str):
            raise TypeError(f"code is text, and not {type(code).__name__}")
        if len(code) > _MAX_CODE_CHARS:
            raise ValueError(
                f"the code has {len(code):,} characters, and {_MAX_CODE_CHARS:,} are the most"
            )
        try:
            self._session = self._session or Session(self._limits)
        except (SandboxError, OSError) as error:
            raise SandboxDown(str(error)) from error
        # None means that the interpreter has ended. The next call starts one without variables, so
        # the policy is told that they are gone.
        output = self._session.run(code, _CALL_S, _MAX_CHARS)
        if output is None:
            self._end()
            return (
                f"[ended: over {_CALL_S:g} s or too much memory, or it ended Python; all "
                "variables are gone]"
            )
        return output or "[nothing was printed]"

    def _end(self) -> None:
        """Ends the interpreter of the episode, if one was started."""
        if self._session is not None:
            self._session.__exit__()
            self._session = None


# Raises SandboxError if this machine cannot isolate code. Cached, so that it is checked once for a
# process and its forks.
check_sandbox = functools.cache(check_isolation)


class Countdown:
    """An environment in which each episode is one game of countdown."""

    def reset(self, nums: Sequence[int], target: int, **columns: Any) -> str:
        """Begins a game and returns the task, from the row's columns `nums` and `target`."""
        self._nums = [int(number) for number in nums]
        self._target = int(target)
        if not self._nums:
            raise ValueError("nums is empty: countdown needs numbers to reach the target with")
        self._reward: float | None = None
        numbers = ", ".join(map(str, self._nums))
        return (
            f"Reach {self._target} with the numbers {numbers}, each used exactly once, "
            "and + - * / and brackets. Try with evaluate, then submit one expression."
        )

    def evaluate(self, expression: str) -> str:
        """
        Compute the exact value of an expression.

        Args:
            expression: Whole numbers, + - * / and brackets, such as "(8-3)*4".

        Returns:
            The value, a whole number or a fraction.
        """
        if not isinstance(expression, str) or not re.fullmatch(
            rf"[0-9+\-*/() ]{{1,{_MAX_EXPRESSION_CHARS}}}", expression
        ):
            raise ValueError(
                f"an expression has {_EXPRESSION}, {_MAX_EXPRESSION_CHARS} characters at most"
            )
        try:
            return str(verifiers.evaluate(expression))
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"this is no expression of {_EXPRESSION}") from None

    def submit(self, expression: str) -> str:
        """
        Submit the answer. Only the first one counts.

        Args:
            expression: Uses each of the numbers exactly once and reaches the target.

        Returns:
            Whether it is right.
        """
        if self._reward is not None:
            raise ValueError("an answer has been submitted already")
        text = expression if isinstance(expression, str) else ""
        self._reward = verifiers.countdown([text], [self._nums], [self._target], answer_tag=None)[0]
        return "right" if self._reward == 1.0 else "wrong"

    def get_reward(self) -> float:
        """Returns 1.0 if the submitted answer is right, and 0.0 otherwise."""
        return self._reward or 0.0


def shipped_factory(name: str) -> Factory | None:
    """Returns a function that makes a shipped environment in TRL's form.

    Returns None for a name that is not shipped. Raises ConfigError if the environment lacks
    something that it needs.
    """
    kind, _, path = name.partition(":")
    if kind == "search" and not path.endswith(".py"):
        if not path:
            raise ConfigError(
                "search needs the file to search, with JSON lines of title and text: search:CORPUS"
            )
        return functools.partial(Search, path)
    if name == "python":
        try:
            check_sandbox()
        except SandboxError as error:
            raise ConfigError(f"the tool python: {error}") from None
        return PythonTool
    return {"countdown": Countdown}.get(name)


class Search:
    """A tool that searches a corpus of JSON lines {"title", "text"}. Other keys are ignored."""

    def __init__(self, corpus: str | Path) -> None:
        """Raises ConfigError for a corpus that cannot be read."""
        self._index = index_of(Path(corpus).expanduser())
        self._connection: sqlite3.Connection | None = None

    def reset(self, **columns: Any) -> None:
        """Begins an episode. Nothing is kept between episodes."""

    def search(self, query: str, top_k: int = 3) -> str:
        """
        Search for passages that contain the words of a query, and return the best ones.

        Args:
            query: A few words.
            top_k: How many passages, from 1 to 20.

        Returns:
            The passages, best first, each with its title.
        """
        if not isinstance(query, str) or len(query) > _MAX_QUERY_CHARS:
            raise ValueError(f"query is text of at most {_MAX_QUERY_CHARS:,} characters")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= _MAX_RESULTS:
            raise ValueError(f"top_k is a whole number from 1 to {_MAX_RESULTS}")
        if self._connection is None:
            # Opened at the first search, since a connection does not survive the worker's fork.
            self._connection = sqlite3.connect(
                f"{self._index.absolute().as_uri()}?mode=ro&immutable=1", uri=True
            )
        deadline = time.monotonic() + _SEARCH_S
        self._connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        sql = "select title, text from passages where passages match ? order by rank, rowid limit ?"
        match = match_expression(query)
        try:
            rows = self._connection.execute(sql, (match, top_k)).fetchall() if match else []
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            raise ValueError(f"the search took over {_SEARCH_S:g} s; use rarer words") from None
        passages = [
            f"[{number}] {_shorten(title)}\n{_shorten(text)}"
            for number, (title, text) in enumerate(rows, 1)
        ]
        return "\n\n".join(passages) or "[no passage has any of these words]"


def match_expression(query: str) -> str:
    """Returns an FTS5 expression that matches passages with any of the query's words.

    Each word is quoted and contains no quote, so that nothing in a policy's query is taken for
    FTS5's syntax (NEAR, column filters, prefixes).
    """
    words = dict.fromkeys(word[:_MAX_WORD_CHARS] for word in re.findall(r"\w+", query))
    return " OR ".join(f'"{word}"' for word in list(words)[:_MAX_WORDS])


def index_of(corpus: Path) -> Path:
    """Returns the path of a corpus's index in this host's cache.

    If there is no index, one process makes it while the others wait. Raises ConfigError for a
    corpus that is missing or malformed, and if no folder has room.
    """
    try:
        inputs = [_FORMAT, digest_of(corpus), sqlite3.sqlite_version]
        num_bytes = corpus.stat().st_size
    except OSError as error:
        raise ConfigError(f"search: cannot read the corpus {corpus}: {error.strerror}") from None
    name = f"{entry_name('search', inputs)}.sqlite"
    folders = cache_folders()
    # An index in any folder is used, even where there would be no room for a new one.
    for folder in folders:
        if _is_complete(folder / name):
            return folder / name
    # An index is about as large as its corpus, and sqlite needs room while it merges.
    needed_bytes = 4 * num_bytes
    for folder in folders:
        if shutil.disk_usage(folder).free > needed_bytes + (1 << 20):
            with open(folder / f"{name}.lock", "ab") as lock:
                # The kernel releases the lock even if this process is killed.
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another process may have made the index while this one waited for the lock.
                if not _is_complete(folder / name):
                    _make_index(corpus, folder / name)
            return folder / name
    raise ConfigError(
        f"search: no folder takes the index of {corpus} (about {needed_bytes / 1e9:.1f} GB): set "
        "XDG_CACHE_HOME to a folder of this host with more room"
    )


def _is_complete(index: Path) -> bool:
    """Returns whether an index of a corpus exists and has not changed since it was completed."""
    with contextlib.suppress(OSError, UntrustedError), open_regular(index) as file:
        if read_note(index.parent, index.stem, os.fstat(file.fileno())) is not None:
            # Marks the index as used: the cache removes what was not used for a month.
            os.utime(index.with_suffix(".note"))
            return True
    return False


def _make_index(corpus: Path, index: Path) -> None:
    """Makes the full-text index of a corpus as a temporary file, and renames it when it is
    complete."""
    # The caller holds the index's lock, so a file that is here was left by a killed process.
    temporary = index.with_name(f"{index.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(temporary)) as connection:
            # A crash only loses the temporary file, so sqlite needs no journal.
            connection.executescript("pragma journal_mode=off; pragma synchronous=off;")
            connection.execute(
                "create virtual table passages using fts5(title, text, tokenize='unicode61')"
            )
            connection.executemany("insert into passages values (?, ?)", _passages(corpus))
            connection.execute("insert into passages(passages) values ('optimize')")
            connection.commit()
        # Otherwise a power cut could leave a file of the right size without its content.
        sync_path(temporary)
        temporary.rename(index)
        # The note has the file's time stamps, which the rename changes, so it is written last.
        write_note(index.parent, index.stem, os.stat(index), "")
    finally:
        temporary.unlink(missing_ok=True)


def _passages(corpus: Path) -> Iterator[tuple[str, str]]:
    """Yields (title, text) of each line of a corpus. Raises ConfigError with the number of a
    malformed line."""
    num_passages = 0
    with open_regular(corpus, follow=True) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                title = row.get("title", "")
                text = row["text"]
                if not (isinstance(title, str) and isinstance(text, str)):
                    raise TypeError
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                rule = 'a line is a JSON object like {"title": "...", "text": "..."}'
                raise ConfigError(f"{corpus}:{number}: {rule}; got {line[:80]!r}") from None
            num_passages += 1
            yield _valid_unicode(title), _valid_unicode(text)
    if not num_passages:
        raise ConfigError(f"search: the corpus {corpus} has no passage")


def _valid_unicode(text: str) -> str:
    """Returns a text with "?" in the place of single surrogates, which sqlite cannot store."""
    return text.encode(errors="replace").decode()


def _shorten(text: str) -> str:
    """Returns the first _PASSAGE_CHARS characters of a text, with a note of how many were cut."""
    num_cut = len(text) - _PASSAGE_CHARS
    if num_cut <= 0:
        return text
    return f"{text[:_PASSAGE_CHARS]}... [{num_cut:,} more characters were cut]"
