"""Reads files that others made, and writes files that survive a kill, a full disk and a power cut.

Such files are those of a model's folder, of a checkpoint and of an earlier run. Only regular files
are opened, never in a way that could wait, and they are read up to a size. JSON is checked field by
field, by type and range, before a library or a run relies on it.
"""

from __future__ import annotations

import atexit
import errno
import io
import json
import os
import reprlib
import stat
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import safetensors
from msgspec import Meta

from grpo_spmd.config.errors import ConfigError, refuse

_MAX_JSON_BYTES = 64 << 20


def hold_standard_streams() -> None:
    """Opens /dev/null in the place of a closed stdin, stdout or stderr.

    Otherwise the next file that is opened would get the number of the closed stream. Code that
    prints would then write into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # open() returns the lowest free number, which is this stream's.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            # A notebook's own streams need no descriptor.
            if getattr(sys, name) in (None, getattr(sys, f"__{name}__")):
                mode = "w" if number else "r"
                setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if number and isinstance(stream, io.TextIOWrapper):
            # An ASCII terminal lacks letters: print escapes instead of raising.
            stream.reconfigure(errors="backslashreplace")
    # Registered only once, however often this function is called.
    atexit.unregister(_flush_stdout)
    atexit.register(_flush_stdout)


def _flush_stdout() -> None:
    """Flushes before Python does, which prints a traceback if the reader is gone (| head)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Sends what is left in the buffer to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(text: str) -> bool:
    """Prints on stdout. Returns False if the reader is gone (--check | head)."""
    try:
        print(text, flush=True)
    except OSError as error:
        _discard_stdout()
        if not isinstance(error, BrokenPipeError):
            refuse(ConfigError(f"stdout: {error.strerror}"))
        return False
    return True


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file; after a kill, a full disk or a power cut it is the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    # Something else may have this name: a link, or a fifo that would wait for a reader.
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)


