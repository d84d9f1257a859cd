"""The conversations of one generation: which run in vLLM, which wait, and what each has so far."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import torch.distributed as dist

from grpo_spmd.distributed.collectives import find_differing_ranks, on_first_in_group
from grpo_spmd.engine.requests import (
    ConversationId,
    EngineStateError,
    GenerationHooks,
    Later,
    Request,
)
from grpo_spmd.records import Completion

# An engine with nothing to run waits so long for a late request, then asks whether to stop.
LATE_REQUESTS_WAIT_S = 0.5


class Conversations:
    """The conversations of one engine. Each of its ranks holds a copy and takes the same steps.

    Late requests arrive on the engine's first rank, which sends them to the others."""

    def __init__(
        self, hooks: GenerationHooks, group: dist.ProcessGroup | None, engine_rank: int
    ) -> None:
        """`group` holds the engine's ranks, and is None if the engine has one."""
        self._hooks = hooks
        self._group = group
        self._engine_rank = engine_rank
        self._request_ids = map(str, itertools.count())
        self.completions: dict[ConversationId, list[Completion]] = {}
        """The completions of each conversation that was started, one a turn."""
        self.running: dict[str, ConversationId] = {}
        """Conversations by request id, in the order in which vLLM got the requests."""
        self._waiting: set[ConversationId] = set()

    @property
    def num_open(self) -> int:
        """Number of conversations that run or wait."""
        return len(self.running) + len(self._waiting)

    def advance(self, ids: Iterable[ConversationId]) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. Returns the next requests of these conversations.

        The conversations are new or have a new completion. Raises EngineStateError on all ranks
        if `next_request` returned different requests on them."""
        answers = [
            (id_, self._hooks.next_request(*id_, self.completions.setdefault(id_, [])))
            for id_ in ids
        ]
        late = self._hooks.late_requests
        compared = [answer for _, answer in answers if answer is not None or late is not None]
        # Each rank samples by itself: different requests would give garbage, or hang.
        if compared and self._group is not None:
            ranks = find_differing_ranks(repr(compared).encode(), self._group)
            if ranks:
                raise EngineStateError(
                    f"generate: ranks {ranks} of engine {self._engine_rank} were given other "
                    "requests than its first rank"
                )
        self._waiting |= {id_ for id_, answer in answers if isinstance(answer, Later)}
        return self._start((id_, answer) for id_, answer in answers if isinstance(answer, Request))

    def take_late_requests(self) -> list[tuple[str, Request]]:
        """Collective over the engine's ranks. Returns the requests that arrived for conversations.

        If no request runs, it waits for the first. Raises EngineStateError on all ranks if one came
        for a conversation that does not wait. Errors of `ready` are raised on all ranks too."""
        if not self._waiting:
            return []
        late = self._hooks.late_requests
        assert late is not None, "next_request returned LATER, and there are no late_requests"
        timeout_s = 0.0 if self.running else LATE_REQUESTS_WAIT_S
        if self._group is None:
            arrived = late.ready(timeout_s)
        else:
            # Requests travel as plain lists, since the collective sends JSON.
            packed: list[Any] = on_first_in_group(
                lambda: [
                    (id_, request and astuple(request)) for id_, request in late.ready(timeout_s)
                ],
                self._group,
            )
            arrived = [
                (tuple(id_), None if fields is None else Request(*fields)) for id_, fields in packed
            ]
        for id_, _ in arrived:
            if id_ not in self._waiting:
                raise EngineStateError(
                    f"generate: an answer for conversation {id_}, which does not wait for one"
                )
            self._waiting.remove(id_)
        return self._start((id_, request) for id_, request in arrived if request is not None)

    def end_turn(self, request_id: str, completion: Completion) -> ConversationId:
        """Adds the completion of this request, and returns the conversation that it belongs to."""
        id_ = self.running.pop(request_id)
        self.completions[id_].append(completion)
        return id_

    def finished(self) -> dict[ConversationId, list[Completion]]:
        """Returns the completions of the conversations that are over."""
        unfinished = {*self.running.values(), *self._waiting}
        return {id_: turns for id_, turns in self.completions.items() if id_ not in unfinished}

    def num_tokens(self, num_running: Iterable[int]) -> list[int]:
        """Returns the sampled tokens of each conversation that runs or waits.

        `num_running` has the tokens of the running requests, in their order."""
        totals = {
            id_: sum(len(turn.token_ids) for turn in turns)
            for id_, turns in self.completions.items()
        }
        running = zip(self.running.values(), num_running, strict=True)
        return [
            *(totals[id_] + tokens for id_, tokens in running),
            *(totals[id_] for id_ in self._waiting),
        ]

    def _start(
        self, requests: Iterable[tuple[ConversationId, Request]]
    ) -> list[tuple[str, Request]]:
        started = []
        for id_, request in requests:
            request_id = next(self._request_ids)
            self.running[request_id] = id_
            started.append((request_id, request))
        return started
