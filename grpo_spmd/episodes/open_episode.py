"""This module keeps the state of one running episode, token by token, without any I/O.

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

# After this many turns in a row with nothing but invalid calls, the episode ends.
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
    """The most tokens of a context and the tokens sampled after it."""
    max_all_tokens: int
    """The most tokens of all segments together, because a micro-batch must hold them."""


class OpenEpisode:
    """The state of one running episode. Text is never tokenized again once it is in the context."""

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
        self._sampled = [False] * len(prompt_ids)
        self._routes: Routes | None = None
        self._finished_segments: list[Segment] = []
        self._num_prompt_tokens = len(prompt_ids)
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
        """Appends a sampled turn.

        `message` is the parsed turn; `num_invalid` counts calls in it that do not parse. With
        `ends_without_call` a turn that calls no tool is the last one.
        """
        tokens = completion.token_ids
        # These are the exact sampled ids, whatever text they give.
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
            # The parsed message may be incomplete, so none of its calls is made.
            self.status = "truncated"
        elif num_invalid and not has_calls:
            # There is no call that an answer could belong to.
            self.status = "invalid_calls"
        elif ends_without_call and not has_calls:
            self.status = "ok"

    def add_answer(self, values: Fields, chat: ChatFormat) -> None:
        """Appends the environment's answer to the last turn (Reply.values).

        Raises ValueError where the template refuses the answer, or where the answer is empty and
        the episode is not over.
        """
        self.turns[-1] = replace(self.turns[-1], reward=values["reward"])
        # No tokenizer makes a longer text short enough: it is refused before it is tokenized.
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
        # With "too_long" the messages were larger than any room, so the worker did not send them.
        elif values.get("too_long") or num_chars(values["messages"]) > max_chars:
            self._end_without_room(self.context_ids, self._num_all_tokens)
        else:
            self._add_messages(values["messages"], chat)

    def episode(self, rewards: dict[str, float | str | None], calls_s: list[float]) -> Episode:
        """Returns the record of the episode, which has ended."""
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
        """Makes the context of the next turn. Nothing is added if there is no room for that
        turn."""
        if not messages:
            raise ValueError("step() gave no observation, and is not done")
        history = [*self.opening, *self.messages]
        ids, continues = chat.next_ids(self.context_ids, history, messages, self.tools)
        num_kept = len(self.context_ids) if continues else 0
        num_all_tokens = self._num_all_tokens + len(ids) - num_kept
        if min(self._rooms(ids, num_all_tokens)) < 1:
            self._end_without_room(ids, num_all_tokens)
            return
        if not continues:
            # The template rewrote earlier turns: the sampled tokens stay in a segment of their own.
            self._finished_segments.append(self._segment())
            self._routes = None
        self._sampled = [*self._sampled[:num_kept], *[False] * (len(ids) - num_kept)]
        self.context_ids = list(ids)
        self._num_all_tokens = num_all_tokens
        self.messages += messages

    def _rooms(self, ids: Sequence[int], num_all_tokens: int) -> tuple[int, int]:
        """Returns the tokens that fit after a context: what `max_tokens` leaves, and what the other
        limits leave. `num_all_tokens` are those of all segments with this context."""
        limits = self._limits
        return (
            limits.max_tokens - (len(ids) - self._num_prompt_tokens),
            min(limits.max_model_len - len(ids), limits.max_all_tokens - num_all_tokens),
        )

    def _end_without_room(self, ids: Sequence[int], num_all_tokens: int) -> None:
        """Ends the episode with the status of the limit that leaves the least room."""
        episode_room, context_room = self._rooms(ids, num_all_tokens)
        self.status = "max_tokens" if episode_room <= context_room else "context_overflow"

    def _segment(self) -> Segment:
        ids = np.array(self.context_ids, np.int32)
        return Segment(ids, np.array(self._sampled, np.bool_), self._routes)


def finish_reason(status: str | None) -> str:
    """Returns the finish reason of a completion, "length" or "stop", for an episode's status."""
    return "length" if status in ("truncated", "max_tokens", "context_overflow") else "stop"
