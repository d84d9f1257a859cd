"""The files of rollouts/: their names, and what of them is there. Imports no torch.

A step's rollouts are in one file a node: step_000012.jsonl of the first, step_000012.node_1.jsonl of the second, or the
same with .gz."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import math
import os
import re
import struct
import types
import typing
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import open_regular
from grpo_spmd.learn.contexts import broken_rule
from grpo_spmd.records import Episode, Segment, Turn

PLAIN, PACKED = ".jsonl", ".jsonl.gz"
_NAME = re.compile(r"(.+?)(?:\.node_([1-9]\d{0,8}))?\.jsonl(?:\.gz)?")  # stem and node


def part_name(stem: str, node: int) -> str:
    """Of the file of `node`, without its ending."""
    return f"{stem}.node_{node}" if node else stem


def step_stem(step: int) -> str:
    return f"step_{step:06d}"


def rollouts_file(run_dir: Path, step: int, node: int = 0, folder: str = "rollouts") -> Path:
    """A node's part of a dump in the form that is there; where there is none, as text. Of two the newer one: a kill can
    come between the writing of the one and the removal of the other."""
    stem = part_name(step_stem(step), node)
    there = [
        path
        for ending in (PLAIN, PACKED)
        if (path := run_dir / folder / f"{stem}{ending}").is_file()
    ]
    return max(
        there, key=lambda path: path.stat().st_mtime_ns, default=run_dir / folder / f"{stem}{PLAIN}"
    )


def rollouts_parts(run_dir: Path, step: int, folder: str = "rollouts") -> dict[int, Path]:
    """The files of a dump that are there, by node in order."""
    own = {
        node
        for stem, node in files_there(run_dir / folder, step_stem(step))
        if stem == step_stem(step)
    }
    return {node: rollouts_file(run_dir, step, node, folder) for node in sorted(own)}


def dumped_steps(run_dir: Path) -> list[int]:
    """Whose rollouts are there, in their order, at least in part."""
    steps = (step_of(stem) for stem, _ in files_there(run_dir / "rollouts"))
    return sorted({step for step in steps if step is not None})


def step_of(stem: str) -> int | None:
    """None: of an evaluation."""
    found = re.fullmatch(r"step_(\d{6,})", stem)
    return int(found[1]) if found else None


def files_there(folder: Path, begin: str = "") -> Iterator[tuple[str, int]]:
    """(stem, node) of each dump of `folder` whose name begins with `begin`, twice where it is there in both forms."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith(begin) and (
            found := _NAME.fullmatch(name)
        ):  # a run may come to have very many
            yield found[1], int(found[2] or 0)


def begun_there(folder: Path) -> Iterator[tuple[Path, int]]:
    """(path, node) of each file of `folder` that some process was writing, or still is."""
    for path in folder.glob("*.tmp"):
        if found := _NAME.fullmatch(path.stem):
            yield path, int(found[2] or 0)


# A line of a rollout dump, as a run writes it; rollout_reader.py reads it again. Imports no torch.


