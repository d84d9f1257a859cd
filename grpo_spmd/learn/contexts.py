"""What the policy had before it when it sampled the tokens of a rollout, and what holds of every episode. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from grpo_spmd.records import EPISODE_STATUSES, FAILED_STATUSES, Completion, Episode, Segment

_Ids = list[int] | npt.NDArray[np.int32]


def contexts_of(
    prompt_ids: _Ids, completion_ids: _Ids, segments: Sequence[Segment] = ()
) -> Sequence[Segment]:
    """An episode's segments; where there are none, the prompt and its completion as one."""
    if segments:
        return segments
    token_ids = np.concatenate([np.asarray(ids, np.int32) for ids in (prompt_ids, completion_ids)])
    return (Segment(token_ids, np.arange(len(token_ids)) >= len(prompt_ids)),)


def completion_contexts(prompt_ids: _Ids, completion: Completion) -> Sequence[Segment]:
    segments = completion.episode.segments if completion.episode is not None else ()
    return contexts_of(prompt_ids, completion.token_ids, segments)


def turns_of(completion: Completion) -> list[tuple[list[int], str]]:
    """The tokens of each turn that it has, with its finish_reason."""
    if completion.episode is None:
        return [(completion.token_ids, completion.finish_reason)]
    ends = list(accumulate(turn.num_tokens for turn in completion.episode.turns))
    ids = completion.token_ids
    pairs = zip(completion.episode.turns, ends, strict=True)
    return [(ids[end - turn.num_tokens : end], turn.finish_reason) for turn, end in pairs]


def broken_rule(token_ids: Sequence[int], episode: Episode) -> str | None:
    """Why `episode` cannot be that of a completion with these tokens; None: it can."""
    if episode.status not in EPISODE_STATUSES:
        return f"its status is {episode.status!r:.80}"
    if episode.status in FAILED_STATUSES and (episode.segments or episode.turns or token_ids):
        return f"its status is {episode.status!r}, and it has tokens"
    for number, segment in enumerate(episode.segments):
        if not len(segment.token_ids) or segment.sampled[0]:
            return f"segment {number} begins with no token that was given, after which one could be sampled"
    sampled = [segment.token_ids[segment.sampled] for segment in episode.segments]
    if not np.array_equal(np.concatenate([*sampled, np.empty(0, np.int32)]), token_ids):
        return "the tokens that its segments have as sampled are not those of the completion"
    if (in_turns := sum(turn.num_tokens for turn in episode.turns)) != len(token_ids):
        return f"its turns have {in_turns} tokens, and {len(token_ids)} were sampled"
    ends = np.cumsum([turn.num_tokens for turn in episode.turns])
    # Where a stretch of sampled tokens ends, a turn does; counted in sampled tokens.
    joined = np.concatenate(
        [np.append(segment.sampled, False) for segment in episode.segments] or [np.zeros(1, bool)]
    )
    stretch_ends = np.cumsum(joined)[:-1][joined[:-1] & ~joined[1:]]
    if not np.isin(stretch_ends, ends).all():
        return "a turn has tokens before and behind one that was given"
    if odd := [
        turn.finish_reason for turn in episode.turns if turn.finish_reason not in ("stop", "length")
    ]:
        return f"a turn's finish_reason is {odd[0]!r:.80}"
    return None


def shortened(segments: Sequence[Segment], num_given: int, num_sampled: int) -> tuple[Segment, ...]:
    """Segments like these for a look at a few tokens: of each stretch that was given the first and the last tokens, at
    most `num_given`; of each that was sampled the first, at most half of the `num_sampled` that all may have."""
    found, left = list[Segment](), num_sampled
    for segment in segments:
        parts = list[tuple[npt.NDArray[np.int32], bool]]()
        changes = np.flatnonzero(np.diff(segment.sampled)) + 1
        for ids, own in zip(
            np.split(segment.token_ids, changes), np.split(segment.sampled, changes), strict=True
        ):
            if own[0] and left:
                parts.append((ids[: min(left, max(1, num_sampled // 2))], True))
                left -= len(parts[-1][0])
            elif not own[0]:
                parts.append((np.concatenate([ids[:1], ids[1:][1 - num_given :]]), False))
        while parts and not parts[-1][1]:
            parts.pop()
        if parts:
            sampled = np.repeat([own for _, own in parts], [len(ids) for ids, _ in parts])
            found.append(Segment(np.concatenate([ids for ids, _ in parts]), sampled))
    return tuple(found)
