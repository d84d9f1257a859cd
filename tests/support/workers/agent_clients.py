"""The stock client of OpenAI against an endpoint, in a process of its own: prints what it saw as
JSON.

python agent_clients.py OPENED, where OPENED is what the endpoint's `open` gave for some sessions,
as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HI: Any = [{"role": "user", "content": "hi"}]


def _client(opened: dict[str, str], kind: Any = openai.OpenAI, **options: Any) -> Any:
    return kind(
        base_url=opened["base_url"],
        api_key=opened["api_key"],
        **{"timeout": 60, "max_retries": 0} | options,
    )


def sync(opened: dict[str, str]) -> dict[str, Any]:
    client, model = _client(opened), opened["model"]
    output = client.chat.completions.create(model=model, messages=HI, tools=TOOLS, max_tokens=5)
    (call,) = output.choices[0].message.tool_calls
    history = [
        *HI,
        output.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    second = client.chat.completions.create(
        model=model, messages=history, tools=TOOLS, temperature=0.3, user="me"
    )
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=HI,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    return {
        "first": [
            output.choices[0].finish_reason,
            call.function.name,
            json.loads(call.function.arguments),
        ],
        "usage": output.usage.model_dump(
            include={"prompt_tokens", "completion_tokens", "total_tokens"}
        ),
        "second": [second.choices[0].message.content, second.choices[0].finish_reason],
        "models": [model.id for model in client.models.list()],
        "streamed": [chunk.choices[0].delta.tool_calls[0].function.name for chunk in chunks[:1]],
        "stream_end": [chunks[-2].choices[0].finish_reason, chunks[-1].usage.total_tokens],
        "patient": _client(opened, timeout=0.8)
        .chat.completions.create(model=model, messages=[{"role": "user", "content": "slow"}])
        .choices[0]
        .message.content,
        "errors": [_error(client, **options) for options in ERRORS],
        "token": _error(_client({**opened, "api_key": "wrong"})),
        "session": _error(
            _client({**opened, "base_url": opened["base_url"].replace("sessions/", "sessions/0")})
        ),
    }


ERRORS: list[dict[str, Any]] = [
    {"n": 2},
    {"stop": ["x"]},
    {"logprobs": True},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"extra_body": {"guided_json": {}}},
    {"model": "gpt-5"},
    {"max_tokens": 0},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": "x" * (17 << 20)}]},
    {"messages": [{"role": "user", "content": "refuse me"}]},
]


def _error(client: Any, **options: Any) -> list[Any]:
    try:
        client.chat.completions.create(**{"model": "policy", "messages": HI} | options)
    except openai.APIStatusError as error:
        return [error.status_code, error.code, type(error).__name__, error.body["message"]]  # type: ignore[index]
    return []


async def asynchronous(opened: list[dict[str, str]]) -> list[list[str]]:
    """Eight sessions at once, each with three requests at once on the connections of one client."""

    async def one(client: Any, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"number {number}"}]
        output = await client.chat.completions.create(model="policy", messages=messages)
        return str(output.choices[0].message.content)

    async def of_session(one_opened: dict[str, str]) -> list[str]:
        async with _client(one_opened, openai.AsyncOpenAI) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(3))))

    return list(await asyncio.gather(*(of_session(one_opened) for one_opened in opened)))


if __name__ == "__main__":
    sessions = json.loads(sys.argv[1])
    print(json.dumps({"sync": sync(sessions[0]), "async": asyncio.run(asynchronous(sessions))}))
