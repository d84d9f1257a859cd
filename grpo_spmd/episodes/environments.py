"""This module runs the episodes of a run, and reads the rewards of environments.

An episode is one conversation of the policy with an environment. `Environments` owns the processes
in which environments run, the chat format and the limits of episodes. `EnvironmentScorer` is one of
the run's scorers (rewards/scorers.py): it reads the rewards that environments have given to
finished episodes.

`Episodes` runs the episodes of one generation, between the engine and the environments' processes.
The engine samples turns. A finished turn goes to its environment's process. Meanwhile the engine
goes on with other conversations, and the next turn is requested when the environment has answered.
An agent's own code requests its turns (AgentEpisodes). If an engine has several ranks, all of this
runs on its first rank, which alone gets the finished episodes.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, EvalConfig, RewardConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import (
    LATER,
    ConversationId,
    EpisodeTask,
    GenerationHooks,
    Later,
    OnCompletion,
    Request,
    policy_request,
)
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.conversations import (
    ConversationTree,
    EpisodeLimits,
    OpenEpisode,
    TreeTurn,
)
from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.episodes.openai_api import ApiError
from grpo_spmd.episodes.pool import EnvironmentPool, Failure, Reply
from grpo_spmd.records import (
    Completion,
    Episode,
    Fields,
    Message,
    Prompt,
    RolloutGroup,
    ScoredRollouts,
)
from grpo_spmd.rewards.protocol import Reward
from grpo_spmd.rewards.scorers import RewardColumn, merge_results

_log = logging.getLogger("grpo_spmd")
# An episode whose environment fails is run a second time, from the start and with the same seeds.
_MAX_ATTEMPTS = 2


@dataclass
class RunningEpisode:
    """The episode of one rollout, in its first or its second attempt."""

    conversation: ConversationId
    prompt: Prompt
    seed: Callable[..., int]
    """A function that returns the seed of a turn, given the turn's number or, for an agent, its
    key. Turn -1 gives the environment's seed."""
    attempt: int = 1
    open: OpenEpisode = field(init=False)
    """The state of the episode, set when the environment has begun. Agents have a ConversationTree
    instead."""
    calls_s: list[float] = field(default_factory=list)
    """The seconds of each call to the environment, in all attempts."""

    @property
    def row(self) -> Fields:
        """Returns the row of the data set as environments get it: its columns and the prompt."""
        return {**self.prompt.columns, "prompt": self.prompt.text}


# The next request of each conversation; None if the conversation is over.
Requests = list[tuple[ConversationId, Request | None]]


