"""This module reads files that others made, and writes files that survive a kill, a full disk and a
power cut.

Files of others are those of a model's folder, of a checkpoint and of an earlier run. Only regular
files are opened, in a way that cannot block, and only a limited number of bytes is read. The types
and ranges of JSON fields are checked before a library or a run relies on them.
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
    """Opens /dev/null in place of a closed stdin, stdout or stderr.

    Otherwise the next file that is opened would get the number of the closed stream, and code that
    prints would write into that file. Also lets stdout and stderr write any character, and flushes
    stdout at exit without a traceback.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # os.open returns the lowest free number, which is this stream's.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            # A notebook's replacement of a stream needs no descriptor, so it is kept.
            if getattr(sys, name) in (None, getattr(sys, f"__{name}__")):
                mode = "w" if number else "r"
                setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if number and isinstance(stream, io.TextIOWrapper):
            # A terminal may not be able to show a character: print an escape instead of raising.
            stream.reconfigure(errors="backslashreplace")
    # Unregister first, so that it is registered once, however often this function is called.
    atexit.unregister(_flush_stdout)
    atexit.register(_flush_stdout)


def _flush_stdout() -> None:
    """Flushes stdout, and discards what is left if nobody reads it any more.

    Python's own flush at exit would then print a traceback, as in `... | head`.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _discard_stdout() -> None:
    """Redirects stdout to /dev/null, so that what is left in its buffer goes there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(text: str) -> bool:
    """Prints to stdout. Returns False if nobody reads it any more, as in `--check | head`.

    Exits with an error message if stdout cannot be written, for instance to a full disk.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        _discard_stdout()
        if not isinstance(error, BrokenPipeError):
            refuse(ConfigError(f"stdout: {error.strerror}"))
        return False
    return True


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file's content, so that the file never holds a part of it.

    After a kill, a full disk or a power cut the file has either the old content or the new one. The
    folder is not synced, so a power cut may undo the replacement. Raises OSError.
    """
    temporary = path.with_name(path.name + ".tmp")
    # Something else may have this name: a link, or a fifo, which would block until it has a reader.
    temporary.unlink(missing_ok=True)
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)


def sync_to_disk(folder: Path) -> None:
    """Syncs a folder and all files and folders in it, at any depth.

    Called before the folder gets its final name: otherwise a power cut could keep the new name and
    lose the content of files.
    """
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def sync_path(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UntrustedError(ConfigError):
    """Raised if a file that somebody else made cannot be used.

    The message is one line: the file, and what is wrong with it.
    """


def open_regular(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """Opens a regular file for reading, without ever blocking.

    Raises UntrustedError if `path` is anything else: a fifo, a device, a folder or, unless
    `follow`, a link (the hub's cache consists of links). Raises OSError if it does not exist.
    """
    # O_NONBLOCK, because opening a fifo would otherwise wait for a writer.
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

    Raises UntrustedError if it contains anything but files and folders: a link may lead out of
    `folder`, and a device has no end.
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
    """Returns the JSON object in a file.

    Raises UntrustedError if the file is larger than 64 MiB or holds anything else, OSError if it
    cannot be read. `follow` is as in open_regular.
    """
    with open_regular(path, follow=follow) as file:
        content = file.read(1 + _MAX_JSON_BYTES)
    if len(content) > _MAX_JSON_BYTES:
        raise UntrustedError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB")
    return parse_object(content, path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    """Returns the JSON object in `content`.

    Raises UntrustedError if it is anything else; the message names `path`, the file with this
    content.
    """
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        # ValueError is also raised for a number of more digits than Python converts.
        raise UntrustedError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UntrustedError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object as a dict. It is an `object_pairs_hook` for json.loads.

    Raises ValueError if a name is there twice: another reader might take the other value.
    """
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
    """Raises UntrustedError if a field of `value` has the wrong type, or is `needed` and missing.

    `types` has the type of each field, in msgspec's form. Fields without a type may be anything.
    `subject` begins the message.
    """
    for name, field_type in types.items():
        if name in value:
            try:
                msgspec.convert(value[name], field_type)
            # msgspec raises ValidationError, or another ValueError if it cannot encode a lone
            # surrogate in the value.
            except ValueError as error:
                displayed = reprlib.repr(value[name])
                raise UntrustedError(f"{subject}: {name}: {error}; got {displayed}") from None
        elif name in needed:
            raise UntrustedError(f"{subject} names no {name}")


# Types of fields, in msgspec's form. To msgspec, True is not a number. Patterns end with \Z, since
# $ would accept a line break at the end.
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31)]
_NumLayers = Annotated[int, Meta(ge=1, le=1000)]
_Small = Annotated[float, Meta(ge=0, le=1e9)]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_FileName = Annotated[str, Meta(pattern=r"\A[^/\\\0]+\.safetensors\Z")]
_Empty = Annotated[list[Any], Meta(max_length=0)] | Annotated[dict[str, Any], Meta(max_length=0)]


class _UpdateCounts(TypedDict):
    """The counts of a critic's updates in a checkpoint."""

    num_updates: _Count
    skipped_in_a_row: _Count


# The fields of a checkpoint's trainer.json.
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


# The fields of a checkpoint's manifest.
MANIFEST = {"files": dict[str, ManifestFile]}
_EOS = {"eos_token_id": _TokenId | Annotated[list[_TokenId], Meta(max_length=1000)] | None}
# Some sizes may be a list with one entry for each layer.
_LayerSizes = Annotated[list[_TokenId | None], Meta(max_length=10_000)]
# Fields of a model's config.json, which are checked before libraries rely on them.
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
    """Returns the config.json in a model's folder, after a check of its fields.

    Raises UntrustedError if a field is wrong, OSError if the file cannot be read.
    """
    path = folder / "config.json"
    config = read_json(path, follow=True)
    check_fields(config, MODEL, path, needed=("model_type",))
    if isinstance(config.get("text_config"), dict):
        check_fields(config["text_config"], MODEL, f"{path}: text_config")
    return config


def read_stop_tokens(folder: Path) -> set[int] | None:
    """Returns the ids of a model's stop tokens, its `eos_token_id`, as a set.

    They are those of generation_config.json, or else those of config.json. Returns None if neither
    has any.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = read_json(path, follow=True) if path.exists() else {}
        check_fields(config, _EOS, path)
        eos = config.get("eos_token_id") or (config.get("text_config") or {}).get("eos_token_id")
        if eos is not None:
            return set(eos) if isinstance(eos, list) else {eos}
    return None


def read_index(folder: Path) -> dict[str, Path] | None:
    """Returns the file of each tensor by the tensor's name, for a model in several files.

    It reads model.safetensors.index.json in the model's folder. Returns None if there is no such
    file.
    """
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return None
    index = read_json(path, follow=True)
    # _FileName has no slash: only a file beside the index is read, not one elsewhere.
    check_fields(index, {"weight_map": dict[str, _FileName]}, path, needed=("weight_map",))
    return {name: folder / file for name, file in index["weight_map"].items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns {name: {"dtype", "shape"}} of the tensors in a safetensors file.

    Raises UntrustedError if the file is incomplete or has another format.
    """
    # Refuse a fifo, for which safetensors itself would wait.
    open_regular(path, follow=True).close()
    try:
        # The tensors are memory-mapped; get_slice does not read them.
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: {"dtype": tensor.get_dtype(), "shape": tensor.get_shape()}
                for name, tensor in tensors.items()
            }
    except safetensors.SafetensorError as error:
        raise UntrustedError(f"{path} is not a whole safetensors file: {error}") from None
