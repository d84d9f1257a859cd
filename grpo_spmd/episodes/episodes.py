"""The episodes of one generation: between the engine, which samples turns, and the processes of the environments.

A turn that ends goes to its environment's process; the engine goes on with the others, and the answer re-enters when it
is there. On an engine of several ranks its first one does all of this, and the records are its.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.engine.requests import (
    LATER,
    ConversationId,
    EpisodeTask,
    Later,
    OnCompletion,
    Request,
)
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.open_episode import EpisodeLimits, Message, OpenEpisode
from grpo_spmd.episodes.pool import EnvironmentPool, Failure, Reply
from grpo_spmd.records import Completion, Episode, Prompt

_MOST_ATTEMPTS = (
    2  # an environment that fails has one more try, from the start and with the same seeds
)


@dataclass
class RunningEpisode:
    """One rollout's episode, in its first or its second try."""

    place: ConversationId
    prompt: Prompt
    seed: Callable[..., int]
    """Of a turn, by its number; of the environment, as turn -1."""
    attempt: int = 1
    open: OpenEpisode | None = None  # once the environment has begun
    calls_s: list[float] = field(default_factory=list)


class FollowerEpisodes:
    """On the ranks of an engine that are not its first: they sample what it tells them."""

    def __init__(self) -> None:
        self.completions: dict[ConversationId, Completion] = {}

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Later:
        return LATER

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        raise AssertionError("asked on the first rank of an engine alone")

    def close(self) -> None:
        pass


