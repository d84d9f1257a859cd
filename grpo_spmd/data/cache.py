"""This module is a node's cache of results that are computed from a data set.

A result is computed once for all ranks of the node and for later starts. An *entry* is one file
with a blob of bytes, integer arrays and JSON. Its name is a *fingerprint*, a digest of all inputs.
Nothing in an entry is executed. A file is used if it is this user's, has this format, and is
unchanged since it was found intact to the last bit. Otherwise it is made again. Folders must be on
a disk of the node: a file that is mapped from another host disappears, and the rank crashes, when
somebody removes it there. Where no folder takes an entry, each rank keeps its own in memory.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any, BinaryIO

import psutil  # type: ignore[import-untyped]

from grpo_spmd.config.errors import ConfigError, say
from grpo_spmd.files import UntrustedError, open_regular, parse_object

# This number changes with every change of the format: entries of other formats are not read.
FORMAT = 3
# Bytes of a data set below which each rank makes its own entry in memory, in less than a second.
SMALL = 4 << 20
_BUFFER_BYTES = 1 << 20
# An entry ends with the length of its JSON and the SHA-256 of all earlier bytes.
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_TAIL_BYTES = _LENGTH_BYTES + _DIGEST_BYTES
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
    """One cache entry, mapped from its file or in memory.

    Its arrays are int64. They are read like lists and take no extra memory.
    """

    def __init__(self, content: memoryview, name: str) -> None:
        """Raises ValueError, KeyError or TypeError if the content is damaged."""
        length = int.from_bytes(content[-_TAIL_BYTES:-_DIGEST_BYTES], "little")
        end = len(content) - _TAIL_BYTES - length
        if end < 0:
            raise ValueError("too short")
        header = parse_object(bytes(content[end:-_TAIL_BYTES]), Path(name))
        if header["format"] != FORMAT or header["name"] != name:
            raise ValueError("another entry")
        self.facts: dict[str, Any] = header["facts"]
        start = header["blob"]
        self.blob = content[:start]
        self._arrays: dict[str, memoryview] = {}
        for array_name, size in header["arrays"].items():
            self._arrays[array_name] = content[start : start + size].cast("q")
            start += size
        if start != end:
            raise ValueError("arrays of another size")

    def array(self, name: str) -> memoryview:
        return self._arrays[name]


class EntryWriter:
    """Writes one entry of the cache.

    The blob goes to the file piece by piece. `arrays` (int64) and `facts` (JSON) stay in memory and
    are written behind the blob at the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self._buffer = bytearray()
        self.arrays: dict[str, array[int]] = {}
        self.facts: dict[str, Any] = {}

    def add(self, piece: bytes | memoryview) -> None:
        """Appends to the blob."""
        self._size += len(piece)
        self._buffer += piece
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def finish(self, name: str) -> str:
        """Writes arrays and facts after the blob. Returns the SHA-256 that ends the entry."""
        header = {
            "format": FORMAT,
            "name": name,
            "blob": self._size,
            "arrays": {key: 8 * len(values) for key, values in self.arrays.items()},
            "facts": self.facts,
        }
        # Arrays follow the blob in the order of the header, which gives their sizes in bytes.
        for values in self.arrays.values():
            self.add(memoryview(values).cast("B"))
        text = json.dumps(header).encode()
        # The header comes last with its length, so that an entry can be written in one pass.
        self.add(text)
        self.add(len(text).to_bytes(_LENGTH_BYTES, "little"))
        self._flush()
        self._write(self._digest.digest())
        return self._digest.hexdigest()

    def _flush(self) -> None:
        self._digest.update(self._buffer)
        self._write(self._buffer)
        self._buffer = bytearray()

    def _write(self, content: bytes | bytearray) -> None:
        remaining = memoryview(content)
        with _folder_errors():
            # An unbuffered file may write fewer bytes than it was given.
            while remaining:
                remaining = remaining[self._file.write(remaining) :]


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
        return _make_in_memory(kind, make)
    name = entry_name(kind, inputs)
    start = time.time_ns()
    error_name = f"{name}.{_hex_digest(os.fsencode(source), 16)}.error"
    entry = _find(name)
    if entry is not None:
        return entry
    with _entry_lock(name) as had_to_wait:
        entry = _find(name)
        if entry is not None:
            return entry
        if had_to_wait:
            _raise_error_of_maker(error_name, start)
        return _make(name, num_bytes, make, error_name)


def _find(name: str) -> Entry | None:
    for folder in cache_folders():
        entry = _open(folder, name)
        if entry is not None:
            return entry
    return None


