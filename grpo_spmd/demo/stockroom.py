"""The environment of the tools demo, as a user would write it: TRL's protocol, and a reward that sees it.

Nobody can answer from the prompt: what is in stock is drawn anew for each episode, and only the tool tells of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

ITEMS = "abcdefgh"


class Stockroom:
    def reset(self, wanted: Sequence[str], **columns: Any) -> None:
        """A new stock. `random` is seeded with the episode's seed, so that a resumed run finds the same one."""
        stock = {item: random.randint(0, 9) for item in ITEMS}
        self._stock, self._wanted = stock, wanted

    def count(self, item: str) -> int:
        """
        Count what is in stock of one item.

        Args:
            item: The item's letter.

        Returns:
            How many there are.
        """
        return self._stock[item]

    def _answer(self) -> str:
        return ",".join(str(self._stock[item]) for item in self._wanted)


def right_counts(
    completions: Sequence[Any], environments: Sequence[Any], **columns: Any
) -> list[float]:
    """1.0 where the last message says how many there are of each item that was asked for, "7,3"."""
    pairs = zip(completions, environments, strict=True)
    return [float(said[-1].get("content") == environment._answer()) for said, environment in pairs]
