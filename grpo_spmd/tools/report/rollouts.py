"""A rollout as the page shows it: its text, its tokens with their figures, the turns of an episode.

Texts of policies and data sets are cut here to bounded sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    bounded_values,
    is_shallow,
    parse_rollout,
)
from grpo_spmd.observe.token_scores import TokenScores, parse_scores
from grpo_spmd.tools.report.pieces import TokenPieces

MAX_PROMPT_CHARS = 12_000
_MAX_TURNS = 200
_MAX_MESSAGES = 200
_MAX_MESSAGE_CHARS = 40_000  # of all messages of an episode
# Characters of a turn: of one that was not sampled, and of any turn that is cut.
_MAX_GIVEN_CHARS = 4_000
_MIN_TURN_CHARS = 200


@dataclass
class PageRollout:
    """The JSON of one rollout, in two parts so that the second one can be left out."""

    text: dict[str, Any]
    prompt: str
    make_tokens: Callable[[], dict[str, Any] | None]

    @cached_property
    def tokens(self) -> dict[str, Any] | None:
        return self.make_tokens()


def make_rollout(
    line: bytes, score_line: bytes | None, pieces: TokenPieces | None, max_chars: int, reason: str
) -> PageRollout | None:
    """Returns the rollout of a dump's line and its line of token scores; None if it is broken.

    A completion of more than `max_chars` characters is cut in its middle. `reason` says why the
    page shows the rollout.
    """
    record = parse_line(line)
    if record is None:
        return None
    # The keys are those of the page's scripts (page/tokens.js).
    completion, num_cut = shorten(record.completion, max_chars)
    text = {
        "position": record.position,
        "sample": record.sample,
        "why": reason,
        "completion": completion,
        "cut": num_cut,
        "reward": record.reward,
        "rewards": record.rewards,
        "statuses": record.statuses,
        "advantage": record.advantage,
        "finish_reason": record.finish_reason,
        "columns": bounded_values(record.columns),
        "extra": bounded_values(record.extra),
        "tokens": None,
    }
    if record.status is not None:
        text |= _episode(record, pieces, max_chars, is_cut=num_cut > 0)

    def make_tokens() -> dict[str, Any] | None:
        # An episode's turns count on all tokens. Without texts nobody sees where the middle is.
        if num_cut and (record.status is not None or pieces is None):
            return None
        texts = pieces.decode(record.completion_ids) if pieces is not None else None
        tokens = _token_columns(record, texts, score_line)
        return _cut_middle(tokens, texts, max_chars) if num_cut and texts is not None else tokens

    return PageRollout(text, prompt_text(record.prompt), make_tokens)


def parse_line(line: bytes) -> RolloutRecord | None:
    """Returns None for a line that is broken, or nested too deeply to be written as JSON again."""
    # Deep nesting would end json.dumps with a RecursionError.
    with suppress(ConfigError):
        record = parse_rollout(line, "")
        if is_shallow([record.columns, record.prompt, record.extra, record.environment]):
            return record
    return None


def _token_columns(
    record: RolloutRecord, texts: list[str] | None, score_line: bytes | None
) -> dict[str, Any]:
    """Returns lists with an entry for each sampled token.

    A list is null if its values are not known. A null `advantage` means the rollout's; a null
    `mask` means that all tokens count.
    """
    tokens: dict[str, Any] = {
        "pieces": texts,
        "ids": record.completion_ids,
        "logprob": _finite_list(np.round(np.array(record.rollout_logprobs), 3)),
        **dict.fromkeys(("difference", "entropy", "advantage", "mask")),
    }
    scores = _parse_score_line(score_line)
    # Scores of another length are from another run's rollout.
    if scores is not None and len(scores.difference) == len(record.completion_ids):
        # Three digits are what the page shows; more would only take room.
        tokens["difference"] = _three_digits(scores.difference)
        tokens["entropy"] = _three_digits(scores.entropy)
        if scores.advantages is not None:
            tokens["advantage"] = _three_digits(scores.advantages)
        if scores.loss_mask is not None:
            tokens["mask"] = scores.loss_mask.astype(int).tolist()
    return tokens


def _parse_score_line(line: bytes | None) -> TokenScores | None:
    with suppress(ConfigError):
        return parse_scores(line, "") if line is not None else None
    return None


def _three_digits(values: npt.NDArray[np.float32]) -> list[float | None]:
    # The values were float16, so a table of all of them is quicker than rounding each.
    return _finite_list(_three_digit_table()[values.astype(np.float16).view(np.uint16)])


@cache
def _three_digit_table() -> npt.NDArray[np.float64]:
    """Returns the nearest number of three digits for each float16, by its bits."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64).tolist()
    return np.array([float(f"{value:.3g}") for value in values])


