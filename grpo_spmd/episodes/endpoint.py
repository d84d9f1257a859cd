"""HTTP/1.1 of a server, read strictly: what two programs could take for different requests is refused."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from grpo_spmd.engine.requests import ConversationId
from grpo_spmd.episodes.openai_api import (
    ApiError,
    Message,
    Options,
    completion_body,
    error_body,
    models_body,
    read_request,
    stream_body,
)

READ_BYTES = 256 << 10  # at a time
_MAX_HEAD_BYTES = 32 << 10
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class Head:
    method: str
    path: str  # without the query
    token: str  # of `Authorization: Bearer`; "": none
    num_body_bytes: int
    keeps_alive: bool
    expects_continue: bool
    knows_continue: bool  # interim answers may be sent


def read_head(raw: bytes) -> Head:
    """`raw`: up to the empty line, without it. Raises ApiError."""
    first, *lines = raw.split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise ApiError(400, "bad_http", "the request line is not one of HTTP/1.1")
    fields: dict[str, str] = {}
    for one in lines:
        field = _FIELD.fullmatch(one)
        if field is None:
            raise ApiError(400, "bad_http", "a header's line is not one of HTTP/1.1")
        name, value = field[1].decode().lower(), field[2].decode("latin-1")
        if name in fields and name in (
            "content-length",
            "transfer-encoding",
            "authorization",
            "host",
        ):
            raise ApiError(400, "bad_http", f"the header {name} is given twice")
        fields[name] = value
    if "transfer-encoding" in fields:
        raise ApiError(
            411, "length_required", "a body must come with its Content-Length, and not in chunks"
        )
    length = fields.get("content-length", "0")
    if not _LENGTH.fullmatch(length):
        raise ApiError(400, "bad_http", "Content-Length must be one whole number")
    scheme, _, token = fields.get("authorization", "").partition(" ")
    is_new = line[3] == b"1"
    return Head(
        method=line[1].decode(),
        path=line[2].decode().partition("?")[0],
        token=token.strip() if scheme.lower() == "bearer" else "",
        num_body_bytes=int(length),
        keeps_alive=is_new and "close" not in fields.get("connection", "").lower(),
        expects_continue=is_new and fields.get("expect", "").lower() == "100-continue",
        knows_continue=is_new,
    )


class Connection:
    """Of one client: requests in, answers out, each within its time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=0)  # what is drained has left us
        self._buffer = bytearray()
        self._filling: asyncio.Task[bool] | None = None
        self.is_known = False

    def welcome(self) -> None:
        """It has named a session and its token."""
        self.is_known = True

    async def head(self, idle_s: float, request_s: float) -> bytes | None:
        """The head of the next request; None where none comes. Raises ApiError where it is too long or slow."""
        try:
            async with asyncio.timeout(idle_s if self.is_known else request_s):
                while not self._buffer.lstrip(b"\r\n"):
                    del self._buffer[:]
                    if not await self._fill():
                        return None
        except TimeoutError:
            return None
        del self._buffer[: len(self._buffer) - len(self._buffer.lstrip(b"\r\n"))]
        try:
            async with asyncio.timeout(request_s):
                while (end := self._buffer.find(b"\r\n\r\n")) < 0:
                    if len(self._buffer) > _MAX_HEAD_BYTES:
                        break
                    if not await self._fill():
                        return None
        except TimeoutError:
            raise ApiError(
                408, "too_slow", f"the request did not arrive within {request_s:g} s"
            ) from None
        if not 0 <= end <= _MAX_HEAD_BYTES:
            raise ApiError(431, "headers_too_large", f"headers may have {_MAX_HEAD_BYTES} bytes")
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return head

    async def body(self, head: Head, request_s: float) -> bytes:
        """Raises ApiError where it is too slow, ConnectionError where it ends early."""
        if head.expects_continue and len(self._buffer) < head.num_body_bytes:
            self.tell_to_wait()
        try:
            async with asyncio.timeout(request_s):
                while len(self._buffer) < head.num_body_bytes:
                    if not await self._fill():
                        raise ConnectionError("the body ended early")
        except TimeoutError:
            raise ApiError(
                408, "too_slow", f"the request did not arrive within {request_s:g} s"
            ) from None
        body = bytes(self._buffer[: head.num_body_bytes])
        del self._buffer[: head.num_body_bytes]
        return body

    async def stays(self, reply: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for the reply, at most `timeout_s`; False as soon as the client has gone. What it sends meanwhile is its
        next request's, and read up to a bound: a client that sends more is not watched any longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not reply.done() and (left := deadline - loop.time()) > 0:
            if self._filling is None and len(self._buffer) < _MAX_HEAD_BYTES:
                self._filling = loop.create_task(self._read())
            watched: list[asyncio.Future[Any]] = [
                reply,
                *([self._filling] if self._filling else []),
            ]
            await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._filling is not None and self._filling.done():
                filling, self._filling = self._filling, None
                if not filling.result():
                    return reply.done()
        return True

    def tell_to_wait(self) -> None:
        self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(
        self, status: int, body: bytes, kind: str, *, keeps_alive: bool, timeout_s: float
    ) -> None:
        """Raises TimeoutError where it is not read in time."""
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            f"Connection: {'keep-alive' if keeps_alive else 'close'}",
        ]
        self._writer.write("\r\n".join([*lines, "\r\n"]).encode() + body)
        async with asyncio.timeout(timeout_s):
            await self._writer.drain()

    def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
        if self._writer.transport.get_write_buffer_size():
            self.abort()
        else:
            self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _fill(self) -> bool:
        """Read more into the buffer; False where the client has gone. Where a timeout ends it, the reading goes on for
        the next who asks."""
        if self._filling is None:
            self._filling = asyncio.create_task(self._read())
        filling = self._filling
        await asyncio.wait([filling])
        self._filling = None
        return filling.result()

    async def _read(self) -> bool:
        try:
            chunk = await self._reader.read(READ_BYTES)
        except OSError:
            return False
        self._buffer += chunk
        return bool(chunk)


