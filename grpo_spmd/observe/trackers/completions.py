"""Some of a step's rollouts, as trackers show them: few, cut to a size, and text that is nothing but text."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import open_regular
from grpo_spmd.observe.columns import gold
from grpo_spmd.observe.rollout_reader import rollouts_parts

MOST_ROLLOUTS, MOST_MESSAGES, MOST_REWARDS = 64, 32, 16
LONGEST_TEXT = 4_000  # characters of a prompt, a completion or a message
_LONGEST_LINE, _MOST_BYTES = (
    1 << 24,
    1 << 32,
)  # of a dump: what is longer is passed over, what is beyond not read
# What a browser obeys instead of showing it: control characters, directions of writing, halves of surrogate pairs.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True)
class ShownRollout:
    """All texts are cut and escaped."""

    position: int  # place of the prompt in the stream
    sample: int
    prompt: str
    completion: str
    messages: list[dict[str, str]]  # role and content: the prompt's, and what follows
    rewards: dict[str, float | None]  # by name, before weighting
    reward: float | None
    advantage: float | None
    finish_reason: str
    status: str | None  # how an episode ended
    answer: str  # the column that most likely holds the right one, as "name=value"; "": none


@dataclass(frozen=True)
class _Line:
    """What of a line of a dump is shown: the rest, token ids and logprobs, is passed over without being made."""

    position: int
    sample: int
    prompt: str | list[Any]
    completion: str
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    finish_reason: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    status: str | None = None
    messages: list[Any] = field(default_factory=list)


def shown_rollouts(run_dir: Path, step: int) -> list[ShownRollout]:
    """At most MOST_ROLLOUTS of the step's dump, evenly over it; lines that are none are passed over. Raises OSError and
    ConfigError for files that cannot be read."""
    lines = evenly(_lines(rollouts_parts(run_dir, step).values()), MOST_ROLLOUTS)
    return [_shown(line) for text in lines if (line := _parsed(text)) is not None]


def evenly(lines: Iterable[bytes], most: int) -> list[bytes]:
    """At most `most` of `lines`, as many as there are, at even distances. Never holds more than twice that."""
    kept, stride = list[bytes](), 1
    for number, line in enumerate(lines):
        if number % stride == 0:
            kept.append(line)
        if len(kept) == 2 * most:
            kept, stride = kept[::2], 2 * stride
    return [kept[i * len(kept) // most] for i in range(most)] if len(kept) > most else kept


def _lines(paths: Iterable[Path]) -> Iterator[bytes]:
    room = _MOST_BYTES
    for path in paths:
        with open_regular(path) as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            try:
                while room > 0 and (line := file.readline(_LONGEST_LINE)):
                    room -= len(line)
                    if line.endswith(b"\n"):  # else a part of one that is too long
                        yield line
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ConfigError(
                    f"{path}: not a whole gzip file: {error}; other steps may have one"
                ) from None


def _parsed(text: bytes) -> _Line | None:
    try:
        try:
            return msgspec.json.decode(text, type=_Line)
        except ValueError:  # half a surrogate pair, which msgspec refuses, or what is no rollout
            return msgspec.convert(json.loads(text), type=_Line)
    except (ValueError, RecursionError):
        return None


def _shown(line: _Line) -> ShownRollout:
    prompt = (
        line.prompt if isinstance(line.prompt, list) else [{"role": "user", "content": line.prompt}]
    )
    behind = line.messages or [{"role": "assistant", "content": line.completion}]
    messages = [_message(message) for message in (prompt + behind)[:MOST_MESSAGES]]
    as_text = (
        line.prompt
        if isinstance(line.prompt, str)
        else "\n\n".join(_prompt_texts(messages[: len(prompt)]))
    )
    return ShownRollout(
        position=line.position,
        sample=line.sample,
        prompt=shown_text(as_text),
        completion=shown_text(line.completion),
        messages=messages,
        rewards={
            shown_text(name)[:100]: line.rewards[name] for name in [*line.rewards][:MOST_REWARDS]
        },
        reward=line.reward,
        advantage=line.advantage,
        finish_reason=shown_text(line.finish_reason),
        status=None if line.status is None else shown_text(line.status),
        answer=shown_text(gold(line.columns)),
    )


def _prompt_texts(messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
    yield from (f"{message['role']}: {message['content']}" for message in messages)


def _message(message: Any) -> dict[str, str]:
    """Role and content; whatever else it has, calls of tools, stands behind the content as JSON."""
    if not isinstance(message, dict):
        return {"role": "unknown", "content": shown_text(json.dumps(message))}
    content, role = message.get("content"), message.get("role")
    parts = [content if isinstance(content, str) else json.dumps(content)] if content else []
    if rest := {
        name: value for name, value in message.items() if name not in ("role", "content") and value
    }:
        parts.append(json.dumps(rest, ensure_ascii=False))
    who = shown_text(role)[:40] if isinstance(role, str) else "unknown"
    return {"role": who, "content": shown_text("\n".join(parts))}


def shown_text(text: str) -> str:
    r"""Cut to LONGEST_TEXT, saying so; what a browser would obey as an escape, "\u202e"."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} ... ({len(text)} characters)"
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def as_table(rollouts: Sequence[ShownRollout]) -> tuple[list[str], list[list[Any]]]:
    """Column names and rows: texts, numbers and None."""
    names = sorted({name for rollout in rollouts for name in rollout.rewards})[:MOST_REWARDS]
    columns = ["prompt", "completion", "reward", *(f"reward/{name}" for name in names)]
    columns += ["advantage", "finish_reason", "status", "answer", "position", "sample"]
    rows = [
        [
            *(
                each.prompt,
                each.completion,
                each.reward,
                *(each.rewards.get(name) for name in names),
            ),
            *(
                each.advantage,
                each.finish_reason,
                each.status,
                each.answer,
                each.position,
                each.sample,
            ),
        ]
        for each in rollouts
    ]
    return columns, rows
