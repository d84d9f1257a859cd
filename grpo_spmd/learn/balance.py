"""Rollouts -> mini-batches -> balanced ranks -> rows of micro-batches. Pure: lengths in, plans out."""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_spmd.model.config_json import head_dim
from grpo_spmd.records import BatchPlan

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
) -> BatchPlan:
    """Who trains on which rollouts, and in which forward passes, the costliest rows first.

    Mini-batches are consecutive blocks of rollouts, so that each optimizer step sees the same rollouts at every world
    size. Within one, FSDP's collectives make all ranks wait for the slowest at each micro-batch: the rows that run side
    by side, one a rank, are made to cost the same, and with them the ranks' sums. All ranks have the same number of
    micro-batches, at least one (they would deadlock otherwise); where a rank has no more work its lists are empty.

    `num_tokens` [B] are of prompt and completion, in the order of rollout ids. `mini_batch_sizes`, in rollouts, add up
    to B. `max_tokens` is a row's budget; no rollout may be longer. `costs` [B] are of a forward and backward pass of
    each rollout, in any unit; None: its tokens.
    """
    all_tokens, all_costs = (
        np.asarray(num_tokens, np.int64),
        np.asarray(num_tokens if costs is None else costs, float),
    )
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
    return BatchPlan(ids, lengths)


def split_groups(num_groups: int, num_mini_batches: int) -> list[int]:
    """Groups of each mini-batch, as even as can be: dynamic sampling may leave a step with fewer than it asked for."""
    return [
        num_groups // num_mini_batches + (i < num_groups % num_mini_batches)
        for i in range(num_mini_batches)
    ]


def plan_metrics(
    plan: BatchPlan, num_tokens: Numbers, costs: Numbers | None = None
) -> dict[str, float]:
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


# The rows of a mini-batch: rollouts dealt to them, those side by side made level, each given to a rank. Pure.


_LEVEL = 1e-3  # rows that run side by side are level enough when their costs differ by this share
_PARTNERS = 16  # rows with which the costliest one tries to exchange
_NOTHING = 0  # the item that stands for no rollout
Ids = npt.NDArray[np.int32]


