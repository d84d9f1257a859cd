"""The record in one line of a rollout dump, and how it is written as JSON and read back.

A rollout of several turns (an episode) has four more fields: `status`, `turns`, `messages` and
`environment`. The rollout buffer of a checkpoint stores episodes in the same form. Imports no
torch.
"""

from __future__ import annotations

import base64
import json
import math
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from grpo_spmd.config.errors import ConfigError, cut_middle
from grpo_spmd.learn.contexts import find_episode_error
from grpo_spmd.records import FAILED_STATUSES, Completion, Episode, Prompt, Segment, Turn

EPISODE_FIELDS = ("status", "turns", "messages", "environment")
# The most characters that are kept of one column's value, and of all columns of a row.
MAX_VALUE_CHARS = 4_000
MAX_ROW_CHARS = 16_000
# The deepest nesting that is kept: policies and tools can write JSON that is nested very deeply.
_MAX_DEPTH = 64
# The usual names of the column with the right answer, the most common name first.
_GOLD_COLUMNS = (
    "answer",
    "final_answer",
    "ground_truth",
    "gold",
    "solution",
    "target",
    "label",
    "expected",
    "output",
)

# Numbers are bounded so that they stay exact in a browser, which computes with doubles.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
_ExactInt = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout. The fields are written to the line in this order."""

    rollout_id: _Count | None
    """slot * group_size + sample. None if dynamic sampling dropped the group or the step was
    refused."""
    row: _Count
    """Index of the row in the data set."""
    position: _Count
    """Index of the prompt in the prompt stream."""
    sample: _Count
    """Index in the group, 0 .. group_size - 1."""
    prompt: str | list[Any]
    """What the policy had before the completion: a string, or chat messages."""
    columns: dict[str, Any]
    """The other columns of the data row, cut by `bounded_values`. Earlier versions wrote none."""
    completion: str
    """The text that the reward functions were given."""
    reward: float | None
    """The weighted sum of the rewards. None if it is unknown."""
    rewards: dict[str, float | None]
    """Each reward by its name, before weighting. None if it does not apply or is unusable."""
    statuses: dict[str, str]
    """By the reward's name: "ok", "not_applicable", "error" or "timeout"."""
    advantage: float | None
    """None if rollout_id is None."""
    finish_reason: str
    """Why sampling ended: "stop" or "length"."""
    prompt_ids: list[_Count]
    completion_ids: list[_Count]
    rollout_logprobs: list[float]
    """The engine's logprob of each completion token. The file has base64 of little-endian
    float32."""
    num_rollouts: int | None = None
    """How many rollouts the whole step had, over all its files. None if an earlier version wrote
    the line or rank 0 refused the step."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What rewards logged for this rollout: {reward: {column: value}}."""
    status: str | None = None
    """How an episode ended. None for a rollout of a single turn, whose line has none of the fields
    below."""
    turns: list[Any] = field(default_factory=list)
    """The episode's tokens, sampled and given, as `episode_fields` describes them."""
    messages: list[Any] = field(default_factory=list)
    """Chat messages after `prompt`."""
    environment: dict[str, Any] = field(default_factory=dict)
    """The environment's rewards, the seconds of its calls, and its error."""


_ALL_FIELDS = tuple(RolloutRecord.__dataclass_fields__)
# The values of fields that a line lacks because an earlier version or a refused step wrote it.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("rollout_id", "reward", "advantage", "num_rollouts", "status")),
    **{name: {} for name in ("rewards", "statuses", "columns", "extra", "environment")},
    **{"turns": [], "messages": [], "finish_reason": "stop", "rollout_logprobs": b""},
}


@dataclass(frozen=True)
class EvalRecord:
    """A line of rollouts/eval_SET_step_N.jsonl; fields mean the same as in RolloutRecord."""

    row: int
    sample: int
    prompt: str | list[Any]
    columns: dict[str, Any]
    completion: str
    final_answer: str
    """Extracted from the completion; the data's own answer is in `columns`."""
    right: bool
    """Whether the completion is right, by the first of the rewards."""
    reward: float | None
    rewards: dict[str, float | None]
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)


