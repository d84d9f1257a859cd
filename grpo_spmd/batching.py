"""Rollouts -> mini-batches -> balanced ranks -> packed micro-batches. Pure: lengths and lists in, plans and tensors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_spmd.data_types import MicroBatch, Rollout

# plan[mini_batch][rank][micro_batch] = rollout ids. Plain lists, since rank 0 sends the plan to all ranks as JSON.
Plan = list[list[list[list[int]]]]


def plan_batch(num_tokens: Sequence[int], *, num_ranks: int, mini_batch_sizes: Sequence[int], max_tokens: int) -> Plan:
    """Who trains on which rollouts, and in which forward passes.

    Mini-batches are consecutive blocks of rollouts, whatever the number of ranks, so that each optimizer step sees the same
    rollouts at every world size. Within one, the longest rollouts are dealt first, each to the rank with the fewest tokens so far;
    a rank's rollouts are packed longest first into rows of at most `max_tokens`.

    Args:
        num_tokens: [B], prompt plus completion, in the order of rollout ids.
        num_ranks: ranks that train.
        mini_batch_sizes: rollouts of each mini-batch, which add up to B.
        max_tokens: a row's budget; no rollout may be longer.

    Returns:
        plan[mini_batch][rank][micro_batch] = rollout ids. In a mini-batch all ranks have the same number of micro-batches, at least
        one (FSDP's collectives would deadlock otherwise); where a rank has no more work its lists are empty.
    """
    assert sum(mini_batch_sizes) == len(num_tokens), (mini_batch_sizes, len(num_tokens))
    assert max(num_tokens, default=0) <= max_tokens, (max(num_tokens), max_tokens)
    plan: Plan = []
    start = 0
    for size in mini_batch_sizes:
        longest_first = sorted(range(start, start + size), key=lambda i: (-num_tokens[i], i))
        start += size
        ranks: list[list[int]] = [[] for _ in range(num_ranks)]
        loads = [0] * num_ranks
        for i in longest_first:
            rank = min(range(num_ranks), key=lambda r: (loads[r], r))
            ranks[rank].append(i)
            loads[rank] += num_tokens[i]
        packed = [_first_fit(ids, num_tokens, max_tokens) for ids in ranks]
        rows = max(1, max(len(rank) for rank in packed))
        plan.append([rank + [[] for _ in range(rows - len(rank))] for rank in packed])
    return plan


def split_groups(num_groups: int, num_mini_batches: int) -> list[int]:
    """Groups of each mini-batch, as even as can be: dynamic sampling may leave a step with fewer groups than it asked for."""
    return [num_groups // num_mini_batches + (i < num_groups % num_mini_batches) for i in range(num_mini_batches)]


def _first_fit(ids: Sequence[int], num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room: list[int] = []
    for i in ids:
        row = next((r for r, free in enumerate(room) if free >= num_tokens[i]), None)
        if row is None:
            rows.append([])
            room.append(max_tokens)
            row = len(rows) - 1
        rows[row].append(i)
        room[row] -= num_tokens[i]
    return rows


def plan_metrics(plan: Plan, num_tokens: Sequence[int]) -> dict[str, float]:
    """`packing_efficiency_frac`: tokens over (rows * tokens of the fullest row), since all ranks wait for the fullest row.
    `rank_token_spread_frac`: (most - fewest tokens of a rank) over the most, over the whole step."""
    row_tokens = [[[sum(num_tokens[i] for i in row) for row in rank] for rank in mini_batch] for mini_batch in plan]
    flat = [tokens for mini_batch in row_tokens for rank in mini_batch for tokens in rank]
    per_rank = [sum(sum(mini_batch[rank]) for mini_batch in row_tokens) for rank in range(len(plan[0]))]
    return {
        "packing_efficiency_frac": sum(flat) / max(len(flat) * max(flat), 1),
        "rank_token_spread_frac": (max(per_rank) - min(per_rank)) / max(*per_rank, 1),
    }


def pack_rollouts(rollouts: Sequence[Rollout], device: torch.device) -> MicroBatch:
    """One row of rollouts as a micro-batch; without any, a two-token row that counts nothing (a rank that only keeps step)."""
    input_ids: list[int] = []
    position_ids: list[int] = []
    lengths: list[int] = []
    predict_index: list[int] = []
    target_ids: list[int] = []
    rollout_logprobs: list[float] = []
    advantages: list[float] = []
    loss_mask: list[bool] = []
    sequence_index: list[int] = []
    with_tokens = [rollout.rollout_id for rollout in rollouts if rollout.completion_ids]
    place = {rollout_id: index for index, rollout_id in enumerate(with_tokens)}
    for rollout in rollouts:
        start, num_prompt, num_completion = len(input_ids), len(rollout.prompt_ids), len(rollout.completion_ids)
        input_ids += rollout.prompt_ids + rollout.completion_ids
        position_ids += range(rollout.num_tokens)
        lengths.append(rollout.num_tokens)
        # The hidden state at place t predicts token t + 1, so the first completion token is predicted by the last prompt token.
        predict_index += range(start + num_prompt - 1, start + num_prompt + num_completion - 1)
        target_ids += rollout.completion_ids
        rollout_logprobs += rollout.rollout_logprobs
        advantages += [rollout.advantage] * num_completion
        loss_mask += [rollout.counts] * num_completion
        sequence_index += [place.get(rollout.rollout_id, 0)] * num_completion
    if not input_ids:
        input_ids, position_ids, lengths = [0, 0], [0, 1], [2]
    if not target_ids:  # also where every completion is empty: the backward pass needs at least one logprob to start from
        predict_index, target_ids = [0], [input_ids[1] if len(input_ids) > 1 else 0]
        rollout_logprobs, advantages, loss_mask, sequence_index = [0.0], [0.0], [False], [0]
    return MicroBatch(
        input_ids=torch.tensor(input_ids, device=device),
        position_ids=torch.tensor(position_ids, device=device),
        sequence_lengths=lengths,
        predict_index=torch.tensor(predict_index, device=device),
        target_ids=torch.tensor(target_ids, device=device),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool, device=device),
        sequence_index=torch.tensor(sequence_index, dtype=torch.int64, device=device),
        rollout_ids=with_tokens,
    )