OF_EPISODES = "status", "turns", "messages", "environment"
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout, in the order in which its fields are written."""

    rollout_id: (
        int | None
    )  # slot * G + sample; None: dynamic sampling dropped the group, or the step was refused
    row: int  # of the data set
    position: int  # place of the prompt in the stream
    sample: int  # place in the group, 0 .. G-1
    prompt: str | list[Any]  # a string or chat messages
    columns: dict[
        str, Any
    ]  # the data row's others, long ones cut (columns.py); {} in dumps of earlier versions
    completion: str  # the text that the rewards were given
    reward: float | None  # the weighted sum; None: unknown
    rewards: dict[
        str, float | None
    ]  # by name, before weighting; None where it does not apply or is unusable
    statuses: dict[str, str]  # by name: "ok", "not_applicable", "error" or "timeout"
    advantage: float | None  # None where rollout_id is
    finish_reason: str  # how sampling ended: "stop" or "length"
    prompt_ids: list[int]
    completion_ids: list[int]
    rollout_logprobs: list[
        float
    ]  # by the engine, of each completion token; in the file base64 of float32
    num_rollouts: int | None = (
        None  # of the step in all its files; None in dumps of earlier versions or a refused step
    )
    extra: dict[str, Any] = field(
        default_factory=dict
    )  # what rewards logged of it, {reward: {column: value}}
    status: str | None = (
        None  # how an episode ended; None: it was a single turn, and lacks what follows
    )
    turns: list[Any] = field(
        default_factory=list
    )  # its tokens, sampled and given; rollout_turns.py has the fields
    messages: list[Any] = field(default_factory=list)  # behind the prompt
    environment: dict[str, Any] = field(
        default_factory=dict
    )  # what it gave, how long its calls took, why it failed


@dataclass(frozen=True)
class EvalRecord:
    """A line of rollouts/eval_SET_step_N.jsonl; fields mean what they mean in RolloutRecord."""

    row: int
    sample: int
    prompt: str | list[Any]
    columns: dict[str, Any]
    completion: str
    final_answer: str  # of the completion; what the data takes for right is in `columns`
    right: bool  # by the first of the rewards
    reward: float | None
    rewards: dict[str, float | None]
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)


def to_line(record: RolloutRecord | EvalRecord) -> bytes:
    """JSON without `extra` where there is none; logprobs as base64 of little-endian float32, whatever they are."""
    values = dict(vars(record))
    if not record.extra:
        del values["extra"]
    if isinstance(record, RolloutRecord):
        if record.status is None:
            for name in OF_EPISODES:
                del values[name]
        logprobs = record.rollout_logprobs
        packed = struct.pack(f"<{len(logprobs)}f", *logprobs)
        values["rollout_logprobs"] = binascii.b2a_base64(packed, newline=False).decode("ascii")
    try:
        return _ENCODER.encode(values)
    except (
        ValueError,
        TypeError,
    ):  # what it does not know: half a surrogate pair, which a prompt may hold, or a key
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # the half becomes JSON's escape for it


# An episode as a dump and the rollout buffer have it: JSON with all its tokens, written, and checked when it is read.
# Imports no torch.


_DEEPEST = 64  # what a policy or a tool writes may be nested without end
_MOST_TURNS = 1 << 20


def episode_fields(episode: Episode) -> dict[str, Any]:
    """`status`; `turns`, the tokens of its segments in their order, cut where one who wrote them was followed by the
    other; `messages`; and what the `environment` gave and took."""
    turns, waiting = list[dict[str, Any]](), deque(episode.turns)
    for number, segment in enumerate(episode.segments):
        changes = np.flatnonzero(np.diff(segment.sampled)) + 1
        for ids, sampled in zip(
            np.split(segment.token_ids, changes), np.split(segment.sampled, changes), strict=True
        ):
            if not sampled[0]:
                turns.append({"segment": number, "sampled": False, "token_ids": ids.tolist()})
                continue
            while len(ids):
                turns.append(_turn_fields(number, waiting[0], ids.tolist()))
                ids = ids[waiting.popleft().num_tokens :]
    turns += [
        _turn_fields(max(0, len(episode.segments) - 1), turn, []) for turn in waiting
    ]  # of no token
    took = {"rewards": episode.rewards, "calls_s": episode.calls_s, "error": episode.error}
    return {
        "status": episode.status,
        "turns": turns,
        "messages": episode.messages,
        "environment": took,
    }


def shown_fields(episode: Episode) -> dict[str, Any]:
    """The same for a dump, whatever a policy, a tool or an environment wrote."""
    fields = episode_fields(episode)
    return {
        **fields,
        "messages": _shown(fields["messages"]),
        "environment": _shown(fields["environment"]),
    }


def _turn_fields(segment: int, turn: Turn, token_ids: list[int]) -> dict[str, Any]:
    fields = {"segment": segment, "sampled": True, "token_ids": token_ids[: turn.num_tokens]}
    reward = {} if turn.reward is None else {"reward": turn.reward}
    return {**fields, "finish_reason": turn.finish_reason, **reward}


def read_episode(fields: Mapping[str, Any], completion_ids: Sequence[int]) -> Episode:
    """What such fields are of. Raises ValueError: what of them is no episode of these tokens."""
    status, turns, messages, took = (
        fields.get(name) for name in ("status", "turns", "messages", "environment")
    )
    if not isinstance(status, str):
        raise ValueError(f"status is {status!r:.80}")
    if (
        not isinstance(turns, list)
        or len(turns) > _MOST_TURNS
        or not all(isinstance(turn, dict) for turn in turns)
    ):
        raise ValueError(f"turns are {turns!r:.80}")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages are {messages!r:.80}")
    if not is_shallow(messages):
        raise ValueError(f"messages are nested more than {_DEEPEST} deep")
    segments, sampled = _read_turns(turns)
    episode = Episode(status, segments, sampled, messages, *_read_took(took))
    if why := broken_rule(completion_ids, episode):
        raise ValueError(why)
    return episode


def _read_turns(turns: Sequence[Mapping[str, Any]]) -> tuple[tuple[Segment, ...], tuple[Turn, ...]]:
    of_segments, found = list[list[tuple[list[int], bool]]](), list[Turn]()
    for turn in turns:
        number, is_sampled, ids = (turn.get(name) for name in ("segment", "sampled", "token_ids"))
        if (
            type(number) is not int
            or number not in (len(of_segments) - 1, len(of_segments))
            or number < 0
        ):
            raise ValueError(
                f"a turn's segment is {number!r:.80}, behind {len(of_segments)} of them"
            )
        if type(is_sampled) is not bool:
            raise ValueError(f"a turn's sampled is {is_sampled!r:.80}")
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < 2**31 for token in ids
        ):
            raise ValueError(f"a turn's token_ids are {ids!r:.80}")
        if number == len(of_segments):
            of_segments.append([])
        of_segments[number].append((ids, is_sampled))
        reason, reward = turn.get("finish_reason"), turn.get("reward")
        if is_sampled != isinstance(reason, str) or not (
            reward is None or (is_sampled and _is_finite(reward))
        ):
            raise ValueError(f"a turn's finish_reason is {reason!r:.80}, its reward {reward!r:.80}")
        if is_sampled:
            found.append(Turn(len(ids), str(reason), None if reward is None else float(reward)))
    segments = []
    for parts in of_segments:
        token_ids = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
        segments.append(
            Segment(token_ids, np.repeat([own for _, own in parts], [len(ids) for ids, _ in parts]))
        )
    return tuple(segments), tuple(found)


def _read_took(took: Any) -> tuple[dict[str, float | str | None], list[float], str | None]:
    rewards, calls_s, error = (
        (took if isinstance(took, dict) else {}).get(n) for n in ("rewards", "calls_s", "error")
    )
    if not isinstance(rewards, dict) or not all(
        value is None or isinstance(value, str) or _is_finite(value) for value in rewards.values()
    ):
        raise ValueError(f"environment.rewards are {rewards!r:.80}")
    if not isinstance(calls_s, list) or not all(
        _is_finite(seconds) and seconds >= 0 for seconds in calls_s
    ):
        raise ValueError(f"environment.calls_s are {calls_s!r:.80}")
    if error is not None and not isinstance(error, str):
        raise ValueError(f"environment.error is {error!r:.80}")
    return rewards, calls_s, error


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e300  # NaN is not


def is_shallow(value: Any) -> bool:
    """Whether JSON is nested no deeper than others can follow, who call themselves for what is inside."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level if isinstance(outer, dict | list)
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]  # fmt: skip
        if not level:
            return True
    return False


