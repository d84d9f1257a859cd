"""A shuffled cursor over prompts that knows nothing of ranks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.records import Prompt


class PromptStream:
    """Endless shuffled prompts, each exactly once an epoch: a function of (seed, position), whatever the world size."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0
    ) -> None:
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


# Prompts for tail batching: short rounds of more prompts than a step needs, long rounds of the slow ones.


class TailStream:
    """A PromptStream whose steps may leave prompts behind, which wait for a step of their own (RollPacker, NSDI '26).

    Each position is dealt until it is trained on, and then never again. No prompt waits beyond its epoch's end: while
    one does, no prompt of the next epoch is dealt but to fill the step that ends the epoch, as without tail batching.
    """

    def __init__(
        self, fresh: PromptStream, num_rows: int, num_launched: int, waiting: Sequence[int] = ()
    ) -> None:
        """`fresh`: of all `num_rows` prompts, at the first that was not dealt yet. `num_launched`: prompts of a short
        round; with no more than a step needs there is none. `waiting`: positions that the run has left behind so far.
        Raises ConfigError where it cannot have left them."""
        self._fresh, self._num_rows, self._num_launched, self._waiting = (
            fresh,
            num_rows,
            num_launched,
            list(waiting),
        )
        if [*self._waiting, self.position] != sorted({*self._waiting, self.position}):
            what = "trainer.json: waiting must hold places of the prompt stream before its position, in order"
            raise ConfigError(f"checkpoint.resume: {what}; take another checkpoint")
        self._of_round: dict[str, float] = {}

    @property
    def position(self) -> int:
        return self._fresh.position

    @property
    def epoch(self) -> float:
        """Prompts that were trained on, over those of the data set."""
        return (self.position - len(self._waiting)) / self._num_rows

    def take(self, num_prompts: int) -> list[Prompt]:
        """The prompts of the next step: `num_prompts`, or more for a short round; `leave` says which of these wait."""
        left = self._num_rows - self.position % self._num_rows  # of the epoch
        is_over = (
            bool(self._waiting)
            and self._waiting[0] // self._num_rows < self.position // self._num_rows
        )
        is_long = len(self._waiting) >= num_prompts
        self._of_round = {
            "rollout/tail_long_round": float(is_long),
            "rollout/tail_dropped_tokens_frac": 0.0,
        }
        if num_prompts < self._num_launched <= left and not is_long and not is_over:
            return self._fresh.take(self._num_launched)
        slow, self._waiting = self._waiting[:num_prompts], self._waiting[num_prompts:]
        return [self._fresh.at(place) for place in slow] + self._fresh.take(num_prompts - len(slow))

    def leave(self, prompts: Sequence[Prompt], of_round: Mapping[str, float]) -> None:
        """`prompts` of the short round, equal on all ranks, were not done when the step was full. `of_round`: its
        metrics."""
        self._waiting += sorted(prompt.position for prompt in prompts)
        self._of_round |= of_round

    def state(self) -> dict[str, Any]:
        return {"waiting": list(self._waiting)}

    def metrics(self) -> dict[str, float]:
        return {"rollout/waiting_prompts": len(self._waiting), **self._of_round}


def check_enough_to_launch(num_rows: int, rollout: RolloutConfig) -> None:
    """Refuse (ConfigError) a training set of fewer prompts than a short round launches: there would be none."""
    if rollout.num_launched_prompts > num_rows:
        what = f"rollout.tail_batching ({rollout.tail_batching:g}) launches {rollout.num_launched_prompts} prompts"
        raise ConfigError(
            f"{what}, and data.train has {num_rows} usable ones; lower it, or leave it out"
        )
