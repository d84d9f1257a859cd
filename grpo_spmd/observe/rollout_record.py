"""A line of rollouts/step_N.jsonl: written by a run, read and checked by who looks at it later. Imports no torch."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout, in the order in which its fields are written."""

    rollout_id: int | None  # slot * G + sample; None: dynamic sampling dropped the group, or the step was refused
    row: int  # of the data set
    position: int  # place of the prompt in the stream
    sample: int  # place in the group, 0 .. G-1
    prompt: str | list[Any]  # a string or chat messages
    completion: str  # the text that the rewards were given
    reward: float | None  # the weighted sum; None: unknown
    rewards: dict[str, float | None]  # by name, before weighting; None where it does not apply or is unusable
    statuses: dict[str, str]  # by name: "ok", "not_applicable", "error" or "timeout"
    advantage: float | None  # None where rollout_id is
    finish_reason: str  # how sampling ended: "stop" or "length"
    prompt_ids: list[int]
    completion_ids: list[int]
    rollout_logprobs: list[float | None]  # by the engine, of each completion token; None: not finite
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
    completion: str
    answer: str  # the final one in it
    right: bool  # by the first of the rewards
    reward: float | None
    rewards: dict[str, float | None]
    finish_reason: str
    extra: dict[str, Any] = field(default_factory=dict)


def rollouts_file(run_dir: Path, step: int) -> Path:
    return run_dir / "rollouts" / f"step_{step:06d}.jsonl"


def to_line(record: RolloutRecord | EvalRecord) -> str:
    """Without `extra` where there is none."""
    return json.dumps({k: v for k, v in vars(record).items() if k != "extra" or v}, ensure_ascii=False)


def read_rollout(line: bytes, where: str) -> RolloutRecord:
    """A line of a dump, without fields that we do not know. Raises ConfigError, which begins with `where`."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
    values.setdefault("extra", {})
    for name, kinds in _KINDS.items():
        if name not in values or not isinstance(values[name], kinds):
            found = f"{values[name]!r:.80}" if name in values else "missing"
            raise ConfigError(f"{where}: {name} is {found}; this is no rollout dump")
    record = RolloutRecord(**{name: values[name] for name in _KINDS})
    if (tokens := len(record.completion_ids)) != (logprobs := len(record.rollout_logprobs)):
        raise ConfigError(f"{where}: {tokens} completion_ids, but {logprobs} rollout_logprobs")
    return record


def _kinds_of(hint: Any) -> tuple[type, ...]:
    """The types that JSON may give for a field's annotation."""
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(each) or each for each in hints)
    return (*kinds, int) if float in kinds else kinds


_KINDS = {name: _kinds_of(hint) for name, hint in typing.get_type_hints(RolloutRecord).items()}
