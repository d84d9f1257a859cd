"""This module is a node's cache of results that are computed from a data set.

A result is computed once for all ranks of the node and for later starts. An *entry* is a file with
a blob of bytes, integer arrays and JSON; nothing in it is executed. Its name has a *fingerprint*, a
digest of all inputs of the result. Beside the file is a *note* with the file's `stamp` at the time
when the entry was complete. An entry whose note is missing or has another stamp was changed by
somebody, and is made again.

Ranks memory-map entries, so the folders must be on a disk of the node: if somebody removes a file
on another host, its mapping fails and the rank crashes. (SIGBUS would also end all ranks of the
node if an entry were truncated, but only this user can do that.) If no folder can take an entry,
each rank has its own in memory.
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

# Increase this with every change of the format: entries of other formats are not read.
FORMAT = 5
# For a data set of fewer bytes, each rank makes its own entry in memory, in less than a second.
SMALL = 4 << 20
# The size of the number at the end of an entry, which is the length of the JSON before it.
_LENGTH_BYTES = 8
# Entries that were not used for this many seconds are removed when another entry is made.
_KEPT_S = 30 * 86_400.0
# Temporary files that were not written to for this many seconds are removed.
_ABANDONED_S = 3600.0
# A file that changed less than this many seconds ago may change again and keep the same times.
_RECENT_S = 2.0
# A waiting rank logs a line each _NOTE_WAIT_S seconds, and after _MAX_WAIT_S makes its own entry.
_NOTE_WAIT_S = 60.0
_MAX_WAIT_S = 900.0
# The kernel's names of file systems that are on this host.
_LOCAL_FILE_SYSTEMS = {
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "tmpfs", "ramfs",
    "overlay",
}  # fmt: skip


class Entry:
    """The content of a cache entry: a blob of bytes, arrays of int64, and facts in JSON."""

    def __init__(self, content: memoryview) -> None:
        """`content` is the memory-mapped file of the entry, or the same bytes in memory."""
        # An entry is: the blob, the arrays, the header in JSON, the length of the header.
        length = int.from_bytes(content[-_LENGTH_BYTES:], "little")
        header = json.loads(bytes(content[-_LENGTH_BYTES - length : -_LENGTH_BYTES]))
        self.facts: dict[str, Any] = header["facts"]
        start = header["blob"]
        self.blob = content[:start]
        self.arrays: dict[str, memoryview] = {}
        """The int64 arrays by name. They are views of `content` and take no memory of their own."""
        for name, size in header["arrays"].items():
            self.arrays[name] = content[start : start + size].cast("q")
            start += size


class EntryWriter:
    """Writes the file of one entry of the cache, whose parts the function `Make` gives it.

    The blob is written piece by piece. `arrays` (int64) and `facts` (JSON) are set by the caller
    and written after the blob at the end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.arrays: dict[str, array[int]] = {}
        self.facts: dict[str, Any] = {}

    def add(self, piece: bytes | array[int]) -> None:
        """Appends a piece to the blob."""
        self._file.write(piece)

    def finish(self) -> None:
        """Writes `arrays` and `facts` after the blob, which completes the entry."""
        header = {
            "blob": self._file.tell(),
            "arrays": {key: 8 * len(values) for key, values in self.arrays.items()},
            "facts": self.facts,
        }
        # Arrays follow the blob in the order of the header, which gives their sizes in bytes.
        for values in self.arrays.values():
            self._file.write(values)
        text = json.dumps(header).encode()
        # The header with its length comes last, so that an entry can be written in one pass.
        self._file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))


# A function that computes a result and writes it to an entry.
Make = Callable[[EntryWriter], None]


def entry_name(kind: str, inputs: Any) -> str:
    """Returns the file name of an entry of a `kind` that is computed from `inputs`.

    `inputs` must be JSON.
    """
    # FORMAT is included, so that entries of a new format have new names.
    fingerprint = _hex_digest(json.dumps([FORMAT, inputs], sort_keys=True).encode(), 40)
    return f"{kind}-{fingerprint}"


