"""The format of a checkpoint's folder, and whether one is whole. Files and JSON alone: no torch, no pickle.

    <run_dir>/checkpoints/step_000050/
        state/shard_00001.safetensors   the policy and the optimizer's moments, a file a rank (state.py)
        model/                          config, tokenizer and the like of model.path, or adapter_config.json; no weights
        trainer.json                    where the run was: step, place in the data, counts
        manifest.json                   size and SHA-256 of every other file

A file that was cut short, has a flipped bit, is missing or was added shows here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FORMAT = 1  # of a checkpoint; a higher one is refused, since it was written by a later grpo_spmd


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; one line that says which and why."""


class NewerFormatError(CheckpointError):
    """It was written by a later version. Not damaged: going back past it would give up what it holds."""


def read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """{relative file name: {"bytes": size, "sha256": digest}}. Raises CheckpointError: the manifest is missing, damaged
    or newer (NewerFormatError), or names other files than the folder has."""
    files = _read_json(checkpoint, "manifest.json").get("files")
    if not isinstance(files, dict) or not all(
        isinstance(f, dict) and {"bytes", "sha256"} <= f.keys() for f in files.values()
    ):
        raise CheckpointError(f"{checkpoint}: manifest.json is damaged")
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    present.discard("manifest.json")
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
        formats = f"(format {value['format']}, this one reads up to {FORMAT})"
        raise NewerFormatError(f"{checkpoint}: written by a newer grpo_spmd {formats}; update grpo_spmd")
    return value


def verify_files(checkpoint: Path, files: dict[str, dict[str, Any]], share: int = 0, num_shares: int = 1) -> None:
    """Compare size and SHA-256 of every `num_shares`-th file, from `share` on. Raises CheckpointError."""
    for name in sorted(files)[share::num_shares]:
        try:
            size = (checkpoint / name).stat().st_size
            if size != files[name]["bytes"]:
                raise CheckpointError(f"{checkpoint}: {name} has {size} bytes, and should have {files[name]['bytes']}")
            digest = _sha256(checkpoint / name)
        except OSError as error:
            raise CheckpointError(f"{checkpoint}: cannot read {name}: {error.strerror}") from None
        if digest != files[name]["sha256"]:
            raise CheckpointError(f"{checkpoint}: {name} is damaged (its SHA-256 is not the manifest's)")


def verify_checkpoint(checkpoint: Path) -> None:
    """All of the above by one process. Raises CheckpointError."""
    verify_files(checkpoint, read_manifest(checkpoint))
    read_trainer(checkpoint)


def write_manifest(folder: Path, known: dict[str, dict[str, Any]]) -> None:
    """Write manifest.json for `folder`; `known`: entries of files whose digest was taken as they were written."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)
    (folder / "manifest.json").write_text(manifest, encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
