"""Scored groups -> this rank's share of the step's batch: rank 0 decides from a few numbers, then rollouts move."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig
from grpo_spmd.distributed.collectives import exchange_bytes, scatter_from_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.advantages import Credit, credited_tokens
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.sampled_step import SampledStep, advantages_of, cut, of_sampled, of_trained
from grpo_spmd.records import (
    Completion,
    Decision,
    MicroBatch,
    Prompt,
    Rollout,
    RolloutBatch,
    Segment,
    StepDecision,
)


def assemble_batch(sampled: SampledStep, session: Session) -> tuple[RolloutBatch, Decision]:
    """Collective. This rank's batch, and what rank 0 decided for all: every rollout goes to the rank that trains on it.
    Raises Rank0Error where no completion of the step has a usable reward."""
    decision = sampled.decide()
    estimator, discount = sampled.rules.advantage.estimator, sampled.rules.discount
    outgoing: list[list[Rollout]] = [[] for _ in range(session.world_size)]
    for number, group in enumerate(sampled.groups):
        slot, size = decision.slots.get(group.prompt.position), len(group.completions)
        if slot is None:
            continue
        rewards = sampled.scored.rewards[number * size : (number + 1) * size]
        advantages = [decision.advantages[i] for i in range(slot * size, (slot + 1) * size)]
        credited = credited_tokens(advantages, rewards, group.completions, discount, estimator)
        for i, (completion, credit) in enumerate(
            zip(group.completions, credited, strict=True), start=slot * size
        ):
            rollout = _rollout(i, credit, decision.in_loss[i], group.prompt, completion)
            outgoing[decision.trained_by[i]].append(rollout)
    incoming = exchange_bytes([encode_rollouts(rollouts) for rollouts in outgoing])
    mine = {
        rollout.rollout_id: rollout for payload in incoming for rollout in decode_rollouts(payload)
    }
    mini_batches = [
        [pack_rollouts([mine[i] for i in row], session.device) for row in rows]
        for rows in decision.rows
    ]
    return RolloutBatch(
        mini_batches, decision.num_loss_tokens, decision.num_loss_sequences
    ), decision


def _rollout(
    i: int, advantage: Credit, in_loss: bool, prompt: Prompt, completion: Completion
) -> Rollout:
    episode = completion.episode
    if episode is None or not episode.segments:  # one turn, or nothing: its environment failed
        return Rollout(
            i, advantage, in_loss, prompt.token_ids, completion.token_ids, completion.logprobs
        )
    rollout = rollout_of(i, advantage, in_loss, episode.segments, completion.logprobs)
    assert np.array_equal(rollout.completion_ids, completion.token_ids), (
        "what is trained on is not what was sampled"
    )
    return rollout


def penalise_rewards_by_kl(
    batch: RolloutBatch, decision: Decision, loss: LossConfig, advantage: AdvantageConfig
) -> Decision:
    """Collective. With `loss.kl_in: reward`, take kl_coef * (KL to the reference, summed over the completion) off each
    reward, and compute the advantages again, also those in `batch`, from logprobs there; with gae the critic does."""
    if loss.kl_in != "reward" or advantage.estimator == "gae":
        return decision
    kl_of: dict[int, float] = {}
    for micro_batch in batch.micro_batches:
        assert micro_batch.old_logprobs is not None
        assert micro_batch.ref_logprobs is not None
        per_token = kl_estimate(
            micro_batch.old_logprobs, micro_batch.ref_logprobs, loss.kl_estimator
        ).double()
        sums = (
            torch.zeros_like(per_token)
            .index_add_(0, micro_batch.sequence_index, per_token)
            .tolist()
        )
        kl_of |= {
            rollout_id: sums[place] for place, rollout_id in enumerate(micro_batch.rollout_ids)
        }
    trained = [i for rows in decision.rows for row in rows for i in row]
    # Those without a completion token are in no micro-batch.
    local_kl, of_all = (
        np.array([kl_of.get(i, 0.0) for i in trained], np.float64),
        decision.rank0_decision,
    )
    decided: list[StepDecision] = []  # on rank 0

    def decide(parts: list[bytes]) -> list[bytes]:
        assert of_all is not None
        (ids, num_trained), kl = of_trained(of_all), np.zeros_like(of_all.rewards)
        kl[ids] = np.frombuffer(b"".join(parts), np.float64)
        penalties = loss.kl_coef * kl
        penalised = (of_all.rewards - penalties).reshape(
            max(len(of_all.positions), 1), -1
        )  # there may be no group
        advantages = advantages_of(penalised, advantage)
        metrics = of_all.metrics | {
            "reward/kl_penalty_mean": sum(penalties.data) / max(len(penalties), 1)
        }
        decided.append(dataclasses.replace(of_all, advantages=advantages, metrics=metrics))
        of_ranks = cut(*of_sampled(of_all, advantages)), cut(advantages[ids], num_trained)
        return [sampled + trained for sampled, trained in zip(*of_ranks, strict=True)]

    values = np.frombuffer(scatter_from_rank0(decide, local_kl.tobytes()), np.float32).tolist()
    own = dict(zip(decision.advantages, values, strict=False))
    of_rows = dict(zip(trained, values[len(own) :], strict=True))
    for micro_batch in batch.micro_batches:
        if micro_batch.rollout_ids:
            advantages = torch.tensor(
                [of_rows[i] for i in micro_batch.rollout_ids], dtype=torch.float32
            )
            micro_batch.advantages = advantages.to(micro_batch.advantages.device)[
                micro_batch.sequence_index
            ]
    return dataclasses.replace(decision, advantages=own, rank0_decision=next(iter(decided), None))


# Rollouts as bytes, for the way from the rank that sampled them to the rank that trains on them.


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """A JSON header, then all token ids (int32; of an episode those of its segments) and all logprobs (float32 where
    each of them is one, else float64, so that they arrive unchanged), then the advantages (float64) and loss masks (a
    byte a token) of those rollouts that have not one value for all tokens, then which tokens of segments are sampled
    (a byte a token)."""
    masks = [_one_flag(r.loss_mask) for r in rollouts]
    advantages = [None if isinstance(r.advantages, np.ndarray) else r.advantages for r in rollouts]
    segments = [[len(segment.token_ids) for segment in r.segments] for r in rollouts]
    sizes = (
        (of or [len(r.prompt_ids), len(r.completion_ids)])
        for r, of in zip(rollouts, segments, strict=True)
    )
    columns = rollouts, advantages, masks, sizes, segments
    header = [
        [r.rollout_id, *rest, len(r.completion_ids), bool(of)]
        for r, *rest, of in zip(*columns, strict=True)
    ]
    ids = np.fromiter(chain.from_iterable(ids for r in rollouts for ids in _token_ids(r)), np.int32)
    logprobs = _narrowest(
        np.fromiter(chain.from_iterable(r.rollout_logprobs for r in rollouts), np.float64)
    )
    text = json.dumps([logprobs.dtype.name, header]).encode()
    arrays: list[npt.NDArray[Any]] = [ids, logprobs]
    arrays += [
        np.asarray(r.advantages, np.float64)
        for r, one in zip(rollouts, advantages, strict=True)
        if one is None
    ]
    arrays += [
        np.asarray(r.loss_mask, np.bool_)
        for r, one in zip(rollouts, masks, strict=True)
        if one is None
    ]
    arrays += [segment.sampled for rollout in rollouts for segment in rollout.segments]
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays)])


def decode_rollouts(payload: bytes) -> list[Rollout]:
    """What `encode_rollouts` made, with arrays that lie in `payload`."""
    end = 8 + int.from_bytes(payload[:8], "little")
    kind, header = json.loads(payload[8:end])

    def next_arrays(dtype: npt.DTypeLike, lengths: list[int]) -> Iterator[npt.NDArray[Any]]:
        nonlocal end
        values = np.frombuffer(payload, dtype, sum(lengths), end)
        end += values.nbytes
        return iter(
            [values[stop - n : stop] for n, stop in zip(lengths, accumulate(lengths), strict=True)]
        )

    ids = next_arrays(np.int32, [n for *_, sizes, _, _ in header for n in sizes])
    logprobs = next_arrays(kind, [n for *_, n, _ in header])
    advantages = next_arrays(np.float64, [n for _, one, _, _, n, _ in header if one is None])
    masks = next_arrays(np.bool_, [n for _, _, one, _, n, _ in header if one is None])
    sampled = next_arrays(
        np.bool_, [n for *_, sizes, _, is_episode in header if is_episode for n in sizes]
    )
    rollouts = []
    for rollout_id, advantage, in_loss, sizes, _, is_episode in header:
        per_token = (
            next(advantages) if advantage is None else advantage,
            next(masks) if in_loss is None else in_loss,
        )
        if is_episode:
            segments = tuple(Segment(next(ids), next(sampled)) for _ in sizes)
            rollouts.append(rollout_of(rollout_id, *per_token, segments, next(logprobs)))
        else:
            rollouts.append(Rollout(rollout_id, *per_token, next(ids), next(ids), next(logprobs)))
    return rollouts


def rollout_of(
    rollout_id: int,
    advantages: float | npt.NDArray[np.float64],
    loss_mask: bool | npt.NDArray[np.bool_],
    segments: tuple[Segment, ...],
    logprobs: Any,
) -> Rollout:
    """Of an episode: its prompt is what the first segment begins with, its completion what is sampled in all."""
    first = segments[0]
    prompt = first.token_ids[
        : int(first.sampled.argmax()) if first.sampled.any() else len(first.sampled)
    ]
    sampled = np.concatenate([segment.token_ids[segment.sampled] for segment in segments])
    return Rollout(rollout_id, advantages, loss_mask, prompt, sampled, logprobs, segments)


def _token_ids(rollout: Rollout) -> Iterable[Iterable[int]]:
    if rollout.segments:
        return [segment.token_ids for segment in rollout.segments]
    return rollout.prompt_ids, rollout.completion_ids


def _one_flag(mask: bool | npt.NDArray[np.bool_]) -> bool | None:
    """The value that a mask has for all tokens; None where it has both."""
    if isinstance(mask, bool):
        return mask
    return True if mask.all() else None if mask.any() else False


def _narrowest(values: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """As float32 where that loses no bit: an engine's values are float32 in Python's floats. NaN, which equals nothing
    and may have bits beyond float32's, stays."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values


