"""Gathered weights straight into an engine's own tensors, by the map that the proof has, without vLLM's loader.

vLLM's reload takes a layer apart, has its loader cut and copy each tensor, and puts it together again. Where a layer's
weights are HF's rows as they are, or are packed from them by one call, to copy them into their places comes to the
same. A wrong map would be wrong here and in the proof alike: it is used only once a proof has passed on what vLLM's
loader brought (`WeightSync`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_spmd.engine.gather import Piece
from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.sharding import rows_per_rank

_log = logging.getLogger("grpo_spmd")


class DirectLoad:
    """Of one engine: which HF tensors are copied (`names`), which engine parameters that covers (`covered`)."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[EngineTensor],
        names: Mapping[str, str],
        dtype: torch.dtype,
    ):
        """`tensors`: all of the engine's, proved to hold what they say. `names`: of the tensors that are gathered, by
        each name that they have (a tied lm_head is the embedding)."""
        direct = _in_direct_layers(model, tensors, names, dtype)
        self._matrices = [_Matrix(tensor, dtype) for tensor in direct]
        self._model, self._dtype = model, dtype
        self._targets = dict[str, list[tuple[_Matrix, TensorPart]]]()
        for matrix in self._matrices:
            for part in matrix.tensor.parts if matrix.is_copied else ():
                self._targets.setdefault(names[part.name], []).append((matrix, part))
        self.names = frozenset(self._targets)
        layers = {id(tensor.layer) for tensor in direct}
        self.covered = {
            hf_name(name)
            for path, layer in model.named_modules()
            if id(layer) in layers
            for name, _ in layer.named_parameters(path, recurse=False)
        }
        _log.debug(
            "weight sync: %d of %d tensors are copied directly",
            len(self.names),
            len(set(names.values())),
        )

    @torch.no_grad()
    def __call__(self, pieces: Iterable[Piece]) -> None:
        """Replace the weights of all direct layers. Raises EngineStateError: the pieces were not all of them."""
        for matrix in self._matrices:
            matrix.begin()
        for (name, parameter, _), first, piece in pieces:
            shape = rows_per_rank(parameter, len(piece)), parameter.shape[1:].numel()
            for matrix, part in self._targets[name]:
                matrix.copy(part, piece, first, shape)
            del piece  # before the next one is made
        for matrix in self._matrices:
            matrix.end()
        # A packed copy of an embedding that no head uses: vLLM makes one on the CPU, and here it would become stale.
        heads = {
            id(matrix.tensor.layer)
            for matrix in self._matrices
            if matrix.tensor.product is not None
        }
        for matrix in self._matrices:
            layer: Any = matrix.tensor.layer
            if hasattr(layer, "cpu_linear") and id(layer) not in heads:
                layer.cpu_linear = nn.functional.linear
        for layer in self._model.modules():
            if _is_attention(layer):  # as vLLM does after its reload; it has no weights of its own
                layer.process_weights_after_loading(self._dtype)


