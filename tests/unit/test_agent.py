"""An agent's coroutine, from its row to what is trained on, with the stock client and a policy of a
script."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.episodes.conversations import ConversationTree, EpisodeLimits
from grpo_spmd.episodes.drivers import AgentDriver
from grpo_spmd.episodes.endpoint import Call, Endpoint
from grpo_spmd.episodes.environments import AgentEpisodes
from grpo_spmd.episodes.openai_api import ApiError
from grpo_spmd.records import Completion, Prompt
from grpo_spmd.rewards.trl import BrokenContractError
from tests.support.agents import Bytes, answered, recorded_by

EXTRA = {"base_url": "", "api_key": "", "model": "policy"}
CHAT: Any = Bytes()


@pytest.fixture(autouse=True)
def _proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")


@contextmanager
def _session(
    policy: Callable[[Call], str], **limits: int
) -> Iterator[tuple[dict[str, str], ConversationTree]]:
    """A session that is answered as the rank does it, but for the engine."""
    wide = EpisodeLimits(
        max_turns=10,
        max_tokens=2000,
        max_turn_tokens=2000,
        max_model_len=3000,
        max_all_tokens=10_000,
    )
    contexts = ConversationTree(CHAT, replace(wide, **limits))

    def answer(endpoint: Endpoint, call: Call) -> None:
        try:
            wanted = contexts.begin(
                call.request.messages, call.request.tools, call.request.max_tokens
            )
        except ApiError as error:
            endpoint.refuse(call, error)
            return
        ids = CHAT.sampled(policy(call))
        reason = "stop" if len(ids) <= wanted.max_tokens else "length"
        ids = ids[: wanted.max_tokens]
        answered = contexts.finish(wanted, Completion(ids, [-0.5] * len(ids), reason))
        endpoint.answer(call, answered.message, answered.finish_reason, answered.usage)

    with Endpoint() as endpoint, answered(endpoint, answer):
        yield endpoint.open((0, 0)), contexts


async def _adds(task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, float]:
    """A tool loop as people write it: the client's own message goes back into the list."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        tools: Any = [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        ]
        while True:
            answer = await client.chat.completions.create(
                model=model, messages=messages, tools=tools
            )
            messages.append(answer.choices[0].message)
            if answer.choices[0].finish_reason != "tool_calls":
                return {"reward": float(answer.choices[0].message.content == task["answer"])}
            for call in answer.choices[0].message.tool_calls or ():
                result = sum(json.loads(call.function.arguments)["terms"])  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def _adding_policy(call: Call) -> str:
    results = [message["content"] for message in call.request.messages if message["role"] == "tool"]
    return results[-1] if len(results) > 1 else '\n!add {"terms": [1, 2]}\n!add {"terms": [30, 1]}'


def test_a_tool_loop_is_one_segment_of_the_tokens_that_were_sampled() -> None:
    with _session(_adding_policy) as (opened, contexts):
        assert AgentDriver(_adds).begin({"prompt": "sum", "answer": "31"}, opened) == {
            "rewards": {"agent": 1.0}
        }
    result = recorded_by(contexts)
    (segment,) = result.segments
    turns = [CHAT.sampled('\n!add {"terms": [1, 2]}\n!add {"terms": [30, 1]}'), CHAT.sampled("31")]
    results = [259, *b"3", 260, 259, *b"31", 260, 258]
    assert segment.token_ids.tolist() == [
        ord("T"),
        257,
        *b"sum",
        260,
        258,
        *turns[0],
        *results,
        *turns[1],
    ]
    assert segment.token_ids[segment.sampled].tolist() == result.token_ids == turns[0] + turns[1]
    assert [message["role"] for message in result.messages] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert contexts.status == "ok"


