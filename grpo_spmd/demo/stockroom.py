"""The environment of the tools demo and its reward, as a user would write them (TRL's protocol).

The stock is drawn for each episode and only the tool knows it, so the model cannot answer from the
prompt alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

ITEMS = "abcdefgh"


class Stockroom:
    """A room with up to nine of each item."""

    def reset(self, wanted: Sequence[str], **columns: Any) -> None:
        """Draws a new stock. `random` has the episode's seed, so a resumed run draws the same."""
        self._stock = {item: random.randint(0, 9) for item in ITEMS}
        self._wanted = wanted

    def count(self, item: str) -> int:
        """
        Count what is in stock of one item.

        Args:
            item: The item's letter.

        Returns:
            How many there are.
        """
        return self._stock[item]

    # Private, because every public method is a tool that the policy can call.
    def _answer(self) -> str:
        return ",".join(str(self._stock[item]) for item in self._wanted)


def right_counts(
    completions: Sequence[Any], environments: Sequence[Any], **columns: Any
) -> list[float]:
    """Returns 1.0 where the last message has the counts of the wanted items, as in "7,3"."""
    return [
        float(messages[-1].get("content") == environment._answer())
        for messages, environment in zip(completions, environments, strict=True)
    ]
