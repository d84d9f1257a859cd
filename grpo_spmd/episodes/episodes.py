"""This module runs the episodes of one generation, between the engine and the environments'
processes.

The engine samples turns. A finished turn goes to its environment's process. Meanwhile the engine
continues with other turns, and the next turn enters when the environment has answered. An agent's
own code asks for its turns (AgentEpisodes). On an engine of several ranks the first rank does all
of this and has the records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.engine.requests import (
    LATER,
    ConversationId,
    EpisodeTask,
    Later,
    OnCompletion,
    Request,
    policy_request,
)
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.conversation_tree import ConversationTree, TreeTurn
from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.episodes.open_episode import EpisodeLimits, OpenEpisode, finish_reason
from grpo_spmd.episodes.openai_api import ApiError
from grpo_spmd.episodes.pool import EnvironmentPool, Failure, Reply
from grpo_spmd.records import Completion, Episode, Fields, Message, Prompt

# An episode whose environment fails is run once more, from the start and with the same seeds.
_MAX_ATTEMPTS = 2


@dataclass
class RunningEpisode:
    """The episode of one rollout, in its first or its second attempt."""

    conversation: ConversationId
    prompt: Prompt
    seed: Callable[..., int]
    """A function from a turn's number to its seed; the environment's seed is that of turn -1."""
    attempt: int = 1
    open: OpenEpisode = field(init=False)
    """The state of the episode, after the environment has begun."""
    calls_s: list[float] = field(default_factory=list)

    @property
    def row(self) -> Fields:
        """Returns the data set's row for the environment."""
        return {**self.prompt.columns, "prompt": self.prompt.text}


# Requests of conversations; None for one that is over.
Requests = list[tuple[ConversationId, Request | None]]


