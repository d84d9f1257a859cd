"""This module has a client that sends one JSON request and reads the JSON answer, and a client for
vLLM's prompt logprobs.

Each request has a connection of its own: the rest of an earlier answer, or a late answer, cannot be
mistaken for another request's. A request with a time limit ends within it. Without one, the pool
kills a worker whose server hangs or sends its bytes too slowly. Errors are one line and show no
secret.
"""

from __future__ import annotations

import datetime
import email.utils
import functools
import http.client
import json
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from grpo_spmd.config.describe import redact
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.rewards.trl import FailedCallError

MAX_ANSWER_BYTES = 1 << 20
# HTTP statuses after which a call is repeated; all 5xx are repeated too.
_RETRIED_STATUSES = (408, 429)
# How many characters of a refusing answer an error shows.
_MAX_SHOWN_CHARS = 200
_MAX_ERROR_BYTES = 8192
# Prompt logprobs.
# The bound of an answer's size for one token at one position.
_BYTES_A_TOKEN = 256
# Rounding may bring a probability this far above 1.
_ROUNDING = 1e-4


def headers_of(headers_env: Mapping[str, str], entry: str) -> dict[str, str]:
    """Returns the headers, with their values from environment variables.

    Raises ConfigError, without the value, for a variable that is not there or cannot be sent.
    """
    headers = {}
    for name, variable in headers_env.items():
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(
                f"{entry}.{name}: the environment variable {variable} is not set, or empty; "
                "export it"
            )
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(
                f"{entry}.{name}: what {variable} holds cannot be sent as a header: it is no plain "
                "text"
            )
        headers[name] = value
    return headers


class UnexpectedError(ValueError):
    """An answer that gives no reward.

    `content` is the whole answer. It may hold a secret, so only the client shows it, after removing
    the secrets that it sent; in a part of the answer a secret could be cut and missed.
    """

    def __init__(self, message: str, content: object = "") -> None:
        super().__init__(message)
        self.content = content


