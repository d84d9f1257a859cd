"""A line of a rollout dump, as a run writes it; rollout_reader.py reads it again. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any


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
    rollout_logprobs: list[float | None]  # by the engine, of each completion token, float32; None: not finite
    extra: dict[str, Any] = field(default_factory=dict)  # what rewards logged of it, {reward: {column: value}}

    @property
    def logprobs(self) -> list[float]:
        """`rollout_logprobs`, NaN where they are not finite."""
        return [math.nan if x is None else x for x in self.rollout_logprobs]


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


def to_line(record: RolloutRecord | EvalRecord) -> str:
    """Without `extra` where there is none. Logprobs have 9 digits, which tell any two float32 apart."""
    values = {name: value for name, value in vars(record).items() if name != "extra" or value}
    return "{" + ", ".join(f'"{name}": {_to_json(name, value)}' for name, value in values.items()) + "}"


def _to_json(name: str, value: Any) -> str:
    if name != "rollout_logprobs":
        return json.dumps(value, ensure_ascii=False)
    # repr of a whole number: without a point it would be an integer to a reader, and -0 the same as 0
    return "[" + ", ".join(["null" if x is None else f"{x:.9g}" if x % 1 else repr(x) for x in value]) + "]"
