"""This module keeps the tokens, messages and status of running episodes, without any I/O.

`OpenEpisode` has one conversation of the policy with tools or a gym environment. Token ids are
appended as the engine sampled them or as the chat format encoded them.

`ConversationTree` keeps the conversations of one agent session as a tree of turns.

The tree decides the context of each turn and which tokens are trained on. An agent sends whole
conversations, in any order and several at a time. A request that continues an earlier turn becomes
a child of that turn: its context is the earlier turn's tokens, as they were sampled, followed by
the ids of the new messages. The text of sampled tokens is never encoded again. A request that
continues no turn becomes the root of a new tree. A *segment* is a path from a root to a leaf. A
turn that several segments share is trained on in the first segment and is context in the others.

The result does not depend on the order of independent requests: an agent that asks for three turns
at once gets the same turns, and the same segments, at the same seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_spmd.episodes.chat_format import ChatFormat, TemplateError
from grpo_spmd.episodes.openai_api import LIMITS, TOO_LONG, ApiError, is_plain, num_chars
from grpo_spmd.learn.contexts import extend_routes
from grpo_spmd.records import Completion, Episode, Fields, Message, Routes, Segment, Turn

# The episode ends after this many turns in a row in which all calls are invalid.
MAX_INVALID_TURNS = 3
Tools = list[Fields]


@dataclass(frozen=True)
class EpisodeLimits:
    """The upper bounds of one episode, in turns and tokens."""

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


@dataclass(eq=False)
class TreeTurn:
    """A node of a tree of turns: one turn, with its sampled tokens and the context since its
    parent."""

    parent: TreeTurn | None
    new_ids: list[int]
    """The tokens of the context that follow all tokens of the parent."""
    completion: Completion | None = None
    """What was sampled; None until the turn is finished."""
    reward: float | None = None
    """The reward of a gym environment for this turn."""
    messages: list[Message] = field(default_factory=list)
    """The messages of an agent's request, and after them the sampled message once there is one."""
    policy_messages: frozenset[int] = frozenset()
    """The indices of the messages that the policy wrote."""
    tools: Tools = field(default_factory=list)
    num_first_messages: int = 0
    """The number of messages in the request that began the conversation."""
    num_prompt_tokens: int = 0
    """The number of the conversation's prompt tokens, which do not count against `max_tokens` of
    the episode's limits."""
    key: str = ""
    """A key for the turn's seed that does not depend on the order of requests."""
    max_tokens: int = 0
    """The most tokens that the turn may sample. Until it is finished, all of them count against the
    limits."""
    requested_tokens: int | None = None
    """The most tokens that the agent's request asks for; None if it sets no limit."""
    num_children: int = 0
    """The number of turns that continue this one."""
    path: list[TreeTurn] = field(default_factory=list)
    """The turns from the root to this turn."""

    def __post_init__(self) -> None:
        """Sets the path from the root, which does not change after a turn is made."""
        self.path = [*(self.parent.path if self.parent else ()), self]

    @property
    def is_cut_off(self) -> bool:
        """Returns whether one of the run's limits ended the turn, and not the agent's own limit."""
        completion = self.completion
        if completion is None or completion.finish_reason != "length":
            return False
        return len(completion.token_ids) != self.requested_tokens

    @property
    def sampled_ids(self) -> list[int]:
        """Returns the tokens that were sampled for this turn; none until it is finished."""
        return self.completion.token_ids if self.completion else []

    @property
    def context_ids(self) -> list[int]:
        """Returns the context of the turn: all tokens of the conversation before the sampled
        ones."""
        ids = self.token_ids()
        return ids[: len(ids) - len(self.sampled_ids)]

    def token_ids(self) -> list[int]:
        """Returns all tokens of the conversation up to this turn, including its sampled ones."""
        ids = []
        for turn in self.path:
            ids += turn.new_ids
            ids += turn.sampled_ids
        return ids

    def is_prefix_of(self, ids: list[int]) -> bool:
        """Returns whether `ids` begin with this turn's tokens and have more tokens after them."""
        own_ids = self.token_ids()
        return len(own_ids) < len(ids) and ids[: len(own_ids)] == own_ids


