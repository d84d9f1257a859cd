"""The episodes of agents: whoever is asked for a turn here is the policy, and the agent's own code does the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.engine.requests import ConversationId, EpisodeTask, OnCompletion, Request
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.conversation_tree import ConversationTree, TurnRequest
from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.episodes.episodes import Episodes, RunningEpisode
from grpo_spmd.episodes.open_episode import EpisodeLimits
from grpo_spmd.episodes.openai_api import ApiError
from grpo_spmd.episodes.pool import EnvironmentPool, Failure, Reply
from grpo_spmd.records import Completion, Episode


@dataclass
class _Session:
    """An agent's, in one try."""

    contexts: ConversationTree
    waiting: deque[Call] = field(default_factory=deque)
    asked: tuple[Call, TurnRequest] | None = None  # what the engine is at
    outcome: Reply | Failure | None = None  # how the agent's code ended


class AgentEpisodes(Episodes):
    """Of one generation. An engine samples one turn of a session at a time; what else it asks for meanwhile waits."""

    def __init__(
        self,
        endpoint: Endpoint,
        pool: EnvironmentPool,
        chat: ChatFormat,
        limits: EpisodeLimits,
        task: Callable[[ConversationId], EpisodeTask],
        *,
        temperature: float | None,
        finished: OnCompletion | None,
    ) -> None:
        super().__init__(
            pool, chat, limits, task, temperature=temperature, discount=None, finished=finished
        )
        self._endpoint = endpoint
        self._sessions: dict[ConversationId, _Session] = {}

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        """As LateRequests has it."""
        self._take()  # what came while nobody looked
        said = super().ready(0.0 if self._said else timeout_s)
        if not said:
            self._take()
            said, self._said = self._said, []
        return said

    def close(self) -> None:
        for place in self._sessions:
            self._endpoint.close(place)
        self._sessions.clear()
        super().close()

    def _begin(self, talk: RunningEpisode) -> None:
        limits = self._limits
        self._sessions[talk.place] = _Session(
            ConversationTree(
                self._chat,
                max_turns=limits.max_turns,
                max_tokens=limits.max_tokens,
                max_model_len=limits.max_model_len,
                max_all_tokens=limits.max_all_tokens,
            )
        )
        prompt = talk.prompt
        row: dict[str, Any] = prompt.columns | {"prompt": prompt.text}
        self._pool.begin(talk.place, row, talk.seed(-1), self._endpoint.open(talk.place))

    def _take(self) -> None:
        for call in self._endpoint.take():
            session = self._sessions.get(call.place)
            if session is None or session.outcome is not None:
                self._endpoint.refuse(call, 404, "the session has ended", "session_not_found")
                continue
            session.waiting.append(call)
            if session.asked is None:
                self._ask_next(call.place, session)

    def _ask_next(self, place: ConversationId, session: _Session) -> None:
        """Have the engine sample the next turn that is waited for."""
        while session.waiting:
            call = session.waiting.popleft()
            if call.is_over:  # its client has given it up
                continue
            try:
                wanted = session.contexts.begin(call.messages, call.tools, call.options.max_tokens)
            except ApiError as error:
                self._endpoint.refuse(call, error.status, str(error), error.code)
                continue
            session.asked = call, wanted
            most, seed = (
                min(wanted.max_tokens, self._limits.max_turn_tokens),
                self._talks[place].seed(wanted.key),
            )
            self._said.append((place, Request(wanted.context_ids, seed, self._temperature, most)))
            return

    def _end_turn(self, talk: RunningEpisode, completion: Completion) -> None:
        session = self._sessions[talk.place]
        assert session.asked is not None
        (call, wanted), session.asked = session.asked, None
        if (
            not call.is_over
        ):  # else nobody sees the turn: it is no part of what was said, and is not trained on
            answered = session.contexts.finish(wanted.number, completion)
            self._endpoint.answer(call, answered.message, answered.finish_reason, answered.usage)
        if session.outcome is not None:  # it had gone before its turn was there
            self._settle(talk, session, session.outcome)
        else:
            self._ask_next(talk.place, session)

    def _hear(self, talk: RunningEpisode, reply: Reply | Failure) -> None:
        session = self._sessions[talk.place]
        self._endpoint.close(talk.place)
        session.waiting.clear()
        session.outcome = reply
        if session.asked is None:
            self._settle(talk, session, reply)

    def _settle(self, talk: RunningEpisode, session: _Session, outcome: Reply | Failure) -> None:
        """The agent's code has ended, and nothing of it is in the engine."""
        talk.calls_s.append(outcome.seconds)
        if isinstance(outcome, Failure):
            self._fail(talk, outcome)
            return
        self._pool.release(talk.place)
        found, status = session.contexts.record(), session.contexts.status
        rewards = {
            name: outcome.values["rewards"].get(name) for name in self._pool.facts.reward_names
        }
        episode = Episode(
            status, found.segments, found.turns, found.messages, rewards, talk.calls_s
        )
        reason = "length" if status in ("truncated", "max_tokens", "context_overflow") else "stop"
        self._finish(talk, Completion(found.token_ids, found.logprobs, reason, episode))
