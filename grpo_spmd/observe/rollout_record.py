"""A line of a rollout dump, as a run writes it; rollout_reader.py reads it again. Imports no torch."""

from __future__ import annotations

import binascii
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec

OF_EPISODES = "status", "turns", "messages", "environment"
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout, in the order in which its fields are written."""

    rollout_id: int | None  # slot * G + sample; None: dynamic sampling dropped the group, or the step was refused
    row: int  # of the data set
    position: int  # place of the prompt in the stream
    sample: int  # place in the group, 0 .. G-1
    prompt: str | list[Any]  # a string or chat messages
    columns: dict[str, Any]  # the data row's others, long ones cut (columns.py); {} in dumps of earlier versions
    completion: str  # the text that the rewards were given
    reward: float | None  # the weighted sum; None: unknown
    rewards: dict[str, float | None]  # by name, before weighting; None where it does not apply or is unusable
    statuses: dict[str, str]  # by name: "ok", "not_applicable", "error" or "timeout"
    advantage: float | None  # None where rollout_id is
    finish_reason: str  # how sampling ended: "stop" or "length"
    prompt_ids: list[int]
    completion_ids: list[int]
    rollout_logprobs: list[float]  # by the engine, of each completion token; in the file base64 of float32
    num_rollouts: int | None = None  # of the step in all its files; None in dumps of earlier versions or a refused step
    extra: dict[str, Any] = field(default_factory=dict)  # what rewards logged of it, {reward: {column: value}}
    status: str | None = None  # how an episode ended; None: it was a single turn, and lacks what follows
    turns: list[Any] = field(default_factory=list)  # its tokens, sampled and given; rollout_turns.py has the fields
    messages: list[Any] = field(default_factory=list)  # behind the prompt
    environment: dict[str, Any] = field(default_factory=dict)  # what it gave, how long its calls took, why it failed


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
    except (ValueError, TypeError):  # what it does not know: half a surrogate pair, which a prompt may hold, or a key
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")  # the half becomes JSON's escape for it