def join_turns(
    leaves: Sequence[TreeTurn],
    status: str,
    opening: list[Message],
    *,
    messages: list[Message],
    rewards: dict[str, float | str | None],
    calls_s: list[float],
    num_tool_calls: int | None = None,
    num_tool_errors: int = 0,
) -> Completion:
    """Returns the completion of an episode: the sampled tokens of all turns, segment after segment.

    A segment is the path from a root to one of `leaves`, whose turns share one context. A turn that
    several segments share is trained on once, in the first segment that has it. `opening` has the
    messages before the first turn. The other arguments are fields of records.Episode.
    """
    token_ids = []
    logprobs = []
    segments = []
    turns: dict[TreeTurn, Turn] = {}
    for leaf in leaves:
        # For each token of the context: True if it was sampled and is trained on in this segment.
        sampled = []
        # The experts that an MoE's router chose for each token of the context; None without them.
        routes: Routes | None = None
        for turn in leaf.path:
            completion = turn.completion
            # A child is made only from a sampled parent, so every turn on a leaf's path is
            # complete.
            assert completion is not None, "a turn has a child before it was sampled"
            is_new = turn not in turns
            routes = extend_routes(routes, completion.routes)
            sampled += [False] * len(turn.new_ids) + [is_new] * len(completion.token_ids)
            if is_new:
                token_ids += completion.token_ids
                logprobs += completion.logprobs
                num_tokens = len(completion.token_ids)
                turns[turn] = Turn(num_tokens, completion.finish_reason, turn.reward)
        ids = np.asarray(leaf.token_ids(), np.int32)
        segments.append(Segment(ids, np.asarray(sampled, np.bool_), routes))
    episode = Episode(
        status=status,
        segments=tuple(segments),
        turns=tuple(turns.values()),
        messages=messages,
        rewards=rewards,
        calls_s=calls_s,
        opening=opening,
        num_tool_calls=num_tool_calls,
        num_tool_errors=num_tool_errors,
    )
    # An episode that had no room for another turn counts as one that was cut off.
    is_cut_off = status in ("truncated", "max_tokens", "context_overflow")
    return Completion(token_ids, logprobs, "length" if is_cut_off else "stop", episode)


def leaves_of(turns: Sequence[TreeTurn]) -> list[TreeTurn]:
    """Returns the finished turns that no finished turn continues."""
    finished = [turn for turn in turns if turn.completion is not None]
    parents = {turn.parent for turn in finished}
    return [turn for turn in finished if turn not in parents]


