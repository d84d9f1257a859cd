"""Finds the prefixes that sequences of a row have in common, so that the models read them once.

Completions of one prompt begin alike. So do several contexts of one episode that go on differently
from some turn on. A trie over the token ids has each of these prefixes as one node
(records.PrefixTree).
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
# On a CPU each node costs an attention call of its own, so that a few shared tokens are not worth a
# node. A node has at least this many tokens, and sharing it saves at least that many.
_MIN_NODE_TOKENS = 4
_MIN_SAVED_TOKENS = 8


@dataclass(frozen=True)
class SharedCounts:
    """The numbers of tokens of a group's rollouts, with and without those that they share."""

    tree_tokens: list[int]
    """For each rollout the number of its tokens, where a prefix that several of its contexts share
    counts once."""
    prefix_tokens: int
    """The number of tokens with which all contexts of the group begin."""


def count_shared(group: RolloutGroup) -> SharedCounts:
    """Returns, for each rollout of a group, its distinct tokens; and the length of their prefix.

    A rollout's contexts (the sequences of an episode with forks) may begin alike: the tokens that
    they share count once. The prefix is what all rollouts of the group begin with, as the prompt.
    """
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
    # In a row of the whole group the prefix is one node of the tree. What the contexts of a rollout
    # share beyond it is a node of its own only if it is long enough by itself, without the prefix.
    root = prefix if prefix >= _MIN_SAVED_TOKENS else 0
    tries = [_find_nodes([ids[root:] for ids in contexts]) for contexts in rollouts]
    return SharedCounts(
        [root + sum(node.end - node.start for node in trie.nodes) for trie in tries], prefix
    )


def build_tree(sequences: Sequence[Ids], device: torch.device) -> PrefixTree | None:
    """Returns the PrefixTree of a row's sequences on `device`, or None if no prefix is long enough
    to be worth sharing."""
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
        """Returns the concatenated arrays as a tensor on the device."""
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
    """A run of tokens that one sequence has or several share, at the positions from `start` to
    before `end` of each of these sequences."""

    sequence: int
    """The smallest number of a sequence that has the node."""
    start: int
    end: int
    path: tuple[int, ...]
    """The numbers of the nodes before it, from the root on."""


class _Trie(NamedTuple):
    """The trie of some token sequences, whose nodes are numbered in the order of `nodes`."""

    nodes: list[_Node]
    sequence_paths: list[tuple[int, ...]]
    """For each sequence the numbers of its nodes, from the root on."""


def _find_nodes(sequences: Sequence[Ids]) -> _Trie:
    """Returns the trie of sequences of token ids (int32).

    A shared prefix becomes a node if it is long enough (_MIN_NODE_TOKENS, _MIN_SAVED_TOKENS). What
    is left of a sequence behind its shared nodes is a node of its own."""
    # Sorted by their bytes, sequences with a common prefix are neighbours.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())
    # For each place in this order, how many tokens its sequence shares with the one before it.
    common = [0, *(_count_common(sequences[a], sequences[b]) for a, b in pairwise(order))]
    nodes: list[_Node] = []
    sequence_paths: list[tuple[int, ...]] = [()] * len(sequences)
    # Ranges of this order that are left to do: (begin, end, numbers of the nodes that all of their
    # sequences share so far, number of tokens of these nodes).
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
        # Cut the range where neighbours have only these `shared` tokens in common. Within each of
        # the smaller ranges, sequences may share more.
        cuts = [i for i in range(begin + 1, end) if common[i] == shared]
        ranges += [(*bounds, path, depth) for bounds in pairwise([begin, *cuts, end])]
    return _Trie(nodes, sequence_paths)


def _count_common(ids: Ids, other_ids: Ids) -> int:
    """Returns the number of equal tokens with which two sequences begin."""
    size = min(len(ids), len(other_ids))
    differs = ids[:size] != other_ids[:size]
    return int(differs.argmax()) if differs.any() else size
