"""This module is a node's cache of results that are computed from a data set.

A result is computed once for all ranks of the node and for later starts. An *entry* is one file
with a blob of bytes, integer arrays and JSON. Its name is a *fingerprint*, a digest of all inputs.
Nothing in an entry is executed. Beside each file lies a *note*, which has the file's `stamp` as it
was when the entry was complete. An entry whose file has another stamp, or no note, was changed by
somebody, and is made again. Folders must be on a disk of the node: a file that is mapped from
another host disappears, and the rank crashes, when somebody removes it there. Likewise SIGBUS ends
all ranks of a node if this user, who alone can, truncates an entry that they have mapped. Where no
folder takes an entry, each rank keeps its own in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import io
import json
import mmap
import os
import shutil
import stat
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil  # type: ignore[import-untyped]

from grpo_spmd.config.errors import ConfigError, say
from grpo_spmd.files import UntrustedError, open_regular

# This number changes with every change of the format: entries of other formats are not read.
FORMAT = 5
# Bytes of a data set below which each rank makes its own entry in memory, in less than a second.
SMALL = 4 << 20
# An entry ends with the length of its JSON, in so many bytes.
_LENGTH_BYTES = 8
# Seconds without use after which an entry is removed, when another entry is made.
_KEPT_S = 30 * 86_400.0
# Seconds without a write after which a temporary file is removed.
_ABANDONED_S = 3600.0
# Seconds in which a file that has just changed may change again without a change of its times.
_RECENT_S = 2.0
# Seconds after which a waiting rank logs a note; after the second bound it makes its own entry.
_NOTE_WAIT_S = 60.0
_MAX_WAIT_S = 900.0
# File systems of this host, as the kernel calls them.
_LOCAL_FILE_SYSTEMS = {
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "tmpfs", "ramfs",
    "overlay",
}  # fmt: skip


class Entry:
    """One cache entry, mapped from its file or in memory."""

    def __init__(self, content: memoryview) -> None:
        length = int.from_bytes(content[-_LENGTH_BYTES:], "little")
        header = json.loads(bytes(content[-_LENGTH_BYTES - length : -_LENGTH_BYTES]))
        self.facts: dict[str, Any] = header["facts"]
        start = header["blob"]
        self.blob = content[:start]
        self.arrays: dict[str, memoryview] = {}
        """Arrays of int64. They are read like lists and take no extra memory."""
        for name, size in header["arrays"].items():
            self.arrays[name] = content[start : start + size].cast("q")
            start += size


class EntryWriter:
    """Writes one entry of the cache.

    The blob goes to the file piece by piece. `arrays` (int64) and `facts` (JSON) stay in memory and
    are written behind the blob at the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.arrays: dict[str, array[int]] = {}
        self.facts: dict[str, Any] = {}

    def add(self, piece: bytes | array[int]) -> None:
        """Appends to the blob."""
        self._file.write(piece)

    def finish(self) -> None:
        """Writes arrays and facts after the blob."""
        header = {
            "blob": self._file.tell(),
            "arrays": {key: 8 * len(values) for key, values in self.arrays.items()},
            "facts": self.facts,
        }
        # Arrays follow the blob in the order of the header, which gives their sizes in bytes.
        for values in self.arrays.values():
            self._file.write(values)
        text = json.dumps(header).encode()
        # The header comes last with its length, so that an entry can be written in one pass.
        self._file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))


Make = Callable[[EntryWriter], None]


def entry_name(kind: str, inputs: Any) -> str:
    """Returns the name of an entry that is made from `inputs`, which must survive JSON."""
    # The fingerprint includes FORMAT, so that a new format gets new names.
    fingerprint = _hex_digest(json.dumps([FORMAT, inputs], sort_keys=True).encode(), 40)
    return f"{kind}-{fingerprint}"


def _hex_digest(content: bytes, length: int) -> str:
    return hashlib.sha256(content).hexdigest()[:length]


def versions_of(*packages: str) -> list[str]:
    """Returns the versions of packages; "" for one that is not installed."""
    versions = []
    for package in packages:
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.append("")
    return versions