# Rollouts of one row as tensors, without padding.


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> MicroBatch:
    """One row of rollouts as a micro-batch; without a completion token, two tokens that count nothing, to keep step."""
    with_tokens = [rollout.rollout_id for rollout in rollouts if len(rollout.completion_ids)]
    if not with_tokens:  # the backward pass needs at least one logprob to start from
        rollouts = [Rollout(-1, 0.0, False, [0], [0], [0.0])]
    num_completion = np.array([len(rollout.completion_ids) for rollout in rollouts])
    lengths, input_ids, is_sampled = _row(rollouts)
    position_ids = np.arange(len(input_ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
    completion_places = np.flatnonzero(is_sampled)
    assert len(completion_places) == num_completion.sum(), (
        len(completion_places),
        num_completion.sum(),
    )
    assert position_ids[completion_places].all(), (
        "the first token of a sequence has nothing to predict it"
    )

    def on_device(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    def per_token(values: Sequence[float | npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
        each = zip(
            num_completion, values, strict=True
        )  # a rollout has one value for all its tokens, or one a token
        return on_device(np.concatenate([np.full(length, value, dtype) for length, value in each]))

    return MicroBatch(
        input_ids=on_device(input_ids),
        position_ids=on_device(position_ids),
        sequence_lengths=lengths.tolist(),
        # The hidden state at place t predicts token t + 1: the last prompt token predicts the first of the completion.
        predict_index=on_device(completion_places - 1),
        target_ids=on_device(input_ids[completion_places]),
        rollout_logprobs=on_device(
            _join((rollout.rollout_logprobs for rollout in rollouts), np.float32)
        ),
        advantages=per_token([rollout.advantages for rollout in rollouts], np.float32),
        loss_mask=per_token([rollout.loss_mask for rollout in rollouts], np.bool_),
        sequence_index=on_device(np.repeat((num_completion > 0).cumsum() - 1, num_completion)),
        rollout_ids=with_tokens,
    )


def _row(
    rollouts: Sequence[Rollout],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The sequences of a row: their lengths, their tokens, and which of these the policy sampled. A rollout is one
    sequence; of an episode each segment is."""
    lengths, ids, sampled = (
        list[int](),
        list[list[int] | npt.NDArray[np.int32]](),
        list[npt.NDArray[np.bool_]](),
    )
    for rollout in rollouts:
        if rollout.segments:
            lengths += [len(segment.token_ids) for segment in rollout.segments]
            ids += [segment.token_ids for segment in rollout.segments]
            sampled += [segment.sampled for segment in rollout.segments]
        else:
            prompt, completion = rollout.prompt_ids, rollout.completion_ids
            lengths.append(len(prompt) + len(completion))
            ids += [prompt, completion]
            sampled += [np.zeros(len(prompt), np.bool_), np.ones(len(completion), np.bool_)]
    return np.array(lengths), _join(ids, np.int64), np.concatenate(sampled)


def _join(
    parts: Iterable[list[int] | list[float] | npt.NDArray[Any]], dtype: type[np.generic]
) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype) for part in parts])
