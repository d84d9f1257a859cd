"""What a turn of the policy says, by transformers' response templates."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_spmd.episodes.openai_api import is_plain

# What transformers' parsers raise for text that is not what they look for. Nesting without end is RecursionError.
_UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
_TAIL = 256  # tokens before a turn that its beginning is looked for in, before all of them are


@dataclass(frozen=True)
class Parsed:
    message: dict[str, Any]
    """role, content, reasoning_content (thinking: gpt-oss) and tool_calls, if any: {type, function: {name, arguments},
    id?} with a dict of arguments."""
    num_invalid: int
    """Calls that do not parse; they are in nothing but the text."""


class ReplyParser:
    """Of the tokenizer's own `response_template`, else of one that the words of its chat template show."""

    def __init__(
        self, tokenizer: Any, anchors: list[str], ends: list[str], *, reads_calls: bool = True
    ) -> None:
        """`anchors`: texts that a turn begins behind; `ends`: those of tokens that end one. Without `reads_calls` what
        looks like a call is text like any other."""
        self._tokenizer, self._ends = tokenizer, ends
        self._template = getattr(tokenizer, "response_template", None) or _template_for(
            str(tokenizer.chat_template), anchors, ends
        )
        fields = self._template.get("fields", {})
        if not reads_calls:
            fields = {name: field for name, field in fields.items() if name != "tool_calls"}
            self._template = {**self._template, "fields": fields}
        calls = fields.get("tool_calls", {})
        opens = calls.get("open", [])
        literals = [opens] if isinstance(opens, str) else opens
        self._open = re.compile(
            calls.get("open_pattern") or "|".join(map(re.escape, literals)) or "(?!)", re.DOTALL
        )
        self.has_calls = bool(calls)

    def parse(
        self, token_ids: list[int], context_ids: list[int], tools: Sequence[dict[str, Any]]
    ) -> Parsed:
        """Never raises for what the policy wrote."""
        text, before = self._text(token_ids), self._before(context_ids)
        try:
            message = self._read(text, before, tools)
            calls, num_invalid = _checked(message)
        except _UNREADABLE:
            return self._apart(token_ids, text, before, tools)
        if num_invalid and not calls:
            message = {"role": "assistant", "content": self._shown(token_ids)}
        return Parsed(_with_calls(message, calls), num_invalid)

    def _apart(
        self, token_ids: list[int], text: str, before: str, tools: Sequence[dict[str, Any]]
    ) -> Parsed:
        """One call that cannot be read makes a turn unreadable: each is read by itself."""
        begins = [found.start() for found in self._open.finditer(text)]
        message: dict[str, Any] = {}
        calls, num_invalid = list[dict[str, Any]](), 0
        try:
            message = self._read(text[: begins[0]] if begins else text, before, tools)
        except _UNREADABLE:
            num_invalid += not begins  # what cannot be read has no call in it that is seen
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
            try:
                found, wrong = _checked(self._read(text[begin:end], "", tools))
            except _UNREADABLE:
                found, wrong = [], 1
            calls += found
            num_invalid += wrong
        if not calls:
            message = {"role": "assistant", "content": self._shown(token_ids)}
        return Parsed(_with_calls(message, calls), num_invalid)

    def _read(self, text: str, before: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found = self._tokenizer.parse_response(
            text, self._template, prefix=before, tools=[*tools] or None
        )
        message: dict[str, Any] = {"role": "assistant", **found}
        if not isinstance(content := message.get("content"), str):
            message["content"] = content = "" if content is None else json.dumps(content)
        for end in self._ends:
            message["content"] = content = content.removesuffix(end)
        return message

    def _shown(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _text(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _before(self, context_ids: list[int]) -> str:
        """The text before a turn, as far as the parser looks at it; a long context is not decoded for that."""
        tail, anchor = self._text(context_ids[-_TAIL:]), self._template.get("start_anchor")
        anchors = [anchor] if isinstance(anchor, str) else anchor or []
        return tail if any(text in tail for text in anchors) else self._text(context_ids)


def _template_for(chat_template: str, anchors: list[str], ends: list[str]) -> dict[str, Any]:
    fields = dict(fields_for(chat_template) or PLAIN)
    content = dict(fields["content"])
    if "close_pattern" not in content and ends:
        content["close_pattern"] = rf"(?:{'|'.join(map(re.escape, ends))})\s*"
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchors,
        "fields": {**fields, "content": content},
    }


def _checked(message: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Calls of the form that templates and tools take, and the number of the others."""
    found = message.get("tool_calls") or []
    calls = [_call(call) for call in (found if isinstance(found, list) else [found])]
    good = [call for call in calls if call is not None]
    return good, len(calls) - len(good)


def _call(call: Any) -> dict[str, Any] | None:
    if not isinstance(call, dict):
        return None
    function = call.get("function", call)
    if (
        not isinstance(function, dict)
        or not isinstance(name := function.get("name"), str)
        or not name
    ):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        return None
    if not is_plain([name, arguments]):  # too deep for those who walk through it by recursion
        return None
    ids = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **ids, "function": {"name": name, "arguments": arguments}}


def _with_calls(message: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", **message}
    message.pop("tool_calls", None)
    return message | ({"tool_calls": calls} if calls else {})


# How calls are read from what policies write, in the words of transformers' response templates. Data only: of each
# format what the chat templates that use it contain, and its fields. The field `content` ends with the template's turns.


_THINK = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
PLAIN: dict[str, Any] = {"reasoning_content": _THINK, "content": {"content": "text"}}
"""Of a template that has no tools: nothing is a call."""

FORMATS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (  # gpt-oss: a channel for thinking, one for calls, one for the answer
        ("<|channel|>", "<|call|>", "functions."),
        {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"(?:<\|end\|>|<\|return\|>)\s*(?:<\|start\|>assistant)?",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r"to=functions\.(?P<name>[^\s<]+)\s*<\|channel\|>commentary[^<]*<\|message\|>",
                "close_pattern": r"<\|call\|>\s*",
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "content": {
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"(?:<\|return\|>|<\|end\|>)\s*",
                "content": "text",
            },
        },
    ),
    (  # Qwen3-Coder, Qwen3.5, Nemotron 3: tags for each argument, whose values are typed by the tools' schemas
        ("<tool_call>", "<function=", "<parameter="),
        {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
                    "value_parser": {"name": "text", "args": {"strip": False}},
                },
                "transform": _NAMED_CALL,
            },
            "content": {"content": "text"},
        },
    ),
    (  # GLM 4.5 and later: the same in other words
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                    "value_parser": {"name": "text", "args": {"strip": False}},
                },
                "transform": _NAMED_CALL,
            },
            "content": {"content": "text"},
        },
    ),
    (  # Hermes, Qwen2.5, Qwen3 and many others: an object of JSON in tags
        ("<tool_call>", "</tool_call>", "arguments"),
        {
            "reasoning_content": _THINK,
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    ),
    (  # Mistral: a list of objects
        ("[TOOL_CALLS]", "arguments"),
        {
            "tool_calls": {
                "open": "[TOOL_CALLS]",
                "close_pattern": r"</s>\s*|$",
                "content": "json",
                "transform_each": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{arguments}"},
                },
            },
            "content": {"content": "text"},
        },
    ),
    (  # Llama 3.1 and later: an object in the place of the answer
        ("<|start_header_id|>", "ipython", "parameters"),
        {
            "tool_calls": {
                "open_pattern": r'(?:<\|python_tag\|>)?\{\s*(?:"type":\s*"function",\s*)?'
                r'"name":\s*"(?P<name>[^"]+)",\s*"(?:parameters|arguments)":\s*',
                "close_pattern": r"\}\s*(?:<\|eot_id\|>|<\|eom_id\|>)\s*",
                "repeats": True,
                "content": "json",
                "transform": _NAMED_CALL,
            },
            "content": {"content": "text"},
        },
    ),
)


def fields_for(chat_template: str) -> dict[str, Any] | None:
    """The fields of the first format that the chat template has all words of; None: it has no format of calls that is
    known."""
    for words, fields in FORMATS:
        if all(word in chat_template for word in words):
            return fields
    return None