def _make(name: str, num_bytes: int, make: Make, error_name: str) -> Entry:
    """Makes an entry in the first folder that takes it, or in memory if no folder does.

    An error of `make` is stored for the processes that wait.
    """
    failures: list[str] = []
    for folder in cache_folders(failures):
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < 2 * num_bytes:
            failures.append(f"{folder} has {free_bytes / 1e9:.1f} GB free")
            continue
        try:
            entry = _make_in_folder(folder, name, make)
        except _FolderError as error:
            failures.append(f"{folder}: {error}")
            continue
        # An error of the data is stored, so that the waiting ranks raise it without reading again.
        except ConfigError as error:
            with contextlib.suppress(OSError):
                _write_file(folder, error_name, str(error).encode())
            raise
        # Only the rank that made the entry comes here.
        if failures:
            reasons = "; ".join(failures)
            say(f"warning: data: tokenized prompts are kept in {folder} ({reasons})")
        return entry
    # One rank of the node warns for all.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        reasons = "; ".join([*failures, "set XDG_CACHE_HOME to a folder of this node"])
        effect = "tokenized prompts are not kept, and each rank makes its own in memory"
        say(f"warning: data: {effect} ({reasons})")
    return _make_in_memory(name, make)


def _make_in_memory(name: str, make: Make) -> Entry:
    file = io.BytesIO()
    writer = EntryWriter(file)
    make(writer)
    writer.finish(name)
    return Entry(file.getbuffer(), name)


class _FolderError(Exception):
    """A folder does not take an entry. The message says why."""


@contextlib.contextmanager
def _folder_errors() -> Iterator[None]:
    """Turns errors of a folder into _FolderError, to tell them from errors in `make`'s sources."""
    try:
        yield
    except OSError as error:
        raise _FolderError(error.strerror or str(error)) from None


def _make_in_folder(folder: Path, name: str, make: Make) -> Entry:
    """Returns the entry, made as a file of this folder. Raises _FolderError, and any error of
    `make`."""
    with _folder_errors():
        _sweep(folder)
        # Only this user can open it: mkstemp's mode is 0600.
        descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            writer = EntryWriter(file)
            make(writer)
            digest = writer.finish(name)
            with _folder_errors():
                # Without fsync a power cut could leave a file of the right size and time, but
                # empty.
                os.fsync(descriptor)
        # The rename is atomic: other processes see the whole entry or none.
        with _folder_errors():
            os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with _folder_errors():
        _store_digest(folder, name, os.stat(folder / name), digest)
    entry = _open(folder, name)
    # A disk that reads back other bytes than were written cannot keep an entry.
    if entry is None:
        raise _FolderError("what was written there does not read back")
    return entry


def _open(folder: Path, name: str) -> Entry | None:
    """Returns an entry, or None if there is none that can be used."""
    try:
        with open_regular(folder / name) as file:
            state = os.fstat(file.fileno())
            if not _is_private(state) or state.st_size < _TAIL_BYTES:
                return None
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            digest = content[-_DIGEST_BYTES:].hex()
            # The digest of a large file is computed only if no stored one belongs to its present
            # state.
            if _stored_digest(folder, name, state) != digest:
                if _sha256(file, state.st_size - _DIGEST_BYTES) != digest:
                    return None
                _store_digest(folder, name, state, digest)
            entry = Entry(content, name)
            with contextlib.suppress(OSError):
                # The file's time is the time of its last use.
                os.utime(folder / f"{name}.stat")
            return entry
    except (OSError, UntrustedError, AttributeError, KeyError, TypeError, ValueError):
        return None