@dataclass(kw_only=True)
class Episodes:
    """The episodes of one generation, with environments that answer turns (tools, gym).

    The engine calls `next_request` and `ready`. `completions` collects the finished episodes.
    """

    pool: EnvironmentPool
    chat: ChatFormat
    limits: EpisodeLimits
    task: Callable[[ConversationId], EpisodeTask]
    """Returns the prompt of a conversation, and the function for the seeds of its turns."""
    evaluation: EvalConfig | None
    """The settings of an evaluation; None for rollouts."""
    discount: float | None
    """The discount per turn in the reward of a gym episode; None means a plain sum."""
    finished: OnCompletion | None = None
    """Called as finished(job, number, completion) as soon as an episode is finished."""
    completions: dict[ConversationId, Completion] = field(default_factory=dict)
    running: dict[ConversationId, RunningEpisode] = field(default_factory=dict)
    requests: Requests = field(default_factory=list)
    """The requests that `ready` has not returned yet."""

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Later:
        """Begins an episode, or gives the turn that was just sampled to its running episode.

        The engine calls it. `turns` are the conversation's completions so far; the last is new.
        Always returns LATER, as all ranks of an engine must return the same: only the first rank
        will know the next request, and gives it to the engine in `ready`.
        """
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
        # There is nothing to wait for if requests are there already.
        for conversation, reply in self.pool.poll(0.0 if self.requests else timeout_s):
            # A reply may belong to a generation that was stopped.
            episode = self.running.get(conversation)
            if episode is not None:
                self._take_reply(episode, reply)
        requests = self.requests
        self.requests = []
        return requests

    def close(self) -> None:
        """Ends the episodes that still run because the generation was stopped."""
        for conversation in self.running:
            self.pool.drop(conversation)
        self.running.clear()

    def _begin(self, episode: RunningEpisode) -> None:
        """Starts the environment of an episode, with the seed of turn -1."""
        self.pool.begin(episode.conversation, episode.row, episode.seed(-1))

    def _take_reply(self, episode: RunningEpisode, reply: Reply | Failure) -> None:
        """Goes on with an episode after the answer or the failure of its environment.

        If an episode fails for the first time, it is run again with the same seeds.
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
                # The template refuses the environment's messages, or they cannot be encoded.
                self.pool.drop(episode.conversation)
                self._fail(
                    episode,
                    Failure("env_error", f"gave messages that cannot be used: {error}", 0.0),
                )
            else:
                self._continue(episode)

    def _continue(self, episode: RunningEpisode) -> None:
        """Requests the next turn from the engine or, if the episode is over, its rewards from the
        environment."""
        state = episode.open
        # An episode with a status is over.
        if state.status is None:
            seed = episode.seed(len(state.turns))
            request = policy_request(
                state.context_ids, seed, self.evaluation, max_tokens=state.max_turn_tokens()
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
            # The prompt left no room for a turn, so there is nothing to reward.
            self.pool.release(episode.conversation)
            self._end(episode, {})

    def _end_turn(self, episode: RunningEpisode, completion: Completion) -> None:
        """Adds a sampled turn to the episode, and sends it to the environment unless it was the
        last turn."""
        state = episode.open
        parsed = self.chat.parse(completion.token_ids, state.context_ids, state.tools)
        # Tools answer calls only, so a turn without a call ends the episode. A gym environment
        # answers any text.
        ends_without_call = self.pool.facts.kind == "tools"
        state.add_turn(completion, parsed.message, parsed.num_invalid, ends_without_call)
        # add_turn sets the status if this turn was the last one.
        if state.status is None:
            self.pool.act(episode.conversation, parsed.message)
        else:
            self._continue(episode)

    def _end(self, episode: RunningEpisode, rewards: Mapping[str, float | str | None]) -> None:
        """Ends an episode whose rewards are known: makes its completion and stores it.

        `rewards` has the environment's rewards by name; a string says why one is unusable.
        """
        state = episode.open
        facts = self.pool.facts
        values = {name: rewards.get(name) for name in facts.weights}
        # The first reward of a gym environment is its own: the sum of its steps' rewards.
        if facts.kind == "gym" and state.turns:
            factor = 1.0 if self.discount is None else self.discount
            # Discounted from the first turn on. A turn without a reward counts as 0. Without this,
            # an episode that was cut off would have no reward and be left out of its group, so the
            # policy would learn from the other episodes alone.
            values[next(iter(values))] = sum(
                (turn.reward or 0.0) * factor**i for i, turn in enumerate(state.turns)
            )
        completion = state.completion(values, episode.calls_s, has_tools=facts.kind == "tools")
        self._finish(episode, completion)

    def _fail(self, episode: RunningEpisode, failure: Failure) -> None:
        """Runs an episode again after its first failure, or records its second failure.

        The process of its environment has ended.
        """
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
    """One attempt of an agent's episode: its requests and its turns."""

    conversations: ConversationTree
    waiting: deque[Call] = field(default_factory=deque)
    """The requests whose turns are not in the engine yet."""
    sampling: tuple[Call, TreeTurn] | None = None
    """The turn that the engine samples now, and the request for it."""
    outcome: Reply | Failure | None = None
    """The result of the agent's code; None while the code runs."""


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
        # Calls that have arrived at the endpoint may start a turn now.
        self._take_calls()
        requests = super().ready(timeout_s)
        # The wait also ends when a call arrives at the endpoint. Then there are no requests yet.
        if not requests:
            self._take_calls()
            requests = self.requests
            self.requests = []
        return requests

    def close(self) -> None:
        """Closes the sessions at the endpoint and ends the episodes that still run."""
        for conversation in self.sessions:
            self.endpoint.close(conversation)
        self.sessions.clear()
        super().close()

    def _begin(self, episode: RunningEpisode) -> None:
        """Opens a session at the endpoint, and starts the agent's code with access to it."""
        self.sessions[episode.conversation] = _Session(ConversationTree(self.chat, self.limits))
        access = self.endpoint.open(episode.conversation)
        self.pool.begin(episode.conversation, episode.row, episode.seed(-1), access)

    def _take_calls(self) -> None:
        """Moves requests from the endpoint to their sessions, and starts turns for idle sessions.

        A request of a session that has ended is refused.
        """
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
        """Requests from the engine the session's next turn that a client still waits for."""
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
        """Answers the agent with a sampled turn, and starts the next turn of its session."""
        session = self.sessions[episode.conversation]
        assert session.sampling is not None
        call, turn = session.sampling
        session.sampling = None
        # If the client has disconnected, nobody sees the turn, and it is not trained on.
        if not call.is_over:
            answer = session.conversations.finish(turn, completion)
            self.endpoint.answer(call, answer.message, answer.finish_reason, answer.usage)
        # The agent's code ended before this turn was finished.
        if session.outcome is not None:
            self._settle(episode, session, session.outcome)
        else:
            self._sample_next(episode.conversation, session)

    def _take_reply(self, episode: RunningEpisode, reply: Reply | Failure) -> None:
        """Ends the attempt after the agent's code has ended; a turn that is being sampled is
        finished first."""
        session = self.sessions[episode.conversation]
        # Nobody reads further answers.
        self.endpoint.close(episode.conversation)
        session.waiting.clear()
        session.outcome = reply
        if session.sampling is None:
            self._settle(episode, session, reply)

    def _settle(self, episode: RunningEpisode, session: _Session, outcome: Reply | Failure) -> None:
        """Ends an attempt at an episode, as the agent's code has ended with `outcome`, and no turn
        of its session is being sampled."""
        episode.calls_s.append(outcome.seconds)
        if isinstance(outcome, Failure):
            self._fail(episode, outcome)
            return
        self.pool.release(episode.conversation)
        rewards = outcome.values["rewards"]
        values = {name: rewards.get(name) for name in self.pool.facts.weights}
        self._finish(episode, session.conversations.completion(values, episode.calls_s))