def load_or_make(kind: str, inputs: Any, num_bytes: int, make: Make, source: str = "") -> Entry:
    """Returns the entry that `make` makes from `inputs`, for a data set of `num_bytes` bytes.

    One process of the node makes it while the other processes wait. If `inputs` is None, there is
    no fingerprint and the entry stays in memory. An error of `make` is raised by all processes that
    wait for the same `source`, which the error names.
    """
    if inputs is None or num_bytes < SMALL:
        return _make_in_memory(make)
    name = entry_name(kind, inputs)
    start = time.time_ns()
    failures: list[str] = []
    folders = cache_folders(failures)
    entry = _find(folders, name)
    if entry is None and folders:
        with ExitStack() as stack:
            # Without a lock each process makes an entry, and the last one stays.
            with suppress(OSError):
                lock = stack.enter_context(open(folders[0] / f"{name}.lock", "ab"))
                _wait_for_lock(lock, name)
            entry = _find(folders, name)
            if entry is None:
                error_name = f"{name}.{_hex_digest(os.fsencode(source), 16)}.error"
                _raise_error_of_maker(folders, error_name, start)
                entry = _make_on_disk(folders, name, num_bytes, make, error_name, failures)
    if entry is not None:
        return entry
    # One rank of the node warns for all.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        reasons = "; ".join([*failures, "set XDG_CACHE_HOME to a folder of this node"])
        effect = "tokenized prompts are not kept, and each rank makes its own in memory"
        say(f"warning: data: {effect} ({reasons})")
    return _make_in_memory(make)


def _find(folders: list[Path], name: str) -> Entry | None:
    """Returns an entry that is in one of the folders, and that nobody changed since it was made."""
    for folder in folders:
        with (
            suppress(OSError, UntrustedError),
            open_regular(folder / name) as file,
        ):
            if read_note(folder, name, os.fstat(file.fileno())) is not None:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                # The note's time is the time of the last use.
                os.utime(folder / f"{name}.note")
                return Entry(memoryview(content))
    return None


def _make_on_disk(
    folders: list[Path], name: str, num_bytes: int, make: Make, error_name: str, failures: list[str]
) -> Entry | None:
    """Makes an entry in the first folder that takes it. Returns None if no folder does.

    The reasons are added to `failures`. An error of `make` is stored for the processes that wait.
    """
    for folder in folders:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < 2 * num_bytes:
            failures.append(f"{folder} has {free_bytes / 1e9:.1f} GB free")
            continue
        try:
            _sweep(folder)
            _replace_file(folder, name, lambda file: _write_entry(file, make))
            # The rename changes the stamp, so the note comes after it.
            write_note(folder, name, os.stat(folder / name), "")
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
            continue
        # An error of the data is stored, so that the waiting ranks raise it without reading again.
        except ConfigError as error:
            with suppress(OSError):
                _replace_text(folder, error_name, str(error))
            raise
        # Only the rank that made the entry comes here.
        if failures:
            reasons = "; ".join(failures)
            say(f"warning: data: tokenized prompts are kept in {folder} ({reasons})")
        return _find([folder], name)
    return None


def _make_in_memory(make: Make) -> Entry:
    file = io.BytesIO()
    _write_entry(file, make)
    return Entry(file.getbuffer())


def _write_entry(file: BinaryIO, make: Make) -> None:
    writer = EntryWriter(file)
    make(writer)
    writer.finish()


