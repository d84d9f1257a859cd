"""This module exports a checkpoint as a folder that transformers, peft and vLLM can load.

One process without a GPU does it, however many ranks saved the checkpoint. It needs memory for one
output file: about 2 GiB, or the largest tensor, or all adapters. A checkpoint with adapters (LoRA)
is exported as adapters, or with `export_merged` as the base model with the adapters added to its
weights. Tensors are read a few rows at a time. In the checkpoint a tensor is cut into blocks of
rows, one block for the shard file of each rank.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from safetensors import SafetensorError, safe_open

from grpo_spmd.checkpoint.manifest import CheckpointError, model_fingerprint, read_trainer
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import (
    UntrustedError,
    check_fields,
    read_header,
    read_json,
    read_model_config,
    regular_files,
    sync_path,
    sync_to_disk,
)
from grpo_spmd.model.config_json import has_text_part, is_constant
from grpo_spmd.records import Fields

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_spmd.model.families.build import SavedLayout, SavedTensor


# The most bytes of an output file (unless a single tensor has more), and of rows read at a time.
FILE_BYTES = 2 << 30
READ_BYTES = 16 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# The fields of adapter_config.json that a merge needs, with their types.
_ADAPTER = {
    "r": Annotated[int, msgspec.Meta(ge=1, le=2**20)],
    "lora_alpha": Annotated[float, msgspec.Meta(gt=0, lt=1e9)],
}
# Options of adapter_config.json that change how adapters are computed. A merge refuses them.
_ADAPTER_VARIANTS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class _Piece:
    """The place of consecutive rows of a tensor: all rows of it that one rank's shard file has."""

    file: Path
    first_row: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """The place of a float32 tensor in the shard files of a checkpoint."""

    name: str
    """The name in the files, such as "policy.model.norm.weight"."""
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    """The blocks of the tensor's rows, in the order of rows and without a gap."""

    def read(self, dtype: str) -> Tensor:
        """Returns the whole tensor as `dtype`, rounded to nearest even."""
        result = _empty_tensor(self.shape, dtype)
        for piece in self.pieces:
            for row, rows in _read_rows(piece.file, self.name):
                result[piece.first_row + row :][: len(rows)] = rows
        return result


@dataclass(frozen=True)
class _StoredRows:
    """Those rows of a checkpoint's tensor that form a tensor of their own in HF's format, such as
    the matrix of one expert."""

    tensor: StoredTensor
    saved: SavedTensor
    """Which rows they are, and the shape of their own tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in HF's format."""
        return self.saved.shape

    def read(self, dtype: str) -> Tensor:
        """Returns the rows as `dtype`, rounded to nearest even."""
        from grpo_spmd.model.families.build import SavedTensor, read_rows
        from grpo_spmd.model.sharding import num_columns

        name, shape = self.tensor.name, self.tensor.shape
        result = _empty_tensor(self.shape, dtype)
        # A vector is a matrix of one column, and all dimensions but the last make rows: each index
        # of the first dimension has `height` of them.
        rows, height = result.view(-1, num_columns(shape)), math.prod(shape[1:-1])
        for piece in self.tensor.pieces:
            # A piece, too, can be described as a tensor on disk with some of the parameter's rows.
            stored = SavedTensor(name, piece.first_row * height, piece.shape)
            files, folder = {name: piece.file}, piece.file.parent
            read_rows(stored, files, folder, rows=rows, start=self.saved.start)
        return result


def _saved_tensors(
    tensors: Mapping[str, StoredTensor], folder: Path, trainer: Fields
) -> dict[str, StoredTensor | _StoredRows | _Merged]:
    """Returns the tensors by their names in HF's format, in which each expert has tensors of its
    own.

    `folder` has the model's config.json. If the model has several parts (such as vision and text),
    of which only the text part was trained, the names are those of the run's base model, and the
    tensors of its other parts are returned too. Raises ConfigError if the base model cannot be
    found.
    """
    is_part = has_text_part(read_model_config(folder))
    if not is_part and all(len(tensor.shape) < 3 for tensor in tensors.values()):
        return dict(tensors)
    from grpo_spmd.model.families.build import build_on_meta, saved_layout, stored_layout

    model = build_on_meta(str(folder))
    layout = saved_layout(model)
    by_name: dict[str, StoredTensor | _StoredRows | _Merged] = {}
    if is_part:
        remedy = "bring it back: an export has all of its parts"
        files = _base_files(str(trainer.get("model_path")), trainer, remedy)
        layout = stored_layout(model, files, layout)
        by_name |= _other_parts(model, files, layout)
    for name, tensor in tensors.items():
        if name in layout:
            by_name |= {saved.name: _StoredRows(tensor, saved) for saved in layout[name]}
        else:
            by_name[name] = tensor
    return by_name


