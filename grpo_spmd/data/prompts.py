"""This module has the streams of prompts, which decide their order: a shuffled stream, and one for
tail batching.

A *position* is the index of a prompt in the endless stream, counted from 0 over all epochs. The
streams of all ranks are in the same state.
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
    """An endless stream of shuffled prompts, with each prompt exactly once in an epoch.

    The prompt at a position depends only on the seed and the position, not on the world size.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0
    ) -> None:
        """`position` is where the stream begins. Without `shuffle` prompts stay in the order of the
        data set."""
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        # The rows in the order of the epoch `_order_epoch`, which is -1 before the first use.
        self._order_epoch = -1
        self._order: Sequence[int] = ()
        self.position = position
        """The position of the next prompt."""

    @property
    def epoch(self) -> float:
        """The number of prompts that were taken, divided by the number in the data set."""
        return self.position / len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next `num_prompts` prompts. Every rank must take the same number."""
        start = self.position
        self.position += num_prompts
        return [self.at(position) for position in range(start, self.position)]

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores besides the position: nothing."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step's prompts; only a TailStream has some."""
        return {}

    def at(self, position: int) -> Prompt:
        """Returns the prompt at a position of the stream."""
        epoch, offset = divmod(position, len(self._prompts))
        if self._order_epoch != epoch:
            order: Sequence[int] = range(len(self._prompts))
            if self._shuffle:
                # An array takes 8 bytes a row on each rank, a list 40.
                shuffled = array("q", order)
                random.Random(f"{self._seed}/{epoch}").shuffle(shuffled)
                order = shuffled
            self._order = order
            self._order_epoch = epoch
        return replace(self._prompts[self._order[offset]], position=position)


class TailStream:
    """A PromptStream for tail batching (RollPacker, NSDI '26).

    A *short round* starts more prompts than its step needs; those that are not finished when the
    step is full are put off, and wait for a *long round*, which starts only as many prompts as its
    step needs. So each position is taken again until it is trained on, and then never again.
    No prompt waits beyond the end of its epoch: as long as one waits, prompts of the next epoch are
    taken only to fill the step that ends the epoch, as without tail batching.
    """

    def __init__(
        self, stream: PromptStream, num_rows: int, num_launched: int, waiting: Sequence[int] = ()
    ) -> None:
        """`stream` has all `num_rows` prompts, and is at the first position never taken before.

        `num_launched` is the number of prompts that a short round starts. If a step needs as many
        as that, there are no short rounds. `waiting` are the positions of the prompts that were put
        off before the checkpoint from which the run resumes. Raises ConfigError if they are not
        ascending positions before that of the stream.
        """
        self._stream = stream
        self._num_rows = num_rows
        self._num_launched = num_launched
        self._waiting = list(waiting)
        self._round_metrics: dict[str, float] = {}
        if [*self._waiting, self.position] != sorted({*self._waiting, self.position}):
            raise ConfigError(
                "checkpoint.resume: trainer.json: waiting must hold positions of the prompt stream "
                "before its own, in order; take another checkpoint"
            )

    @property
    def position(self) -> int:
        """The position of the next prompt that was never taken."""
        return self._stream.position

    @property
    def epoch(self) -> float:
        """The number of prompts that were trained on, divided by the number in the data set."""
        return (self.position - len(self._waiting)) / self._num_rows

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the prompts of the next step, which trains on `num_prompts`.

        A short round takes the next `num_launched` prompts of the stream. Any other round takes
        `num_prompts`: first those that wait, then the next of the stream.
        """
        # The round is long if the prompts that wait fill a step.
        is_long = len(self._waiting) >= num_prompts
        self._round_metrics = {
            "rollout/tail_long_round": float(is_long),
            "rollout/tail_dropped_tokens_frac": 0.0,
        }
        epoch, offset = divmod(self.position, self._num_rows)
        # True if a prompt of an earlier epoch still waits.
        has_old = bool(self._waiting) and self._waiting[0] // self._num_rows < epoch
        num_left_in_epoch = self._num_rows - offset
        # A short round starts more prompts than the step needs, all of them of this epoch.
        fits = num_prompts < self._num_launched <= num_left_in_epoch
        if fits and not is_long and not has_old:
            return self._stream.take(self._num_launched)
        # In a long round, or one that ends the epoch, the waiting prompts come first.
        slow = self._waiting[:num_prompts]
        self._waiting = self._waiting[num_prompts:]
        slow_prompts = [self._stream.at(position) for position in slow]
        return slow_prompts + self._stream.take(num_prompts - len(slow))

    def leave(self, prompts: Sequence[Prompt], metrics: Mapping[str, float]) -> None:
        """Keeps prompts that tail batching has started and not finished, for a later round.

        Such a round starts more prompts than the step trains on, and ends when enough groups are
        complete. All ranks must pass the same `prompts`. `metrics`, such as the fraction of tokens
        that the round dropped, are logged with the step's.
        """
        self._waiting += sorted(prompt.position for prompt in prompts)
        self._round_metrics |= metrics

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores besides the position."""
        return {"waiting": list(self._waiting)}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step's prompts, equal on all ranks."""
        return {"rollout/waiting_prompts": len(self._waiting), **self._round_metrics}


def check_enough_to_launch(num_rows: int, rollout: RolloutConfig) -> None:
    """Raises ConfigError if tail batching starts more prompts at once than the data set has.

    With rollout.tail_batching a step samples more prompts than it trains on, and keeps the first to
    end. The same prompt twice in a step would be trained on twice.
    """
    num_launched = rollout.num_launched_prompts
    if num_launched > num_rows:
        raise ConfigError(
            f"rollout.tail_batching ({rollout.tail_batching:g}) launches {num_launched} prompts, "
            f"and data.train has {num_rows} usable ones; lower it, or leave it out"
        )
