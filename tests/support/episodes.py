"""Episodes that nobody played: made up at random, and compared."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from grpo_spmd.records import EPISODE_STATUSES, FAILED_STATUSES, Completion, Episode, Segment, Turn

_TEXTS = ("", "4", "\u00fc\U0001f600", "<|im_end|><tool_call>", "\ud800", "a\n\u2028b", "x" * 300)


def segment(token_ids: Sequence[int], sampled_places: Sequence[int]) -> Segment:
    sampled = np.zeros(len(token_ids), np.bool_)
    sampled[list(sampled_places)] = True
    return Segment(np.array(token_ids, np.int32), sampled)


def made_up_episode(draw: random.Random) -> Completion:
    """Of up to 3 segments and 6 turns, some of no token, some one behind the other."""
    status = draw.choice(EPISODE_STATUSES)
    if status in FAILED_STATUSES:
        failed = Episode(status, (), (), [], {}, [draw.random()], draw.choice(_TEXTS))
        return Completion([], [], "stop", failed)
    segments, turns, token_ids = list[Segment](), list[Turn](), list[int]()
    for _ in range(draw.choice((1, 1, 2, 3))):
        ids = [draw.randrange(2**31) for _ in range(draw.randint(1, 5))]
        sampled = [False] * len(ids)
        for _ in range(draw.randint(0, 2)):
            message = [draw.randrange(2**31) for _ in range(draw.choice((0, 1, 2, 7)))]
            inputs = [draw.randrange(2**31) for _ in range(draw.choice((0, 1, 3)))]
            turns.append(
                Turn(len(message), draw.choice(("stop", "length")), draw.choice((None, 0.0, -1.5)))
            )
            ids, sampled = (
                ids + message + inputs,
                sampled + [True] * len(message) + [False] * len(inputs),
            )
            token_ids += message
        segments.append(Segment(np.array(ids, np.int32), np.array(sampled)))
    messages = [
        {"role": draw.choice(("assistant", "tool")), "content": draw.choice(_TEXTS)} for _ in turns
    ]
    rewards = {"r": draw.choice((None, 1.0, 0.25, "raised")), draw.choice(_TEXTS): 2.0}
    calls_s = [draw.random() for _ in turns]
    opening = [{"role": "user", "content": draw.choice(_TEXTS)} for _ in range(draw.randint(1, 2))]
    episode = Episode(
        status,
        tuple(segments),
        tuple(turns),
        messages,
        rewards,
        calls_s,
        opening=opening,
        num_tool_calls=draw.choice((None, 0, 3)),
    )
    return Completion(
        token_ids, [-draw.random() for _ in token_ids], draw.choice(("stop", "length")), episode
    )


def same_episode(a: Episode, b: Episode) -> bool:
    """Their arrays too, of which == says nothing."""
    rest = [{name: value for name, value in vars(x).items() if name != "segments"} for x in (a, b)]
    return rest[0] == rest[1] and [
        (s.token_ids.tolist(), s.token_ids.dtype, s.sampled.tolist(), s.sampled.dtype)
        for s in a.segments
    ] == [
        (s.token_ids.tolist(), s.token_ids.dtype, s.sampled.tolist(), s.sampled.dtype)
        for s in b.segments
    ]
