"""Where the rows of HF's tensors lie in vLLM's parameters, by the class of the layer.

The tables `_readers` and `_row_layouts` hold for a class and its subclasses, unless a nearer class
is in them. A parameter of any other layer is taken to be the whole HF tensor of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class TensorPart:
    """Consecutive rows of one HF tensor within an engine parameter."""

    name: str
    """Name in the HF checkpoint."""
    num_hf_rows: int
    """Rows of the whole HF tensor."""
    hf_start: int
    """First row of the part in the HF tensor."""
    start: int
    """First row of the part in the engine's parameter."""
    num_rows: int


@dataclass(frozen=True)
class EngineTensor:
    """What one parameter of this rank's engine holds of the HF checkpoint, and how to read it."""

    engine_name: str
    parts: tuple[TensorPart, ...]
    values: Tensor | None
    """[rows, columns] if the layout is plain."""
    product: Callable[[Tensor], Tensor] | None = None
    """[columns] -> [rows] if the weights are packed or quantised."""
    is_quantised: bool = False
    column_slice: int = 0
    """Index of the slice of the HF tensor's columns, of `num_column_slices` equal ones."""
    num_column_slices: int = 1
    layer: nn.Module | None = None
    """The layer that owns the parameter. None for an adapter."""

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.parts)


class _Rows(NamedTuple):
    """Rows of one HF tensor in a linear layer of this rank."""

    num_rows: int
    num_hf_rows: int
    block: int
    """Index of the block of `num_rows` rows in the HF tensor."""


_Reader = Callable[[str, Any, Any], list[EngineTensor]]  # (path, layer, model)


def engine_tensors(model: nn.Module, hf_names: Collection[str]) -> list[EngineTensor]:
    """Returns what each parameter of this rank's engine holds, alike in number on all ranks.

    `hf_names` are the policy's parameters. Some of vLLM's classes rename them, or split what is
    fused in HF (GLM4)."""
    readers = _readers()
    renamed = _hf_names_by_engine_name(model, hf_names)
    tensors: list[EngineTensor] = []
    # A tied lm_head may share its parameter with the embedding.
    seen: set[int] = set()
    for path, layer in model.named_modules():
        read = _of_nearest_class(readers, layer)
        # vLLM wraps a layer that can take an adapter.
        for tensor in read(path.removesuffix(".base_layer"), layer, model):
            if tensor.values is None or id(tensor.values) not in seen:
                rename_parts = _rename_parts(tensor.engine_name, tensor.parts, renamed)
                tensors.append(replace(tensor, parts=rename_parts, layer=layer))
            seen.add(id(tensor.values))
    return tensors


def _hf_names_by_engine_name(model: Any, hf_names: Collection[str]) -> dict[str, str]:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    # vLLM has get_rename_mapper from 0.30 on, get_unstacked_mapper in 0.28; before, no mapper
    # stacks tensors.
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        mapper = getattr(mapper, name)() if hasattr(mapper, name) else mapper
    return {
        renamed: name
        for name in hf_names
        for renamed in (mapper.apply_list([name]) if mapper else [name])
    }


def _rename_parts(
    engine_name: str, pieces: tuple[TensorPart, ...], hf_names: Mapping[str, str]
) -> tuple[TensorPart, ...]:
    """Returns the parts under HF's names. HF may have one fused tensor for them (gate_up_proj)."""
    fused = hf_names.get(engine_name)
    if fused is None or any(piece.name in hf_names for piece in pieces):
        return tuple(replace(piece, name=hf_names.get(piece.name, piece.name)) for piece in pieces)
    total = sum(piece.num_hf_rows for piece in pieces)
    renamed = []
    top = 0
    for piece in pieces:
        renamed.append(replace(piece, name=fused, num_hf_rows=total, hf_start=top + piece.hf_start))
        top += piece.num_hf_rows
    return tuple(renamed)


def _readers() -> dict[type, _Reader]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return {
        LinearBase: _linear_tensors,
        VocabParallelEmbedding: _vocabulary_tensors,
        nn.Module: _plain_tensors,
    }