def _other_parts(model: Any, files: Mapping[str, Path], layout: SavedLayout) -> dict[str, _Merged]:
    """Returns the tensors of the untrained parts of a model of several parts, such as vision.

    `layout` describes the tensors of the text part in `files`, which is trained."""
    trained = {saved.name for stored in layout.values() for saved in stored}
    if model.config.tie_word_embeddings:
        # A file may have the tied head a second time, as it was before the training.
        trained.add("lm_head.weight")
    headers = {path: read_header(path) for path in set(files.values())}
    return {
        name: _Merged(path, name, tuple(headers[path][name]["shape"]), adapter=None, scale=1.0)
        for name, path in files.items()
        if name not in trained
    }


def _base_files(path: str, trainer: Fields, remedy: str) -> dict[str, Path]:
    """Returns the file of each tensor of the model that a run began with, a folder or a hub id.

    Raises ConfigError, with `remedy`, if there is no model at `path`, or another one than
    trainer.json (`trainer`) recorded."""
    from huggingface_hub.errors import HfHubHTTPError

    from grpo_spmd.model.config_json import checkpoint_folder, tensor_files

    try:
        folder = checkpoint_folder(path)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"the base model {path} cannot be found (it is no folder here, "
            f"and the hub gives none: {type(error).__name__}); {remedy}"
        ) from None
    fingerprint = trainer.get("model_fingerprint")
    if fingerprint and model_fingerprint(folder) != fingerprint:
        raise ConfigError(f"{folder} holds another model than the run began with; {remedy}")
    return tensor_files(folder)


