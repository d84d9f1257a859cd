"""An agent's conversations in tokens: what the policy has before it at each turn, and what is trained on.

An agent sends whole conversations, in whatever order it likes and several at a time. Its turns form a tree: a request
that sends on what an earlier turn was asked and answered is that turn's child, and its context is that turn's tokens,
as they were sampled, and the ids of the new messages behind them. What was sampled is never tokenised again. A request
that goes on from no turn begins a tree of its own. A segment is a way from a root to a leaf; a turn that several of
them share is trained on in the first and given in the others.

Nothing here depends on the order in which requests came, where they do not depend on each other: an agent that asks for
three turns at once gets the same ones, and the same segments, at the same seed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from grpo_spmd.episodes.agent import LIMITS, TOO_LONG
from grpo_spmd.episodes.openai_api import ApiError, Message, is_plain, num_chars
from grpo_spmd.episodes.plain_text import TemplateError
from grpo_spmd.records import Completion, Segment, Turn

Tools = list[dict[str, Any]]


class Parsed(Protocol):
    @property
    def message(self) -> Message: ...
    @property
    def num_invalid(self) -> int: ...


class Chat(Protocol):
    """What is needed of a ChatFormat."""

    max_token_chars: int

    def whole_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], /
    ) -> list[int]: ...
    def next_ids(
        self,
        context_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        /,
    ) -> tuple[list[int], bool]: ...
    def parse(
        self,
        token_ids: Sequence[int],
        context_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
        /,
    ) -> Parsed: ...


@dataclass(frozen=True)
class TurnRequest:
    """A turn to sample."""

    number: int
    """Of the turn, in the order of the requests."""
    key: str
    """For its seed: says which turn it is among the session's, whatever the order of requests was."""
    context_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class TurnAnswer:
    """What the agent is told of its turn."""

    message: Message
    finish_reason: str  # "stop", "length" or "tool_calls"
    usage: dict[str, int]
    num_invalid: int  # calls that nobody could take; they are not in the message


@dataclass(frozen=True)
class SessionRecord:
    """A session's turns for the records, segment behind segment."""

    token_ids: list[int]
    """The sampled ones."""
    logprobs: list[float]
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: list[Message]
    """Of the longest conversation, behind what its first request had."""


@dataclass(eq=False)
class _Node:
    """A turn: what was given behind its parent's tokens, and what was sampled then."""

    parent: _Node | None
    given: list[int]
    messages: list[Message]  # up to its answer, once there is one
    said: frozenset[int]  # places of ours among them
    tools: Tools
    num_first_messages: int  # of the request that began the conversation
    num_prompt_tokens: int  # of the conversation, before the episode's own began
    key: str
    completion: Completion | None = None
    most: int = 0  # tokens that it may have
    wanted: int | None = None  # no more than these, as the agent said
    num_children: int = 0
    way: list[_Node] = field(default_factory=list)  # from the root to itself

    @property
    def is_cut(self) -> bool:
        said = self.completion
        return (
            said is not None
            and said.finish_reason == "length"
            and len(said.token_ids) != self.wanted
        )

    def token_ids(self) -> list[int]:
        """From the prompt on, with what was sampled."""
        ids: list[int] = []
        for node in self.way:
            ids += node.given
            ids += node.completion.token_ids if node.completion else []
        return ids

    def num_tokens_before(self, ids: list[int]) -> int:
        """How many this turn ends with, where `ids` begin with them and go on; else 0."""
        length = 0
        for node in self.way:
            for part in (node.given, node.completion.token_ids if node.completion else []):
                if ids[length : length + len(part)] != part:
                    return 0
                length += len(part)
        return length if length < len(ids) else 0