# Where agents ask for turns: an OpenAI-compatible HTTP server on loopback, in a thread of the rank.
#
# It knows neither engine nor tokenizer: a request waits here until the rank has taken it and answered. Whoever is on the
# node can connect, so a session has a token, and everything a stranger could make large or slow has a bound. A client's
# own timeout does not run out while the engine is busy: it is sent `100 Continue` as long as its answer is not known.


_log = logging.getLogger(__name__)
_MAX_HELD_BYTES = 512 << 20  # of the bodies of all requests that are not answered yet
_PATH = re.compile(r"/sessions/([0-9a-f]{16})/v1/(chat/completions|models)/?")
_METHODS = {"chat/completions": "POST", "models": "GET"}
_JSON, _EVENTS = "application/json", "text/event-stream"
_BUSY = ApiError(503, "busy", "too many requests are waiting; try again")
_ENDED = ApiError(
    404,
    "session_not_found",
    "there is no such session; one ends when the agent's coroutine returns",
)


@dataclass(frozen=True, eq=False)
class Call:
    """A request that waits for its turn."""

    place: ConversationId
    messages: list[Message]
    tools: list[dict[str, Any]]
    options: Options
    session: _Session = field(repr=False)
    reply: asyncio.Future[tuple[bytes, str] | ApiError] = field(repr=False)
    """The endpoint's own: the answer's body and its type, or what it is refused for."""

    @property
    def is_over(self) -> bool:
        """Nobody waits for the answer any longer: the client has gone, or the session has ended."""
        return self.session.has_ended or self.reply.done()  # the thread may not have refused it yet


@dataclass(eq=False)
class _Session:
    place: ConversationId
    token: bytes
    has_ended: bool = False
    waiting: dict[Call, None] = field(default_factory=dict)
    waited: tuple[float, float | None] = (
        0.0,
        None,
    )  # seconds before, and since when somebody waits now

    def describe_waiting_with(self) -> None:
        before, since = self.waited
        if self.waiting and since is None:
            self.waited = before, time.monotonic()
        elif not self.waiting and since is not None:
            self.waited = before + time.monotonic() - since, None


