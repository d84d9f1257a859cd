"""Turns the scored groups of a rank into the batch that the rank trains on.

Rank 0 decides from a few numbers per rollout which rank trains on which rollouts (sampled_step.py).
Then every rollout is sent from the rank that sampled it to the rank that trains on it, in one
exchange of bytes between all ranks. There the rollouts of a row are joined into a micro-batch
without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.config.schema import ROUTES_SAMPLED_EVERY, AdvantageConfig, LossConfig
from grpo_spmd.distributed.collectives import exchange_bytes, on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.advantages import Credit, credited_tokens
from grpo_spmd.learn.contexts import completion_contexts, read_routes, rollout_contexts
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.prefix_tree import build_tree
from grpo_spmd.learn.sampled_step import SampledStep, rollout_advantages
from grpo_spmd.learn.step_messages import revise_decision
from grpo_spmd.model.attention import sequence_starts
from grpo_spmd.model.offload import copy_to_device
from grpo_spmd.records import (
    Decision,
    MicroBatch,
    Rollout,
    RolloutBatch,
    RowRoutes,
    Segment,
)


def assemble_batch(sampled: SampledStep, session: Session) -> tuple[RolloutBatch, Decision]:
    """Collective. Returns (this rank's batch, this rank's part of rank 0's decision).

    Raises Rank0Error if no completion of the step has a usable reward."""
    decision = sampled.decide()
    num_sharing = session.sequence_ranks
    # One list for each group of ranks that share their rows.
    outgoing: list[list[Rollout]] = [[] for _ in range(session.world_size // num_sharing)]
    for rollout in _sampled_rollouts(sampled, decision):
        outgoing[decision.trained_by[rollout.rollout_id] // num_sharing].append(rollout)
    payloads = [encode_rollouts(rollouts) for rollouts in outgoing]
    # All ranks send to all ranks at once: sending a step's tokens through rank 0 would be slow.
    incoming = exchange_bytes([payload for payload in payloads for _ in range(num_sharing)])
    rollouts_by_id = {
        rollout.rollout_id: rollout for payload in incoming for rollout in decode_rollouts(payload)
    }
    mini_batches = [
        [
            pack_rollouts(
                [rollouts_by_id[i] for i in row],
                session.device,
                num_sharing,
                shares_prefixes=decision.shares_prefixes,
            )
            for row in rows
        ]
        for rows in decision.rows
    ]
    rows = list(chain.from_iterable(decision.rows))
    sample = _sample_routed([[rollouts_by_id[i] for i in row] for row in rows])
    batch = RolloutBatch(
        mini_batches,
        decision.num_loss_tokens,
        decision.num_loss_sequences,
        routed_sample=pack_rollouts(sample, session.device) if sample else None,
    )
    return batch, decision


def _sample_routed(rows: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    """Returns a sample of the rollouts in `rows`, to compare the policy's own routes (the experts
    that an MoE's routers choose) with the engine's.

    It has every 16th rollout, if that has routes. It has at most as many tokens as the longest row,
    so that it fits in one forward pass."""
    room = max((sum(rollout.num_tokens for rollout in row) for row in rows), default=0)
    sample = []
    for rollout in list(chain.from_iterable(rows))[::ROUTES_SAMPLED_EVERY]:
        room -= rollout.num_tokens
        if room >= 0 and any(segment.routes is not None for segment in rollout.segments):
            sample.append(rollout)
    return sample


def _sampled_rollouts(sampled: SampledStep, decision: Decision) -> Iterator[Rollout]:
    """Yields those rollouts that this rank sampled and that some rank trains on, with advantages
    and loss masks by rank 0's `decision`."""
    for number, group in enumerate(sampled.groups):
        rollout_ids = decision.rollout_ids(group)
        if not rollout_ids:
            continue
        size = len(group.completions)
        credits = credited_tokens(
            [decision.advantages[i] for i in rollout_ids],
            sampled.scored.rewards[number * size : (number + 1) * size],
            group.completions,
            discount=sampled.rules.discount,
            estimator=sampled.rules.advantage.estimator,
            slope=decision.advantage_slope,
        )
        for i, completion, credit in zip(rollout_ids, group.completions, credits, strict=True):
            contexts = completion_contexts(group.prompt.token_ids, completion)
            rollout = episode_rollout(i, credit, decision.in_loss[i], contexts, completion.logprobs)
            assert np.array_equal(rollout.completion_ids, completion.token_ids), (
                "what is trained on is not what was sampled"
            )
            yield rollout


def episode_rollout(
    rollout_id: int,
    advantages: Credit,
    loss_mask: bool | npt.NDArray[np.bool_],
    segments: Sequence[Segment],
    logprobs: Any,
) -> Rollout:
    """Returns a Rollout made of `segments`: those of an episode (each one token sequence of prompt,
    sampled and environment tokens), or the only one of a completion without an episode.

    The rollout's prompt is what the first segment has before its first sampled token. Its
    completion is the sampled tokens of all segments, for which `logprobs` has the engine's
    logprobs."""
    # If nothing was sampled, the whole segment is the prompt.
    num_prompt_tokens = int(np.append(segments[0].sampled, True).argmax())
    return Rollout(
        rollout_id=rollout_id,
        advantages=advantages,
        loss_mask=loss_mask,
        prompt_ids=segments[0].token_ids[:num_prompt_tokens],
        completion_ids=np.concatenate([segment.token_ids[segment.sampled] for segment in segments]),
        rollout_logprobs=logprobs,
        segments=tuple(segments),
    )


def penalise_rewards_by_kl(
    batch: RolloutBatch, decision: Decision, loss: LossConfig, advantage: AdvantageConfig
) -> Decision:
    """Collective. With `loss.kl_in: reward`, returns the decision with the advantages of penalised
    rewards, and writes these advantages into `batch`.

    The penalty of a rollout is kl_coef * (KL to the reference, summed over the completion). With
    the estimator "gae" nothing is changed here: the critic subtracts the penalty token by token."""
    if loss.kl_in != "reward" or advantage.estimator == "gae":
        return decision

    def penalise(kl_by_rank: list[list[tuple[int, float]]]) -> tuple[list[float], float]:
        """Returns (advantages by rollout id, mean of the penalties). Runs on rank 0."""
        step = decision.rank0_decision
        assert step is not None
        # Rollouts without a completion token are in no micro-batch: their KL is 0.
        kl = np.zeros_like(step.rewards)
        for i, value in chain.from_iterable(kl_by_rank):
            kl[i] = value
        penalties = loss.kl_coef * kl
        # Dynamic sampling may leave no group at all.
        num_groups = max(len(step.positions), 1)
        rewards = (step.rewards - penalties).reshape(num_groups, -1)
        mean = sum(penalties.data) / max(len(penalties), 1)
        return rollout_advantages(rewards, advantage).tolist(), mean

    local_kl = list(_sum_kl(batch, loss.kl_estimator).items())
    advantages, penalty_mean = on_rank0(penalise, local_kl)
    for micro_batch in batch.micro_batches:
        if micro_batch.rollout_ids:
            by_rollout = torch.tensor([advantages[i] for i in micro_batch.rollout_ids])
            index = micro_batch.sequence_index
            micro_batch.advantages = copy_to_device(by_rollout, index.device)[index]
    return revise_decision(decision, {"reward/kl_penalty_mean": penalty_mean}, advantages)


def _sum_kl(batch: RolloutBatch, estimator: str) -> dict[int, float]:
    """Returns the KL to the reference of each rollout of the batch, summed over its tokens in
    float64."""
    kl_by_id: dict[int, float] = {}
    for micro_batch in batch.micro_batches:
        assert micro_batch.old_logprobs is not None
        assert micro_batch.ref_logprobs is not None
        per_token = kl_estimate(
            micro_batch.old_logprobs, micro_batch.ref_logprobs, estimator
        ).double()
        # Of the C sums, the first ones are those of the row's rollouts; the rest is 0.
        sums = torch.zeros_like(per_token).index_add_(0, micro_batch.sequence_index, per_token)
        kl_by_id |= zip(micro_batch.rollout_ids, sums.tolist(), strict=False)
    return kl_by_id


class _SentRollout(msgspec.Struct, array_like=True):
    """A rollout as it is sent from the rank that sampled it to the rank that trains on it. Arrays
    are bytes."""

    rollout_id: int
    advantages: float | bytes
    """One number for all tokens, or the bytes of a float64 for each token."""
    in_loss: bool
    logprobs: bytes
    """float32, as in a MicroBatch."""
    contexts: list[tuple[bytes, bytes, bytes]]
    """Token ids (int32), mask of the sampled tokens (a bit per token) and routes of each context.
    The routes are empty if they were not recorded."""
    route_shape: tuple[int, int] = (0, 0)
    """(layers, k) of the routes."""


def encode_rollouts(rollouts: Iterable[Rollout]) -> bytes:
    """Returns rollouts as bytes, to send them from the rank that sampled them to the rank that
    trains on them.

    The loss mask of a rollout must be one bool for all its tokens."""
    sent = [
        _SentRollout(
            rollout.rollout_id,
            rollout.advantages.tobytes()
            if isinstance(rollout.advantages, np.ndarray)
            else rollout.advantages,
            bool(rollout.loss_mask),
            logprobs=np.asarray(rollout.rollout_logprobs, np.float32).tobytes(),
            contexts=[
                (
                    context.token_ids.tobytes(),
                    np.packbits(context.sampled).tobytes(),
                    b"" if context.routes is None else context.routes.tobytes(),
                )
                for context in rollout_contexts([rollout])
            ],
            route_shape=next(
                (s.routes.shape[1:] for s in rollout.segments if s.routes is not None), (0, 0)
            ),
        )
        for rollout in rollouts
    ]
    return msgspec.msgpack.encode(sent)


def decode_rollouts(payload: bytes) -> list[Rollout]:
    """Returns the rollouts from the bytes of `encode_rollouts`. Each rollout has its contexts as
    segments."""
    rollouts = []
    for sent in msgspec.msgpack.decode(payload, type=list[_SentRollout]):
        segments = []
        for id_bytes, mask_bytes, route_bytes in sent.contexts:
            ids = np.frombuffer(id_bytes, np.int32)
            bits = np.unpackbits(np.frombuffer(mask_bytes, np.uint8), count=len(ids))
            routes = read_routes(route_bytes, len(ids) - 1, sent.route_shape)
            segments.append(Segment(ids, bits.view(np.bool_), routes))
        values = sent.advantages
        advantages = np.frombuffer(values) if isinstance(values, bytes) else values
        logprobs = np.frombuffer(sent.logprobs, np.float32)
        rollouts.append(
            episode_rollout(sent.rollout_id, advantages, sent.in_loss, segments, logprobs)
        )
    return rollouts


def pack_rollouts(
    rollouts: Sequence[Rollout],
    device: torch.device,
    num_slices: int = 1,
    *,
    shares_prefixes: bool = False,
) -> MicroBatch:
    """Returns one row of rollouts, end to end without padding, as a micro-batch on `device`.

    With `shares_prefixes` it has a tree (PrefixTree), in which common prefixes of its sequences are
    read once, if there are any. A row without any completion token is replaced by a placeholder of
    two tokens that do not count in the loss, so that this rank makes as many passes as the others.
    If `num_slices` ranks share the row (sequence parallelism), one more sequence, in which nothing
    is predicted, makes the row's length divisible by their number.
    """
    ids_with_tokens = [rollout.rollout_id for rollout in rollouts if len(rollout.completion_ids)]
    # The backward pass needs at least one logprob to start from.
    if not ids_with_tokens:
        rollouts = [Rollout(-1, 0.0, False, [0], [0], [0.0])]
    num_completion = np.array([len(rollout.completion_ids) for rollout in rollouts])
    contexts = rollout_contexts(rollouts)
    num_padding = -sum(len(context.token_ids) for context in contexts) % num_slices
    if num_padding:
        padding = np.zeros(num_padding, np.int32)
        contexts = [*contexts, Segment(padding, padding.astype(np.bool_))]
    lengths = np.array([len(context.token_ids) for context in contexts])
    input_ids = _concat((context.token_ids for context in contexts), np.int64)
    is_sampled = _concat((context.sampled for context in contexts), np.bool_)
    # Positions start at 0 in each sequence of the row.
    position_ids = np.arange(len(input_ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
    completion_positions = np.flatnonzero(is_sampled)
    assert len(completion_positions) == num_completion.sum()
    assert position_ids[completion_positions].all(), (
        "the first token of a sequence has nothing to predict it"
    )

    slice_tokens = len(input_ids) // num_slices
    predicted_in = (completion_positions - 1) // slice_tokens

    def on_device(values: npt.NDArray[Any]) -> Tensor:
        """Returns an array as a tensor on the device."""
        return copy_to_device(torch.from_numpy(values), device)

    def per_token(values: Sequence[float | npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
        """Returns one value for each completion token of the row, on the device. `values` has, for
        each rollout, one number for all its tokens or an array with one for each."""
        columns = zip(num_completion, values, strict=True)
        return on_device(np.concatenate([np.full(n, value, dtype) for n, value in columns]))

    return MicroBatch(
        input_ids=on_device(input_ids),
        position_ids=on_device(position_ids),
        sequence_lengths=lengths.tolist(),
        sequence_starts=copy_to_device(sequence_starts(lengths.tolist()), device),
        # The hidden state at position t predicts token t + 1: the last prompt token predicts the
        # first of the completion.
        predict_index=on_device(completion_positions - 1),
        target_ids=on_device(input_ids[completion_positions]),
        rollout_logprobs=on_device(
            _concat((rollout.rollout_logprobs for rollout in rollouts), np.float32)
        ),
        advantages=per_token([rollout.advantages for rollout in rollouts], np.float32),
        loss_mask=per_token([rollout.loss_mask for rollout in rollouts], np.bool_),
        # Rollouts are counted without those that have no completion token, as in `rollout_ids`.
        sequence_index=on_device(np.repeat((num_completion > 0).cumsum() - 1, num_completion)),
        rollout_ids=ids_with_tokens,
        slice_predictions=np.bincount(predicted_in, minlength=num_slices).tolist(),
        routes=_pack_routes(contexts, device),
        tree=build_tree([context.token_ids for context in contexts], device)
        if shares_prefixes
        else None,
    )


def _pack_routes(contexts: Sequence[Segment], device: torch.device) -> RowRoutes | None:
    """Returns the routes of the tokens of a row, the experts that the engine's routers chose, which
    the policy's routers replay. Returns None if the engine recorded none."""
    recorded = [context.routes for context in contexts if context.routes is not None]
    if not recorded:
        return None
    # A token without recorded routes gets the first k experts: nothing that was sampled is
    # predicted from its hidden state, so that it does not matter which ones it gets.
    anywhere = np.broadcast_to(np.arange(recorded[0].shape[2]), (1, *recorded[0].shape[1:]))
    blocks = []
    is_recorded = []
    for context in contexts:
        routes = anywhere[:0] if context.routes is None else context.routes
        num_missing = len(context.token_ids) - len(routes)
        assert num_missing == 1 or not context.sampled.any(), "a sampled token has no routes"
        last = routes[-1:] if len(routes) else anywhere
        blocks += [routes, *[last] * num_missing]
        is_recorded += [True] * len(routes) + [False] * num_missing
    experts = torch.from_numpy(np.concatenate(blocks, dtype=recorded[0].dtype, casting="unsafe"))
    return RowRoutes(
        copy_to_device(experts, device), copy_to_device(torch.tensor(is_recorded), device)
    )


def _concat(
    columns: Iterable[list[float] | npt.NDArray[Any]], dtype: type[np.generic]
) -> npt.NDArray[Any]:
    """Returns the columns one after the other, with this dtype."""
    return np.concatenate([np.asarray(values, dtype) for values in columns])
