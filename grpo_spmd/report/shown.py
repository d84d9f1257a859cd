"""A rollout as the page shows it whole: its text, its tokens with their figures, and the turns of an episode. What a
policy or a data set wrote is bounded here."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.columns import bounded
from grpo_spmd.observe.rollout_reader import read_rollout
from grpo_spmd.observe.rollout_record import OF_EPISODES
from grpo_spmd.observe.rollout_turns import is_shallow
from grpo_spmd.report.pieces import Pieces

LONGEST_PROMPT = 12_000  # characters
_MOST_TURNS, _MOST_MESSAGES, _LONGEST_MESSAGES = 200, 200, 40_000  # of an episode; characters of all its messages
_LONGEST_GIVEN, _LEAST_TURN = 4_000, 200  # characters of a turn that was not sampled; of any that is cut


@dataclass(frozen=True)
class _Scores:
    difference: str
    entropy: str
    advantages: str | None = None
    loss_mask: str | None = None


@dataclass(frozen=True)
class _Whole:
    """A line of a dump that is no episode, checked as it is decoded."""

    row: int
    position: int
    sample: int
    prompt: str | list[Any]
    completion: str
    finish_reason: str
    completion_ids: list[int]
    rollout_logprobs: str
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    advantage: float | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    status: str | None = None


_FIELDS = tuple(_Whole.__dataclass_fields__)
_WHOLE, _SCORES = msgspec.json.Decoder(_Whole), msgspec.json.Decoder(_Scores)


@dataclass
class Shown:
    """Its JSON in two parts, so that the second can be left out."""

    text: dict[str, Any]
    prompt: str
    make_tokens: Callable[[], dict[str, Any] | None]

    @cached_property
    def tokens(self) -> dict[str, Any] | None:
        return self.make_tokens()


def shown(line: bytes, scores: bytes | None, pieces: Pieces | None, longest: int, why: str) -> Shown | None:
    """None where the line is broken; `scores`: its line of token scores; `longest`: characters of a completion, in
    whose middle further ones are left out."""
    values = whole_line(line)
    if values is None:
        return None
    completion, cut = shortened(values["completion"], longest)
    text = {
        **{name: values[name] for name in ("position", "sample")},
        "why": why,
        "completion": completion,
        "cut": cut,
        **{name: values[name] for name in ("reward", "rewards", "statuses", "advantage", "finish_reason")},
        "columns": bounded(values["columns"]),
        "extra": bounded(values["extra"]),
        "tokens": None,
    }
    if values["status"] is not None:
        text |= _episode(values, pieces, longest, cut)

    def make_tokens() -> dict[str, Any] | None:
        if cut and (values["status"] is not None or pieces is None):
            return None  # turns count on all of them; without their texts nobody sees where the middle is
        texts = pieces.of(values["completion_ids"]) if pieces is not None else None
        tokens = _tokens(values["completion_ids"], texts, values["rollout_logprobs"], scores)
        return _without_middle(tokens, texts, longest) if cut and texts is not None else tokens

    return Shown(text, prompt_text(values["prompt"]), make_tokens)


def whole_line(line: bytes) -> dict[str, Any] | None:
    """Its fields, checked, with logprobs as an array; None where it is broken."""
    with suppress(msgspec.MsgspecError, RecursionError, ValueError):
        found = _WHOLE.decode(line)
        logprobs = np.frombuffer(base64.b64decode(found.rollout_logprobs, validate=True), "<f4")
        if (
            found.status is None
            and len(logprobs) == len(found.completion_ids)
            and is_shallow([found.columns, found.prompt])
        ):
            return {
                **{name: getattr(found, name) for name in _FIELDS},
                "rollout_logprobs": logprobs,
            }  # vars: no defaults
    with suppress(ConfigError, RecursionError, OverflowError):  # an episode, another version's, or broken
        record = read_rollout(line, "")
        if is_shallow([record.columns, record.prompt, record.extra, record.environment]):
            logprobs = np.array(record.rollout_logprobs, np.float32)
            return {**vars(record), "rollout_logprobs": logprobs}
    return None


def _tokens(
    ids: list[int], texts: list[str] | None, logprobs: npt.NDArray[np.float32], line: bytes | None
) -> dict[str, Any]:
    """An entry a sampled token; null: not known, and for `advantage` and `mask`: as the rollout's, all count."""
    found: dict[str, Any] = {
        "pieces": texts,
        "ids": ids,
        "logprob": _clean(np.round(logprobs.astype(np.float64), 3)),
        **dict.fromkeys(("difference", "entropy", "advantage", "mask")),
    }
    with suppress(msgspec.MsgspecError, ValueError):
        scores = _SCORES.decode(line or b"")
        for name, packed in (
            ("difference", scores.difference), ("entropy", scores.entropy), ("advantage", scores.advantages)
        ):  # fmt: skip
            halves = np.frombuffer(base64.b64decode(packed or "", validate=True), np.uint16)
            if len(halves) == len(ids) and packed is not None:
                found[name] = _clean(_three_digits()[halves])
        mask = np.frombuffer(base64.b64decode(scores.loss_mask or "", validate=True), np.uint8)
        if scores.loss_mask is not None and len(mask) == len(ids):
            found["mask"] = mask.tolist()
    return found