def _empty_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns an uninitialized tensor on the CPU; `dtype` is "float32" or "bfloat16"."""
    import torch

    return torch.empty(shape, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])


def _read_rows(path: Path, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yields (index of the first row, rows) of a tensor in a file, at most READ_BYTES at a time."""
    row = 0
    num_rows = 1
    while row < num_rows:
        # The file is opened each time, since the pages that were read from a mapped file count as
        # resident memory until it is closed.
        with safe_open(path, framework="pt") as file:
            tensor = file.get_slice(name)
            num_rows, *columns = tensor.get_shape()
            rows = tensor[row : row + max(1, READ_BYTES // (4 * max(1, math.prod(columns))))]
        yield row, rows
        row += max(1, len(rows))


def stored_tensors(
    checkpoint: Path, trainer: Fields, prefix: str = "policy."
) -> dict[str, StoredTensor]:
    """Returns the tensors whose names begin with `prefix`, by the rest of their names.

    No values are read. `trainer` is the checkpoint's trainer.json, which tells over how many ranks
    the rows were distributed. Raises CheckpointError if a shard is missing or unreadable, or if
    rows are missing or doubled.
    """
    pieces: dict[str, list[_Piece]] = {}
    for path in sorted((checkpoint / "state").glob("shard_*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith(prefix):
                        rows = file.get_slice(name)
                        shape = tuple(rows.get_shape())
                        first_row, *columns = offsets[name]["saved_offsets"]
                        has_offsets = type(first_row) is int and 1 + len(columns) == len(shape)
                        # Moments may be 8-bit codes.
                        dtypes = ("F32", "I8", "U8") if "exp_avg" in name else ("F32",)
                        if rows.get_dtype() not in dtypes or not has_offsets or any(columns):
                            raise ValueError(f"{name} is not whole rows of {' or '.join(dtypes)}")
                        pieces.setdefault(name, []).append(_Piece(path, first_row, shape))
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
        name.removeprefix(prefix): _join_pieces(name, pieces[name], checkpoint, num_ranks)
        for name in sorted(pieces)
    }


def _join_pieces(
    name: str, unordered: list[_Piece], checkpoint: Path, num_ranks: int
) -> StoredTensor:
    """Returns the tensor that these pieces form, in any order.

    `num_ranks` is the number of ranks over which FSDP distributed the rows. Raises CheckpointError
    if rows are missing or doubled.
    """
    pieces = sorted((p for p in unordered if p.shape[0]), key=lambda piece: piece.first_row)
    num_rows = 0
    for piece in pieces:
        if piece.first_row != num_rows or piece.shape[1:] != pieces[0].shape[1:]:
            raise CheckpointError(
                f"{checkpoint}: rows of {name} are missing or there twice: {piece.file.name} "
                f"begins at row {piece.first_row}, and the rows before it end at {num_rows}"
            )
        num_rows += piece.shape[0]
    # FSDP gives ceil(rows / ranks) rows to each rank, and fewer or none to the last ranks. So the
    # size of the first block shows whether blocks are missing at the end.
    if not pieces or -(-num_rows // num_ranks) != pieces[0].shape[0]:
        raise CheckpointError(
            f"{checkpoint}: the last rows of {name} are missing: "
            f"{num_rows} rows are there, dealt over {num_ranks} ranks"
        )
    return StoredTensor(name, (num_rows, *pieces[0].shape[1:]), tuple(pieces))


def export_checkpoint(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Writes the weights of `checkpoint` to `out` in HF's format, or its adapters in peft's.

    Config and tokenizer are written too. Afterwards `out` is complete, or absent after an error.
    While a checkpoint is being made, `out` may be `checkpoint` itself, which needs no manifest yet:
    then all files are put into it, or none. Any thread may call this. `dtype` is "float32",
    "bfloat16", or None for the dtype in which the run's engine computed; adapters are always
    float32. No tensor is split into two files, however large it is.

    Raises ConfigError if `out` is taken or `dtype` does not fit adapters, UntrustedError if a file
    is a link, CheckpointError if the checkpoint is damaged, and OSError or SafetensorError if
    nothing can be written.
    """
    trainer = read_trainer(checkpoint, ("world_size", "config", "dtype"))
    # Raises for links, which may lead to private files, and for fifos and devices without an end.
    regular_files(checkpoint)
    tensors = stored_tensors(checkpoint, trainer)
    is_lora = (checkpoint / "model" / "adapter_config.json").is_file()
    if is_lora and dtype not in (None, "float32"):
        raise ConfigError(
            f"--dtype {dtype}: {checkpoint} holds adapters, which are always float32; leave it out"
        )
    with complete_or_absent(out, into_existing=out == checkpoint) as folder:
        shutil.copytree(checkpoint / "model", folder, dirs_exist_ok=True)
        if is_lora:
            adapters = {
                f"base_model.model.{name}": tensor.read("float32")
                for name, tensor in tensors.items()
            }
            _save(adapters, folder / "adapter_model.safetensors")
        else:
            saved = _saved_tensors(tensors, folder, trainer)
            save_model(saved, folder, dtype or str(trainer["dtype"]))


def save_model(
    tensors: Mapping[str, StoredTensor | _StoredRows | _Merged],
    folder: Path,
    dtype: str,
) -> None:
    """Writes the tensors to `folder` as safetensors files, and the dtype into its config.json.

    There is one file, or several of at most FILE_BYTES with an index.
    """
    config = read_json(folder / "config.json")
    parts = [part for part in config.values() if isinstance(part, dict) and "dtype" in part]
    for part in (config, *parts):
        part.pop("torch_dtype", None)
        part["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    dtypes = {name: "float32" if is_constant(name) else dtype for name in tensors}
    sizes = {
        name: math.prod(tensor.shape) * DTYPE_BYTES[dtypes[name]]
        for name, tensor in tensors.items()
    }
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[member] for member in files[-1]) + size > FILE_BYTES:
            files.append([])
        files[-1].append(name)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _save({name: tensors[name].read(dtypes[name]) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=1), encoding="utf-8"
        )


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes one safetensors file."""
    from safetensors.torch import save_file

    # The file gets the mode that the umask gives, as all other files; save_file would make it 0600.
    path.touch()
    mode = path.stat().st_mode
    # transformers refuses a file without this metadata.
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


@contextmanager
def complete_or_absent(out: Path, *, into_existing: bool) -> Iterator[Path]:
    """Yields a new folder for the caller's files, which is renamed to `out` when the block ends.

    With `into_existing` its files are moved into `out`, which exists already. If the block fails,
    the new folder is removed. Raises ConfigError if `out` is taken, or if another export is under
    way.
    """
    temporary = out / "export.tmp" if into_existing else out.with_name(out.name + ".tmp")
    if not into_existing and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not an empty folder; nothing is written over: "
            "choose another, or move it away"
        )
    try:
        temporary.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{temporary} exists: an export is under way there, or one was killed; "
            "in that case remove it"
        ) from None
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
    except BaseException:  # an incomplete export would only keep a full disk full
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Merged:
    """A tensor of the merged model: W + scale * B A, for a tensor W of the base model.

    `adapter` is (A, B). If it is None, the tensor is W itself.
    """

    file: Path
    """The file and the name under which W is stored."""
    name: str
    shape: tuple[int, ...]
    adapter: tuple[StoredTensor, StoredTensor] | None
    scale: float

    def read(self, dtype: str) -> Tensor:
        """Returns the sum, computed in float32 and rounded once."""
        merged = _empty_tensor(self.shape, dtype)
        a, b = (tensor.read("float32") for tensor in self.adapter) if self.adapter else (None, None)
        for row, rows in _read_rows(self.file, self.name):
            rows_range = slice(row, row + len(rows))
            merged[rows_range] = (
                rows.float()
                if a is None or b is None
                else rows.float().addmm(b[rows_range], a, alpha=self.scale)
            )
        return merged


def export_merged(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    base: Path | None = None,
) -> None:
    """Writes the base model plus the adapters of `checkpoint` to `out` in HF's format.

    `base` is the folder of the base model; None means the folder or the hub id that the run used.
    `dtype` and errors are those of `export_checkpoint`. Raises ConfigError also if the checkpoint
    has no adapters, or if the base model cannot be found or is not the model that the run used.
    """

    trainer = read_trainer(checkpoint, ("world_size", "config", "dtype", "model_path"))
    # Raises for links, which may lead out of the folder.
    regular_files(checkpoint)
    adapter_config = checkpoint / "model" / "adapter_config.json"
    if not adapter_config.is_file():
        raise ConfigError(
            f"--merge: {checkpoint} holds a whole model and no adapters; leave --merge out"
        )
    path = str(base or trainer["model_path"])
    files = _base_files(path, trainer, "name the right one with --base")
    folder = next(iter(files.values())).parent
    values = read_json(adapter_config)
    check_fields(values, _ADAPTER, adapter_config, _ADAPTER)
    for name in _ADAPTER_VARIANTS:
        if values.get(name):
            raise UntrustedError(f"{adapter_config}: {name} must be off; got {values[name]!r}")
    tensors = _merged_tensors(
        folder,
        files,
        stored_tensors(checkpoint, trainer),
        scale=values["lora_alpha"] / values["r"],
        checkpoint=checkpoint,
    )
    with complete_or_absent(out, into_existing=False) as temporary:
        copy_companions(folder, temporary)
        save_model(tensors, temporary, dtype or str(trainer["dtype"]))


def copy_companions(model: Path, folder: Path) -> None:
    """Copies a model's files other than weights (config, tokenizer, templates) to `folder`."""
    for path in model.iterdir():
        # The model's folder may be another run's checkpoint. Its manifest.json and trainer.json
        # would be taken for those of the new folder.
        is_state = path.name.endswith((".index.json", "manifest.json", "trainer.json"))
        is_companion = path.suffix in (".json", ".txt", ".model", ".jinja") and not is_state
        if path.is_file() and is_companion:
            shutil.copyfile(path, folder / path.name)


def _merged_tensors(
    folder: Path,
    files: Mapping[str, Path],
    adapters: dict[str, StoredTensor],
    scale: float,
    checkpoint: Path,
) -> dict[str, _Merged]:
    """Returns the tensors of the merged model by the names that they have in the base model's
    `files`.

    A tied lm_head is there only once. Raises ConfigError if the base model lacks a tensor, and
    CheckpointError if an adapter belongs to no parameter or does not have the shape for it.
    """
    from grpo_spmd.model.families.build import (
        SavedTensor,
        build_on_meta,
        saved_layout,
        stored_layout,
    )

    model = build_on_meta(str(folder))
    layout = stored_layout(model, files, saved_layout(model))
    tensors: dict[str, _Merged] = {}
    if has_text_part(read_model_config(folder)):
        tensors |= _other_parts(model, files, layout)
    num_used = 0
    for name, parameter in model.named_parameters():
        layer = name.removesuffix("weight")
        a = adapters.get(f"{layer}lora_A.weight")
        b = adapters.get(f"{layer}lora_B.weight")
        shape = tuple(parameter.shape)
        # W is [out, in], A is [rank, in], B is [out, rank].
        pair = None
        if a is not None and b is not None:
            pair = (a, b)
            num_used += 2
            if a.shape[1:] + b.shape != (shape[1], shape[0], a.shape[0]):
                raise CheckpointError(
                    f"{checkpoint}: the adapter of {name} does not have the shape for {list(shape)}"
                )
        for saved in layout.get(name, [SavedTensor(name, 0, shape)]):
            if saved.name not in files:
                raise ConfigError(f"--merge: {folder} has no tensor {saved.name}")
            tensors[saved.name] = _Merged(files[saved.name], saved.name, saved.shape, pair, scale)
    if num_used != len(adapters):
        raise CheckpointError(
            f"{checkpoint}: {len(adapters) - num_used} tensors of adapters belong to no layer "
            f"of {folder}"
        )
    return tensors
