"""What a checkpoint folder must hold to be whole, and which one a run goes on from. Files and JSON alone: no torch, no pickle.

    <run_dir>/checkpoints/step_000050/
        state/shard_00001.safetensors   the policy and the optimizer's moments, a file a rank (checkpoint.py)
        model/                          config, tokenizer and the like of model.path, or adapter_config.json; no weights
        trainer.json                    where the run was: step, place in the data, counts
        manifest.json                   size and SHA-256 of every other file

A folder of another name (`.tmp`, `.aside`) is none. A file that was cut short, has a flipped bit, is missing or was added shows here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_spmd.config import Config, ConfigError, flat_config

_LAUNCH = Path("logs", "launch")
_locked: set[Path] = set()
FORMAT = 1  # of a checkpoint; a higher one is refused, since it was written by a later grpo_spmd
_log = logging.getLogger("grpo_spmd")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; one line that says which and why."""


class NewerFormatError(CheckpointError):
    """It was written by a later version. Not damaged: going back past it would give up what it holds."""


@dataclass(frozen=True)
class Start:
    """Where a run starts: from nothing, or from a checkpoint that every rank has found good."""

    step: int = 0
    folder: Path | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False  # with the run that its folder holds, if it holds one
    is_over: bool = False  # that run had come to its end

    @property
    def position(self) -> int:
        """In the prompt stream."""
        return int(self.trainer.get("position", 0))


def is_same_launch(run_dir: str | Path) -> bool:
    """Whether this very launch by torchrun has begun the run. If it has also started the ranks again (--max-restarts), the run goes on."""
    try:
        return _launch_id() != "" and (Path(run_dir) / _LAUNCH).read_text(encoding="utf-8") == _launch_id()
    except OSError:  # the first attempt did not come that far, or was refused because the folder is another run's
        return False


def refuse_in_use(run_dir: Path) -> None:
    """Raises ConfigError where a run has been in the folder."""
    for name in ("metrics.jsonl", "config.yaml", *(f"checkpoints/{path.name}" for path in list_checkpoints(run_dir))):
        if (run_dir / name).exists():
            raise ConfigError(
                f"run_dir: {run_dir} holds a {name} already, and nothing is written over; set checkpoint.resume: auto to go on "
                "with that run, choose another folder, or move it away"
            )


def lock_run_dir(run_dir: str | Path) -> None:
    """On rank 0: hold the folder for as long as this process lives.

    Raises:
        ConfigError: another process holds it: two jobs that go on with one run would overwrite each other's checkpoints.
    """
    path = Path(run_dir).resolve() / _LAUNCH
    if path in _locked:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # never closed: the lock ends with the process, however it ends
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"run_dir: another process is running in {run_dir}; end that one first, or choose another folder") from None
    except OSError:  # a file system without locks
        pass
    _locked.add(path)


def begin_in(run_dir: Path, start: Start) -> None:
    """On rank 0, when nothing can be refused any more: make the folder one in which `start` is the newest checkpoint, and this launch's.

    Raises:
        ConfigError: another run is in it.
    """
    lock_run_dir(run_dir)
    if not start.goes_on:
        refuse_in_use(run_dir)
    for half in (run_dir / "checkpoints").glob("step_*.tmp"):
        _remove(half)
    for beyond in list_checkpoints(run_dir):
        if step_of(beyond) > start.step:
            _log.warning("%s is set aside: the run goes on from step %d", beyond, start.step)
            set_aside(beyond)
    # From here on a restart takes the newest checkpoint, whatever `checkpoint.resume` says; and what it names where there is none.
    note_launch(run_dir, _launch_id())
    own = checkpoint_path(run_dir, start.step)
    if start.folder is not None and start.folder.resolve() != own.resolve():
        # One of another run, say. A failure before this run's first save must come back to it, and not to the beginning.
        temporary = temporary_path(own)
        shutil.copytree(start.folder, temporary, copy_function=_link_or_copy)
        put_in_place(temporary, own)


