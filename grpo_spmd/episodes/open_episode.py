"""An episode under way, token by token: what the policy has before it, what it said, what it was told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_spmd.records import Completion, Episode, Segment, Turn

MOST_INVALID_TURNS = (
    3  # in a row with nothing but invalid calls, after which nothing else is to be hoped for
)
Message = dict[str, Any]


@dataclass(frozen=True)
class EpisodeLimits:
    """Of an episode, in turns and tokens."""

    max_turns: int
    max_tokens: int
    """Behind the prompt, sampled and given, in the context of any turn."""
    max_turn_tokens: int
    """Sampled in one turn."""
    max_model_len: int
    """Of a context with what is sampled behind it."""
    max_all_tokens: int
    """Of all segments together: what a micro-batch must hold."""


class Chat(Protocol):
    """What is needed of a ChatFormat."""

    max_token_chars: int

    def next_ids(
        self, context_ids: Sequence[int], so_far: Sequence[Message], new: Sequence[Message],
        tools: Sequence[dict[str, Any]], /,
    ) -> tuple[list[int], bool]: ...  # fmt: skip


class OpenEpisode:
    """Of one rollout. Its tokens come from the engine and from a ChatFormat, and are never made from text again."""

    def __init__(
        self,
        limits: EpisodeLimits,
        prompt: list[Message],
        tools: Sequence[dict[str, Any]],
        prompt_ids: list[int],
    ) -> None:
        """`prompt`: messages that `prompt_ids` are the tokens of."""
        self._limits, self.tools, self._prompt = limits, tools, prompt
        self.context_ids = list(prompt_ids)
        self._sampled = [False] * len(prompt_ids)
        self._sealed: list[Segment] = []
        self._num_prompt = self._num_all = len(prompt_ids)
        self._num_invalid_turns = 0
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.status: str | None = None  # once it is known how it ends
        if min(self._left()) < 1:
            self._end_without_room()

    def room(self) -> int:
        """The most tokens that the next turn may have; below 1 there is none."""
        return min(self._limits.max_turn_tokens, *self._left())

    def add_turn(
        self, completion: Completion, message: Message, num_invalid: int, ends_without_call: bool
    ) -> None:
        """What the policy said, and what that is as a message; `num_invalid`: calls in it that do not parse. With
        `ends_without_call` a turn that calls no tool is the last."""
        tokens = completion.token_ids
        self.context_ids += tokens
        self._sampled += [True] * len(tokens)
        self._num_all += len(tokens)
        self.token_ids += tokens
        self.logprobs += completion.logprobs
        self.turns.append(Turn(len(tokens), completion.finish_reason))
        self.messages.append(message)
        if completion.finish_reason == "length":
            self.status = (
                "truncated"  # whatever can be read of it is a part: nothing of it is called
            )
        elif num_invalid and not message.get("tool_calls"):
            self.status = "invalid_calls"  # there is no call that an answer could belong to
        elif ends_without_call and not message.get("tool_calls"):
            self.status = "ok"

    def add_answer(self, values: dict[str, Any], chat: Chat) -> None:
        """What the environment made of the last turn (Reply.values). Raises ValueError: the template refuses it, or it
        is nothing, which no turn can follow."""
        last = self.turns.pop()
        self.turns.append(Turn(last.num_tokens, last.finish_reason, values["reward"]))
        only_invalid = 0 < values["num_calls"] <= values["num_invalid"]
        self._num_invalid_turns = self._num_invalid_turns + 1 if only_invalid else 0
        if values["done"]:
            self.status = "ok"
        elif self._num_invalid_turns >= MOST_INVALID_TURNS:
            self.status = "invalid_calls"
        elif len(self.turns) >= self._limits.max_turns:
            self.status = "max_turns"
        elif values.get("too_long") or not self._may_fit(values["messages"], chat):
            self._end_without_room()
        else:
            self._go_on(values["messages"], chat)

    def episode(self, rewards: dict[str, float | str | None], calls_s: list[float]) -> Episode:
        """The record of it, now that it has ended."""
        assert self.status is not None
        segments = (*self._sealed, *([self._segment()] if any(self._sampled) else []))
        return Episode(self.status, segments, tuple(self.turns), self.messages, rewards, calls_s)

    def finish_reason(self) -> str:
        return (
            "length" if self.status in ("truncated", "max_tokens", "context_overflow") else "stop"
        )

    def _may_fit(self, new: Sequence[Message], chat: Chat) -> bool:
        """False for what no tokenizer makes short enough: 100 MB are not tokenized to find that out."""
        return (
            sum(len(str(message.get("content") or "")) for message in new)
            <= max(self.room(), 0) * chat.max_token_chars
        )

    def _go_on(self, new: Sequence[Message], chat: Chat) -> None:
        if not new:
            raise ValueError("step() gave no observation, and is not done")
        ids, continues = chat.next_ids(
            self.context_ids, [*self._prompt, *self.messages], new, self.tools
        )
        num_before = len(self.context_ids) if continues else 0
        assert ids[:num_before] == self.context_ids[:num_before], (
            "a context that continues another begins with it"
        )
        before = self.context_ids, self._sampled, self._sealed, self._num_all
        if not continues:
            self._sealed = [*self._sealed, self._segment()]
        self._sampled = [*self._sampled[:num_before], *[False] * (len(ids) - num_before)]
        self.context_ids, self._num_all = list(ids), self._num_all + len(ids) - num_before
        if min(self._left()) > 0:
            self.messages += new
        else:  # as if the answer had not come
            self._end_without_room()
            self.context_ids, self._sampled, self._sealed, self._num_all = before

    def _left(self) -> tuple[int, int]:
        """Tokens that there is room for behind the context, by `max_tokens` and by all other limits."""
        limits, length = self._limits, len(self.context_ids)
        of_context = min(limits.max_model_len - length, limits.max_all_tokens - self._num_all)
        return limits.max_tokens - (length - self._num_prompt), of_context

    def _end_without_room(self) -> None:
        """By the limit that leaves least."""
        of_episode, of_context = self._left()
        self.status = "max_tokens" if of_episode <= of_context else "context_overflow"

    def _segment(self) -> Segment:
        return Segment(np.array(self.context_ids, np.int32), np.array(self._sampled, np.bool_))