# Digests of files.


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content. Raises OSError, UntrustedError.

    The digest of a large file is stored with its `stamp`, so that not every rank and every start
    must read the whole file.
    """
    with open_regular(path, follow=True) as file:
        state = os.fstat(file.fileno())
        start = time.time()
        folders = cache_folders() if state.st_size >= SMALL else []
        if not folders:
            return _sha256(file, state.st_size)
        folder = folders[0]
        name = f"digest-{_hex_digest(os.fsencode(os.path.realpath(path)), 40)}"
        digest = _stored_digest(folder, name, state)
        if digest is not None:
            return digest
        with _entry_lock(name):
            digest = _stored_digest(folder, name, state)
            if digest is None:
                digest = _sha256(file, state.st_size)
                is_settled = start - max(state.st_mtime, state.st_ctime) > _RECENT_S
                if is_settled and stamp(os.fstat(file.fileno())) == stamp(state):
                    _store_digest(folder, name, state, digest)
        return digest


def stamp(state: os.stat_result) -> list[int]:
    """Returns numbers that change with a file's content; nobody can set the last one (the
    ctime)."""
    return [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _sha256(file: BinaryIO, size: int) -> str:
    # Read, not mapped: mapped pages count as the process's memory.
    digest = hashlib.sha256()
    num_remaining = size
    file.seek(0)
    while num_remaining > 0:
        piece = file.read(min(num_remaining, _BUFFER_BYTES))
        if not piece:
            break
        digest.update(piece)
        num_remaining -= len(piece)
    return digest.hexdigest()


def _stored_digest(folder: Path, name: str, state: os.stat_result) -> str | None:
    try:
        with open_regular(folder / f"{name}.stat") as file:
            stored_stamp, digest = json.loads(file.read(4096))
    except (OSError, UntrustedError, TypeError, ValueError):
        return None
    return digest if stored_stamp == stamp(state) and isinstance(digest, str) else None


def _store_digest(folder: Path, name: str, state: os.stat_result, digest: str) -> None:
    with contextlib.suppress(OSError):
        _write_file(folder, f"{name}.stat", json.dumps([stamp(state), digest]).encode())


def _write_file(folder: Path, name: str, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, folder / name)


# Folders.


def cache_folders(failures: list[str] | None = None) -> list[Path]:
    """Returns this user's writable folders on this host, equal on all ranks of a node.

    The cache's folder is the first, then a temporary one. The reasons why a folder cannot be used
    are added to `failures`.
    """
    folders: list[Path] = []
    for folder in _candidate_folders():
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
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
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir(), f"grpo_spmd-{os.geteuid()}")


def is_own_folder(folder: Path) -> bool:
    """Returns whether only this user can write to a folder. Raises OSError if the folder does not
    exist.

    In /tmp anyone may have put a link or a folder of their own at this path.
    """
    state = folder.lstat()
    return stat.S_ISDIR(state.st_mode) and _is_private(state)


def _is_private(state: os.stat_result) -> bool:
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


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


@contextlib.contextmanager
def _entry_lock(name: str) -> Iterator[bool]:
    """Holds the lock of an entry on this node. Yields whether another process held it before.

    The kernel releases the lock, also if its holder is killed. A process that waits long logs the
    holder's pid.
    """
    lock = _open_lock(name)
    if lock is None:
        yield False
        return
    try:
        had_to_wait = _wait_for_lock(lock, name)
        # The disk may be full; the pid is only for a log line.
        with contextlib.suppress(OSError):
            os.pwrite(lock, f"{os.getpid():<20}".encode(), 0)
        yield had_to_wait
    finally:
        os.close(lock)


def _wait_for_lock(lock: int, name: str) -> bool:
    had_to_wait = False
    start = time.monotonic()
    next_note = start + _NOTE_WAIT_S
    # After the longest wait the holder was probably stopped, or its disk is gone.
    while time.monotonic() - start <= _MAX_WAIT_S:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            had_to_wait = True
        except OSError:
            # The file system has no locks: each process may make an entry, and the last stays.
            break
        time_now = time.monotonic()
        if time_now > next_note and os.environ.get("LOCAL_RANK", "0") in "01":
            next_note = time_now + _NOTE_WAIT_S
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
            work = f"process {holder} of this node, which makes {name} ({time_now - start:.0f} s)"
            say(f"data: waiting for {work}")
        time.sleep(0.05)
    return had_to_wait


def _open_lock(name: str) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    for folder in cache_folders():
        with contextlib.suppress(OSError):
            return os.open(folder / f"{name}.lock", flags, 0o600)
    return None


def _raise_error_of_maker(error_name: str, start: int) -> None:
    """Raises the error that another process of this node has stored since `start`."""
    for folder in cache_folders():
        with (
            contextlib.suppress(OSError, UntrustedError),
            open_regular(folder / error_name) as file,
        ):
            if os.fstat(file.fileno()).st_mtime_ns >= start:
                raise ConfigError(file.read(1 << 16).decode(errors="replace"))


def _sweep(folder: Path) -> None:
    """Removes entries without use for a month, and temporary files of killed processes.

    A process that has mapped an old entry can still read it.
    """
    time_now = time.time()
    last_used: dict[str, float] = {}
    paths = [*folder.iterdir()]
    for path in paths:
        with contextlib.suppress(OSError):
            name = path.name.partition(".")[0]
            last_used[name] = max(last_used.get(name, 0.0), path.lstat().st_mtime)
    for path in paths:
        with contextlib.suppress(OSError):
            is_temporary = path.suffix == ".tmp"
            is_abandoned = is_temporary and time_now - path.lstat().st_mtime > _ABANDONED_S
            if is_abandoned or time_now - last_used[path.name.partition(".")[0]] > _KEPT_S:
                path.unlink()
