"""A reward server on loopback that behaves as it is told, and remembers what it was asked, when,
how many at once."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

# How the first request for a body is answered, and the next ones rightly. Any other way is for
# good.
ONCE = (
    "429",
    "429_after",
    "429_date",
    "500",
    "503",
    "drop",
    "half",
    "text_once",
    "nan_once",
    "length_once",
)
SECRET = "tok-31415926-deadbeef"  # which it says wherever it can


@dataclass(frozen=True)
class Asked:
    body: Any
    headers: dict[str, str]
    how: str
    began: float


def assert_no_secret(server: StubServer, output: str, run_dir: Path) -> None:
    """Every request had the secret, which OF_THE_STUB held, and neither a run's lines nor its files
    have it."""
    assert {requests.headers["authorization"] for requests in server.asked} == {f"Bearer {SECRET}"}
    assert SECRET not in output
    assert SECRET not in os.environ.get("OF_THE_STUB", "")
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    assert "Authorization: OF_THE_STUB" in (run_dir / "config.yaml").read_text()


class StubServer:
    def __init__(self, answer: Callable[[Any], Any], behave: Callable[[Any], str]) -> None:
        """`answer` is the right one to a body; `behave` says how it is answered: "ok", "slow", or
        see below."""
        self._answer, self._behave = answer, behave
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._num_at_once = 0
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._seen: set[str] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/score"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # a close alone would leave it to accept() under way
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Requests on one connection, as long as it is kept, also against the word of who asks."""
        with connection, suppress(OSError):
            while (request := _read(connection)) is not None:
                body, headers = request
                with self._lock:
                    self._num_at_once += 1
                    self.most_at_once = max(self.most_at_once, self._num_at_once)
                    behave, text = self._behave(body), json.dumps(body, sort_keys=True)
                    behave = "ok" if behave in ONCE and text in self._seen else behave
                    self._seen.add(text)
                    self.asked.append(Asked(body, headers, behave, time.monotonic()))
                correct = json.dumps(self._answer(body)).encode()
                try:
                    self._stall(connection, behave)
                # whoever has the answer may ask again, before a thread here has noted that it was
                # sent
                finally:
                    with self._lock:
                        self._num_at_once -= 1
                if not self._give(connection, correct, behave):
                    return

    def _stall(self, connection: socket.socket, method: str) -> None:
        """What takes long, as long as somebody is there who waits."""
        if method == "hang":
            connection.settimeout(60)
            connection.recv(1)
        elif method == "drip":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not self._stop.wait(0.05):
                connection.sendall(b" ")
        elif method in ("slow", "slower"):
            time.sleep(0.02 if method == "slow" else 0.2)

    def _give(self, connection: socket.socket, correct: bytes, method: str) -> bool:
        """Whether the connection is kept."""
        if method == "huge":
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(50):
                connection.sendall(b"100000\r\n" + b"1" * (1 << 20) + b"\r\n")
        elif method == "half":
            connection.sendall(_response(200, correct + b" " * 100)[:-60])
        elif (
            method == "late"
        ):  # behind the right one comes one that whoever reads next here would take for its own
            connection.sendall(_response(200, correct) + _response(200, b"12345"))
            return True
        elif method not in ("drop", "hang", "drip"):
            connection.sendall(_ANSWERS[method] if method in _ANSWERS else _response(200, correct))
            return True
        return False


def _response(status: int, content: bytes, *headers: str, reason: str = "OK") -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def _read(connection: socket.socket) -> tuple[Any, dict[str, str]] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (chunk := connection.recv(1 << 16)):
            return None
        data += chunk
    head, _, content = data.partition(b"\r\n\r\n")
    fields = [line.partition(":") for line in head.decode().splitlines()[1:]]
    headers = {name.lower(): value.strip() for name, _, value in fields}
    while len(content) < int(headers.get("content-length", 0)):
        if not (chunk := connection.recv(1 << 16)):
            return None
        content += chunk
    return json.loads(content) if content else None, headers  # None: a GET


_ANSWERS = {
    "429": _response(429, b"", reason="Too Many Requests"),
    "429_after": _response(429, b"", "Retry-After: 1"),
    "429_date": _response(429, b"", f"Retry-After: {formatdate(0, usegmt=True)}"),
    "429_long": _response(429, b"", "Retry-After: 3600"),
    "500": _response(500, f"boom, {SECRET}".encode()),
    "503": _response(503, b"", "Retry-After: 0"),
    "404": _response(404, f"no such model for Bearer {SECRET}\n".encode(), reason=f"Not {SECRET}"),
    "nan": _response(200, b'{"score": NaN}'),
    "nan_once": _response(200, b"NaN"),
    "infinite": _response(200, b'{"score": 1e999}'),
    "400": _response(
        400, b'{"error": "Requested prompt logprobs of 32, which is greater than max allowed: 20"}'
    ),
    "null": _response(200, b'{"score": null}'),
    "text": _response(200, b"I would say seven."),
    "text_once": _response(200, b'"7"'),
    "length": _response(200, b'{"rewards": [1, 2, 3, 4, 5]}'),
    "length_once": _response(200, b'{"rewards": [1, 2, 3, 4, 5]}'),
    "deep": _response(200, b"[" * 100_000),
    "redirect": _response(302, b"", "Location: /score", reason="Found"),
    "gzip": _response(200, gzip.compress(b"1" * (1 << 22)), "Content-Encoding: gzip"),
    "declared": b"HTTP/1.1 200 OK\r\nContent-Length: 52428800\r\n\r\n1",
}


@contextmanager
def stub_server(
    answer: Callable[[Any], Any], behave: Callable[[Any], str] = lambda body: "ok"
) -> Iterator[StubServer]:
    server = StubServer(answer, behave)
    try:
        yield server
    finally:
        server.close()
