"""This module decides the order of prompts, with a shuffled stream and with a stream for tail
batching.

A *position* counts the prompts of the stream from 0 over all epochs. Streams are equal on all
ranks.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.records import Prompt


class PromptStream:
    """An endless stream of shuffled prompts, each exactly once in an epoch.

    The order depends on (seed, position) alone, not on the world size.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._order_epoch = -1
        self._order: Sequence[int] = ()
        self.position = position
        """The position of the next prompt."""

    @property
    def epoch(self) -> float:
        """The number of prompts that were drawn, divided by those of the data set."""
        return self.position / len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts; every rank must take the same number."""
        start = self.position
        self.position += num_prompts
        return [self.at(position) for position in range(start, self.position)]

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps besides the position."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step's prompts, equal on all ranks."""
        return {}

    def at(self, position: int) -> Prompt:
        """Returns the prompt at a position, which counts over all epochs."""
        epoch, offset = divmod(position, len(self._prompts))
        if self._order_epoch != epoch:
            order: Sequence[int] = range(len(self._prompts))
            if self._shuffle:
                # 8 bytes a row on each rank, where a list has 40.
                shuffled = array("q", order)
                random.Random(f"{self._seed}/{epoch}").shuffle(shuffled)
                order = shuffled
            self._order = order
            self._order_epoch = epoch
        return replace(self._prompts[self._order[offset]], position=position)


class TailStream:
    """A PromptStream for tail batching (RollPacker, NSDI '26).

    A *short round* launches more prompts than a step needs. The slow prompts are left and wait for
    a *long round*. Each position is dealt until it is trained on, and never after that. No prompt
    waits beyond the end of its epoch: while one waits, prompts of the next epoch only fill the step
    that ends the epoch, as without tail batching.
    """

    def __init__(
        self, stream: PromptStream, num_rows: int, num_launched: int, waiting: Sequence[int] = ()
    ) -> None:
        """`stream` has all `num_rows` prompts and stands at the first prompt that was not dealt.

        `num_launched` is the number of prompts of a short round; if a step needs as many, there are
        no short rounds. `waiting` are the positions that the run has left. Raises ConfigError for
        positions that it cannot have left.
        """
        self._stream = stream
        self._num_rows = num_rows
        self._num_launched = num_launched
        self._waiting = list(waiting)
        self._round_metrics: dict[str, float] = {}
        if [*self._waiting, self.position] != sorted({*self._waiting, self.position}):
            raise ConfigError(
                "checkpoint.resume: trainer.json: waiting must hold places of the prompt stream "
                "before its position, in order; take another checkpoint"
            )

    @property
    def position(self) -> int:
        """Returns the position of the next prompt that was never dealt."""
        return self._stream.position

    @property
    def epoch(self) -> float:
        """The number of prompts that were trained on, divided by those of the data set."""
        return (self.position - len(self._waiting)) / self._num_rows

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the prompts of the next step.

        A short round takes the next `num_launched`, more than a step trains on; those whose groups
        finish last wait. A long round takes `num_prompts`, those that wait first.
        """
        is_long = len(self._waiting) >= num_prompts
        self._round_metrics = {
            "rollout/tail_long_round": float(is_long),
            "rollout/tail_dropped_tokens_frac": 0.0,
        }
        epoch, offset = divmod(self.position, self._num_rows)
        has_old = bool(self._waiting) and self._waiting[0] // self._num_rows < epoch
        num_left_in_epoch = self._num_rows - offset
        fits = num_prompts < self._num_launched <= num_left_in_epoch
        if fits and not is_long and not has_old:
            return self._stream.take(self._num_launched)
        # In a long round, or one that ends the epoch, waiting prompts come first: they are oldest.
        slow = self._waiting[:num_prompts]
        self._waiting = self._waiting[num_prompts:]
        slow_prompts = [self._stream.at(position) for position in slow]
        return slow_prompts + self._stream.take(num_prompts - len(slow))

    def leave(self, prompts: Sequence[Prompt], metrics: Mapping[str, float]) -> None:
        """Leaves the prompts of a short round that were not finished when the step was full.

        `prompts` are equal on all ranks; `metrics` are the round's.
        """
        self._waiting += sorted(prompt.position for prompt in prompts)
        self._round_metrics |= metrics

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps besides the position."""
        return {"waiting": list(self._waiting)}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step's prompts, equal on all ranks."""
        return {"rollout/waiting_prompts": len(self._waiting), **self._round_metrics}


def check_enough_to_launch(num_rows: int, rollout: RolloutConfig) -> None:
    """Raises ConfigError for a training set with fewer prompts than a short round launches."""
    num_launched = rollout.num_launched_prompts
    if num_launched > num_rows:
        raise ConfigError(
            f"rollout.tail_batching ({rollout.tail_batching:g}) launches {num_launched} prompts, "
            f"and data.train has {num_rows} usable ones; lower it, or leave it out"
        )
