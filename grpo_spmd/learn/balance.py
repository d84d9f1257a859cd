"""Divides the rollouts of a step into mini-batches, ranks and rows of equal cost.

A row is the rollouts of one micro-batch. All functions are pure: they take token counts and costs,
and return a BatchPlan. A mini-batch is planned in three steps: `_deal` deals its rollouts to rows,
`_level` exchanges rollouts between the rows that the ranks will run at the same time, and
`fill_rows` decides which rank gets which of them. Rollouts that share a prefix may be dealt
together, as a bundle, whose prefix the policy then reads once (prefix_tree.py).
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from grpo_spmd.model.config_json import head_dim
from grpo_spmd.records import BatchPlan

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]
Numbers = Sequence[float] | Array
# Rows that run at the same time are level enough if their costs differ by at most this fraction.
_MAX_SPREAD = 1e-3
# The number of cheapest rows with which the costliest row tries to exchange a rollout.
_MAX_PARTNERS = 16
# A shorter prefix of a group is not counted as shared. Where prompts begin alike, as after a chat
# template, prefix_tree.py leaves up to 7 tokens of the rest of a prompt unshared.
_MIN_PREFIX_TOKENS = 16
# Attention needs a copy of the keys of a shared prefix for each branch, so that a row of few tokens
# could have any number of keys. In a row's token budget, this many keys beyond the row's tokens
# count as one token. The reason is memory. A key takes, in one layer at a time, its key, value,
# their gradients and float32 sums: 33 kB in an 8B model with 8 KV heads for 32 heads, 64 kB in a 7B
# model with as many KV heads as heads. A token takes 390 kB even with recomputation: the inputs of
# all layers, and the activations of one. Without recomputation SDPA keeps keys and values, at most
# two hidden states a layer, where a token has 16 and more. So a row that shares prefixes takes no
# more memory than a full row that does not. What the tree leaves unshared is less than these keys
# count.
_KEYS_PER_TOKEN = 6
# A plan that shares prefixes must be counted cheaper by this factor.
_SHARING_OVERHEAD = 1.05
# Stands for "no rollout" in an exchange: items count from 1.
_NO_ITEM = 0


def attention_cost_ratio(num_parameters: int, model_config: Any) -> float:
    """Returns b / a for the cost a*L + b*L^2 of a rollout of L tokens, from the FLOPs of a dense
    decoder.

    a = 6 * parameters (the matrices); b = 12 * layers * heads * head_dim / 2 (attention; half,
    since it is causal). Only layers with full attention count in b. At 1,000 tokens of Qwen2.5-1.5B
    attention adds 3 %. `model_config` is transformers' config of the model. If it does not state
    the sizes, the result is 0, which makes the cost the number of tokens.
    """
    text = model_config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", 0)
    num_layers = getattr(text, "num_hidden_layers", 0)
    layer_types = getattr(text, "layer_types", None)
    if layer_types:
        num_layers = layer_types.count("full_attention")
    return float(num_layers * num_heads * head_dim(text) / num_parameters)


def plan_batch(
    num_tokens: Numbers,
    *,
    num_ranks: int,
    mini_batch_sizes: Sequence[int],
    max_tokens: int,
    costs: Numbers | None = None,
) -> BatchPlan:
    """Returns which rank trains on which rollouts, and in which forward passes, the costliest rows
    first.

    Mini-batches are consecutive blocks of rollouts, so that each optimizer step sees the same
    rollouts at every world size. Within a mini-batch, FSDP's collectives make all ranks wait for
    the slowest at each micro-batch, so the rows that run at the same time, one per rank, are made
    to cost the same. All ranks have the same number of micro-batches, at least one (they would
    deadlock otherwise); if a rank has no more work, its lists are empty.

    `num_tokens` [B] counts prompt and completion, in the order of rollout ids. `mini_batch_sizes`,
    in rollouts, add up to B. No row, and so no rollout, may have more than `max_tokens` tokens.
    `costs` [B] are those of a forward and backward pass, in any unit. None: the number of tokens.
    """
    all_tokens = np.asarray(num_tokens, np.int64)
    all_costs = np.asarray(num_tokens if costs is None else costs, float)
    assert sum(mini_batch_sizes) == len(all_tokens) == len(all_costs)
    assert all_tokens.max(initial=0) <= max_tokens, (int(all_tokens.max()), max_tokens)
    ids = np.empty(len(all_tokens), np.int32)
    lengths = []
    for end, size in zip(accumulate(mini_batch_sizes), mini_batch_sizes, strict=True):
        block = slice(end - size, end)
        order, row_lengths = fill_rows(all_costs[block], all_tokens[block], num_ranks, max_tokens)
        ids[block] = order + (end - size)
        lengths.append(row_lengths)
    return BatchPlan(ids, lengths)


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step's rollouts, in the order of rollout ids, and of its groups."""

    tokens: Ints
    """[B] Prompt and completion."""
    tree_tokens: Ints
    """[B] The same, but a prefix that several contexts of an episode share counts once."""
    prefix_tokens: Ints
    """[P] For each group, the length of the prefix that all contexts of the group share."""