def _hex_digest(content: bytes, length: int) -> str:
    """Returns the first `length` hex digits of the SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()[:length]


def versions_of(*packages: str) -> list[str]:
    """Returns the versions of packages, "" for those that are not installed."""
    versions = []
    for package in packages:
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.append("")
    return versions


def load_or_make(kind: str, inputs: Any, num_bytes: int, make: Make, source: str = "") -> Entry:
    """Returns the entry for `inputs` from the cache, or else lets `make` compute it.

    One process of the node computes it while the others wait. A ConfigError of `make` is raised in
    the waiting processes, too, if their `source`, whose name is in the error, is the same. An entry
    is not cached, but made in memory, if `inputs` is None or the data set is small (`num_bytes`).
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
            # If locks do not work here, each process makes the entry and the last one is kept.
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
    # Only the first rank of a node warns.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        reasons = "; ".join([*failures, "set XDG_CACHE_HOME to a folder of this node"])
        effect = "tokenized prompts are not kept, and each rank makes its own in memory"
        say(f"warning: data: {effect} ({reasons})")
    return _make_in_memory(make)


def _find(folders: list[Path], name: str) -> Entry | None:
    """Returns an entry from the first folder that has it unchanged, or None if no folder has it."""
    for folder in folders:
        with (
            suppress(OSError, UntrustedError),
            open_regular(folder / name) as file,
        ):
            if read_note(folder, name, os.fstat(file.fileno())) is not None:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                # The modification time of the note says when the entry was last used.
                os.utime(folder / f"{name}.note")
                return Entry(memoryview(content))
    return None


def _make_on_disk(
    folders: list[Path], name: str, num_bytes: int, make: Make, error_name: str, failures: list[str]
) -> Entry | None:
    """Makes an entry in the first folder where that is possible, and returns it.

    Returns None if no folder can take it; the reasons are added to `failures`. A ConfigError of
    `make` is stored under `error_name` for the processes that wait, and raised.
    """
    for folder in folders:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < 2 * num_bytes:
            failures.append(f"{folder} has {free_bytes / 1e9:.1f} GB free")
            continue
        try:
            _sweep(folder)
            _replace_file(folder, name, lambda file: _write_entry(file, make))
            # The note is written last, since renaming the file has changed its stamp.
            write_note(folder, name, os.stat(folder / name), "")
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
            continue
        # The waiting ranks raise the stored error, so that they need not read the data themselves.
        except ConfigError as error:
            with suppress(OSError):
                _replace_text(folder, error_name, str(error))
            raise
        # Only the rank that made the entry warns.
        if failures:
            reasons = "; ".join(failures)
            say(f"warning: data: tokenized prompts are kept in {folder} ({reasons})")
        return _find([folder], name)
    return None


def _make_in_memory(make: Make) -> Entry:
    """Returns an entry that this process makes for itself alone, in its own memory."""
    file = io.BytesIO()
    _write_entry(file, make)
    return Entry(file.getbuffer())


def _write_entry(file: BinaryIO, make: Make) -> None:
    """Lets `make` compute a result, and writes it to `file` as an entry."""
    writer = EntryWriter(file)
    make(writer)
    writer.finish()


