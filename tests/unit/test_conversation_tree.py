"""What is trained on is what was sampled, whatever an agent sends again and in whatever order."""

from __future__ import annotations

import copy
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.demo.tools import make_tokenizer
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.conversations import ConversationTree, EpisodeLimits, TurnAnswer
from grpo_spmd.episodes.openai_api import ApiError, completion_body, read_request
from grpo_spmd.learn.contexts import find_episode_error
from grpo_spmd.observe.rollout_record import episode_fields, read_episode
from grpo_spmd.records import Completion, Episode
from tests.support.agents import Bytes, SessionRecord, recorded_by

Messages = list[dict[str, Any]]


def _contexts(chat: Bytes | None = None, **limits: int) -> ConversationTree:
    wide = EpisodeLimits(
        max_turns=50,
        max_tokens=10_000,
        max_turn_tokens=10_000,
        max_model_len=20_000,
        max_all_tokens=10**6,
    )
    bytes_or_chat: Any = chat or Bytes()
    return ConversationTree(bytes_or_chat, replace(wide, **limits))


def _completion(chat: Bytes, text: str, *, full: bool = True, initial: float = 0.0) -> Completion:
    ids = chat.sampled(text, full=full)
    return Completion(ids, [initial - i for i in range(len(ids))], "stop" if full else "length")


def _wired(messages: Messages, tools: list[Any] | None = None) -> Messages:
    """As the endpoint hands over what an agent sent as JSON."""
    body = {"messages": messages} | ({"tools": tools} if tools else {})
    return read_request(json.dumps(body).encode()).messages


def _returned(answer: TurnAnswer) -> dict[str, Any]:
    """The message as a client has it."""
    body = json.loads(completion_body(answer.message, answer.finish_reason, answer.usage))
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


def _turn(
    contexts: ConversationTree, chat: Bytes, messages: Messages, text: str, **options: Any
) -> dict[str, Any]:
    wanted = contexts.begin(_wired(messages), [])
    return _returned(contexts.finish(wanted, _completion(chat, text, **options)))


def _trained(recorded: SessionRecord) -> list[list[int]]:
    return [segment.token_ids[segment.sampled].tolist() for segment in recorded.segments]


def _check(recorded: SessionRecord) -> None:
    """What the records promise of any episode."""
    assert list(itertools.chain(*_trained(recorded))) == recorded.token_ids
    assert (
        len(recorded.token_ids)
        == len(recorded.logprobs)
        == sum(turn.num_tokens for turn in recorded.turns)
    )
    episode = Episode("ok", recorded.segments, recorded.turns, recorded.messages, {}, [])
    assert find_episode_error(recorded.token_ids, episode) is None
    written = json.loads(json.dumps(episode_fields(episode)))
    assert str(read_episode(written, recorded.token_ids)) == str(episode)


def test_a_conversation_is_sent_on_token_by_token() -> None:
    chat = Bytes()
    contexts = _contexts(chat)
    user, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "on"}
    initial = contexts.begin(_wired([user]), [])
    # user "hi" and the assistant's header: 257 h i 260 258
    assert initial.context_ids == [257, *b"hi", 260, 258]
    sampled = chat.sampled("abc")
    assert sampled == [97, 1098, 99, 260]
    answer = _returned(
        contexts.finish(initial, Completion(sampled, [-1.0, -2.0, -3.0, -4.0], "stop"))
    )
    assert answer == {"role": "assistant", "content": "abc"}
    second = contexts.begin(_wired([user, answer, more]), [])
    # not what the text "abc" gives: the token 1098 stays
    assert second.context_ids == [257, *b"hi", 260, 258, 97, 1098, 99, 260, 257, *b"on", 260, 258]
    contexts.finish(second, Completion([100, 260], [-5.0, -6.0], "stop"))
    recorded = recorded_by(contexts)
    # What the agent itself began with is what its rewards get as the prompt.
    opening = contexts.completion({}, []).episode.opening  # type: ignore[union-attr]
    assert [(message["role"], message["content"]) for message in opening] == [("user", "hi")]
    (segment,) = recorded.segments
    assert segment.token_ids.tolist() == [*second.context_ids, 100, 260]
    assert segment.sampled.tolist() == [False] * 5 + [True] * 4 + [False] * 5 + [True] * 2
    assert (recorded.token_ids, recorded.logprobs) == (
        [97, 1098, 99, 260, 100, 260],
        [-1.0, -2, -3, -4, -5, -6],
    )
    assert [(turn.num_tokens, turn.finish_reason) for turn in recorded.turns] == [
        (4, "stop"),
        (2, "stop"),
    ]
    assert [message["content"] for message in recorded.messages] == ["abc", "on", "d"]
    assert contexts.status == "ok"
    assert second.key != initial.key