def sync_to_disk(folder: Path) -> None:
    """Syncs all files and folders below `folder`, and itself.

    Without it a rename could survive a power cut, and name empty files.
    """
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def sync_path(path: Path) -> None:
    """Waits until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UntrustedError(ConfigError):
    """A file that somebody else made cannot be used. One line: the file, and what is wrong."""


def open_regular(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """Opens a regular file for reading.

    Raises UntrustedError for a fifo, a device, a folder and, unless `follow`, a link (the hub's
    cache is made of links); OSError if there is nothing.
    """
    # O_NONBLOCK: opening a fifo would wait for somebody to write into it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    refusal = UntrustedError(
        f"{path} is a folder, a link, a fifo, a socket or a device, and not a regular file"
    )
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise refusal from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return open(descriptor, "rb")


def regular_files(folder: Path) -> set[str]:
    """Returns the relative names of all files below `folder`.

    Raises UntrustedError if something else is among them: a link may lead out of the folder, and a
    device has no end.
    """
    names: set[str] = set()
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            names.add(str(path.relative_to(folder)))
        elif not stat.S_ISDIR(mode):
            raise UntrustedError(
                f"{path} is a link, a fifo, a socket or a device; only regular files of the "
                "folder itself are read"
            )
    return names


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Returns a JSON object. Raises UntrustedError for anything else, OSError if unreadable."""
    with open_regular(path, follow=follow) as file:
        content = file.read(1 + _MAX_JSON_BYTES)
    if len(content) > _MAX_JSON_BYTES:
        raise UntrustedError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB")
    return parse_object(content, path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the JSON object in `content`. Raises UntrustedError, which names `path`."""
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        # ValueError also for a number of more digits than Python reads.
        raise UntrustedError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UntrustedError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict. Raises ValueError if a name is given twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name is given twice")
    return value


def check_fields(
    value: Mapping[str, Any],
    types: Mapping[str, Any],
    subject: str | Path,
    needed: Collection[str] = (),
) -> None:
    """Raises UntrustedError for the first field that is not of its type, or `needed` and missing.

    `types` has types as msgspec reads them. Fields without a type may be anything.
    """
    for name, field_type in types.items():
        if name in value:
            try:
                msgspec.convert(value[name], field_type)
            # not only ValidationError: msgspec cannot quote half a surrogate pair
            except ValueError as error:
                displayed = reprlib.repr(value[name])
                raise UntrustedError(f"{subject}: {name}: {error}; got {displayed}") from None
        elif name in needed:
            raise UntrustedError(f"{subject} names no {name}")


# Types of fields, as msgspec reads them; it takes no bool for a number. A pattern must match as a
# whole, so \Z and not $, which would pass a line break.
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31)]
_NumLayers = Annotated[int, Meta(ge=1, le=1000)]
_Small = Annotated[float, Meta(ge=0, le=1e9)]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_FileName = Annotated[str, Meta(pattern=r"\A[^/\\\0]+\.safetensors\Z")]
_Empty = Annotated[list[Any], Meta(max_length=0)] | Annotated[dict[str, Any], Meta(max_length=0)]
# The trainer's state in a checkpoint.


class _UpdateCounts(TypedDict):
    """What a critic has counted."""

    num_updates: _Count
    skipped_in_a_row: _Count


TRAINER = {
    **dict.fromkeys(
        ("step", "position", "num_updates", "skipped_in_a_row", "num_completions", "num_tokens"),
        _Count,
    ),
    "world_size": Annotated[int, Meta(ge=1, le=2**20)],
    "dtype": Literal["float32", "bfloat16"],
    "model_path": Annotated[str, Meta(pattern=r"\A[^\0]+\Z")],
    "config": dict[str, bool | int | float | str | _Empty | None],
    "model_fingerprint": _Digest,
    "data_fingerprint": _Digest,
    "contents": dict[str, _Digest] | None,
    "critic": _UpdateCounts | None,
    "waiting": Annotated[list[_Count], Meta(max_length=2**20)],
    "mismatch_scale": tuple[_Small, _Small] | None,
}


class ManifestFile(TypedDict):
    """The entry of a file in a checkpoint's manifest."""

    bytes: _Count
    sha256: _Digest


MANIFEST = {"files": dict[str, ManifestFile]}
_EOS = {"eos_token_id": _TokenId | Annotated[list[_TokenId], Meta(max_length=1000)] | None}
# Some sizes may be a list with one entry for each layer.
_LayerSizes = Annotated[list[_TokenId | None], Meta(max_length=10_000)]
# What config.json of a model says about sizes, before the libraries read it.
MODEL = {
    "model_type": Annotated[str, Meta(pattern=r"\A[\w.-]+\Z")],
    "num_labels": Annotated[int, Meta(ge=0, le=10_000)] | None,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _NumLayers | None),
    **dict.fromkeys(
        [
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ],
        Annotated[int, Meta(ge=1, le=2**31)] | _LayerSizes | None,
    ),
    **_EOS,
    "tie_word_embeddings": bool | None,
}


def read_model_config(folder: Path) -> dict[str, Any]:
    """Returns config.json of a model. Raises UntrustedError, OSError."""
    path = folder / "config.json"
    config = read_json(path, follow=True)
    check_fields(config, MODEL, path, needed=("model_type",))
    if isinstance(config.get("text_config"), dict):
        check_fields(config["text_config"], MODEL, f"{path}: text_config")
    return config


def read_stop_tokens(folder: Path) -> set[int] | None:
    """Returns `eos_token_id` of generation_config.json, else of config.json, else None."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = read_json(path, follow=True) if path.exists() else {}
        check_fields(config, _EOS, path)
        eos = config.get("eos_token_id") or config.get("text_config", {}).get("eos_token_id")
        if eos is not None:
            return set(eos) if isinstance(eos, list) else {eos}
    return None


def read_index(folder: Path) -> dict[str, Path] | None:
    """Returns the file of each tensor by model.safetensors.index.json; None if there is none."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return None
    index = read_json(path, follow=True)
    # a file beside the index, and not one that a path leads to
    check_fields(index, {"weight_map": dict[str, _FileName]}, path, needed=("weight_map",))
    return {name: folder / file for name, file in index["weight_map"].items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns {tensor: {"dtype", "shape"}} of a safetensors file.

    Raises UntrustedError if the file is not whole.
    """
    # safetensors itself would wait for somebody to write into a fifo.
    open_regular(path, follow=True).close()
    try:
        # Without a look at the tensors, which are mapped.
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: {"dtype": tensor.get_dtype(), "shape": tensor.get_shape()}
                for name, tensor in tensors.items()
            }
    except safetensors.SafetensorError as error:
        raise UntrustedError(f"{path} is not a whole safetensors file: {error}") from None
