"""Search in a local corpus as a tool: sqlite's full-text index, made once for each corpus and host, ranked by BM25."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.cache import cache_folders, digest_of, entry_name
from grpo_spmd.files import open_regular

_FORMAT = 1  # counts up with every change of what an index holds
_MOST_RESULTS, _MAX_WORDS, _MAX_WORD_CHARS, _MAX_QUERY_CHARS = 20, 32, 64, 2000
_PASSAGE_CHARS = 2000
_SEARCH_S = 10.0


class Search:
    """`corpus`: JSON lines of {"title", "text"}; other keys are left alone."""

    def __init__(self, corpus: str | Path) -> None:
        """Raises ConfigError for a corpus that cannot be read."""
        self._index = index_of(Path(corpus).expanduser())
        self._connection: sqlite3.Connection | None = None

    def reset(self, **columns: Any) -> None:
        """Nothing is kept between episodes."""

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
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= _MOST_RESULTS:
            raise ValueError(f"top_k is a whole number from 1 to {_MOST_RESULTS}")
        if (
            self._connection is None
        ):  # in the process that searches: a connection does not survive a fork
            self._connection = sqlite3.connect(
                f"{self._index.absolute().as_uri()}?mode=ro&immutable=1", uri=True
            )
        deadline = time.monotonic() + _SEARCH_S
        self._connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        sql = "select title, text from passages where passages match ? order by rank, rowid limit ?"
        try:
            found = (
                self._connection.execute(sql, (match_of(query), top_k)).fetchall()
                if match_of(query)
                else []
            )
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            raise ValueError(f"the search took over {_SEARCH_S:g} s; use rarer words") from None
        return "\n\n".join(
            f"[{i}] {_shown(title)}\n{_shown(text)}" for i, (title, text) in enumerate(found, 1)
        ) or ("[no passage has any of these words]")


def match_of(query: str) -> str:
    """An expression of FTS5 for passages with any of the query's words. Each is quoted, and has no quote in it: what a
    policy writes is words, never syntax (NEAR, column filters, prefixes)."""
    words = [word[:_MAX_WORD_CHARS] for word in re.findall(r"\w+", query)]
    return " OR ".join(f'"{word}"' for word in list(dict.fromkeys(words))[:_MAX_WORDS])


def index_of(corpus: Path) -> Path:
    """The index of a corpus, in the cache's folder of this host: found, or made while others wait for it. Raises
    ConfigError for a corpus that is not there or not in this form, and where no folder takes the index."""
    try:
        inputs, size = [_FORMAT, digest_of(corpus), sqlite3.sqlite_version], corpus.stat().st_size
    except OSError as error:
        raise ConfigError(f"search: cannot read the corpus {corpus}: {error.strerror}") from None
    name = f"{entry_name('search', inputs)}.sqlite"
    folders = cache_folders()
    for folder in folders:
        if _is_whole(folder / name):
            return folder / name
    for folder in folders:
        if shutil.disk_usage(folder).free > 4 * size + (1 << 20):
            lock = os.open(
                folder / f"{name}.lock",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
            try:
                fcntl.flock(
                    lock, fcntl.LOCK_EX
                )  # let go of by the kernel, also of one that is killed
                if not _is_whole(folder / name):
                    _make_index(corpus, folder / name)
            finally:
                os.close(lock)
            return folder / name
    remedy = "set XDG_CACHE_HOME to a folder of this host with more room"
    raise ConfigError(
        f"search: no folder takes the index of {corpus} (about {4 * size / 1e9:.1f} GB): {remedy}"
    )


def _is_whole(index: Path) -> bool:
    """It gets its name when it is complete. The folder is this user's alone."""
    with contextlib.suppress(OSError):
        os.utime(index)  # the cache removes what nobody has used for a month
        return True
    return False


def _make_index(corpus: Path, index: Path) -> None:
    descriptor, temporary = tempfile.mkstemp(
        prefix=f"{index.name}.", suffix=".tmp", dir=index.parent
    )
    os.close(descriptor)
    try:
        with contextlib.closing(sqlite3.connect(temporary)) as connection:
            connection.executescript("pragma journal_mode=off; pragma synchronous=off;")
            connection.execute(
                "create virtual table passages using fts5(title, text, tokenize='unicode61')"
            )
            connection.executemany("insert into passages values (?, ?)", _passages(corpus))
            connection.execute("insert into passages(passages) values ('optimize')")
            connection.commit()
        os.replace(temporary, index)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _passages(corpus: Path) -> Any:
    """Title and text of each line. ConfigError names the line that has none."""
    num_passages = 0
    with open_regular(corpus, follow=True) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                title, text = row.get("title", ""), row["text"]
                if not (isinstance(title, str) and isinstance(text, str)):
                    raise TypeError
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                rule = 'a line is a JSON object like {"title": "...", "text": "..."}'
                raise ConfigError(f"{corpus}:{number}: {rule}; got {line[:80]!r}") from None
            num_passages += 1
            yield title.encode(errors="replace").decode(), text.encode(errors="replace").decode()
    if not num_passages:
        raise ConfigError(f"search: the corpus {corpus} has no passage")


def _shown(text: str) -> str:
    cut = len(text) - _PASSAGE_CHARS
    return text if cut <= 0 else f"{text[:_PASSAGE_CHARS]}... [{cut:,} more characters were cut]"
