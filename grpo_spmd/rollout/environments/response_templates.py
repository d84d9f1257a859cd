"""How calls are read from what policies write, in the words of transformers' response templates. Data only: of each
format what the chat templates that use it contain, and its fields. The field `content` ends with the template's turns.
"""

from __future__ import annotations

from typing import Any

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
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
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