def note_launch(run_dir: Path, launch_id: str) -> None:
    """On rank 0, which holds the folder: say which launch the run in it is of."""
    (run_dir / _LAUNCH).write_text(launch_id, encoding="utf-8")  # in place: another file would not be locked


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)  # a checkpoint's files are never changed
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _launch_id() -> str:
    """The same in all attempts of one launch and on all of its nodes, and not likely in another; "" without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id != "none":  # torchrun's default, of every launch without --standalone or --rdzv-id
        return run_id
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:  # the store of torchrun's first agent
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return f"{os.uname().nodename} {os.getppid()} {Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:  # no /proc
        return f"{os.uname().nodename} {os.getppid()}"


def is_inside(checkpoint: str | Path, run_dir: str | Path) -> bool:
    """Whether it is one of this run folder's checkpoints."""
    return Path(checkpoint).resolve().parent.parent == Path(run_dir).resolve()


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` finished steps is, or will be."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The finished steps that the folder's name says."""
    return int(checkpoint.name.removeprefix("step_"))


def temporary_path(checkpoint: Path) -> Path:
    """Where it is written until it is complete."""
    return checkpoint.with_name(checkpoint.name + ".tmp")


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Folders that were completed, good or bad, in the order of steps."""
    folder = Path(run_dir) / "checkpoints"
    found = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{6,}", path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{relative file name: {"bytes": size, "sha256": digest}}, its file names checked against the folder.

    Raises:
        CheckpointError: no manifest, not a manifest, a newer one (NewerFormatError), or files that it lacks or has too many of.
    """
    manifest = _read_json(checkpoint, "manifest.json")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(f, dict) and {"bytes", "sha256"} <= f.keys() for f in files.values()):
        raise CheckpointError(f"{checkpoint}: manifest.json is damaged")
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()} - {"manifest.json"}
    for name in sorted(files.keys() - present):
        raise CheckpointError(f"{checkpoint}: {name} is missing")
    for name in sorted(present - files.keys()):
        raise CheckpointError(f"{checkpoint}: {name} is not in manifest.json")
    return files


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """trainer.json. Raises CheckpointError."""
    return _read_json(checkpoint, "trainer.json")


def _read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: {name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{checkpoint}: {name} is damaged") from None
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        raise CheckpointError(f"{checkpoint}: {name} is damaged")
    if value["format"] > FORMAT:
        raise NewerFormatError(
            f"{checkpoint}: written by a newer grpo_spmd (format {value['format']}, this one reads up to {FORMAT}); update grpo_spmd"
        )
    return value


# What a run cannot change and still be the same run: the order of its prompts, its random numbers, the shape of what trains.
_FIXED_KEYS = ("seed", "data.shuffle", "model.lora.rank", "model.lora.alpha", "model.lora.target_modules")


def check_same_run(checkpoint: Path, trainer: dict[str, Any], config: Config) -> list[str]:
    """Compare the config that a checkpoint was written under with `config`; returns what has changed and may, one text a key.

    Raises:
        ConfigError: naming a key that must stay as it was.
    """
    before, now = trainer["config"], flat_config(config)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    for key in changed:
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED_KEYS):
            raise ConfigError(
                f"{key} ({now.get(key)}) was {before.get(key)} in the run that wrote {checkpoint}, and cannot change on the way; "
                "set it back, or start a new run_dir"
            )
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in changed if not key.startswith(("checkpoint.", "run_dir"))]


def verify_files(checkpoint: Path, files: dict[str, dict[str, Any]], share: int = 0, num_shares: int = 1) -> None:
    """Read every `num_shares`-th file of the manifest, from `share` on, and compare size and SHA-256. Raises CheckpointError."""
    for name in sorted(files)[share::num_shares]:
        try:
            size = (checkpoint / name).stat().st_size
            if size != files[name]["bytes"]:
                raise CheckpointError(f"{checkpoint}: {name} has {size} bytes, and should have {files[name]['bytes']}")
            with (checkpoint / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{checkpoint}: cannot read {name}: {error.strerror}") from None
        if digest != files[name]["sha256"]:
            raise CheckpointError(f"{checkpoint}: {name} is damaged (its SHA-256 is not the manifest's)")


def verify_checkpoint(checkpoint: Path) -> None:
    """All of the above by one process. Raises CheckpointError."""
    verify_files(checkpoint, read_manifest(checkpoint))
    read_trainer(checkpoint)


def write_manifest(folder: Path, known: dict[str, dict[str, Any]]) -> None:
    """Write manifest.json for all that is in `folder`; `known` are entries of files whose digest was taken as they were written."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            with path.open("rb") as file:
                files[name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True), encoding="utf-8")


def sync_to_disk(folder: Path) -> None:
    """fsync of all files and folders below, and of `folder` itself: a rename that outlives a power cut must not name empty files."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def write_durably(path: Path, content: bytes) -> None:
    """Put a file in the place of another: after a kill, a full disk or a power cut it is the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name, durably. One of that name, of steps that were run a second time, steps back for it."""
    sync_to_disk(temporary)
    if folder.exists():
        set_aside(folder)
    temporary.rename(folder)
    sync_path(folder.parent)


def set_aside(checkpoint: Path) -> None:
    """Rename it, so that no later start takes it; replaces what was set aside before under this name."""
    aside = checkpoint.with_name(checkpoint.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def remove_old(run_dir: str | Path, keep: int, best: int | None) -> None:
    """Leave the newest `keep` checkpoints, and that of step `best`. What cannot be removed is only worth a warning."""
    for old in list_checkpoints(run_dir)[:-keep]:
        if step_of(old) != best:
            _remove(old)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("could not remove %s: %s", folder, error.strerror)


def fingerprint_of_files(paths: Sequence[Path]) -> str:
    """SHA-256 over names, sizes and both ends of files: tells models apart without reading them."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()
