"""The file systems that a run writes to: what they can do, tried out in a folder of its own that is removed again."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.checks.machine import check_disk
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.tools.checkup.results import Level, Place, Result, size_of

_SPEED_BYTES, _SPEED_S = 256 << 20, 2.0
_SLOW = 50e6  # bytes/s
_LINES, _LINE = 200, 120
_IN_MEMORY, _BUCKETS = (
    ("tmpfs", "ramfs"),
    ("s3fs", "gcsfuse", "goofys", "rclone", "mountpoint-s3", "blobfuse"),
)
_APPEND = """import fcntl, os, sys
own, lines = sys.argv[1], int(sys.argv[2])
with open("lock") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
    except OSError as error:
        print(error)
file = os.open("appended", os.O_WRONLY | os.O_APPEND)
for number in range(lines):
    os.write(file, (own * int(sys.argv[3])).encode() + b"\\n")
"""
_scratch: set[Path] = set()


@dataclass(frozen=True)
class FileSystem:
    kind: str
    mount: str
    options: frozenset[str]


def file_system_of(place: Place, path: Path) -> FileSystem | None:
    """By /proc/self/mountinfo: of mounts over each other the last one."""
    found, longest = None, -1
    for line in place.read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()[:1]
        if len(fields) < 6 or not kind:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        if path.is_relative_to(mount) and len(mount) >= longest:
            own = frozenset(fields[5].split(",")) | frozenset(after.split()[-1].split(","))
            found, longest = FileSystem(kind[0], mount, own), len(mount)
    return found


def nearest(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(os.path.abspath(path))
    return next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=".grpo_spmd_checkup_", dir=folder))
    _scratch.add(made)
    try:
        yield made
    finally:
        remove_scratch()


def remove_scratch() -> None:
    """Also of checks that were left behind, when all is over."""
    while _scratch:
        folder = _scratch.pop()
        for _ in range(20):  # a check that was left behind may still write
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.05)


def look_at_run_dir(place: Place) -> Iterator[Result]:
    there = nearest(place.run_dir)
    below = Path(os.path.abspath(place.run_dir)).relative_to(there)
    where = f"{there}" if below == Path() else f"{there}, where {below} will be"
    kind = file_system_of(place, there.resolve())
    elsewhere = "choose another run_dir, or mount its file system to be written to"
    if not there.is_dir():
        yield Result("run_dir", "bad", f"{there} is no folder", elsewhere)
        return
    try:
        with scratch_in(there) as scratch:
            yield _kind_of(where, kind)
            yield from _room(place, there)
            yield from _abilities(scratch)
            yield from _speed(scratch)
    except OSError as error:
        why = (
            f" (its file system, {kind.kind}, is mounted read-only)"
            if kind and "ro" in kind.options
            else ""
        )
        yield Result("run_dir", "bad", f"cannot write in {where}: {error.strerror}{why}", elsewhere)


def _kind_of(where: str, kind: FileSystem | None) -> Result:
    if kind is None:
        return Result("run_dir", "ok", where)
    found, elsewhere = f"{where} ({kind.kind})", "choose a run_dir on a disk that stays"
    if kind.kind in _IN_MEMORY:
        return Result(
            "run_dir",
            "warning",
            f"{found}: in memory, gone at the next start of the machine",
            elsewhere,
        )
    if kind.kind == "overlay":
        return Result(
            "run_dir", "warning", f"{found}: a container's own layer, gone with it", elsewhere
        )
    if any(bucket in kind.kind for bucket in _BUCKETS):
        what = f"{found}: a bucket, which has no rename and no append"
        return Result("run_dir", "bad", what, elsewhere)
    return Result("run_dir", "ok", found)


def _room(place: Place, folder: Path) -> Iterator[Result]:
    stat = os.statvfs(folder)
    free = (
        f"{size_of(stat.f_bavail * stat.f_frsize)} free of {size_of(stat.f_blocks * stat.f_frsize)}"
    )
    if stat.f_files and stat.f_favail < 10_000:
        yield Result(
            "room",
            "warning",
            f"{stat.f_favail:,} more files fit: inodes run out",
            "remove files there",
        )
    try:
        if place.config is not None:
            check_disk(place.config)
            free += ", enough for the checkpoints that the config keeps"
    except ConfigError as error:
        what, _, remedy = str(error).partition("; ")
        yield Result("room", "bad", what.removeprefix("run_dir: "), remedy or "make room there")
        return
    is_little = stat.f_bavail * stat.f_frsize < 1 << 30
    yield Result(
        "room", "warning" if is_little else "ok", free, "make room there" if is_little else ""
    )


def _abilities(folder: Path) -> Iterator[Result]:
    """rename, fsync, flock and appending, the last two from several processes."""
    wrong: list[str] = []
    old, new = folder / "old", folder / "new"
    for number, path in enumerate((old, new)):
        path.write_bytes(b"%d" % number)
    try:
        for path in (new, folder):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except OSError as error:
        wrong.append(f"fsync: {error.strerror}")
    with suppress(OSError):
        new.replace(old)
    if new.exists() or old.read_bytes() != b"1":
        wrong.append("rename does not put a file in another's place")
    (folder / "step_1.tmp").mkdir()
    with suppress(OSError):
        (folder / "step_1.tmp").rename(folder / "step_1")
    if not (folder / "step_1").is_dir():
        wrong.append("a folder cannot be renamed")
    locks, whole = _of_several_processes(folder)
    if whole != 2 * _LINES:
        wrong.append(f"O_APPEND: of {2 * _LINES} lines by two processes {whole} are whole")
    if wrong:
        what = "checkpoints and metrics rely on it"
        yield Result(
            "files", "bad", f"{'; '.join(wrong)}: {what}", "choose another file system for run_dir"
        )
    else:
        yield Result("files", "ok", "rename, fsync and O_APPEND do what they should")
    if locks == {"held"}:
        yield Result("flock", "ok", "a lock of one process keeps another out")
    else:
        what = f"no locks ({'; '.join(sorted(locks - {'held'}))}): two jobs in one run_dir would not see each other"
        yield Result(
            "flock",
            "warning",
            what,
            "mount it with locks (Lustre: -o flock); never start a run twice",
        )


def _of_several_processes(folder: Path) -> tuple[set[str], int]:
    """What two others said of a lock held here, and how many whole lines they appended side by side."""
    for name in ("lock", "appended"):
        (folder / name).touch()
    with open(folder / "lock") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-I", "-S", "-c", _APPEND]
        options: dict[str, Any] = {
            "cwd": folder,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        others = [
            subprocess.Popen([*command, own, str(_LINES), str(_LINE)], **options) for own in "ab"
        ]
        said = {other.communicate()[0].strip() or "no answer" for other in others}
    lines = (folder / "appended").read_text(encoding="utf-8").splitlines()
    return said, sum(line in ("a" * _LINE, "b" * _LINE) for line in lines)


def _speed(folder: Path) -> Iterator[Result]:
    """Of one writer, to the disk and not to the page cache; some seconds at most."""
    stat = os.statvfs(folder)
    most = min(_SPEED_BYTES, stat.f_bavail * stat.f_frsize // 10)
    block, written = os.urandom(4 << 20), 0  # a file system may compress
    start = time.monotonic()
    with open(folder / "speed", "wb", buffering=0) as file:
        while written < most and time.monotonic() - start < _SPEED_S:
            written += file.write(block)
            os.fdatasync(file.fileno())
    (folder / "speed").unlink()
    if not written:
        return
    rate = written / (time.monotonic() - start)
    found = f"{rate / 1e6:,.0f} MB/s from one writer ({size_of(written)}, each 4 MiB synced)"
    if rate < _SLOW:
        what = f"{found}: a checkpoint of 10 GB takes {1e10 / rate / 60:.0f} min"
        yield Result(
            "speed",
            "warning",
            what,
            "a faster disk for run_dir, or a larger checkpoint.every_steps",
        )
    else:
        yield Result("speed", "ok", found)


def look_at_temporary(place: Place) -> Iterator[Result]:
    """Compiled code, workers' folders and sandboxes lie there."""
    asked = place.environ.get("TMPDIR", "/tmp")
    folder = Path(asked)
    elsewhere = "export TMPDIR=FOLDER on a local disk"
    try:
        with scratch_in(folder):
            stat = os.statvfs(folder)
    except OSError as error:
        yield Result("/tmp", "bad", f"cannot write in {asked}: {error.strerror}", elsewhere)
        return
    kind, free = file_system_of(place, folder.resolve()), stat.f_bavail * stat.f_frsize
    found = f"{asked}: {size_of(free)} free" + (f" ({kind.kind})" if kind else "")
    level: Level = "ok"
    remedy = ""
    if kind and "noexec" in kind.options:
        level, remedy = "warning", f"{elsewhere}; or VLLM_CACHE_ROOT and TRITON_CACHE_DIR on one"
        found += ", mounted noexec: compiled code cannot be loaded from there"
    elif free < 1 << 30:
        level, remedy, found = "warning", f"make room, or {elsewhere}", f"{found}: little"
    elif kind and kind.kind.startswith("nfs"):
        level, remedy, found = "warning", elsewhere, f"{found}: on another host"
    yield Result("/tmp", level, found, remedy)
