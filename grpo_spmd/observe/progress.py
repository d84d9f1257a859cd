"""How far a run is, over all of its launches: what it has sampled, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Progress:
    """Counts what the run has sampled, on all ranks alike. A checkpoint keeps the counts, so that a run that goes on
    has the figures of one that was never stopped."""

    def __init__(self, trainer: Mapping[str, Any], step: int) -> None:
        """`trainer`: of the checkpoint that the run starts from, after `step` steps. One of a version that did not
        count leaves the counts out, rather than too small."""
        names = "num_completions", "num_tokens"
        self._counts: dict[str, int] = {
            name: trainer.get(name, 0) for name in names if name in trainer or not step
        }

    def count(self, num_completions: int, num_tokens: int, epoch: float) -> dict[str, float]:
        """The metrics with what a step has sampled, as far as they are known; `epoch`: passes over the data, at its
        end."""
        for name, number in (("num_completions", num_completions), ("num_tokens", num_tokens)):
            if name in self._counts:
                self._counts[name] += number
        counts = {
            f"progress/{name.removeprefix('num_')}": count for name, count in self._counts.items()
        }
        return {"progress/epoch": epoch, **counts}

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return dict(self._counts)


class WallClock:
    """The seconds that the run has been going: the time between two launches, and what was lost with steps that had to
    be made again, do not count."""

    def __init__(self, began: float, newest: Mapping[str, Any]) -> None:
        """`began`: this launch, on the monotonic clock; `newest`: the last line of metrics.jsonl that is left."""
        self._began, self._before_s = began, float(newest.get("time/wall_s") or 0.0)

    def metrics(self) -> dict[str, float | None]:
        return {
            "time/wall_s": self._before_s + time.monotonic() - self._began,
            "time/unix_s": time.time(),
        }
