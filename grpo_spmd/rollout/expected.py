"""How long completions may become, so that the longest are begun first. No token depends on it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.records import Prompt, RolloutGroup


class ExpectedLengths:
    """What a prompt's completions took when it was last sampled in this launch, an epoch ago. Rank 0 remembers 4 bytes
    a row of the data; a run that goes on begins with none, which costs time and changes nothing else."""

    def __init__(self) -> None:
        self._of_row = array("f")  # mean tokens; NaN: not sampled yet
        self._recent_mean = 0.0  # of the groups that were noted last
        self._to_note: list[tuple[int, float]] = []  # row and mean tokens of this rank's groups

    def note(self, groups: Sequence[RolloutGroup]) -> None:
        """What this rank has of the groups that were sampled; told to rank 0 with the next `of`."""
        for group in groups:
            self._to_note.append((group.prompt.row, _mean([len(c.token_ids) for c in group.completions])))

    def of(self, prompts: Sequence[Prompt], finished: Mapping[int, Sequence[int]]) -> list[float]:
        """Collective. Tokens that a completion of each prompt may have, equal on all ranks: as many as last time, else
        the mean of the prompts before it. `finished`, equal on all ranks: by the prompt's place in `prompts`, the
        tokens of its completions that are there already. What is missing ran beside them and was not done, so that it
        may be no shorter than the longest of them."""
        to_note, self._to_note = self._to_note, []
        expected: list[float] = on_rank0(lambda noted: self._look_up(noted, prompts), to_note)
        return [max(finished[slot]) if finished.get(slot) else tokens for slot, tokens in enumerate(expected)]

    def _look_up(self, noted: Sequence[Sequence[tuple[int, float]]], prompts: Sequence[Prompt]) -> list[float]:
        new = [pair for of_rank in noted for pair in of_rank]
        if new:
            self._recent_mean = _mean([tokens for _, tokens in new])
        for row, tokens in new:
            if row >= len(self._of_row):
                self._of_row.extend([math.nan] * (row + 1 - len(self._of_row)))
            self._of_row[row] = tokens
        found = (self._of_row[p.row] if p.row < len(self._of_row) else math.nan for p in prompts)
        return [round(self._recent_mean if math.isnan(tokens) else tokens, 1) for tokens in found]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
