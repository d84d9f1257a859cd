"""Rollouts of one row as tensors, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.records import MicroBatch, Rollout


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> MicroBatch:
    """One row of rollouts as a micro-batch; without a completion token, two tokens that count nothing, to keep step."""
    with_tokens = [rollout.rollout_id for rollout in rollouts if len(rollout.completion_ids)]
    if not with_tokens:  # the backward pass needs at least one logprob to start from
        rollouts = [Rollout(-1, 0.0, False, [0], [0], [0.0])]
    num_completion = np.array([len(rollout.completion_ids) for rollout in rollouts])
    lengths, input_ids, is_sampled = _row(rollouts)
    position_ids = np.arange(len(input_ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
    completion_places = np.flatnonzero(is_sampled)
    assert len(completion_places) == num_completion.sum(), (len(completion_places), num_completion.sum())
    assert position_ids[completion_places].all(), "the first token of a sequence has nothing to predict it"

    def on_device(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    def per_token(values: Sequence[float | npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
        each = zip(num_completion, values, strict=True)  # a rollout has one value for all its tokens, or one a token
        return on_device(np.concatenate([np.full(length, value, dtype) for length, value in each]))

    return MicroBatch(
        input_ids=on_device(input_ids),
        position_ids=on_device(position_ids),
        sequence_lengths=lengths.tolist(),
        # The hidden state at place t predicts token t + 1: the last prompt token predicts the first of the completion.
        predict_index=on_device(completion_places - 1),
        target_ids=on_device(input_ids[completion_places]),
        rollout_logprobs=on_device(_join((rollout.rollout_logprobs for rollout in rollouts), np.float32)),
        advantages=per_token([rollout.advantages for rollout in rollouts], np.float32),
        loss_mask=per_token([rollout.loss_mask for rollout in rollouts], np.bool_),
        sequence_index=on_device(np.repeat((num_completion > 0).cumsum() - 1, num_completion)),
        rollout_ids=with_tokens,
    )


def _row(rollouts: Sequence[Rollout]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The sequences of a row: their lengths, their tokens, and which of these the policy sampled. A rollout is one
    sequence; of an episode each segment is."""
    lengths, ids, sampled = list[int](), list[list[int] | npt.NDArray[np.int32]](), list[npt.NDArray[np.bool_]]()
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


def _join(parts: Iterable[list[int] | list[float] | npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype) for part in parts])
