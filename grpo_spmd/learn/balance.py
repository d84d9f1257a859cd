"""Rollouts -> mini-batches -> balanced ranks -> rows of micro-batches. Pure: lengths in, plans out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.learn.rows import fill_rows
from grpo_spmd.model.dimensions import head_dim
from grpo_spmd.records import Plan

Numbers = Sequence[float] | npt.NDArray[Any]


def attention_cost_ratio(num_parameters: int, model_config: Any) -> float:
    """b / a of the cost a*L + b*L^2 of a rollout of L tokens, by the FLOPs of a dense decoder; 0 (the cost is the
    tokens) where transformers' `model_config` does not say its sizes.

    a = 6 * parameters (the matrices); b = 12 * layers * heads * head_dim / 2 (attention; half, since it is causal).
    Layers with a sliding window count in neither. For 1,000 tokens of Qwen2.5-1.5B attention adds 3 %."""
    text = model_config.get_text_config()
    heads, layers = getattr(text, "num_attention_heads", 0), getattr(text, "num_hidden_layers", 0)
    if types := getattr(text, "layer_types", None):
        layers = types.count("full_attention")
    return float(layers * heads * head_dim(text) / num_parameters)


def plan_batch(
    num_tokens: Numbers,
    *,
    num_ranks: int,
    mini_batch_sizes: Sequence[int],
    max_tokens: int,
    costs: Numbers | None = None,
) -> Plan:
    """Who trains on which rollouts, and in which forward passes, the costliest rows first.

    Mini-batches are consecutive blocks of rollouts, so that each optimizer step sees the same rollouts at every world
    size. Within one, FSDP's collectives make all ranks wait for the slowest at each micro-batch: the rows that run side
    by side, one a rank, are made to cost the same, and with them the ranks' sums. All ranks have the same number of
    micro-batches, at least one (they would deadlock otherwise); where a rank has no more work its lists are empty.

    `num_tokens` [B] are of prompt and completion, in the order of rollout ids. `mini_batch_sizes`, in rollouts, add up
    to B. `max_tokens` is a row's budget; no rollout may be longer. `costs` [B] are of a forward and backward pass of
    each rollout, in any unit; None: its tokens.
    """
    all_tokens, all_costs = np.asarray(num_tokens, np.int64), np.asarray(num_tokens if costs is None else costs, float)
    assert sum(mini_batch_sizes) == len(all_tokens) == len(all_costs), (
        mini_batch_sizes,
        len(all_tokens),
        len(all_costs),
    )
    assert all_tokens.max(initial=0) <= max_tokens, (int(all_tokens.max()), max_tokens)
    ids, lengths = np.empty(len(all_tokens), np.int32), []
    for end, size in zip(accumulate(mini_batch_sizes), mini_batch_sizes, strict=True):
        block = slice(end - size, end)
        places, of_rows = fill_rows(all_costs[block], all_tokens[block], num_ranks, max_tokens)
        ids[block] = places + (end - size)
        lengths.append(of_rows)
    return Plan(ids, lengths)


def split_groups(num_groups: int, num_mini_batches: int) -> list[int]:
    """Groups of each mini-batch, as even as can be: dynamic sampling may leave a step with fewer than it asked for."""
    return [num_groups // num_mini_batches + (i < num_groups % num_mini_batches) for i in range(num_mini_batches)]


def plan_metrics(plan: Plan, num_tokens: Numbers, costs: Numbers | None = None) -> dict[str, float]:
    """How even a plan is. `packing_efficiency_frac`: the share of their time that ranks work, not wait: the sum of
    costs over (ranks * the sum of the costliest row at each micro-batch). `rank_..._spread_frac`: (most - fewest of a
    rank) over the most, in the whole step. `micro_batches`: forward-backwards of a rank."""
    ranks, slowest = len(plan.lengths[0]), list[float]()
    rank_costs, rank_tokens = np.zeros(ranks), np.zeros(ranks)
    for ids, lengths in plan.blocks():
        row_of = np.repeat(np.arange(lengths.size), lengths.ravel())
        # One behind the other, as a plain sum adds them: numpy's own sums add pairs.
        row_costs, row_tokens = (
            np.bincount(row_of, np.asarray(of, float)[ids], lengths.size).reshape(lengths.shape)
            for of in (num_tokens if costs is None else costs, num_tokens)
        )
        slowest += row_costs.max(axis=0).tolist()
        rank_costs += row_costs.cumsum(axis=1)[:, -1]
        rank_tokens += row_tokens.sum(axis=1)
    total, longest = sum(rank_costs.tolist()), sum(slowest)
    return {
        "packing_efficiency_frac": total / (ranks * longest) if longest else 0.0,
        "rank_cost_spread_frac": float(np.ptp(rank_costs) / max(rank_costs.max(), 1)),
        "rank_token_spread_frac": float(np.ptp(rank_tokens) / max(rank_tokens.max(), 1)),
        "micro_batches": sum(lengths.shape[1] for lengths in plan.lengths),
    }
