"""Reads rollout dumps, of earlier versions too, and checks them line by line. Imports no torch."""

from __future__ import annotations

import base64
import gzip
import json
import math
import struct
import types
import typing
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import OF_EPISODES, RolloutRecord
from grpo_spmd.observe.rollout_turns import read_episode
from grpo_spmd.untrusted import open_regular


def read_lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a dump, without their ends. Raises OSError where it cannot be opened, and ConfigError where it is no
    file, or not a whole one of gzip."""
    with open_regular(path, follow=True) as file:
        lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        try:
            for line in lines:
                yield line.removesuffix(b"\n")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{path}: not a whole gzip file: {error}") from None


def read_rollout(line: bytes, where: str) -> RolloutRecord:
    """A line of a dump, without fields that we do not know. Raises ConfigError, which begins with `where`."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
    values = {**_LATER, **values}
    for name, kinds in _KINDS.items():
        if name not in values or not isinstance(values[name], kinds) or isinstance(values[name], bool):
            found = f"{values[name]!r:.80}" if name in values else "missing"
            raise ConfigError(f"{where}: {name} is {found}; this is no rollout dump")
    for name in _NUMBERS:
        items: list[Any] = values[name] if isinstance(values[name], list) else [values[name]]
        if odd := [item for item in items if type(item) is not int or not 0 <= item < 2**63]:
            raise ConfigError(f"{where}: {name} has {odd[0]!r:.80}; this is no rollout dump")
    for name, kinds in _ITEMS.items():
        if odd := [item for item in values[name].values() if not isinstance(item, kinds) or isinstance(item, bool)]:
            raise ConfigError(f"{where}: {name} has {odd[0]!r:.80}; this is no rollout dump")
    try:
        values["rollout_logprobs"] = _float32(values["rollout_logprobs"])
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise ConfigError(f"{where}: rollout_logprobs are no numbers ({error}); this is no rollout dump") from None
    record = RolloutRecord(**{name: values[name] for name in _KINDS})
    if (tokens := len(record.completion_ids)) != (logprobs := len(record.rollout_logprobs)):
        raise ConfigError(f"{where}: {tokens} completion_ids, but {logprobs} rollout_logprobs")
    if any(values[name] != _LATER[name] for name in OF_EPISODES):
        try:
            read_episode(values, record.completion_ids)
        except ValueError as error:
            raise ConfigError(f"{where}: an episode: {error}; this is no rollout dump") from None
    return record


def _float32(values: str | list[Any]) -> list[float]:
    """From base64 of float32; of an earlier version's numbers the float32 that each was before it was printed, which is
    the nearest one, and NaN for null: not finite."""
    if isinstance(values, str):
        packed = base64.b64decode(values, validate=True)
        return list(struct.unpack(f"<{len(packed) // 4}f", packed))
    return array("f", [math.nan if x is None else x for x in values]).tolist()


def _kinds_of(hint: Any) -> tuple[type, ...]:
    """The types that JSON may give for a field's annotation."""
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(each) or each for each in hints)
    return (*kinds, int) if float in kinds else kinds


_KINDS = {name: _kinds_of(hint) for name, hint in typing.get_type_hints(RolloutRecord).items()}
_KINDS["rollout_logprobs"] = str, list
_LATER: dict[str, Any] = {"columns": {}, "num_rollouts": None, "extra": {}, "status": None}  # what lines may lack
_LATER |= {"turns": [], "messages": [], "environment": {}}
_NUMBERS = "row", "position", "sample", "prompt_ids", "completion_ids"  # from 0 on
_ITEMS: dict[str, tuple[type, ...]] = {"rewards": (int, float, type(None)), "statuses": (str,)}
