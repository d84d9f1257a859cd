"""This module reads request bodies and writes answer bodies of OpenAI's chat completions.

An agent writes the requests, so a body may be hostile until `read_request` has checked it. Options
that change how tokens are sampled cannot be honoured, because the logprobs would then not be the
policy's. If such an option does not change the form of the answer (temperature), it is ignored with
a warning; otherwise (n, stop) the request is refused, with the option's name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from grpo_spmd.records import Fields, Message

# The name of the one model that agents may request.
MODEL = "policy"
# Chat templates walk through tools and arguments by recursion, so their depth is bounded.
_MAX_DEPTH = 32
_MAX_VALUES = 100_000
_NOT_PLAIN = (
    f"has more than {_MAX_DEPTH} levels or {_MAX_VALUES} values, "
    "or a text that is not valid Unicode"
)
# Options that are ignored silently, because they have no effect on the answer.
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
# Options that are ignored with a warning.
_IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "parallel_tool_calls", "reasoning_effort", "verbosity",
)  # fmt: skip
# Options that change the form of the answer, with the values at which they do not. Other values are
# refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([],),
    "logprobs": (False,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}

# OpenAI's own error code for a context that is too long.
TOO_LONG = "context_length_exceeded"
# By error code: the status of an episode in which a turn is refused because of a limit.
LIMITS = {
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_max_all_tokens": "context_overflow",
    TOO_LONG: "context_overflow",
}


class ApiError(ValueError):
    """The error that answers a request: its HTTP status, a code for programs, and one line of
    text."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """One request for a chat completion, in the form that chat templates take."""

    messages: list[Message]
    """The messages. Text parts are joined, null is "", unknown keys are dropped, and the arguments
    of calls are dicts (or text that is no JSON object)."""
    tools: list[Fields]
    max_tokens: int | None
    """The most tokens of the answer; None means as many as there is room for."""
    is_stream: bool
    streams_usage: bool
    """True if a streamed answer has the token counts in its last event."""
    ignored: list[str]
    """The names of the request's options that are ignored with a warning."""


# The form that a body must have. msgspec ignores unknown keys; `read_request` refuses unknown
# options of the body itself.


class _Function(msgspec.Struct):
    """The function that a call names, or that a tool is; more keys of a tool are not read here."""

    name: str
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    """A tool call in an assistant's message."""

    function: _Function
    id: str | None = None


class _TextPart(msgspec.Struct):
    """A part of a message's content; parts that are not text are refused."""

    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Tool(msgspec.Struct):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: _Function


class _StreamOptions(msgspec.Struct):
    """The options of a streamed answer."""

    include_usage: bool | None = False


_Limit = Annotated[int, msgspec.Meta(ge=1)] | None


class _Body(msgspec.Struct, kw_only=True):
    """The options of a chat completion request that are honoured."""

    model: Any = MODEL
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=128)] = []
    max_tokens: _Limit = None
    max_completion_tokens: _Limit = None
    stream: bool = False
    stream_options: _StreamOptions = msgspec.field(default_factory=_StreamOptions)


_KNOWN = {*_Body.__struct_fields__, *_WITHOUT_EFFECT, *_IGNORED}


def read_request(body: bytes) -> ChatRequest:
    """Returns the request in `body`.

    Raises ApiError for a malformed body and for options that cannot be honoured.
    """
    try:
        fields = msgspec.json.decode(body, type=Fields)
        # Clients write null for options that are not set.
        fields = {name: value for name, value in fields.items() if value is not None}
        for name, value in fields.items():
            # An unknown option is refused by name, unless its value has no effect.
            if name not in _KNOWN and value not in _NEUTRAL.get(name, ()):
                raise ApiError(
                    400,
                    "unsupported_parameter",
                    f"`{name:.100}`={value!r:.100} is not supported; leave it out",
                )
        request = msgspec.convert(fields, _Body)
        if request.model != MODEL:
            raise ApiError(
                404,
                "model_not_found",
                f"there is one model here, {MODEL!r}; got {request.model!r:.100}",
            )
    except ApiError:
        raise
    # msgspec reports malformed JSON and wrong types as ValueError, deep nesting as RecursionError.
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is not a chat completion request: {error!s:.200}") from None
    # The template gets the tools as they came, with all of their keys (`request` has only some).
    tools = fields.get("tools", [])
    for number, tool in enumerate(tools):
        if not is_plain(tool):
            raise _invalid(f"tools[{number}] {_NOT_PLAIN}")
    # Clients use both names of the limit. If a request has both, the smaller one applies.
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit]
    return ChatRequest(
        messages=[_template_message(message) for message in request.messages],
        tools=tools,
        max_tokens=min(limits, default=None),
        is_stream=request.stream,
        streams_usage=bool(request.stream_options.include_usage),
        ignored=[name for name in _IGNORED if name in fields],
    )


