"""HTTP/1.1 of a server, read strictly: what two programs could take for different requests is refused."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from grpo_spmd.rollout.environments.wire import WireError

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
    """`raw`: up to the empty line, without it. Raises WireError."""
    first, *lines = raw.split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise WireError(400, "bad_http", "the request line is not one of HTTP/1.1")
    fields: dict[str, str] = {}
    for one in lines:
        field = _FIELD.fullmatch(one)
        if field is None:
            raise WireError(400, "bad_http", "a header's line is not one of HTTP/1.1")
        name, value = field[1].decode().lower(), field[2].decode("latin-1")
        if name in fields and name in ("content-length", "transfer-encoding", "authorization", "host"):
            raise WireError(400, "bad_http", f"the header {name} is given twice")
        fields[name] = value
    if "transfer-encoding" in fields:
        raise WireError(411, "length_required", "a body must come with its Content-Length, and not in chunks")
    length = fields.get("content-length", "0")
    if not _LENGTH.fullmatch(length):
        raise WireError(400, "bad_http", "Content-Length must be one whole number")
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
        """The head of the next request; None where none comes. Raises WireError where it is too long or slow."""
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
            raise WireError(408, "too_slow", f"the request did not arrive within {request_s:g} s") from None
        if not 0 <= end <= _MAX_HEAD_BYTES:
            raise WireError(431, "headers_too_large", f"headers may have {_MAX_HEAD_BYTES} bytes")
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return head

    async def body(self, head: Head, request_s: float) -> bytes:
        """Raises WireError where it is too slow, ConnectionError where it ends early."""
        if head.expects_continue and len(self._buffer) < head.num_body_bytes:
            self.tell_to_wait()
        try:
            async with asyncio.timeout(request_s):
                while len(self._buffer) < head.num_body_bytes:
                    if not await self._fill():
                        raise ConnectionError("the body ended early")
        except TimeoutError:
            raise WireError(408, "too_slow", f"the request did not arrive within {request_s:g} s") from None
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
            watched: list[asyncio.Future[Any]] = [reply, *([self._filling] if self._filling else [])]
            await asyncio.wait(watched, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._filling is not None and self._filling.done():
                filling, self._filling = self._filling, None
                if not filling.result():
                    return reply.done()
        return True

    def tell_to_wait(self) -> None:
        self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(self, status: int, body: bytes, kind: str, *, keeps_alive: bool, timeout_s: float) -> None:
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
