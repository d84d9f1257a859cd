"""This module has a client that sends JSON requests and reads JSON answers, a client for vLLM's
prompt logprobs, and a class that makes many calls under limits.

Each request has its own connection, so that a late answer, or the rest of an earlier one, cannot be
mistaken for the answer to another request. A request with a time limit ends within it, however
slowly the server sends. Without one, the caller must be a pool worker: the pool kills a worker that
waits too long. Errors are one line and show no secrets.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from grpo_spmd.config.describe import redact
from grpo_spmd.config.errors import ConfigError, within
from grpo_spmd.rewards.pool.call_limits import Call, CallLimits
from grpo_spmd.rewards.trl import MAX_REWARD, FailedCallError

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES = 1 << 20
# HTTP statuses after which a call may be repeated, besides all of 500 and above.
_RETRIED_STATUSES = (408, 429)
# Extra seconds for aiohttp to end a request by its own time limit, before its thread is abandoned.
_GRACE_S = 1.0
# How many characters of an answer an error shows, and how many bytes of it are searched for
# secrets.
_MAX_SHOWN_CHARS = 200
_MAX_ERROR_BYTES = 8192
# Prompt logprobs: the largest size of an answer's entry for one token at one position.
_BYTES_A_TOKEN = 256
# Rounding may make a probability this much larger than 1.
_ROUNDING = 1e-4


def headers_of(
    headers_env: Mapping[str, str], entry: str, variables: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns HTTP headers by name, with values from the environment variables that `headers_env`
    names.

    Raises ConfigError, which does not show the value, if a variable is not set or cannot be sent.
    """
    headers = {}
    for name, variable in headers_env.items():
        value = variables.get(variable, "").strip()
        if not (value and value.isascii() and value.isprintable()):
            raise ConfigError(
                f"{entry}.{name}: the environment variable {variable} is not set, or its value is "
                "not plain text that can be sent as a header; export it"
            )
        headers[name] = value
    return headers


class UnexpectedError(ValueError):
    """Raised for an answer that is not as expected. The message completes "answered ...".

    `content` is the whole answer or the whole value that is wrong. It may repeat a secret of the
    request, so only JsonClient shows it, after removing secrets. It must be whole, because half a
    secret would not be found.
    """

    def __init__(self, message: str, content: object = "") -> None:
        super().__init__(message)
        self.content = content


class FirstAnswer:
    """Checks that all answers of a server come from the model and vocabulary of its first answer.

    Otherwise a server that was replaced during the run would change the rewards unnoticed.
    """

    def __init__(self) -> None:
        # The name of the model under "model", and texts of tokens by id.
        self._facts: dict[Any, str] = {}

    def check(self, model: str | None, tokens: Mapping[int, str] | None = None) -> None:
        """Compares the name of the model that answered, and texts of tokens by id, with those of
        earlier answers.

        Raises UnexpectedError if they differ. Several threads may call it at once.
        """
        first = self._facts.setdefault("model", model) if model else model
        if first != model:
            raise UnexpectedError("by another model than before", [first, model])
        for token_id, text in (tokens or {}).items():
            # Only ASCII texts are compared: vLLM's text of a token that is a part of a character
            # depends on the tokens beside it.
            first = self._facts.setdefault(token_id, text) if text and text.isascii() else text
            if first != text:
                message = f"with another vocabulary than before: token {token_id}"
                raise UnexpectedError(message, [first, text])