class _Matrix:
    """One of the engine's tensors, as the rows that are written."""

    def __init__(self, tensor: EngineTensor, dtype: torch.dtype) -> None:
        self.tensor, self._layer, self._dtype = tensor, cast(Any, tensor.layer), dtype
        self._num_rows = sum(part.num_rows for part in tensor.parts)
        # A packed lm_head has its plain weight beside it, which is copied by itself, or as the embedding that it is.
        self.is_copied = tensor.values is not None or not _is_vocabulary(tensor.layer)
        self._rows: Tensor | None = None  # where to write, once something comes
        self._num_missing = 0

    def begin(self) -> None:
        self._rows, self._num_missing = None, -1 if self.is_copied else 0

    def end(self) -> None:
        if self._num_missing:
            raise EngineStateError(
                f"load_weights: {self.tensor.engine_name} was not covered by the policy"
            )
        if not self.is_copied:
            _pack(self._layer)
        self._rows = None

    def copy(self, part: TensorPart, piece: Tensor, first: int, shape: tuple[int, int]) -> None:
        """What of `part` is in `piece`: [ranks, elements] of all ranks' blocks of an HF tensor, from element `first` of
        each on. `shape`: rows and columns of a block."""
        (block, columns), slices = shape, self.tensor.num_column_slices
        if self._rows is None:
            self._rows = self._place(columns // slices)
            self._num_missing = self._num_rows * columns // slices
        if self._rows.dtype != self._dtype:  # a bias that is kept in float32: of rounded values too
            piece = piece.to(self._dtype)
        rows, start = self._rows[part.start : part.start + part.num_rows], part.hf_start
        if slices == 1:  # whole rows: whatever stretch of elements comes is a stretch of theirs
            rows, start, block, columns = rows.view(-1, 1), start * columns, block * columns, 1
        before = self.tensor.column_slice * rows.shape[1]
        for begin, end in _stretches(first, first + piece.shape[1], columns):
            row, left = divmod(begin, columns)
            right = min(columns, left + end - begin)
            low, high = max(left, before), min(right, before + rows.shape[1])
            if low < high:
                found = piece[:, begin - first : end - first].unflatten(1, (-1, right - left))
                found = found[..., low - left : high - left]
                self._num_missing -= _copy_blocks(
                    rows[:, low - before : high - before], found, row - start, block
                )
        if not self._num_missing and self.tensor.values is None:
            self._pack_rows()

    def _place(self, columns: int) -> Tensor:
        """Rows of the engine's own, or of a tensor that is packed once it is full."""
        values = self.tensor.values
        if values is None and not self._layer.weight.numel():
            return torch.empty(
                self._num_rows, columns, dtype=self._dtype, device=self._layer.weight.device
            )
        values = self._layer.weight if values is None else values
        rows = cast(Tensor, values).data.view(len(values), columns)
        rows[
            self._num_rows :
        ].zero_()  # a vocabulary's padding, as vLLM does; asleep it may have been lost
        return rows

    def _pack_rows(self) -> None:
        layer, kept = self._layer, self._layer.weight
        if not kept.numel():
            layer.weight = nn.Parameter(cast(Tensor, self._rows), requires_grad=False)
        self._rows = None
        _pack(layer)
        if not layer.weight.numel():  # packed: the parameter stays the one that others may know
            layer.weight = kept


def _pack(layer: Any) -> None:
    layer.cpu_linear = (
        None  # the packed copy of before is in it: the new one takes its memory, which is mapped
    )
    layer.quant_method.process_weights_after_loading(layer)


def _copy_blocks(rows: Tensor, found: Tensor, offset: int, block: int) -> int:
    """Copy what `found`, [ranks, rows, columns], has of `rows`: row i of rank r is row r * block + i + offset there, if
    there is one. In one copy for all ranks whose rows are all there. Returns the number of elements."""
    (ranks, num_rows, columns), num_copied = found.shape, 0
    inside = range(
        max(0, -(offset // block)), min(ranks - 1, (len(rows) - offset - num_rows) // block) + 1
    )
    touched = range(
        max(0, (-offset - num_rows) // block + 1),
        min(ranks - 1, (len(rows) - 1 - offset) // block) + 1,
    )
    if inside:
        strides = block * rows.stride(0), rows.stride(0), 1
        first = rows[inside.start * block + offset :]
        first.as_strided((len(inside), num_rows, columns), strides).copy_(
            found[inside.start : inside.stop]
        )
        num_copied += len(inside) * num_rows * columns
    for rank in touched:
        if rank not in inside:  # the first and the last
            top = rank * block + offset
            start, end = max(top, 0), min(top + num_rows, len(rows))
            rows[start:end].copy_(found[rank, start - top : end - top])
            num_copied += (end - start) * columns
    return num_copied


def _stretches(begin: int, end: int, columns: int) -> Iterable[tuple[int, int]]:
    """Elements begin to end of a matrix's rows, as what is left of one row, whole rows, and a part of one."""
    first = min(end, -(-begin // columns) * columns)
    return [
        (low, high)
        for low, high in pairwise((begin, first, max(first, end // columns * columns), end))
        if low < high
    ]


def _in_direct_layers(
    model: nn.Module, tensors: Sequence[EngineTensor], names: Mapping[str, str], dtype: torch.dtype
) -> list[EngineTensor]:
    """What is in layers of which all is plain, or packed by the layer alone, and fed by no HF tensor that another layer
    needs too. Nothing, where some layer makes something else of its neighbours' weights."""
    if any(
        hasattr(layer, "process_weights_after_loading") and not _is_attention(layer)
        for layer in model.modules()
    ):
        return []
    copyable = [tensor for tensor in tensors if _is_copyable(tensor, dtype)]
    filled = {id(tensor.values) for tensor in copyable}
    packed = [
        tensor.layer
        for tensor in copyable
        if tensor.values is None and not _is_vocabulary(tensor.layer)
    ]
    filled |= {id(cast(Any, layer).weight) for layer in packed}
    loaded = {
        id(of)
        for of in model.modules()
        if any(id(p) not in filled for p in of.parameters(recurse=False))
    }
    loaded |= {id(tensor.layer) for tensor in tensors if not _is_copyable(tensor, dtype)}
    while True:
        shared = {
            names[part.name]
            for tensor in tensors
            if id(tensor.layer) in loaded
            for part in tensor.parts
        }
        more = {
            id(of.layer) for of in tensors if any(names[part.name] in shared for part in of.parts)
        } - loaded
        if not more:
            return [tensor for tensor in tensors if id(tensor.layer) not in loaded]
        loaded |= more


def _is_copyable(tensor: EngineTensor, dtype: torch.dtype) -> bool:
    layer, values, num_rows = (
        cast(Any, tensor.layer),
        tensor.values,
        sum(part.num_rows for part in tensor.parts),
    )
    if tensor.is_quantised or layer is None:
        return False
    if values is None:
        return hasattr(layer, "cpu_linear")
    is_exact = (
        values.is_floating_point() and values.itemsize >= dtype.itemsize and values.is_contiguous()
    )
    return is_exact and (num_rows == len(values) or _is_vocabulary(layer))


def _is_vocabulary(layer: object) -> bool:
    """An embedding or an lm_head, whose rows may be padded."""
    return hasattr(layer, "org_vocab_size")


def _is_attention(layer: nn.Module) -> bool:
    """vLLM's plain one. Others make matrices of their own of the weights of their neighbours (MLA)."""
    return type(layer).__name__ == "Attention" and not list(layer.parameters(recurse=False))
