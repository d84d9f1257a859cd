"""This module has a search tool for a local corpus, which ranks passages by BM25.

The index is a full-text index of sqlite, made once for each corpus on each host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.cache import cache_folders, digest_of, entry_name, read_note, write_note
from grpo_spmd.files import UntrustedError, open_regular, sync_path

# Raise this number with every change of what an index contains.
_FORMAT = 1
_MAX_RESULTS = 20
_MAX_WORDS = 32
_MAX_WORD_CHARS = 64
_MAX_QUERY_CHARS = 2000
_PASSAGE_CHARS = 2000
_SEARCH_S = 10.0


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
    """Returns whether the index exists and has not changed since it was completed."""
    with contextlib.suppress(OSError, UntrustedError), open_regular(index) as file:
        if read_note(index.parent, index.stem, os.fstat(file.fileno())) is not None:
            # Marks the index as used: the cache removes what was not used for a month.
            os.utime(index.with_suffix(".note"))
            return True
    return False


def _make_index(corpus: Path, index: Path) -> None:
    """Makes the index as a temporary file and renames it when it is complete."""
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
    """Yields (title, text) of each line. Raises ConfigError with the number of a malformed line."""
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
    return text.encode(errors="replace").decode()


def _shorten(text: str) -> str:
    num_cut = len(text) - _PASSAGE_CHARS
    if num_cut <= 0:
        return text
    return f"{text[:_PASSAGE_CHARS]}... [{num_cut:,} more characters were cut]"