class StepPlan(NamedTuple):
    """A plan of a step, and its metrics."""

    plan: BatchPlan
    shares_prefixes: bool
    """True if rows read a prefix that their rollouts share only once."""
    metrics: dict[str, float]
    """The results of `plan_metrics`."""


class _Bundles(NamedTuple):
    """Bundles: runs of consecutive rollouts of a group that go to the same row, so that a prefix
    that they share is read once. All arrays are by bundle."""

    starts: Ints
    """The first rollout of each bundle."""
    tokens: Ints
    """The tokens that the policy reads, a shared prefix once."""
    budget_tokens: Ints
    """What the bundle takes of a row's `max_tokens`: its tokens, and a part of its further keys
    (_KEYS_PER_TOKEN)."""
    costs: Floats


def plan_step(
    step: StepTokens,
    share_prefixes: bool | Literal["auto"],
    cost_ratio: float,
    *,
    num_ranks: int,
    mini_batch_sizes: Sequence[int],
    max_tokens: int,
) -> StepPlan:
    """Returns the cheapest of several plans of a step.

    If `share_prefixes` is False, or nothing is shared, the only plan is the one without sharing.
    True: only plans that share prefixes are compared; "auto": both kinds. `cost_ratio` is that of
    `attention_cost_ratio`.

    A plan that shares prefixes deals bundles to the rows in place of rollouts: consecutive rollouts
    of a group, with their prefix once. Large bundles have fewer tokens in all, small ones are
    easier to balance, so whole groups, halves, quarters and so on are tried."""
    num_rollouts = len(step.tokens)
    # Without sharing each rollout is a bundle, with all of its tokens.
    plain_costs = step.tokens + cost_ratio * step.tokens * step.tokens
    plain = _Bundles(np.arange(num_rollouts), step.tokens, step.tokens, plain_costs)
    group_size = num_rollouts // max(len(step.prefix_tokens), 1)
    is_shared = (step.prefix_tokens >= _MIN_PREFIX_TOKENS).any() and group_size > 1
    is_shared |= bool((step.tree_tokens < step.tokens).any())
    candidates = [plain]
    if share_prefixes and is_shared:
        sizes = [group_size >> halvings for halvings in range(group_size.bit_length())]
        candidates = [_bundle(step, cost_ratio, size, max_tokens) for size in sizes]
        if share_prefixes == "auto":
            candidates.append(plain)
    best: tuple[_Bundles, BatchPlan] | None = None
    best_cost = math.inf
    for bundles in candidates:
        # Gathering the keys of a shared prefix takes time that the FLOPs do not count.
        overhead = 1.0 if bundles is plain else _SHARING_OVERHEAD
        # No plan can be better than one with equal costs on all ranks. If even that would not be
        # the cheapest, do not make the plan: for a large step it takes rank 0 a while.
        if overhead * bundles.costs.sum() / num_ranks >= best_cost:
            continue
        # A mini-batch begins with a group, and so with a bundle.
        ends = np.searchsorted(bundles.starts, np.cumsum(mini_batch_sizes))
        plan = plan_batch(
            bundles.budget_tokens,
            num_ranks=num_ranks,
            mini_batch_sizes=np.diff(ends, prepend=0).tolist(),
            max_tokens=max_tokens,
            costs=bundles.costs,
        )
        cost = overhead * _slowest_cost(plan, bundles.costs)
        if best is None or cost < best_cost:
            best = bundles, plan
            best_cost = cost
    assert best is not None
    bundles, plan = best
    metrics = plan_metrics(plan, bundles.tokens, bundles.costs)
    if len(bundles.starts) < num_rollouts:
        plan = _unbundle(plan, bundles.starts, np.diff(bundles.starts, append=num_rollouts))
    return StepPlan(plan, bundles is not plain, metrics)


