"""What is made of a data set once on a node, for all its ranks and for the next start: one file of arrays under a
fingerprint of all that it was made from.

A file is used if it is this user's, of this format, and as it was when it was found to be whole to the bit, and is made
again if not. No pickle, no code: a blob, numbers, and JSON. Folders are the node's own: what is mapped from a file of
another host is gone, and the rank with it, as soon as somebody there removes it. Where none takes it, each rank keeps
its own in memory.
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

from grpo_spmd.config.errors import ConfigError, say
from grpo_spmd.files import UntrustedError, open_regular, parse_object

FORMAT = 3  # counts up with every change of what is made or checked: files of another one are not looked at
SMALL = (
    4 << 20
)  # bytes of a data set below which each rank makes its own in memory, in less than a second
_KEPT_S = 30 * 86_400.0  # what was not used for so long goes when something else is made
_TAIL = 8 + 32  # at the end of a file: the length of its JSON, and SHA-256 of all before
_RECENT_S = 2.0  # a file that changed so shortly ago may change again without its times showing it
_LEFT_S = 3600.0  # since somebody wrote to a file that has no name yet
_PATIENCE_S, _MOST_PATIENCE_S = (
    60.0,
    900.0,
)  # until a line says whom a rank waits for; until it makes its own
# Of this host, as /proc calls them. Others may be gone while the file is mapped.
_LOCAL = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "bcachefs",
    "f2fs",
    "jfs",
    "tmpfs",
    "ramfs",
    "overlay",
}


class Entry:
    """What an entry holds, mapped from its file or in memory. Arrays are read like lists, and cost no memory."""

    def __init__(self, content: memoryview, name: str) -> None:
        """Raises ValueError, KeyError or TypeError where it is not whole."""
        length = int.from_bytes(content[-_TAIL:-32], "little")
        end = len(content) - _TAIL - length
        if end < 0:
            raise ValueError("too short")
        header = parse_object(bytes(content[end:-_TAIL]), Path(name))
        if header["format"] != FORMAT or header["name"] != name:
            raise ValueError("another entry")
        self.facts: dict[str, Any] = header["facts"]
        self.blob, self._arrays, start = (
            content[: header["blob"]],
            dict[str, memoryview](),
            header["blob"],
        )
        for array_name, size in header["arrays"].items():
            self._arrays[array_name] = content[start : start + size].cast("q")
            start += size
        if start != end:
            raise ValueError("arrays of another size")

    def array(self, name: str) -> memoryview:
        """Of int64."""
        return self._arrays[name]


class EntryWriter:
    """Takes what an entry is made of, piece by piece; only its arrays wait in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size, self._waits = file, hashlib.sha256(), 0, bytearray()
        self.arrays: dict[str, array[int]] = {}
        self.facts: dict[str, Any] = {}

    def add(self, piece: bytes | memoryview) -> None:
        self._size += len(piece)
        self._waits += piece
        if len(self._waits) >= 1 << 20:
            self._flush()

    def _flush(self) -> None:
        self._digest.update(self._waits)
        self._write(self._waits)
        self._waits = bytearray()

    def _write(self, content: bytes | bytearray) -> None:
        left = memoryview(content)
        with _folder_errors():
            while left:  # a file without a buffer may take less than it is given
                left = left[self._file.write(left) :]

    def finish(self, name: str) -> str:
        """Write arrays and facts behind the blob. Returns SHA-256 of all but these 32 bytes, which end it."""
        blob = self._size
        for values in self.arrays.values():
            self.add(memoryview(values).cast("B"))
        sizes = {key: 8 * len(values) for key, values in self.arrays.items()}
        header = {
            "format": FORMAT,
            "name": name,
            "blob": blob,
            "arrays": sizes,
            "facts": self.facts,
        }
        text = json.dumps(header).encode()
        self.add(text)
        self.add(len(text).to_bytes(8, "little"))
        self._flush()
        self._write(self._digest.digest())
        return self._digest.hexdigest()


Make = Callable[[EntryWriter], None]


def entry_name(kind: str, inputs: Any) -> str:
    """Of an entry that is made from `inputs`, all of which must survive JSON."""
    return f"{kind}-{hashlib.sha256(json.dumps([FORMAT, inputs], sort_keys=True).encode()).hexdigest()[:40]}"


def versions_of(*packages: str) -> list[str]:
    """ "" of one that is not installed."""
    found = []
    for package in packages:
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


def load_or_make(kind: str, inputs: Any, size: int, make: Make, of: str = "") -> Entry:
    """The entry that `make` makes from `inputs` (None: they have no fingerprint), of a data set of `size` bytes. One
    process of the node makes it while the others wait. What `make` raises is raised by all of them that ask for the
    same file `of` which it speaks."""
    if inputs is None or size < SMALL:
        return _in_memory(kind, make)
    name, asked = entry_name(kind, inputs), time.time_ns()
    error = f"{name}.{hashlib.sha256(os.fsencode(of)).hexdigest()[:16]}.error"
    if (entry := _found(name)) is not None:
        return entry
    with _alone(name) as had_to_wait:
        if (entry := _found(name)) is not None:
            return entry
        if had_to_wait:
            _raise_what_was_said(error, asked)
        return _made(name, size, make, error)