class Endpoint(AbstractContextManager["Endpoint"]):
    """Everything is called by one thread, the rank's; what the server's own thread does is below `_serve`."""

    def __init__(
        self,
        model: str = "policy",
        *,
        max_connections: int = 1024,
        max_body_bytes: int = 16 << 20,
        max_waiting: int = 64,
        request_s: float = 30,
        idle_s: float = 90,
        beat_s: float = 15,
    ) -> None:
        """`model`: the name that it has for agents; `max_waiting`: requests of a session at a time; `request_s`: for a
        request to arrive once it has begun, and for an answer to be read; `idle_s`: between two requests."""
        self._model, self._max_connections, self._max_body_bytes = (
            model,
            max_connections,
            max_body_bytes,
        )
        self._max_waiting, self._request_s, self._idle_s, self._beat_s = (
            max_waiting,
            request_s,
            idle_s,
            beat_s,
        )
        self._sessions: dict[str, _Session] = {}
        self._ids: dict[ConversationId, str] = {}
        self._calls: deque[Call] = deque()
        self._connections: dict[Connection, None] = {}  # the oldest first
        self._held_bytes = 0
        self._warned: set[str] = set()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/sessions"
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="agents' endpoint", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fileno(self) -> int:
        """Readable where `take` has something to give."""
        return self._wakeup_read

    def open(self, place: ConversationId) -> dict[str, str]:
        """A new session: `base_url`, `api_key` and `model` for the agent's client."""
        assert place not in self._ids, f"the session of {place} is open"
        name, token = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[name], self._ids[place] = _Session(place, token.encode()), name
        return {"base_url": f"{self._url}/{name}/v1", "api_key": token, "model": self._model}

    def close(self, place: ConversationId) -> None:
        """End the session, if it is open: who waits in it or comes later gets a 404."""
        if (name := self._ids.pop(place, None)) is not None:
            session = self._sessions.pop(name)
            session.has_ended = True
            self._in_thread(self._refuse_waiting, session)

    def take(self) -> list[Call]:
        """The requests that came since the last time, in the order of their arrival."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread of the agents' endpoint has ended")
        with suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass
        taken = []
        while self._calls:
            if not (call := self._calls.popleft()).is_over:
                taken.append(call)
        return taken

    def answer(
        self, call: Call, message: Message, finish_reason: str, usage: Mapping[str, int]
    ) -> bool:
        """`message`: as ChatFormat.parse gives it, with an id in each of its calls. False where the client is known to
        have gone: nobody has seen the turn."""
        is_waiting, name, now = (
            not call.is_over,
            f"chatcmpl-{secrets.token_hex(8)}",
            int(time.time()),
        )
        if call.options.is_stream:
            told = usage if call.options.streams_usage else None
            body, kind = stream_body(name, now, self._model, message, finish_reason, told), _EVENTS
        else:
            body, kind = (
                completion_body(name, now, self._model, message, finish_reason, usage),
                _JSON,
            )
        self._in_thread(_set_reply, call, (body, kind))
        return is_waiting

    def refuse(self, call: Call, status: int, why: str, code: str = "invalid_request") -> None:
        """Answer it with an error of the protocol."""
        self._in_thread(_set_reply, call, ApiError(status, code, why))

    def engine_s(self, place: ConversationId) -> float:
        """Seconds in which a request of the session, if it is open, waited for its answer: not the agent's own time."""
        if (name := self._ids.get(place)) is None:
            return 0.0
        before, since = self._sessions[name].waited
        return before + (0.0 if since is None else time.monotonic() - since)

    def stop(self) -> None:
        """End everything: who waits is cut off."""
        self._in_thread(self._is_stopping.set)
        self._thread.join()
        self._listening.close()
        for fd in (self._wakeup_read, self._wakeup_write):
            os.close(fd)

    def _in_thread(self, function: Any, *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and with it all connections
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listening, limit=READ_BYTES, backlog=1024
        )
        await self._is_stopping.wait()
        server.close()
        await asyncio.sleep(0)  # whoever was accepted has begun
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        if len(self._connections) >= self._max_connections:  # strangers go first
            strangers = (old for old in self._connections if not old.is_known)
            if (victim := next(strangers, None)) is not None:
                victim.abort()
                del self._connections[victim]
        is_full = len(self._connections) >= self._max_connections
        if not is_full:
            self._connections[connection] = None
        try:
            if is_full:
                await self._send_error(connection, _BUSY, keeps_alive=False)
            else:
                while await self._serve_one(connection):
                    pass
        except (OSError, TimeoutError):  # the client has gone, or is too slow
            pass
        except (
            asyncio.CancelledError
        ):  # all ends; Python 3.11's streams would log an error for each
            pass
        finally:
            self._connections.pop(connection, None)
            connection.close()

    async def _serve_one(self, connection: Connection) -> bool:
        """One request and its answer; whether the connection goes on."""
        num_bytes = 0
        try:
            try:
                raw = await connection.head(self._idle_s, self._request_s)
                if raw is None:
                    return False
                head = read_head(raw)
                session = self._session_of(head)
                if self._held_bytes + head.num_body_bytes > _MAX_HELD_BYTES:
                    raise _BUSY
                num_bytes = head.num_body_bytes
                self._held_bytes += num_bytes
                connection.welcome()
                body = await connection.body(head, self._request_s)
            except ApiError as refused:  # whatever follows on this connection is not a request
                await self._send_error(connection, refused, keeps_alive=False)
                return False
            try:
                reply = (
                    (models_body(self._model), _JSON)
                    if head.method == "GET"
                    else await self._reply_to(connection, session, head, body)
                )
            except ApiError as refused:
                await self._send_error(connection, refused, keeps_alive=head.keeps_alive)
            else:
                if reply is None:
                    return False
                await connection.send(
                    200, *reply, keeps_alive=head.keeps_alive, timeout_s=self._request_s
                )
            return head.keeps_alive
        finally:
            self._held_bytes -= num_bytes

    def _session_of(self, head: Head) -> _Session:
        """Raises ApiError."""
        if (parts := _PATH.fullmatch(head.path)) is None:
            raise ApiError(
                404,
                "not_found",
                "there are /sessions/<id>/v1/chat/completions and /sessions/<id>/v1/models",
            )
        name, what = parts.groups()
        if (session := self._sessions.get(name)) is None:
            raise _ENDED
        if not hmac.compare_digest(session.token, head.token.encode()):
            raise ApiError(401, "invalid_api_key", "the api key is not this session's")
        if head.method != _METHODS[what]:
            raise ApiError(405, "method_not_allowed", f"{what} takes {_METHODS[what]}")
        if head.num_body_bytes > self._max_body_bytes:
            raise ApiError(413, "body_too_large", f"a body may have {self._max_body_bytes} bytes")
        return session

    async def _reply_to(
        self, connection: Connection, session: _Session, head: Head, body: bytes
    ) -> tuple[bytes, str] | None:
        """Queue it, and wait; None where the client has gone. Raises ApiError."""
        asked = read_request(body, self._model)
        for name in asked.options.ignored:
            if name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "an agent's `%s` is ignored: turns are sampled as `rollout` says", name
                )
        if session.has_ended:
            raise _ENDED
        if len(session.waiting) >= self._max_waiting:
            raise ApiError(
                429, "busy", f"{self._max_waiting} requests of this session wait already; try again"
            )
        call = Call(
            session.place,
            asked.messages,
            asked.tools,
            asked.options,
            session,
            self._loop.create_future(),
        )
        session.waiting[call] = None
        session.describe_waiting_with()
        self._calls.append(call)
        with suppress(BlockingIOError):  # full: it is readable
            os.write(self._wakeup_write, b"\0")
        try:
            while await connection.stays(call.reply, self._beat_s):
                if call.reply.done():
                    if isinstance(reply := call.reply.result(), ApiError):
                        raise reply
                    return reply
                if head.knows_continue:
                    connection.tell_to_wait()
            return None
        finally:
            call.reply.cancel()
            del session.waiting[call]
            session.describe_waiting_with()

    def _refuse_waiting(self, session: _Session) -> None:
        for call in session.waiting:
            _set_reply(call, _ENDED)

    async def _send_error(
        self, connection: Connection, refused: ApiError, *, keeps_alive: bool
    ) -> None:
        body = error_body(refused.status, refused.code, str(refused))
        await connection.send(
            refused.status, body, _JSON, keeps_alive=keeps_alive, timeout_s=self._request_s
        )


def _set_reply(call: Call, reply: tuple[bytes, str] | ApiError) -> None:
    if not call.reply.done():
        call.reply.set_result(reply)