class JsonClient:
    """Sends JSON requests to one address, and returns the JSON answers or raises
    FailedCallError."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """The values of `headers` may be secrets: no error shows them."""
        self._url = url
        self._headers = {
            **headers,
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        secrets = set(headers.values())
        # In "Bearer abcd" the word "abcd" alone is a secret, too.
        secrets |= {word for value in secrets for word in value.split() if len(word) > 3}
        # A JSON answer has a secret in escaped form.
        secrets |= {json.dumps(secret)[1:-1] for secret in secrets}
        # The longest is removed first, since one may be a part of another.
        self._secrets = sorted(secrets, key=len, reverse=True)

    def ask(
        self,
        body: Mapping[str, Any] | None,
        *,
        limit_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Any:
        """Returns the JSON answer to a POST request with `body`, or to a GET request if it is None.

        Raises FailedCallError if there is none, within `limit_s` seconds if given, or if it is
        larger than `max_bytes`.
        """
        payload = None
        if body is not None:
            try:
                payload = json.dumps(body, allow_nan=False, default=str).encode()
            except (ValueError, RecursionError) as error:
                raise FailedCallError(f"cannot be asked: the data is not JSON ({error})") from None

        # Imported here, since this takes 0.2 s and most runs ask no server.
        import aiohttp
        from aiohttp.http_exceptions import HttpProcessingError

        def ask() -> Any:
            """Makes the request in an event loop of its own."""
            return asyncio.run(self._ask(payload, limit_s, max_bytes))

        try:
            # With a time limit, the request gets its own thread: in a notebook the calling thread
            # already has an event loop, and a DNS lookup cannot be ended, only abandoned.
            return ask() if limit_s is None else within(limit_s + _GRACE_S, ask)
        except aiohttp.ClientConnectorCertificateError as error:
            raise FailedCallError(f"cannot be asked: {error.certificate_error}") from None
        # aiohttp's parser in Python, used where its C code is missing, raises HttpProcessingError.
        except (aiohttp.ClientError, HttpProcessingError, OSError, UnicodeError) as error:
            details = " ".join(str(error).split())
            reason = f"{type(error).__name__}: {details}" if details else type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError) and error.strerror:
                # aiohttp's message has two addresses around the reason, so take the reason alone.
                # The error numbers of DNS and TLS are not errno's, so os.strerror is wrong there.
                has_errno = not isinstance(
                    error, aiohttp.ClientConnectorDNSError | aiohttp.ClientSSLError
                )
                reason = os.strerror(error.errno) if has_errno and error.errno else error.strerror
            address = self._url.partition("?")[0]
            message = f"did not answer: {self._redact(f'{reason} ({address})')}"
            raise FailedCallError(message, may_retry=True) from None

    async def _ask(self, payload: bytes | None, limit_s: float | None, max_bytes: int) -> Any:
        """Sends one request over a new connection and returns the JSON of its response."""
        import aiohttp

        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=limit_s), auto_decompress=False
            ) as session,
            session.request(
                "GET" if payload is None else "POST",
                self._url,
                data=payload,
                headers=self._headers,
                allow_redirects=False,
            ) as response,
        ):
            try:
                return await self._read(response, max_bytes)
            except aiohttp.ClientPayloadError:
                message = "did not answer to the end"
                raise FailedCallError(message, may_retry=True, status=response.status) from None

    async def _read(self, response: aiohttp.ClientResponse, max_bytes: int) -> Any:
        """Returns the JSON of a response, of which it reads little more than `max_bytes`.

        Raises FailedCallError for an HTTP error, and for a body that is too long or not JSON.
        """
        status = response.status
        length = response.content_length or 0
        is_plain = response.headers.get("Content-Encoding", "").lower() in ("", "identity")
        content = bytearray()
        if is_plain and length <= max_bytes:
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > max_bytes:
                    break
        excerpt = self._redact(content[:_MAX_ERROR_BYTES].decode(errors="replace"))
        if not 200 <= status < 300:
            message = f"answered {status} {self._redact(response.reason or '')}"
            message += f": {excerpt!r}" if excerpt.strip() else ""
            may_retry = status in _RETRIED_STATUSES or status >= 500
            wait_s = retry_after_s(response.headers.get("Retry-After", "")) if may_retry else None
            raise FailedCallError(message, may_retry=may_retry, wait_s=wait_s, status=status)
        if not is_plain:
            message = "answered with compressed data, which was not asked for"
            raise FailedCallError(message, status=status)
        if max(length, len(content)) > max_bytes:
            raise FailedCallError(f"answered with more than {max_bytes >> 20} MiB", status=status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            message = f"answered text that is not JSON: {excerpt!r}"
            raise FailedCallError(message, may_retry=True, status=status) from None

    def malformed(self, error: UnexpectedError) -> FailedCallError:
        """Returns the FailedCallError to raise for an answer that is not as expected."""
        message = f"answered {error}"
        if error.content != "":
            message += f": {self._redact(json.dumps(error.content, ensure_ascii=False))}"
        return FailedCallError(message, may_retry=True, status=200)

    def _redact(self, text: str) -> str:
        """Returns the beginning of `text`, without secrets and unprintable characters."""
        for secret in self._secrets:
            text = text.replace(secret, "<redacted>")
        # A terminal would execute escape sequences in a server's text.
        printable = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
        return redact(printable)[:_MAX_SHOWN_CHARS]


def retry_after_s(value: str) -> float | None:
    """Returns the seconds to wait that a Retry-After header gives, as a number or a date.

    Returns None if it has neither (RFC 9110, 10.2.3).
    """
    if re.fullmatch(r"\s*\d{1,9}\s*", value):
        return float(value)
    try:
        # A date without a zone is in UTC.
        date = parsedate_tz(value)
        return None if date is None else max(mktime_tz(date) - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def as_finite(value: Any) -> float:
    """Returns a reward in a server's answer as a float; true becomes 1.0.

    Raises UnexpectedError if it is not a finite number, or larger than a reward may be.
    """
    if not isinstance(value, int | float) or not abs(value) < math.inf:
        raise UnexpectedError("a value that is not a finite number", value)
    if abs(value) > MAX_REWARD:
        raise UnexpectedError(f"a number beyond {MAX_REWARD:g}", value)
    return float(value)


# Prompt logprobs are the logprobs that a vLLM server returns for the tokens of a prompt, which it
# did not sample. The request has token ids, so that the server does not tokenize the text again.
# Each position of the answer is checked to belong to this prompt: vLLM returns the ids that it was
# given, and its tokens at a position always include the prompt's own token.


@dataclass(frozen=True)
class PositionLogprobs:
    """A vLLM server's logprobs at one position of a sequence that it was given."""

    # The logprob of the sequence's own token at this position.
    logprob: float
    # The top_k likeliest tokens as (token id, logprob), the likeliest first.
    likeliest: list[tuple[int, float]]
    # The server's text of the sequence's own token, or "" if it sends none.
    text: str = field(default="", compare=False)


