"""Attention over packed rows: one function for HF models, with three back ends.

A packed row is several sequences end to end, without padding. Attention is causal within each
sequence, and no sequence sees another one. T is the number of tokens in a row.

Sequences that share prefixes (completions of one prompt) can be a tree (records.PrefixTree): each
shared run of tokens is a node, which is computed once. The Q queries of a node see its own keys and
those of the nodes on the way from the root. They are the last Q of these K tokens, so that the
causal mask is aligned at its bottom right corner.

The back ends:
flash: flash-attn's kernel for variable lengths. It needs bfloat16 on a GPU.
varlen: torch's own kernel for variable lengths. It needs the same, and cannot cap attention logits.
sdpa: torch's scaled_dot_product_attention, called for each group of equally long sequences. It
works everywhere. Capped attention logits (Gemma 2) use a softmax that is written out in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.families.build import can_import
from grpo_spmd.model.families.logits import capped_attention
from grpo_spmd.records import MicroBatch, PrefixTree, RowRoutes

PACKED_ATTENTION = "grpo_spmd_packed"
Backend = Literal["flash", "varlen", "sdpa"]


class PackedLayout:
    """Says where the sequences of a packed row lie, and which back end computes their attention."""

    def __init__(
        self,
        lengths: list[int],
        starts: Tensor,
        backend: Backend,
        routes: RowRoutes | None = None,
        tree: PrefixTree | None = None,
        sequence_group: ProcessGroup | None = None,
    ) -> None:
        """`lengths` has the tokens of each sequence, in the order of the row; `starts` are their
        `sequence_starts` on the row's device. With a `tree` its nodes take the place of the
        sequences. `routes` (the experts that an MoE's routers must choose, routing.py) and
        `sequence_group` (the ranks that share the row, sequence_parallel.py) are here since
        transformers passes the layout to every layer."""
        self.tree = tree
        self.backend = backend
        self.routes = routes
        self.sequence_group = sequence_group
        self.starts = starts
        num_keys = lengths
        if tree is not None:
            num_keys = [sum(lengths[n] for n in (*path, i)) for i, path in enumerate(tree.paths)]
        # Runs of neighbours with equal length and equally many keys, which SDPA computes as a
        # batch. Packing sorts by length, so that all sequences of one length are neighbours.
        shapes = [
            (len(list(run)), *shape) for shape, run in groupby(zip(lengths, num_keys, strict=True))
        ]
        # For each run: (number of sequences, their length), and its number of keys.
        self.runs = [(number, length) for number, length, _ in shapes]
        self.run_keys = [number * size for number, _, size in shapes]
        if backend != "sdpa":
            key_starts = starts if tree is None else tree.key_starts
            # The kernels take starts and longest length once for queries and once for keys.
            self.bounds = (starts, key_starts, max(lengths), max(num_keys))


class RowInputs(NamedTuple):
    """The inputs of a decoder's forward pass over a micro-batch."""

    input_ids: Tensor
    """int64 [1, T], or [1, N] for the N tokens of a tree's nodes."""
    position_ids: Tensor
    """The same shape."""
    layout: PackedLayout
    predict_index: Tensor
    """int64 [C]. Index of the token whose hidden state predicts each completion token."""


def row_inputs(
    batch: MicroBatch,
    backend: Backend,
    routes: RowRoutes | None = None,
    sequence_group: ProcessGroup | None = None,
) -> RowInputs:
    """Returns a decoder's inputs for a micro-batch: its row or, if it has a tree of shared
    prefixes, the nodes of the tree. If the ranks of a `sequence_group` share the row, `batch` has
    this rank's slice of it."""
    tree = batch.tree
    lengths, starts = batch.sequence_lengths, batch.sequence_starts
    if tree is not None:
        lengths, starts = tree.lengths, tree.starts
        assert sequence_group is None, "shared rows have no tree"
        assert routes is None, "siblings may have other routes of one token"
    layout = PackedLayout(
        lengths, starts, backend, routes, tree=tree, sequence_group=sequence_group
    )
    if tree is None:
        return RowInputs(
            batch.input_ids[None], batch.position_ids[None], layout, batch.predict_index
        )
    return RowInputs(
        batch.input_ids[tree.tokens][None],
        # Positions go on from a node to those after it.
        batch.position_ids[tree.tokens][None],
        layout,
        # The first token of every branch is predicted by the last token of the shared prefix.
        tree.index[batch.predict_index],
    )


def sequence_starts(lengths: Iterable[int]) -> Tensor:
    """Returns the position of the first token of each sequence in the row, and the row's length at
    the end: int32 [S + 1], on the host.

    Call it once, when the row is packed, and not in the forward pass: the copy to the device would
    wait there for all work that is queued on the device."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def choose_backend(
    choice: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, capped: bool = False
) -> Backend:
    """Returns the back end for `model.attention`, which is `choice`.

    `capped` says that the model caps its attention logits. Raises ConfigError if `choice` is flash
    and flash-attn cannot run here."""
    has_kernels = (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= (8, 0)
        # flash and varlen take heads of at most 256 numbers, in multiples of 8.
        and head_dim % 8 == 0
        and head_dim <= 256
    )
    if has_kernels and choice != "sdpa" and can_import("flash_attn", "flash_attn_varlen_func"):
        return "flash"
    if choice == "flash":
        raise ConfigError(
            "model.attention: flash needs a GPU of compute capability 8.0, model.dtype: "
            "bfloat16, heads of a size that "
            "8 divides, 256 at most, and the flash-attn package; set auto or sdpa"
        )
    can_be_varlen = has_kernels and choice == "auto" and not capped
    if can_be_varlen and can_import("torch.nn.attention.varlen", "varlen_attn"):
        return "varlen"
    return "sdpa"


# torch.compile must not trace this: it would compile again for each set of lengths, and it cannot
# look into the kernels anyway.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    _: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    packed_layout: PackedLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention within each sequence, in the signature that transformers calls.

    `query` is [1, heads, T, head_dim]; `key` and `value` are [1, kv heads, T, head_dim]. Returns
    the output [1, T, heads, head_dim], and None in place of the attention weights. The layout
    replaces `attention_mask`. Some models (AFMoE, Doge) pass the tensors by these names. Raises
    ConfigError if the model has attention sinks, or caps logits that varlen cannot cap."""
    # gpt-oss passes its attention sinks under this name.
    if options.get("s_aux") is not None:
        raise ConfigError(
            "model.path: this model has attention sinks, which packed rows do not support"
        )
    # From [1, heads, T, head_dim] to [T, heads, head_dim].
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = {"flash": _flash, "varlen": _varlen, "sdpa": _sdpa}[packed_layout.backend]
    logit_options = _LogitOptions(
        options.get("scaling"), options.get("sliding_window"), options.get("softcap")
    )
    return attend(query, key, value, packed_layout, logit_options)[None], None


class _LogitOptions(NamedTuple):
    """Says what a model does to its attention logits besides the causal mask."""

    scale: float | None
    """Factor of the logits. None: 1 / sqrt(head_dim)."""
    window: int | None
    """Tokens that a query sees, itself included. None: all earlier ones."""
    softcap: float | None
    """Logits become softcap * tanh(logits / softcap). None: no cap."""

    @property
    def window_size(self) -> tuple[int, int]:
        """The window as the kernels take it: tokens to the left, -1 for all, and to the right."""
        return (-1 if self.window is None else self.window - 1, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: _LogitOptions) -> Tensor:
    """Computes attention [T, heads, head_dim] by flash-attn.

    If the rows share prefixes (`layout.tree`), torch's kernel is used where it can be, since it
    computes the gathered keys and values again in the backward pass."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    if layout.tree is not None:
        if options.softcap is None:
            return _varlen(q, k, v, layout, options)
        # torch's kernel has no softcap. flash-attn keeps the gathered keys and values until the
        # backward pass, which takes more memory.
        k, v = (_Gather.apply(x, layout.tree.keys) for x in (k, v))
    settings = {"softmax_scale": options.scale, "causal": True, "window_size": options.window_size}
    # Old versions of flash-attn do not know this argument: pass it only if it is needed.
    if options.softcap is not None:
        settings["softcap"] = options.softcap
    out: Tensor = flash_attn_varlen_func(q, k, v, *layout.bounds, **settings)
    return out


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: _LogitOptions
) -> Tensor:
    """Computes attention [T, heads, head_dim] by torch's kernel for variable lengths."""
    from torch.nn.attention.varlen import varlen_attn

    if options.softcap is not None:
        raise ConfigError(
            "model.attention: this model caps its attention logits; set sdpa, or install flash-attn"
        )
    # torch 2.11 accepts fewer kv heads than heads as they are; from 2.12 on it needs enable_gqa.
    gqa: dict[str, Any] = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    if layout.tree is not None:
        tree_out: Tensor = _TreeVarlen.apply(q, k, v, layout, options, gqa)
        return tree_out
    out = varlen_attn(
        q, k, v, *layout.bounds, scale=options.scale, window_size=options.window_size, **gqa
    )
    assert isinstance(out, Tensor)
    return out


class _TreeVarlen(torch.autograd.Function):
    """Computes attention over the nodes of a tree of shared prefixes, by torch's kernel for
    variable lengths.

    The kernel needs the keys and values of a shared prefix once for each branch. These copies are
    gathered again in the backward pass: keeping them would take the memory that sharing saves."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PackedLayout,
        options: _LogitOptions,
        gqa: dict[str, Any],
    ) -> Tensor:
        """Returns the attention [N, heads, head_dim] of the nodes' tokens; `q`, `k` and `v` are
        those of these tokens. `gqa` has further options of the kernel."""
        assert layout.tree is not None
        keys = layout.tree.keys
        window = options.window_size
        ctx.layout = layout
        # (is causal, scale, window) as varlen_attn passes them: with a window is_causal is False,
        # since 0 tokens to the right make the window causal by itself.
        ctx.settings = (window == (-1, 0), options.scale, list(window))
        out, log_sums, random_state = torch.ops.torch_attn._varlen_attn(
            q, k[keys], v[keys], *layout.bounds, *ctx.settings, **gqa
        )
        ctx.save_for_backward(q, k, v, out, log_sums, random_state)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of `q`, `k` and `v`, and None for the other arguments."""
        q, k, v, out, log_sums, random_state = ctx.saved_tensors
        keys = ctx.layout.tree.keys
        is_causal, scale, window = ctx.settings
        grad_q, *key_grads = torch.ops.torch_attn._varlen_attn_backward(
            grad.contiguous(),
            q,
            k[keys],
            v[keys],
            out,
            log_sums,
            *ctx.layout.bounds,
            is_causal,
            random_state,
            scale,
            window,
        )
        return (
            grad_q,
            *(_sum_branches(grads, keys, len(k)) for grads in key_grads),
            None,
            None,
            None,
        )


class _Gather(torch.autograd.Function):
    """Gathers the keys or values for all branches of a tree [K, kv heads, head_dim], with a copy of
    a shared prefix for each branch, from those of the nodes' tokens [N, kv heads, head_dim]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor) -> Tensor:
        """`keys` has, for each of the K keys, the index of its token among the nodes' tokens."""
        ctx.num_tokens = len(x)
        ctx.save_for_backward(keys)
        return x.index_select(0, keys)

    @staticmethod
    def backward(ctx: Any, branch_grads: Tensor) -> tuple[Tensor, None]:
        (keys,) = ctx.saved_tensors
        return _sum_branches(branch_grads, keys, ctx.num_tokens), None


def _sum_branches(branch_grads: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
    """Returns the gradient [N, kv heads, head_dim] of the nodes' keys or values.

    `branch_grads` [K, kv heads, head_dim] is the gradient of the gathered keys or values (_Gather),
    in which a token of a shared prefix occurs once for each branch."""
    # A shared token has the sum over its branches, in float32. On CUDA index_put_ sorts the indices
    # first, so that the order of the sum is always the same, as it is not with index_add_.
    total = branch_grads.new_zeros(num_tokens, *branch_grads.shape[1:], dtype=torch.float32)
    total.index_put_((keys,), branch_grads.float(), accumulate=True)
    return total.to(branch_grads.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, options: _LogitOptions) -> Tensor:
    """Computes attention [T, heads, head_dim] by SDPA, with one call for each run of equally long
    sequences (or nodes of a tree), which are its batch."""
    if layout.tree is not None:
        k, v = (_Gather.apply(x, layout.tree.keys) for x in (k, v))
    # Split once and join once: slicing in the loop would make the backward pass write a whole row
    # for each sequence.
    queries = q.split([number * length for number, length in layout.runs])
    keys, values = (x.split(layout.run_keys) for x in (k, v))
    outputs = []
    for (number, _), *run_tensors in zip(layout.runs, queries, keys, values, strict=True):
        # [number, heads, length, head_dim]
        query, key, value = (
            tensor.unflatten(0, (number, -1)).transpose(1, 2) for tensor in run_tensors
        )
        out = _sdpa_run(query, key, value, options)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _sdpa_run(query: Tensor, key: Tensor, value: Tensor, options: _LogitOptions) -> Tensor:
    """Returns the attention [n, heads, Q, head_dim] of n sequences of K tokens, for the queries of
    the last Q tokens of each.

    `key` and `value` are [n, kv heads, K, head_dim]."""
    scale, window, softcap = options
    num_queries, num_keys = query.shape[2], key.shape[2]
    if softcap is not None:
        scale = scale or query.shape[-1] ** -0.5
        return capped_attention(query, key, value, scale, window, softcap=softcap)
    mask = None
    offset = num_keys - num_queries
    is_windowed = window is not None and num_keys > window
    # SDPA's is_causal aligns the mask at the top left corner, which is right only if there are as
    # many queries as keys. It skips the logits above the diagonal, as an explicit mask does not.
    # So if few queries are missing, it is cheaper to add filler queries than to pass a mask.
    num_fillers = offset if offset < num_queries and not is_windowed else 0
    if num_fillers:
        query = pad(query, (0, 0, num_fillers, 0))
    elif offset or is_windowed:
        positions = torch.arange(num_keys, device=query.device)
        distance = positions[offset:, None] - positions
        mask = (distance >= 0) & (distance < (window or num_keys))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        # SDPA takes either a mask or is_causal. The mask is causal by itself.
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[:, :, num_fillers:] if num_fillers else out


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
