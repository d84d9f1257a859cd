"""Chat messages as templates take them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_spmd.rollout.environments.plain_text import Span, TemplateError

Message = dict[str, Any]
_FIELDS = {
    "role", "type", "content", "text", "name", "tool_call_id", "tool_calls", "id", "function", "arguments",
    "reasoning_content", "thinking",
}  # fmt: skip


def name_of(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else str(content)


def call_id(number: int) -> str:
    return f"call{number:05d}"  # nine letters and digits, which Mistral's templates insist on


def called(new: Message, said: Message, otherwise: str) -> str:
    """The name of the tool that a message answers: gpt-oss writes the turn's, not the message's."""
    calls = said.get("tool_calls") or [{}]
    return str(new.get("name") or calls[0].get("function", {}).get("name") or otherwise)


def complete(messages: Sequence[Message]) -> list[Message]:
    """With ids for calls that have none, and the same in their results; contents that are nothing else are text."""
    found, ids = list[Message](), list[str]()
    for message in messages:
        made = dict(message)
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [{"id": call_id(number), **call} for number, call in enumerate(calls)]
            ids = [str(call["id"]) for call in made["tool_calls"]]
        if made["role"] == "tool":
            made.setdefault("tool_call_id", ids.pop(0) if ids else call_id(0))
            if not isinstance(made.get("content"), str | list):
                made["content"] = str(made.get("content"))
        found.append(made)
    return found


def mapped(message: Any, change: Callable[[str], str]) -> Any:
    """The same with each string in it changed, in their order, but for roles and the names of its fields."""
    if isinstance(message, str):
        return change(message)
    if isinstance(message, Mapping):
        return {
            (name if name in _FIELDS else change(name)): value if name in ("role", "type") else mapped(value, change)
            for name, value in message.items()
        }
    if isinstance(message, list | tuple):
        return [mapped(value, change) for value in message]
    return message


def form_of(slot: str, frame: str, text: str) -> str:
    """What stands in `text` where `frame` has the slot."""
    parts = frame.split(slot)
    length = (len(text) - sum(map(len, parts))) // (len(parts) - 1)
    form = text[len(parts[0]) : len(parts[0]) + max(length, 0)]
    if form.join(parts) != text:
        raise TemplateError("the chat template looks into a message that has the text of special tokens in it")
    return form


def moved(data: Sequence[Span], begin: int) -> list[Span]:
    return [(first - begin, last - begin) for first, last in data]
