"""This module keeps the tokens, messages and status of one running episode, without any I/O.

Token ids are appended as the engine sampled them or as the chat format encoded them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.openai_api import num_chars
from grpo_spmd.learn.contexts import extend_routes
from grpo_spmd.records import Completion, Episode, Fields, Message, Routes, Segment, Turn

# The episode ends after this many turns in a row in which all calls are invalid.
MAX_INVALID_TURNS = 3


@dataclass(frozen=True)
class EpisodeLimits:
    """The upper bounds of one episode."""

    max_turns: int
    max_tokens: int
    """The most tokens after the prompt in a turn's context, sampled and environment tokens
    together."""
    max_turn_tokens: int
    """The most tokens that one turn samples."""
    max_model_len: int
    """The most tokens of a context together with the tokens sampled after it."""
    max_all_tokens: int
    """The most tokens of all segments together, since one micro-batch must hold all of them."""


class OpenEpisode:
    """The state of one running episode. Text that is in the context is never encoded again."""

    def __init__(
        self,
        limits: EpisodeLimits,
        prompt: list[Message],
        tools: Sequence[Fields],
        prompt_ids: list[int],
    ) -> None:
        """`prompt_ids` are the tokens of the messages `prompt`."""
        self._limits = limits
        self.tools = tools
        self.opening = prompt
        self.context_ids = list(prompt_ids)
        # For each token of the context: True if the policy sampled it.
        self._sampled = [False] * len(prompt_ids)
        self._routes: Routes | None = None
        self._finished_segments: list[Segment] = []
        self._num_prompt_tokens = len(prompt_ids)
        # The tokens of all segments, including the one that still grows.
        self._num_all_tokens = len(prompt_ids)
        self._num_invalid_turns = 0
        self.num_tool_calls = 0
        self.num_tool_errors = 0
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.status: str | None = None
        """How the episode ended; None while it runs."""
        if self.max_turn_tokens() < 1:
            self._end_without_room(self.context_ids, self._num_all_tokens)

    def max_turn_tokens(self) -> int:
        """Returns the most tokens that the next turn may sample; below 1 there is no room."""
        rooms = self._rooms(self.context_ids, self._num_all_tokens)
        return min(self._limits.max_turn_tokens, *rooms)

    def add_turn(
        self, completion: Completion, message: Message, num_invalid: int, ends_without_call: bool
    ) -> None:
        """Appends a sampled turn, and sets the status if it is the last turn of the episode.

        `message` is the parsed turn, and `num_invalid` the number of its calls that do not parse.
        With `ends_without_call` a turn that calls no tool is the last one.
        """
        tokens = completion.token_ids
        # The ids as they were sampled, and not the ids of the parsed text.
        self.context_ids += tokens
        self._sampled += [True] * len(tokens)
        self._routes = extend_routes(self._routes, completion.routes)
        self._num_all_tokens += len(tokens)
        self.token_ids += tokens
        self.logprobs += completion.logprobs
        self.turns.append(Turn(len(tokens), completion.finish_reason))
        self.messages.append(message)
        has_calls = bool(message.get("tool_calls"))
        if completion.finish_reason == "length":
            # The last call may be incomplete, so no call is made.
            self.status = "truncated"
        elif num_invalid and not has_calls:
            # Without a valid call there is nothing that the environment could answer.
            self.status = "invalid_calls"
        elif ends_without_call and not has_calls:
            self.status = "ok"

    def add_answer(self, values: Fields, chat: ChatFormat) -> None:
        """Appends the environment's answer to the last turn, or sets the status if the episode is
        over.

        `values` are those of the Reply (pool._ActValues). Raises ValueError if the template refuses
        the answer, or if the answer is empty although the episode is not over.
        """
        self.turns[-1] = replace(self.turns[-1], reward=values["reward"])
        # A longer text has too many tokens with any tokenizer, so it is refused before it is
        # tokenized.
        max_chars = max(self.max_turn_tokens(), 0) * chat.max_token_chars
        self.num_tool_calls += values["num_calls"]
        self.num_tool_errors += values["num_errors"]
        only_invalid = 0 < values["num_calls"] <= values["num_invalid"]
        self._num_invalid_turns = self._num_invalid_turns + 1 if only_invalid else 0
        if values["done"]:
            self.status = "ok"
        elif self._num_invalid_turns >= MAX_INVALID_TURNS:
            self.status = "invalid_calls"
        elif len(self.turns) >= self._limits.max_turns:
            self.status = "max_turns"
        # With "too_long" the worker did not send the messages, because they were far too large.
        elif values.get("too_long") or num_chars(values["messages"]) > max_chars:
            self._end_without_room(self.context_ids, self._num_all_tokens)
        else:
            self._add_messages(values["messages"], chat)

    def episode(self, rewards: dict[str, float | str | None], calls_s: list[float]) -> Episode:
        """Returns the record of the episode, which must be over."""
        assert self.status is not None
        segments = list(self._finished_segments)
        if any(self._sampled):
            segments.append(self._segment())
        return Episode(
            status=self.status,
            segments=tuple(segments),
            turns=tuple(self.turns),
            messages=self.messages,
            rewards=rewards,
            calls_s=calls_s,
            opening=self.opening,
        )

    def _add_messages(self, messages: Sequence[Message], chat: ChatFormat) -> None:
        """Adds the environment's messages to the context.

        If they leave no room for another turn, nothing is added and the episode ends.
        """
        if not messages:
            raise ValueError("step() gave no observation, although the episode is not done")
        history = [*self.opening, *self.messages]
        ids, continues = chat.next_ids(self.context_ids, history, messages, self.tools)
        num_kept = len(self.context_ids) if continues else 0
        num_all_tokens = self._num_all_tokens + len(ids) - num_kept
        if min(self._rooms(ids, num_all_tokens)) < 1:
            self._end_without_room(ids, num_all_tokens)
            return
        if not continues:
            # The template rewrote earlier turns. Their sampled tokens stay in a finished segment,
            # and a new segment begins.
            self._finished_segments.append(self._segment())
            self._routes = None
        self._sampled = [*self._sampled[:num_kept], *[False] * (len(ids) - num_kept)]
        self.context_ids = list(ids)
        self._num_all_tokens = num_all_tokens
        self.messages += messages

    def _rooms(self, ids: Sequence[int], num_all_tokens: int) -> tuple[int, int]:
        """Returns how many more tokens fit after the context `ids`: (by the limit `max_tokens`, by
        the other limits). `num_all_tokens` counts all segments, including this context."""
        limits = self._limits
        return (
            limits.max_tokens - (len(ids) - self._num_prompt_tokens),
            min(limits.max_model_len - len(ids), limits.max_all_tokens - num_all_tokens),
        )

    def _end_without_room(self, ids: Sequence[int], num_all_tokens: int) -> None:
        """Ends the episode with the status of the limit that leaves the fewest tokens."""
        episode_room, context_room = self._rooms(ids, num_all_tokens)
        self.status = "max_tokens" if episode_room <= context_room else "context_overflow"

    def _segment(self) -> Segment:
        ids = np.array(self.context_ids, np.int32)
        return Segment(ids, np.array(self._sampled, np.bool_), self._routes)


def finish_reason(status: str | None) -> str:
    """Returns the finish reason of a completion, "length" or "stop", for an episode's status."""
    return "length" if status in ("truncated", "max_tokens", "context_overflow") else "stop"