def _row_layouts() -> dict[type, Callable[[Any], list[_Rows]]]:
    """Returns, by linear class, which rows of HF's layers this rank holds, top to bottom."""
    from vllm.model_executor.layers import linear

    return {
        linear.QKVParallelLinear: _qkv_rows,
        linear.MergedColumnParallelLinear: lambda layer: [
            _Rows(size // layer.tp_size, size, layer.tp_rank) for size in layer.output_sizes
        ],
        linear.ColumnParallelLinear: lambda layer: [
            _Rows(layer.output_size // layer.tp_size, layer.output_size, layer.tp_rank)
        ],
        linear.LinearBase: lambda layer: [_Rows(layer.output_size, layer.output_size, 0)],
    }


def _of_nearest_class(table: dict[type, T], layer: object) -> T:
    return next(table[base] for base in type(layer).__mro__ if base in table)


def _qkv_rows(layer: Any) -> list[_Rows]:
    # With fewer KV heads than ranks, neighbours share one.
    kv_rank = layer.tp_rank // layer.num_kv_head_replicas
    size = layer.head_size
    value_size = getattr(layer, "v_head_size", size)
    return [
        _Rows(layer.num_heads * size, layer.total_num_heads * size, layer.tp_rank),
        _Rows(layer.num_kv_heads * size, layer.total_num_kv_heads * size, kv_rank),
        _Rows(layer.num_kv_heads * value_size, layer.total_num_kv_heads * value_size, kv_rank),
    ]


def _plain_tensors(path: str, layer: nn.Module, model: Any) -> list[EngineTensor]:
    return [
        EngineTensor(name, (TensorPart(name, len(values), 0, 0, len(values)),), values)
        for name, values in layer.named_parameters(path, recurse=False)
    ]


def _linear_tensors(path: str, layer: Any, model: Any) -> list[EngineTensor]:
    """Returns weight and bias: this rank's slice, of one or several of HF's layers."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    leaf = path.rpartition(".")[2]
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]
    rows = _of_nearest_class(_row_layouts(), layer)(layer)
    is_split_by_column = isinstance(layer, RowParallelLinear)
    is_plain = not (hasattr(layer, "cpu_linear") or _is_quantised(layer))
    weight = EngineTensor(
        f"{path}.weight",
        fused_rows([f"{name}.weight" for name in names], rows),
        values=layer.weight if is_plain else None,
        product=None if is_plain else _product(layer),
        is_quantised=_is_quantised(layer),
        column_slice=layer.tp_rank if is_split_by_column else 0,
        num_column_slices=layer.tp_size if is_split_by_column else 1,
    )
    if layer.bias is None:
        return [weight]
    bias_parts = fused_rows([f"{name}.bias" for name in names], rows)
    return [weight, EngineTensor(f"{path}.bias", bias_parts, layer.bias)]


def _vocabulary_tensors(path: str, layer: Any, model: Any) -> list[EngineTensor]:
    """Returns an embedding or an lm_head.

    It is split by vocabulary over the ranks and padded at each rank's end. On the CPU each has a
    packed copy beside the plain one, which the two may share: the embedding reads the plain copy,
    the lm_head the packed one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    # A model without lm_head uses the embedding itself as head (Gemma 2, Command R).
    head = getattr(model, "lm_head", None)
    is_head = isinstance(layer, ParallelLMHead) or layer is head or head is None
    name = f"{path}.weight"
    rows = layer.shard_indices
    start = rows.org_vocab_start_index
    num_rows = rows.org_vocab_end_index - start
    pieces = (TensorPart(name, layer.org_vocab_size, start, 0, num_rows),)
    is_quantised = _is_quantised(layer)
    tensors = []
    if (is_head and hasattr(layer, "cpu_linear")) or is_quantised:
        tensors.append(EngineTensor(name, pieces, None, _product(layer), is_quantised))
    if not is_quantised:
        tensors.append(EngineTensor(name, pieces, layer.weight))
    return tensors


def adapter_tensors(model: Any, rank: int) -> list[EngineTensor]:
    """Returns A and B of each HF layer in vLLM's linear layers, split as its weight is."""
    from vllm.model_executor.layers.linear import LinearBase

    tensors = []
    for path, wrapper in model.lora_manager.modules.items():
        # Older versions also wrap the embedding and the lm_head.
        if not isinstance(wrapper.base_layer, LinearBase):
            continue
        base = _linear_tensors(path, wrapper.base_layer, model)[0]
        slices = [base.parts] if wrapper.n_slices == 1 else [(piece,) for piece in base.parts]
        for pieces, lora_a, lora_b in zip(
            slices, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True
        ):
            layer = pieces[0].name.removesuffix(".weight")
            name_a = f"{layer}.lora_A.weight"
            name_b = f"{layer}.lora_B.weight"
            parts_b = tuple(
                replace(piece, name=name_b, start=piece.start - pieces[0].start) for piece in pieces
            )
            # vLLM stacks A as [adapter, 1, largest rank, columns], and B as
            # [adapter, 1, rows, largest rank].
            tensors.append(
                EngineTensor(
                    name_a,
                    (TensorPart(name_a, rank, 0, 0, rank),),
                    lora_a[0, 0, :rank],
                    column_slice=base.column_slice,
                    num_column_slices=base.num_column_slices,
                )
            )
            tensors.append(EngineTensor(name_b, parts_b, lora_b[0, 0, :, :rank]))
    return tensors


def fused_rows(
    names: Sequence[str], layout: Sequence[tuple[int, int, int]]
) -> tuple[TensorPart, ...]:
    """Returns the rows of HF's tensors `names` in a fused parameter, one below the other.

    `layout` has an entry (rows held, HF rows, block) for each part. There is one name for each
    part, or a single name if the checkpoint is fused too (Phi-3)."""
    is_fused_on_disk = len(names) < len(layout)
    total = sum(num_hf_rows for _, num_hf_rows, _ in layout)
    pieces = []
    start = 0
    top = 0  # rows of the parts above this one, in a tensor that is fused on disk
    for number, (num_rows, num_hf_rows, block) in enumerate(layout):
        hf_start = block * num_rows
        if is_fused_on_disk:
            pieces.append(TensorPart(names[0], total, top + hf_start, start, num_rows))
        else:
            pieces.append(TensorPart(names[number], num_hf_rows, hf_start, start, num_rows))
        start += num_rows
        top += num_hf_rows
    return tuple(pieces)


def _is_quantised(layer: Any) -> bool:
    return not type(layer.quant_method).__name__.startswith("Unquantized")


def _product(layer: Any) -> Callable[[Tensor], Tensor]:
    """Returns the product of the layer's weight with a vector, without bias or sum over ranks."""
    return lambda vector: layer.quant_method.apply(
        layer, vector.to(next(layer.parameters()).device)[None], None
    )[0]