def _bundle(step: StepTokens, cost_ratio: float, size: int, max_tokens: int) -> _Bundles:
    """Returns a step's bundles of at most `size` rollouts of a group.

    A bundle whose budget tokens (_Bundles) exceed `max_tokens` is halved until they do not."""
    num_rollouts = len(step.tokens)
    group_size = num_rollouts // len(step.prefix_tokens)
    prefix = np.where(step.prefix_tokens >= _MIN_PREFIX_TOKENS, step.prefix_tokens, 0)
    prefix = np.repeat(prefix, group_size)
    tokens = step.tree_tokens
    starts = np.arange(num_rollouts).reshape(-1, group_size)[:, ::size].ravel()
    while True:
        sizes = np.diff(starts, append=num_rollouts)
        bundle_tokens = prefix[starts] + np.add.reduceat(tokens - prefix, starts)
        # Each branch has the keys of its whole sequence.
        num_keys = np.add.reduceat(step.tokens, starts)
        budget_tokens = bundle_tokens - (bundle_tokens - num_keys) // _KEYS_PER_TOKEN
        is_large = (budget_tokens > max_tokens) & (sizes > 1)
        if not is_large.any():
            break
        starts = np.union1d(starts, (starts + sizes // 2)[is_large])
    # a*L + b*L^2 of a rollout, less that of its prefix, which the bundle has once.
    branch_costs = tokens - prefix + cost_ratio * (tokens * tokens - prefix * prefix)
    prefix_costs = prefix[starts] + cost_ratio * prefix[starts] * prefix[starts]
    costs = prefix_costs + np.add.reduceat(branch_costs, starts)
    return _Bundles(starts, bundle_tokens, budget_tokens, costs)


def _unbundle(plan: BatchPlan, starts: Ints, sizes: Ints) -> BatchPlan:
    """Returns the plan of rollouts that a plan of bundles stands for: each bundle is replaced by
    its rollouts, `sizes[i]` ones from `starts[i]` on."""
    ids = [np.arange(starts[i], starts[i] + sizes[i], dtype=np.int32) for i in plan.ids]
    lengths = [row_sizes.astype(np.int32) for row_sizes in _row_sums(plan, sizes)]
    return BatchPlan(np.concatenate(ids), lengths)


def split_groups(num_groups: int, num_mini_batches: int) -> list[int]:
    """Returns the number of groups of each mini-batch, as even as possible. They cannot always be
    equal: dynamic sampling may leave a step with fewer groups than it asked for."""
    size, num_larger = divmod(num_groups, num_mini_batches)
    return [size + (i < num_larger) for i in range(num_mini_batches)]


def plan_metrics(
    plan: BatchPlan, num_tokens: Numbers, costs: Numbers | None = None
) -> dict[str, float]:
    """Returns metrics of how evenly a plan loads the ranks.

    `packing_efficiency_frac` is the share of time in which ranks work instead of waiting: the sum
    of all costs over (number of ranks * the sum, over micro-batches, of the costliest row).
    `rank_cost_spread_frac` and `rank_token_spread_frac` are (largest - smallest) / largest of the
    ranks' sums over the whole step. `micro_batches` counts the forward-backward passes of a rank.
    """
    num_ranks = len(plan.lengths[0])
    all_costs = np.asarray(num_tokens if costs is None else costs, float)
    rank_costs = np.zeros(num_ranks)
    for row_costs in _row_sums(plan, all_costs):
        rank_costs += row_costs.cumsum(axis=1)[:, -1]
    row_tokens = _row_sums(plan, np.asarray(num_tokens, float))
    rank_tokens = sum((rows.sum(axis=1) for rows in row_tokens), np.zeros(num_ranks))
    total = sum(rank_costs.tolist())
    slowest = _slowest_cost(plan, all_costs)
    return {
        "packing_efficiency_frac": total / (num_ranks * slowest) if slowest else 0.0,
        "rank_cost_spread_frac": float(np.ptp(rank_costs) / max(rank_costs.max(), 1)),
        "rank_token_spread_frac": float(np.ptp(rank_tokens) / max(rank_tokens.max(), 1)),
        "micro_batches": sum(lengths.shape[1] for lengths in plan.lengths),
    }


def _slowest_cost(plan: BatchPlan, costs: Floats) -> float:
    """Returns the cost of the costliest row of each micro-batch, summed over micro-batches."""
    slowest = (rows.max(axis=0).tolist() for rows in _row_sums(plan, costs))
    return float(sum(chain.from_iterable(slowest)))


def _row_sums(plan: BatchPlan, values: Array) -> Iterator[Array]:
    """Yields for each mini-batch the sum of `values` over each row, [ranks, rows of a rank].

    `values` has one number for each rollout (or bundle) that the plan deals, by its id."""
    for ids, lengths in plan.blocks():
        row_of = np.repeat(np.arange(lengths.size), lengths.ravel())
        # bincount adds values in their order, as Python's sum does; np.sum adds them pairwise.
        yield np.bincount(row_of, values[ids], lengths.size).reshape(lengths.shape)


# The rows of a mini-batch: rollouts are dealt to rows, rows that run side by side are levelled, and
# each row is given to a rank.


def fill_rows(costs: Floats, tokens: Ints, num_ranks: int, max_tokens: int) -> tuple[Ids, Ids]:
    """Returns the indices of the rollouts, row after row with the rows of rank 0 first, and the
    lengths [ranks, rows per rank] of the rows.

    While the costs of rows are levelled, a rollout is represented by an "item": its number in the
    order of cost, where 1 is the cheapest. Items are Python ints only while their row is levelled;
    otherwise they would take hundreds of bytes per rollout, and the garbage collector would visit
    all of them.
    """
    # Both sorts are stable, so that the plan does not depend on the platform's algorithm.
    cheapest_first = np.lexsort((tokens, costs)).astype(np.int32)
    item_of = np.empty(len(costs), np.int32)
    item_of[cheapest_first] = np.arange(1, len(costs) + 1)
    costliest_first = np.argsort(-costs, kind="stable").astype(np.int32)
    row_of, row_costs, row_tokens = _deal(
        costs[costliest_first], tokens[costliest_first], num_ranks, max_tokens
    )
    items = item_of[costliest_first][np.argsort(row_of, kind="stable")]
    row_ends = np.cumsum(np.bincount(row_of, minlength=len(row_costs)))
    row_items = np.split(items, row_ends[:-1])
    table = _ItemTable(
        _to_array(np.append(0.0, costs[cheapest_first])),
        _to_array(np.append(0, tokens[cheapest_first])),
        max_tokens,
    )
    ranks: list[list[array[int]]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    by_cost = sorted(range(len(row_items)), key=row_costs.__getitem__, reverse=True)
    for start in range(0, len(row_items), num_ranks):
        rows = [
            _Row(row_costs[n], row_tokens[n], row_items[n].tolist())
            for n in by_cost[start : start + num_ranks]
        ]
        _level(rows, table)
        # The costliest of these rows goes to the rank with the least work so far.
        idlest_first = sorted(range(num_ranks), key=loads.__getitem__)
        rows.sort(key=attrgetter("cost"), reverse=True)
        for rank, row in zip(idlest_first, rows, strict=True):
            ranks[rank].append(array("i", row.items))
            loads[rank] += row.cost
    ordered_items = np.frombuffer(b"".join(chain.from_iterable(ranks)), np.int32)
    lengths = np.array([[len(row) for row in rows] for rows in ranks], np.int32)
    return cheapest_first[ordered_items - 1], lengths


def _deal(
    costs: Floats, tokens: Ints, num_ranks: int, max_tokens: int
) -> tuple[Ids, list[float], list[int]]:
    """Returns (the row of each rollout, the cost of each row, the tokens of each row).

    Deals rollouts, the costliest first, to the rows of all ranks: each goes to the row that is
    furthest below its target cost. Takes O(n log n).

    It starts with as few rows as the tokens allow, and adds `num_ranks` rows whenever a rollout
    does not fit in the row that is next. Targets are equal for `num_ranks` rows at a time, those
    that will run together: the mean of the remaining cost per row, or the cost of the costliest
    remaining rollout if that is larger. Without the latter, the rows beside such a rollout would
    wait for it half empty, and leave more work for later rows.
    """
    rows_per_rank = max(1, -(-int(tokens.sum()) // (num_ranks * max_tokens)))
    remaining = sum(_to_array(costs)) / num_ranks
    targets: list[float] = []
    for number in range(rows_per_rank):
        costliest = float(costs[number * num_ranks]) if len(costs) else 0.0
        target = max(costliest, remaining / (rows_per_rank - number))
        targets += [target] * num_ranks
        remaining = max(0.0, remaining - target)
    # A heap of (filled part - target, row). As the targets fall, the list is a heap already.
    emptiest = [(-target, row) for row, target in enumerate(targets)]
    row_of = array("i")
    row_costs = [0.0] * len(targets)
    row_tokens = [0] * len(targets)
    for cost, num_tokens in zip(_to_array(costs), _to_array(tokens), strict=True):
        row = emptiest[0][1]
        if row_tokens[row] + num_tokens > max_tokens:
            for new_row in range(len(targets), len(targets) + num_ranks):
                heapq.heappush(emptiest, (-targets[0], new_row))
            targets += [targets[0]] * num_ranks
            row_costs += [0.0] * num_ranks
            row_tokens += [0] * num_ranks
            row = emptiest[0][1]
        row_of.append(row)
        row_tokens[row] += num_tokens
        row_costs[row] += cost
        # A row of short rollouts reaches max_tokens before it costs as much as a row of long ones.
        # A row is as full as its tokens or its cost say, whichever is more.
        target = targets[row]
        token_share = row_tokens[row] / max_tokens * target
        filled = max(token_share, row_costs[row])
        heapq.heapreplace(emptiest, (filled - target, row))
    return np.array(row_of, np.int32), row_costs, row_tokens


@dataclass(frozen=True)
class _ItemTable:
    """The costs and tokens of the items, the numbers that stand for rollouts while rows are
    levelled (`fill_rows`)."""

    cost_of: Sequence[float]
    """Costs by item; 0 for _NO_ITEM."""
    tokens_of: Sequence[int]
    """Numbers of tokens by item; 0 for _NO_ITEM."""
    max_tokens: int
    """The largest number of tokens of a row."""


@dataclass(slots=True)
class _Row:
    """A row while it is levelled, with the items of its rollouts. Its items, cost and number of
    tokens change when it exchanges an item with another row."""

    cost: float
    tokens: int
    items: list[int]
    # What the row may give in an exchange (its items and _NO_ITEM, the cheapest first), and the
    # costs of these with infinity at the end. Both are empty until an exchange asks for them.
    offers: list[int] = field(default_factory=list)
    offer_costs: list[float] = field(default_factory=list)

    def sorted_offers(self, cost_of: Sequence[float]) -> tuple[list[int], list[float]]:
        """Returns (offers, their costs followed by infinity), the cheapest first."""
        if not self.offers:
            self.offers = sorted([_NO_ITEM, *self.items])
            self.offer_costs = [*map(cost_of.__getitem__, self.offers), math.inf]
        return self.offers, self.offer_costs

    def replace(self, old: int, new: int, table: _ItemTable) -> None:
        """Replaces an item by another one; either may be _NO_ITEM."""
        if old != _NO_ITEM:
            self.items.remove(old)
        if new != _NO_ITEM:
            self.items.append(new)
        self.offers = []
        self.tokens += table.tokens_of[new] - table.tokens_of[old]
        self.cost += table.cost_of[new] - table.cost_of[old]


def _level(rows: Sequence[_Row], table: _ItemTable) -> None:
    """Evens out the costs of rows that run together: exchanges an item of the costliest row for a
    cheaper one of a cheap row, or for none, as long as this brings the two rows' costs closer."""
    order = sorted((row.cost, number) for number, row in enumerate(rows))
    while len(order) > 1 and order[-1][0] - order[0][0] > _MAX_SPREAD * order[-1][0]:
        high = rows[order[-1][1]]
        for index in range(min(_MAX_PARTNERS, len(order) - 1)):
            low = rows[order[index][1]]
            exchange = _best_exchange(high, low, table)
            if exchange is None:
                continue
            from_high, from_low = exchange
            high.replace(from_high, from_low, table)
            low.replace(from_low, from_high, table)
            # Only these two rows changed: reinsert them instead of sorting thousands again.
            for _, number in (order.pop(), order.pop(index)):
                insort(order, (rows[number].cost, number))
            break
        else:
            # No exchange helps the costliest row: leave it as it is and go on with the others.
            order.pop()


def _best_exchange(high: _Row, low: _Row, table: _ItemTable) -> tuple[int, int] | None:
    """Returns (item of `high`, item of `low` or _NO_ITEM), the pair whose exchange brings the two
    rows' costs closest, or None if no exchange narrows their gap by at least a tenth."""
    cost_of = table.cost_of
    tokens_of = table.tokens_of
    offers, offer_costs = low.sorted_offers(cost_of)
    room_of_low = table.max_tokens - low.tokens
    room_of_high = table.max_tokens - high.tokens
    half_gap = (high.cost - low.cost) / 2
    min_error = 0.45 * (high.cost - low.cost)
    best: tuple[int, int] | None = None
    # The ideal partner of an item is cheaper by half the gap: then both rows cost the same.
    for item in high.items:
        cost = cost_of[item]
        index = bisect_left(offer_costs, cost - half_gap)
        # If there is no cheaper or no costlier offer, offer_costs has infinity at this index.
        for candidate in (index - 1, index):
            error = abs(cost - offer_costs[candidate] - half_gap)
            if error >= min_error:
                continue
            moved_tokens = tokens_of[item] - tokens_of[offers[candidate]]
            if -room_of_high <= moved_tokens <= room_of_low:
                best = item, offers[candidate]
                min_error = error
    return best


def _to_array(values: Array) -> array[Any]:
    """Returns the values as an array.array, which yields Python numbers without a list of them."""
    return array("d" if values.dtype == np.float64 else "q", values.tobytes())