def _found(name: str) -> Entry | None:
    return next(
        (entry for place in cache_folders() if (entry := _open(place, name)) is not None), None
    )


def _made(name: str, size: int, make: Make, error_name: str) -> Entry:
    """In the first folder that takes it, else in memory. What `make` raises is kept for those who wait."""
    failed = list[str]()
    for place in cache_folders(failed):
        if (free := shutil.disk_usage(place).free) < 2 * size:
            failed.append(f"{place} has {free / 1e9:.1f} GB free")
            continue
        try:
            entry = _made_in(place, name, make)
        except _NoRoom as error:
            failed.append(f"{place}: {error}")
            continue
        except ConfigError as error:
            with contextlib.suppress(OSError):
                _write(place, error_name, str(error).encode())
            raise
        if failed:  # whichever rank made it says so, alone
            say(f"warning: data: tokenized prompts are kept in {place} ({'; '.join(failed)})")
        return entry
    if os.environ.get("LOCAL_RANK", "0") == "0":
        why = "; ".join([*failed, "set XDG_CACHE_HOME to a folder of this node"])
        say(
            f"warning: data: tokenized prompts are not kept, and each rank makes its own in memory ({why})"
        )
    return _in_memory(name, make)


def _in_memory(name: str, make: Make) -> Entry:
    file = io.BytesIO()
    maker = EntryWriter(file)
    make(maker)
    maker.finish(name)
    return Entry(file.getbuffer(), name)


class _NoRoom(Exception):
    """A folder does not take an entry. The message says why."""


@contextlib.contextmanager
def _folder_errors() -> Iterator[None]:
    """Tells a folder's errors from those of what `make` reads."""
    try:
        yield
    except OSError as error:
        raise _NoRoom(error.strerror or str(error)) from None


