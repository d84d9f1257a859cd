"""How far engine and policy were apart on the tokens of completions: in words, and as colours of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.report.pieces import Pieces, read_pieces
from grpo_spmd.report.run import RecordedRun
from grpo_spmd.show.dump import Unread
from grpo_spmd.show.paper import number
from grpo_spmd.show.recorded import scores_of

_LONGEST = 1 << 24  # characters that are coloured
_LEVELS = ((100.0, "far"), (10.0, "over"), (1.0, "near"))  # from so many bounds on


class Scored:
    """Rollouts of one step with what was recorded of their tokens."""

    def __init__(self, run: RecordedRun, step: int, records: Sequence[RolloutRecord], unread: Unread) -> None:
        dtype = "float32" if run.config.get("model.dtype") == "float32" else "bfloat16"
        self._bound, _ = bounds_of(dtype, None, None)  # of a step's mean: what of single tokens is little
        self._run, self._records = run, records
        self._scores = scores_of(run.folder, step, {record.rollout_id for record in records}, unread)

    @property
    def legend(self) -> str:
        """What the colours mean, and whether there are any; "" where nothing was recorded."""
        if not self._scores or not self._pieces:
            return ""
        near, over = number(self._bound), number(10 * self._bound)
        if not any(map(self.is_apart, self._records)):
            return f"policy and engine are nowhere {near} nats apart; tokens would be yellow there"
        return f"tokens in yellow: policy and engine {near} nats apart or more; in red: {over}"

    def is_apart(self, record: RolloutRecord) -> bool:
        """Whether any token has a colour."""
        scores = self._of(record)
        return scores is not None and not bool((np.abs(scores.difference) < self._bound).all())

    @cached_property
    def _pieces(self) -> Pieces | None:
        return read_pieces(self._run.folder)

    def _of(self, record: RolloutRecord) -> TokenScores | None:
        scores = None if record.rollout_id is None else self._scores.get(record.rollout_id)
        return scores if scores is not None and len(scores.difference) == len(record.completion_ids) else None

    def said_of(self, record: RolloutRecord) -> str:
        """Mean and largest difference, and where that is; "" where nothing was recorded."""
        scores = self._of(record)
        if scores is None or not len(scores.difference):
            return ""
        size = np.where(np.isfinite(scores.difference), np.abs(scores.difference), np.inf)
        place = int(size.argmax())
        pieces = self._pieces.of(record.completion_ids) if self._pieces else []
        text = f" {pieces[place]!r:.40}" if place < len(pieces) and pieces[place] else ""
        mean, largest = (math.nan if of is None else of for of in (scores.difference_mean, scores.difference_max))
        return f"policy - engine: mean {number(mean)}, largest {number(largest)} nats (token {place + 1}{text})"

    def coloured(self, record: RolloutRecord) -> tuple[str, list[str]]:
        """The completion as its tokens are, those of no text among them, and the style of each character: by how far
        engine and policy are apart. Of an episode the turns below each other. As the dump has it where tokens do not
        make that text."""
        scores = self._of(record)
        pieces = self._pieces.of(record.completion_ids) if scores is not None and self._pieces else []
        if scores is None or sum(map(len, pieces)) > _LONGEST:
            return record.completion, []
        sizes = np.abs(scores.difference) / self._bound
        styles = [style for piece, size in zip(pieces, sizes, strict=False) for style in [_level(size)] * len(piece)]
        if record.status is not None:
            return _by_turns(record, pieces, styles)
        text = "".join(pieces)
        return (text, styles) if text.strip().startswith(record.completion.strip()) else (record.completion, [])


def _by_turns(record: RolloutRecord, pieces: Sequence[str], styles: Sequence[str]) -> tuple[str, list[str]]:
    """With a newline behind each turn."""
    texts, of_texts, token, place = list[str](), list[str](), 0, 0
    for turn in record.turns:
        if turn["sampled"]:
            text = "".join(pieces[token : token + len(turn["token_ids"])])
            texts.append(text + "\n")
            of_texts += [*styles[place : place + len(text)], ""]
            token, place = token + len(turn["token_ids"]), place + len(text)
    return "".join(texts)[:-1], of_texts[:-1]


def _level(bounds: float) -> str:
    """NaN is beyond all."""
    return next((style for least, style in _LEVELS if not bounds < least), "")