class ServedModel(msgspec.Struct, frozen=True):
    """One model that a server offers, by its answer to GET /models."""

    name: str = msgspec.field(name="id")
    # The largest number of tokens of prompt and completion together, or None if it is not given.
    max_tokens: int | None = msgspec.field(name="max_model_len", default=None)


class _ModelList(msgspec.Struct):
    """The part that is used of a server's answer to GET /models."""

    data: list[ServedModel]


class PromptLogprobs:
    """Asks a vLLM server for prompt logprobs: those of the tokens of a given prompt, by one of its
    models."""

    def __init__(self, url: str, headers: Mapping[str, str], model: str | None = None) -> None:
        """`url` ends with /completions. The values of `headers` may be secrets: no error shows
        them.
        """
        address, _, query = url.partition("?")
        models = address.removesuffix("/completions") + "/models" + (f"?{query}" if query else "")
        self._completions = JsonClient(url, headers)
        self._models = JsonClient(models, headers)
        self._model = model
        self._first = FirstAnswer()

    def list_models(self, limit_s: float) -> list[ServedModel]:
        """Returns the server's models. Raises FailedCallError."""
        answer = self._models.ask(None, limit_s=limit_s)
        try:
            return msgspec.convert(answer, _ModelList).data
        except msgspec.ValidationError:
            raise self._models.malformed(UnexpectedError("no list of models", answer)) from None

    def ask(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[PositionLogprobs]:
        """Returns the logprobs at each position of `token_ids` except the first.

        Each position has the prompt's own token and the `top_k` likeliest tokens. Raises
        FailedCallError if there is no such answer within `limit_s` seconds.
        """
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
            positions = _read_positions(answer, ids, top_k)
            texts = (position.text for position in positions)
            self._first.check(answer.get("model"), dict(zip(ids[1:], texts, strict=True)))
            return positions
        except UnexpectedError as error:
            raise self._completions.malformed(error) from None


class _Token(msgspec.Struct):
    """The server's entry in `prompt_logprobs` for one token at one position."""

    # vLLM sends -9999 for minus infinity. Rounding may make a probability larger than 1.
    logprob: Annotated[float, msgspec.Meta(gt=-9999.0, le=_ROUNDING)]
    rank: int | None = 1
    decoded_token: str | None = None


_Tokens = dict[Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9][0-9]{0,8})\Z")], _Token]


