"""Files that survive a kill, a full disk and a power cut."""

from __future__ import annotations

import atexit
import io
import os
import sys
from pathlib import Path

from grpo_spmd.config.errors import ConfigError, refuse


def hold_standard_streams() -> None:
    """/dev/null in place of a closed stdin, stdout or stderr: what is opened next would get its number, and be written
    to by whoever prints, or replaced by whoever starts a process."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
            if getattr(sys, name) in (None, getattr(sys, f"__{name}__")):  # not a notebook's, which need no descriptor
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        if number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of an ASCII terminal: a line that it lacks letters for
    atexit.unregister(_flush_stdout)  # once, however often this is called
    atexit.register(_flush_stdout)


def _flush_stdout() -> None:
    """Before Python does it, which prints a traceback where the reader has seen enough (--help | head)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(text: str) -> None:
    """On stdout, whose reader may have seen enough (--check | head)."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer
        if not isinstance(error, BrokenPipeError):
            refuse(ConfigError(f"stdout: {error.strerror}"))


def sync_to_disk(folder: Path) -> None:
    """fsync of all files and folders below, and of `folder` itself: a rename that outlives a power cut must not name
    empty files."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def write_durably(path: Path, content: bytes) -> None:
    """Put a file in the place of another: after a kill, a full disk or a power cut it is the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may lead elsewhere, or wait for a reader
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
