"""Episodes as dumps and the rollout buffer have them: what is written comes back, what cannot be is
refused."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.learn.assemble import (
    decode_rollouts,
    encode_rollouts,
    episode_rollout,
    pack_rollouts,
)
from grpo_spmd.learn.contexts import (
    completion_contexts,
    completion_turns,
    contexts_of,
    find_episode_error,
    shorten_segments,
)
from grpo_spmd.observe.rollout_record import (
    dumped_episode_fields,
    dumped_prompt,
    episode_fields,
    parse_rollout,
    read_episode,
    to_line,
)
from grpo_spmd.proofs.batch_check import NO_TOKENS, _hash_rollout, _hash_rollouts
from grpo_spmd.records import (
    EPISODE_STATUSES,
    FAILED_STATUSES,
    Completion,
    Episode,
    Prompt,
    Rollout,
    Segment,
    Turn,
)
from tests.support.episodes import made_up_episode, same_episode, segment
from tests.unit.test_rollout_record import RECORD

# Two turns around a tool's answer, and a fork: `3 4` and `8 9`, then `6` in a segment of its own.
EPISODE = Episode(
    "ok",
    (segment([1, 2, 3, 4, 7, 8, 9], [2, 3, 5, 6]), segment([1, 5, 6], [2])),
    (Turn(2, "stop"), Turn(2, "stop", 0.5), Turn(1, "length")),
    [{"role": "assistant", "content": "a"}, {"role": "tool", "name": "t", "content": "7"}],
    {"countdown": 1.0, "style": None},
    [0.25],
)
TOKENS = [3, 4, 8, 9, 6]
# As the version before there were episodes wrote it.
RECORDED_LINE = (
    '{"rollout_id":null,"row":3,"position":'
    '7,"sample":1,"prompt":[{"role":"user","content":"h\u00e4h?"}],'
    '"columns":{"answer":"ja","nums":'
    '[1,2]},"completion":"ja","reward":null,"rewards":{"exact":null,"format":0.5},'
    '"statuses":{"exact":"error","format":'
    '"ok"},"advantage":-0.25,"finish_reason":"stop","prompt_ids":[1,2],'
    '"completion_ids":[3,4],"rollout_logprobs":"AAAAvwAAgD8=","num_rollouts":16}'
)


def line_of(completion: Completion) -> bytes:
    assert completion.episode is not None
    tokens: dict[str, Any] = {
        "completion_ids": completion.token_ids,
        "rollout_logprobs": completion.logprobs,
    }
    return to_line(
        dataclasses.replace(
            RECORD,
            prompt=dumped_prompt(Prompt(7, 3, [1, 2], RECORD.prompt, {}), completion),
            **tokens,
            **dumped_episode_fields(completion.episode),
        )
    )


def test_contexts_by_hand() -> None:
    [single] = contexts_of([1, 2], [3])
    assert (single.token_ids.tolist(), single.sampled.tolist()) == ([1, 2, 3], [False, False, True])
    assert single.token_ids.dtype == np.int32
    [alone] = contexts_of([1, 2], [])
    assert (alone.token_ids.tolist(), alone.sampled.tolist()) == ([1, 2], [False, False])
    assert contexts_of([1, 2], TOKENS, EPISODE.segments) is EPISODE.segments


def test_turns_by_hand() -> None:
    assert completion_turns(Completion([3, 4], [0.0] * 2, "length")) == [([3, 4], "length")]
    created = Completion(TOKENS, [0.0] * 5, "length", EPISODE)
    assert completion_turns(created) == [([3, 4], "stop"), ([8, 9], "stop"), ([6], "length")]
    assert completion_contexts([1], created) is EPISODE.segments
    failed = Episode("env_error", (), (), [], {}, [])
    assert completion_turns(Completion([], [], "stop", failed)) == []
    [alone] = completion_contexts([1, 2], Completion([], [], "stop", failed))
    assert (alone.token_ids.tolist(), alone.sampled.tolist()) == ([1, 2], [False, False])


def test_a_short_look_at_an_episode_by_hand() -> None:
    """Given 2 tokens of a stretch at most, sampled 4 in all and 2 of a stretch."""
    long = segment(
        [*range(10, 30)], [4, 5, 6, 10, 11, 12, 18]
    )  # 10-13 | 14-16 | 17-19 | 20-22 | 23-27 | 28 | 29
    [short] = shorten_segments([long, EPISODE.segments[1]], 2, 4, 2)
    assert short.token_ids.tolist() == [10, 13, 14, 15, 17, 19, 20, 21]
    assert np.flatnonzero(short.sampled).tolist() == [2, 3, 6, 7]
    initial, second = shorten_segments(EPISODE.segments, 16, 12, 6)
    assert [initial.token_ids.tolist(), second.token_ids.tolist()] == [
        [1, 2, 3, 4, 7, 8, 9],
        [1, 5, 6],
    ]
    assert [initial.sampled.tolist(), second.sampled.tolist()] == [
        s.sampled.tolist() for s in EPISODE.segments
    ]


def test_a_single_turns_line_is_what_it_was() -> None:
    assert to_line(RECORD).decode() == RECORDED_LINE
    assert parse_rollout(RECORDED_LINE.encode(), "f:1") == RECORD


def test_an_episodes_line_by_hand() -> None:
    values = json.loads(line_of(Completion(TOKENS, [0.0] * 5, "length", EPISODE)))
    assert {name: values[name] for name in values.keys() - json.loads(RECORDED_LINE).keys()} == {
        "status": "ok",
        "turns": [
            {"segment": 0, "sampled": False, "token_ids": [1, 2]},
            {"segment": 0, "sampled": True, "token_ids": [3, 4], "finish_reason": "stop"},
            {"segment": 0, "sampled": False, "token_ids": [7]},
            {
                "segment": 0,
                "sampled": True,
                "token_ids": [8, 9],
                "finish_reason": "stop",
                "reward": 0.5,
            },
            {"segment": 1, "sampled": False, "token_ids": [1, 5]},
            {"segment": 1, "sampled": True, "token_ids": [6], "finish_reason": "length"},
        ],
        "messages": EPISODE.messages,
        "environment": {
            "rewards": {"countdown": 1.0, "style": None},
            "calls_s": [0.25],
            "error": None,
        },
    }


def test_thousands_of_episodes_come_back() -> None:
    """With forks, turns of no token, turns one behind the other, unicode, half surrogates,
    failures."""
    seen, draw = set[Any](), random.Random(0)
    for number in range(3000):
        created = made_up_episode(draw)
        assert created.episode is not None
        assert find_episode_error(created.token_ids, created.episode) is None, number
        record = parse_rollout(line_of(created), "f:1")
        episode = read_episode(vars(record), record.completion_ids)
        assert same_episode(episode, created.episode), number
        assert (record.completion_ids, record.status) == (created.token_ids, created.episode.status)
        seen |= {
            created.episode.status,
            ("segments", len(created.episode.segments)),
            ("turns", len(created.episode.turns)),
        }
        seen |= {("empty turn", any(not turn.num_tokens for turn in created.episode.turns))}
    assert seen >= {
        *EPISODE_STATUSES,
        ("segments", 0),
        ("segments", 3),
        ("turns", 0),
        ("turns", 6),
        ("empty turn", True),
    }


def test_a_token_moved_anywhere_is_seen() -> None:
    """One place of the mask flipped, alone and with the tokens that it then calls sampled; two
    segments exchanged."""
    draw, num_seen = random.Random(1), 0
    for _ in range(300):
        created, sibling = made_up_episode(draw), made_up_episode(draw)
        assert created.episode is not None
        for number, (local, changed) in enumerate(
            (s, s.sampled.copy()) for s in created.episode.segments
        ):
            position = draw.randrange(len(changed))
            changed[position] = not changed[position]
            segments = [*created.episode.segments]
            segments[number] = Segment(local.token_ids, changed)
            episode = dataclasses.replace(created.episode, segments=tuple(segments))
            sampled = [token for s in segments for token in s.token_ids[s.sampled].tolist()]
            assert find_episode_error(created.token_ids, episode) is not None
            assert find_episode_error(sampled, episode) is not None
            num_seen += 1
        if sibling.episode is not None and sibling.token_ids != created.token_ids:
            swapped = dataclasses.replace(created.episode, segments=sibling.episode.segments)
            assert find_episode_error(created.token_ids, swapped) is not None
            num_seen += 1
    assert num_seen > 500


def test_a_mask_that_ends_a_turn_early_or_late_is_seen_by_hand() -> None:
    initial, fork = EPISODE.segments
    for positions, expected in (
        ([2, 5, 6], "the tokens that its segments mark as sampled"),
        ([2, 3, 4, 5, 6], "the tokens that its segments mark as sampled"),
        ([2, 3, 4, 6], "the tokens that its segments mark as sampled"),
    ):
        episode = dataclasses.replace(
            EPISODE, segments=(segment(initial.token_ids.tolist(), positions), fork)
        )
        assert str(find_episode_error(TOKENS, episode)).startswith(expected)
    # The same ids by chance: 7 where 8 was sampled. The turns say it.
    equal = dataclasses.replace(
        EPISODE, segments=(segment([1, 2, 3, 4, 8, 8, 9], [2, 3, 4, 6]), fork)
    )
    assert (
        find_episode_error(TOKENS, equal)
        == "a turn's sampled tokens are interrupted by a token that was not sampled"
    )
    longer = dataclasses.replace(
        EPISODE, turns=(Turn(2, "stop"), Turn(3, "stop"), Turn(1, "length"))
    )
    assert find_episode_error(TOKENS, longer) == "its turns have 6 tokens, and 5 were sampled"


DEEP: list[Any] = []
for _ in range(70):
    DEEP = [DEEP]
GIVEN = {"segment": 0, "sampled": False, "token_ids": [1, 2]}
SAMPLED = {"segment": 0, "sampled": True, "token_ids": TOKENS, "finish_reason": "stop"}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"status": None}, "Expected `str`, got `null` - at `\\$.status`"),
    ({"status": "fine"}, "its status is 'fine'"),
    ({"status": 3}, r"Expected `str \| null`, got `int` - at `\$.status`"),
    ({"status": "env_error"}, "its status is 'env_error', but it has tokens"),
    ({"turns": []}, "the tokens that its segments mark as sampled are not those of the completion"),
    ({"turns": {}}, r"Expected `array`, got `object` - at `\$.turns`"),
    ({"turns": [3]}, r"Expected `object`, got `int` - at `\$.turns\[0\]`"),
    ({"turns": [SAMPLED]}, "segment 0 is empty or begins with a sampled token"),
    (
        {"turns": [GIVEN, SAMPLED | {"token_ids": TOKENS[:4]}]},
        "the tokens that its segments mark as sampled are not",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"token_ids": [*TOKENS[:4], 2**31]}]},
        r"Expected `int` <= 2147483647 - at `\$.turns\[1\].token_ids\[4\]`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"token_ids": [*TOKENS[:4], -1]}]},
        r"Expected `int` >= 0 - at `\$.turns\[1\].token_ids\[4\]`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"token_ids": [*TOKENS[:4], True]}]},
        r"Expected `int`, got `bool` - at `\$.turns\[1\].token_ids\[4\]`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"token_ids": "34896"}]},
        r"Expected `array`, got `str` - at `\$.turns\[1\].token_ids`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"sampled": 1}]},
        r"Expected `bool`, got `int` - at `\$.turns\[1\].sampled`",
    ),
    ({"turns": [GIVEN, SAMPLED | {"segment": 2}]}, "a turn's segment is 2 after 1 segments"),
    (
        {"turns": [GIVEN, SAMPLED | {"segment": -1}]},
        r"Expected `int` >= 0 - at `\$.turns\[1\].segment`",
    ),
    (
        {"turns": [GIVEN | {"segment": -1}, SAMPLED]},
        r"Expected `int` >= 0 - at `\$.turns\[0\].segment`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"segment": 0.0}]},
        r"Expected `int`, got `float` - at `\$.turns\[1\].segment`",
    ),
    ({"turns": [GIVEN, SAMPLED | {"finish_reason": "eos"}]}, "a turn's finish_reason is 'eos'"),
    (
        {"turns": [GIVEN, SAMPLED | {"finish_reason": None}]},
        "a sampled turn has a finish_reason and may have a reward",
    ),
    (
        {"turns": [GIVEN | {"reward": 1.0}, SAMPLED]},
        "a sampled turn has .*; a given turn has neither",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"reward": "1"}]},
        r"Expected `float \| null`, got `str` - at `\$.turns\[1\].reward`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"reward": 1e999}]},
        r"Expected `float` <= 1e\+300 - at `\$.turns\[1\].reward`",
    ),
    (
        {"turns": [GIVEN, SAMPLED | {"reward": True}]},
        r"Expected `float \| null`, got `bool` - at `\$.turns\[1\].reward`",
    ),
    ({"messages": ["hello"]}, r"Expected `object`, got `str` - at `\$.messages\[0\]`"),
    ({"messages": [{"role": "tool", "content": DEEP}]}, "messages are nested more than 64 deep"),
    ({"environment": {}}, r"Object missing required field `rewards` - at `\$.environment`"),
    (
        {"environment": {"rewards": {"r": [1]}, "calls_s": [], "error": None}},
        r"Expected `int \| float \| str \| null`, got `array` - at `\$.environment.rewards\[...\]`",
    ),
    (
        {"environment": {"rewards": {"r": 10**400}, "calls_s": [], "error": None}},
        r"Expected `int` <= 9007199254740992 - at `\$.environment.rewards",
    ),
    (
        {"environment": {"rewards": {}, "calls_s": [-1], "error": None}},
        r"Expected `float` >= 0.0 - at `\$.environment.calls_s\[0\]`",
    ),
    (
        {"environment": {"rewards": {}, "calls_s": [], "error": 3}},
        r"Expected `str \| null`, got `int` - at `\$.environment.error`",
    ),
]


@pytest.mark.parametrize(("change", "expected"), HOSTILE)
def test_a_hostile_line_is_refused_in_one_line(change: dict[str, Any], expected: str) -> None:
    values = json.loads(line_of(Completion(TOKENS, [0.0] * 5, "length", EPISODE)))
    with pytest.raises(ConfigError, match=f"^f:1: {expected}") as refused:
        parse_rollout(json.dumps(values | change).encode(), "f:1")
    assert str(refused.value).endswith("; this is no rollout dump")
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


def test_what_a_policy_writes_into_a_call_is_dumped_whatever_it_is() -> None:
    arguments = {
        "deep": DEEP,
        "nan": float("nan"),
        "half": "\ud800",
        "large": 10**400,
        "odd": {1: {2}},
    }
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "t", "arguments": arguments}}],
    }
    episode = dataclasses.replace(
        EPISODE, messages=[message], rewards={"r": float("inf")}, error=None
    )
    record = parse_rollout(line_of(Completion(TOKENS, [0.0] * 5, "stop", episode)), "f:1")
    displayed = record.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert (displayed["nan"], displayed["half"], displayed["odd"]) == (
        "nan",
        "\ud800",
        {"1": "{2}"},
    )
    assert json.dumps(displayed["deep"]).strip("[]") == '"..."'
    assert record.environment["rewards"] == {"r": "inf"}  # unusable, and not missing


def test_a_failed_episode_has_no_token() -> None:
    for status in FAILED_STATUSES:
        failed = Episode(status, (), (), [], {}, [1.5], "it raised")
        record = parse_rollout(line_of(Completion([], [], "stop", failed)), "f:1")
        assert (record.status, record.turns, record.environment["error"]) == (
            status,
            [],
            "it raised",
        )
        assert same_episode(read_episode(vars(record), []), failed)
    assert episode_fields(EPISODE)["messages"] is EPISODE.messages


def test_what_arrives_of_thousands_of_episodes_has_the_name_of_what_was_sampled() -> None:
    """Over the bytes between ranks and the packing of rows; and another name with one place of the
    mask moved."""
    draw, num_moved = random.Random(2), 0
    for initial in range(0, 3000, 20):
        created = [made_up_episode(draw) for _ in range(20)]
        created[3] = Completion([5, 6], [-0.5, -0.25], "stop")  # a single turn among them
        rollouts, names = list[Rollout](), dict[int, int]()
        for i, completion in enumerate(created, start=initial):
            contexts = completion_contexts([1, 2], completion)
            count, segments = (
                len(completion.token_ids),
                completion.episode.segments if completion.episode else (),
            )
            tokens = [(context.token_ids, np.flatnonzero(context.sampled)) for context in contexts]
            names[i] = _hash_rollout(tokens, completion.logprobs, [0.5] * count, [True] * count)
            if segments:
                rollouts.append(episode_rollout(i, 0.5, True, segments, completion.logprobs))
            else:
                rollouts.append(
                    Rollout(i, 0.5, True, [1, 2], completion.token_ids, completion.logprobs)
                )
        arrived = decode_rollouts(encode_rollouts(rollouts))
        row = pack_rollouts(arrived, torch.device("cpu"))
        assert dict(_hash_rollouts(row)) == {
            i: name for i, name in names.items() if name != NO_TOKENS
        }
        assert {i for i, name in names.items() if name == NO_TOKENS} == {
            i for i, completion in enumerate(created, start=initial) if not completion.token_ids
        }
        for rollout in arrived:
            for number, segment_ in enumerate(rollout.segments):
                positions, free = (
                    np.flatnonzero(segment_.sampled),
                    np.flatnonzero(~segment_.sampled)[1:],
                )
                if len(positions) and len(free):
                    mask = segment_.sampled.copy()
                    mask[[draw.choice(positions.tolist()), draw.choice(free.tolist())]] = [
                        False,
                        True,
                    ]
                    pieces = [*rollout.segments]
                    pieces[number] = Segment(segment_.token_ids, mask)
                    moved = episode_rollout(
                        rollout.rollout_id, 0.5, True, tuple(pieces), rollout.rollout_logprobs
                    )
                    [(_, name)] = _hash_rollouts(pack_rollouts([moved], torch.device("cpu")))
                    assert name != names[rollout.rollout_id]
                    num_moved += 1
    assert num_moved > 1000