async def _asks_three_at_once(task: Any, base_url: str, api_key: str, model: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(text: str, old: list[Any]) -> tuple[list[Any], str]:
            messages: list[Any] = [*old, {"role": "user", "content": text}]
            answer = (
                (await client.chat.completions.create(model=model, messages=messages))
                .choices[0]
                .message
            )
            return [*messages, answer], str(answer.content)

        initial, _ = await ask("plan", [])
        ways = await asyncio.gather(*(ask(f"way {number}", initial) for number in range(3)))
        return float(len({answer for _, answer in ways}))


def test_requests_at_once_are_all_served_and_go_on_from_the_same_tokens() -> None:
    with _session(lambda call: f"to {call.request.messages[-1]['content']}") as (opened, contexts):
        assert AgentDriver(_asks_three_at_once).begin({}, opened) == {"rewards": {"agent": 3.0}}
    result = recorded_by(contexts)
    plan = [257, *b"plan", 260, 258, *CHAT.sampled("to plan")]
    assert [segment.token_ids.tolist() for segment in result.segments] == [
        [*plan, 257, *f"way {number}".encode(), 260, 258, *CHAT.sampled(f"to way {number}")]
        for number in range(3)
    ]
    assert [int(segment.sampled.sum()) for segment in result.segments] == [8 + 9, 9, 9]


def test_each_turn_is_answered_with_what_was_sampled_for_it_at_the_generations_temperature() -> (
    None
):
    """Two agents of two turns each, whose turns end in the opposite order."""
    answers = list[tuple[Any, str]]()
    waiting = list[Any]()
    endpoint: Any = SimpleNamespace(
        open=lambda conversation: {},
        close=lambda conversation: None,
        take=lambda: [waiting.pop(0) for _ in waiting[:]],
        answer=lambda call, message, *_: answers.append((call, message["content"])),
    )
    pool: Any = SimpleNamespace(begin=lambda *_: None, poll=lambda _: [], drop=lambda _: None)
    limits = EpisodeLimits(
        max_turns=10, max_tokens=99, max_turn_tokens=99, max_model_len=999, max_all_tokens=999
    )
    episodes = AgentEpisodes(
        pool=pool,
        chat=CHAT,
        limits=limits,
        task=lambda conversation: (Prompt(0, 0, [1], "x", {}), lambda turn: 7),
        evaluation=EvalConfig(temperature=0.6, top_p=0.8),
        discount=None,
        endpoint=endpoint,
    )
    conversations = [(0, 0), (0, 1)]
    for conversation in conversations:
        episodes.next_request(*conversation, [])
    texts = {conversation: list[str]() for conversation in conversations}
    sampled = {conversation: list[Completion]() for conversation in conversations}
    for turn in range(2):
        calls = {}
        for job, number in conversations:
            messages = [{"role": "user", "content": f"{number}"}]
            for text in texts[job, number]:
                messages += [{"role": "assistant", "content": text}]
                messages += [{"role": "user", "content": "next"}]
            request = SimpleNamespace(messages=messages, tools=[], max_tokens=None)
            call: Any = SimpleNamespace(conversation=(job, number), request=request, is_over=False)
            calls[job, number] = call
            waiting.append(call)
        requests = episodes.ready(0.0)
        assert [conversation for conversation, _ in requests] == conversations
        sampling = {(r.temperature, r.top_p) for _, r in requests if r is not None}
        assert sampling == {(0.6, 0.8)}
        # Of an evaluation, whose logprobs nobody reads.
        assert not any(request is not None and request.is_rollout for _, request in requests)
        for conversation in reversed(conversations):
            text = f"turn {turn} of {conversation[1]}"
            ids = CHAT.sampled(text)
            sampled[conversation].append(Completion(ids, [-0.5] * len(ids), "stop"))
            episodes.next_request(*conversation, sampled[conversation])
            assert answers.pop() == (calls[conversation], text)
            assert not answers
            texts[conversation].append(text)


@pytest.mark.parametrize(
    ("limits", "code", "status"),
    [
        ({"max_turns": 1}, "episode_max_turns", "max_turns"),
        ({"max_tokens": 50}, "episode_max_tokens", "max_tokens"),
        ({"max_model_len": 58}, "context_length_exceeded", "context_overflow"),
    ],
)
def test_an_agent_that_a_limit_stops_has_no_reward_unless_it_says_so(
    limits: dict[str, int], code: str, status: str
) -> None:
    """And it is no failure of the environment, which would be tried again and end in the same
    way."""

    async def gives_up(**inputs: Any) -> float:
        try:
            await _adds(**inputs)
        except openai.BadRequestError as error:
            return 0.25 if error.code == code else 0.0
        return 1.0

    for rollout, wanted in ((_adds, None), (gives_up, 0.25)):
        with _session(_adding_policy, **limits) as (opened, contexts):
            reward = AgentDriver(rollout).begin({"prompt": "sum", "answer": ""}, opened)["rewards"][
                "agent"
            ]
        assert contexts.status == status
        if wanted is None:
            assert reward == (
                f"is unknown: rollout() was refused a turn ({code}) and raised; catch "
                "openai.BadRequestError in it and "
                "return a reward"
            )
        else:
            assert reward == wanted


def test_episodes_share_a_loop_and_leave_nothing_running_in_it() -> None:
    loops, remaining = list[Any](), list[asyncio.Task[Any]]()

    async def rollout(task: Any, base_url: str, api_key: str, model: str) -> float:
        loops.append(asyncio.get_running_loop())
        remaining.append(asyncio.create_task(asyncio.sleep(1000)))
        return 1.0

    driver = AgentDriver(rollout)
    for _ in range(2):
        assert driver.begin({}, EXTRA) == {"rewards": {"agent": 1.0}}
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()
    assert all(task.cancelled() for task in remaining)


def _returns(value: Any) -> Callable[..., Any]:
    async def rollout(task: Any, base_url: str, api_key: str, model: str) -> Any:
        return value

    return rollout


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (None, None),
        ({"reward": None}, None),
        ({"reward": 0.5}, 0.5),
        (float("nan"), "rollout() returned nan"),
        (float("-inf"), "rollout() returned -inf"),
        ("1", "rollout() returned '1', which is no number"),
    ],
)
def test_a_reward_is_a_number_or_said_to_be_none(value: Any, reward: Any) -> None:
    assert AgentDriver(_returns(value)).begin({}, EXTRA) == {"rewards": {"agent": reward}}


def test_what_breaks_the_protocol_is_said() -> None:
    with pytest.raises(
        BrokenContractError, match=r"a dict with the keys \['score'\], not `reward`"
    ):
        AgentDriver(_returns({"score": 1})).begin({}, EXTRA)
    rule = (
        r"^environment.agent: 'takes_two' must be called as rollout\(task, base_url, api_key, "
        r"model\)"
    )

    def takes_two(task: Any, client: Any) -> None: ...

    with pytest.raises(ConfigError, match=rule):
        AgentDriver(takes_two)


def test_what_an_agent_raises_is_its_callers_and_a_plain_function_will_do() -> None:
    def raises(task: Any, **_: str) -> float:
        error = KeyError(task["row"])
        raise ValueError("mine") from error

    with pytest.raises(ValueError, match=r"^mine$"):
        AgentDriver(raises).begin({"row": 3}, EXTRA)
    assert AgentDriver(lambda task, **_: task["row"]).begin({"row": 3}, EXTRA) == {
        "rewards": {"agent": 3.0}
    }


def test_loopback_is_never_asked_of_a_proxy() -> None:
    AgentDriver(_adds)
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == (
        "example.org,127.0.0.1",
        "127.0.0.1",
    )
