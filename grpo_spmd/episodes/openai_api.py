"""Chat completions of the OpenAI protocol: what a request's body asks for, and the bodies that answer it.

An agent writes the requests, so a body is hostile until read here. What would change how tokens are sampled cannot be
done, for the logprobs would not be the policy's: it is ignored with a warning where the answer keeps its form, and
refused by name where it would not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

Message = dict[str, Any]

_MAX_DEPTH, _MAX_VALUES = 32, 100_000  # of tools and arguments: templates walk through them
_NOT_PLAIN = f"has more than {_MAX_DEPTH} levels or {_MAX_VALUES} values, or a text that is not valid Unicode"
_MAX_TOOLS = 128
_ROLES = ("system", "developer", "user", "assistant", "tool")
_READ = (
    "model",
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
)
_SAYS_NOTHING = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
_IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "parallel_tool_calls", "reasoning_effort", "verbosity",
)  # fmt: skip
# What others may say without asking for anything.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([],),
    "logprobs": (False,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "parallel_tool_calls": (True,),
}


class ApiError(ValueError):
    """A request that is answered with an error: the HTTP status, a code for programs, a line for people."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Options:
    """What a request says beside its conversation."""

    max_tokens: int | None = None  # of the answer at most; None: as many as there is room for
    is_stream: bool = False
    streams_usage: bool = False
    ignored: tuple[str, ...] = ()  # names of options that were given and change nothing


@dataclass(frozen=True)
class Asked:
    """One request for a chat completion, in the form that chat templates take."""

    messages: list[Message]
    """Texts of several parts are joined, null is "", the arguments of tool calls are dicts; keys that a template does
    not know are gone."""
    tools: list[dict[str, Any]]
    options: Options


def read_request(body: bytes, model: str) -> Asked:
    """Raises ApiError for what is no request, and for what cannot be done for it."""
    try:
        found = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        _refuse("the body is not JSON")
    if not isinstance(found, dict):
        _refuse("the body is not a JSON object")
    given = {name: value for name, value in found.items() if value is not None}
    if given.get("model", model) != model:
        raise ApiError(
            404,
            "model_not_found",
            f"there is one model here, {model!r}; got {given['model']!r:.100}",
        )
    options = _options(given)
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > _MAX_TOOLS:
        _refuse(f"`tools` must be a list of at most {_MAX_TOOLS}")
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("`messages` must be a list of at least one message")
    return Asked(
        [_message(message, f"messages[{i}]") for i, message in enumerate(messages)], tools, options
    )


def completion_body(
    name: str,
    created: int,
    model: str,
    message: Message,
    finish_reason: str,
    usage: Mapping[str, int],
) -> bytes:
    choice = {
        "index": 0,
        "message": _on_the_wire(message),
        "logprobs": None,
        "finish_reason": finish_reason,
    }
    common = {"id": name, "object": "chat.completion", "created": created, "model": model}
    return json.dumps({**common, "choices": [choice], "usage": usage}).encode()


def stream_body(
    name: str,
    created: int,
    model: str,
    message: Message,
    finish_reason: str,
    usage: Mapping[str, int] | None,
) -> bytes:
    """The whole message as one delta: the engine hands over whole turns."""
    common = {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}
    delta = _on_the_wire(message)
    delta["tool_calls"] = [
        {"index": i, **call} for i, call in enumerate(delta.pop("tool_calls", []))
    ] or None
    chunks: list[dict[str, Any]] = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
    ]
    if usage is not None:
        chunks.append({**common, "choices": [], "usage": usage})
    return (
        b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks)
        + b"data: [DONE]\n\n"
    )


def error_body(status: int, code: str, why: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return json.dumps(
        {"error": {"message": why, "type": kind, "param": None, "code": code}}
    ).encode()


def models_body(model: str) -> bytes:
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "grpo_spmd"}
    return json.dumps({"object": "list", "data": [entry]}).encode()