_CALL = '\n!add {"a": 1, "b": [1, 2]}'


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"content": ""},
        {"refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"reasoning_content": None},
    ],
)
def test_forms_that_clients_give_our_message_are_known(change: dict[str, Any]) -> None:
    chat = Bytes()
    contexts = _contexts(chat)
    user = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    wanted = contexts.begin(_wired([user]), [])
    answer = contexts.finish(wanted, _completion(chat, "thought</think>" + _CALL))
    assert answer.finish_reason == "tool_calls"
    returned = _returned(answer)
    assert returned["content"] is None
    assert returned["reasoning_content"] == "thought"
    (call,) = returned["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": [1, 2]}
    returned |= change
    call["function"]["arguments"] = '{"b":[1,2],"a":1}'  # as another JSON writer has it
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    old = len(chat.rendered)
    second = contexts.begin(_wired([user, returned, result]), [])
    assert len(chat.rendered) == old, "it was rendered again, so it was not known"
    assert second.context_ids[: len(wanted.context_ids)] == wanted.context_ids
    contexts.finish(second, _completion(chat, "done"))
    assert len(recorded_by(contexts).segments) == 1


@pytest.mark.parametrize(
    "arguments", ["NaN", "[1, 2]", '"text"', '{"a": [NaN, 1e999]}', '{"a": "\u00e9"}', "1e3"]
)
def test_arguments_of_any_kind_are_known_again(arguments: str) -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    contexts = _contexts(chat)
    answer = _turn(contexts, chat, [user], f"a\n!f {arguments}")
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": ""}
    _turn(contexts, chat, [user, answer, result], "b")
    assert len(recorded_by(contexts).segments) == 1


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("content", "other"),
        ("content", "abc "),
        ("tool_calls", None),
        ("reasoning_content", "other thoughts"),
    ],
)
def test_a_changed_history_begins_a_segment_of_its_own(label: str, value: Any) -> None:
    chat = Bytes()
    contexts = _contexts(chat)
    user = {"role": "user", "content": "hi"}
    answer = _turn(contexts, chat, [user], "t</think>abc" + _CALL)
    changed = copy.deepcopy(answer) | {label: value}
    _turn(contexts, chat, [user, changed, {"role": "user", "content": "on"}], "d")
    recorded = recorded_by(contexts)
    _check(recorded)
    assert sorted(_trained(recorded)) == sorted(
        [chat.sampled("t</think>abc" + _CALL), chat.sampled("d")]
    )


def test_other_tools_or_an_earlier_message_changed_begin_one_too() -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    contexts = _contexts(chat)
    answer = _turn(contexts, chat, [user], "abc")
    tools = [{"type": "function", "function": {"name": "f"}}]
    on: Messages = [answer, {"role": "user", "content": "on"}]
    initial = contexts.begin(_wired([user, *on]), tools)
    contexts.finish(initial, _completion(chat, "d"))
    second = contexts.begin(_wired([{"role": "user", "content": "Hi"}, *on]), [])
    contexts.finish(second, _completion(chat, "e"))
    recorded = recorded_by(contexts)
    _check(recorded)
    assert len(recorded.segments) == 3
    assert initial.context_ids[0] == ord("T")


def test_the_second_continuation_of_a_context_is_a_fork_with_the_same_tokens_before_it() -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    contexts = _contexts(chat)
    answer = _turn(contexts, chat, [user], "abc")
    wanted = [
        contexts.begin(_wired([user, answer, {"role": "user", "content": text}]), [])
        for text in ("x", "y")
    ]
    for single, text in zip(reversed(wanted), ("late", "soon"), strict=True):
        contexts.finish(single, _completion(chat, text))
    recorded = recorded_by(contexts)
    _check(recorded)
    # "abc" is trained on once, in the first segment, and given in the other
    assert _trained(recorded) == [
        [*chat.sampled("abc"), *chat.sampled("soon")],
        chat.sampled("late"),
    ]
    begin = 5 + 4
    assert (
        recorded.segments[0].token_ids[:begin].tolist()
        == recorded.segments[1].token_ids[:begin].tolist()
    )


