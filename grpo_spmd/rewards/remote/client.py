"""One POST of JSON, and the JSON that answers it, or one line that says what went wrong and no secret.

Each request has a connection of its own: what is left over of an earlier answer, or comes late, can be nobody else's.
It has a time limit where it is given one. Else whoever hangs or drips is killed by the pool with its process.
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
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from grpo_spmd.config.describe import redact
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.rewards.trl import FailedCallError

MAX_ANSWER_BYTES = 1 << 20
_RETRIED = (408, 429)  # and 5xx
_MOST_SHOWN = 200  # characters of what an error's answer says


def headers_of(headers_env: Mapping[str, str], where: str) -> dict[str, str]:
    """The headers, out of the environment. ConfigError, without its value, for a variable that is not there or cannot
    be sent."""
    headers = {}
    for name, variable in headers_env.items():
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(
                f"{where}.{name}: the environment variable {variable} is not set, or empty; export it"
            )
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(
                f"{where}.{name}: what {variable} holds cannot be sent as a header: it is no plain text"
            )
        headers[name] = value
    return headers


class UnexpectedError(ValueError):
    """An answer that gives no reward. `said` is of the answer, whole: it may hold a secret, which only the client that
    sent it can find there, and not in a part of it."""

    def __init__(self, what: str, said: object = "") -> None:
        super().__init__(what)
        self.said = said


class JsonClient:
    """Asks one address."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`headers` may hold secrets: no error shows their values."""
        parts = urlsplit(url)
        self._host, self._is_safe = str(parts.hostname), parts.scheme == "https"
        # Without a port http.client looks for one in the host, and finds it in an IPv6 address.
        self._port = parts.port or (443 if self._is_safe else 80)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        own = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        self._headers = {**headers, **own}
        pieces = {
            piece
            for value in headers.values()
            for piece in (value, *value.split())
            if len(piece) > 3
        }
        pieces |= {*headers.values()}
        pieces |= {json.dumps(piece)[1:-1] for piece in pieces}  # as it stands in an answer's JSON
        self._secrets = sorted(pieces, key=len, reverse=True)

    def ask(
        self,
        body: Mapping[str, Any] | None,
        *,
        limit_s: float | None = None,
        most_bytes: int = MAX_ANSWER_BYTES,
    ) -> Any:
        """The answer to `body`, or to GET, within twice `limit_s` at the most. Raises FailedCallError."""
        try:
            payload = (
                None if body is None else json.dumps(body, allow_nan=False, default=str).encode()
            )
        except (ValueError, RecursionError) as error:
            raise FailedCallError(f"cannot be asked: the data is not JSON ({error})") from None
        connection = self._connection()
        try:
            with _cut_after(connection, limit_s):
                connection.request(
                    "GET" if payload is None else "POST", self._target, payload, self._headers
                )
                return self._answer(connection.getresponse(), most_bytes)
        except ssl.SSLCertVerificationError as error:
            raise FailedCallError(f"cannot be asked: {error.verify_message}") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise FailedCallError(f"did not answer ({self._shown(what)})", may_retry=True) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_safe:
            return http.client.HTTPSConnection(self._host, self._port, context=_tls())
        return http.client.HTTPConnection(self._host, self._port)

    def _answer(self, response: http.client.HTTPResponse, most_bytes: int) -> Any:
        status, encoding = (
            response.status,
            response.getheader("Content-Encoding", "identity").lower(),
        )
        if not 200 <= status < 300:
            said = (
                self._shown(response.read(8192).decode(errors="replace"))
                if encoding == "identity"
                else ""
            )
            why = f"answered {status} {self._shown(response.reason)}" + (
                f": {said!r}" if said.strip() else ""
            )
            may_retry = status in _RETRIED or status >= 500
            wait_s = retry_after_s(response.getheader("Retry-After")) if may_retry else None
            raise FailedCallError(why, may_retry=may_retry, wait_s=wait_s, status=status)
        if encoding not in ("", "identity"):
            raise FailedCallError(
                "answered with compressed data, which was not asked for", status=status
            )
        said_bytes = response.length or 0
        content = b"" if said_bytes > most_bytes else response.read(most_bytes + 1)
        if max(said_bytes, len(content)) > most_bytes:
            raise FailedCallError(f"answered with more than {most_bytes >> 20} MiB", status=status)
        if response.length:  # what is missing of it: read() says nothing where it is given a number
            raise FailedCallError("did not answer to the end", may_retry=True, status=status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            said = self._shown(content[:8192].decode(errors="replace"))
            raise FailedCallError(
                f"answered what is no JSON: {said!r}", may_retry=True, status=status
            ) from None

    def malformed(self, error: UnexpectedError) -> FailedCallError:
        why = f"answered {error}"
        if isinstance(error.said, str):
            why += f": {self._shown(error.said)!r}" if error.said else ""
        else:
            why += f": {self._shown(json.dumps(error.said, ensure_ascii=False))}"
        return FailedCallError(why, may_retry=True, status=200)

    def _shown(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "<redacted>")
        return redact(text)[:_MOST_SHOWN]


@contextmanager
def _cut_after(connection: http.client.HTTPConnection, limit_s: float | None) -> Iterator[None]:
    """Connects, and shuts the line after so many seconds, also to who drips: a timeout of a socket begins anew with
    each byte."""
    if limit_s is None:
        yield
        return
    connection.timeout = limit_s
    connection.connect()
    timer = threading.Timer(
        limit_s, _shut, [connection.sock]
    )  # which forgets its socket once the headers are read
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(line: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(line, socket.SHUT_RDWR)  # not TLS's own, which waits


def retry_after_s(value: str | None) -> float | None:
    """What a Retry-After asks for: a number of seconds or a date (RFC 9110, 10.2.3). None where it is neither."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,9}", value := value.strip()):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        seconds = date.timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0)


def number_in(answer: Any, names: Sequence[str]) -> float:
    """`answer` itself, or what it has under the first of `names` that is there; alone in a list too. Raises
    UnexpectedError."""
    if isinstance(answer, dict):
        name = next((name for name in names if name in answer), None)
        if name is None:
            raise UnexpectedError(f"an object without {', '.join(names)}")
        answer = answer[name]
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return finite(answer)


def finite(value: Any) -> float:
    """Raises UnexpectedError for what is no number of JSON, or not finite. true is 1."""
    if not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        raise UnexpectedError("what is no finite number", value)
    return float(value)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


# What a vLLM server says of tokens that it did not sample: their logprobs, and of the likeliest ones at each place.
#
# It is asked by token ids, so that nothing is tokenized twice. Of an answer it is proved, place by place, that it is of
# this sequence: vLLM returns the ids that it was given, and has among the tokens of each place always the prompt's own.


_MOST_BYTES_OF_ONE = 256  # of what an answer says of one token at one place
_NO_LESS = -9999.0  # vLLM's for minus infinity
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_ABOVE = 1e-4  # by which rounding may take a probability over 1


@dataclass(frozen=True)
class Place:
    """What is said of one place of a sequence."""

    logprob: float  # of the token that is there
    likeliest: list[tuple[int, float]]  # as many as were asked for, the likeliest first


@dataclass(frozen=True)
class Served:
    """A model that a server has."""

    name: str
    max_tokens: int | None  # of prompt and completion; None: it does not say


class PromptLogprobs:
    """Asks one server for one model's."""

    def __init__(self, url: str, headers: Mapping[str, str], model: str | None = None) -> None:
        """`url` ends with /completions. `headers` may hold secrets: no error shows their values."""
        address, _, query = url.partition("?")
        models = address.removesuffix("/completions") + "/models" + (f"?{query}" if query else "")
        self._completions, self._models = JsonClient(url, headers), JsonClient(models, headers)
        self._model = model

    def served(self, limit_s: float) -> list[Served]:
        """Its models. Raises FailedCallError."""
        answer = self._models.ask(None, limit_s=limit_s)
        try:
            found = [(each["id"], each.get("max_model_len")) for each in answer["data"]]
        except (KeyError, TypeError, AttributeError):
            raise self._models.malformed(UnexpectedError("no list of models", answer)) from None
        return [Served(str(name), most if isinstance(most, int) else None) for name, most in found]

    def ask(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[Place]:
        """Of each token but the first, by what stands before it. Raises FailedCallError."""
        return [place for place, _ in self._ask(token_ids, top_k, limit_s)]

    def texts(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[str]:
        """Each token but the first as its server writes it; "" where it does not. As `ask`."""
        said = self._ask(token_ids, top_k, limit_s)
        return [str(own.get("decoded_token") or "") for _, own in said]

    def _ask(
        self, token_ids: Sequence[int], top_k: int, limit_s: float
    ) -> list[tuple[Place, Mapping[str, Any]]]:
        ids = [int(token_id) for token_id in token_ids]
        body = {
            "model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k,
            "add_special_tokens": False, "return_token_ids": True, "stream": False,
        }  # fmt: skip
        most_bytes = MAX_ANSWER_BYTES + len(ids) * (top_k + 1) * _MOST_BYTES_OF_ONE
        answer = self._completions.ask(body, limit_s=limit_s, most_bytes=most_bytes)
        try:
            return _read(answer, ids, top_k)
        except UnexpectedError as error:
            raise self._completions.malformed(error) from None


def _read(
    answer: Any, token_ids: Sequence[int], top_k: int
) -> list[tuple[Place, Mapping[str, Any]]]:
    """Raises UnexpectedError for what is no answer to these tokens, none of which it shows: it may be of any size."""
    try:
        choice = answer["choices"][0]
        places, given = choice["prompt_logprobs"], choice.get("prompt_token_ids")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UnexpectedError("no choices[0].prompt_logprobs") from None
    if given is not None and given != token_ids:
        raise UnexpectedError("for another prompt than it was asked of")
    if not isinstance(places, list) or len(places) != len(token_ids):
        number = len(places) if isinstance(places, list) else "no"
        raise UnexpectedError(f"{number} prompt_logprobs for {len(token_ids)} tokens")
    return [
        _read_place(said, str(own), top_k)
        for said, own in zip(places[1:], token_ids[1:], strict=True)
    ]


def _read_place(said: Any, own: str, top_k: int) -> tuple[Place, Mapping[str, Any]]:
    if not isinstance(said, dict) or not all(
        _TOKEN_ID.fullmatch(i) and isinstance(x, dict) for i, x in said.items()
    ):
        raise UnexpectedError("prompt_logprobs of another form")
    if own not in said:
        raise UnexpectedError("prompt_logprobs without the prompt's own token at its place")
    logprobs = {name: _logprob(each.get("logprob")) for name, each in said.items()}
    # The prompt's own is there in addition where it is not among the likeliest, and nothing else ever is.
    likeliest = {
        name: value for name, value in logprobs.items() if len(said) <= top_k or name != own
    }
    ranks = [said[name].get("rank", 1) for name in likeliest]
    is_above = own not in likeliest and logprobs[own] > min(likeliest.values(), default=0.0)
    if (
        len(likeliest) != top_k
        or is_above
        or any(rank not in range(1, top_k + 1) for rank in ranks)
    ):
        raise UnexpectedError(
            f"{len(said)} tokens at a place, which are not the {top_k} likeliest and its own"
        )
    if math.fsum(map(math.exp, logprobs.values())) > 1 + _ABOVE:
        raise UnexpectedError("probabilities that add up to more than 1")
    in_order = sorted(
        ((int(name), value) for name, value in likeliest.items()),
        key=lambda each: (-each[1], each[0]),
    )
    return Place(logprobs[own], in_order), said[own]


def _logprob(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _NO_LESS < value <= _ABOVE:  # NaN is neither
        raise UnexpectedError("what is no logprob", value if is_number else "")
    return min(float(value), 0.0)
