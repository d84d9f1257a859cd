"""Both ends of an agents' endpoint for tests: who answers it, raw sockets that ask it, and a chat
of few rules."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from grpo_spmd.episodes.chat_format import TemplateError
from grpo_spmd.episodes.conversations import ConversationTree
from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.records import Segment, Turn


@dataclass(frozen=True)
class SessionRecord:
    """What a session's completion and its episode hold."""

    token_ids: list[int]
    logprobs: list[float]
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: list[dict[str, Any]]


def recorded_by(contexts: ConversationTree) -> SessionRecord:
    completion = contexts.completion({}, [])
    episode = completion.episode
    assert episode is not None
    assert episode.status == contexts.status
    return SessionRecord(
        completion.token_ids,
        completion.logprobs,
        episode.segments,
        episode.turns,
        episode.messages,
    )


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def echo(endpoint: Endpoint, call: Call) -> None:
    message = {
        "role": "assistant",
        "content": f"{call.conversation}: {call.request.messages[-1]['content']}",
    }
    endpoint.answer(call, message, "stop", USAGE)


@contextmanager
def answered(endpoint: Endpoint, answer: Callable[[Endpoint, Call], None] = echo) -> Iterator[None]:
    """Within it a thread does what the rank's loop does."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if select.select([endpoint], [], [], 0.02)[0]:
                for call in endpoint.take():
                    answer(endpoint, call)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_until(is_so: Callable[[], bool], most_s: float = 60) -> None:
    """Fails a test that would wait for ever."""
    deadline = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {most_s:g} s"
        time.sleep(0.005)


def taken(endpoint: Endpoint, number: int) -> list[Call]:
    """The next requests, as many as are said to be on their way."""
    calls: list[Call] = []

    def are_there() -> bool:
        calls.extend(endpoint.take())
        return len(calls) >= number

    wait_until(are_there)
    return calls


def chat_request(
    opened: dict[str, str], body: Any, *, token: str | None = None, extra: str = ""
) -> bytes:
    """The bytes of a request for a chat completion; a body that is no bytes is made JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = "/" + opened["base_url"].split("/", 3)[3] + "/chat/completions"
    token = opened["api_key"] if token is None else token
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: "
        f"{len(raw)}\r\n{extra}\r\n"
    )
    return head.encode() + raw


def connect(endpoint_url: str) -> socket.socket:
    host, port = endpoint_url.split("/")[2].split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the next answer that is not an interim one; status 0 where the
    connection ends."""
    raw, deadline = b"", time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "interim answers and no answer"
        while b"\r\n\r\n" not in raw:
            with suppress(ConnectionError):
                if chunk := connection.recv(65536):
                    raw += chunk
                    continue
            return 0, {}, raw
        head, _, raw = raw.partition(b"\r\n\r\n")
        initial, *lines = head.decode().split("\r\n")
        if initial.split()[1] == "100":
            continue
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        while len(raw) < int(headers["content-length"]):
            raw += connection.recv(65536)
        return int(initial.split()[1]), headers, raw


def ask(url: str, request: bytes) -> tuple[int, str]:
    """Status and the error's code, if it has one, of a single request on a connection of its
    own."""
    with connect(url) as connection:
        with suppress(ConnectionError):  # it may be refused while it is sent
            connection.sendall(request)
        status, _, body = read_response(connection)
        return status, json.loads(body)["error"]["code"] if status >= 400 else ""


@dataclass(frozen=True)
class Parsed:
    message: dict[str, Any]
    num_invalid: int = 0


class Bytes:
    """A chat whose tokens are bytes, of which each has a second id: sampled tokens are not those
    that text gives.

    A message is 256 + its role, its text, 260; calls are lines "!name {arguments}" behind the text.
    `history` "fork":
    a suffix is refused, the conversation is rendered again."""

    ROLES, END, SECOND = ("system", "user", "assistant", "tool"), 260, 1000
    max_token_chars = 1

    def __init__(self, *, forks: bool = False) -> None:
        self.forks = forks
        self.rendered: list[Sequence[Any]] = []

    def whole_ids(self, messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        self.rendered.append(messages)
        ids = [ord("T")] * len(tools)
        for message in messages:
            ids += self._one(message)
        return [*ids, 256 + 2]

    def next_ids(
        self,
        context_ids: Sequence[int],
        so_far: Sequence[Any],
        new: Sequence[Any],
        tools: Sequence[Any],
    ) -> tuple[list[int], bool]:
        if self.forks:
            return self.whole_ids([*so_far, *new], tools), False
        suffix = [token for message in new for token in self._one(message)]
        return [*context_ids, *suffix, 256 + 2], True

    def parse(
        self, token_ids: Sequence[int], context_ids: Sequence[int], tools: Sequence[Any]
    ) -> Parsed:
        text = bytes(token % self.SECOND for token in token_ids if token != self.END).decode(
            errors="replace"
        )
        content, *lines = text.split("\n!")
        calls, num_invalid = [], 0
        for line in lines:
            name, _, arguments = line.partition(" ")
            try:
                calls.append(
                    {
                        "type": "function",
                        "function": {"name": name, "arguments": json.loads(arguments)},
                    }
                )
            except ValueError:
                num_invalid += 1
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if "</think>" in content:
            message["reasoning_content"], _, message["content"] = content.partition("</think>")
        return Parsed(message | ({"tool_calls": calls} if calls else {}), num_invalid)

    def sampled(self, text: str, *, full: bool = True) -> list[int]:
        """Tokens of an answer, every other one under its second id."""
        ids = [byte + self.SECOND * (i % 2) for i, byte in enumerate(text.encode())]
        return ids + [self.END] * full

    def _one(self, message: dict[str, Any]) -> list[int]:
        if message["role"] not in self.ROLES:
            raise TemplateError(f"no role {message['role']}")
        text = message["content"]
        for call in message.get("tool_calls", ()):
            text += f"\n!{call['function']['name']} {json.dumps(call['function']['arguments'])}"
        return [256 + self.ROLES.index(message["role"]), *text.encode(), self.END]
