"""The judge of `launch/demo.sh judge`: an OpenAI-compatible server on the loopback interface.

A rule takes the place of a model. It reads task and completion from the prompt that
configs/demo-judge.md makes, and knows countdown.
"""

from __future__ import annotations

import json
import os
import re
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_spmd.rewards.verifiers import countdown

_PROMPT = re.compile(r"Task: ([\d,]+)=(\d+):\n.*<(completion-\w+)>\n(.*)\n</\3>", re.DOTALL)
_PARENT = os.getppid()


def reply_to(prompt: str) -> str:
    """Returns a judge's reply in two lines; it has no score if the prompt has no task."""
    match = _PROMPT.search(prompt)
    if match is None:
        return "There is nothing here that I could judge."
    nums = [int(number) for number in match[1].split(",")]
    [reward] = countdown([match[4]], nums=[nums], target=[int(match[2])], answer_tag=None)
    return f"I have worked it out.\nScore: {10 if reward == 1.0 else 0}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": reply_to(request["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        content = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Prints nothing; there are thousands of requests."""


class _Server(ThreadingHTTPServer):
    # The completions of a step are judged at the same time.
    request_queue_size = 128

    def service_actions(self) -> None:
        # Whoever started this process is gone.
        if os.getppid() != _PARENT:
            os._exit(0)


def serve() -> None:
    """Prints the address, and answers until the process that started this one ends."""
    # Ctrl-C is for the run, which still has completions to score.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _Server(("127.0.0.1", 0), _Handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions", flush=True)
        server.serve_forever()