def _finite_list(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    """Returns the values with None for those that are not finite."""
    is_finite = np.isfinite(values)
    listed: list[float | None] = values.tolist()
    if is_finite.all():
        return listed
    return [value if finite else None for value, finite in zip(listed, is_finite, strict=True)]


def _cut_middle(tokens: dict[str, Any], texts: Sequence[str], max_chars: int) -> dict[str, Any]:
    """Returns the tokens at both ends, around one without figures that says what is missing."""
    ends = np.cumsum([len(text) for text in texts])
    head_end = int(np.searchsorted(ends, max_chars // 2))
    tail_begin = int(np.searchsorted(ends, int(ends[-1]) - max_chars // 2)) + 1
    # A few long tokens at the ends may leave nothing to cut between them.
    if head_end >= tail_begin:
        return tokens
    num_cut = int(ends[tail_begin - 1] - (ends[head_end - 1] if head_end else 0))
    shortened: dict[str, Any] = {}
    for name, values in tokens.items():
        marker = _cut_marker(num_cut) if name == "pieces" else None
        shortened[name] = (
            None if values is None else [*values[:head_end], marker, *values[tail_begin:]]
        )
    return shortened


def _episode(
    record: RolloutRecord, pieces: TokenPieces | None, max_chars: int, *, is_cut: bool
) -> dict[str, Any]:
    """Returns the fields of an episode.

    Given turns, sampled turns (if the completion is cut) and messages get a third of `max_chars`
    each, since all three repeat what the completion says.
    """
    max_chars //= 3
    turns = record.turns[:_MAX_TURNS]
    num_sampled = sum(turn["sampled"] for turn in turns)
    chars_per_given = max_chars // max(1, len(turns) - num_sampled)
    max_given = min(_MAX_GIVEN_CHARS, max(_MIN_TURN_CHARS, chars_per_given))
    max_sampled = max(_MIN_TURN_CHARS, max_chars // max(1, num_sampled))
    page_turns = []
    for turn in turns:
        page_turn = {
            "sampled": turn["sampled"],
            "segment": turn["segment"],
            "reward": turn.get("reward"),
            "num_tokens": len(turn["token_ids"]),
        }
        if pieces is not None:
            texts = pieces.decode(turn["token_ids"])
            if not turn["sampled"] or is_cut:
                texts = [shorten("".join(texts), max_sampled if turn["sampled"] else max_given)[0]]
            page_turn["pieces"] = texts
        page_turns.append(page_turn)
    messages = []
    # Whole messages or none: half a message would look like what was said.
    num_chars_left = min(_MAX_MESSAGE_CHARS, max_chars)
    for message in record.messages[:_MAX_MESSAGES]:
        num_chars_left -= len(json.dumps(message))
        if num_chars_left < 0:
            messages.append({"role": "", "content": "further messages are not in this page"})
            break
        messages.append(message)
    return {
        "status": record.status,
        "turns": page_turns,
        "messages": messages,
        "environment": bounded_values(record.environment),
    }


def prompt_text(prompt: str | list[Any]) -> str:
    """Returns a prompt as one text, of chat messages role and content."""
    texts = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            texts.append(f"{message.get('role', '')}: {message['content']}")
        else:
            texts.append(message if isinstance(message, str) else json.dumps(message))
    return shorten("\n\n".join(texts), MAX_PROMPT_CHARS)[0]


def shorten(text: str, max_chars: int) -> tuple[str, int]:
    """Returns `text` without what is too long in its middle, and the number of cut characters."""
    if len(text) <= max_chars + 100:  # the marker has some characters itself
        return text, 0
    num_cut = len(text) - max_chars
    begin = max_chars // 2
    return text[:begin] + _cut_marker(num_cut) + text[begin + num_cut :], num_cut


def _cut_marker(num_cut: int) -> str:
    return f"\n[... {num_cut:,} characters ...]\n"