class OpenEpisode:
    """The state of one running episode: its context in tokens, its messages and sampled turns.

    Text whose tokens are in the context is never encoded again, so that training sees the very
    tokens that were sampled.
    """

    def __init__(
        self,
        limits: EpisodeLimits,
        prompt: list[Message],
        tools: Tools,
        prompt_ids: list[int],
    ) -> None:
        """`prompt_ids` are the tokens of the messages `prompt`. If they leave no room for a turn,
        the episode is over at once."""
        self._limits = limits
        self.tools = tools
        self.opening = prompt
        self.context_ids = list(prompt_ids)
        """All tokens of the conversation so far."""
        # The tokens of all segments, including the one that still grows.
        self._num_all_tokens = len(prompt_ids)
        # The turn that is sampled next, or, until the environment has answered it, the last one.
        self._turn = TreeTurn(None, prompt_ids)
        self._num_prompt_tokens = len(prompt_ids)
        self._num_invalid_turns = 0
        self._num_tool_calls = 0
        self._num_tool_errors = 0
        self.messages: list[Message] = []
        self.turns: list[TreeTurn] = []
        """The sampled turns."""
        self.status: str | None = None
        """How the episode ended; None while it runs."""
        if self.max_turn_tokens() < 1:
            self._end_without_room(self.context_ids, self._num_all_tokens)

    @property
    def token_ids(self) -> list[int]:
        """Returns the sampled tokens of all turns."""
        return [token_id for turn in self.turns for token_id in turn.sampled_ids]

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
        self._turn.completion = completion
        # The ids as they were sampled, and not the ids of the parsed text. It is a new list, since
        # the turn's request holds the old one.
        self.context_ids = [*self.context_ids, *completion.token_ids]
        self._num_all_tokens += len(completion.token_ids)
        self.turns.append(self._turn)
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

        `values` are the fields of the environment's Reply (pool._ActValues). Raises ValueError if
        the template refuses the answer, or if the answer is empty although the episode is not over.
        """
        self._turn.reward = values["reward"]
        # A longer text has too many tokens with any tokenizer, so it is refused before it is
        # tokenized.
        max_chars = max(self.max_turn_tokens(), 0) * chat.max_token_chars
        self._num_tool_calls += values["num_calls"]
        self._num_tool_errors += values["num_errors"]
        # True if the turn had calls, and all of them were invalid.
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

    def completion(
        self,
        rewards: dict[str, float | str | None],
        calls_s: list[float],
        *,
        has_tools: bool,
    ) -> Completion:
        """Returns the completion of the episode, which must be over. `rewards` has its rewards by
        name, and `calls_s` the seconds of each call to its environment."""
        assert self.status is not None
        return join_turns(
            leaves_of(self.turns),
            self.status,
            self.opening,
            messages=self.messages,
            rewards=rewards,
            calls_s=calls_s,
            num_tool_calls=self._num_tool_calls if has_tools else None,
            num_tool_errors=self._num_tool_errors,
        )

    def _add_messages(self, messages: Sequence[Message], chat: ChatFormat) -> None:
        """Adds the environment's messages to the context.

        If they leave no room for another turn, nothing is added and the episode ends.
        """
        if not messages:
            raise ValueError("step() gave no observation, although the episode is not done")
        history = [*self.opening, *self.messages]
        ids, continues = chat.next_ids(self.context_ids, history, messages, self.tools)
        # If the template rewrote earlier turns, their tokens stay as they were sampled, and a new
        # segment begins.
        new_ids = ids[len(self.context_ids) :] if continues else ids
        num_all_tokens = self._num_all_tokens + len(new_ids)
        if min(self._rooms(ids, num_all_tokens)) < 1:
            self._end_without_room(ids, num_all_tokens)
            return
        self._turn = TreeTurn(self._turn if continues else None, new_ids)
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


@dataclass(frozen=True)
class TurnAnswer:
    """The policy's turn, as the answer to an agent's request for it."""

    message: Message
    finish_reason: str
    """The reason why the turn ended: "stop", "length" or "tool_calls"."""
    usage: dict[str, int]


class ConversationTree:
    """The conversations of one agent session, as trees of turns (see the top of the file)."""

    def __init__(self, chat: ChatFormat, limits: EpisodeLimits) -> None:
        self._chat = chat
        self._limits = limits
        self._turns: list[TreeTurn] = []
        # The episode's status for the limit that has refused a turn; None after an accepted turn.
        self._refused_status: str | None = None

    @property
    def status(self) -> str:
        """Returns the episode's status, as far as the tree knows it.

        If a limit refused a turn and no turn was begun since, it is the status for that limit.
        Otherwise it is "truncated" if the longest conversation ends in a turn that was cut off, and
        else "ok".
        """
        longest_leaf = _longest(self._leaves())
        cut_off = longest_leaf is not None and longest_leaf.is_cut_off
        return self._refused_status or ("truncated" if cut_off else "ok")

    def begin(
        self, messages: list[Message], tools: Tools, max_tokens: int | None = None
    ) -> TreeTurn:
        """Returns the turn to sample for a request.

        `messages` are as read_request returns them. `max_tokens` is the agent's own limit. Raises
        ApiError if a limit leaves no room for a turn, or if the template refuses the messages.
        """
        if len(self._turns) >= self._limits.max_turns:
            raise self._limit_error(
                "episode_max_turns",
                f"the episode has had its environment.max_turns={self._limits.max_turns}",
            )
        # A text that cannot fit is refused before it is tokenized.
        if num_chars(messages) > self._limits.max_model_len * self._chat.max_token_chars:
            raise self._too_long_error("far more")
        turn = self._new_turn(messages, tools)
        context_ids = turn.token_ids()
        room = self._room(turn, len(context_ids))
        turn.max_tokens = min(room, max_tokens or room)
        turn.requested_tokens = max_tokens
        # The key depends on the context alone, and not on the order of the requests. Turns with
        # equal contexts are numbered; it does not matter which of them has which number.
        content = np.asarray(context_ids, np.int64).tobytes()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        turn.key = f"{digest}.{sum(earlier.key.startswith(digest) for earlier in self._turns)}"
        if turn.parent is not None:
            turn.parent.num_children += 1
        # The agent has found a way to continue, so the earlier refusal no longer counts.
        self._refused_status = None
        self._turns.append(turn)
        return turn

    def finish(self, turn: TreeTurn, completion: Completion) -> TurnAnswer:
        """Stores what was sampled for a turn and returns the answer for the agent.

        A turn that was cut off gets no tool calls, because they may be incomplete.
        """
        assert turn.completion is None, f"turn {turn.key} has its completion"
        context_ids = turn.token_ids()
        parsed = self._chat.parse(completion.token_ids, context_ids, turn.tools)
        is_finished = completion.finish_reason == "stop"
        message = dict(parsed.message)
        # Calls with deep or huge arguments are left out: templates and clients could not read them.
        calls = [
            {**call, "id": _call_id(turn.key, number)}
            for number, call in enumerate(filter(is_plain, message.pop("tool_calls", ())))
            if is_finished
        ]
        if calls:
            message["tool_calls"] = calls
        turn.completion = completion
        turn.policy_messages |= {len(turn.messages)}
        turn.messages = [*turn.messages, message]
        num_sampled = len(completion.token_ids)
        usage = {
            "prompt_tokens": len(context_ids),
            "completion_tokens": num_sampled,
            "total_tokens": len(context_ids) + num_sampled,
        }
        finish_reason = "tool_calls" if calls else completion.finish_reason
        return TurnAnswer(message, finish_reason, usage)

    def completion(
        self, rewards: dict[str, float | str | None], calls_s: list[float]
    ) -> Completion:
        """Returns the completion of the episode: the sampled tokens of all its finished turns.

        An agent may have held several conversations. The turns that share one context are a
        segment, and the completion has one segment after the other. Its messages are those of the
        longest conversation; the messages of that conversation's first request are its `opening`. A
        turn whose client disconnected before it was sampled is left out: it was never finished.
        """
        leaves = self._leaves()
        longest_leaf = _longest(leaves)
        num_first = longest_leaf.num_first_messages if longest_leaf else 0
        messages = longest_leaf.messages if longest_leaf else []
        return join_turns(
            leaves,
            self.status,
            messages[:num_first],
            messages=messages[num_first:],
            rewards=rewards,
            calls_s=calls_s,
        )

    def _leaves(self) -> list[TreeTurn]:
        """Returns the finished turns that no finished turn continues; each ends a segment.

        Their order depends on their content alone, not on the times of requests.
        """
        leaves = leaves_of(self._turns)
        # The conversation that began with the fewest messages is the first segment.
        return sorted(
            leaves, key=lambda leaf: (leaf.num_first_messages, len(leaf.messages), leaf.token_ids())
        )

    def _new_turn(self, messages: list[Message], tools: Tools) -> TreeTurn:
        """Returns the turn for a request, which the caller adds to the tree. Raises ApiError.

        Its parent is the earlier turn whose tokens its context begins with; without one, the turn
        is the root of a new tree.
        """
        parent = self._earlier_turn(messages, tools)
        policy_messages = frozenset[int]()
        if parent is not None:
            policy_messages = parent.policy_messages
            # The stored messages replace the received ones, from which agents drop the thinking.
            messages = [*parent.messages, *messages[len(parent.messages) :]]
        try:
            # The tokens decide which turn is the parent in the tree; the messages only suggest one.
            ids, continues = self._context_ids(parent, messages, tools)
        except TemplateError as error:
            raise ApiError(400, "invalid_messages", str(error)) from None
        # A conversation that was encoded anew may still begin with the tokens of an earlier turn.
        prefix = parent if continues else self._longest_prefix(ids)
        # If the template has rewritten a conversation that goes on, its tokens so far still count
        # against `max_tokens`.
        earlier = prefix or parent
        num_first = len(messages)
        num_prompt = len(ids)
        if earlier is not None:
            num_first = min(num_first, earlier.num_first_messages)
            num_prompt = min(num_prompt, earlier.num_prompt_tokens)
        return TreeTurn(
            parent=prefix,
            new_ids=ids[len(prefix.token_ids()) :] if prefix else ids,
            messages=messages,
            policy_messages=policy_messages,
            tools=tools,
            num_first_messages=num_first,
            num_prompt_tokens=num_prompt,
        )

    def _context_ids(
        self, parent: TreeTurn | None, messages: list[Message], tools: Tools
    ) -> tuple[list[int], bool]:
        """Returns (tokens, continues): the tokens of a conversation's messages, and True if they
        are known to begin with all tokens of `parent`."""
        if parent is not None and parent.completion is not None:
            new_messages = messages[len(parent.messages) :]
            roles = {message["role"] for message in new_messages}
            # New messages cannot be appended to a turn that was cut off, nor if they have other
            # roles.
            if parent.completion.finish_reason == "stop" and roles <= {"tool", "user"}:
                # The sampled ids of the parent are kept; only the new messages are encoded.
                ids = parent.token_ids()
                return self._chat.next_ids(ids, parent.messages, new_messages, tools)
        return self._chat.whole_ids(messages, tools), False

    def _room(self, turn: TreeTurn, length: int) -> int:
        """Returns the most tokens that a turn may sample after a context of `length` tokens.

        Raises ApiError if a limit leaves none.
        """
        room = self._limits.max_model_len - length
        if room < 1:
            raise self._too_long_error(str(length))
        conversation_room = self._limits.max_tokens - (length - turn.num_prompt_tokens)
        if conversation_room < 1:
            raise self._limit_error(
                "episode_max_tokens",
                f"the conversation has had its environment.max_tokens={self._limits.max_tokens}",
            )
        # The tokens of all segments but the one that this turn extends. A leaf that is still being
        # sampled counts with all tokens that it may sample.
        num_other_tokens = sum(
            len(leaf.token_ids()) + (0 if leaf.completion else leaf.max_tokens)
            for leaf in self._turns
            if not leaf.num_children and leaf is not turn.parent
        )
        session_room = self._limits.max_all_tokens - num_other_tokens - length
        if session_room < 1:
            raise self._limit_error(
                "episode_max_all_tokens",
                f"its conversations have had the {self._limits.max_all_tokens} tokens that fit "
                "into one micro-batch",
            )
        return min(room, conversation_room, session_room)

    def _earlier_turn(self, messages: list[Message], tools: Tools) -> TreeTurn | None:
        """Returns the finished turn whose messages begin the conversation, or None.

        Of several such turns it is the one with the most messages. Among equally long ones, a turn
        without a child is preferred.
        """
        candidates = [
            turn
            for turn in self._turns
            if turn.completion is not None
            and len(turn.messages) < len(messages)
            and turn.tools == tools
            and all(
                _is_same(message, messages[i], is_sampled=i in turn.policy_messages)
                for i, message in enumerate(turn.messages)
            )
        ]
        return max(
            candidates, key=lambda turn: (len(turn.messages), not turn.num_children), default=None
        )

    def _longest_prefix(self, ids: list[int]) -> TreeTurn | None:
        """Returns the finished turn whose tokens are the longest beginning of `ids`, or None."""
        # Tokens are compared, not texts: a policy may sample other tokens than the tokenizer gives
        # for the same text.
        candidates = [turn for turn in self._turns if turn.sampled_ids and turn.is_prefix_of(ids)]
        return max(
            candidates,
            key=lambda turn: (len(turn.token_ids()), not turn.num_children),
            default=None,
        )

    def _too_long_error(self, length: str) -> ApiError:
        """Returns the error for messages of `length` tokens, which the context has no room for."""
        return self._limit_error(
            TOO_LONG,
            f"This model's maximum context length is {self._limits.max_model_len} tokens, and "
            f"the messages have {length}",
        )

    def _limit_error(self, code: str, rule: str) -> ApiError:
        """Returns the error for a turn that a limit refuses, and notes the episode's status."""
        self._refused_status = self._refused_status or LIMITS[code]
        return ApiError(400, code, f"{rule}: return the reward")