def _on_the_wire(message: Message) -> Message:
    """As the protocol has it: arguments as JSON text, no content beside calls as null."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _json_text(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    written: Message = {"role": "assistant", "content": None if calls and not content else content}
    if message.get("reasoning_content"):
        written["reasoning_content"] = message["reasoning_content"]
    return written | ({"tool_calls": calls} if calls else {})


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _options(given: Mapping[str, Any]) -> Options:
    for name, value in given.items():
        if name in _READ + _SAYS_NOTHING + _IGNORED or value in _NEUTRAL.get(name, ()):
            continue
        raise ApiError(
            400,
            "unsupported_parameter",
            f"`{name:.100}`={value!r:.100} is not done here; leave it out",
        )
    is_stream, with_usage = given.get("stream", False), False
    if not isinstance(is_stream, bool):
        _refuse("`stream` must be true or false")
    if (of_stream := given.get("stream_options")) is not None:
        with_usage = isinstance(of_stream, dict) and of_stream.get("include_usage") is True
    limits = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    for limit in limits:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            _refuse(f"`max_tokens` must be a whole number from 1 on; got {limit!r:.100}")
    return Options(
        max_tokens=min(limits, default=None),
        is_stream=is_stream,
        streams_usage=with_usage,
        ignored=tuple(
            name for name in _IGNORED if name in given and given[name] not in _NEUTRAL.get(name, ())
        ),
    )


def _message(found: Any, where: str) -> Message:
    if not isinstance(found, dict):
        _refuse(f"{where} must be an object")
    role = found.get("role")
    if role not in _ROLES:
        _refuse(f"{where}.role must be one of {', '.join(_ROLES)}; got {role!r:.100}")
    message: Message = {"role": role, "content": _content(found.get("content"), where)}
    optional = {"assistant": ("reasoning_content", "name"), "tool": ("tool_call_id", "name")}.get(
        role, ("name",)
    )
    for name in optional:
        if found.get(name):
            message[name] = _text(found[name], f"{where}.{name}")
    if role == "assistant" and (calls := found.get("tool_calls")):
        if not isinstance(calls, list):
            _refuse(f"{where}.tool_calls must be a list")
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return message


def _content(found: Any, where: str) -> str:
    if found is None:
        return ""
    if not isinstance(found, list):
        return _text(found, f"{where}.content")
    texts = []
    for part in found:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            _refuse(f"{where}.content may hold parts of type 'text' only; got {kind!r:.100}")
        texts.append(_text(part.get("text"), f"{where}.content"))
    return "".join(texts)


def _call(found: Any, where: str) -> dict[str, Any]:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict):
        _refuse(f"{where}.function must be an object")
    call = {
        "type": "function",
        "function": {
            "name": _text(function.get("name"), f"{where}.function.name"),
            "arguments": _arguments(function),
        },
    }
    return call | ({"id": _text(found["id"], f"{where}.id")} if found.get("id") is not None else {})


def _arguments(function: Mapping[str, Any]) -> Any:
    """A dict, where the text is one in JSON; else the text."""
    given = function.get("arguments")
    if isinstance(given, str):
        text = _text(given, "arguments")
        try:
            given = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return text
        return given if isinstance(given, dict) and is_plain(given) else text
    if not is_plain(given):
        _refuse(f"`arguments` {_NOT_PLAIN}")
    return given if isinstance(given, dict) else {}


def _check_tool(found: Any, where: str) -> None:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict) or found.get("type") != "function":
        _refuse(f"{where} must be an object of type 'function'")
    _text(function.get("name"), f"{where}.function.name")
    if not is_plain(found):
        _refuse(f"{where} {_NOT_PLAIN}")


def is_plain(value: Any) -> bool:
    """Whether it is neither too deep nor too much for those who walk through it by recursion, and all its texts are."""
    waiting, num_values = [(value, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        if (
            depth > _MAX_DEPTH
            or num_values > _MAX_VALUES
            or (isinstance(value, str) and not _is_unicode(value))
        ):
            return False
        if isinstance(value, dict):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            waiting += [(part, depth + 1) for part in value]
    return True


def _is_unicode(text: str) -> bool:
    """False where it has half of a pair, escaped in the JSON: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        _refuse(f"{where} must be a text; got {type(value).__name__}")
    if not _is_unicode(value):
        _refuse(f"{where} is not valid Unicode")
    return value


def _refuse(why: str) -> NoReturn:
    raise ApiError(400, "invalid_request", why)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def num_chars(messages: Sequence[Message]) -> int:
    """Characters that are in the context whatever the template adds."""
    return sum(len(message["content"]) for message in messages)
