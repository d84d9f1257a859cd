"""Copies gathered weights straight into an engine's own tensors, without vLLM's loader.

vLLM's reload takes each layer apart, lets its loader slice and copy each tensor, and rebuilds the
layer. If a layer's weights are unchanged rows of HF tensors, or are packed from such rows by one
call, copying the rows gives the same result.

A direct layer is a layer that such copies fill completely. Packing a weight means storing its
values in the order in which the CPU's matrix product reads them. weight_map.py says which HF rows
lie where in the engine's tensors. The proof (weight_proof.py) uses the same map, so it could not
detect copies to wrong places. WeightSync therefore copies directly only after a proof has passed on
weights that came through vLLM's loader, which does not use the map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_spmd.engine.gather import Piece
from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.sharding import num_columns, num_rows, rows_per_rank


class DirectLoad:
    """Copies HF tensors straight into the direct layers of one engine.

    `names` are the HF tensors that it copies, by the names under which they are gathered. `covered`
    are the names of the engine parameters that it fills."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[EngineTensor],
        names: Mapping[str, str],
        dtype: torch.dtype,
    ):
        """`tensors` describes all tensors of the engine, by a map that a proof has confirmed.
        `names` maps each HF name to the name under which the tensor is gathered: a tied lm_head is
        gathered under the embedding's name. `dtype` is the dtype of the gathered values."""
        direct = _tensors_of_direct_layers(model, tensors, names, dtype)
        self._matrices = [_Matrix(tensor, dtype) for tensor in direct]
        self._model = model
        self._dtype = dtype
        # Where the values of each gathered tensor go, by its name.
        self._targets: dict[str, list[tuple[_Matrix, TensorPart]]] = {}
        for matrix in self._matrices:
            for tensor_part in matrix.tensor.parts if matrix.is_copied else ():
                self._targets.setdefault(names[tensor_part.name], []).append((matrix, tensor_part))
        self.names = frozenset(self._targets)
        # Modules are compared by identity: two layers of one class are different layers.
        layers = {id(tensor.layer) for tensor in direct}
        self.covered = {
            hf_name(name)
            for path, layer in model.named_modules()
            if id(layer) in layers
            for name, _ in layer.named_parameters(path, recurse=False)
        }

    @torch.no_grad()
    def __call__(self, pieces: Iterable[Piece]) -> None:
        """Replaces the weights of all direct layers with the values in `pieces`.

        The pieces of the tensors in `names` must come first. The later ones are not drawn: they are
        left to the caller. Raises EngineStateError if some element of a direct layer was in no
        piece."""
        for matrix in self._matrices:
            matrix.begin()
        incomplete = set(self.names)
        for (name, parameter, _), start, blocks in pieces:
            block_rows = rows_per_rank(parameter, len(blocks)) * parameter.shape[1:-1].numel()
            columns = num_columns(parameter.shape)
            for matrix, tensor_part in self._targets[name]:
                matrix.copy(tensor_part, blocks, start, (block_rows, columns))
            if start + blocks.shape[1] == block_rows * columns:
                incomplete.remove(name)
            # Drop the reference: the next piece needs the memory of this one.
            del blocks
            if not incomplete:
                break
        for matrix in self._matrices:
            matrix.end()
        # On a CPU vLLM also makes a packed copy of an embedding's weight. Unless the layer is used
        # as lm_head, that copy was not renewed above and is stale: go back to the plain product.
        heads = {
            id(matrix.tensor.layer)
            for matrix in self._matrices
            if matrix.tensor.product is not None
        }
        for matrix in self._matrices:
            layer: Any = matrix.tensor.layer
            if hasattr(layer, "cpu_linear") and id(layer) not in heads:
                layer.cpu_linear = nn.functional.linear
        # vLLM's own reload also ends with this call. An attention layer has no weights of its own.
        for layer in self._model.modules():
            if _is_attention(layer):
                layer.process_weights_after_loading(self._dtype)


