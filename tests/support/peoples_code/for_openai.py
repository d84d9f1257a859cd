"""An agent that was written for a server: the stock client, asynchronous and not. What it saw is in
a file, as the
other side's word on what was sampled."""

import asyncio
import json
import os
import threading
from contextlib import suppress
from typing import Any

import openai

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


async def rollout(
    task: dict[str, Any], base_url: str, api_key: str, model: str
) -> float | dict[str, float] | None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["prompt"]]
    seen = []

    async def turn(output: list[Any], **more: Any) -> Any:
        actual = await client.chat.completions.create(
            model=model, messages=output, temperature=0.5, **more
        )
        seen.append([actual.choices[0].message.content, actual.usage.completion_tokens])
        return actual.choices[0].message

    for _ in range(2):  # a loop of tools
        reply = await turn(messages, tools=TOOLS)
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            result = str(json.loads(call.function.arguments).get("a", "none"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    # two at once, from the first message: two other conversations
    await asyncio.gather(*(turn([{"role": "user", "content": word}]) for word in "xy"))

    sync = openai.OpenAI(base_url=base_url, api_key=api_key)

    def ask() -> Any:
        return sync.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "z"}], max_tokens=3
        )

    thread = await asyncio.to_thread(ask)
    seen.append([thread.choices[0].message.content, thread.usage.completion_tokens])
    if task["leaves"]:  # while a turn of it is in the engine, which nobody will see
        threading.Thread(target=_ask_and_forget, args=(ask,), daemon=True).start()
        await asyncio.sleep(0.02)
    with open(os.path.join(task["folder"], "seen.jsonl"), "a") as file:
        file.write(json.dumps([task["number"], seen]) + "\n")
    return {"reward": float(len(seen))}


def _ask_and_forget(ask: Any) -> None:
    with suppress(openai.OpenAIError):
        ask()