def test_a_text_that_tokenizes_to_what_was_sampled_goes_on_from_it() -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    contexts = _contexts(chat)
    wanted = contexts.begin(_wired([user]), [])
    contexts.finish(
        wanted, Completion([*b"abc", 260], [-1.0] * 4, "stop")
    )  # first ids: as the text has them
    few_shot = [user, {"role": "assistant", "content": "abc", "reasoning_content": "not ours"}]
    second = contexts.begin(_wired([*few_shot, {"role": "user", "content": "on"}]), [])
    contexts.finish(second, _completion(chat, "d"))
    recorded = recorded_by(contexts)
    assert _trained(recorded) == [[*b"abc", 260, *chat.sampled("d")]]


def test_a_template_that_rewrites_history_seals_the_segment() -> None:
    chat, user = Bytes(forks=True), {"role": "user", "content": "hi"}
    contexts = _contexts(chat, max_tokens=20)
    answer = _turn(contexts, chat, [user], "abc")
    on = {"role": "user", "content": "on"}
    wanted = contexts.begin(_wired([user, answer, on]), [])
    assert wanted.context_ids == [257, *b"hi", 260, 258, *b"abc", 260, 257, *b"on", 260, 258]
    # behind the first prompt's 5 tokens are 9: a rewritten history has no new allowance
    assert wanted.max_tokens == 20 - 9
    contexts.finish(wanted, _completion(chat, "d"))
    recorded = recorded_by(contexts)
    _check(recorded)
    assert _trained(recorded) == [chat.sampled("abc"), chat.sampled("d")]
    assert [message["content"] for message in recorded.messages] == ["abc", "on", "d"]


def test_a_turn_that_was_cut_off_has_no_calls() -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    contexts = _contexts(chat)
    wanted = contexts.begin(_wired([user]), [])
    answer = contexts.finish(wanted, _completion(chat, "abc" + _CALL, full=False))
    assert answer.finish_reason == "length"
    assert "tool_calls" not in answer.message
    assert contexts.status == "truncated"
    _turn(contexts, chat, [user, _returned(answer), {"role": "user", "content": "on"}], "d")
    recorded = recorded_by(contexts)
    _check(recorded)
    assert contexts.status == "ok"
    # its context is rendered: the template alone knows how it ends what was cut off
    assert len(recorded.segments) == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_which_of_two_turns_ends_first_says_nothing_of_the_episode(order: tuple[int, int]) -> None:
    chat = Bytes()
    contexts = _contexts(chat)
    numbers = [contexts.begin(_wired([{"role": "user", "content": word}]), []) for word in "xy"]
    for number in order:
        contexts.finish(numbers[number], _completion(chat, "abc", full=number == 1))
    assert contexts.status == "truncated"


def test_a_turn_as_short_as_the_agent_wants_it_is_not_cut_off() -> None:
    chat = Bytes()
    for wanted, status in ((3, "ok"), (4, "truncated"), (None, "truncated")):
        contexts = _contexts(chat)
        number = contexts.begin(_wired([{"role": "user", "content": "hi"}]), [], wanted)
        assert (
            contexts.finish(number, _completion(chat, "abc", full=False)).finish_reason == "length"
        )
        assert contexts.status == status


def test_calls_that_do_not_parse_are_left_out() -> None:
    chat = Bytes()
    contexts = _contexts(chat)
    wanted = contexts.begin(_wired([{"role": "user", "content": "hi"}]), [])
    deep = '{"a":' * 40 + "1" + "}" * 40
    output = ["a", "f {", "g {}", f"h {deep}", 'i {"a": "\\ud800"}']  # half of a pair of surrogates
    answer = contexts.finish(wanted, _completion(chat, "\n!".join(output)))
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["g"]


