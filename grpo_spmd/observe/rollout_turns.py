"""An episode as a dump and the rollout buffer have it: JSON with all its tokens, written, and checked when it is read.
Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_spmd.learn.contexts import broken_rule
from grpo_spmd.records import Episode, Segment, Turn

_DEEPEST = 64  # what a policy or a tool writes may be nested without end
_MOST_TURNS = 1 << 20


def episode_fields(episode: Episode) -> dict[str, Any]:
    """`status`; `turns`, the tokens of its segments in their order, cut where one who wrote them was followed by the
    other; `messages`; and what the `environment` gave and took."""
    turns, waiting = list[dict[str, Any]](), deque(episode.turns)
    for number, segment in enumerate(episode.segments):
        changes = np.flatnonzero(np.diff(segment.sampled)) + 1
        for ids, sampled in zip(np.split(segment.token_ids, changes), np.split(segment.sampled, changes), strict=True):
            if not sampled[0]:
                turns.append({"segment": number, "sampled": False, "token_ids": ids.tolist()})
                continue
            while len(ids):
                turns.append(_turn_fields(number, waiting[0], ids.tolist()))
                ids = ids[waiting.popleft().num_tokens :]
    turns += [_turn_fields(max(0, len(episode.segments) - 1), turn, []) for turn in waiting]  # of no token
    took = {"rewards": episode.rewards, "calls_s": episode.calls_s, "error": episode.error}
    return {"status": episode.status, "turns": turns, "messages": episode.messages, "environment": took}


def shown_fields(episode: Episode) -> dict[str, Any]:
    """The same for a dump, whatever a policy, a tool or an environment wrote."""
    fields = episode_fields(episode)
    return {**fields, "messages": _shown(fields["messages"]), "environment": _shown(fields["environment"])}


def _turn_fields(segment: int, turn: Turn, token_ids: list[int]) -> dict[str, Any]:
    fields = {"segment": segment, "sampled": True, "token_ids": token_ids[: turn.num_tokens]}
    reward = {} if turn.reward is None else {"reward": turn.reward}
    return {**fields, "finish_reason": turn.finish_reason, **reward}


def read_episode(fields: Mapping[str, Any], completion_ids: Sequence[int]) -> Episode:
    """What such fields are of. Raises ValueError: what of them is no episode of these tokens."""
    status, turns, messages, took = (fields.get(name) for name in ("status", "turns", "messages", "environment"))
    if not isinstance(status, str):
        raise ValueError(f"status is {status!r:.80}")
    if not isinstance(turns, list) or len(turns) > _MOST_TURNS or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"turns are {turns!r:.80}")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages are {messages!r:.80}")
    if not is_shallow(messages):
        raise ValueError(f"messages are nested more than {_DEEPEST} deep")
    segments, sampled = _read_turns(turns)
    episode = Episode(status, segments, sampled, messages, *_read_took(took))
    if why := broken_rule(completion_ids, episode):
        raise ValueError(why)
    return episode


def _read_turns(turns: Sequence[Mapping[str, Any]]) -> tuple[tuple[Segment, ...], tuple[Turn, ...]]:
    of_segments, found = list[list[tuple[list[int], bool]]](), list[Turn]()
    for turn in turns:
        number, is_sampled, ids = (turn.get(name) for name in ("segment", "sampled", "token_ids"))
        if type(number) is not int or number not in (len(of_segments) - 1, len(of_segments)) or number < 0:
            raise ValueError(f"a turn's segment is {number!r:.80}, behind {len(of_segments)} of them")
        if type(is_sampled) is not bool:
            raise ValueError(f"a turn's sampled is {is_sampled!r:.80}")
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ValueError(f"a turn's token_ids are {ids!r:.80}")
        if number == len(of_segments):
            of_segments.append([])
        of_segments[number].append((ids, is_sampled))
        reason, reward = turn.get("finish_reason"), turn.get("reward")
        if is_sampled != isinstance(reason, str) or not (reward is None or (is_sampled and _is_finite(reward))):
            raise ValueError(f"a turn's finish_reason is {reason!r:.80}, its reward {reward!r:.80}")
        if is_sampled:
            found.append(Turn(len(ids), str(reason), None if reward is None else float(reward)))
    segments = []
    for parts in of_segments:
        token_ids = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
        segments.append(Segment(token_ids, np.repeat([own for _, own in parts], [len(ids) for ids, _ in parts])))
    return tuple(segments), tuple(found)


def _read_took(took: Any) -> tuple[dict[str, float | str | None], list[float], str | None]:
    rewards, calls_s, error = ((took if isinstance(took, dict) else {}).get(n) for n in ("rewards", "calls_s", "error"))
    if not isinstance(rewards, dict) or not all(
        value is None or isinstance(value, str) or _is_finite(value) for value in rewards.values()
    ):
        raise ValueError(f"environment.rewards are {rewards!r:.80}")
    if not isinstance(calls_s, list) or not all(_is_finite(seconds) and seconds >= 0 for seconds in calls_s):
        raise ValueError(f"environment.calls_s are {calls_s!r:.80}")
    if error is not None and not isinstance(error, str):
        raise ValueError(f"environment.error is {error!r:.80}")
    return rewards, calls_s, error


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e300  # NaN is not


def is_shallow(value: Any) -> bool:
    """Whether JSON is nested no deeper than others can follow, who call themselves for what is inside."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level if isinstance(outer, dict | list)
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]  # fmt: skip
        if not level:
            return True
    return False


def _shown(value: Any, depth: int = _DEEPEST) -> Any:
    """`value` as JSON holds it: what is none becomes text, what is nested too deep an ellipsis."""
    if isinstance(value, dict | list | tuple) and depth == 1:
        return "..."
    if isinstance(value, dict):
        return {str(name): _shown(inner, depth - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(inner, depth - 1) for inner in value]
    is_json = (
        value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_json else str(value)