def _replace_file(folder: Path, name: str, write: Callable[[BinaryIO], object]) -> None:
    """Makes a file of this folder with what `write` writes; other processes see all of it or none.

    Raises OSError, and any error of `write`.
    """
    # Only this user can open it: mkstemp's mode is 0600.
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            write(file)
            file.flush()
            # Without fsync a power cut could leave a file of the right size and time, but empty.
            os.fsync(descriptor)
        os.replace(temporary, folder / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


# Digests of files, and notes.


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content. Raises OSError, UntrustedError.

    The digest of a large file is kept in a note with the file's `stamp`, so that not every start
    must read the whole file.
    """
    with open_regular(path, follow=True) as file:
        state = os.fstat(file.fileno())
        start = time.time()
        folders = cache_folders() if state.st_size >= SMALL else []
        name = f"digest-{_hex_digest(os.fsencode(os.path.realpath(path)), 40)}"
        digest = read_note(folders[0], name, state) if folders else None
        if digest is None:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            is_settled = start - max(state.st_mtime, state.st_ctime) > _RECENT_S
            if folders and is_settled and stamp(os.fstat(file.fileno())) == stamp(state):
                with suppress(OSError):
                    write_note(folders[0], name, state, digest)
        return digest


def stamp(state: os.stat_result) -> list[int]:
    """Returns numbers that change with a file's content; nobody can set the last one (the
    ctime)."""
    # Not the device's number, which is another one after a reboot on some file systems (btrfs).
    return [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def read_note(folder: Path, name: str, state: os.stat_result) -> str | None:
    """Returns the text of the note `name` if it is about a file with the stamp of `state`."""
    try:
        with open_regular(folder / f"{name}.note") as file:
            noted_stamp, text = json.loads(file.read(4096))
    except (OSError, TypeError, ValueError):
        return None
    return text if noted_stamp == stamp(state) and isinstance(text, str) else None


def write_note(folder: Path, name: str, state: os.stat_result, text: str) -> None:
    """Notes that a file has the stamp of `state`. Raises OSError."""
    _replace_text(folder, f"{name}.note", json.dumps([stamp(state), text]))


def _replace_text(folder: Path, name: str, text: str) -> None:
    _replace_file(folder, name, lambda file: file.write(text.encode()))


# Folders.


def cache_folders(failures: list[str] | None = None) -> list[Path]:
    """Returns this user's writable folders on this host, equal on all ranks of a node.

    The cache's folder is the first, then a temporary one. The reasons why a folder cannot be used
    are added to `failures`.
    """
    folders: list[Path] = []
    for folder in _candidate_folders():
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            file_system = _file_system_of(folder)
            if not (is_own_folder(folder) and os.access(folder, os.W_OK | os.X_OK)):
                reason = "no folder that this user alone may write to"
            elif file_system not in _LOCAL_FILE_SYSTEMS:
                reason = f"on another host ({file_system})"
            else:
                folders.append(folder)
                continue
            if failures is not None:
                failures.append(f"{folder}: {reason}")
    return folders


def _candidate_folders() -> Iterator[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if os.path.isabs(cache):
        yield Path(cache, "grpo_spmd")
    elif os.path.isabs(home):
        yield Path(home, ".cache", "grpo_spmd")
    # There may be no temporary folder.
    with suppress(OSError):
        yield Path(tempfile.gettempdir(), f"grpo_spmd-{os.geteuid()}")


def is_own_folder(folder: Path) -> bool:
    """Returns whether only this user can write to a folder. Raises OSError if the folder does not
    exist.

    In /tmp anyone may have put a link or a folder of their own at this path.
    """
    state = folder.lstat()
    is_private = state.st_uid == os.geteuid() and not state.st_mode & 0o022
    return is_private and stat.S_ISDIR(state.st_mode)


def is_of_this_host(folder: Path) -> bool:
    """Returns whether a folder is on a disk of this host, and not on a network file system."""
    return _file_system_of(folder) in _LOCAL_FILE_SYSTEMS


def _file_system_of(folder: Path) -> str:
    """Returns the type of a path's file system, or "unknown" if the kernel hides it."""
    path = Path(os.path.realpath(folder))
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        mounts = []
    # If several file systems are mounted on one folder, the last one is visible.
    mounts = [mount for mount in reversed(mounts) if path.is_relative_to(mount.mountpoint)]
    mount = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return "unknown" if mount is None else str(mount.fstype)


# Coordination between processes of the node.


def _wait_for_lock(lock: BinaryIO, name: str) -> None:
    """Waits until this process holds the lock of an entry on this node.

    The kernel releases the lock, also if its holder is killed. Raises OSError if the file system
    has no locks.
    """
    start = time.monotonic()
    next_note = start + _NOTE_WAIT_S
    # After the longest wait the holder was probably stopped, or its disk is gone.
    while time.monotonic() - start <= _MAX_WAIT_S:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        if time.monotonic() > next_note and os.environ.get("LOCAL_RANK", "0") in "01":
            next_note += _NOTE_WAIT_S
            say(f"data: waiting for another process of this node, which makes {name}")


def _raise_error_of_maker(folders: list[Path], error_name: str, start: int) -> None:
    """Raises the error that another process of this node has stored since `start`."""
    for folder in folders:
        with (
            suppress(OSError, UntrustedError),
            open_regular(folder / error_name) as file,
        ):
            if os.fstat(file.fileno()).st_mtime_ns >= start:
                raise ConfigError(file.read(1 << 16).decode(errors="replace"))


def _sweep(folder: Path) -> None:
    """Removes entries without use for a month, and temporary files of killed processes.

    A process that has mapped an old entry can still read it.
    """
    time_now = time.time()
    for path in folder.iterdir():
        with suppress(OSError):
            note = folder / f"{path.name.partition('.')[0]}.note"
            is_temporary = path.suffix == ".tmp"
            last_used = path.lstat().st_mtime
            if not is_temporary and note.exists():
                last_used = max(last_used, note.stat().st_mtime)
            if time_now - last_used > (_ABANDONED_S if is_temporary else _KEPT_S):
                path.unlink()