def test_limits_refuse_with_codes_that_say_which() -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    on: Messages = [{"role": "user", "content": "on"}]

    contexts = _contexts(chat, max_turns=1)
    answer = _turn(contexts, chat, [user], "abc")
    with pytest.raises(ApiError) as refused:
        contexts.begin(_wired([user, answer, *on]), [])
    assert (refused.value.status, refused.value.code, contexts.status) == (
        400,
        "episode_max_turns",
        "max_turns",
    )

    contexts = _contexts(chat, max_tokens=9)  # "abc" and its end are 4, " on" 5
    initial = contexts.begin(_wired([user]), [], 100)
    assert initial.max_tokens == 9
    contexts.finish(initial, _completion(chat, "abc"))
    with pytest.raises(ApiError) as refused:
        contexts.begin(_wired([user, answer, *on]), [])
    assert (refused.value.code, contexts.status) == ("episode_max_tokens", "max_tokens")

    contexts = _contexts(chat, max_model_len=6)
    assert contexts.begin(_wired([user]), []).max_tokens == 1  # 5 tokens are there
    for text, rendered in (("hiya", True), ("x" * 10_000, False)):
        old = len(chat.rendered)
        with pytest.raises(ApiError) as refused:
            contexts.begin(_wired([{"role": "user", "content": text}]), [])
        assert (refused.value.code, contexts.status) == (
            "context_length_exceeded",
            "context_overflow",
        )
        assert (len(chat.rendered) > old) == rendered, "what cannot fit is not tokenized"
    contexts.begin(_wired([{"role": "user", "content": ""}]), [])  # it has found a shorter one
    assert contexts.status == "ok"

    contexts = _contexts(chat, max_all_tokens=30)
    answer = _turn(contexts, chat, [user], "abc")  # a segment of 9
    # one that goes on from it is it, and longer: 9 + 5 are there
    assert contexts.begin(_wired([user, answer, *on]), []).max_tokens == 30 - 14
    # another has no room beside it: it may get all that is left
    with pytest.raises(ApiError) as refused:
        contexts.begin(_wired([user]), [])
    assert (refused.value.code, contexts.status) == ("episode_max_all_tokens", "context_overflow")

    contexts = _contexts(chat, max_all_tokens=30)
    _turn(contexts, chat, [user], "abc")
    assert contexts.begin(_wired([user]), []).max_tokens == 30 - 9 - 5
    assert _contexts(chat).begin(_wired([user]), [], 3).max_tokens == 3
    with pytest.raises(ApiError) as refused:
        _contexts(chat).begin(_wired([{"role": "developer", "content": ""}]), [])
    assert (refused.value.code, str(refused.value)) == (
        "invalid_messages",
        "no role developer",
    )


def test_turns_that_nobody_saw_are_not_trained_on() -> None:
    chat, user = Bytes(), {"role": "user", "content": "hi"}
    contexts = _contexts(chat)
    contexts.begin(_wired([user]), [])
    assert recorded_by(contexts) == SessionRecord([], [], (), (), [])
    answer = _turn(contexts, chat, [user], "abc")
    contexts.begin(_wired([user, answer, {"role": "user", "content": "on"}]), [])
    recorded = recorded_by(contexts)
    _check(recorded)
    assert recorded.token_ids == chat.sampled("abc")


def _tree(seed: int) -> list[tuple[int | None, str, str]]:
    """(the turn that it goes on from, what is new, what is answered) of some turns."""
    draw = random.Random(seed)
    turns: list[tuple[int | None, str, str]] = []
    for number in range(draw.randint(1, 8)):
        parent = draw.choice([None, *range(number), *range(number)])
        answer = draw.choice(["", "ab", "\n!f {}", "t</think>x", f"own {number}"])
        turns.append((parent, f"new {draw.randint(0, 2)} of {number}", answer))
    return turns


@pytest.mark.parametrize("forks", [False, True])
def test_the_order_of_requests_and_answers_changes_nothing(forks: bool) -> None:
    """Trees of turns, asked and answered in ten orders, are one and the same record; and in each of
    them every token
    that was sampled is trained on once, behind the context that it was sampled in."""
    for seed in range(20):
        turns = _tree(seed)
        result = [_in_some_order(turns, order, Bytes(forks=forks)) for order in range(10)]
        assert all(str(second) == str(result[0]) for second in result)


