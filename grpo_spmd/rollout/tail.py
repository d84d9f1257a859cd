"""Tail batching: a step is full with the groups that are complete first, and the prompts of the others wait for a step
of their own. On-policy: what was dropped is sampled anew, by the policy of the step that trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.data.tail import TailStream, check_enough_to_launch
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.store import count_up, forget
from grpo_spmd.records import Prompt


class TailRace:
    """One short round, as this rank's engine sees it. Engines count complete groups in the run's store; the number that
    a group brings the count to is its place, so that all know the order and nobody waits to learn it."""

    def __init__(
        self, counter: str, num_wanted: int, complete: Sequence[int], slots: Sequence[int], sizes: Sequence[int],
        kept: Sequence[tuple[int, int]], is_first: bool,
    ) -> None:  # fmt: skip
        """`complete`: slots with nothing left to sample, which come first; of the jobs in order `slots`, and `sizes`,
        their completions to sample; `kept`: (slot, tokens) of completions that need not be sampled. `is_first`: this
        rank speaks for its engine."""
        self.counter, self.complete, self.kept = counter, complete[:num_wanted], kept
        self._num_to_come, self._is_first = num_wanted - len(self.complete), is_first
        self._slots, self._num_left = slots, list(sizes)
        self._places: list[tuple[int, int]] = []  # of this engine's complete groups, and their slots
        self._tokens: list[tuple[int, int]] = []  # of its completions, with their slots
        self._dropped: list[int] = []  # tokens of what was begun and not finished

    def finish(self, job: int, num_tokens: int) -> bool:
        """A completion of `job` is done. Whether with it the group is complete, and known to be in the step."""
        self._num_left[job] -= 1
        if self._is_first:
            self._tokens.append((self._slots[job], num_tokens))
            if not self._num_left[job]:
                self._places.append((count_up(self.counter), self._slots[job]))
                return self._places[-1][0] <= self._num_to_come
        return False

    def is_over(self) -> bool:
        """Whether enough groups are complete, on all engines together."""
        return self._num_to_come <= 0 or count_up(self.counter, 0) >= self._num_to_come

    def drop(self, num_tokens: Sequence[int]) -> None:
        """Of each request that the engine drops, the tokens that it has."""
        if self._is_first:
            self._dropped += [tokens for tokens in num_tokens if tokens]

    def told(self) -> dict[str, Any]:
        return {"places": self._places, "tokens": self._tokens, "dropped": self._dropped}

    def judge(self, parts: Sequence[dict[str, Any]]) -> tuple[list[int], dict[str, float]]:
        """On rank 0: the slots that the step is made of, and the round's metrics."""
        forget(self.counter)  # all ranks have stopped asking
        places = sorted(tuple(place) for part in parts for place in part["places"])
        taken = {*self.complete, *(slot for _, slot in places[: self._num_to_come])}
        finished = [*self.kept, *(tuple(tokens) for part in parts for tokens in part["tokens"])]
        launched = [tokens for _, tokens in finished] + [tokens for part in parts for tokens in part["dropped"]]
        trained = sum(tokens for slot, tokens in finished if slot in taken)
        launched = launched or [0]  # the run was stopped at once
        return sorted(taken), {
            "rollout/tail_dropped_tokens_frac": 1 - trained / max(sum(launched), 1),
            "rollout/tail_launched_tokens_mean": sum(launched) / len(launched),
            "rollout/tail_launched_tokens_p95": float(np.percentile(launched, 95)),
        }


class TailBatching:
    """Holds the races of a run."""

    def __init__(self, stream: TailStream, num_prompts: int) -> None:
        """`num_prompts`: what a step is made of."""
        self._stream, self._num_prompts, self._num_races = stream, num_prompts, 0

    def begin(self, missing: dict[int, list[int]], kept: Sequence[tuple[int, int]], is_first: bool) -> TailRace | None:
        """The race of a round with the samples `missing` of each slot, equal on all ranks; None where none is left."""
        if len(missing) <= self._num_prompts:
            return None
        self._num_races += 1
        complete = [slot for slot, samples in missing.items() if not samples]
        jobs = {slot: len(samples) for slot, samples in missing.items() if samples}
        counter = f"complete/{self._num_races}"
        return TailRace(counter, self._num_prompts, complete, list(jobs), list(jobs.values()), kept, is_first)

    def settle(self, race: TailRace, prompts: Sequence[Prompt]) -> set[int]:
        """Collective. The slots that the step is made of; the prompts of the others wait."""
        slots, metrics = on_rank0(race.judge, race.told())
        taken = set(slots)
        self._stream.leave([prompt for slot, prompt in enumerate(prompts) if slot not in taken], metrics)
        return taken


def open_tail(
    fresh: PromptStream, num_rows: int, rollout: RolloutConfig, waiting: Sequence[int]
) -> tuple[TailStream, TailBatching]:
    """For a run that goes on with `waiting` prompts. Raises ConfigError."""
    check_enough_to_launch(num_rows, rollout)
    stream = TailStream(fresh, num_rows, rollout.num_launched_prompts, waiting)
    return stream, TailBatching(stream, rollout.num_prompts_per_step)
