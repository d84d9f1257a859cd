"""The agent of the compaction demo, as a user would write it: it has the model summarise the
history when the context gets long, and goes on with the summary alone.

"c,f" asks for the counts of two items, but two look-ups and the answer together do not fit into the
context. A count that is missing in the summary is lost. Therefore the summary is trained like every
other turn: its tokens get the episode's reward, in the context in which they were sampled.
"""

from __future__ import annotations

import json
from typing import Any

import openai

from grpo_spmd.demo.stockroom import Stockroom
from grpo_spmd.demo.tools import SUMMARISE

_TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Count what is in stock of one item.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
]


async def rollout(
    task: dict[str, Any], base_url: str, api_key: str, model: str, compact_at_tokens: int = 12
) -> float:
    """Runs one episode and returns its reward.

    The reward is 1.0 if the model answers with the counts of both wanted items, such as "7,3", and
    else 0.0. `task` is a row of the data; the other arguments say where the policy can be reached.
    """
    room = Stockroom()
    room.reset(**task)
    question = task["prompt"][0]
    messages = [question]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask() -> Any:
            """Requests the policy's next turn after `messages`."""
            return await client.chat.completions.create(
                model=model, messages=messages, tools=_TOOLS
            )

        try:
            while True:
                reply = await ask()
                message = reply.choices[0].message
                if not message.tool_calls:
                    return float(message.content == room._answer())
                messages.append(message)
                for call in message.tool_calls:
                    count = _count(room, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": count})
                if reply.usage.total_tokens >= compact_at_tokens:
                    messages.append({"role": "user", "content": SUMMARISE})
                    summary = (await ask()).choices[0].message.content
                    # The summary replaces everything after the question.
                    messages = [question | {"content": f"{question['content']}|{summary}"}]
        except openai.BadRequestError:
            # The endpoint refuses a turn beyond the episode's limits.
            return 0.0


def _count(room: Stockroom, arguments: str) -> str:
    """Returns the tool's result for a call's arguments (JSON), or "error" if they do not fit."""
    try:
        return str(room.count(**json.loads(arguments)))
    # The model may write any arguments.
    except (KeyError, TypeError, ValueError):
        return "error"