def fill_rows(
    costs: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64], num_ranks: int, max_tokens: int
) -> tuple[Ids, Ids]:
    """Of rollouts with these costs and tokens: their places in `costs`, row behind row and the first rank's rows first,
    and the lengths [ranks, rows of a rank] of the rows.

    A rollout is an item here: its place when the cheapest come first, counted from 1. An item is an object of Python's
    only while its row is levelled: else they would take hundreds of bytes a rollout, and as many looks of the garbage
    collector."""
    cheapest_first = np.lexsort((tokens, costs)).astype(np.int32)  # of two alike the first
    item_of = np.empty(len(costs), np.int32)
    item_of[cheapest_first] = np.arange(1, len(costs) + 1)
    costliest_first = np.argsort(-costs, kind="stable").astype(np.int32)  # the same
    row_of, row_costs, row_tokens = _deal(
        costs[costliest_first], tokens[costliest_first], num_ranks, max_tokens
    )
    dealt = item_of[costliest_first][np.argsort(row_of, kind="stable")]
    items = np.split(dealt, np.cumsum(np.bincount(row_of, minlength=len(row_costs)))[:-1])
    facts = _Facts(
        _array(np.append(0.0, costs[cheapest_first])),
        _array(np.append(0, tokens[cheapest_first])),
        max_tokens,
    )
    ranks: list[list[memoryview | array[int]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    by_cost = sorted(range(len(items)), key=row_costs.__getitem__, reverse=True)
    for first in range(0, len(items), num_ranks):
        rows = [
            _Row(row_costs[n], row_tokens[n], items[n]) for n in by_cost[first : first + num_ranks]
        ]
        _level(rows, facts)
        idlest_first = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, row in zip(
            idlest_first, sorted(rows, key=attrgetter("cost"), reverse=True), strict=True
        ):
            ranks[rank].append(row.dealt.data if row.items is None else array("i", row.items))
            loads[rank] += row.cost
    in_order = np.frombuffer(b"".join(chain.from_iterable(ranks)), np.int32)
    return cheapest_first[in_order - 1], np.array(
        [[len(row) for row in rank] for rank in ranks], np.int32
    )


def _deal(
    costs: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64], num_ranks: int, max_tokens: int
) -> tuple[Ids, list[float], list[int]]:
    """Rows for all ranks: each rollout, in this order, goes to the row with the most left to its target, in O(n log n).
    Of each rollout its row; of each row its cost and tokens.

    There are as few rows as the tokens ask for, and `num_ranks` more whenever no more fits. Targets are the same for
    `num_ranks` rows at a time: the mean of what is left, or the costliest rollout that is left where that is more (or
    the rows beside such a rollout would wait for it half empty, and leave the more for later).
    """
    num_rows = max(1, -(-int(tokens.sum()) // (num_ranks * max_tokens)))  # of a rank
    left, targets = sum(_array(costs)) / num_ranks, list[float]()
    for number in range(num_rows):
        longest = float(costs[number * num_ranks]) if len(costs) else 0.0
        target = max(longest, left / (num_rows - number))
        targets += [target] * num_ranks
        left = max(0.0, left - target)
    emptiest = [(-target, number) for number, target in enumerate(targets)]  # a heap, sorted by now
    row_of, row_costs, row_tokens = array("i"), [0.0] * len(targets), [0] * len(targets)
    for cost, num_tokens in zip(_array(costs), _array(tokens), strict=True):
        number = emptiest[0][1]
        if row_tokens[number] + num_tokens > max_tokens:
            for number in range(len(targets), len(targets) + num_ranks):
                heapq.heappush(emptiest, (-targets[0], number))
            targets += [targets[0]] * num_ranks
            row_costs += [0.0] * num_ranks
            row_tokens += [0] * num_ranks
            number = emptiest[0][1]
        row_of.append(number)
        row_tokens[number] = filled = row_tokens[number] + num_tokens
        row_costs[number] = taken = row_costs[number] + cost
        # A row of short rollouts is out of tokens before it costs as much as one of long ones: the scarcer counts.
        target = targets[number]
        scarcer = filled / max_tokens * target
        heapq.heapreplace(emptiest, ((scarcer if scarcer > taken else taken) - target, number))
    return np.array(row_of, np.int32), row_costs, row_tokens


@dataclass(frozen=True)
class _Facts:
    cost_of: Sequence[float]  # by item
    tokens_of: Sequence[int]
    max_tokens: int


class _Row:
    """Whose cost and tokens change where it takes part in an exchange."""

    __slots__ = "cost", "dealt", "items", "offer_costs", "offers", "tokens"

    def __init__(self, cost: float, tokens: int, dealt: Ids) -> None:
        self.cost, self.tokens, self.dealt = cost, tokens, dealt
        self.items: list[int] | None = None  # None: as they were dealt
        self.offers: list[
            int
        ] = []  # what it may give, nothing and the cheapest first; empty: not asked yet
        self.offer_costs: list[float] = []  # and infinity

    def given(self) -> list[int]:
        if self.items is None:
            self.items = self.dealt.tolist()
        return self.items

    def taken(self, cost_of: Sequence[float]) -> tuple[list[int], list[float]]:
        if not self.offers:
            self.offers = sorted([_NOTHING, *self.given()])
            self.offer_costs = [*map(cost_of.__getitem__, self.offers), math.inf]
        return self.offers, self.offer_costs

    def replace(self, old: int, new: int, facts: _Facts) -> None:
        items, cost_of, tokens_of = self.given(), facts.cost_of, facts.tokens_of
        if old != _NOTHING:
            items.remove(old)
        if new != _NOTHING:
            items.append(new)
        self.offers = []
        self.tokens += tokens_of[new] - tokens_of[old]
        self.cost += cost_of[new] - cost_of[old]


def _level(rows: Sequence[_Row], facts: _Facts) -> None:
    """Exchange a rollout of the costliest row for a smaller one, or none, of a cheap row, while it helps."""
    order = sorted((row.cost, number) for number, row in enumerate(rows))
    while len(order) > 1 and order[-1][0] - order[0][0] > _LEVEL * order[-1][0]:
        high = rows[order[-1][1]]
        for place in range(min(_PARTNERS, len(order) - 1)):
            low = rows[order[place][1]]
            if pair := _best_exchange(high, low, facts):
                given, taken = pair
                high.replace(given, taken, facts)
                low.replace(taken, given, facts)
                for _, number in (
                    order.pop(),
                    order.pop(place),
                ):  # two have moved: thousands need no new sort
                    insort(order, (rows[number].cost, number))
                break
        else:
            order.pop()  # the costliest has to stay as it is; go on with the others


def _best_exchange(high: _Row, low: _Row, facts: _Facts) -> tuple[int, int] | None:
    """What `high` gives and what it gets for it, perhaps nothing; None where none brings them closer by a tenth."""
    cost_of, tokens_of, gap = facts.cost_of, facts.tokens_of, high.cost - low.cost
    offers, offer_costs = low.taken(cost_of)
    room_of_low, room_of_high = facts.max_tokens - low.tokens, facts.max_tokens - high.tokens
    best, closest, half = None, 0.45 * gap, gap / 2
    for given in high.given():
        cost = cost_of[given]
        at = bisect_left(offer_costs, cost - half)
        for place in (at - 1, at):  # before the first and behind the last stands infinity
            off = abs(cost - offer_costs[place] - half)
            if (
                off < closest
                and -room_of_high <= tokens_of[given] - tokens_of[offers[place]] <= room_of_low
            ):
                best, closest = (given, offers[place]), off
    return best


def _array(values: npt.NDArray[Any]) -> array[Any]:
    """To go through one by one as Python's numbers, without a list of them."""
    return array("d" if values.dtype == np.float64 else "q", values.tobytes())
