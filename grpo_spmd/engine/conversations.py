"""Which conversations of a generation run in vLLM, which wait for an answer from outside, and what each has so far."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import torch.distributed as dist

from grpo_spmd.distributed.collectives import find_differing_ranks, on_first_in_group
from grpo_spmd.engine.requests import Answers, EngineStateError, Later, NextRequest, Place, Request
from grpo_spmd.records import Completion

ANSWERS_S = 0.5  # for so long an engine with nothing to run waits for an answer before it asks whether to stop


class Conversations:
    """Of one engine, on each of its ranks, which take the same steps. What comes from outside, and when, only the first
    of them knows: it tells the others, while somebody waits for it."""

    def __init__(
        self,
        next_request: NextRequest,
        answers: Answers | None,
        group: dist.ProcessGroup | None,
        engine_rank: int,
    ) -> None:
        """`group`: the engine's ranks, where there are several."""
        self._next_request, self._answers = next_request, answers
        self._group, self._engine_rank = group, engine_rank
        self._names = map(str, itertools.count())
        self.completions: dict[Place, list[Completion]] = {}  # of each that has begun, one a turn
        self.running: dict[
            str, Place
        ] = {}  # by the name of the request, in the order in which vLLM got them
        self._waiting: set[Place] = set()

    @property
    def num_open(self) -> int:
        """Those that run or wait."""
        return len(self.running) + len(self._waiting)

    def go_on(self, places: Iterable[Place]) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. The requests that follow at once in these conversations, new or with a
        turn more, by name. Raises EngineStateError on all ranks: `next_request` did not say the same on them."""
        asked = [
            (place, self._next_request(*place, self.completions.setdefault(place, [])))
            for place in places
        ]
        said = [request for _, request in asked if request is not None or self._answers is not None]
        unlike = (
            find_differing_ranks(repr(said).encode(), self._group)
            if said and self._group is not None
            else []
        )
        if unlike:  # each rank samples for itself: different requests would give garbage, or hang
            whose = f"ranks {unlike} of engine {self._engine_rank}"
            raise EngineStateError(
                f"generate: {whose} were given other requests than its first rank"
            )
        self._waiting |= {place for place, request in asked if isinstance(request, Later)}
        return self._begun(
            (place, request) for place, request in asked if isinstance(request, Request)
        )

    def answered(self) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. The requests that have come for conversations that wait; where nothing
        runs, waits for the first. Raises EngineStateError on all ranks: one came for a conversation that does not wait.
        What `Answers.ready` raises on the first rank is an error on all."""
        if not self._waiting:
            return []
        assert self._answers is not None, (
            "a conversation is to be answered later, and nobody answers"
        )
        timeout_s, answers = 0.0 if self.running else ANSWERS_S, self._answers
        if self._group is None:
            came = answers.ready(timeout_s)
        else:
            said = on_first_in_group(
                lambda: [_packed(answer) for answer in answers.ready(timeout_s)], self._group
            )
            came = [_unpacked(answer) for answer in said]
        for place, _ in came:
            if place not in self._waiting:
                raise EngineStateError(
                    f"generate: an answer for conversation {place}, which does not wait for one"
                )
            self._waiting.remove(place)
        return self._begun((place, request) for place, request in came if request is not None)

    def end_turn(self, name: str, completion: Completion) -> Place:
        """Note what vLLM made of the request of this name; returns whose it was."""
        place = self.running.pop(name)
        self.completions[place].append(completion)
        return place

    def complete(self) -> dict[Place, list[Completion]]:
        """The completions of those that have ended."""
        unfinished = {*self.running.values(), *self._waiting}
        return {
            place: turns for place, turns in self.completions.items() if place not in unfinished
        }

    def num_tokens(self, num_running: Iterable[int]) -> list[int]:
        """Tokens sampled in each that runs or waits; `num_running`: by the requests that run, in their order."""
        before = {
            place: sum(len(turn.token_ids) for turn in turns)
            for place, turns in self.completions.items()
        }
        running = zip(self.running.values(), num_running, strict=True)
        return [
            *(before[place] + tokens for place, tokens in running),
            *(before[place] for place in self._waiting),
        ]

    def _begun(self, requests: Iterable[tuple[Place, Request]]) -> list[tuple[str, Request]]:
        begun = []
        for place, request in requests:
            name = next(self._names)
            self.running[name] = place
            begun.append((name, request))
        return begun


def _packed(answer: tuple[Place, Request | None]) -> list[Any]:
    place, request = answer
    return [place, astuple(request) if request is not None else None]


def _unpacked(packed: Sequence[Any]) -> tuple[Place, Request | None]:
    (job, number), fields = packed
    return (job, number), Request(*fields) if fields is not None else None