class _Matrix:
    """Fills one engine tensor with its HF rows, and counts the elements that are still missing."""

    def __init__(self, tensor: EngineTensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self._layer = tensor.layer
        self._dtype = dtype
        # An lm_head on a CPU has a plain weight and a packed copy. The plain weight is filled by
        # another _Matrix (its own, or that of the embedding to which it is tied). For the packed
        # copy (`values` None) this is False: no rows are copied, `end` makes it from the weight.
        self.is_copied = tensor.values is not None or not _is_vocabulary(tensor.layer)
        # The tensor to write rows into. None until the first piece of a load has come.
        self._rows: Tensor | None = None
        # Number of elements that no piece has brought yet, -1 before the first piece of a load.
        self._num_missing = 0

    def begin(self) -> None:
        """Starts a load. The number of missing elements is known once the first piece has come."""
        self._rows = None
        self._num_missing = -1 if self.is_copied else 0

    def end(self) -> None:
        """Ends a load. Raises EngineStateError if elements are missing."""
        if self._num_missing:
            raise EngineStateError(
                f"load_weights: {self.tensor.engine_name} was not covered by the policy"
            )
        if not self.is_copied:
            _pack(self._layer)
        self._rows = None

    def copy(
        self,
        tensor_part: TensorPart,
        blocks: Tensor,
        block_start: int,
        block_shape: tuple[int, int],
    ) -> None:
        """Copies those elements of `blocks` that belong to `tensor_part`.

        A block is one rank's rows of an HF tensor, with the shape `block_shape` [rows, columns].
        `blocks` [ranks, elements] has the same stretch of every rank's block. The stretch begins at
        element `block_start` of the block."""
        block_rows, columns = block_shape
        num_slices = self.tensor.num_column_slices
        if self._rows is None:
            width = columns // num_slices
            self._rows = self._destination(width)
            self._num_missing = self.tensor.num_rows * width
        # A float32 bias of a bfloat16 engine gets values rounded to bfloat16, as from the loader.
        if self._rows.dtype != self._dtype:
            blocks = blocks.to(self._dtype)
        rows = self._rows[tensor_part.start : tensor_part.start + tensor_part.num_rows]
        first_hf_row = tensor_part.hf_start
        # If the engine holds whole rows, treat the matrix as a single column: then one copy is
        # enough for a stretch that begins or ends inside a row.
        if num_slices == 1:
            rows = rows.view(-1, 1)
            first_hf_row *= columns
            block_rows *= columns
            columns = 1
        width = rows.shape[1]
        # The engine holds the HF columns from slice_start to slice_start + width.
        slice_start = self.tensor.column_slice * width
        for begin, end in _stretches(block_start, block_start + blocks.shape[1], columns):
            row, first_column = divmod(begin, columns)
            end_column = min(columns, first_column + end - begin)
            low = max(first_column, slice_start)
            high = min(end_column, slice_start + width)
            if low < high:
                values = blocks[:, begin - block_start : end - block_start].unflatten(
                    1, (-1, end_column - first_column)
                )
                self._num_missing -= _copy_blocks(
                    rows[:, low - slice_start : high - slice_start],
                    values[..., low - first_column : high - first_column],
                    offset=row - first_hf_row,
                    block_rows=block_rows,
                )
        if not self._num_missing and self.tensor.values is None:
            self._pack_rows()

    def _destination(self, columns: int) -> Tensor:
        """Returns the tensor [rows, columns] to write the HF rows into.

        It is the engine's own weight or, if packing has emptied that, a buffer that is packed once
        it is full."""
        values = self.tensor.values
        weight = self._layer.weight if values is None else values
        num_rows = self.tensor.num_rows
        # True if packing has emptied the plain weight.
        if values is None and not weight.numel():
            return torch.empty(num_rows, columns, dtype=self._dtype, device=weight.device)
        rows: Tensor = weight.data.view(-1, columns)
        # vLLM pads a vocabulary with rows of zeros, which a sleep may have lost.
        rows[num_rows:].zero_()
        return rows

    def _pack_rows(self) -> None:
        """Packs the rows, which are complete now, and frees the buffer if they were in one."""
        layer = self._layer
        parameter = layer.weight
        # vLLM packs `layer.weight`: put the buffer there.
        if not parameter.numel():
            layer.weight = nn.Parameter(cast(Tensor, self._rows), requires_grad=False)
        self._rows = None
        _pack(layer)
        # Packing emptied the weight. Put the old parameter back: others may refer to that object.
        if not layer.weight.numel():
            layer.weight = parameter


def _pack(layer: Any) -> None:
    """Has vLLM pack the layer's plain weight."""
    # Free the old packed copy first, so that the new one reuses its memory, whose pages are mapped.
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)