def _in_some_order(turns: list[tuple[int | None, str, str]], order: int, chat: Bytes) -> Any:
    draw = random.Random(order)
    contexts, histories = _contexts(chat), dict[int, Messages]()
    waiting, started, keys, old = (
        set(range(len(turns))),
        dict[int, Any](),
        dict[int, str](),
        list[tuple[Any, Any]](),
    )
    while waiting or started:
        ready = [
            number
            for number in waiting
            if turns[number][0] is None or turns[number][0] in histories
        ]
        if ready and (not started or draw.random() < 0.5):
            number = draw.choice(sorted(ready))
            parent, new, _ = turns[number]
            messages = [
                *(histories[parent] if parent is not None else []),
                {"role": "user", "content": new},
            ]
            started[number] = contexts.begin(_wired(messages), []), messages
            waiting.remove(number)
        else:
            number = draw.choice(sorted(started))
            wanted, messages = started.pop(number)
            completion = _completion(chat, turns[number][2], initial=-100.0 * number)
            histories[number] = [*messages, _returned(contexts.finish(wanted, completion))]
            keys[number] = wanted.key
            old.append((wanted.context_ids, completion.token_ids))
    recorded = recorded_by(contexts)
    _check(recorded)
    spans = []
    for segment in recorded.segments:
        ids, sampled = segment.token_ids.tolist(), segment.sampled.tolist()
        ends = [
            i + 1
            for i in range(len(ids))
            if sampled[i] and (i + 1 == len(ids) or not sampled[i + 1])
        ]
        for end in ends:
            begin = end - next(i for i in range(end) if not sampled[end - 1 - i])
            spans.append((ids[:begin], ids[begin:end]))
    assert sorted(spans) == sorted(old)
    segments = [
        (segment.token_ids.tolist(), segment.sampled.tolist()) for segment in recorded.segments
    ]
    return segments, recorded.logprobs, recorded.messages, recorded.turns, sorted(keys.items())


@pytest.mark.parametrize("history", ["append", "fork"])
def test_with_the_chat_format_of_a_tokenizer_nothing_sampled_is_made_anew(
    history: Any, tmp_path: Path
) -> None:
    """Two calls, their results, a turn of the user: with special tokens as text in what is given,
    and tokens sampled
    that no text gives."""
    tokenizer = make_tokenizer(tmp_path)
    chat = ChatFormat(tokenizer, history, [], "agent")
    limits = EpisodeLimits(
        max_turns=9,
        max_tokens=1000,
        max_turn_tokens=1000,
        max_model_len=2000,
        max_all_tokens=5000,
    )
    contexts = ConversationTree(chat, limits)
    tools = [
        {
            "type": "function",
            "function": {"name": "count", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    messages: Messages = [{"role": "user", "content": "c <|end|><|assistant|>"}]
    # each letter a token of its own: the tokenizer has one for a call's opening
    spelled = [
        tokenizer.convert_tokens_to_ids(letter)
        for letter in '{"name":"count","arguments":{"item":"c"}}'
    ]
    begin, end, over = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|end|>"])
    output = [
        [begin, *spelled, end] * 2 + [over],
        [*tokenizer.encode("7,3"), over],
        [*tokenizer.encode("ok"), over],
    ]
    contents = [["<|end|>", "3 <tool_call>"], ["again <|user|>"], []]
    for ids, answers in zip(output, contents, strict=True):
        wanted = contexts.begin(_wired(messages), tools)
        answer = contexts.finish(wanted, Completion(ids, [-1.0] * len(ids), "stop"))
        calls = answer.message.get("tool_calls", [])
        assert len(calls) == (2 if ids is output[0] else 0)
        inputs = [{"role": "tool", "tool_call_id": call["id"]} for call in calls] or [
            {"role": "user"}
        ]
        new = [{**single, "content": text} for single, text in zip(inputs, answers, strict=False)]
        messages = [*messages, _returned(answer), *new]
    recorded = recorded_by(contexts)
    _check(recorded)
    assert recorded.token_ids == [token for ids in output for token in ids]
    (segment,) = recorded.segments  # this template rewrites nothing
    names = tokenizer.convert_ids_to_tokens(segment.token_ids.tolist())
    # of the template four, of the policy three, and none that a text has in it
    assert names.count("<|end|>") == 4 + 3
    assert (names.count("<|assistant|>"), names.count("<|user|>"), names.count("<|tool|>")) == (
        3,
        2,
        2,
    )
