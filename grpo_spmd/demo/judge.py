"""The judge of `launch/demo.sh judge`: an OpenAI-compatible address on loopback, behind which a rule stands in for a
model. It reads the task and the completion out of the prompt that configs/demo-judge.md makes, and knows countdown."""

from __future__ import annotations

import json
import os
import re
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_spmd.rewards.verifiers import countdown

_ASKED = re.compile(r"Task: ([\d,]+)=(\d+):\n.*<(completion-\w+)>\n(.*)\n</\3>", re.DOTALL)


def reply_to(prompt: str) -> str:
    """What a judge would say, in two lines; without a score where it does not find what it is to judge."""
    if (asked := _ASKED.search(prompt)) is None:
        return "There is nothing here that I could judge."
    nums = [int(number) for number in asked[1].split(",")]
    [right] = countdown([asked[4]], nums=[nums], target=[int(asked[2])], answer_tag=None)
    return f"I have worked it out.\nScore: {10 if right == 1.0 else 0}"


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": reply_to(asked["messages"][-1]["content"])}
        content = json.dumps(
            {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: a line for each of thousands."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def service_actions(self) -> None:
        if os.getppid() != _PARENT:  # whoever it was started for is gone
            os._exit(0)


_PARENT = os.getppid()


def serve() -> None:
    """Print the address, and answer until whoever started this ends it, or has gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the run's, which still has completions to score
    with _Server(("127.0.0.1", 0), _Answers) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions", flush=True)
        server.serve_forever()
