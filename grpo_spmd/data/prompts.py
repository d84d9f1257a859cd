"""A shuffled cursor over prompts that knows nothing of ranks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

from grpo_spmd.records import Prompt


class PromptStream:
    """Endless shuffled prompts, each exactly once an epoch: a function of (seed, position), whatever the world size."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0) -> None:
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.position = position  # of the next prompt

    @property
    def epoch(self) -> float:
        """Prompts that were drawn, over those of the data set."""
        return self.position / len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; every rank must take as many."""
        start, self.position = self.position, self.position + num_prompts
        return [self.at(position) for position in range(start, self.position)]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, beside the position."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Of the step's prompts, equal on all ranks."""
        return {}

    def at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._prompts))
        if self._order[0] != epoch:
            order: Sequence[int] = range(len(self._prompts))
            if self._shuffle:
                order = array("q", order)  # 8 bytes a row on each rank, where a list has 40
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        prompt = self._prompts[self._order[1][offset]]
        return Prompt(position, prompt.row, prompt.token_ids, prompt.text, prompt.columns)
