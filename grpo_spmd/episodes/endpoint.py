"""This module is the OpenAI-compatible HTTP server from which agents request turns.

It listens on loopback, in a thread of the rank. It knows neither engine nor tokenizer: a request
waits here until the rank takes and answers it. Each agent has a *session*, with an address and a
token of its own. Every process on the node can connect, so everything that a *stranger* (a client
that has not shown a session's token) could make large or slow has a bound. While the engine is
busy, a waiting client gets `100 Continue` repeatedly, so that its own timeout does not run out.
"""

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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import HttpVersion11, web

from grpo_spmd.engine.requests import ConversationId
from grpo_spmd.episodes.openai_api import (
    MODEL,
    ApiError,
    ChatRequest,
    completion_body,
    error_body,
    models_body,
    read_request,
    stream_body,
)
from grpo_spmd.records import Message
from grpo_spmd.rewards.pool.processes import allow_files

_log = logging.getLogger(__name__)
# The bound for the bodies of all unanswered requests together.
_MAX_HELD_BYTES = 512 << 20
_MAX_BODY_BYTES = 16 << 20
_MAX_HEADER_BYTES = 32 << 10
# The most seconds between two requests on one connection.
_IDLE_S = 90
_BACKLOG = 1024
_PATH = re.compile(r"/sessions/([0-9a-f]{16})/v1/(chat/completions|models)/?")
_METHODS = {"chat/completions": "POST", "models": "GET"}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BUSY = ApiError(503, "busy", "too many requests are waiting; try again")
_SESSION_ENDED = ApiError(
    404,
    "session_not_found",
    "there is no such session; one ends when the agent's coroutine returns",
)


@dataclass(frozen=True, eq=False)
class Call:
    """An agent's request that waits for the policy's turn."""

    conversation: ConversationId
    request: ChatRequest
    session: _Session = field(repr=False)
    reply: asyncio.Future[web.Response | ApiError] = field(repr=False)
    """The future of the answer; only the server's thread may set it or wait for it."""

    @property
    def is_over(self) -> bool:
        """Returns whether nobody waits for the answer, because the client has disconnected or the
        session has ended."""
        # Both are checked: the server's thread refuses an ended session's calls a moment later.
        return self.session.has_ended or self.reply.done()


@dataclass(eq=False)
class _Session:
    """One agent's access to the endpoint, for one episode (a conversation of the engine)."""

    conversation: ConversationId
    token: bytes
    has_ended: bool = False
    waiting: dict[Call, None] = field(default_factory=dict)
    # The time in which at least one request waited: (seconds of finished waits, start of the
    # current wait). One tuple, so that the rank's thread never sees one of the two changed alone.
    waited: tuple[float, float | None] = (0.0, None)

    def update_waited(self) -> None:
        """Starts or stops the clock of `waited` after a request was added to `waiting` or
        removed."""
        seconds, start = self.waited
        if self.waiting and start is None:
            self.waited = (seconds, time.monotonic())
        elif not self.waiting and start is not None:
            self.waited = (seconds + time.monotonic() - start, None)