class Episodes(FollowerEpisodes):
    """Those of one generation, of environments that answer turns (tools, gym). For the engine: `next_request` and
    `ready`. `completions` has each that has ended."""

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: ChatFormat,
        limits: EpisodeLimits,
        task: Callable[[ConversationId], EpisodeTask],
        *,
        temperature: float | None,
        discount: float | None,
        finished: OnCompletion | None = None,
    ) -> None:
        """`task` tells what each place is; `finished` is called with each completion at once."""
        self._pool, self._chat, self._limits, self._task = pool, chat, limits, task
        self._temperature, self._discount, self._finished = temperature, discount, finished
        super().__init__()
        self._talks: dict[ConversationId, RunningEpisode] = {}
        self._said: list[
            tuple[ConversationId, Request | None]
        ] = []  # that the engine has not been told

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Later:
        """Always later: on all ranks of an engine alike (FollowerEpisodes)."""
        place = job, number
        if not turns:
            self._talks[place] = RunningEpisode(place, *self._task(place))
            self._begin(self._talks[place])
        else:
            self._end_turn(self._talks[place], turns[-1])
        return LATER

    def ready(self, timeout_s: float, /) -> list[tuple[ConversationId, Request | None]]:
        """As LateRequests has it."""
        for place, reply in self._pool.poll(0.0 if self._said else timeout_s):
            if (talk := self._talks.get(place)) is not None:
                self._hear(talk, reply)
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        """End what is under way: the generation was stopped."""
        for place in self._talks:
            self._pool.drop(place)
        self._talks.clear()

    def _begin(self, talk: RunningEpisode) -> None:
        prompt = talk.prompt
        row = prompt.columns | {"prompt": prompt.text}
        self._pool.begin(talk.place, row, talk.seed(-1))

    def _hear(self, talk: RunningEpisode, reply: Reply | Failure) -> None:
        talk.calls_s.append(reply.seconds)
        if isinstance(reply, Failure):
            self._fail(talk, reply)
            return
        try:
            if reply.what == "begin":
                messages = opening(talk.prompt.text, reply.values["messages"])
                tools = reply.values["tools"]
                ids = self._chat.prompt_ids(messages, tools)
                talk.open = OpenEpisode(self._limits, messages, tools, ids)
            elif reply.what == "act":
                assert talk.open is not None
                talk.open.add_answer(reply.values, self._chat)
        except ValueError as error:  # the template's, about messages that the environment made
            self._pool.drop(talk.place)
            self._fail(
                talk, Failure("env_error", f"gave what cannot be told to the policy: {error}", 0.0)
            )
            return
        if reply.what == "end":
            self._pool.release(talk.place)
            self._end(talk, reply.values["rewards"])
        else:
            self._go_on(talk)

    def _go_on(self, talk: RunningEpisode) -> None:
        episode = talk.open
        assert episode is not None
        if episode.status is None:
            seed = talk.seed(len(episode.turns))
            request = Request(list(episode.context_ids), seed, self._temperature, episode.room())
            self._said.append((talk.place, request))
        elif episode.turns:
            prompt = talk.prompt
            given = prompt.columns | {"prompts": prompt.text, "completions": episode.messages}
            given |= {"completion_ids": episode.token_ids}
            self._pool.end(talk.place, {name: [value] for name, value in given.items()})
        else:  # no room for a single turn: there is nothing to reward
            self._pool.release(talk.place)
            self._end(talk, {})

    def _end_turn(self, talk: RunningEpisode, completion: Completion) -> None:
        episode = talk.open
        assert episode is not None
        parsed = self._chat.parse(completion.token_ids, episode.context_ids, episode.tools)
        ends_without_call = self._pool.facts.kind == "tools"
        episode.add_turn(completion, parsed.message, parsed.num_invalid, ends_without_call)
        if episode.status is None:
            self._pool.act(talk.place, parsed.message)
        else:
            self._go_on(talk)

    def _end(self, talk: RunningEpisode, rewards: Mapping[str, float | str | None]) -> None:
        episode = talk.open
        assert episode is not None
        named: dict[str, float | str | None] = {
            name: rewards.get(name) for name in self._pool.facts.reward_names
        }
        if self._pool.facts.kind == "gym" and episode.turns:
            named[self._pool.facts.reward_names[0]] = episode_return(episode, self._discount)
        record = episode.episode(named, talk.calls_s)
        self._finish(
            talk, Completion(episode.token_ids, episode.logprobs, episode.finish_reason(), record)
        )

    def _fail(self, talk: RunningEpisode, failure: Failure) -> None:
        """The environment did, and its process is gone."""
        if talk.attempt < _MOST_ATTEMPTS:
            talk.attempt, talk.open = talk.attempt + 1, None
            self._begin(talk)
            return
        prompt, (_, number) = talk.prompt, talk.place
        why = f"environment (row {prompt.row}, sample {number}): {failure.why}"
        record = Episode(failure.status, (), (), [], {}, talk.calls_s, why)
        self._finish(talk, Completion([], [], "stop", record))

    def _finish(self, talk: RunningEpisode, completion: Completion) -> None:
        del self._talks[talk.place]
        self.completions[talk.place] = completion
        self._said.append((talk.place, None))
        if self._finished is not None:
            self._finished(*talk.place, completion)


def opening(prompt: str | list[Message], addition: Any) -> list[Message]:
    """The messages that an episode begins with: the prompt's, and what the environment adds. Text, or blocks of text,
    goes to the end of the last user message, as in TRL; messages come behind. Raises ValueError."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if not addition:
        return messages
    if isinstance(addition, list) and all(
        isinstance(found, dict) and "role" in found for found in addition
    ):
        return [*messages, *addition]
    last = next(
        (i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None
    )
    if last is None:
        raise ValueError(
            "reset() gave text, and the prompt has no user message that it could go to"
        )
    content: Any = messages[last].get("content") or ""
    if isinstance(content, str) and isinstance(addition, str):
        content += addition
    else:
        content = [*_blocks(content), *_blocks(addition)]
    messages[last] = {**messages[last], "content": content}
    return messages


def _blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def episode_return(episode: OpenEpisode, discount: float | None) -> float | None:
    """What its turns were worth, discounted to the first where `discount` is a number; None: none had a reward."""
    rewards = [(i, turn.reward) for i, turn in enumerate(episode.turns) if turn.reward is not None]
    factor = 1.0 if discount is None else discount
    return sum(reward * factor**i for i, reward in rewards) if rewards else None
