"""Finds the prefixes that sequences of a row have in common, so that the models read them once.

Completions of one prompt begin alike, and so do an episode's contexts after a fork. A trie over
the token ids has each of these prefixes as one node (records.PrefixTree).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.learn.contexts import completion_contexts
from grpo_spmd.model.attention import sequence_starts
from grpo_spmd.model.offload import copy_to_device
from grpo_spmd.records import PrefixTree, RolloutGroup

Ids = npt.NDArray[np.int32]
# A node costs its own attention call on a CPU, so that a few equal tokens are not worth one: it has
# this many tokens, and saves that many.
_MIN_NODE_TOKENS = 4
_MIN_SAVED_TOKENS = 8


@dataclass(frozen=True)
class SharedCounts:
    """How many tokens the rollouts of a group share."""

    tree_tokens: list[int]
    """For each rollout its tokens, with the group's prefix once, and once what its contexts share
    after that."""
    prefix_tokens: int
    """The number of tokens with which all contexts of the group begin."""


def count_shared(group: RolloutGroup) -> SharedCounts:
    """Returns what the rollouts of a group share."""
    prompt_ids = group.prompt.token_ids
    completions = group.completions
    if all(completion.episode is None for completion in completions):
        lengths = [len(prompt_ids) + len(completion.token_ids) for completion in completions]
        return SharedCounts(lengths, len(prompt_ids))
    rollouts = [
        [context.token_ids for context in completion_contexts(prompt_ids, completion)]
        for completion in completions
    ]
    first = rollouts[0][0]
    prefix = min(_count_common(first, ids) for contexts in rollouts for ids in contexts)
    # Where the prefix is a node, what is left of a longer one may not be worth a node of its own.
    root = prefix if prefix >= _MIN_SAVED_TOKENS else 0
    tries = [_find_nodes([ids[root:] for ids in contexts]) for contexts in rollouts]
    return SharedCounts(
        [root + sum(node.end - node.start for node in trie.nodes) for trie in tries], prefix
    )


def build_tree(sequences: Sequence[Ids], device: torch.device) -> PrefixTree | None:
    """Returns the tree of a row's sequences, or None if no prefix is worth sharing."""
    trie = _find_nodes(sequences)
    # Nodes of one shape are neighbours, which attention computes as a batch.
    depths = [node.start for node in trie.nodes]
    order = sorted(range(len(trie.nodes)), key=lambda n: (depths[n], trie.nodes[n].end - depths[n]))
    number_of = {old: new for new, old in enumerate(order)}
    nodes = [trie.nodes[old] for old in order]
    lengths = [node.end - node.start for node in nodes]
    row_starts = [0, *accumulate(len(ids) for ids in sequences)]
    if sum(lengths) == row_starts[-1]:
        return None
    node_starts = [0, *accumulate(lengths)]
    spans = [np.arange(*bounds) for bounds in pairwise(node_starts)]
    paths = [tuple(number_of[old] for old in node.path) for node in nodes]
    key_spans = [np.concatenate([spans[n] for n in (*path, i)]) for i, path in enumerate(paths)]
    firsts = [row_starts[node.sequence] for node in nodes]
    tokens = [
        np.arange(first + node.start, first + node.end)
        for first, node in zip(firsts, nodes, strict=True)
    ]
    index = [spans[number_of[old]] for path in trie.sequence_paths for old in path]

    def on_device(pieces: Sequence[npt.NDArray[Any]]) -> Tensor:
        return copy_to_device(torch.from_numpy(np.concatenate(pieces)), device)

    return PrefixTree(
        tokens=on_device(tokens),
        index=on_device(index),
        lengths=lengths,
        paths=paths,
        starts=copy_to_device(sequence_starts(lengths), device),
        keys=on_device(key_spans),
        key_starts=copy_to_device(sequence_starts(map(len, key_spans)), device),
    )


class _Node(NamedTuple):
    """Tokens `start` to `end` of a sequence, and of all others that have the node."""

    sequence: int
    """The number of the first such sequence."""
    start: int
    end: int
    path: tuple[int, ...]
    """The numbers of the nodes before it, from the root on."""


class _Trie(NamedTuple):
    nodes: list[_Node]
    sequence_paths: list[tuple[int, ...]]
    """For each sequence the numbers of its nodes, from the root on."""


def _find_nodes(sequences: Sequence[Ids]) -> _Trie:
    """Returns the trie of sequences of token ids, int32."""
    # Sorted by their bytes, sequences with a common prefix are neighbours.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())
    # For each place in this order the tokens in common with the sequence before it.
    common = [0, *(_count_common(sequences[a], sequences[b]) for a, b in pairwise(order))]
    nodes: list[_Node] = []
    sequence_paths: list[tuple[int, ...]] = [()] * len(sequences)
    # Ranges of the order, with the nodes that their sequences share so far and these nodes' tokens.
    ranges: list[tuple[int, int, tuple[int, ...], int]] = [(0, len(order), (), 0)]
    while ranges:
        begin, end, path, depth = ranges.pop()
        number = end - begin
        ids = order[begin]
        shared = min(common[begin + 1 : end], default=len(sequences[ids]))
        length = shared - depth
        is_worth = length >= _MIN_NODE_TOKENS and length * (number - 1) >= _MIN_SAVED_TOKENS
        if is_worth or (number == 1 and length):
            nodes.append(_Node(min(order[begin:end]), depth, shared, path))
            path = (*path, len(nodes) - 1)
            depth = shared
        if number == 1:
            sequence_paths[ids] = path
            continue
        # Neighbours that have no more than `shared` tokens in common part here.
        cuts = [i for i in range(begin + 1, end) if common[i] == shared]
        ranges += [(*bounds, path, depth) for bounds in pairwise([begin, *cuts, end])]
    return _Trie(nodes, sequence_paths)


def _count_common(ids: Ids, other_ids: Ids) -> int:
    """Returns the number of equal tokens with which two sequences begin."""
    size = min(len(ids), len(other_ids))
    differs = ids[:size] != other_ids[:size]
    return int(differs.argmax()) if differs.any() else size
