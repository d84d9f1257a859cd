"""This module defines the format of a checkpoint's folder, and verifies that it is complete.

manifest.json has the size and the SHA-256 of every other file, so a file that was cut short, has a
flipped bit, is missing or was added is detected. Only files and JSON are read: no torch, no pickle.

    <run_dir>/checkpoints/step_000050/
        state/shard_00001.safetensors   one rank's part of policy and optimizer moments (state.py)
        model/                          config and tokenizer files of model.path, or
                                        adapter_config.json; no weights
        trainer.json                    where the run was: step, position in the data, counts
        manifest.json                   size and SHA-256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from grpo_spmd import files
from grpo_spmd.files import MANIFEST, ManifestFile, UntrustedError, check_fields, regular_files
from grpo_spmd.records import Fields

# The fields of trainer.json that a run needs to continue from the checkpoint.
TO_GO_ON = ("step", "position", "num_updates", "skipped_in_a_row", "config", "world_size",
            "model_fingerprint", "data_fingerprint")  # fmt: skip
# The format of checkpoints. A higher number is that of a later grpo_spmd, and is refused. Since 2,
# moments may be 8-bit codes with scales.
FORMAT = 2
# More updates in a step than any run makes; a checkpoint with more is damaged.
_MAX_UPDATES_A_STEP = 2**20


class CheckpointError(RuntimeError):
    """The error about a checkpoint that cannot be used; its message says why, in one line."""


class NewerFormatError(CheckpointError):
    """The error about a checkpoint that a later version of grpo_spmd wrote.

    Such a checkpoint is not damaged. An older one must not be used in its place, since the steps
    between them would be lost.
    """


def read_manifest(checkpoint: Path) -> dict[str, ManifestFile]:
    """Returns the manifest: {relative file name: {"bytes": size, "sha256": digest}}.

    Raises CheckpointError if the manifest is missing or damaged, is of a newer format
    (NewerFormatError), or names other files than the folder has.
    """
    manifest = _read_json(checkpoint, "manifest.json")
    try:
        check_fields(manifest, MANIFEST, f"{checkpoint}: manifest.json is damaged", MANIFEST)
        present = regular_files(checkpoint) - {"manifest.json"}
    except UntrustedError as error:
        raise CheckpointError(str(error)) from None
    files: dict[str, ManifestFile] = manifest["files"]
    for name in sorted(files.keys() ^ present):
        problem = "is missing" if name in files else "is not in manifest.json"
        raise CheckpointError(f"{checkpoint}: {name} {problem}")
    # torch's reader would read any other file in state/ as a shard, too.
    for name in files:
        if name.startswith("state/") and not re.fullmatch(r"state/shard_\d{5,}\.safetensors", name):
            raise CheckpointError(f"{checkpoint}: {name} is not the name of a shard")
    return files


def read_trainer(checkpoint: Path, needed: Sequence[str] = ("step",)) -> Fields:
    """Returns trainer.json with all fields checked; it must have the fields in `needed`.

    Raises CheckpointError if one is missing, if a field is damaged, or if the folder's name has
    another step.
    """
    trainer = _read_json(checkpoint, "trainer.json")
    key = f"{checkpoint}: trainer.json is damaged"
    try:
        check_fields(trainer, files.TRAINER, key, needed)
    except UntrustedError as error:
        raise CheckpointError(str(error)) from None
    replicas = trainer.get("config", {}).get("model.num_replicas", 1)
    if type(replicas) is not int or not 1 <= replicas <= trainer.get("world_size", 1):
        raise CheckpointError(f"{key}: model.num_replicas is {replicas!r}, which no run can have")
    # With this bound the counts of later steps cannot become too large for JSON, either.
    for counts in (trainer, trainer.get("critic") or {}):
        if counts.get("num_updates", 0) > trainer["step"] * _MAX_UPDATES_A_STEP:
            raise CheckpointError(
                f"{key}: {counts['num_updates']} updates in {trainer['step']} steps, which no run "
                "makes"
            )
    # A folder that was renamed would make the run continue at another step.
    named = re.fullmatch(r"step_(\d{6,18})", checkpoint.name)
    if named and int(named[1]) != trainer["step"]:
        raise CheckpointError(
            f"{key}: its step is {trainer['step']}, and that of the folder is {int(named[1])}"
        )
    return trainer


def _read_json(checkpoint: Path, name: str) -> Fields:
    """Returns the JSON object of a checkpoint's file `name`, after checking its format number.

    Raises CheckpointError if the file is missing or damaged, and NewerFormatError if this version
    does not know the format.
    """
    try:
        value = files.read_json(checkpoint / name)
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: {name} is missing") from None
    except (OSError, UntrustedError) as error:
        raise CheckpointError(f"{checkpoint}: {name} is damaged: {error}") from None
    if type(value.get("format")) is not int or value["format"] < 0:
        raise CheckpointError(f"{checkpoint}: {name} is damaged: its format is no number")
    if value["format"] > FORMAT:
        formats = f"(format {value['format']}, this one reads up to {FORMAT})"
        raise NewerFormatError(
            f"{checkpoint}: written by a newer grpo_spmd {formats}; update grpo_spmd"
        )
    return value


def verify_files(checkpoint: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Compares the files of a checkpoint with its manifest. Raises CheckpointError if they differ.

    The ranks share the reading: every rank compares the names of all files, but sizes and SHA-256
    only of the files with the numbers `rank`, `rank + num_ranks`, and so on.
    """
    files = read_manifest(checkpoint)
    for name in sorted(files)[rank::num_ranks]:
        try:
            # The size is compared first, so that a file that was cut short need not be read.
            size = (checkpoint / name).lstat().st_size
            if size != files[name]["bytes"]:
                raise CheckpointError(
                    f"{checkpoint}: {name} has {size} bytes, and should have {files[name]['bytes']}"
                )
            digest = _sha256(checkpoint / name)
        except (OSError, UntrustedError) as error:
            raise CheckpointError(f"{checkpoint}: cannot read {name}: {error}") from None
        if digest != files[name]["sha256"]:
            raise CheckpointError(
                f"{checkpoint}: {name} is damaged (its SHA-256 is not the manifest's)"
            )


def verify_checkpoint(checkpoint: Path) -> None:
    """Verifies a whole checkpoint in one process. Raises CheckpointError."""
    verify_files(checkpoint)
    read_trainer(checkpoint)


def write_manifest(folder: Path, written: dict[str, Fields]) -> None:
    """Writes manifest.json, with an entry for each file in `folder`.

    `written` has the entries of files whose digest is known; these files are not read again.
    """
    files = dict(written)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)
    (folder / "manifest.json").write_text(manifest, encoding="utf-8")


def model_fingerprint(folder: Path) -> str:
    """Returns a SHA-256 over the names, sizes, beginnings and ends of a model's files.

    With it models are told apart without reading all of their bytes.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors" and path.name != "config.json":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits. Raises UntrustedError for a link."""
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