def _replace_file(folder: Path, name: str, write: Callable[[BinaryIO], object]) -> None:
    """Creates or replaces a file with what `write` writes to it.

    Other processes see either the old file or the whole new one. Raises OSError, and whatever
    `write` raises.
    """
    # mkstemp gives the file mode 0600, so only this user can open it.
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            write(file)
            file.flush()
            # Without fsync, a power cut could leave a file of the right size and time, but no data.
            os.fsync(descriptor)
        os.replace(temporary, folder / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


# The functions below compute digests of files, and read and write notes.


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content. Raises OSError, and UntrustedError if the path is
    not a regular file.

    The digest of a large file is kept in a note with the file's `stamp`, so that it need not be
    read as a whole at every start.
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
    """Returns numbers that change when a file's content changes. The last, the ctime, cannot be set
    by any program."""
    # st_dev is left out: on some file systems (btrfs) it is different after a reboot.
    return [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def read_note(folder: Path, name: str, state: os.stat_result) -> str | None:
    """Returns the text of the note `name`, or None if the noted file has changed since.

    `state` is the file's present state, whose stamp is compared with that in the note.
    """
    try:
        with open_regular(folder / f"{name}.note") as file:
            noted_stamp, text = json.loads(file.read(4096))
    except (OSError, TypeError, ValueError):
        return None
    return text if noted_stamp == stamp(state) and isinstance(text, str) else None


def write_note(folder: Path, name: str, state: os.stat_result, text: str) -> None:
    """Writes a note with `text` for a file that has the stamp of `state`. Raises OSError."""
    _replace_text(folder, f"{name}.note", json.dumps([stamp(state), text]))


def _replace_text(folder: Path, name: str, text: str) -> None:
    """Creates or replaces a text file, as `_replace_file` does."""
    _replace_file(folder, name, lambda file: file.write(text.encode()))


# The functions below choose the folders of the cache.


def cache_folders(failures: list[str] | None = None) -> list[Path]:
    """Returns the folders that the cache may use, the same on all ranks of a node.

    They are created if they do not exist: first one in the user's cache folder, then one in the
    folder for temporary files. Reasons why one cannot be used are added to `failures`.
    """
    folders: list[Path] = []
    for folder in _candidate_folders():
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            file_system = _file_system_of(folder)
            if not (is_own_folder(folder) and os.access(folder, os.W_OK | os.X_OK)):
                reason = "not a folder that only this user may write to"
            elif file_system not in _LOCAL_FILE_SYSTEMS:
                reason = f"on another host ({file_system})"
            else:
                folders.append(folder)
                continue
            if failures is not None:
                failures.append(f"{folder}: {reason}")
    return folders


def _candidate_folders() -> Iterator[Path]:
    """Yields the paths of folders that the cache would use, the preferred one first."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if os.path.isabs(cache):
        yield Path(cache, "grpo_spmd")
    elif os.path.isabs(home):
        yield Path(home, ".cache", "grpo_spmd")
    # There may be no folder for temporary files.
    with suppress(OSError):
        yield Path(tempfile.gettempdir(), f"grpo_spmd-{os.geteuid()}")


def is_own_folder(folder: Path) -> bool:
    """Returns True if `folder` is a folder, not a link, to which only this user can write.

    In /tmp, anyone may have put a link or another folder at this path. Raises OSError if there is
    nothing.
    """
    state = folder.lstat()
    is_private = state.st_uid == os.geteuid() and not state.st_mode & 0o022
    return is_private and stat.S_ISDIR(state.st_mode)


def is_of_this_host(folder: Path) -> bool:
    """Returns True if a folder is on a disk of this host rather than on a network file system."""
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


# The functions below coordinate the processes of a node.


def _wait_for_lock(lock: BinaryIO, name: str) -> None:
    """Waits until this process holds the lock of an entry, but at most _MAX_WAIT_S.

    The kernel releases a lock when its holder ends, even if it is killed. Raises OSError if the
    file system has no locks.
    """
    start = time.monotonic()
    next_note = start + _NOTE_WAIT_S
    # A holder that takes longer was probably stopped, or its disk is gone.
    while time.monotonic() - start <= _MAX_WAIT_S:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        # Of the node's ranks only the first two log: while one makes the entry, the other waits.
        if time.monotonic() > next_note and os.environ.get("LOCAL_RANK", "0") in "01":
            next_note += _NOTE_WAIT_S
            say(f"data: waiting for another process of this node, which makes {name}")


def _raise_error_of_maker(folders: list[Path], error_name: str, start: int) -> None:
    """Raises ConfigError if another process of this node has stored an error since `start`.

    `start` is the time in nanoseconds when this process began to look for the entry.
    """
    for folder in folders:
        with (
            suppress(OSError, UntrustedError),
            open_regular(folder / error_name) as file,
        ):
            if os.fstat(file.fileno()).st_mtime_ns >= start:
                raise ConfigError(file.read(1 << 16).decode(errors="replace"))


def _sweep(folder: Path) -> None:
    """Removes entries that were not used for a month, and temporary files of killed processes.

    A process that has memory-mapped a removed entry can still read it.
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