def _call_id(turn_key: str, number: int) -> str:
    """Returns the id of the turn's tool call with this number; it follows from the turn's key."""
    # Nine letters and digits: every template that writes ids accepts such an id.
    return hashlib.blake2b(f"{turn_key}.{number}".encode()).hexdigest()[:9]


def _longest(leaves: Sequence[TreeTurn]) -> TreeTurn | None:
    """Returns the leaf with the most messages, which ends the longest conversation, or None."""
    return max(leaves, key=lambda leaf: len(leaf.messages), default=None)


def _is_same(stored: Message, received: Message, *, is_sampled: bool) -> bool:
    """Returns whether a client sent back the stored message.

    The received message may lack the ids of calls and, if the policy sampled it, the thinking. If
    they are there, they must be equal to the stored ones.
    """
    known_calls = stored.get("tool_calls") or []
    calls = received.get("tool_calls") or []
    if len(calls) != len(known_calls):
        return False
    thinking = {"reasoning_content": stored.get("reasoning_content")} if is_sampled else {}
    calls = [
        {"id": known_call.get("id"), **call}
        for known_call, call in zip(known_calls, calls, strict=True)
    ]
    return _comparable(stored) == _comparable({**thinking, **received, "tool_calls": calls})


def _comparable(message: Message) -> Message:
    """Returns a message in a form that `==` can compare: without empty fields, calls as tuples."""
    calls = [
        (call.get("id"), call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return {name: value for name, value in {**message, "tool_calls": calls}.items() if value}


def _canonical(arguments: Any) -> str:
    """Returns the arguments of a call as JSON text, the same for a dict and for its JSON text.

    Texts are compared because NaN is not equal to itself. In requests, arguments that are no JSON
    object are text.
    """
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return json.dumps(arguments, sort_keys=True)
