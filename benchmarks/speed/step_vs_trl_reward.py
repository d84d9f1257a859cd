"""The reward of `step_vs_trl`, for both sides: it runs in TRL's process and in our reward workers,
and imports
nothing."""

from __future__ import annotations

from typing import Any


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Even token ids per 1000, the end (id 0) left out: it differs within a group, can be learned,
    and says little
    about length."""
    words = [[i for i in ids if i] for ids in completion_ids]
    return [1000.0 * sum(i % 2 == 0 for i in ids) / len(ids) if ids else 500.0 for ids in words]
