"""This module parses a turn of the policy with transformers' response templates.

A response template describes how a chat template writes thinking, calls and text. A *call* is a
tool call in a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from grpo_spmd.episodes.openai_api import is_plain
from grpo_spmd.records import Fields, Message

# The known formats of calls, as data.
_FORMATS = Path(__file__).with_name("call_formats.yaml")
# What transformers' parsers raise for text that they cannot read. Deep nesting: RecursionError.
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
# The beginning of a turn is searched in this many tokens before it, and then in all of them.
_NUM_TAIL_TOKENS = 256


@dataclass(frozen=True)
class Parsed:
    """The parsed message of a turn."""

    message: Message
    """role, content, reasoning_content (thinking: gpt-oss) and tool_calls, if there are any:
    {type, function: {name, arguments}, id?} with a dict of arguments."""
    num_invalid: int
    """The number of calls that do not parse; they stay in the text."""


class ReplyParser:
    """Parses with the tokenizer's `response_template`, or with a known format of its chat
    template."""

    def __init__(
        self, tokenizer: Any, anchors: list[str], ends: list[str], *, reads_calls: bool = True
    ) -> None:
        """`anchors` are texts that come before a turn. `ends` are texts of tokens that end one.
        Without `reads_calls` the text of a call is ordinary text."""
        self._tokenizer = tokenizer
        self._ends = ends
        template = getattr(tokenizer, "response_template", None)
        self._template = template or _response_template(str(tokenizer.chat_template), anchors, ends)
        fields = dict(self._template.get("fields", {}))
        # In a conversation without tools nobody answers calls.
        if not reads_calls:
            fields.pop("tool_calls", None)
            self._template = {**self._template, "fields": fields}
        calls = fields.get("tool_calls", {})
        literals = map(re.escape, _as_list(calls.get("open")))
        pattern = calls.get("open_pattern") or "|".join(literals)
        self._call_begin = re.compile(pattern or "(?!)", re.DOTALL)

    def parse(
        self, token_ids: list[int], context_ids: list[int], tools: Sequence[Fields]
    ) -> Parsed:
        """Returns the message of a turn. Never raises for any text of the policy."""
        # Special tokens stay in the text, because response templates search for them.
        text = decode(self._tokenizer, token_ids)
        prefix = self._prefix(context_ids)
        message: Message | None
        try:
            message, calls, num_invalid = self._read(text, prefix, tools)
        except _UNREADABLE:
            message, calls, num_invalid = self._read_calls_alone(text, prefix, tools)
        # Without a readable call, the whole text stays the content, so that nothing gets lost.
        if message is None or (num_invalid and not calls):
            content = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
            message = {"content": content}
        message = {"role": "assistant", "content": "", **message}
        return Parsed({**message, "tool_calls": calls} if calls else message, num_invalid)

    def _read_calls_alone(
        self, text: str, prefix: str, tools: Sequence[Fields]
    ) -> tuple[Fields | None, list[Fields], int]:
        """Returns (message, calls, number of unreadable calls), with each call read separately.

        One unreadable call would otherwise make the whole turn unreadable. The message is None if
        no call can be read.
        """
        begins = [match.start() for match in self._call_begin.finditer(text)]
        message: Message = {}
        calls: list[Fields] = []
        num_invalid = 0
        # The text before the first call may have thinking and content; it is read on its own.
        try:
            message, _, _ = self._read(text[: begins[0]] if begins else text, prefix, tools)
        except _UNREADABLE:
            # A text without a visible call may hide one call.
            num_invalid += not begins
        # Each call reaches to the beginning of the next one.
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
            try:
                _, new_calls, num_new_invalid = self._read(text[begin:end], "", tools)
            except _UNREADABLE:
                num_invalid += 1
            else:
                calls += new_calls
                num_invalid += num_new_invalid
        return message if calls else None, calls, num_invalid

    def _read(
        self, text: str, prefix: str, tools: Sequence[Fields]
    ) -> tuple[Fields, list[Fields], int]:
        """Returns (message without calls, calls in the form of templates and tools, number of
        invalid calls)."""
        message: Message = self._tokenizer.parse_response(
            text, self._template, prefix=prefix, tools=[*tools] or None
        )
        content = message.get("content")
        if not isinstance(content, str):
            content = "" if content is None else json.dumps(content)
        # The parser may leave a turn's end token in the content.
        for end in self._ends:
            content = content.removesuffix(end)
        raw_calls = message.pop("tool_calls", None) or []
        if not isinstance(raw_calls, list):
            raw_calls = [raw_calls]
        calls = [call for call in map(_read_call, raw_calls) if call is not None]
        return {**message, "content": content}, calls, len(raw_calls) - len(calls)

    def _prefix(self, context_ids: list[int]) -> str:
        """Returns the text before a turn, as far as the parser needs it.

        A long context is not decoded as a whole if its end is enough.
        """
        tail = decode(self._tokenizer, context_ids[-_NUM_TAIL_TOKENS:])
        if any(anchor in tail for anchor in _as_list(self._template.get("start_anchor"))):
            return tail
        return decode(self._tokenizer, context_ids)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens, with special tokens and with every blank."""
    text = tokenizer.decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _response_template(chat_template: str, anchors: list[str], ends: list[str]) -> Fields:
    """Returns the response template for the first format that fits the chat template."""
    # The last format has no words, and fits every template.
    formats = yaml.safe_load(_FORMATS.read_text(encoding="utf-8"))
    fields = next(
        form["fields"] for form in formats if all(word in chat_template for word in form["words"])
    )
    content = dict(fields["content"])
    if "close_pattern" not in content and ends:
        content["close_pattern"] = rf"(?:{'|'.join(map(re.escape, ends))})\s*"
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchors,
        "fields": {**fields, "content": content},
    }


class _Function(msgspec.Struct):
    """The form that a call's name and arguments must have."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: Fields | str | None = None


def _read_call(raw_call: Any) -> Fields | None:
    """Returns a tool call in the form that chat templates and tools expect, or None if `raw_call`
    is no valid call."""
    try:
        function = msgspec.convert(raw_call.get("function", raw_call), _Function)
        arguments: Any = function.arguments
        # Some formats have the arguments as JSON inside of JSON.
        if isinstance(arguments, str):
            arguments = msgspec.convert(json.loads(arguments), Fields | None)
    except (ValueError, AttributeError, RecursionError):
        return None
    arguments = arguments or {}
    # Templates walk through arguments by recursion, so they must not be too deep.
    if not is_plain([function.name, arguments]):
        return None
    ids = {"id": raw_call["id"]} if isinstance(raw_call.get("id"), str) else {}
    return {"type": "function", **ids, "function": {"name": function.name, "arguments": arguments}}