def opening(prompt: str | list[Message], addition: Any) -> list[Message]:
    """Returns an episode's first messages: the prompt's, and what the environment's reset() adds.

    If `addition` is text or a list of text blocks, it is appended to the last user message, as in
    TRL. Messages are appended to the prompt's messages. Raises ValueError if there is no user
    message for the text.
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
            "reset() returned text, and the prompt has no user message to append it to"
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
    """Returns a message's content as a list of blocks; text becomes a single block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


@dataclass(frozen=True)
class EnvironmentScorer:
    """Reads the rewards of environments from finished episodes, without any communication."""

    names: Collection[str]
    """The names of the rewards that the environments give."""

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Returns the environments' rewards by name; the texts and sums of the result are empty.

        Not collective. `scored` is not used; other scorers need it.
        """
        episodes = [completion.episode for group in groups for completion in group.completions]
        columns = [RewardColumn(name, len(episodes)) for name in self.names]
        for column in columns:
            for number, episode in enumerate(episodes):
                value = None if episode is None else episode.rewards.get(column.name)
                if isinstance(value, str):
                    # A string says why the environment's reward is unusable.
                    column.fail(number, value)
                elif value is not None:
                    column.give(number, value)
        return merge_results([column.scores for column in columns])


class Environments:
    """Holds the environments of one rank, with their processes and the chat format.

    Only the first rank of an engine starts processes. The other ranks of the engine sample the
    turns that the first rank requests.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        rewards: Sequence[RewardConfig],
        loaded: Sequence[Reward],
        tokenizer: Any,
        limits: EpisodeLimits,
        log_file: Path | None,
        check: Callable[[], None],
        secrets: Collection[str] = (),
    ) -> None:
        """`loaded` are the reward functions of `rewards`. What environments print goes to
        `log_file`; a rank that shall start no processes has None there. `check` and `secrets` are
        as in ProcessPool.

        Raises ConfigError for a file that cannot be imported, and for an unsuitable chat template.
        """
        self._config = config
        self._limits = limits
        self.other_rewards: list[RewardConfig] = []
        """The rewards that a reward pool computes."""
        self.looking_rewards: list[RewardConfig] = []
        """The rewards whose functions take `environments`; they run in the environments'
        processes."""
        self.weights: dict[str, float] = {}
        """The weights of all rewards by name, in the order in which they are summed."""
        # Only an environment's own process can pass the environment to a reward function.
        for reward, function in zip(rewards, loaded, strict=True):
            self.weights[function.name] = function.weight
            if function.looks_at_environments:
                self.looking_rewards.append(reward)
            else:
                self.other_rewards.append(reward)
        self._pool: EnvironmentPool | None = None
        self._endpoint: Endpoint | None = None
        self._opened = ExitStack()
        self.scorer = EnvironmentScorer([])
        """The scorer of the rewards that environments give."""
        if log_file is None:
            return
        # The pool starts processes, so a failure below must end them.
        pool = EnvironmentPool(config, self.looking_rewards, log_file, check=check, secrets=secrets)
        with ExitStack() as stack:
            stack.callback(pool.close)
            facts = pool.facts
            for reward in self.other_rewards:
                if reward.metric_name in facts.weights:
                    raise ConfigError(
                        f"environment: its reward is called {reward.metric_name!r}, as one of "
                        "`rewards` is; give that one another name"
                    )
            self._chat = ChatFormat(
                tokenizer,
                config.history,
                facts.tools,
                environment=facts.kind,
                max_turns=config.max_turns,
            )
            _log.info("chat template: %s", self._chat.note)
            if facts.kind == "agent":
                self._endpoint = stack.enter_context(Endpoint())
                pool.connect(self._endpoint)
            self._opened = stack.pop_all()
        self._pool = pool
        self.scorer = EnvironmentScorer(list(facts.weights))
        # Rewards are summed in this order: first those of the config, then the environments' own.
        self.weights |= facts.weights
        doctor.describe_waiting_with(pool.where)

    def close(self) -> None:
        """Ends the environments' processes and the endpoint."""
        self._opened.close()

    def statuses(self, groups: Sequence[RolloutGroup]) -> dict[str, Counter[str]]:
        """Returns {"(environment)": number of episodes by status}.

        The statuses are those of rewards: "ok", "error" and "timeout". With them the caller stops
        an evaluation in which too many environments failed (check_error_rate).
        """
        words = {"env_error": "error", "env_timeout": "timeout"}
        statuses = Counter(
            words.get(completion.episode.status, "ok")
            for group in groups
            for completion in group.completions
            if completion.episode is not None
        )
        return {"(environment)": statuses}

    def generate(
        self,
        engine: RolloutEngine,
        job_sizes: Sequence[int],
        task: Callable[[ConversationId], EpisodeTask],
        policy_version: int,
        *,
        evaluation: EvalConfig | None = None,
        finished: OnCompletion | None = None,
        expected: Sequence[float] | None = None,
    ) -> dict[int, list[list[Completion]]]:
        """Collective. Samples an episode for each conversation.

        Returns a dict from job to a list that holds one list with one completion for each
        conversation, as RolloutEngine.generate_shared does. The first rank of an engine gets all
        jobs of the engine, the other ranks get none. `task` returns the prompt and the seeds of a
        conversation. `evaluation` has the settings of an evaluation; None for rollouts. `finished`
        is called with each completion. `expected` is as in `rollout.sample.generate`.
        """
        if self._pool is None:
            # Only the first rank of an engine runs episodes. The engine asks that rank alone for
            # late requests, so here any object will do.
            nobody: Any = object()
            hooks = GenerationHooks(lambda *_: LATER, late_requests=nobody)
            engine.generate_shared(job_sizes, hooks, policy_version, expected)
            return {}
        shared: dict[str, Any] = {
            "pool": self._pool,
            "chat": self._chat,
            "limits": self._limits,
            "task": task,
            "evaluation": evaluation,
            "discount": self._config.discount,
            "finished": finished,
        }
        # Agents request turns themselves; tools and gym environments answer the policy's turns.
        episodes = (
            AgentEpisodes(endpoint=self._endpoint, **shared)
            if self._endpoint is not None
            else Episodes(**shared)
        )
        try:
            hooks = GenerationHooks(episodes.next_request, late_requests=episodes)
            jobs = engine.generate_shared(job_sizes, hooks, policy_version, expected)
        finally:
            episodes.close()
        return {
            job: [[episodes.completions[job, number]] for number in range(len(completions))]
            for job, completions in jobs.items()
        }
