"""The judge of `launch/demo.sh judge`: an OpenAI-compatible server on the loopback interface.

It uses the countdown verifier instead of a model: it reads the task and the completion from a
prompt that was made with the template configs/demo-judge.md.
"""

from __future__ import annotations

import os
import re
import signal
import socket

from aiohttp import web

from grpo_spmd.distributed.processes import end_with_parent
from grpo_spmd.rewards.verifiers import countdown

_PROMPT = re.compile(r"Task: ([\d,]+)=(\d+):\n.*<(completion-\w+)>\n(.*)\n</\3>", re.DOTALL)


def reply_to(prompt: str) -> str:
    """Returns the judge's reply to `prompt`, with a last line "Score: 10" or "Score: 0".

    If the prompt has no task, the reply has no score.
    """
    match = _PROMPT.search(prompt)
    if match is None:
        return "There is nothing here that I could judge."
    nums = [int(number) for number in match[1].split(",")]
    [reward] = countdown([match[4]], nums=[nums], target=[int(match[2])], answer_tag=None)
    return f"I have worked it out.\nScore: {10 if reward == 1.0 else 0}"


async def _answer(request: web.Request) -> web.Response:
    """Answers a chat completion request with the judge's reply to its last message."""
    question = await request.json()
    message = {"role": "assistant", "content": reply_to(question["messages"][-1]["content"])}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return web.json_response({"choices": [choice]})


def serve() -> None:
    """Prints the server's address, and serves until the process that started this one ends."""
    end_with_parent(signal.SIGKILL, os.getppid())
    # Ctrl-C also reaches this process, but the run still has completions to score.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    # A free port of this host.
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/v1/chat/completions", flush=True)
    web.run_app(app, sock=listening, print=None, access_log=None, handle_signals=False)