class _Choice(msgspec.Struct):
    """One choice of an answer. Each list has one entry for each token of the prompt."""

    # None at the first token, which has no logprob.
    prompt_logprobs: list[_Tokens | None]
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    """The parts that are used of an answer to a request for prompt logprobs."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    model: str | None = None


def _read_positions(answer: Any, token_ids: Sequence[int], top_k: int) -> list[PositionLogprobs]:
    """Returns the logprobs of an answer at each position except the first.

    Raises UnexpectedError if the answer does not belong to these tokens. The error does not show
    the answer, which may be very large.
    """
    try:
        choice = msgspec.convert(answer, _Answer).choices[0]
    except msgspec.ValidationError as error:
        raise UnexpectedError(f"prompt_logprobs of an unexpected form: {error}") from None
    positions = choice.prompt_logprobs
    if choice.prompt_token_ids not in (None, token_ids):
        raise UnexpectedError("for another prompt than the request's")
    if len(positions) != len(token_ids):
        raise UnexpectedError(f"{len(positions)} prompt_logprobs for {len(token_ids)} tokens")
    return [
        _read_position(tokens or {}, str(token_id), top_k)
        for tokens, token_id in zip(positions[1:], token_ids[1:], strict=True)
    ]


def _read_position(tokens: Mapping[str, _Token], prompt_token: str, top_k: int) -> PositionLogprobs:
    """Returns the logprobs of one position.

    `tokens` has the server's entries by token id (as text). `prompt_token` is the id of the
    prompt's own token. Raises UnexpectedError if the entries are not those of the `top_k` likeliest
    tokens and of the prompt's own token.
    """
    if prompt_token not in tokens:
        raise UnexpectedError("prompt_logprobs without the prompt's own token at its position")
    logprobs = {name: min(token.logprob, 0.0) for name, token in tokens.items()}
    # vLLM sends top_k tokens, and one more if the prompt's own is not among them.
    likeliest = dict(logprobs)
    if len(tokens) > top_k:
        del likeliest[prompt_token]
    # True if the prompt's own token is likelier than one of the `top_k` likeliest tokens.
    is_above = prompt_token not in likeliest and logprobs[prompt_token] > min(
        likeliest.values(), default=0.0
    )
    has_odd_rank = any(tokens[name].rank not in range(1, top_k + 1) for name in likeliest)
    if len(likeliest) != top_k or is_above or has_odd_rank:
        raise UnexpectedError(
            f"{len(tokens)} tokens at a position, not the {top_k} likeliest and the prompt's own"
        )
    # Written with `not`, so that NaN is refused, too.
    if not math.fsum(map(math.exp, logprobs.values())) <= 1 + _ROUNDING:
        raise UnexpectedError("probabilities that add up to more than 1")
    in_order = sorted(
        ((int(name), logprob) for name, logprob in likeliest.items()),
        key=lambda token: (-token[1], token[0]),
    )
    text = tokens[prompt_token].decoded_token or ""
    return PositionLogprobs(logprobs[prompt_token], in_order, text)


class ServerCalls:
    """Makes a list of calls to servers in threads of this process, each under the limits of its
    reward (pool/call_limits.py).

    The caller lets it work for some seconds at a time (`run_for`).
    """

    def __init__(
        self, limits: CallLimits, jobs: Sequence[tuple[int, Callable[[float], Any]]]
    ) -> None:
        """A job is (index of its reward in `limits`, function that makes the call).

        The function gets the seconds that it may take and must return its answer within them, or
        raise FailedCallError.
        """
        limits.begin_scoring()
        limits.wait_for_all()
        self._limits = limits
        self._jobs = jobs
        # Each call has one sample, which is the index of its job.
        self._waiting = deque(Call(limit, [job]) for job, (limit, _) in enumerate(jobs))
        self._replies: queue.SimpleQueue[tuple[Call, Any]] = queue.SimpleQueue()
        # The answer or the error of each finished job, by its index.
        self.answers: dict[int, Any] = {}
        self.errors: dict[int, str] = {}
        # How long each request took.
        self.seconds: list[float] = []
        self.num_retries = 0

    def run_for(self, seconds: float) -> bool:
        """Makes calls for at most `seconds` seconds. Returns True if some jobs are not finished."""
        end = time.monotonic() + seconds
        while len(self.answers) + len(self.errors) < len(self._jobs):
            for call in self._limits.take_given_up(self._waiting):
                self.errors[call.samples[0]] = call.error
            for call in iter(partial(self._limits.take_next, self._waiting), None):
                threading.Thread(target=self._ask, args=[call], daemon=True).start()
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                return True
            try:
                wait_s = min(self._limits.wait_s(self._waiting), remaining_s)
                self._take(*self._replies.get(timeout=wait_s))
            except queue.Empty:
                pass
        return False

    def _ask(self, call: Call) -> None:
        """Makes one call. Runs in a thread, and passes the answer or any error to `run_for`."""
        try:
            reply = self._jobs[call.samples[0]][1](self._limits.remaining_s(call))
        except BaseException as error:
            reply = error
        self._replies.put((call, reply))

    def _take(self, call: Call, reply: Any) -> None:
        """Stores the answer of a call; after a failure, queues it again or stores its last error.

        Raises any `reply` that is an exception other than FailedCallError: it shows a bug.
        """
        [job] = call.samples
        seconds = time.monotonic() - call.start
        self.seconds.append(seconds)
        self.num_retries += call.num_made > 1
        if isinstance(reply, FailedCallError):
            call = self._limits.retry(call, reply, seconds)
            if call.error:
                self.errors[job] = call.error
            else:
                self._waiting.append(call)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            self._limits.end(call, "ok")
            self.answers[job] = reply
