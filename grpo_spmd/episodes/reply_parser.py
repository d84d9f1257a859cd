"""This module parses a turn of the policy with transformers' response templates.

A response template describes how a model writes thinking, tool calls and text in a turn. A *call*
is a tool call in a turn.
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

# The known formats in which models write calls.
_FORMATS = Path(__file__).with_name("call_formats.yaml")
# What transformers' parsers raise for text that they cannot read; RecursionError for deep nesting.
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
# The text after which a turn begins is searched in this many tokens before the turn, and only then
# in all tokens before it.
_NUM_TAIL_TOKENS = 256


@dataclass(frozen=True)
class Parsed:
    """The parsed message of a turn of the policy, and how many of its tool calls are invalid."""

    message: Message
    """role, content and, if there are any, reasoning_content (with gpt-oss: thinking) and
    tool_calls. A call is {type, function: {name, arguments}, id?}, and its arguments are a dict."""
    num_invalid: int
    """The number of calls that do not parse. If no call parses, all of the turn's text is its
    content; otherwise the invalid calls are left out."""


class ReplyParser:
    """Parses turns with the tokenizer's `response_template`, or else with the known format that
    fits its chat template."""

    def __init__(
        self, tokenizer: Any, anchors: list[str], ends: list[str], *, reads_calls: bool = True
    ) -> None:
        """`anchors` are the texts after which a turn begins, `ends` the texts of the tokens that
        end a turn. Without `reads_calls` the text of a call is ordinary text."""
        self._tokenizer = tokenizer
        self._ends = ends
        template = getattr(tokenizer, "response_template", None)
        self._template = template or _response_template(str(tokenizer.chat_template), anchors, ends)
        fields = dict(self._template.get("fields", {}))
        # In a conversation without tools nobody answers calls.
        if not reads_calls:
            fields.pop("tool_calls", None)
            self._template = {**self._template, "fields": fields}
        # How a call begins in a turn, as a regular expression; "(?!)" matches nothing.
        calls = fields.get("tool_calls", {})
        literals = map(re.escape, _as_list(calls.get("open")))
        pattern = calls.get("open_pattern") or "|".join(literals)
        self._call_begin = re.compile(pattern or "(?!)", re.DOTALL)

    def parse(
        self, token_ids: list[int], context_ids: list[int], tools: Sequence[Fields]
    ) -> Parsed:
        """Returns the parsed message of the turn `token_ids`, sampled after `context_ids`.

        Never raises, whatever the policy has written.
        """
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
        """Returns (message, calls, number of unreadable calls), after reading each call on its own.

        Read together, one unreadable call makes the whole turn unreadable. The message is None if
        no call can be read.
        """
        begins = [match.start() for match in self._call_begin.finditer(text)]
        message: Message = {}
        calls = []
        num_invalid = 0
        # The text before the first call, which may have thinking and content.
        try:
            message, _, _ = self._read(text[: begins[0]] if begins else text, prefix, tools)
        except _UNREADABLE:
            # Without a recognized beginning of a call, the unreadable text counts as one call.
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
        """Returns (message without its calls, valid calls, number of invalid calls).

        The calls have the form that chat templates and tools take. `prefix` is text before the
        turn. Raises one of _UNREADABLE.
        """
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
        """Returns the text before a turn, or its end if that has all that the parser needs.

        So a long context is rarely decoded as a whole.
        """
        tail = decode(self._tokenizer, context_ids[-_NUM_TAIL_TOKENS:])
        if any(anchor in tail for anchor in _as_list(self._template.get("start_anchor"))):
            return tail
        return decode(self._tokenizer, context_ids)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens, including special tokens and all blanks."""
    text = tokenizer.decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


def _as_list(value: str | list[str] | None) -> list[str]:
    """Returns an entry of a response template (one text, a list of texts, or None) as a list."""
    return [value] if isinstance(value, str) else value or []


def _response_template(chat_template: str, anchors: list[str], ends: list[str]) -> Fields:
    """Returns a response template for the first known format that fits the chat template."""
    # The last format has no words, so it fits every template.
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
    """The form that the name and the arguments of a tool call must have."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: Fields | str | None = None


def _read_call(raw_call: Any) -> Fields | None:
    """Returns a tool call in the form that chat templates and tools expect, or None if `raw_call`
    is no valid call."""
    try:
        function = msgspec.convert(raw_call.get("function", raw_call), _Function)
        arguments: Any = function.arguments
        # Some formats write the arguments as a JSON string inside of JSON.
        if isinstance(arguments, str):
            arguments = msgspec.convert(json.loads(arguments), Fields | None)
    except (ValueError, AttributeError, RecursionError):
        return None
    arguments = arguments or {}
    # Templates walk through arguments by recursion, so deep arguments are refused.
    if not is_plain([function.name, arguments]):
        return None
    ids = {"id": raw_call["id"]} if isinstance(raw_call.get("id"), str) else {}
    return {"type": "function", **ids, "function": {"name": function.name, "arguments": arguments}}
