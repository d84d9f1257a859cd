"""Differences between engine and policy on the tokens of completions, in words and as colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.tools.report.pieces import TokenPieces, read_pieces
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.charts import number
from grpo_spmd.tools.show.dump import read_scores
from grpo_spmd.tools.terminal import Styles

_MAX_COLOURED_CHARS = 1 << 24
_STYLES = ((100.0, "far"), (10.0, "over"), (1.0, "near"))  # (from so many bounds on, style)


class TokenDifferences:
    """The recorded token scores of some rollouts of one step."""

    def __init__(
        self, run: RecordedRun, step: int, records: Sequence[RolloutRecord], errors: ReadErrors
    ) -> None:
        dtype = "float32" if run.config.get("model.dtype") == "float32" else "bfloat16"
        # The bound of a step's mean. A single token may exceed it by far in a run that is fine.
        self._bound, _ = bounds_of(dtype, None, None)
        self._run = run
        self._records = records
        rollout_ids = {record.rollout_id for record in records}
        self._scores = read_scores(run, step, rollout_ids, errors)

    @property
    def legend(self) -> str:
        """The meaning of the colours; "" if the run recorded no scores."""
        if not self._scores or not self._pieces:
            return ""
        near = number(self._bound)
        if not any(map(self.is_coloured, self._records)):
            return f"policy and engine are nowhere {near} nats apart; tokens would be yellow there"
        over = number(10 * self._bound)
        return f"tokens in yellow: policy and engine {near} nats apart or more; in red: {over}"

    def is_coloured(self, record: RolloutRecord) -> bool:
        """Returns True if any token has a colour."""
        scores = self._scores_of(record)
        # Written so that NaN counts as a difference.
        return scores is not None and not bool((np.abs(scores.difference) < self._bound).all())

    def describe(self, record: RolloutRecord) -> str:
        """Returns mean and largest difference and their token; "" if nothing was recorded."""
        scores = self._scores_of(record)
        if scores is None or not len(scores.difference):
            return ""
        sizes = np.where(np.isfinite(scores.difference), np.abs(scores.difference), np.inf)
        index = int(sizes.argmax())
        pieces = self._pieces.decode(record.completion_ids) if self._pieces else []
        piece = f" {pieces[index]!r:.40}" if index < len(pieces) and pieces[index] else ""
        mean = math.nan if scores.difference_mean is None else scores.difference_mean
        largest = math.nan if scores.difference_max is None else scores.difference_max
        figures = f"mean {number(mean)}, largest {number(largest)} nats"
        return f"policy - engine: {figures} (token {index + 1}{piece})"

    def coloured_text(self, record: RolloutRecord) -> tuple[str, Styles]:
        """Returns the completion as the text of its tokens, and the style of each character.

        An episode's turns stand below each other. If the tokens do not make the recorded text,
        that text is returned without colours.
        """
        scores = self._scores_of(record)
        if scores is None or self._pieces is None:
            return record.completion, ""
        pieces = self._pieces.decode(record.completion_ids)
        if sum(map(len, pieces)) > _MAX_COLOURED_CHARS:
            return record.completion, ""
        token_styles = [_style(size) for size in np.abs(scores.difference) / self._bound]
        # A single turn is one text; an episode has one for each sampled turn.
        num_tokens = [len(pieces)]
        if record.status is not None:
            num_tokens = [len(turn["token_ids"]) for turn in record.turns if turn["sampled"]]
        turns: list[str] = []
        styles: list[str] = []
        begin = 0
        for end in np.cumsum(num_tokens).tolist():
            turns.append("".join(pieces[begin:end]))
            for piece, style in zip(pieces[begin:end], token_styles[begin:end], strict=False):
                styles += [style] * len(piece)
            styles.append("")  # the line break after a turn
            begin = end
        text = "\n".join(turns)
        if record.status is None and not text.strip().startswith(record.completion.strip()):
            return record.completion, ""
        return text, styles[:-1]

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        return read_pieces(self._run.folder)

    def _scores_of(self, record: RolloutRecord) -> TokenScores | None:
        scores = None if record.rollout_id is None else self._scores.get(record.rollout_id)
        # Scores of another length are from another run's rollout.
        is_same = scores is not None and len(scores.difference) == len(record.completion_ids)
        return scores if is_same else None


def _style(num_bounds: float) -> str:
    # NaN is beyond all bounds.
    return next((style for bound, style in _STYLES if not num_bounds < bound), "")