def _template_message(message: _Message) -> Message:
    """Returns a message in the form that chat templates take."""
    content = message.content or ""
    if isinstance(content, list):
        content = "".join(text_part.text for text_part in content)
    fields: Message = {"role": message.role, "content": content}
    for name in ("reasoning_content", "tool_call_id", "name"):
        value = getattr(message, name)
        if value:
            fields[name] = value
    if message.role == "assistant" and message.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
                **({} if call.id is None else {"id": call.id}),
            }
            for call in message.tool_calls
        ]
    return fields


def _arguments(arguments: Any) -> Any:
    """Returns a call's arguments as a dict. Text that is no JSON object stays text.

    Raises ApiError for arguments that are nested too deeply or too large.
    """
    if not isinstance(arguments, str):
        if not is_plain(arguments):
            raise _invalid(f"`arguments` {_NOT_PLAIN}")
        # Templates need a dict, so any other JSON value becomes an empty one.
        return arguments if isinstance(arguments, dict) else {}
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        # Text that is no JSON stays text, so that the message, when an agent sends it again, is
        # still equal to the one before.
        return arguments
    return decoded if isinstance(decoded, dict) and is_plain(decoded) else arguments


def _invalid(message: str) -> ApiError:
    """Returns the error for a malformed request."""
    return ApiError(400, "invalid_request", message)


def is_plain(value: Any) -> bool:
    """Returns whether a JSON value is small, shallow enough for recursion, and valid Unicode."""
    # With a stack of values, since deep nesting would break recursion.
    waiting = [(value, 0)]
    num_values = 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        if depth > _MAX_DEPTH or num_values > _MAX_VALUES:
            return False
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                # A single surrogate, which no tokenizer takes.
                return False
        elif isinstance(value, dict):
            waiting += [(child, depth + 1) for pair in value.items() for child in pair]
        elif isinstance(value, list):
            waiting += [(child, depth + 1) for child in value]
    return True


def num_chars(messages: Sequence[Message]) -> int:
    """Returns the number of characters in the messages' contents, which is a lower bound for the
    rendered conversation."""
    return sum(len(str(message.get("content") or "")) for message in messages)


# Answer bodies.


def completion_body(message: Message, finish_reason: str, usage: Mapping[str, int]) -> bytes:
    """Returns the JSON body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": _wire_message(message),
        "logprobs": None,
        "finish_reason": finish_reason,
    }
    header = _header("chat.completion")
    return json.dumps({**header, "choices": [choice], "usage": usage}).encode()


def stream_body(
    message: Message, finish_reason: str, usage: Mapping[str, int] | Literal[False]
) -> bytes:
    """Returns the body of a streamed answer: server-sent events, with the whole message as one
    delta, since the engine returns whole turns. `usage` is False if no token counts are wanted."""
    delta = _wire_message(message)
    calls = delta.pop("tool_calls", [])
    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)] or None
    chunks: list[Fields] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
    ]
    if usage:
        chunks.append({"choices": [], "usage": usage})
    header = _header("chat.completion.chunk")
    events = [json.dumps({**header, **chunk}) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


def error_body(error: ApiError) -> bytes:
    """Returns the JSON body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return json.dumps({"error": fields}).encode()


def models_body() -> bytes:
    """Returns the JSON body of the list of models, which has one entry."""
    entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo_spmd"}
    return json.dumps({"object": "list", "data": [entry]}).encode()


def _header(kind: str) -> Fields:
    """Returns the fields with which each answer of this kind begins; the id is new each time."""
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
    }


def _wire_message(message: Message) -> Message:
    """Returns a message in the protocol's form: arguments are JSON text, and the empty content of a
    message with calls is null."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    content = message.get("content") or ""
    fields: Message = {"role": "assistant", "content": None if calls and not content else content}
    if message.get("reasoning_content"):
        fields["reasoning_content"] = message["reasoning_content"]
    return {**fields, "tool_calls": calls} if calls else fields