class ConversationTree:
    """One session's. `max_tokens`: of a conversation behind its prompt, sampled and given; `max_model_len`: of a
    context and what is sampled behind it; `max_all_tokens`: of all segments together, which train side by side."""

    def __init__(
        self,
        chat: Chat,
        *,
        max_turns: int,
        max_tokens: int,
        max_model_len: int,
        max_all_tokens: int,
    ) -> None:
        self._chat, self._max_turns, self._max_tokens = chat, max_turns, max_tokens
        self._max_model_len, self._max_all_tokens = max_model_len, max_all_tokens
        self._nodes: list[_Node] = []
        self._num_alike = Counter[bytes]()
        self._refused: str | None = None

    @property
    def status(self) -> str:
        """The episode's, as far as it shows here: "ok", "truncated" where the longest conversation ends in a turn that
        was cut off, and not by the agent's own wish, or the limit that refused a turn."""
        longest = self._longest(self._leaves())
        return self._refused or ("truncated" if longest is not None and longest.is_cut else "ok")

    def begin(
        self, messages: list[Message], tools: Tools, max_tokens: int | None = None
    ) -> TurnRequest:
        """The turn that a request asks for; messages as wire.read_request has them, `max_tokens`: what the agent allows
        at most. Raises ApiError where there is no room for it or the template refuses the messages."""
        if len(self._nodes) >= self._max_turns:
            raise self._limit(
                "episode_max_turns",
                f"the episode has had its environment.max_turns={self._max_turns}",
            )
        if num_chars(messages) > self._max_model_len * self._chat.max_token_chars:
            raise self._too_long("far more")
        node = self._place(messages, tools)
        context_ids = node.token_ids()
        room = self._room(node, len(context_ids))
        node.most, node.wanted = min(room, max_tokens or room), max_tokens
        digest = hashlib.blake2b(
            np.asarray(context_ids, np.int64).tobytes(), digest_size=8
        ).digest()
        node.key = f"{digest.hex()}.{self._num_alike[digest]}"
        self._num_alike[digest] += 1
        if node.parent is not None:
            node.parent.num_children += 1
        self._refused = None  # the agent has found a way on
        self._nodes.append(node)
        return TurnRequest(len(self._nodes) - 1, node.key, context_ids, node.most)

    def finish(self, number: int, completion: Completion) -> TurnAnswer:
        """Put what was sampled for a turn in its place. A turn that was cut off has no calls: they may be half ones."""
        node = self._nodes[number]
        assert node.completion is None, f"turn {number} has its completion"
        context_ids = node.token_ids()
        parsed = self._chat.parse(completion.token_ids, context_ids, node.tools)
        is_whole = completion.finish_reason == "stop"
        message = {
            name: value
            for name, value in parsed.message.items()
            if is_whole or name != "tool_calls"
        }
        said = message.pop("tool_calls", None) or []
        calls = [
            call for call in said if is_plain(call)
        ]  # no template or client could take the others
        if calls:
            # Nine letters and digits, which every template takes that writes them down.
            ids = (
                hashlib.blake2b(f"{node.key}.{i}".encode()).hexdigest()[:9]
                for i in range(len(calls))
            )
            message["tool_calls"] = [
                {**call, "id": name} for call, name in zip(calls, ids, strict=True)
            ]
        node.completion = completion
        node.said |= {len(node.messages)}
        node.messages = [*node.messages, message]
        num_prompt, num_sampled = len(context_ids), len(completion.token_ids)
        return TurnAnswer(
            message,
            "tool_calls" if calls else completion.finish_reason,
            {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt + num_sampled,
            },
            parsed.num_invalid + len(said) - len(calls) if is_whole else 0,
        )

    def record(self) -> SessionRecord:
        """Of the turns that are finished. Those that nobody has seen are left out: their completion never came here."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        segments, turns = [], []
        trained: set[_Node] = set()
        leaves = self._leaves()
        for leaf in leaves:
            sampled: list[bool] = []
            for node in leaf.way:
                assert node.completion is not None, "a turn has a child before it was sampled"
                completion, is_new = node.completion, node not in trained
                sampled += [False] * len(node.given) + [is_new] * len(completion.token_ids)
                if is_new:
                    trained.add(node)
                    token_ids += completion.token_ids
                    logprobs += completion.logprobs
                    turns.append(Turn(len(completion.token_ids), completion.finish_reason))
            segments.append(
                Segment(np.asarray(leaf.token_ids(), np.int32), np.asarray(sampled, np.bool_))
            )
        longest = self._longest(leaves)
        messages = longest.messages[longest.num_first_messages :] if longest else []
        return SessionRecord(token_ids, logprobs, tuple(segments), tuple(turns), messages)

    def _longest(self, leaves: Sequence[_Node]) -> _Node | None:
        return max(leaves, key=lambda leaf: len(leaf.messages), default=None)

    def _leaves(self) -> list[_Node]:
        """Finished turns from which no finished one goes on, in an order that says nothing of when they were asked."""
        finished = [node for node in self._nodes if node.completion is not None]
        inner = {node.parent for node in finished}
        leaves = [node for node in finished if node not in inner]
        return sorted(
            leaves, key=lambda leaf: (leaf.num_first_messages, len(leaf.messages), leaf.token_ids())
        )

    def _place(self, messages: list[Message], tools: Tools) -> _Node:
        """The node of a request, which is not in the tree yet."""
        try:
            parent = self._earlier_turn(messages, tools)
            if parent is not None:
                so_far, new = parent.messages, messages[len(parent.messages) :]
                messages = [
                    *so_far,
                    *new,
                ]  # as we have them: with the thinking that the agent left out
                before = parent.token_ids()
                # Behind a turn that was cut off the template has more to write than new messages.
                is_whole = (
                    parent.completion is not None and parent.completion.finish_reason == "stop"
                )
                if is_whole and {message["role"] for message in new} <= {"tool", "user"}:
                    ids, continues = self._chat.next_ids(before, so_far, new, tools)
                    if continues:
                        assert ids[: len(before)] == before, (
                            "a context that continues another begins with it"
                        )
                        return self._child(parent, ids[len(before) :], messages, parent.said, tools)
                else:
                    ids = self._chat.whole_ids(messages, tools)
            else:
                ids = self._chat.whole_ids(messages, tools)
        except TemplateError as error:
            raise ApiError(
                400, "invalid_messages", f"the chat template refuses the messages: {error}"
            ) from None
        said = parent.said if parent is not None else frozenset[int]()
        continued = self._longest_prefix(ids)
        if continued is not None:
            return self._child(continued, ids[len(continued.token_ids()) :], messages, said, tools)
        num_prompt = len(ids) if parent is None else min(parent.num_prompt_tokens, len(ids))
        num_first = len(messages) if parent is None else parent.num_first_messages
        root = _Node(None, ids, messages, said, tools, num_first, num_prompt, "")
        root.way.append(root)
        return root

    def _child(
        self,
        parent: _Node,
        given: list[int],
        messages: list[Message],
        said: frozenset[int],
        tools: Tools,
    ) -> _Node:
        num_first = min(parent.num_first_messages, len(messages))
        child = _Node(parent, given, messages, said, tools, num_first, parent.num_prompt_tokens, "")
        child.way += [*parent.way, child]
        return child

    def _room(self, node: _Node, length: int) -> int:
        """Tokens that a turn behind a context of this length may have. Raises ApiError where it may have none."""
        if (room := self._max_model_len - length) < 1:
            raise self._too_long(str(length))
        if (left := self._max_tokens - (length - node.num_prompt_tokens)) < 1:
            why = f"the conversation has had its environment.max_tokens={self._max_tokens}"
            raise self._limit("episode_max_tokens", why)
        others = [
            other for other in self._nodes if not other.num_children and other is not node.parent
        ]
        # A turn that is being sampled has its completion yet to come.
        num_others = sum(
            len(other.token_ids()) + (0 if other.completion else other.most) for other in others
        )
        if (left_of_all := self._max_all_tokens - num_others - length) < 1:
            why = f"its conversations have had the {self._max_all_tokens} tokens that fit into one micro-batch"
            raise self._limit("episode_max_all_tokens", why)
        return min(room, left, left_of_all)

    def _earlier_turn(self, messages: list[Message], tools: Tools) -> _Node | None:
        """The last turn that the conversation has in it, with its tools; of several alike one without a child."""
        candidates = [
            node
            for node in self._nodes
            if node.completion is not None
            and len(node.messages) < len(messages)
            and node.tools == tools
            if all(
                _is_same(ours, messages[i], i in node.said) for i, ours in enumerate(node.messages)
            )
        ]
        return max(
            candidates, key=lambda node: (len(node.messages), not node.num_children), default=None
        )

    def _longest_prefix(self, ids: list[int]) -> _Node | None:
        """The turn with whose tokens a context begins that was made from text."""
        finished = [
            node
            for node in self._nodes
            if node.completion is not None and node.completion.token_ids
        ]
        found = [(node.num_tokens_before(ids), not node.num_children, node) for node in finished]
        return max(
            (one for one in found if one[0]), key=lambda one: one[:2], default=(0, False, None)
        )[2]

    def _too_long(self, length: str) -> ApiError:
        self._refused = self._refused or "context_overflow"
        return ApiError(
            400,
            TOO_LONG,
            f"This model's maximum context length is {self._max_model_len} tokens, and the messages have {length}.",
        )

    def _limit(self, code: str, why: str) -> ApiError:
        self._refused = self._refused or LIMITS[code]
        return ApiError(400, code, f"{why}: return the reward")


def _is_same(ours: Message, theirs: Message, is_said: bool) -> bool:
    """Whether a message that was sent again is the one that we know; of what we said, clients keep no thinking, and
    some no ids of calls."""
    names = {*ours, *theirs} - {"tool_calls"} - ({"reasoning_content"} if is_said else set())
    if any((ours.get(name) or "") != (theirs.get(name) or "") for name in names):
        return False
    if is_said and theirs.get("reasoning_content") not in (None, ours.get("reasoning_content")):
        return False
    calls, others = ours.get("tool_calls") or [], theirs.get("tool_calls") or []
    return len(calls) == len(others) and all(
        _is_same_call(*pair) for pair in zip(calls, others, strict=True)
    )


def _is_same_call(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    mine, yours = ours["function"], theirs["function"]
    is_alike = mine["name"] == yours["name"] and _as_text(mine["arguments"]) == _as_text(
        yours["arguments"]
    )
    return is_alike and theirs.get("id") in (None, ours.get("id"))


def _as_text(arguments: Any) -> str:
    """One for all forms that mean the same: NaN is not itself, and what is no dict stays a text on the wire."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps(arguments, sort_keys=True)