class JsonClient:
    """Sends JSON requests to one address."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`headers` may hold secrets: no error shows their values."""
        address = urlsplit(url)
        self._host = str(address.hostname)
        self._is_https = address.scheme == "https"
        # Without a port http.client looks for one in the host, and finds it in an IPv6 address.
        self._port = address.port or (443 if self._is_https else 80)
        self._target = (address.path or "/") + (f"?{address.query}" if address.query else "")
        self._headers = {
            **headers,
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        secrets = set(headers.values())
        # "Bearer abc": abc alone is one too.
        for value in headers.values():
            secrets |= {word for word in (value, *value.split()) if len(word) > 3}
        # As it stands in JSON.
        secrets |= {json.dumps(secret)[1:-1] for secret in secrets}
        # The longest first: one may be a part of another.
        self._secrets = sorted(secrets, key=len, reverse=True)

    def ask(
        self,
        body: Mapping[str, Any] | None,
        *,
        limit_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Any:
        """Returns the answer to `body`, or to a GET request if it is None, within twice `limit_s`
        seconds.

        Raises FailedCallError.
        """
        payload = None
        if body is not None:
            try:
                payload = json.dumps(body, allow_nan=False, default=str).encode()
            except (ValueError, RecursionError) as error:
                raise FailedCallError(f"cannot be asked: the data is not JSON ({error})") from None
        connection = self._connection()
        try:
            with _closed_after(connection, limit_s):
                method = "GET" if payload is None else "POST"
                connection.request(method, self._target, payload, self._headers)
                return self._read(connection.getresponse(), max_bytes)
        except ssl.SSLCertVerificationError as error:
            raise FailedCallError(f"cannot be asked: {error.verify_message}") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            message = f"did not answer ({self._redact(reason)})"
            raise FailedCallError(message, may_retry=True) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_https:
            return http.client.HTTPSConnection(self._host, self._port, context=_tls())
        return http.client.HTTPConnection(self._host, self._port)

    def _read(self, response: http.client.HTTPResponse, max_bytes: int) -> Any:
        status = response.status
        encoding = response.getheader("Content-Encoding", "identity").lower()
        if not 200 <= status < 300:
            raise self._refusal(response, encoding)
        if encoding not in ("", "identity"):
            message = "answered with compressed data, which was not asked for"
            raise FailedCallError(message, status=status)
        length = response.length or 0
        content = b"" if length > max_bytes else response.read(max_bytes + 1)
        if max(length, len(content)) > max_bytes:
            raise FailedCallError(f"answered with more than {max_bytes >> 20} MiB", status=status)
        # What is missing of it: read() says nothing where it is given a number.
        if response.length:
            raise FailedCallError("did not answer to the end", may_retry=True, status=status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            excerpt = self._redact(content[:_MAX_ERROR_BYTES].decode(errors="replace"))
            message = f"answered what is no JSON: {excerpt!r}"
            raise FailedCallError(message, may_retry=True, status=status) from None

    def _refusal(self, response: http.client.HTTPResponse, encoding: str) -> FailedCallError:
        """Returns the error for a status other than 2xx."""
        status = response.status
        message = f"answered {status} {self._redact(response.reason)}"
        if encoding == "identity":
            excerpt = self._redact(response.read(_MAX_ERROR_BYTES).decode(errors="replace"))
            message += f": {excerpt!r}" if excerpt.strip() else ""
        may_retry = status in _RETRIED_STATUSES or status >= 500
        wait_s = retry_after_s(response.getheader("Retry-After")) if may_retry else None
        return FailedCallError(message, may_retry=may_retry, wait_s=wait_s, status=status)

    def malformed(self, error: UnexpectedError) -> FailedCallError:
        """Returns the failure of a call whose answer has an unexpected form."""
        message = f"answered {error}"
        if not isinstance(error.content, str):
            message += f": {self._redact(json.dumps(error.content, ensure_ascii=False))}"
        elif error.content:
            message += f": {self._redact(error.content)!r}"
        return FailedCallError(message, may_retry=True, status=200)

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "<redacted>")
        return redact(text)[:_MAX_SHOWN_CHARS]


@contextmanager
def _closed_after(connection: http.client.HTTPConnection, limit_s: float | None) -> Iterator[None]:
    """Connects, and shuts the connection down after `limit_s` seconds.

    A socket's own timeout starts again with each byte, so that a server could send slowly for ever.
    """
    if limit_s is None:
        yield
        return
    connection.timeout = limit_s
    connection.connect()
    # The connection forgets its socket once the headers are read, so the timer keeps it.
    timer = threading.Timer(limit_s, _shut, [connection.sock])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        # Not TLS's own, which waits.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def retry_after_s(value: str | None) -> float | None:
    """Returns the seconds of a Retry-After header: a number or a date (RFC 9110, 10.2.3); None
    otherwise."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        return max(date.timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def as_finite(value: Any) -> float:
    """Returns a JSON number as a float; true is 1.

    Raises UnexpectedError if it is not finite.
    """
    if not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        raise UnexpectedError("what is no finite number", value)
    return float(value)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


# Prompt logprobs: the logprobs that a vLLM server returns for tokens that it did not sample. The
# request has token ids, so that nothing is tokenized twice. Each position of the answer is checked
# to belong to this sequence: vLLM returns the ids that it was given, and its tokens at each
# position always include the prompt's own token.


@dataclass(frozen=True)
class PositionLogprobs:
    """The server's logprobs at one position of a sequence."""

    # The logprob of the token that stands at this position.
    logprob: float
    # As many (token id, logprob) pairs as requested, the likeliest first.
    likeliest: list[tuple[int, float]]
    # The token as the server writes it, or "" where it does not.
    text: str = field(default="", compare=False)


class ServedModel(msgspec.Struct, frozen=True):
    """One model that a server offers."""

    name: str = msgspec.field(name="id")
    # The most tokens of prompt and completion together; None if the server does not say.
    max_tokens: int | None = msgspec.field(name="max_model_len", default=None)


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


class PromptLogprobs:
    """Asks one server for one model's prompt logprobs."""

    def __init__(self, url: str, headers: Mapping[str, str], model: str | None = None) -> None:
        """`url` ends with /completions. `headers` may hold secrets: no error shows their values."""
        address, _, query = url.partition("?")
        models = address.removesuffix("/completions") + "/models" + (f"?{query}" if query else "")
        self._completions = JsonClient(url, headers)
        self._models = JsonClient(models, headers)
        self._model = model

    def list_models(self, limit_s: float) -> list[ServedModel]:
        """Returns the server's models. Raises FailedCallError."""
        answer = self._models.ask(None, limit_s=limit_s)
        try:
            return msgspec.convert(answer, _ModelList).data
        except msgspec.ValidationError:
            raise self._models.malformed(UnexpectedError("no list of models", answer)) from None

    def ask(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[PositionLogprobs]:
        """Returns the logprobs of each token except the first. Raises FailedCallError."""
        ids = [int(token_id) for token_id in token_ids]
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
            "add_special_tokens": False,
            "return_token_ids": True,
            "stream": False,
        }
        max_bytes = MAX_ANSWER_BYTES + len(ids) * (top_k + 1) * _BYTES_A_TOKEN
        answer = self._completions.ask(body, limit_s=limit_s, max_bytes=max_bytes)
        try:
            return _read_positions(answer, ids, top_k)
        except UnexpectedError as error:
            raise self._completions.malformed(error) from None


class _Token(msgspec.Struct):
    """The server's entry for one token at one position."""

    # vLLM writes minus infinity as -9999. Rounding may bring a probability above 1.
    logprob: Annotated[float, msgspec.Meta(gt=-9999.0, le=_ROUNDING)]
    rank: int | None = 1
    decoded_token: str | None = None


_Tokens = dict[Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9][0-9]{0,8})\Z")], _Token]


class _Choice(msgspec.Struct):
    prompt_logprobs: list[_Tokens | None]
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


def _read_positions(answer: Any, token_ids: Sequence[int], top_k: int) -> list[PositionLogprobs]:
    """Returns each position except the first.

    Raises UnexpectedError for an answer that does not belong to these tokens. The error shows no
    part of the answer, which may be of any size.
    """
    try:
        choice = msgspec.convert(answer, _Answer).choices[0]
    except msgspec.ValidationError as error:
        raise UnexpectedError(f"prompt_logprobs of another form: {error}") from None
    positions = choice.prompt_logprobs
    if choice.prompt_token_ids not in (None, token_ids):
        raise UnexpectedError("for another prompt than it was asked of")
    if len(positions) != len(token_ids):
        raise UnexpectedError(f"{len(positions)} prompt_logprobs for {len(token_ids)} tokens")
    return [
        _read_position(tokens or {}, str(token_id), top_k)
        for tokens, token_id in zip(positions[1:], token_ids[1:], strict=True)
    ]


def _read_position(tokens: Mapping[str, _Token], prompt_token: str, top_k: int) -> PositionLogprobs:
    """Returns the logprobs of one position. `tokens` has the server's entries by token id."""
    if prompt_token not in tokens:
        raise UnexpectedError("prompt_logprobs without the prompt's own token at its place")
    logprobs = {name: min(token.logprob, 0.0) for name, token in tokens.items()}
    # The prompt's own is there in addition if it is not among the likeliest; nothing else ever is.
    likeliest = dict(logprobs)
    if len(tokens) > top_k:
        del likeliest[prompt_token]
    is_above = prompt_token not in likeliest and logprobs[prompt_token] > min(
        likeliest.values(), default=0.0
    )
    has_odd_rank = any(tokens[name].rank not in range(1, top_k + 1) for name in likeliest)
    if len(likeliest) != top_k or is_above or has_odd_rank:
        raise UnexpectedError(
            f"{len(tokens)} tokens at a place, which are not the {top_k} likeliest and its own"
        )
    # NaN fails the comparison, so it is refused too.
    if not math.fsum(map(math.exp, logprobs.values())) <= 1 + _ROUNDING:
        raise UnexpectedError("probabilities that add up to more than 1")
    in_order = sorted(
        ((int(name), logprob) for name, logprob in likeliest.items()),
        key=lambda token: (-token[1], token[0]),
    )
    text = tokens[prompt_token].decoded_token or ""
    return PositionLogprobs(logprobs[prompt_token], in_order, text)
