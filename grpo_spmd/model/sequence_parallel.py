"""Ulysses' sequence parallelism: the ranks of a group share each packed row.

Each of the N ranks runs the layers on a slice of T / N consecutive tokens. Attention needs all
tokens: an all-to-all turns [all heads, T / N tokens] into [heads / N, all tokens], each rank
attends with its heads, and a second all-to-all turns the result back (Jacobs et al. 2023,
"DeepSpeed Ulysses"). Then each rank computes the logprobs that are predicted in its slice, and all
ranks gather them, so that each computes the loss of the whole row.

Every rank's loss is the same number, but its gradient reaches only the logprobs of its own slice.
So the sum of the gradients over all ranks, which FSDP makes, counts each token once."""

from __future__ import annotations

import dataclasses
import math
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from grpo_spmd.distributed.collectives import exchange_blocks, gather_blocks
from grpo_spmd.model.attention import PackedLayout, packed_attention
from grpo_spmd.model.logprobs import Scores
from grpo_spmd.records import MicroBatch

SEQUENCE_ATTENTION = "grpo_spmd_sequence"


def slice_row(row: MicroBatch, group: dist.ProcessGroup) -> MicroBatch:
    """Returns the part of a row that this rank of the group runs through the layers.

    The result has the tokens of this rank's slice, and the predictions that are made there. All
    other fields are those of the whole row."""
    rank = dist.get_rank(group)
    num_tokens = len(row.input_ids) // dist.get_world_size(group)
    start = rank * num_tokens
    tokens = slice(start, start + num_tokens)
    # Predictions are in the order of the row.
    end = sum(row.slice_predictions[: rank + 1])
    predictions = slice(end - row.slice_predictions[rank], end)
    return dataclasses.replace(
        row,
        input_ids=row.input_ids[tokens],
        position_ids=row.position_ids[tokens],
        predict_index=row.predict_index[predictions] - start,
        target_ids=row.target_ids[predictions],
    )


def gather_scores(scores: Scores, slice_predictions: list[int], group: dist.ProcessGroup) -> Scores:
    """Collective over `group`. Returns the logprobs and entropies [C] of the whole row.

    `scores` has the logprobs and entropies of this rank's slice; `slice_predictions` has their
    number on each rank of the group. The backward pass takes the gradient of this rank's slice,
    without communication."""
    logprobs, entropy = _GatherScores.apply(*scores, slice_predictions, group)
    return logprobs, entropy


class _GatherScores(torch.autograd.Function):
    """All-gathers logprobs and entropies of the slices of a row; see `gather_scores`.

    The backward pass keeps the gradient of this rank's slice, and sends nothing."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor, counts: list[int], group: dist.ProcessGroup
    ) -> Scores:
        """`counts` has the number of predictions in the slice of each rank of the group."""
        rank = dist.get_rank(group)
        end = list(accumulate(counts))[rank]
        ctx.predictions = slice(end - counts[rank], end)
        # As in TokenLogprobs: the loss may not use the entropy, and zeros would cost a buffer.
        ctx.set_materialize_grads(False)
        block = logprobs.new_zeros(2, max(counts))
        block[:, : counts[rank]] = torch.stack([logprobs, entropy])
        blocks = gather_blocks(block, group)
        columns = [
            torch.cat([rows[:count] for rows, count in zip(column, counts, strict=True)])
            for column in blocks.unbind(1)
        ]
        return columns[0], columns[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*(None if grad is None else grad[ctx.predictions] for grad in grads), None, None)


class _ExchangeBlocks(torch.autograd.Function):
    """All-to-all with a gradient: sends block i of `blocks` [N, ...] to rank i of a group of N
    (`exchange_blocks`). The backward pass sends the gradients back in the same way."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return exchange_blocks(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchange_blocks(grad, ctx.group), None


# Not compiled, for the reasons of packed_attention.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def sequence_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_layout: PackedLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Collective over the layout's sequence group. Computes attention of the whole row, in the
    signature that transformers calls.

    `query` is [1, heads, T / N, head_dim], `key` and `value` are [1, kv heads, T / N, head_dim].
    Returns the output for this rank's tokens, [1, T / N, heads, head_dim], and None."""
    group = packed_layout.sequence_group
    assert group is not None
    num_ranks = dist.get_world_size(group)
    # If the ranks do not divide the KV heads, each is repeated until they do. Query heads stay with
    # their KV head, since consecutive ones share it.
    num_copies = math.lcm(key.shape[1], num_ranks) // key.shape[1]
    if num_copies > 1:
        key, value = (tensor.repeat_interleave(num_copies, dim=1) for tensor in (key, value))
    # [N, heads / N, T / N, head_dim] each; one exchange for the three of them.
    blocks = [tensor[0].unflatten(0, (num_ranks, -1)) for tensor in (query, key, value)]
    received = _ExchangeBlocks.apply(torch.cat(blocks, dim=1), group)
    # Block r has the tokens of rank r's slice: [1, heads / N, T, head_dim].
    whole = received.transpose(0, 1).flatten(1, 2)[None]
    query, key, value = whole.split([block.shape[1] for block in blocks], dim=1)
    output, _ = packed_attention(
        module, query, key, value, attention_mask, packed_layout=packed_layout, **options
    )
    # [1, T, heads / N, head_dim] -> [N, T / N, heads / N, head_dim], and back to all heads.
    received = _ExchangeBlocks.apply(output[0].unflatten(0, (num_ranks, -1)), group)
    return received.transpose(0, 1).flatten(1, 2)[None], None


AttentionInterface.register(SEQUENCE_ATTENTION, sequence_attention)
