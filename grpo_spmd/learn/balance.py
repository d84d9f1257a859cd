"""Rollouts -> mini-batches -> balanced ranks -> rows of micro-batches. Pure: lengths in, plans out."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

from grpo_spmd.model.dimensions import head_dim
from grpo_spmd.records import Plan

_LEVEL = 1e-3  # rows that run side by side are level enough when their costs differ by this share
_PARTNERS = 16  # rows with which the costliest one tries to exchange
Costs = Sequence[float] | None  # [B] of a forward and backward pass of each rollout, in any unit; None: its tokens


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
    num_tokens: Sequence[int], *, num_ranks: int, mini_batch_sizes: Sequence[int], max_tokens: int, costs: Costs = None
) -> Plan:
    """Who trains on which rollouts, and in which forward passes, the costliest rows first.

    Mini-batches are consecutive blocks of rollouts, so that each optimizer step sees the same rollouts at every world
    size. Within one, FSDP's collectives make all ranks wait for the slowest at each micro-batch: the rows that run side
    by side, one a rank, are made to cost the same, and with them the ranks' sums. All ranks have the same number of
    micro-batches, at least one (they would deadlock otherwise); where a rank has no more work its lists are empty.

    `num_tokens` [B] are of prompt and completion, in the order of rollout ids. `mini_batch_sizes`, in rollouts, add up
    to B. `max_tokens` is a row's budget; no rollout may be longer.
    """
    assert sum(mini_batch_sizes) == len(num_tokens), (mini_batch_sizes, len(num_tokens))
    assert max(num_tokens, default=0) <= max_tokens, (max(num_tokens), max_tokens)
    items: list[_Item] = list(zip(costs or num_tokens, num_tokens, range(len(num_tokens)), strict=True))
    plan: Plan = []
    for end, size in zip(accumulate(mini_batch_sizes), mini_batch_sizes, strict=True):
        costliest_first = sorted(items[end - size : end], key=_cost_of_item, reverse=True)  # of two alike the first
        rows = _deal(costliest_first, num_ranks, max_tokens)
        ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
        loads = [0.0] * num_ranks
        rows.sort(key=_cost, reverse=True)
        for first in range(0, len(rows), num_ranks):
            side_by_side = rows[first : first + num_ranks]
            _level(side_by_side, max_tokens)
            idlest_first = sorted(range(num_ranks), key=loads.__getitem__)
            for rank, row in zip(idlest_first, sorted(side_by_side, key=_cost, reverse=True), strict=True):
                ranks[rank].append([i for _, _, i in row.items])
                loads[rank] += row.cost
        plan.append(ranks)
    return plan


def split_groups(num_groups: int, num_mini_batches: int) -> list[int]:
    """Groups of each mini-batch, as even as can be: dynamic sampling may leave a step with fewer than it asked for."""
    return [num_groups // num_mini_batches + (i < num_groups % num_mini_batches) for i in range(num_mini_batches)]


_Item = tuple[float, int, int]  # of a rollout: cost, tokens, id


@dataclass(slots=True)
class _Row:
    target: float  # the cost that it should come to
    items: list[_Item] = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0
    offers: list[_Item] | None = None  # what it may give in an exchange, cheapest first; None: not sorted yet

    def replace(self, old: _Item, new: _Item) -> None:
        self.items = [item for item in (*self.items, new) if item not in (old, _NOTHING)]
        self.tokens += new[1] - old[1]
        self.cost += new[0] - old[0]
        self.offers = None


_NOTHING: _Item = (0.0, 0, -1)
_cost, _cost_of_item = attrgetter("cost"), itemgetter(0)


def _deal(costliest_first: Sequence[_Item], num_ranks: int, max_tokens: int) -> list[_Row]:
    """Rows for all ranks: each rollout goes to the row with the most left to its target, in O(n log n).

    There are as few rows as the tokens ask for, and `num_ranks` more whenever no more fits. Targets are the same for
    `num_ranks` rows at a time: the mean of what is left, or the costliest rollout that is left where that is more (or
    the rows beside such a rollout would wait for it half empty, and leave the more for later).
    """
    num_rows = max(1, -(-sum(tokens for _, tokens, _ in costliest_first) // (num_ranks * max_tokens)))  # of a rank
    left = sum(map(_cost_of_item, costliest_first)) / num_ranks
    rows: list[_Row] = []
    for number in range(num_rows):
        longest = costliest_first[number * num_ranks][0] if costliest_first else 0.0
        target = max(longest, left / (num_rows - number))
        rows += [_Row(target) for _ in range(num_ranks)]
        left = max(0.0, left - target)
    emptiest = [(-row.target, number) for number, row in enumerate(rows)]  # a heap, sorted by now
    for item in costliest_first:
        cost, tokens, _ = item
        if rows[emptiest[0][1]].tokens + tokens > max_tokens:
            for _ in range(num_ranks):
                heapq.heappush(emptiest, (-rows[0].target, len(rows)))
                rows.append(_Row(rows[0].target))
        number = emptiest[0][1]
        row = rows[number]
        row.items.append(item)
        row.tokens += tokens
        row.cost += cost
        # A row of short rollouts is out of tokens before it costs as much as one of long ones: the scarcer counts.
        heapq.heapreplace(emptiest, (max(row.cost, row.tokens / max_tokens * row.target) - row.target, number))
    return rows


def _level(rows: Sequence[_Row], max_tokens: int) -> None:
    """Exchange a rollout of the costliest row for a smaller one, or none, of a cheap row, while it helps."""
    order = sorted((row.cost, number) for number, row in enumerate(rows))
    while len(order) > 1 and order[-1][0] - order[0][0] > _LEVEL * order[-1][0]:
        high = rows[order[-1][1]]
        for place in range(min(_PARTNERS, len(order) - 1)):
            low = rows[order[place][1]]
            if pair := _best_exchange(high, low, max_tokens):
                high.replace(*pair)
                low.replace(*reversed(pair))
                for _, number in (order.pop(), order.pop(place)):  # two have moved: thousands need no new sort
                    insort(order, (rows[number].cost, number))
                break
        else:
            order.pop()  # the costliest has to stay as it is; go on with the others


def _best_exchange(high: _Row, low: _Row, max_tokens: int) -> tuple[_Item, _Item] | None:
    """What `high` gives and what it gets for it, perhaps nothing; None where none brings them closer by a tenth."""
    gap = high.cost - low.cost
    if low.offers is None:
        low.offers = sorted([_NOTHING, *low.items])
    offers, room_of_low, room_of_high = low.offers, max_tokens - low.tokens, max_tokens - high.tokens
    best, closest, half = None, 0.45 * gap, gap / 2
    for given in high.items:
        at = bisect_left(offers, (given[0] - half,))
        for taken in offers[at - 1 if at else 0 : at + 1]:
            off = abs(given[0] - taken[0] - half)
            if off < closest and -room_of_high <= given[1] - taken[1] <= room_of_low:
                best, closest = (given, taken), off
    return best


def plan_metrics(plan: Plan, num_tokens: Sequence[int], costs: Costs = None) -> dict[str, float]:
    """How even a plan is. `packing_efficiency_frac`: the share of their time that ranks work, not wait: the sum of
    costs over (ranks * the sum of the costliest row at each micro-batch). `rank_..._spread_frac`: (most - fewest of a
    rank) over the most, in the whole step. `micro_batches`: forward-backwards of a rank."""
    cost_of, ranks = (num_tokens if costs is None else costs).__getitem__, range(len(plan[0]))
    tokens_of = num_tokens.__getitem__
    row_costs = [[[sum(map(cost_of, row)) for row in rank] for rank in mini_batch] for mini_batch in plan]
    slowest = sum(max(side_by_side) for mini_batch in row_costs for side_by_side in zip(*mini_batch, strict=True))
    rank_costs = [sum(sum(mini_batch[rank]) for mini_batch in row_costs) for rank in ranks]
    rank_tokens = [sum(sum(map(tokens_of, row)) for mini_batch in plan for row in mini_batch[r]) for r in ranks]
    return {
        "packing_efficiency_frac": sum(rank_costs) / (len(rank_costs) * slowest) if slowest else 0.0,
        "rank_cost_spread_frac": (max(rank_costs) - min(rank_costs)) / max(*rank_costs, 1),
        "rank_token_spread_frac": (max(rank_tokens) - min(rank_tokens)) / max(*rank_tokens, 1),
        "micro_batches": sum(len(mini_batch[0]) for mini_batch in plan),
    }
