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
        self._to_note: list[tuple[int, float, int]] = []  # of this rank's groups row, mean and most tokens
        self._to_guess: list[int] = []  # rows of groups that were dropped

    def note(self, groups: Sequence[RolloutGroup], dropped: Sequence[Prompt] = ()) -> None:
        """What this rank has of the groups that were sampled; told to rank 0 with the next `of`. `dropped`: prompts
        whose groups ran beside those of all ranks and were not done, so that they may be no shorter than the longest.
        """
        lengths = [[len(completion.token_ids) for completion in group.completions] for group in groups]
        noted = zip(groups, lengths, strict=True)
        self._to_note += [(group.prompt.row, sum(own) / len(own), max(own)) for group, own in noted]
        self._to_guess += [prompt.row for prompt in dropped]

    def of(self, prompts: Sequence[Prompt], finished: Mapping[int, Sequence[int]]) -> list[float]:
        """Collective. Tokens that a completion of each prompt may have, equal on all ranks: as many as last time, else
        the mean of the prompts before it. `finished`, equal on all ranks: by the prompt's place in `prompts`, the
        tokens of its completions that are there already. What is missing ran beside them and was not done, so that it
        may be no shorter than the longest of them."""
        told, self._to_note, self._to_guess = (self._to_note, self._to_guess), [], []
        expected: list[float] = on_rank0(lambda of_ranks: self._look_up(of_ranks, prompts), told)
        return [max(finished[slot]) if finished.get(slot) else tokens for slot, tokens in enumerate(expected)]

    def _look_up(
        self, of_ranks: Sequence[tuple[Sequence[tuple[int, float, int]], Sequence[int]]], prompts: Sequence[Prompt]
    ) -> list[float]:
        noted = [group for groups, _ in of_ranks for group in groups]
        new = [(row, mean) for row, mean, _ in noted]
        if noted:
            self._recent_mean = sum(mean for _, mean in new) / len(new)
            longest = max(most for *_, most in noted)
            new += [(row, longest) for _, dropped in of_ranks for row in dropped]
        for row, tokens in new:
            if row >= len(self._of_row):
                self._of_row.extend([math.nan] * (row + 1 - len(self._of_row)))
            self._of_row[row] = tokens
        found = (self._of_row[p.row] if p.row < len(self._of_row) else math.nan for p in prompts)
        return [round(self._recent_mean if math.isnan(tokens) else tokens, 1) for tokens in found]