@dataclass(kw_only=True)
class Episodes:
    """The episodes of one generation, with environments that answer turns (tools, gym).

    The engine calls `next_request` and `ready`. `completions` has each finished episode.
    """

    pool: EnvironmentPool
    chat: ChatFormat
    limits: EpisodeLimits
    task: Callable[[ConversationId], EpisodeTask]
    """It returns a conversation's prompt and seeds."""
    evaluation: EvalConfig | None
    """The settings of an evaluation; None for rollouts."""
    discount: float | None
    finished: OnCompletion | None = None
    """It is called with each completion."""
    completions: dict[ConversationId, Completion] = field(default_factory=dict)
    running: dict[ConversationId, RunningEpisode] = field(default_factory=dict)
    requests: Requests = field(default_factory=list)
    """The requests that the engine has not received yet."""

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Later:
        """Takes a finished turn. Returns LATER, as all ranks of an engine must agree on the next
        request."""
        conversation = (job, number)
        if turns:
            self._end_turn(self.running[conversation], turns[-1])
        else:
            episode = RunningEpisode(conversation, *self.task(conversation))
            self.running[conversation] = episode
            self._begin(episode)
        return LATER

    def ready(self, timeout_s: float, /) -> Requests:
        """Returns the requests that are known now. If there are none, it waits at most `timeout_s`
        for the first."""
        # The pool does not wait where the engine has work already.
        for conversation, reply in self.pool.poll(0.0 if self.requests else timeout_s):
            # A reply may belong to a generation that was stopped.
            episode = self.running.get(conversation)
            if episode is not None:
                self._take_reply(episode, reply)
        requests = self.requests
        self.requests = []
        return requests

    def close(self) -> None:
        """Ends the episodes that still run, because the generation was stopped."""
        for conversation in self.running:
            self.pool.drop(conversation)
        self.running.clear()

    def _begin(self, episode: RunningEpisode) -> None:
        """Starts the environment of an episode, with the seed of turn -1."""
        self.pool.begin(episode.conversation, episode.row, episode.seed(-1))

    def _take_reply(self, episode: RunningEpisode, reply: Reply | Failure) -> None:
        """Handles the environment's answer or failure.

        A failed episode is run once more with the same seeds before its failure is recorded.
        """
        episode.calls_s.append(reply.seconds)
        if isinstance(reply, Failure):
            self._fail(episode, reply)
        elif reply.method == "end":
            self.pool.release(episode.conversation)
            self._end(episode, reply.values["rewards"])
        else:
            values = reply.values
            try:
                if reply.method == "begin":
                    messages = opening(episode.prompt.text, values["messages"])
                    prompt_ids = self.chat.prompt_ids(messages, values["tools"])
                    episode.open = OpenEpisode(self.limits, messages, values["tools"], prompt_ids)
                else:
                    episode.open.add_answer(values, self.chat)
            except ValueError as error:
                # The template refuses messages that the environment made.
                self.pool.drop(episode.conversation)
                self._fail(
                    episode,
                    Failure("env_error", f"gave what cannot be told to the policy: {error}", 0.0),
                )
            else:
                self._continue(episode)

    def _continue(self, episode: RunningEpisode) -> None:
        """Asks the engine for the next turn, or the environment for the rewards of all turns."""
        state = episode.open
        # A status means that the episode is over: it needs rewards, and no further turn.
        if state.status is None:
            seed = episode.seed(len(state.turns))
            request = policy_request(
                [*state.context_ids], seed, self.evaluation, max_tokens=state.max_turn_tokens()
            )
            self.requests.append((episode.conversation, request))
        elif state.turns:
            arguments = {
                **episode.prompt.columns,
                "prompts": episode.prompt.with_opening(state.opening),
                "completions": state.messages,
                "completion_ids": state.token_ids,
            }
            self.pool.end(episode.conversation, arguments)
        else:
            # There was no room for a single turn, so there is nothing to reward.
            self.pool.release(episode.conversation)
            self._end(episode, {})

    def _end_turn(self, episode: RunningEpisode, completion: Completion) -> None:
        """Adds a sampled turn and sends it to the environment, or ends the episode."""
        state = episode.open
        parsed = self.chat.parse(completion.token_ids, state.context_ids, state.tools)
        # Only tools answer calls; a gym environment answers any text.
        ends_without_call = self.pool.facts.kind == "tools"
        state.add_turn(completion, parsed.message, parsed.num_invalid, ends_without_call)
        # add_turn sets a status where this turn was the last one.
        if state.status is None:
            self.pool.act(episode.conversation, parsed.message)
        else:
            self._continue(episode)

    def _end(self, episode: RunningEpisode, rewards: Mapping[str, float | str | None]) -> None:
        """Builds the completion of an episode that has its rewards."""
        state = episode.open
        facts = self.pool.facts
        values = {name: rewards.get(name) for name in facts.weights}
        # A gym environment has one reward of its own, which is the first: the sum of its steps.
        if facts.kind == "gym" and state.turns:
            factor = 1.0 if self.discount is None else self.discount
            # Discounted from the first turn on. A turn without a reward counts 0: an episode that
            # was cut off would otherwise leave its group, and only the survivors would be learned
            # from.
            values[next(iter(values))] = sum(
                (turn.reward or 0.0) * factor**i for i, turn in enumerate(state.turns)
            )
        record = state.episode(values, episode.calls_s)
        if facts.kind == "tools":
            record = replace(
                record,
                num_tool_calls=state.num_tool_calls,
                num_tool_errors=state.num_tool_errors,
            )
        completion = Completion(
            token_ids=state.token_ids,
            logprobs=state.logprobs,
            finish_reason=finish_reason(state.status),
            episode=record,
        )
        self._finish(episode, completion)

    def _fail(self, episode: RunningEpisode, failure: Failure) -> None:
        """Runs a failed episode again, or records the failure. The episode's process is gone."""
        # The second attempt has the same seeds, so a failure by chance does not change the samples.
        if episode.attempt < _MAX_ATTEMPTS:
            episode.attempt += 1
            self._begin(episode)
            return
        sample = episode.conversation[1]
        record = Episode(
            failure.status,
            calls_s=episode.calls_s,
            error=f"environment (row {episode.prompt.row}, sample {sample}): {failure.error}",
        )
        self._finish(episode, Completion([], [], "stop", record))

    def _finish(self, episode: RunningEpisode, completion: Completion) -> None:
        """Stores the completion of an episode and tells the engine that the conversation is
        over."""
        del self.running[episode.conversation]
        self.completions[episode.conversation] = completion
        # None tells the engine that the conversation has no further request.
        self.requests.append((episode.conversation, None))
        if self.finished is not None:
            self.finished(*episode.conversation, completion)


