"""A reward's file is imported as a program of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def as_its_own_program(file: str) -> Iterator[None]:
    """Within it a parser of arguments sees none, for ours are not the file's; and what is printed goes to stderr, for
    our stdout may be the config that --check prints."""
    ours, sys.argv = sys.argv, [file]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = ours
