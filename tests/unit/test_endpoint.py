"""Whoever connects to an agents' endpoint, whatever it sends: the rank gets whole requests of known sessions."""  # noqa: E501

from __future__ import annotations

import gzip
import json
import logging
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.episodes.openai_api import ApiError
from tests.support.agents import (
    USAGE,
    answered,
    ask,
    chat_request,
    connect,
    echo,
    read_response,
    taken,
    wait_until,
)

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CLIENTS = Path(__file__).parents[1] / "support/workers/agent_clients.py"


@pytest.fixture(autouse=True)
def _says_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What the server's thread does not handle, asyncio logs."""
    yield
    records = caplog.get_records("call") + caplog.get_records("teardown")
    assert [record.getMessage() for record in records if record.name == "asyncio"] == []


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with _open(request_s=20, beat_s=0.2) as endpoint:
        yield endpoint


def _open(**limits: float) -> Endpoint:
    """An endpoint with other limits than the program's."""
    limited: type[Endpoint] = type("LimitedEndpoint", (Endpoint,), limits)
    return limited()


def _answer(endpoint: Endpoint, call: Call) -> None:
    final = call.request.messages[-1]
    if final["content"] == "refuse me":
        endpoint.refuse(call, ApiError(400, "context_length_exceeded", "too many tokens"))
    elif final["content"] == "slow":  # longer than the client's own timeout
        threading.Timer(2, echo, (endpoint, call)).start()
    elif call.request.tools and final["role"] == "user":
        function = {"name": "add", "arguments": {"a": 1, "b": "\N{SNOWMAN}"}}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        }
        endpoint.answer(call, answer, "tool_calls", USAGE)
    else:
        echo(endpoint, call)


def test_the_stock_client_works(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    """Sync, async, streaming, its errors, and its patience."""
    sessions = [endpoint.open((3, number)) for number in range(8)]
    command = [sys.executable, str(CLIENTS), json.dumps(sessions)]
    with answered(endpoint, _answer), caplog.at_level(logging.WARNING):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    sync = result["sync"]
    assert sync["first"] == ["tool_calls", "add", {"a": 1, "b": "\N{SNOWMAN}"}]
    assert sync["usage"] == USAGE
    assert sync["second"] == ["(3, 0): 3", "stop"]
    assert sync["models"] == ["policy"]
    assert sync["streamed"] == ["add"]
    assert sync["stream_end"] == ["tool_calls", 10]
    assert sync["patient"] == "(3, 0): slow"
    codes = [error[:2] for error in sync["errors"]]
    assert codes[:6] == [[400, "unsupported_parameter"]] * 6
    assert codes[6:11] == [
        [404, "model_not_found"],
        *[[400, "invalid_request"]] * 3,
        [413, "body_too_large"],
    ]
    assert sync["errors"][0][3] == "`n`=2 is not supported; leave it out"
    assert sync["errors"][-1] == [
        400,
        "context_length_exceeded",
        "BadRequestError",
        "too many tokens",
    ]
    assert sync["token"][:3] == [401, "invalid_api_key", "AuthenticationError"]
    assert sync["session"][:3] == [404, "not_found", "NotFoundError"]
    assert result["async"] == [[f"(3, {i}): number {j}" for j in range(3)] for i in range(8)]
    assert [record.message for record in caplog.records if "ignored" in record.message] == [
        "an agent's `temperature` is ignored: the run's config sets how to sample"
    ]


def test_options_reach_the_rank_and_neutral_ones_are_nothing(endpoint: Endpoint) -> None:
    seen: list[Call] = []

    def keep(endpoint: Endpoint, call: Call) -> None:
        seen.append(call)
        echo(endpoint, call)

    opened = endpoint.open((1, 2))
    neutral: dict[str, Any] = {
        "n": 1,
        "stop": None,
        "tools": None,
        "tool_choice": "auto",
        "logit_bias": {},
        "model": "policy",
    }
    requests: list[dict[str, Any]] = [
        {"max_tokens": 9, "max_completion_tokens": 4},
        {"max_tokens": None, "top_p": 0.5},
        neutral,
    ]
    with answered(endpoint, keep):
        assert [
            ask(opened["base_url"], chat_request(opened, HI | single)) for single in requests
        ] == [(200, "")] * 3
    assert [call.request.max_tokens for call in seen] == [4, None, None]
    assert [call.request.ignored for call in seen] == [[], ["top_p"], []]
    assert [(call.conversation, call.request.tools, call.request.messages) for call in seen] == [
        ((1, 2), [], HI["messages"])
    ] * 3


def _nested(depth: int) -> bytes:
    return (
        b'{"messages": [{"role": "user", "content": "hi"}], "tools": '
        + b"[" * depth
        + b"]" * depth
        + b"}"
    )


def _with_tool(parameters: Any) -> dict[str, Any]:
    return HI | {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    }


def _deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


BAD_BODIES = {
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "no object": b"[]",
    "NaN": b'{"messages": NaN}',
    "long number": b'{"messages": %s}' % (b"1" * 5000),
    "deep": _nested(100_000),
    "deep tool": _with_tool(_deep(40)),
    "many values": _with_tool({"enum": [0] * 100_001}),
    "no messages": {},
    "half a pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a pair in a tool": b'{"messages": [{"role": "user", "content": ""}], "tools": '
    b'[{"type": "function", "function": {"name": "\\udc00"}}]}',
    "role": {"messages": [{"role": "root", "content": ""}]},
    "role of no text": {"messages": [{"role": ["user"], "content": ""}]},
    "content": {"messages": [{"role": "user", "content": 1}]},
    "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]},
    "call": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]},
    "arguments": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": _deep(40)}}],
            }
        ]
    },
    "tools": HI | {"tools": {"a": 1}},
    "tool": HI | {"tools": [{"type": "function"}]},
    "many tools": HI | {"tools": _with_tool({})["tools"] * 129},
    "max_tokens": HI | {"max_tokens": 1.5},
    "boolean max_tokens": HI | {"max_tokens": True},
    "stream": HI | {"stream": "yes"},
}