@dataclass
class _Session:
    """One attempt of an episode: the agent's session and its turns."""

    conversations: ConversationTree
    waiting: deque[Call] = field(default_factory=deque)
    sampling: tuple[Call, TreeTurn] | None = None
    """The turn that the engine samples now."""
    outcome: Reply | Failure | None = None
    """The result of the agent's code; None while it runs."""


@dataclass(kw_only=True)
class AgentEpisodes(Episodes):
    """The agents' episodes of one generation.

    The engine samples one turn of a session at a time; the session's other requests wait.
    """

    endpoint: Endpoint
    sessions: dict[ConversationId, _Session] = field(default_factory=dict)

    def ready(self, timeout_s: float, /) -> Requests:
        """Returns the requests that are known now. If there are none, it waits at most `timeout_s`
        for the first."""
        # Calls that came since the last look may start a turn now.
        self._take_calls()
        requests = super().ready(timeout_s)
        # The wait also ends, with nothing, when an agent's call arrives at the endpoint.
        if not requests:
            self._take_calls()
            requests = self.requests
            self.requests = []
        return requests

    def close(self) -> None:
        for conversation in self.sessions:
            self.endpoint.close(conversation)
        self.sessions.clear()
        super().close()

    def _begin(self, episode: RunningEpisode) -> None:
        self.sessions[episode.conversation] = _Session(ConversationTree(self.chat, self.limits))
        access = self.endpoint.open(episode.conversation)
        self.pool.begin(episode.conversation, episode.row, episode.seed(-1), access)

    def _take_calls(self) -> None:
        for call in self.endpoint.take():
            session = self.sessions.get(call.conversation)
            if session is None or session.outcome is not None:
                error = ApiError(404, "session_not_found", "the session has ended")
                self.endpoint.refuse(call, error)
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
                self.endpoint.refuse(call, error)
                continue
            session.sampling = (call, turn)
            seed = self.running[conversation].seed(turn.key)
            max_tokens = min(turn.max_tokens, self.limits.max_turn_tokens)
            request = policy_request(turn.context_ids, seed, self.evaluation, max_tokens=max_tokens)
            self.requests.append((conversation, request))
            return

    def _end_turn(self, episode: RunningEpisode, completion: Completion) -> None:
        session = self.sessions[episode.conversation]
        assert session.sampling is not None
        call, turn = session.sampling
        session.sampling = None
        # A turn whose client has disconnected was seen by nobody, and is not trained on.
        if not call.is_over:
            answer = session.conversations.finish(turn, completion)
            self.endpoint.answer(call, answer.message, answer.finish_reason, answer.usage)
        # The agent had ended before its turn was there.
        if session.outcome is not None:
            self._settle(episode, session, session.outcome)
        else:
            self._sample_next(episode.conversation, session)

    def _take_reply(self, episode: RunningEpisode, reply: Reply | Failure) -> None:
        session = self.sessions[episode.conversation]
        # The agent's code has ended: nobody reads further answers.
        self.endpoint.close(episode.conversation)
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
        self.pool.release(episode.conversation)
        rewards = outcome.values["rewards"]
        values = {name: rewards.get(name) for name in self.pool.facts.weights}
        self._finish(episode, session.conversations.completion(values, episode.calls_s))


def opening(prompt: str | list[Message], addition: Any) -> list[Message]:
    """Returns an episode's first messages: those of the prompt, and those that the environment
    adds.

    Text or blocks of text are appended to the last user message, as in TRL; messages follow the
    prompt's. Raises ValueError.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if not addition:
        return messages
    if isinstance(addition, list) and all(
        isinstance(item, dict) and "role" in item for item in addition
    ):
        return [*messages, *addition]
    user_indices = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if not user_indices:
        raise ValueError(
            "reset() gave text, and the prompt has no user message that it could go to"
        )
    message = messages[user_indices[-1]]
    content: Any = message.get("content") or ""
    if isinstance(content, str) and isinstance(addition, str):
        content += addition
    else:
        content = [*_blocks(content), *_blocks(addition)]
    messages[user_indices[-1]] = {**message, "content": content}
    return messages


def _blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