class _Connection(web.RequestHandler):
    """The connection of one client.

    It adds to aiohttp's connection a deadline for the head of the first request, and short answers
    to malformed requests.
    """

    def __init__(self, endpoint: Endpoint, server: web.Server, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        # True after the client has named a session and shown its token.
        self.is_known = False
        self._endpoint = endpoint
        error = _too_slow(endpoint.request_s)
        self.deadline = loop.call_later(endpoint.request_s, self._refuse, error)

    def connection_made(self, transport: Any) -> None:
        """Admits the client, or refuses it if there are too many; asyncio calls it."""
        super().connection_made(transport)
        # With this limit a write is done only when its data has left this process, so that slow
        # readers are detected.
        transport.set_write_buffer_limits(high=0)
        if not self._endpoint.admit(self):
            self._refuse(_BUSY)

    def connection_lost(self, error: BaseException | None) -> None:
        """Forgets the connection; asyncio calls it."""
        self.deadline.cancel()
        self._endpoint.connections.pop(self, None)
        super().connection_lost(error)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the answer to a request that aiohttp could not read or handle."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        # aiohttp would log a traceback for each malformed request, and any process can send those.
        self.deadline.cancel()
        rule = f"this is no HTTP/1.1 request with headers of at most {_MAX_HEADER_BYTES} bytes each"
        return _error_response(ApiError(400, "bad_http", rule), closes=True)

    def _refuse(self, error: ApiError) -> None:
        """Sends an error before a request was read, and closes the connection."""
        if self.transport is not None:
            body = error_body(error)
            head = (
                f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.force_close()


class Endpoint(AbstractContextManager["Endpoint"]):
    """The server and its sessions. The rank's thread calls the public methods, except as noted."""

    max_connections = 1024
    max_strangers = 256
    """The most connections whose client has shown no session's token yet."""
    max_waiting = 64
    """The most requests of one session at a time."""
    request_s: float = 30
    """The most seconds for a request to arrive, and for a client to read its answer."""
    beat_s: float = 15
    """The time between two interim answers (`100 Continue`) to a waiting client."""

    def __init__(self) -> None:
        """Starts the server in a thread of its own, on a free port of the loopback interface."""
        allow_files(2 * self.max_connections)
        # The open sessions by their name in the address, and these names by conversation.
        self._sessions: dict[str, _Session] = {}
        self._names: dict[ConversationId, str] = {}
        # The requests that `take` has not returned yet.
        self._calls: deque[Call] = deque()
        # The open connections, the oldest first. Only the server's thread uses it.
        self.connections: dict[_Connection, None] = {}
        # The size of the bodies of all unanswered requests together.
        self._held_bytes = 0
        self._warned: set[str] = set()
        # A pipe by which the server's thread wakes the rank's thread, which waits in
        # EnvironmentPool.
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/sessions"
        self._loop = asyncio.new_event_loop()
        # Only the loop's thread sets it, as asyncio's objects are not thread-safe.
        self._is_stopping = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=[self._serve()],
            name="agents' endpoint",
            daemon=True,
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Ends the server, with its thread and all connections."""
        self._call_in_thread(self._is_stopping.set)
        self._thread.join()
        self._loop.close()
        self._listening.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when `take` has calls to return."""
        return self._wakeup_read

    def open(self, conversation: ConversationId) -> dict[str, str]:
        """Opens a session. Returns `base_url`, `api_key` and `model` for the agent's client."""
        assert conversation not in self._names, f"the session of {conversation} is open"
        name = secrets.token_hex(8)
        token = secrets.token_urlsafe(32)
        self._sessions[name] = _Session(conversation, token.encode())
        self._names[conversation] = name
        return {"base_url": f"{self._url}/{name}/v1", "api_key": token, "model": MODEL}

    def close(self, conversation: ConversationId) -> None:
        """Ends the session if it is open: its waiting requests and later ones get status 404."""
        name = self._names.pop(conversation, None)
        if name is not None:
            session = self._sessions.pop(name)
            session.has_ended = True
            self._call_in_thread(_refuse_waiting, session)

    def take(self) -> list[Call]:
        """Returns the requests that arrived since the last call of `take`, in order of arrival.

        Requests that nobody waits for any more are left out.
        """
        # If the thread has died, no request would ever arrive, and the rank would wait for ever.
        if not self._thread.is_alive():
            raise RuntimeError("the thread of the agents' endpoint has ended")
        with suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        return [call for call in calls if not call.is_over]

    def answer(
        self, call: Call, message: Message, finish_reason: str, usage: Mapping[str, int]
    ) -> None:
        """Answers a call.

        `message` is as ChatFormat.parse returns it, with an id in each of its tool calls.
        """
        if call.request.is_stream:
            body = stream_body(message, finish_reason, call.request.streams_usage and usage)
            response = web.Response(body=body, content_type="text/event-stream")
        else:
            response = _json_response(completion_body(message, finish_reason, usage))
        self._call_in_thread(_set_reply, call, response)

    def refuse(self, call: Call, error: ApiError) -> None:
        """Answers a call with an error."""
        self._call_in_thread(_set_reply, call, error)

    def engine_s(self, conversation: ConversationId) -> float:
        """Returns the seconds in which requests of an open session waited for the engine.

        This time does not count against the agent's time limit.
        """
        name = self._names.get(conversation)
        if name is None:
            return 0.0
        seconds, start = self._sessions[name].waited
        return seconds if start is None else seconds + time.monotonic() - start

    def _call_in_thread(self, function: Callable[..., object], *args: Any) -> None:
        """Has the server's thread call `function(*args)`, without waiting for it."""
        # RuntimeError: the loop is closed, and with it all connections.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # The methods below run in the server's own thread.

    async def _serve(self) -> None:
        """Runs the server until `__exit__` stops it."""
        # With handler_cancellation aiohttp (3.14) cancels a handler as soon as its client leaves.
        server = web.Server(self._handle, handler_cancellation=True)
        # Compressed bodies are not decompressed, so they cannot fill the memory; they are refused
        # because they are not JSON.
        listener = await self._loop.create_server(
            lambda: _Connection(
                self,
                server,
                keepalive_timeout=_IDLE_S,
                access_log=None,
                auto_decompress=False,
                # How long aiohttp reads on after an answer to a request whose body was not read.
                lingering_time=self.request_s,
                max_line_size=_MAX_HEADER_BYTES,
                max_field_size=_MAX_HEADER_BYTES,
            ),
            sock=self._listening,
            backlog=_BACKLOG,
        )
        await self._is_stopping.wait()
        listener.close()
        # One pass of the event loop, so that `server.connections` has those just accepted, too.
        await asyncio.sleep(0)
        for connection in server.connections:
            _abort(connection)
        # Handlers that still run would keep the loop from closing.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def admit(self, connection: _Connection) -> bool:
        """Registers a new connection and returns True, or returns False if it must be refused.

        If there are too many connections, the oldest one of a stranger is aborted; without
        strangers the new connection must be refused. Runs in the server's thread.
        """
        strangers = [old for old in self.connections if not old.is_known]
        if len(self.connections) >= self.max_connections or len(strangers) >= self.max_strangers:
            if not strangers:
                return False
            _abort(strangers[0])
            del self.connections[strangers[0]]
        self.connections[connection] = None
        return True

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        """Answers one request. aiohttp calls this as soon as the request's head was read."""
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.deadline.cancel()
        # The rest of a body that was not read would be taken for the next request, so the
        # connection is closed unless the body was read completely.
        closes = True
        try:
            # The session and token are checked before any byte of the body is read.
            session = self._session_of(request)
            connection.is_known = True
            body = bytearray()
            try:
                await self._read_body(request, body)
                closes = False
                if request.method == "GET":
                    response = _json_response(models_body())
                else:
                    response = await self._reply(request, session, bytes(body))
            finally:
                self._held_bytes -= len(body)
        except ApiError as error:
            response = _error_response(error, closes=closes)
        await self._send(request, response)
        return response

    def _session_of(self, request: web.BaseRequest) -> _Session:
        """Returns the session that the path in a request's head names.

        Raises ApiError if the path, token, method or body size is wrong. No byte of the body has
        been read yet.
        """
        path = _PATH.fullmatch(request.raw_path.partition("?")[0])
        if path is None:
            raise ApiError(
                404,
                "not_found",
                "there are /sessions/<id>/v1/chat/completions and /sessions/<id>/v1/models",
            )
        name, resource = path.groups()
        session = self._sessions.get(name)
        if session is None:
            raise _SESSION_ENDED
        # Several headers are joined, so that they match no token.
        credentials = ", ".join(request.headers.getall("Authorization", []))
        scheme, _, token = credentials.partition(" ")
        # aiohttp gives bytes that are not UTF-8 as surrogates.
        token_bytes = token.strip().encode(errors="surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(session.token, token_bytes):
            raise ApiError(401, "invalid_api_key", "the api key is not this session's")
        if request.method != _METHODS[resource]:
            raise ApiError(405, "method_not_allowed", f"{resource} takes {_METHODS[resource]}")
        # Without Content-Length the size of a body could not be counted before it is read.
        if "Transfer-Encoding" in request.headers:
            raise ApiError(
                411,
                "length_required",
                "a body must come with its Content-Length, and not in chunks",
            )
        if (request.content_length or 0) > _MAX_BODY_BYTES:
            raise ApiError(413, "body_too_large", f"a body has at most {_MAX_BODY_BYTES} bytes")
        return session

    async def _read_body(self, request: web.BaseRequest, body: bytearray) -> None:
        """Reads the request's body and appends it to `body`.

        Raises ApiError if it arrives too slowly, or if the bodies of all requests together are too
        large.
        """
        # A client that asks for "100-continue" sends its body only after an interim answer.
        if request.content_length and request.headers.get("Expect", "").lower() == "100-continue":
            _tell_to_wait(request)
        try:
            async with asyncio.timeout(self.request_s):
                # Bytes are counted as they arrive: a client may announce a body and never send it.
                async for chunk in request.content.iter_any():
                    if self._held_bytes + len(chunk) > _MAX_HELD_BYTES:
                        raise _BUSY
                    self._held_bytes += len(chunk)
                    body += chunk
        except TimeoutError:
            raise _too_slow(self.request_s) from None

    async def _reply(
        self, request: web.BaseRequest, session: _Session, body: bytes
    ) -> web.Response:
        """Queues a call and returns its answer. Raises ApiError.

        aiohttp cancels this when the client disconnects.
        """
        chat_request = read_request(body)
        for name in set(chat_request.ignored) - self._warned:
            self._warned.add(name)
            _log.warning("an agent's `%s` is ignored: the run's config sets how to sample", name)
        if session.has_ended:
            raise _SESSION_ENDED
        if len(session.waiting) >= self.max_waiting:
            raise ApiError(
                429, "busy", f"{self.max_waiting} requests of this session wait already; try again"
            )
        # The rank's thread takes calls out of this queue; a byte in the pipe wakes it up.
        call = Call(session.conversation, chat_request, session, self._loop.create_future())
        session.waiting[call] = None
        session.update_waited()
        self._calls.append(call)
        # If the pipe is full, the rank's thread is already going to wake up.
        with suppress(BlockingIOError):
            os.write(self._wakeup_write, b"\0")
        try:
            while not call.reply.done():
                await asyncio.wait([call.reply], timeout=self.beat_s)
                if not call.reply.done():
                    _tell_to_wait(request)
            reply = call.reply.result()
        finally:
            call.reply.cancel()
            del session.waiting[call]
            session.update_waited()
        if isinstance(reply, ApiError):
            raise reply
        return reply

    async def _send(self, request: web.BaseRequest, response: web.Response) -> None:
        """Sends an answer. Aborts the connection of a client that does not read it in time."""
        try:
            # aiohttp itself would wait for a slow reader for ever.
            async with asyncio.timeout(self.request_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            _abort(request)


def _abort(connection: web.RequestHandler | web.BaseRequest) -> None:
    """Closes a connection at once, without sending what is still to be sent."""
    if connection.transport is not None:
        connection.transport.abort()


def _json_response(body: bytes, status: int = 200) -> web.Response:
    """Returns a response with a JSON body."""
    return web.Response(body=body, status=status, content_type="application/json")


def _error_response(error: ApiError, *, closes: bool) -> web.Response:
    """Returns the response for an error; if `closes`, the connection is closed after it."""
    response = _json_response(error_body(error), error.status)
    if closes:
        response.force_close()
        response.headers["Connection"] = "close"
    return response


def _too_slow(request_s: float) -> ApiError:
    """Returns the error for a request that has not arrived within `request_s` seconds."""
    return ApiError(408, "too_slow", f"the request did not arrive within {request_s:g} s")


def _tell_to_wait(request: web.BaseRequest) -> None:
    """Sends an interim answer (`100 Continue`), which restarts the client's read timeout.

    HTTP/1.0 has no interim answers, so such a client gets none.
    """
    if request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(_CONTINUE)


def _refuse_waiting(session: _Session) -> None:
    """Answers a session's waiting requests with the error that the session has ended."""
    for call in session.waiting:
        _set_reply(call, _SESSION_ENDED)


def _set_reply(call: Call, reply: web.Response | ApiError) -> None:
    """Gives a call its answer unless it is over. Runs in the server's thread."""
    if not call.reply.done():
        call.reply.set_result(reply)
