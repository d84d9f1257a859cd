"""What a checkpoint folder must hold to be whole, and which one a run goes on from. Files and JSON alone: no torch, no
pickle.

    <run_dir>/checkpoints/step_000050/
        state/shard_00001.safetensors   the policy and the optimizer's moments, a file a rank (checkpoint.py)
        model/                          config, tokenizer and the like of model.path, or adapter_config.json; no weights
        trainer.json                    where the run was: step, place in the data, counts
        manifest.json                   size and SHA-256 of every other file

A folder of another name (`.tmp`, `.aside`) is none. A file that was cut short, has a flipped bit, is missing or was
added shows here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.dump import flat_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.files import sync_path, sync_to_disk

_log = logging.getLogger("grpo_spmd")

FORMAT = 1  # of a checkpoint; a higher one is refused, since it was written by a later grpo_spmd


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; one line that says which and why."""


class NewerFormatError(CheckpointError):
    """It was written by a later version. Not damaged: going back past it would give up what it holds."""


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
        CheckpointError: no manifest, not a manifest, a newer one (NewerFormatError), or files that it lacks or has too
            many of.
    """
    manifest = _read_json(checkpoint, "manifest.json")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(f, dict) and {"bytes", "sha256"} <= f.keys() for f in files.values()
    ):
        raise CheckpointError(f"{checkpoint}: manifest.json is damaged")
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()} - {
        "manifest.json"
    }
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
            f"{checkpoint}: written by a newer grpo_spmd (format {value['format']}, this one reads up to {FORMAT}); "
            "update grpo_spmd"
        )
    return value


# What a run cannot change and still be the same run: the order of its prompts, its random numbers, the shape of what
# trains.
_FIXED_KEYS = ("seed", "data.shuffle", "model.lora.rank", "model.lora.alpha", "model.lora.target_modules")


def check_same_run(checkpoint: Path, trainer: dict[str, Any], config: Config) -> list[str]:
    """Compare the config that a checkpoint was written under with `config`; returns what has changed and may, one text
    a key.

    Raises:
        ConfigError: naming a key that must stay as it was.
    """
    before, now = trainer["config"], flat_config(config)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    for key in changed:
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED_KEYS):
            raise ConfigError(
                f"{key} ({now.get(key)}) was {before.get(key)} in the run that wrote {checkpoint}, and cannot change "
                "on the way; "
                "set it back, or start a new run_dir"
            )
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in changed
        if not key.startswith(("checkpoint.", "run_dir"))
    ]


def verify_files(checkpoint: Path, files: dict[str, dict[str, Any]], share: int = 0, num_shares: int = 1) -> None:
    """Read every `num_shares`-th file of the manifest, from `share` on, and compare size and SHA-256. Raises
    CheckpointError."""
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
    """Write manifest.json for all that is in `folder`; `known` are entries of files whose digest was taken as they were
    written."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            with path.open("rb") as file:
                files[name] = {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    (folder / "manifest.json").write_text(
        json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True), encoding="utf-8"
    )


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name, durably. One of that name, of steps that were run a second time, steps back for
    it."""
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
            remove(old)


def remove(folder: Path) -> None:
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
