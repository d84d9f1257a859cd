"""Files that survive a kill, a full disk and a power cut."""

from __future__ import annotations

import atexit
import errno
import io
import json
import math
import os
import re
import reprlib
import stat
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError, refuse


def hold_standard_streams() -> None:
    """/dev/null in place of a closed stdin, stdout or stderr: what is opened next would get its number, and be written
    to by whoever prints, or replaced by whoever starts a process."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # gets the lowest number that is free
            if getattr(sys, name) in (
                None,
                getattr(sys, f"__{name}__"),
            ):  # not a notebook's, which need no descriptor
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        if number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # of an ASCII terminal: a line that it lacks letters for
    atexit.unregister(_flush_stdout)  # once, however often this is called
    atexit.register(_flush_stdout)


def _flush_stdout() -> None:
    """Before Python does it, which prints a traceback where the reader has seen enough (--help | head)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(text: str) -> None:
    """On stdout, whose reader may have seen enough (--check | head)."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer
        if not isinstance(error, BrokenPipeError):
            refuse(ConfigError(f"stdout: {error.strerror}"))


def sync_to_disk(folder: Path) -> None:
    """fsync of all files and folders below, and of `folder` itself: a rename that outlives a power cut must not name
    empty files."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


def write_durably(path: Path, content: bytes) -> None:
    """Put a file in the place of another: after a kill, a full disk or a power cut it is the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may lead elsewhere, or wait for a reader
    temporary.write_bytes(content)
    sync_path(temporary)
    temporary.replace(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reads what somebody else may have made: a model's folder, a checkpoint's, what a run left. Only regular files are
# opened, never in a way that could wait, and read up to a size; JSON is checked field by field, by type and range.


_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class UntrustedError(ConfigError):
    """One line: the file, and what is wrong."""


def open_regular(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """Raises UntrustedError for a link (unless `follow`: the hub's cache is made of links), a fifo, a device, a folder;
    OSError where there is none."""
    try:
        # O_NONBLOCK: opening a fifo would wait for somebody to write into it
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        )
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UntrustedError(f"{path} is a link or a socket, and not a regular file") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UntrustedError(f"{path} is {_kind(mode)}, and not a regular file")
    return open(descriptor, "rb")


def regular_files(folder: Path) -> set[str]:
    """Relative names of all files below `folder`. Raises UntrustedError where something else is among them: a link may
    lead out of the folder, and a device has no end."""
    found, waiting = set[str](), [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    found.add(os.path.relpath(entry.path, folder))
                else:
                    kind = _kind(entry.stat(follow_symlinks=False).st_mode)
                    raise UntrustedError(
                        f"{entry.path} is {kind}; only regular files of the folder itself are read"
                    )
    return found


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """A JSON object. Raises UntrustedError for anything else, OSError where it cannot be read."""
    with open_regular(path, follow=follow) as file:
        content = file.read(1 + (64 << 20))
    if len(content) > 64 << 20:
        raise UntrustedError(f"{path} is larger than 64 MiB")
    return parse_object(content, path)


def parse_object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=reject_duplicates)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: also a number of more digits than Python reads
        raise UntrustedError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UntrustedError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("a name is given twice")
    return value


@dataclass(frozen=True)
class Rule:
    """What a field must be, in words and as a test of a JSON value."""

    says: str
    holds: Callable[[Any], bool]


def whole(low: int, high: int = 2**53) -> Rule:
    return Rule(
        f"a whole number from {low} to {high}",
        lambda value: type(value) is int and low <= value <= high,
    )


def text(pattern: str, says: str) -> Rule:
    return Rule(
        says, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None
    )


def list_of(rule: Rule, low: int, high: int) -> Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and low <= len(value) <= high and all(map(rule.holds, value))

    return Rule(f"a list of {low} to {high}, each {rule.says}", holds)


def mapping_of(rule: Rule) -> Rule:
    return Rule(
        f"a mapping, each name to {rule.says}",
        lambda value: isinstance(value, dict) and all(map(rule.holds, value.values())),
    )


def either(*rules: Rule) -> Rule:
    return Rule(
        " or ".join(rule.says for rule in rules),
        lambda value: any(rule.holds(value) for rule in rules),
    )


def or_null(rule: Rule) -> Rule:
    return Rule(f"null or {rule.says}", lambda value: value is None or rule.holds(value))


def check_fields(
    value: Mapping[str, Any],
    rules: Mapping[str, Rule],
    where: str | Path,
    needed: Collection[str] = (),
) -> None:
    """Raises UntrustedError for the first field that breaks its rule, or is `needed` and missing. Others are let be."""
    for name, rule in rules.items():
        if name not in value and name in needed:
            raise UntrustedError(f"{where} names no {name}, which must be {rule.says}")
        if name in value and not rule.holds(value[name]):
            raise UntrustedError(
                f"{where}: {name} must be {rule.says}; got {reprlib.repr(value[name])}"
            )


_PLAIN = Rule(
    "a plain value",
    lambda value: value is None or type(value) in (bool, int, float, str) or not value,
)
_SMALL = Rule("from 0 to 1e9", lambda value: type(value) in (int, float) and 0 <= value <= 1e9)
_DIGEST = text("[0-9a-f]{64}", "a SHA-256 in hex")
TRAINER = {
    **dict.fromkeys(
        ("step", "position", "num_updates", "skipped_in_a_row", "num_completions", "num_tokens"),
        whole(0),
    ),
    "world_size": whole(1, 2**20),
    "dtype": text("float32|bfloat16", "float32 or bfloat16"),
    **{"model_path": text(r"[^\0]+", "a text"), "config": mapping_of(_PLAIN)},
    **dict.fromkeys(("model_fingerprint", "data_fingerprint"), _DIGEST),
    "contents": or_null(mapping_of(_DIGEST)),
    "critic": or_null(mapping_of(whole(0))),
    "waiting": list_of(whole(0), 0, 2**20),
    "mismatch_scale": or_null(list_of(_SMALL, 2, 2)),
}
MANIFEST_FILE = {"bytes": whole(0), "sha256": _DIGEST}
_EOS = or_null(either(whole(0, 2**31), list_of(whole(0, 2**31), 0, 1000)))
# config.json of a model: what is counted with before the libraries see it. A list has an entry a layer.
_SIZE = or_null(either(whole(1, 2**31), list_of(or_null(whole(0, 2**31)), 0, 10_000)))
MODEL = {
    **{"model_type": text(r"[\w.-]+", "a name"), "num_labels": or_null(whole(0, 10_000))},
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers"), or_null(whole(1, 1000))
    ),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"), _SIZE
    ),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _SIZE),
    "eos_token_id": _EOS,
    "tie_word_embeddings": or_null(Rule("true or false", lambda value: type(value) is bool)),
}


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model. Raises UntrustedError, OSError."""
    path = folder / "config.json"
    config = read_json(path, follow=True)
    check_fields(config, MODEL, path, ("model_type",))
    if isinstance(config.get("text_config"), dict):
        check_fields(config["text_config"], MODEL, f"{path}: text_config")
    return config


def read_stop_tokens(folder: Path) -> set[int] | None:
    """`eos_token_id` of generation_config.json, else of config.json; None where neither has one."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = read_json(path, follow=True) if path.exists() else {}
        check_fields(config, {"eos_token_id": _EOS}, path)
        if (eos := config.get("eos_token_id")) is not None:
            return set(eos) if isinstance(eos, list) else {eos}
    return None


def read_index(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor by model.safetensors.index.json; None where there is no index."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return None
    index = read_json(path, follow=True)
    beside = text(r"[^/\\\0]+\.safetensors", "the name of a .safetensors file beside it")
    check_fields(index, {"weight_map": mapping_of(beside)}, path, ("weight_map",))
    return {name: folder / file for name, file in index["weight_map"].items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """{tensor: {"dtype", "shape", "data_offsets"}} of a safetensors file; UntrustedError where it is not whole."""
    with open_regular(path, follow=True) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        content = file.read(min(length, size, 100_000_000))
    ends = [8 + length]
    try:
        header = parse_object(content, path)
        header.pop("__metadata__", None)
        for entry in header.values():
            (start, end), shape = entry["data_offsets"], entry["shape"]
            is_sound = len(shape) < 65 and all(
                type(n) is int and 0 <= n < 2**63 for n in (start, end, *shape)
            )
            item = _ITEM_BYTES.get(entry["dtype"])
            if (
                not is_sound
                or start > end
                or (item is not None and math.prod(shape) * item != end - start)
            ):
                raise ValueError(path)
            ends.append(8 + length + end)
        if max(ends) != size:
            raise ValueError(path)
    except (KeyError, TypeError, ValueError):
        raise UntrustedError(f"{path} is not a whole safetensors file") from None
    return header


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a fifo",
        stat.S_IFDIR: "a folder",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")