@cache
def _three_digits() -> npt.NDArray[np.float64]:
    """Of each float16, by its bits, the number of three digits that is nearest."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64).tolist()
    return np.array([float(f"{value:.3g}") for value in values])


def _clean(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    """With None for what is not finite."""
    is_finite = np.isfinite(values)
    found: list[float | None] = values.tolist()
    return found if is_finite.all() else [value if ok else None for value, ok in zip(found, is_finite, strict=True)]


def _without_middle(tokens: dict[str, Any], texts: Sequence[str], longest: int) -> dict[str, Any]:
    """The tokens at both ends that have `longest` characters, around one that says what is missing, without figures."""
    lengths = np.cumsum([len(text) for text in texts])
    first = int(np.searchsorted(lengths, longest // 2))
    last = int(np.searchsorted(lengths, int(lengths[-1]) - longest // 2)) + 1
    if first >= last:
        return tokens
    gone = int(lengths[last - 1] - (lengths[first - 1] if first else 0))
    found = {}
    for name, values in tokens.items():
        marker = [_marker(gone)] if name == "pieces" else [None]
        found[name] = None if values is None else [*values[:first], *marker, *values[last:]]
    return found


def _episode(values: dict[str, Any], pieces: Pieces | None, longest: int, cut: int) -> dict[str, Any]:
    """All given turns have a third of `longest` characters, and so have sampled ones where the completion is `cut`, and
    messages: each says again what the completion says."""
    longest //= 3
    turns, places = [], values["turns"][:_MOST_TURNS]
    num_sampled = sum(turn["sampled"] for turn in places)
    given = min(_LONGEST_GIVEN, max(_LEAST_TURN, longest // max(1, len(places) - num_sampled)))
    for turn in places:
        is_sampled, ids = turn["sampled"], turn["token_ids"]
        texts = pieces.of(ids) if pieces is not None else None
        one = {"sampled": is_sampled, "segment": turn["segment"], "reward": turn.get("reward"), "num_tokens": len(ids)}
        if texts is not None and is_sampled and not cut:
            one["pieces"] = texts
        elif texts is not None:
            most = max(_LEAST_TURN, longest // max(1, num_sampled)) if is_sampled else given
            one["pieces"] = [shortened("".join(texts), most)[0]]
        turns.append(one)
    messages, left = [], min(_LONGEST_MESSAGES, longest)
    for message in values["messages"][:_MOST_MESSAGES]:
        said = json.dumps(message)
        left -= len(said)
        if left < 0:
            messages.append({"role": "", "content": "further messages are not in this page"})
            break
        messages.append(message)
    environment = bounded(values["environment"])
    return {name: values[name] for name in OF_EPISODES} | {
        "turns": turns,
        "messages": messages,
        "environment": environment,
    }


def prompt_text(prompt: str | list[Any]) -> str:
    """Of chat messages role and content, one below the other."""
    parts = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            parts.append(f"{message.get('role', '')}: {message['content']}")
        else:
            parts.append(message if isinstance(message, str) else json.dumps(message))
    return shortened("\n\n".join(parts), LONGEST_PROMPT)[0]


def shortened(text: str, longest: int) -> tuple[str, int]:
    """`text`, in whose middle is left out what is beyond `longest` characters, and how many these are."""
    if len(text) <= longest + 100:  # the mark has some itself
        return text, 0
    gone = len(text) - longest
    return text[: longest // 2] + _marker(gone) + text[longest // 2 + gone :], gone


def _marker(gone: int) -> str:
    return f"\n[... {gone:,} characters ...]\n"
