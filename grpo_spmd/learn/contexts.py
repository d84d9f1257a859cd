"""The contexts of a rollout: the token sequences that the policy read when it sampled.

A completion has one context: its prompt, then the completion. An episode has one context for each
segment: a segment is some of its turns, where each later turn's prompt begins with the prompt and
completion of the turn before. A stretch is a run of tokens of a segment that were all sampled by
the policy, or all given by the prompt or the environment. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from grpo_spmd.records import (
    EPISODE_STATUSES,
    FAILED_STATUSES,
    Completion,
    Episode,
    MicroBatch,
    Rollout,
    Routes,
    Segment,
)

_Ids = list[int] | npt.NDArray[np.int32]


def contexts_of(
    prompt_ids: _Ids,
    completion_ids: _Ids,
    segments: Sequence[Segment] = (),
    routes: Routes | None = None,
) -> Sequence[Segment]:
    """Returns the contexts of a rollout: its `segments` if there are any, else one segment made of
    prompt, completion and `routes`."""
    if segments:
        return segments
    token_ids = np.concatenate([np.asarray(ids, np.int32) for ids in (prompt_ids, completion_ids)])
    return (Segment(token_ids, np.arange(len(token_ids)) >= len(prompt_ids), routes),)


def rollout_contexts(rollouts: Iterable[Rollout]) -> list[Segment]:
    """Returns the contexts of all rollouts, one rollout after the other."""
    return [
        context
        for rollout in rollouts
        for context in contexts_of(rollout.prompt_ids, rollout.completion_ids, rollout.segments)
    ]


def completion_contexts(prompt_ids: _Ids, completion: Completion) -> Sequence[Segment]:
    """Returns the contexts of a completion, whether it is an episode or not."""
    segments = completion.episode.segments if completion.episode is not None else ()
    return contexts_of(prompt_ids, completion.token_ids, segments, completion.routes)


def completion_turns(completion: Completion) -> list[tuple[list[int], str]]:
    """Returns (sampled token ids, finish_reason) of each turn of a completion. A completion without
    an episode is one turn."""
    if completion.episode is None:
        return [(completion.token_ids, completion.finish_reason)]
    ids = iter(completion.token_ids)
    turns = completion.episode.turns
    return [(list(islice(ids, turn.num_tokens)), turn.finish_reason) for turn in turns]


def find_episode_error(token_ids: Sequence[int], episode: Episode) -> str | None:
    """Returns the reason why a completion with the sampled tokens `token_ids` cannot have this
    episode, as a half sentence for a message. None if the two are consistent."""
    if episode.status not in EPISODE_STATUSES:
        return f"its status is {episode.status!r:.80}"
    if episode.status in FAILED_STATUSES and (episode.segments or episode.turns or token_ids):
        return f"its status is {episode.status!r}, but it has tokens"
    for number, segment in enumerate(episode.segments):
        if not len(segment.token_ids) or segment.sampled[0]:
            rule = "is empty or begins with a sampled token; a prompt token must come first"
            return f"segment {number} {rule}"
    sampled = [segment.token_ids[segment.sampled] for segment in episode.segments]
    if not np.array_equal(np.concatenate([*sampled, np.empty(0, np.int32)]), token_ids):
        return "the tokens that its segments mark as sampled are not those of the completion"
    num_turn_tokens = sum(turn.num_tokens for turn in episode.turns)
    if num_turn_tokens != len(token_ids):
        return f"its turns have {num_turn_tokens} tokens, and {len(token_ids)} were sampled"
    # A stretch of sampled tokens may end only where a turn ends; both are counted in sampled
    # tokens.
    turn_ends = np.cumsum([turn.num_tokens for turn in episode.turns])
    masks = [np.append(segment.sampled, False) for segment in episode.segments]
    mask = np.concatenate(masks or [np.zeros(1, bool)])
    stretch_ends = np.cumsum(mask)[:-1][mask[:-1] & ~mask[1:]]
    if not np.isin(stretch_ends, turn_ends).all():
        return "a turn's sampled tokens are interrupted by a token that was not sampled"
    for turn in episode.turns:
        if turn.finish_reason not in ("stop", "length"):
            return f"a turn's finish_reason is {turn.finish_reason!r:.80}"
    return None


def read_routes(
    content: bytes | memoryview, num_tokens: int, shape: tuple[int, int]
) -> Routes | None:
    """Returns the routes [num_tokens, layers, k] that `content` holds as bytes, or None if it is
    empty. Routes are the k experts that the router of each MoE layer chose for each token.

    `shape` is (layers, k); the width of the integers follows from the number of bytes."""
    size = num_tokens * math.prod(shape)
    if not size or not len(content):
        return None
    width = memoryview(content).nbytes // size
    return np.frombuffer(content, f"u{width}").reshape(num_tokens, *shape)


def extend_routes(earlier: Routes | None, later: Routes | None) -> Routes | None:
    """Returns the routes (the experts that a model's routers chose, by token) of a whole context.

    `later` has the routes of all tokens of the context after one more turn. `earlier` has the
    routes of the context before that turn; it is None in the first turn. A token keeps the routes
    of the engine's first pass over it, with which the next token was sampled: if its keys and
    values were evicted from the cache and it was prefilled again, the new routes are ignored."""
    if earlier is None or later is None:
        return later
    return np.concatenate([earlier, later[len(earlier) :]])


def shorten_segments(
    segments: Sequence[Segment], max_given: int, max_sampled: int, max_stretch: int
) -> tuple[Segment, ...]:
    """Returns the segments with fewer tokens, for a check that looks at few tokens.

    A stretch is a run of tokens that were all given (by the prompt or the environment) or all
    sampled (by the policy). A given stretch keeps its first token and its last ones, at most
    `max_given` together. A sampled stretch keeps at most its first `max_stretch` tokens. All
    sampled stretches together keep at most `max_sampled` tokens.
    """
    short: list[Segment] = []
    num_left = max_sampled
    for segment in segments:
        sampled = segment.sampled
        positions = np.arange(len(sampled))
        starts = np.flatnonzero(np.diff(sampled, prepend=~sampled[:1]))
        lengths = np.diff(starts, append=len(sampled))
        # The positions of a token in its stretch, from the start and from the end.
        offsets = positions - np.repeat(starts, lengths)
        remaining = np.repeat(lengths, lengths) - offsets
        is_end = (offsets == 0) | (remaining < max_given)
        is_kept = np.where(sampled, offsets < max_stretch, is_end)
        numbers = np.cumsum(is_kept & sampled)
        is_kept &= ~sampled | (numbers <= num_left)
        # Nothing after the last sampled token is needed.
        chosen = np.flatnonzero(is_kept & sampled)
        if len(chosen):
            num_left -= len(chosen)
            is_kept &= positions <= chosen[-1]
            routes = segment.routes
            if routes is not None:
                # As in a whole segment, all kept tokens but the last have routes.
                routes = routes[np.flatnonzero(is_kept)[:-1]]
            short.append(Segment(segment.token_ids[is_kept], sampled[is_kept], routes))
    return tuple(short)


@dataclass(frozen=True)
class RowContext:
    """One sequence of a micro-batch ("row") in which the policy sampled a token."""

    rollout_id: int
    token_ids: npt.NDArray[np.int64]
    """The whole sequence."""
    sampled_at: npt.NDArray[np.int64]
    """[n] Positions in the sequence of the tokens that the policy sampled."""
    tokens: npt.NDArray[np.int64]
    """[n] Indices of the same tokens among the completion tokens of the row."""
    routes: Routes | None = None
    """The routes of all tokens of the sequence (the experts that an MoE's routers chose); those of
    the last token mean nothing. None: the row has no routes."""


def row_contexts(row: MicroBatch) -> list[RowContext]:
    """Returns the sequences of a row in which the policy sampled a token, in the row's order. Waits
    for the device."""
    columns = (row.input_ids, row.predict_index, row.sequence_index)
    input_ids, predict_index, rollout_index = (column.cpu().numpy() for column in columns)
    routes = None if row.routes is None else row.routes.experts.cpu().numpy()
    # Sequence s of the row is input_ids[bounds[s] : bounds[s + 1]].
    bounds = np.cumsum([0, *row.sequence_lengths])
    sequence_of_token = np.searchsorted(bounds, predict_index, side="right") - 1
    contexts = []
    # A row without rollouts has one token, a placeholder that nobody sampled.
    for sequence in np.unique(sequence_of_token).tolist() if row.rollout_ids else []:
        tokens = np.flatnonzero(sequence_of_token == sequence)
        start = bounds[sequence]
        contexts.append(
            RowContext(
                row.rollout_ids[rollout_index[tokens[0]]],
                input_ids[start : bounds[sequence + 1]],
                sampled_at=predict_index[tokens] + 1 - start,
                tokens=tokens,
                routes=None if routes is None else routes[start : bounds[sequence + 1]],
            )
        )
    return contexts
