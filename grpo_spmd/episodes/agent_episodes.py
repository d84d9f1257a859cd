"""This module runs episodes of agents: the policy answers the requests of the agent's own code."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.engine.requests import ConversationId, Request
from grpo_spmd.episodes.conversation_tree import ConversationTree, TurnRequest
from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.episodes.episodes import Episodes, RunningEpisode
from grpo_spmd.episodes.open_episode import finish_reason
from grpo_spmd.episodes.openai_api import ApiError
from grpo_spmd.episodes.pool import Failure, Reply
from grpo_spmd.records import Completion, Episode


@dataclass
class _Session:
    """One attempt of an episode: the agent's session and its turns."""

    conversations: ConversationTree
    waiting: deque[Call] = field(default_factory=deque)
    sampling: tuple[Call, TurnRequest] | None = None
    """The turn that the engine samples now."""
    outcome: Reply | Failure | None = None
    """The result of the agent's code; None while it runs."""


class AgentEpisodes(Episodes):
    """The agents' episodes of one generation.

    The engine samples one turn of a session at a time; the session's other requests wait.
    """

    def __init__(self, endpoint: Endpoint, **shared: Any) -> None:
        """`shared` are the arguments of Episodes."""
        super().__init__(**shared)
        self._endpoint = endpoint
        self._sessions: dict[ConversationId, _Session] = {}

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        """Returns the requests that are known now; see LateRequests."""
        # Calls that came since the last look may start a turn now.
        self._take_calls()
        requests = super().ready(timeout_s)
        # A readable endpoint ends the wait, so its calls are taken now.
        if not requests:
            self._take_calls()
            requests = self._requests
            self._requests = []
        return requests

    def close(self) -> None:
        for conversation in self._sessions:
            self._endpoint.close(conversation)
        self._sessions.clear()
        super().close()

    def _begin(self, episode: RunningEpisode) -> None:
        self._sessions[episode.conversation] = _Session(ConversationTree(self._chat, self._limits))
        access = self._endpoint.open(episode.conversation)
        self._pool.begin(episode.conversation, episode.row, episode.seed(-1), access)

    def _take_calls(self) -> None:
        for call in self._endpoint.take():
            session = self._sessions.get(call.conversation)
            if session is None or session.outcome is not None:
                error = ApiError(404, "session_not_found", "the session has ended")
                self._endpoint.refuse(call, error)
                continue
            session.waiting.append(call)
            if session.sampling is None:
                self._sample_next(call.conversation, session)

    def _sample_next(self, conversation: ConversationId, session: _Session) -> None:
        """Asks the engine for the next turn that a client waits for."""
        while session.waiting:
            call = session.waiting.popleft()
            # The client has disconnected, so nobody would read the turn.
            if call.is_over:
                continue
            chat_request = call.request
            try:
                turn = session.conversations.begin(
                    chat_request.messages, chat_request.tools, chat_request.max_tokens
                )
            except ApiError as error:
                self._endpoint.refuse(call, error)
                continue
            session.sampling = (call, turn)
            request = Request(
                prompt_ids=turn.context_ids,
                seed=self._running[conversation].seed(turn.key),
                temperature=self._temperature,
                max_tokens=min(turn.max_tokens, self._limits.max_turn_tokens),
            )
            self._requests.append((conversation, request))
            return

    def _end_turn(self, episode: RunningEpisode, completion: Completion) -> None:
        session = self._sessions[episode.conversation]
        assert session.sampling is not None
        call, turn = session.sampling
        session.sampling = None
        # A turn whose client has disconnected was seen by nobody, and is not trained on.
        if not call.is_over:
            answer = session.conversations.finish(turn.number, completion)
            self._endpoint.answer(call, answer.message, answer.finish_reason, answer.usage)
        # The agent had ended before its turn was there.
        if session.outcome is not None:
            self._settle(episode, session, session.outcome)
        else:
            self._sample_next(episode.conversation, session)

    def _take_reply(self, episode: RunningEpisode, reply: Reply | Failure) -> None:
        session = self._sessions[episode.conversation]
        # The agent's code has ended: nobody reads further answers.
        self._endpoint.close(episode.conversation)
        session.waiting.clear()
        session.outcome = reply
        if session.sampling is None:
            self._settle(episode, session, reply)

    def _settle(self, episode: RunningEpisode, session: _Session, outcome: Reply | Failure) -> None:
        """Ends an attempt whose code has ended and which has no turn in the engine."""
        episode.calls_s.append(outcome.seconds)
        if isinstance(outcome, Failure):
            self._fail(episode, outcome)
            return
        self._pool.release(episode.conversation)
        record = session.conversations.record()
        status = session.conversations.status
        rewards = outcome.values["rewards"]
        completion = Completion(
            token_ids=record.token_ids,
            logprobs=record.logprobs,
            finish_reason=finish_reason(status),
            episode=Episode(
                status=status,
                segments=record.segments,
                turns=record.turns,
                messages=record.messages,
                rewards={name: rewards.get(name) for name in self._pool.facts.reward_names},
                calls_s=episode.calls_s,
            ),
        )
        self._finish(episode, completion)