def _made_in(place: Path, name: str, make: Make) -> Entry:
    """Raises _NoRoom, and what `make` raises."""
    with _folder_errors():
        _sweep(place)
        descriptor, temporary = tempfile.mkstemp(
            prefix=f"{name}.", suffix=".tmp", dir=place
        )  # 0600
    try:
        with open(descriptor, "wb", buffering=0) as file:
            maker = EntryWriter(file)
            make(maker)
            digest = maker.finish(name)
            with _folder_errors():
                os.fsync(
                    descriptor
                )  # or a power cut leaves a file of the right size and time without its content
        with _folder_errors():
            os.replace(temporary, place / name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with _folder_errors():
        _remember(place, name, os.stat(place / name), digest)
    entry = _open(place, name)
    if entry is None:
        raise _NoRoom("what was written there does not read back")
    return entry


def _open(place: Path, name: str) -> Entry | None:
    """None where there is none, or none that can be used."""
    try:
        with open_regular(place / name) as file:
            state = os.fstat(file.fileno())
            if state.st_uid != os.geteuid() or state.st_mode & 0o022 or state.st_size < _TAIL:
                return None
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if _remembered(place, name, state) != content[-32:].hex():
                if _sha256(file, state.st_size - 32) != content[-32:].hex():
                    return None
                _remember(place, name, state, content[-32:].hex())
            entry = Entry(content, name)
            with contextlib.suppress(OSError):
                os.utime(place / f"{name}.stat")  # when it was last used
            return entry
    except (OSError, UntrustedError, AttributeError, KeyError, TypeError, ValueError):
        return None


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content. Of a large one it is remembered for the file as it is (device, inode, size, times of
    content and of inode): each rank and each start would else read it all. Raises OSError, UntrustedError."""
    with open_regular(path, follow=True) as file:
        state, asked = os.fstat(file.fileno()), time.time()
        if state.st_size < SMALL or not (found := cache_folders()):
            return _sha256(file, state.st_size)
        place, name = (
            found[0],
            f"digest-{hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:40]}",
        )
        if (digest := _remembered(place, name, state)) is not None:
            return digest
        with _alone(name):
            if (digest := _remembered(place, name, state)) is None:
                digest = _sha256(file, state.st_size)
                is_settled = asked - max(state.st_mtime, state.st_ctime) > _RECENT_S
                if is_settled and stamp(os.fstat(file.fileno())) == stamp(state):
                    _remember(place, name, state, digest)
        return digest


def stamp(state: os.stat_result) -> list[int]:
    """What changes with a file's content; nobody can set the last one back."""
    return [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def _sha256(file: BinaryIO, size: int) -> str:
    """Read, not mapped: what is mapped counts as the process's memory."""
    digest, left = hashlib.sha256(), size
    file.seek(0)
    while left > 0 and (piece := file.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()


def _remembered(place: Path, name: str, state: os.stat_result) -> str | None:
    try:
        with open_regular(place / f"{name}.stat") as file:
            of, digest = json.loads(file.read(4096))
        return digest if of == stamp(state) and isinstance(digest, str) else None
    except (OSError, UntrustedError, TypeError, ValueError):
        return None


def _remember(place: Path, name: str, state: os.stat_result, digest: str) -> None:
    with contextlib.suppress(OSError):
        _write(place, f"{name}.stat", json.dumps([stamp(state), digest]).encode())


def _write(place: Path, name: str, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=place)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, place / name)


def cache_folders(failed: list[str] | None = None) -> list[Path]:
    """Folders of this user's on this host that can be written to, alike on all ranks of a node: the cache's, and a
    temporary one. `failed`: takes why one is none."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    candidates = [Path(cache, "grpo_spmd")] if os.path.isabs(cache) else []
    if not candidates and os.path.isabs(home):
        candidates = [Path(home, ".cache", "grpo_spmd")]
    with contextlib.suppress(OSError):  # there is none
        candidates.append(Path(tempfile.gettempdir(), f"grpo_spmd-{os.geteuid()}"))
    found = list[Path]()
    for place in candidates:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            if not (is_own_folder(place) and os.access(place, os.W_OK | os.X_OK)):
                why = "no folder that this user alone may write to"
            elif (kind := _file_system_of(place)) not in _LOCAL:
                why = f"on another host ({kind})"
            else:
                found.append(place)
                continue
            if failed is not None:
                failed.append(f"{place}: {why}")
    return found


def is_own_folder(place: Path) -> bool:
    """Whether this user alone can write to it: in /tmp anyone may have put a link there, or a folder of their own.
    Raises OSError where nothing is."""
    state = place.lstat()
    return (
        stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022
    )


def is_of_this_host(place: Path) -> bool:
    return _file_system_of(place) in _LOCAL


def _file_system_of(place: Path) -> str:
    """As /proc names the one that it is mounted from; "unknown" where it does not say."""
    path, found = os.path.realpath(place), ("", "unknown")
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file,
    ):
        for line in file:
            _, at, kind, *_ = line.split(" ")
            at = at.replace("\\040", " ")  # a blank
            if f"{path}/".startswith(f"{at.rstrip('/')}/") and len(at) >= len(found[0]):
                found = at, kind
    return found[1]


@contextlib.contextmanager
def _alone(name: str) -> Iterator[bool]:
    """Hold the lock of an entry on this node; gives whether another process had it. It is let go of by the kernel, also
    where its holder is killed; whoever waits for long says for whom."""
    lock, had_to_wait = _open_lock(name), False
    try:
        begun = said = time.monotonic()
        while lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                had_to_wait = True
            except OSError:  # a file system without locks: each may make one, and the last stays
                break
            if (now := time.monotonic()) - begun > _MOST_PATIENCE_S:
                break  # it was stopped, or its disk is gone
            if now - said > _PATIENCE_S and os.environ.get("LOCAL_RANK", "0") in "01":
                said, holder = now, os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
                say(
                    f"data: waiting for process {holder} of this node, which makes {name} ({now - begun:.0f} s)"
                )
            time.sleep(0.05)
        if lock is not None:
            with contextlib.suppress(OSError):  # a full disk
                os.pwrite(lock, f"{os.getpid():<20}".encode(), 0)
        yield had_to_wait
    finally:
        if lock is not None:
            os.close(lock)


def _open_lock(name: str) -> int | None:
    for place in cache_folders():
        with contextlib.suppress(OSError):
            return os.open(
                place / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
    return None


def _raise_what_was_said(error_name: str, asked: int) -> None:
    """Another process of this node found what was asked for meanwhile to be unusable: read once, said by all."""
    for place in cache_folders():
        with contextlib.suppress(OSError, UntrustedError), open_regular(place / error_name) as file:
            if os.fstat(file.fileno()).st_mtime_ns >= asked:
                raise ConfigError(file.read(1 << 16).decode(errors="replace"))


def _sweep(place: Path) -> None:
    """Remove what was not used for a month, and what nobody writes to any more: of processes that were killed, or are
    not waited for. Who has an old entry mapped keeps it."""
    now, last_used, paths = time.time(), dict[str, float](), [*place.iterdir()]
    for path in paths:
        with contextlib.suppress(OSError):
            name = path.name.partition(".")[0]
            last_used[name] = max(last_used.get(name, 0.0), path.lstat().st_mtime)
    for path in paths:
        with contextlib.suppress(OSError):
            is_left = path.suffix == ".tmp" and now - path.lstat().st_mtime > _LEFT_S
            if is_left or now - last_used[path.name.partition(".")[0]] > _KEPT_S:
                path.unlink()