def _shown(value: Any, depth: int = _DEEPEST) -> Any:
    """`value` as JSON holds it: what is none becomes text, what is nested too deep an ellipsis."""
    if isinstance(value, dict | list | tuple) and depth == 1:
        return "..."
    if isinstance(value, dict):
        return {str(name): _shown(inner, depth - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(inner, depth - 1) for inner in value]
    is_json = (
        value is None
        or isinstance(value, str | bool | int)
        or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_json else str(value)


# Reads rollout dumps, of earlier versions too, and checks them line by line. Imports no torch.


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
        if (
            name not in values
            or not isinstance(values[name], kinds)
            or isinstance(values[name], bool)
        ):
            found = f"{values[name]!r:.80}" if name in values else "missing"
            raise ConfigError(f"{where}: {name} is {found}; this is no rollout dump")
    for name in _NUMBERS:
        items: list[Any] = values[name] if isinstance(values[name], list) else [values[name]]
        if odd := [item for item in items if type(item) is not int or not 0 <= item < 2**63]:
            raise ConfigError(f"{where}: {name} has {odd[0]!r:.80}; this is no rollout dump")
    for name, kinds in _ITEMS.items():
        if odd := [
            item
            for item in values[name].values()
            if not isinstance(item, kinds) or isinstance(item, bool)
        ]:
            raise ConfigError(f"{where}: {name} has {odd[0]!r:.80}; this is no rollout dump")
    try:
        values["rollout_logprobs"] = _float32(values["rollout_logprobs"])
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise ConfigError(
            f"{where}: rollout_logprobs are no numbers ({error}); this is no rollout dump"
        ) from None
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
_LATER: dict[str, Any] = {
    "columns": {},
    "num_rollouts": None,
    "extra": {},
    "status": None,
}  # what lines may lack
_LATER |= {"turns": [], "messages": [], "environment": {}}
_NUMBERS = "row", "position", "sample", "prompt_ids", "completion_ids"  # from 0 on
_ITEMS: dict[str, tuple[type, ...]] = {"rewards": (int, float, type(None)), "statuses": (str,)}


# The rollouts of a step out of the files of all nodes, each there once and none missing. Imports no torch.


_MOST = 8  # names in a line


def read_rollouts(run_dir: Path, step: int) -> list[RolloutRecord]:
    """In the order of the prompt stream, whichever rank wrote them. Raises OSError where there is no dump or it cannot
    be read, and ConfigError, which names the file and the line or the rollouts, for one that is broken, incomplete or
    of several runs."""
    parts = rollouts_parts(run_dir, step) or {0: rollouts_file(run_dir, step)}
    found: list[RolloutRecord] = []
    places: dict[str, str] = {}
    for path in parts.values():
        for number, line in enumerate(read_lines_of(path), start=1):
            where = f"{path}:{number}"
            record = read_rollout(line, where)
            names = [f"the rollout {record.position}/{record.sample} (position/sample)"]
            names += [f"the rollout id {record.rollout_id}"] * (record.rollout_id is not None)
            for name in names:
                if (first := places.setdefault(name, where)) != where:
                    raise ConfigError(
                        f"{where}: {name} is in {first} too; is one of these files of another run?"
                    )
            found.append(record)
    _check_complete(found, parts, step)
    return sorted(found, key=lambda record: (record.position, record.sample))


def _check_complete(records: Sequence[RolloutRecord], parts: Mapping[int, Path], step: int) -> None:
    """By how many rollouts the step had, and by their ids, which have no gap. Dumps of earlier versions tell only the
    ids; those of a refused step neither."""
    first, *others = parts.values()
    where = f"{first} and {len(others)} more" if others else f"{first}"
    sizes = sorted({record.num_rollouts for record in records if record.num_rollouts is not None})
    if len(sizes) > 1 or (sizes and sizes[0] < len(records)):
        had = f"of a step that had {_listed(sizes)}"
        raise ConfigError(
            f"{where}: {len(records)} rollouts {had}; is one of these files of another run?"
        )
    known = {record.rollout_id for record in records if record.rollout_id is not None}
    num_ids = max(known, default=-1) + 1
    if sizes and len(known) == len(records):  # dynamic sampling dropped none of these
        num_ids = max(num_ids, sizes[0])
    num_missing = max(num_ids - len(known), sizes[0] - len(records) if sizes else 0)
    if num_missing > 0:
        ids = [i for i in range(min(num_ids, len(known) + _MOST + 1)) if i not in known]
        said = f"{where}: {num_missing} rollouts are missing" + (
            f", with the ids {_listed(ids)}" if ids else ""
        )
        nodes = [node for node in range(min(max(parts), len(parts) + _MOST)) if node not in parts]
        gone = [f"{part_name(step_stem(step), node)}.jsonl" for node in nodes]
        said += f"; there is no {_listed(gone)}" if gone else ""
        raise ConfigError(f"{said}; each node wrote a file, and all of them must be in one folder")


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_MOST])) + ", ..." * (len(values) > _MOST)
