"""Some of a step's rollouts, as trackers show them: few, cut to a size, and text that is nothing but text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.metrics_file import read_lines
from grpo_spmd.observe.rollout_record import RolloutRecord, gold_answer, parse_rollout_fields
from grpo_spmd.observe.run_folder import RunFolder

MOST_ROLLOUTS, MOST_MESSAGES, MOST_REWARDS = 64, 32, 16
LONGEST_TEXT = 4_000  # characters of a prompt, a completion or a message
_FIELDS = (
    "position", "sample", "prompt", "completion", "reward", "rewards", "advantage", "finish_reason", "columns",
    "status", "messages",
)  # fmt: skip
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


def shown_rollouts(run_dir: Path, step: int) -> list[ShownRollout]:
    """At most MOST_ROLLOUTS of the step's dump, evenly over it; lines that are none are passed over. Raises OSError and
    ConfigError for files that cannot be read."""
    files = RunFolder(run_dir).rollout_files.get(step, {})
    lines = evenly(chain.from_iterable(map(_raw_lines, files.values())), MOST_ROLLOUTS)
    shown = []
    for line in lines:
        with suppress(ConfigError):  # a broken line
            shown.append(_shown(parse_rollout_fields(line, "", _FIELDS)))
    return shown


def _raw_lines(path: Path) -> Iterator[bytes]:
    return (line.text for line in read_lines(path, follow=True))


def evenly(lines: Iterable[bytes], most: int) -> list[bytes]:
    """At most `most` of `lines`, as many as there are, at even distances. Never holds more than twice that."""
    kept, stride = list[bytes](), 1
    for number, line in enumerate(lines):
        if number % stride == 0:
            kept.append(line)
        if len(kept) == 2 * most:
            kept, stride = kept[::2], 2 * stride
    return [kept[i * len(kept) // most] for i in range(most)] if len(kept) > most else kept


def _shown(line: RolloutRecord) -> ShownRollout:
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
        answer=shown_text(gold_answer(line.columns)),
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