def to_line(record: RolloutRecord | EvalRecord) -> bytes:
    """Returns the record as one line of JSON, without a line break.

    It leaves out `extra` if that is empty and, for a rollout of a single turn, the fields of
    episodes.
    """
    values = dict(vars(record))
    if not record.extra:
        del values["extra"]
    if isinstance(record, RolloutRecord):
        if record.status is None:
            for name in EPISODE_FIELDS:
                del values[name]
        packed = np.array(record.rollout_logprobs, "<f4").tobytes()
        values["rollout_logprobs"] = base64.b64encode(packed).decode()
    try:
        return msgspec.json.encode(values)
    except (ValueError, TypeError):
        # msgspec refuses keys that are not text, and half a surrogate pair, which a prompt may
        # contain. json writes both; backslashreplace turns the half pair into JSON's own escape.
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def parse_rollout(line: bytes, line_name: str) -> RolloutRecord:
    """Returns the record of one line, after checking it. Unknown fields are skipped.

    Lines of earlier versions are read too. Raises ConfigError, whose message begins with
    `line_name`.
    """
    values = msgspec.structs.asdict(parse_rollout_fields(line, line_name, _ALL_FIELDS))
    logprobs = values["rollout_logprobs"]
    try:
        if isinstance(logprobs, bytes):
            # ValueError if the bytes are no whole number of values
            floats = np.frombuffer(logprobs, "<f4")
        else:
            # An earlier version wrote a list of decimals. The float32 values are those nearest to
            # them; null, which stood for a value that is not finite, becomes NaN.
            floats = np.array(logprobs, np.float32)
        record = RolloutRecord(**values | {"rollout_logprobs": floats.tolist()})
        num_tokens = len(record.completion_ids)
        if num_tokens != len(floats):
            raise ValueError(f"{num_tokens} completion_ids, but {len(floats)} rollout_logprobs")
        if record.status is not None or record.turns or record.messages or record.environment:
            read_episode(vars(record), record.completion_ids)
    except ValueError as error:
        raise ConfigError(f"{line_name}: {error}; this is no rollout dump") from None
    return record


def parse_rollout_fields(line: bytes, line_name: str, fields: tuple[str, ...]) -> Any:
    """Returns an object with only these fields of RolloutRecord, faster than `parse_rollout`.

    Fields that the line lacks have their default. `rollout_logprobs` is bytes of float32, 4 per
    token, or the list that earlier versions wrote. Raises ConfigError, whose message begins with
    `line_name`.
    """
    decoder = _line_decoder(fields)
    try:
        try:
            return decoder.decode(line)
        except ValueError:
            # unlike msgspec, json reads half a surrogate pair, NaN and very large numbers
            return msgspec.convert(json.loads(line), decoder.type)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{line_name}: not valid JSON: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{line_name}: {error}; this is no rollout dump") from None