def _copy_blocks(rows: Tensor, values: Tensor, offset: int, block_rows: int) -> int:
    """Copies `values` [ranks, rows, columns] into `rows`. Returns the number of copied elements.

    Row i of rank r goes to row r * block_rows + i + offset of `rows`. Values whose target would lie
    outside `rows` are skipped. All ranks whose values lie inside are copied at once."""
    num_ranks, num_rows, columns = values.shape
    # The ranks whose values all lie inside `rows`, and the ranks with at least one row inside.
    inside = range(
        max(0, -(offset // block_rows)),
        min(num_ranks - 1, (len(rows) - offset - num_rows) // block_rows) + 1,
    )
    touched = range(
        max(0, (-offset - num_rows) // block_rows + 1),
        min(num_ranks - 1, (len(rows) - 1 - offset) // block_rows) + 1,
    )
    num_copied = 0
    if inside:
        # The ranks' targets lie `block_rows` rows apart, so one strided view covers them all.
        first_block = rows[inside.start * block_rows + offset :]
        target = first_block.as_strided(
            (len(inside), num_rows, columns), (block_rows * rows.stride(0), rows.stride(0), 1)
        )
        target.copy_(values[inside.start : inside.stop])
        num_copied += len(inside) * num_rows * columns
    # The first and the last touched rank may have some rows outside `rows`: copy the others.
    for rank in touched:
        if rank not in inside:
            first_row = rank * block_rows + offset
            start = max(first_row, 0)
            end = min(first_row + num_rows, len(rows))
            rows[start:end].copy_(values[rank, start - first_row : end - first_row])
            num_copied += (end - start) * columns
    return num_copied


def _stretches(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Splits the elements from `begin` to `end` of a matrix with `columns` columns at row bounds.

    Yields up to three (begin, end) ranges: the rest of a row that `begin` cuts, the whole rows, and
    the start of a row that `end` cuts. Empty ranges are left out."""
    start = min(end, -(-begin // columns) * columns)
    bounds = (begin, start, max(start, end // columns * columns), end)
    return ((low, high) for low, high in pairwise(bounds) if low < high)


def _tensors_of_direct_layers(
    model: nn.Module, tensors: Sequence[EngineTensor], names: Mapping[str, str], dtype: torch.dtype
) -> list[EngineTensor]:
    """Returns the engine tensors of the layers that can be filled by copies alone.

    Each tensor of such a layer is plain, or packed by one call on the layer. No HF tensor in it is
    also needed by a layer that vLLM's loader must fill. Returns [] if the model has a layer that
    derives more matrices from the weights of other layers after loading (MLA)."""
    # vLLM's method of a layer of experts is a module too, which finishes that layer alone: copies
    # need it no more than the methods of other layers.
    methods = {id(getattr(layer, "quant_method", None)) for layer in model.modules()}
    if any(
        hasattr(layer, "process_weights_after_loading")
        and id(layer) not in methods
        and not _is_attention(layer)
        for layer in model.modules()
    ):
        return []
    copyable = [tensor for tensor in tensors if _is_copyable(tensor, dtype)]
    filled = {id(tensor.values) for tensor in copyable}
    filled |= {
        id(tensor.layer.weight)
        for tensor in copyable
        if tensor.values is None and not _is_vocabulary(tensor.layer)
    }
    loader_layers = {
        id(layer)
        for layer in model.modules()
        if any(id(parameter) not in filled for parameter in layer.parameters(recurse=False))
    }
    loader_layers |= {id(tensor.layer) for tensor in tensors if not _is_copyable(tensor, dtype)}
    # A layer that shares an HF tensor with a layer of the loader must be filled by the loader too.
    # That can affect a third layer in turn: repeat until nothing changes.
    while True:
        shared = {
            names[tensor_part.name]
            for tensor in tensors
            if id(tensor.layer) in loader_layers
            for tensor_part in tensor.all_parts
        }
        sharing_layers = {
            id(tensor.layer)
            for tensor in tensors
            if any(names[tensor_part.name] in shared for tensor_part in tensor.all_parts)
        }
        if sharing_layers <= loader_layers:
            return [tensor for tensor in tensors if id(tensor.layer) not in loader_layers]
        loader_layers |= sharing_layers


def _is_copyable(tensor: EngineTensor, dtype: torch.dtype) -> bool:
    """Returns True if copies alone can fill the tensor with values of `dtype`."""
    layer = tensor.layer
    values = tensor.values
    if layer is None:
        return False
    if values is None:
        # A packed weight of another format, as of GLM4-MoE's routers, is left to vLLM's loader.
        return hasattr(layer, "cpu_linear") and bool(layer.weight.dtype == dtype)
    # The values must arrive bit by bit: no integer codes, no narrower float.
    is_exact = (
        values.is_floating_point() and values.itemsize >= dtype.itemsize and values.is_contiguous()
    )
    return is_exact and (tensor.num_rows == num_rows(values.shape) or _is_vocabulary(layer))


def _is_vocabulary(layer: object) -> bool:
    """Returns True for an embedding or an lm_head, whose rows may be padded."""
    return hasattr(layer, "org_vocab_size")


def _is_attention(layer: nn.Module) -> bool:
    """Returns True for vLLM's plain attention layer, which has no parameters."""
    return type(layer).__name__ == "Attention" and not list(layer.parameters(recurse=False))