def test_bodies_that_are_no_requests_are_refused_one_by_one_on_one_connection(
    endpoint: Endpoint,
) -> None:
    opened = endpoint.open((0, 0))
    with answered(endpoint), connect(opened["base_url"]) as connection:
        for name, body in BAD_BODIES.items():
            connection.sendall(chat_request(opened, body))
            status, headers, answer = read_response(connection)
            assert (name, status, headers.get("connection")) == (name, 400, None), "it stays open"
            assert json.loads(answer)["error"]["code"] == "invalid_request"
        initial, final = (
            {"messages": [{"role": "user", "content": text}]} for text in ("first", "last")
        )
        connection.sendall(
            chat_request(opened, initial)
            + chat_request(opened, final, extra="Connection: close\r\n")
        )
        both = b""
        while chunk := connection.recv(65536):
            both += chunk
    assert both.count(b"HTTP/1.1 200 OK") == 2, "a request that came while another waited"
    assert both.index(b"(0, 0): first") < both.index(b"(0, 0): last")


def test_a_compressed_body_is_not_unpacked(endpoint: Endpoint) -> None:
    """A small one could become as large as memory."""
    opened = endpoint.open((0, 0))
    body = gzip.compress(json.dumps(HI).encode())
    request = chat_request(opened, body, extra="Content-Encoding: gzip\r\n")
    assert ask(opened["base_url"], request) == (400, "invalid_request")


def _raw(opened: dict[str, str], head: str) -> bytes:
    path = "/" + opened["base_url"].split("/", 3)[3] + "/chat/completions"
    return (
        head.replace("PATH", path)
        .replace("TOKEN", opened["api_key"])
        .replace("\n", "\r\n")
        .encode()
    )