@lru_cache(maxsize=16)
def _line_decoder(fields: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Returns a decoder of lines into a struct that has only these fields.

    The decoder skips all other fields without creating objects for them, which is much faster.
    """
    hints = typing.get_type_hints(RolloutRecord, include_extras=True)
    # In the file it is base64, which msgspec decodes to bytes, or a list in earlier versions.
    hints["rollout_logprobs"] = bytes | list[float | None]
    members = [(name, hints[name], _DEFAULTS.get(name, msgspec.NODEFAULT)) for name in fields]
    record_type = msgspec.defstruct("RolloutFields", members, kw_only=True, gc=False)
    return msgspec.json.Decoder(record_type)


class _TurnFields(msgspec.Struct):
    """A stretch of an episode's tokens: one turn that was sampled, or tokens that were given.

    Given tokens are those of the prompt and of the environment's messages.
    """

    segment: _Count
    sampled: bool
    token_ids: list[_TokenId]
    finish_reason: str | None = None
    reward: _Finite | None = None


class _EnvironmentFields(msgspec.Struct):
    """What the environment gave for an episode; the fields are as in records.Episode."""

    rewards: dict[str, _ExactInt | _Finite | str | None]
    calls_s: list[_Seconds]
    error: str | None = None
    num_tool_calls: _Count | None = None
    num_tool_errors: _Count = 0


class _EpisodeFields(msgspec.Struct):
    """The fields of a line that describe an episode, with their types."""

    status: str
    turns: list[_TurnFields]
    messages: list[dict[str, Any]]
    environment: _EnvironmentFields
    prompt: str | list[dict[str, Any]] | None = None


def episode_fields(episode: Episode) -> dict[str, Any]:
    """Returns the episode as JSON values, under the names in EPISODE_FIELDS.

    `turns` has the tokens of all segments in order. (A segment is some turns that form one sequence
    of the forward pass.) It is split wherever sampled tokens follow tokens of the prompt or
    environment, or the reverse, and at the end of each sampled turn.
    """
    turns = list[dict[str, Any]]()
    waiting = deque(episode.turns)
    number = 0
    for number, segment in enumerate(episode.segments):
        changes = np.flatnonzero(np.diff(segment.sampled)) + 1
        stretches = np.split(segment.token_ids, changes)
        for ids, sampled in zip(stretches, np.split(segment.sampled, changes), strict=True):
            if not sampled[0]:
                turns.append({"segment": number, "sampled": False, "token_ids": ids.tolist()})
                continue
            # sampled tokens in a row can be several turns, with no given token between them
            while len(ids):
                turns.append(_turn_fields(number, waiting[0], ids.tolist()))
                ids = ids[waiting.popleft().num_tokens :]
    # turns that have no tokens come last
    turns += [_turn_fields(number, turn, []) for turn in waiting]
    names = ["rewards", "calls_s", "error"]
    if episode.num_tool_calls is not None:
        names += ["num_tool_calls", "num_tool_errors"]
    return {
        "status": episode.status,
        "turns": turns,
        "messages": episode.messages,
        "environment": {name: vars(episode)[name] for name in names},
    }


def dumped_prompt(prompt: Prompt, completion: Completion) -> str | list[Any]:
    """Returns the prompt or messages before a completion, as the dump has them.

    For an episode, messages are converted to plain JSON, since an environment may have put anything
    in them.
    """
    before = prompt.text_before(completion)
    return before if before is prompt.text else _as_json_value(before)


def dumped_episode_fields(episode: Episode) -> dict[str, Any]:
    """Returns `episode_fields` with messages and environment converted to plain JSON.

    Policies, tools and environments wrote them, and they may contain anything.
    """
    fields = episode_fields(episode)
    return fields | {name: _as_json_value(fields[name]) for name in ("messages", "environment")}


def _turn_fields(segment: int, turn: Turn, token_ids: list[int]) -> dict[str, Any]:
    """Returns the entry in `turns` for a sampled turn, whose tokens are the first of `token_ids`.

    `segment` is the number of the segment within the episode.
    """
    fields: dict[str, Any] = {
        "segment": segment,
        "sampled": True,
        "token_ids": token_ids[: turn.num_tokens],
        "finish_reason": turn.finish_reason,
    }
    if turn.reward is not None:
        fields["reward"] = turn.reward
    return fields


def read_episode(fields: Mapping[str, Any], completion_ids: Sequence[int]) -> Episode:
    """Returns the episode from the fields that `episode_fields` returned, after checking them.

    Raises ValueError if they describe no possible episode whose sampled tokens are
    `completion_ids`."""
    names = (*EPISODE_FIELDS, "prompt")
    values = msgspec.convert({name: fields.get(name) for name in names}, _EpisodeFields)
    # An episode that failed had no first turn: the prompt in its line is that of the data row.
    opening = [] if values.status in FAILED_STATUSES else values.prompt or []
    if isinstance(opening, str):
        opening = [{"role": "user", "content": opening}]
    if not is_shallow([*opening, *values.messages]):
        raise ValueError(f"messages are nested more than {_MAX_DEPTH} deep")
    episode = Episode(
        status=values.status,
        segments=_read_segments(values.turns),
        turns=_read_turns(values.turns),
        messages=values.messages,
        opening=opening,
        **msgspec.structs.asdict(values.environment),
    )
    if reason := find_episode_error(completion_ids, episode):
        raise ValueError(reason)
    return episode


def _read_segments(turns: Sequence[_TurnFields]) -> tuple[Segment, ...]:
    """Returns the segments of an episode, each made from the tokens of its entries in `turns`.

    Raises ValueError if the entries' segments are not in order.
    """
    stretches = list[list[_TurnFields]]()
    for turn in turns:
        if turn.segment == len(stretches):
            stretches.append([])
        # segments come in order: a turn continues the newest segment or begins the next one
        if turn.segment != len(stretches) - 1:
            raise ValueError(f"a turn's segment is {turn.segment} after {len(stretches)} segments")
        stretches[-1].append(turn)
    return tuple(
        Segment(
            np.concatenate([np.array(turn.token_ids, np.int32) for turn in stretch]),
            np.repeat(
                [turn.sampled for turn in stretch], [len(turn.token_ids) for turn in stretch]
            ),
        )
        for stretch in stretches
    )


def _read_turns(turns: Sequence[_TurnFields]) -> tuple[Turn, ...]:
    """Returns the sampled turns. Raises ValueError if an entry's fields do not fit together."""
    sampled = []
    for turn in turns:
        if turn.sampled and turn.finish_reason is not None:
            sampled.append(Turn(len(turn.token_ids), turn.finish_reason, turn.reward))
        elif turn.sampled or turn.finish_reason is not None or turn.reward is not None:
            raise ValueError(
                "a sampled turn has a finish_reason and may have a reward; a given turn has neither"
            )
    return tuple(sampled)


def is_shallow(value: Any) -> bool:
    """Returns whether a JSON value is nested at most 64 deep.

    Then recursive functions can walk it without a RecursionError.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list)
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]  # fmt: skip
        if not level:
            return True
    return False


def _as_json_value(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Returns `value` with everything that JSON cannot hold replaced by text.

    Whatever is nested more than `depth` deep becomes "...".
    """
    if isinstance(value, dict | list | tuple) and depth == 1:
        return "..."
    if isinstance(value, dict):
        return {str(name): _as_json_value(inner, depth - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json_value(inner, depth - 1) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def bounded_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a data row's columns as JSON values of bounded size.

    A value that JSON cannot hold (a date, bytes, NaN) becomes text. A value of more than
    MAX_VALUE_CHARS characters, and every value beyond the first MAX_ROW_CHARS of a row, becomes a
    shortened text that says how long it was.
    """
    bounded: dict[str, Any] = {}
    room = MAX_ROW_CHARS
    for name, value in columns.items():
        text, is_json = _to_text(value)
        max_chars = min(MAX_VALUE_CHARS, room)
        if len(text) > max_chars:
            bounded[name] = f"{text[:max_chars]} ... ({len(text)} characters)"
        else:
            bounded[name] = value if is_json else text
        room -= min(len(text), max_chars)
    return bounded


def gold_answer(columns: Mapping[str, Any]) -> str:
    """Returns "name=value" of the column that most likely has the right answer.

    If no column has one of the usual names, it is the first one; "" if there are no columns."""
    names = [name for name in (*_GOLD_COLUMNS, *columns) if name in columns]
    return f"{names[0]}={cut_middle(_to_text(columns[names[0]])[0])!r}" if names else ""


def _to_text(value: Any) -> tuple[str, bool]:
    """Returns `value` as text, and whether JSON can hold it.

    Text stays unchanged. Other values become JSON, or str(value) if JSON cannot hold them."""
    if isinstance(value, str):
        return value, True
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False), True
    except (TypeError, ValueError, RecursionError):
        return str(value), False
