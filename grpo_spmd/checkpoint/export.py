"""A checkpoint as a folder that transformers, peft and vLLM load. It takes one process without a
GPU, whatever number of ranks saved the checkpoint, and memory for one output file (about 2 GiB, or
the largest tensor; all adapters)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from grpo_spmd.checkpoint.manifest import CheckpointError, read_trainer
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import read_json, regular_files, sync_path, sync_to_disk

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES, READ_BYTES = 2 << 30, 16 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Readable(Protocol):
    """A tensor that is somewhere in files."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(
        self, dtype: str
    ) -> Tensor: ...  # all of it as "float32" or "bfloat16", rounded to nearest even


@dataclass(frozen=True)
class _Piece:
    """Consecutive rows of a tensor, in one shard file."""

    file: Path
    first_row: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A float32 tensor of a checkpoint, in pieces that are in the order of their rows and leave
    none out."""

    name: str  # in the files, e.g. "policy.model.norm.weight"
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    def read(self, dtype: str) -> Tensor:
        whole = empty_tensor(self.shape, dtype)
        for piece in self.pieces:
            rows_at_a_time = max(
                1, READ_BYTES * piece.shape[0] // max(1, 4 * math.prod(piece.shape))
            )
            for row in range(0, piece.shape[0], rows_at_a_time):
                # Opened anew each time: pages of a mapping count as resident memory until it is
                # closed.
                with safe_open(piece.file, framework="pt") as file:
                    rows = file.get_slice(self.name)[row : row + rows_at_a_time]
                    whole[piece.first_row + row : piece.first_row + row + len(rows)].copy_(rows)
        return whole


def empty_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    import torch

    return torch.empty(shape, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])


def stored_tensors(
    checkpoint: Path, trainer: dict[str, Any], prefix: str = "policy."
) -> dict[str, StoredTensor]:
    """The tensors in the shards of `checkpoint` whose names begin with `prefix`, by the rest of it.
    Reads no values. `trainer`, its trainer.json, tells over how many ranks the rows were dealt.
    Raises CheckpointError: a shard is missing or unreadable, or rows of a tensor are missing or
    doubled."""
    pieces: dict[str, list[_Piece]] = {}
    for path in sorted((checkpoint / "state").glob("shard_*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith(prefix):
                        rows, (first_row, *others) = (
                            file.get_slice(name),
                            offsets[name]["saved_offsets"],
                        )
                        is_whole = type(first_row) is int and 1 + len(others) == len(
                            rows.get_shape()
                        )
                        if rows.get_dtype() != "F32" or not is_whole or any(others):
                            raise CheckpointError(f"{path}: {name} is not whole rows of float32")
                        pieces.setdefault(name, []).append(
                            _Piece(path, first_row, tuple(rows.get_shape()))
                        )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: not a checkpoint's shard ({type(error).__name__}: {error})"
            ) from None
    if not pieces:
        raise CheckpointError(
            f"{checkpoint}: no shard in its state folder holds a tensor {prefix}*"
        )
    num_ranks = trainer["world_size"] // trainer["config"].get("model.num_replicas", 1)
    return {
        name.removeprefix(prefix): _joined(name, pieces[name], checkpoint, num_ranks)
        for name in sorted(pieces)
    }


def _joined(name: str, found: list[_Piece], checkpoint: Path, num_ranks: int) -> StoredTensor:
    pieces = sorted((piece for piece in found if piece.shape[0]), key=lambda piece: piece.first_row)
    num_rows = 0
    for piece in pieces:
        first = piece.first_row
        if first != num_rows or piece.shape[1:] != pieces[0].shape[1:]:
            how = f"from {first} on are there twice, also in"
            if first > num_rows:
                how = f"{num_rows} to {first - 1} are missing, those before"
            raise CheckpointError(f"{checkpoint}: rows of {name} {how} {piece.file.name}")
        num_rows += piece.shape[0]
    # FSDP deals ceil(rows / ranks) rows to each rank, the rest to the last ones: the first shows
    # how many there are.
    if not pieces or -(-num_rows // num_ranks) != pieces[0].shape[0]:
        dealt = f"{num_rows} rows are there, dealt over {num_ranks} ranks"
        raise CheckpointError(f"{checkpoint}: the last rows of {name} are missing: {dealt}")
    return StoredTensor(name, (num_rows, *pieces[0].shape[1:]), tuple(pieces))


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: str | None = None, max_file_bytes: int = FILE_BYTES
) -> None:
    """Write the weights of `checkpoint` to `out` in HF's format with config and tokenizer, or its
    adapters in peft's. Needs no manifest; may run in any thread. `out` is complete or absent; where
    it is `checkpoint` itself, still being made, all files are put into it or none. `dtype`:
    "float32", "bfloat16" or None, which is what the engine of the run computed in; adapters are
    float32 always. No tensor is split, however few `max_file_bytes` are. Raises ConfigError (`out`
    is taken, `dtype` does not go with adapters, or a file is a link), CheckpointError (damaged),
    and OSError or SafetensorError where nothing can be written."""
    trainer = read_trainer(checkpoint, ("world_size", "config", "dtype"))
    regular_files(
        checkpoint
    )  # raises: a copied link would be another's file, a device or a fifo has no end
    tensors = stored_tensors(checkpoint, trainer)
    is_lora = (checkpoint / "model" / "adapter_config.json").is_file()
    if is_lora and dtype not in (None, "float32"):
        raise ConfigError(
            f"--dtype {dtype}: {checkpoint} holds adapters, which are float32 always; leave it out"
        )
    with complete_or_absent(out, into_existing=out == checkpoint) as made:
        shutil.copytree(checkpoint / "model", made, dirs_exist_ok=True)
        if is_lora:
            adapters = {
                f"base_model.model.{name}": tensor.read("float32")
                for name, tensor in tensors.items()
            }
            _save(adapters, made / "adapter_model.safetensors")
        else:
            save_model(tensors, made, dtype or str(trainer["dtype"]), max_file_bytes)


def save_model(
    tensors: Mapping[str, Readable], folder: Path, dtype: str, max_file_bytes: int = FILE_BYTES
) -> None:
    """Write them to `folder`, one file after the other, and the dtype into the config.json that is
    there."""
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": dtype}, indent=2), encoding="utf-8"
    )
    sizes = {name: math.prod(tensor.shape) * DTYPE_BYTES[dtype] for name, tensor in tensors.items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[other] for other in files[-1]) + size > max_file_bytes:
            files.append([])
        files[-1].append(name)
    if len(files) == 1:
        _save(
            {name: tensor.read(dtype) for name, tensor in tensors.items()},
            folder / "model.safetensors",
        )
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _save({name: tensors[name].read(dtype) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1), encoding="utf-8"
    )


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})  # without it transformers refuses the file


@contextmanager
def complete_or_absent(out: Path, *, into_existing: bool) -> Iterator[Path]:
    """A new folder to write into; when the block has ended its files are durably in `out`, and gone
    if it failed."""
    temporary = out / "export.tmp" if into_existing else out.with_name(out.name + ".tmp")
    if not into_existing and out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "exists and is not an empty folder; nothing is written over: choose another, or move it away"
        raise ConfigError(f"{out} {what}")
    try:
        temporary.mkdir(parents=True)
    except FileExistsError:
        what = "exists: an export is under way there, or one was killed; in that case remove it"
        raise ConfigError(f"{temporary} {what}") from None
    try:
        yield temporary
        sync_to_disk(temporary)
        if into_existing:
            for path in list(temporary.iterdir()):
                if (out / path.name).exists():
                    raise FileExistsError(f"{out / path.name} is there already")
                path.rename(out / path.name)
            temporary.rmdir()
            sync_path(out)
        else:
            temporary.rename(out)
            sync_path(out.parent)
    except BaseException:  # half an export would only keep a full disk full
        shutil.rmtree(temporary, ignore_errors=True)
        raise