_OWN = "POST PATH HTTP/1.1\nHost: x\nAuthorization: Bearer TOKEN\n"
HEADS = {
    "two lengths": (400, _OWN + "Content-Length: 2\nContent-Length: 3\n\n{}"),
    "a list of lengths": (400, _OWN + "Content-Length: 2, 2\n\n{}"),
    "a signed length": (400, _OWN + "Content-Length: +2\n\n{}"),
    "a length of other digits": (400, _OWN + "Content-Length: \N{ARABIC-INDIC DIGIT TWO}\n\n{}"),
    "chunks": (411, _OWN + "Transfer-Encoding: chunked\n\n0\n\n"),
    "chunks and a length": (400, _OWN + "Content-Length: 2\nTransfer-Encoding: chunked\n\n{}"),
    "a space before the colon": (400, _OWN + "Content-Length : 2\n\n{}"),
    "a folded line": (400, _OWN + "X: a\n b\nContent-Length: 2\n\n{}"),
    "a bare line feed": (400, _OWN + "X: a\vb\nContent-Length: 2\n\n{}"),
    "two tokens": (401, _OWN + "Authorization: Bearer x\nContent-Length: 2\n\n{}"),
    "another protocol": (400, "POST PATH HTTP/2.0\n\n"),
    "TLS": (400, "\x16\x03\x01\n\n"),
    "no path": (404, "GET http://127.0.0.1/ HTTP/1.1\nHost: x\n\n"),
    "another path": (404, "GET /sessions/../etc/passwd HTTP/1.1\nHost: x\n\n"),
    "another session": (
        404,
        "POST /sessions/0123456789abcdef/v1/chat/completions HTTP/1.1\nHost: x\n\n",
    ),
    "no token": (401, "POST PATH HTTP/1.1\nHost: x\nContent-Length: 2\n\n{}"),
    "no bearer": (
        401,
        "POST PATH HTTP/1.1\nHost: x\nAuthorization: Basic TOKEN\nContent-Length: 2\n\n{}",
    ),
    "half a token": (
        401,
        "POST PATH HTTP/1.1\nHost: x\nAuthorization: Bearer TOKE\nContent-Length: 2\n\n{}",
    ),
    "a token of no ASCII": (
        401,
        "POST PATH HTTP/1.1\nHost: x\nAuthorization: Bearer \N{LATIN SMALL LETTER E WITH ACUTE}\n\n",  # noqa: E501
    ),
    "another method": (405, "PUT PATH HTTP/1.1\nHost: x\nAuthorization: Bearer TOKEN\n\n"),
    "a long header": (400, _OWN + "X: " + "x" * 40_000 + "\n\n"),
    "many headers": (400, _OWN + "X: y\n" * 3000 + "\n"),
    "no end of headers": (400, _OWN + "X: " + "x" * 40_000),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_not_one_request_end_the_connection(endpoint: Endpoint, name: str) -> None:
    """What follows them is not taken for a request, and nothing of it reaches the rank."""
    opened = endpoint.open((0, 0))
    status, head = HEADS[name]
    with connect(opened["base_url"]) as connection:
        connection.sendall(
            _raw(opened, head) + chat_request(opened, HI) * (name != "no end of headers")
        )
        result, headers, _ = read_response(connection)
        assert (result, headers["connection"]) == (status, "close")
        with suppress(OSError):  # it may be over
            connection.shutdown(socket.SHUT_WR)
        assert read_response(connection)[0] == 0
    assert endpoint.take() == []


def test_a_body_of_100_mb_is_refused_by_its_length_and_not_kept(endpoint: Endpoint) -> None:
    opened = endpoint.open((0, 0))
    big = b"x" * (100 << 20)
    assert ask(opened["base_url"], chat_request(opened, big)) == (413, "body_too_large")
    with answered(endpoint):
        assert ask(opened["base_url"], chat_request(opened, HI)) == (200, "")


def test_slow_requests_are_given_up_and_hold_nobody_up() -> None:
    with _open(request_s=0.5) as endpoint:
        opened = endpoint.open((0, 0))
        full = chat_request(opened, HI)
        with (
            answered(endpoint),
            connect(opened["base_url"]) as silent,
            connect(opened["base_url"]) as slow,
        ):
            with connect(opened["base_url"]) as stuck:
                stuck.sendall(full[:-1])  # all but the body's last byte
                for number in range(20):  # a byte now and then
                    with suppress(OSError):
                        slow.sendall(full[number : number + 1])
                    time.sleep(0.05)
                assert ask(opened["base_url"], full) == (200, "")
                for connection in (slow, stuck):
                    status, headers, _ = read_response(connection)
                    assert (status, headers["connection"]) == (408, "close")
            assert read_response(silent)[0] == 408
        assert endpoint.take() == []


def test_a_client_that_goes_while_it_waits_is_forgotten(endpoint: Endpoint) -> None:
    opened = endpoint.open((0, 0))
    calls: list[Call] = []
    for _ in range(2):
        with connect(opened["base_url"]) as connection:
            connection.sendall(chat_request(opened, HI))
            calls += taken(endpoint, 1)
    wait_until(lambda: all(call.is_over for call in calls))
    endpoint.answer(calls[0], {"role": "assistant", "content": ""}, "stop", USAGE)
    endpoint.refuse(calls[1], ApiError(400, "late", "late"))
    with answered(endpoint):
        assert ask(opened["base_url"], chat_request(opened, HI)) == (200, "")


def test_the_end_of_a_session_ends_who_waits_in_it_and_nobody_else(endpoint: Endpoint) -> None:
    opened = [endpoint.open((0, number)) for number in range(2)]
    connections = [connect(single["base_url"]) for single in opened]
    for single, connection in zip(opened, connections, strict=True):
        connection.sendall(chat_request(single, HI))
    calls = taken(endpoint, 2)
    assert endpoint.engine_s((0, 1)) > 0.0
    endpoint.close((0, 0))
    assert read_response(connections[0])[0] == 404
    assert ask(opened[0]["base_url"], chat_request(opened[0], HI)) == (404, "session_not_found")
    endpoint.close((0, 0))  # twice, and what never was: nothing
    endpoint.close((9, 9))
    assert (endpoint.engine_s((0, 0)), endpoint.engine_s((9, 9))) == (0.0, 0.0)
    for call in calls:
        echo(endpoint, call)
    assert read_response(connections[1])[0] == 200
    again = endpoint.open((0, 0))  # an episode that is tried once more
    assert again["base_url"] != opened[0]["base_url"]
    assert ask(again["base_url"], chat_request(again, HI, token=opened[0]["api_key"])) == (
        401,
        "invalid_api_key",
    )
    for connection in connections:
        connection.close()


def test_only_the_time_of_waiting_is_the_engines(endpoint: Endpoint) -> None:
    opened = endpoint.open((0, 0))
    assert endpoint.engine_s((0, 0)) == 0.0
    with answered(endpoint):
        ask(opened["base_url"], chat_request(opened, HI))
    wait_until(lambda: endpoint.engine_s((0, 0)) == endpoint.engine_s((0, 0)))  # it stands
    expected_names = endpoint.engine_s((0, 0))
    time.sleep(0.05)
    assert 0.0 < endpoint.engine_s((0, 0)) == expected_names


def test_announced_bodies_take_no_room_and_strangers_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_spmd.episodes.endpoint._MAX_HELD_BYTES", 1 << 20)
    with _open(max_strangers=5) as endpoint:
        opened = endpoint.open((0, 0))
        head, _, body = chat_request(opened, HI).partition(b"\r\n\r\n")
        announced = re.sub(rb"(?i)content-length: \d+", b"Content-Length: 900000", head)
        silent = [connect(opened["base_url"]) for _ in range(4)]
        for connection in silent:
            connection.sendall(announced + b"\r\n\r\n")
        time.sleep(0.2)
        # What has come is counted: a megabyte for all, of which the second of these has no more.

        def echo_all() -> None:
            for call in endpoint.take():
                echo(endpoint, call)

        threading.Timer(0.3, echo_all).start()
        assert ask(opened["base_url"], head + b"\r\n\r\n" + body)[0] == 200
        for connection in silent[:2]:
            with suppress(ConnectionError):  # refused while it sends
                connection.sendall(b"x" * 800_000)
        wait_until(lambda: bool(select.select(silent[:2], [], [], 0)[0]))
        assert len(select.select(silent[:2], [], [], 0)[0]) == 1
        strangers = [connect(opened["base_url"]) for _ in range(6)]
        assert read_response(strangers[0])[0] == 0
        assert not select.select(strangers[1:], [], [], 0.2)[0]
        for connection in (*silent, *strangers):
            connection.close()


def test_strangers_lose_their_connections_to_those_who_know_a_token() -> None:
    with _open(max_connections=4, max_waiting=2) as endpoint:
        opened = endpoint.open((0, 0))
        strangers = [connect(opened["base_url"]) for _ in range(4)]
        expected_names = [connect(opened["base_url"]) for _ in range(4)]
        for connection in expected_names:
            connection.sendall(chat_request(opened, HI))
        assert all(read_response(stranger)[0] == 0 for stranger in strangers)
        wait_until(lambda: len(select.select(expected_names, [], [], 0)[0]) == 2)
        refused = select.select(expected_names, [], [], 0)[0]
        statuses = [read_response(connection)[0] for connection in refused]
        assert statuses == [429, 429], "one session may not have more than its share"
        assert ask(opened["base_url"], chat_request(opened, HI)) == (503, "busy")
        assert len(endpoint.take()) == 2
        for connection in (*strangers, *expected_names):
            connection.close()


def test_64_sessions_at_once_get_their_own_answers(endpoint: Endpoint) -> None:
    """Each keeps its connection for three turns, and all have sent before any is answered."""
    opened = {(number, 0): endpoint.open((number, 0)) for number in range(64)}
    connections = {position: connect(single["base_url"]) for position, single in opened.items()}
    for turn in range(3):
        for position, connection in connections.items():
            messages = [{"role": "user", "content": f"{turn} of {position}"}]
            connection.sendall(chat_request(opened[position], {"messages": messages}))
        for call in reversed(taken(endpoint, 64)):
            echo(endpoint, call)
        for position, connection in connections.items():
            status, _, body = read_response(connection)
            assert status == 200
            assert (
                json.loads(body)["choices"][0]["message"]["content"]
                == f"{position}: {turn} of {position}"
            )
    for connection in connections.values():
        connection.close()


def test_nothing_is_left_when_the_endpoint_ends() -> None:
    """With clients in every state: silent, in a head, in a body, waiting, between two requests."""
    old = threading.active_count()
    with Endpoint() as endpoint:
        opened = endpoint.open((0, 0))
        full = chat_request(opened, HI)
        connections = [connect(opened["base_url"]) for _ in range(5)]
        with answered(endpoint):
            connections[4].sendall(full)
            assert read_response(connections[4])[0] == 200
        for connection, sent in zip(connections, (b"", full[:20], full[:-1], full), strict=False):
            connection.sendall(sent)
        (call,) = taken(endpoint, 1)
    for connection in connections:
        assert read_response(connection)[0] == 0
        connection.close()
    assert threading.active_count() == old
    endpoint.close((0, 0))
    endpoint.refuse(call, ApiError(400, "late", "late"))
    with pytest.raises(ConnectionRefusedError):
        connect(opened["base_url"])


def test_a_request_of_a_session_that_has_just_ended_is_not_taken_for_the_next_ones(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode that is tried again has the same place, and the server's thread may not have refused it yet."""  # noqa: E501
    opened = endpoint.open((3, 1))
    with connect(opened["base_url"]) as connection:
        connection.sendall(chat_request(opened, HI))
        assert select.select([endpoint], [], [], 60)[0]
        with monkeypatch.context() as slow:
            slow.setattr(endpoint, "_call_in_thread", lambda *args: None)
            endpoint.close((3, 1))
            endpoint.open((3, 1))
            assert endpoint.take() == []
