"""Tries out the file systems that a run writes to, in scratch folders that are then removed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from grpo_spmd.checks.machine import check_disk
from grpo_spmd.checks.memory import size_text
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import sync_to_disk
from grpo_spmd.tools.checkup.results import Result, Target, bad, ok, rated, warning

_GIB = 1 << 30
# The trial of a disk's speed writes until one of these is reached; a lower speed is a warning.
_SPEED_BYTES = 256 << 20
_SPEED_S = 2.0
_SLOW_BYTES_PER_S = 50e6
# The lines that each of two writers appends to one file.
_NUM_LINES = 200
_LINE_LENGTH = 120
# Parts of the types of file systems that store files in buckets of an object store.
_BUCKETS = ("s3fs", "gcsfuse", "goofys", "rclone", "mountpoint-s3", "blobfuse")
_STAY = "choose a run_dir on a disk that stays"
# Those that have not been removed yet.
_scratch_folders: set[Path] = set()


class FileSystem(NamedTuple):
    """The type of a file system, such as ext4, and its mount options."""

    kind: str = "unknown"
    options: Sequence[str] = ()


def file_system_of(target: Target, path: Path) -> FileSystem:
    """Returns the file system that holds `path`, according to /proc/self/mounts."""
    mounts: list[tuple[int, FileSystem]] = [(0, FileSystem())]
    for line in target.read("/proc/self/mounts").splitlines():
        _, mount, kind, options, *_ = line.split(" ")
        # The file writes spaces and some other characters as octal escapes.
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount)
        if path.is_relative_to(mount):
            mounts.append((len(mount), FileSystem(kind, options.split(","))))
    # Take the deepest mount above the path; of several at the same place the last one counts.
    return max(reversed(mounts), key=lambda mount: mount[0])[1]


def nearest_folder(path: Path) -> Path:
    """Returns the path itself, or the nearest folder above it that exists."""
    path = Path(os.path.abspath(path))
    return next(p for p in (path, *path.parents) if p.exists() or p.is_symlink())


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """Returns a context manager that yields a new scratch folder in `folder`, removed at the end.

    At the end it removes all scratch folders of this process."""
    scratch = Path(tempfile.mkdtemp(prefix=".grpo_spmd_checkup_", dir=folder))
    _scratch_folders.add(scratch)
    try:
        yield scratch
    finally:
        remove_scratch()


def remove_scratch() -> None:
    """Removes all scratch folders, also those of checks that hang."""
    while _scratch_folders:
        folder = _scratch_folders.pop()
        # Tried again, since a check that hangs may still write into the folder.
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.05)


def check_run_folder(target: Target) -> Iterator[Result]:
    """Tries out the run folder: its file system, free space, file operations and speed."""
    # If the run folder does not exist yet, the nearest folder above it is tried.
    folder = nearest_folder(target.run_dir)
    below = Path(os.path.abspath(target.run_dir)).relative_to(folder)
    name = f"{folder}" if below == Path() else f"{folder}, where {below} will be"
    # Mounts are listed by paths without links.
    file_system = file_system_of(target, folder.resolve())
    remedy = "choose another run_dir, or mount its file system to be written to"
    try:
        with scratch_in(folder) as scratch:
            yield check_kind(name, file_system)
            yield from _check_room(target, folder)
            yield from check_abilities(scratch)
            yield from _check_speed(scratch)
    except OSError as error:
        finding = f"cannot write in {name} ({file_system.kind}): {error.strerror}"
        yield bad("run_dir", finding, remedy)


def check_kind(name: str, file_system: FileSystem) -> Result:
    """Returns a line about the file system `name`.

    It is bad if the file system is a bucket of an object store, and a warning if its files do not
    survive a restart."""
    kind, finding = file_system.kind, f"{name} ({file_system.kind})"
    if any(bucket in kind for bucket in _BUCKETS):
        return bad("run_dir", f"{finding}: a bucket, which has no rename and no append", _STAY)
    if kind in ("tmpfs", "ramfs", "overlay"):
        finding += ": in memory or in a container, gone at its next start"
        return warning("run_dir", finding, _STAY)
    return ok("run_dir", finding)


def _check_room(target: Target, folder: Path) -> Iterator[Result]:
    """Checks that bytes and inodes are free; if there is a config, enough for its checkpoints."""
    stat, disk = os.statvfs(folder), shutil.disk_usage(folder)
    finding, remedy = f"{size_text(disk.free)} free of {size_text(disk.total)}", "make room there"
    # f_files is 0 on file systems that have no fixed number of inodes.
    if stat.f_files and stat.f_favail < 10_000:
        yield warning(
            "room", f"{stat.f_favail:,} more files fit: inodes run out", "remove files there"
        )
    if target.config is not None:
        try:
            check_disk(target.config)
        except ConfigError as error:
            text, _, advice = str(error).partition("; ")
            yield bad("room", text.removeprefix("run_dir: "), advice or remedy)
            return
        finding += ", enough for the checkpoints that the config keeps"
    yield rated("room", finding, remedy, value=disk.free, wanted=_GIB)


def check_abilities(folder: Path) -> Iterator[Result]:
    """Checks the file operations that a run relies on: rename, fsync, flock and O_APPEND.

    The last two are tried by two writers at a time."""
    problems: list[str] = []
    old, new, step = folder / "old", folder / "new", folder / "step_1"
    try:
        old.write_bytes(b"0")
        new.write_bytes(b"1")
        sync_to_disk(folder)
        # As a run puts the manifest and checkpoints in place.
        new.replace(old)
        step.with_suffix(".tmp").mkdir()
        step.with_suffix(".tmp").rename(step)
    except OSError as error:
        problems.append(f"fsync or rename: {error.strerror}")
    if new.exists() or old.read_bytes() != b"1" or not step.is_dir():
        problems.append("rename does not put files and folders in place")
    # Two writers append their own lines to one file at the same time, while the lock is held.
    lines = ["a" * _LINE_LENGTH, "b" * _LINE_LENGTH]
    with locked_for_trial(folder), ThreadPoolExecutor(len(lines)) as writers:
        trials = [writers.submit(lock_and_append, folder, line, _NUM_LINES) for line in lines]
        answers = {trial.result() for trial in trials}
    num_lines = whole_lines(folder, lines)
    if num_lines != 2 * _NUM_LINES:
        problems.append(f"O_APPEND: of {2 * _NUM_LINES} lines by two writers {num_lines} are whole")
    if problems:
        yield bad(
            "files",
            f"{'; '.join(problems)}: checkpoints and metrics rely on it",
            "choose another file system for run_dir",
        )
    else:
        yield ok("files", "rename, fsync and O_APPEND work")
    if answers == {"held"}:
        yield ok("flock", "a held lock keeps others out")
    else:
        yield warning(
            "flock",
            f"no locks ({'; '.join(sorted(answers - {'held'}))}): two jobs in one run_dir "
            "would not see each other",
            "mount it with locks (Lustre: -o flock); never start a run twice",
        )


@contextmanager
def locked_for_trial(folder: Path) -> Iterator[None]:
    """Returns a context manager that prepares `folder` for calls of `lock_and_append` by others.

    It makes the file `appended`, and holds the lock of the file `lock`."""
    (folder / "appended").touch()
    with open(folder / "lock", "w") as lock:
        with suppress(OSError):  # a file system without locks, which lock_and_append reports
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lock_and_append(folder: Path, line: str, num_lines: int) -> str:
    """Tries to take the lock that `locked_for_trial` holds, and appends to the file `appended`.

    It appends `line` `num_lines` times. Returns "held" (as it should be), "free", or the error of a
    file system without locks. Raises OSError if it cannot append."""
    # A flock lock belongs to the opened file, so it excludes threads as well as other nodes.
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            answer = "free"
        except BlockingIOError:
            answer = "held"
        except OSError as error:
            answer = str(error)
    # One write for each line: O_APPEND promises that lines of several writers do not mix.
    with open(folder / "appended", "ab", buffering=0) as file:
        for _ in range(num_lines):
            file.write(line.encode() + b"\n")
    return answer


def whole_lines(folder: Path, lines: Sequence[str]) -> int:
    """Returns how many lines in `appended` are intact; `lines` are the texts that were appended."""
    text = (folder / "appended").read_text(encoding="utf-8", errors="replace")
    return sum(line in lines for line in text.splitlines())


def _check_speed(folder: Path) -> Iterator[Result]:
    """Measures how fast one process writes to the disk, not only to the page cache."""
    # At most a tenth of what is free, so as not to fill the disk.
    limit = min(_SPEED_BYTES, shutil.disk_usage(folder).free // 10)
    # Random bytes, which a file system cannot compress.
    block, written = os.urandom(4 << 20), 0
    start = time.monotonic()
    with open(folder / "speed", "wb", buffering=0) as file:
        while written < limit and time.monotonic() - start < _SPEED_S:
            written += file.write(block)
            os.fdatasync(file.fileno())
    (folder / "speed").unlink()
    if not written:
        return
    rate = written / (time.monotonic() - start)
    finding = f"{rate / 1e6:,.0f} MB/s from one writer ({size_text(written)}, each 4 MiB synced)"
    remedy = (
        f"{1e10 / rate / 60:.1f} min for 10 GB: a faster disk, or larger checkpoint.every_steps"
    )
    yield rated("speed", finding, remedy, value=rate, wanted=_SLOW_BYTES_PER_S)


def check_temporary(target: Target) -> Iterator[Result]:
    """Checks the temporary folder, which holds compiled code, workers' folders and sandboxes."""
    path = target.environ.get("TMPDIR", "/tmp")
    remedy = "export TMPDIR=FOLDER on a local disk"
    try:
        with scratch_in(Path(path)):
            free = shutil.disk_usage(path).free
    except OSError as error:
        yield bad("/tmp", f"cannot write in {path}: {error.strerror}", remedy)
        return
    file_system = file_system_of(target, Path(path).resolve())
    finding = f"{path}: {size_text(free)} free"
    if "noexec" in file_system.options:
        finding += ", mounted noexec: compiled code cannot be loaded from there"
        remedy += "; or VLLM_CACHE_ROOT and TRITON_CACHE_DIR on one"
        yield warning("/tmp", finding, remedy)
    elif file_system.kind.startswith("nfs"):
        yield warning("/tmp", f"{finding}, on another host ({file_system.kind})", remedy)
    else:
        yield rated("/tmp", finding, f"make room, or {remedy}", value=free, wanted=_GIB)
