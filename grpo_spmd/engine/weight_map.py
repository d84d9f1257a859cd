"""Where the rows of HF's tensors lie in vLLM's parameters, by the class of the layer.

The tables `_readers` and `_row_layouts` hold for a class and those derived from it, unless a nearer one is in them. A
parameter of any other layer is taken to be the whole HF tensor of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from grpo_spmd.model.families.build import as_in_hf, hf_names_by_engine_name

T = TypeVar("T")


@dataclass(frozen=True)
class TensorPart:
    """Consecutive rows of one HF tensor within an engine parameter."""

    name: str  # in the HF checkpoint
    num_hf_rows: int  # of the whole tensor there
    hf_start: int  # their first row there
    start: int  # and in the engine's parameter
    num_rows: int


@dataclass(frozen=True)
class EngineTensor:
    """What one parameter of this rank's engine holds of the HF checkpoint, and how to look at it."""

    engine_name: str
    parts: tuple[TensorPart, ...]
    values: Tensor | None  # [rows, columns], where the layout is plain
    product: Callable[[Tensor], Tensor] | None = (
        None  # [columns] -> [rows], where the weights are packed or quantised
    )
    is_quantised: bool = False
    column_slice: int = 0  # which of so many equal slices of the HF tensor's columns it holds
    num_column_slices: int = 1
    layer: nn.Module | None = None  # that it is in, unless it is an adapter


Rows = tuple[
    int, int, int
]  # of one HF tensor: how many are held here, how many there are, which block of that size
Reader = Callable[[str, Any, Any], list[EngineTensor]]  # of a layer: its path, itself, the model


def engine_tensors(model: nn.Module, hf_names: Collection[str]) -> list[EngineTensor]:
    """What every parameter of this rank's engine holds, the same in number and kind on all ranks. `hf_names`: of the
    policy's parameters, which some of vLLM's classes rename, or fuse where they are fused already (GLM4)."""
    readers, renamed = _readers(), hf_names_by_engine_name(model, hf_names)
    found, seen = (
        list[EngineTensor](),
        set[int](),
    )  # a tied lm_head may share its parameter with the embedding
    for path, layer in model.named_modules():
        read = _of_nearest_class(readers, layer)
        for tensor in read(
            path.removesuffix(".base_layer"), layer, model
        ):  # wrapped, where it can take an adapter
            if tensor.values is None or id(tensor.values) not in seen:
                found.append(
                    replace(
                        tensor,
                        parts=as_in_hf(tensor.engine_name, tensor.parts, renamed),
                        layer=layer,
                    )
                )
            seen.add(id(tensor.values))
    return found


def _readers() -> dict[type, Reader]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return {
        LinearBase: _linear_tensors,
        VocabParallelEmbedding: _vocabulary_tensors,
        nn.Module: _plain_tensors,
    }


def _row_layouts() -> dict[type, Callable[[Any], list[Rows]]]:
    """Of a linear layer: which rows this rank holds of each of HF's layers in it, top to bottom."""
    from vllm.model_executor.layers import linear

    return {
        linear.QKVParallelLinear: _qkv_rows,
        linear.MergedColumnParallelLinear: lambda of: [
            (n // of.tp_size, n, of.tp_rank) for n in of.output_sizes
        ],
        linear.ColumnParallelLinear: lambda of: [
            (of.output_size // of.tp_size, of.output_size, of.tp_rank)
        ],
        linear.LinearBase: lambda of: [(of.output_size, of.output_size, 0)],
    }


def _of_nearest_class(table: dict[type, T], layer: object) -> T:
    return next(table[of] for of in type(layer).__mro__ if of in table)


def _qkv_rows(layer: Any) -> list[Rows]:
    kv_rank = (
        layer.tp_rank // layer.num_kv_head_replicas
    )  # with fewer KV heads than ranks, neighbours share one
    size, value_size = layer.head_size, getattr(layer, "v_head_size", layer.head_size)
    return [
        (layer.num_heads * size, layer.total_num_heads * size, layer.tp_rank),
        (layer.num_kv_heads * size, layer.total_num_kv_heads * size, kv_rank),
        (layer.num_kv_heads * value_size, layer.total_num_kv_heads * value_size, kv_rank),
    ]


def _plain_tensors(path: str, layer: nn.Module, model: Any) -> list[EngineTensor]:
    parameters = layer.named_parameters(path, recurse=False)
    return [
        EngineTensor(name, (TensorPart(name, len(p), 0, 0, len(p)),), p) for name, p in parameters
    ]


def _linear_tensors(path: str, layer: Any, model: Any) -> list[EngineTensor]:
    """Weight and bias: one rank's slice, maybe of several of HF's layers."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    leaf = path.rpartition(".")[2]
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]
    rows = _of_nearest_class(_row_layouts(), layer)(layer)
    columns = (layer.tp_rank, layer.tp_size) if isinstance(layer, RowParallelLinear) else (0, 1)
    is_plain = not (hasattr(layer, "cpu_linear") or _is_quantised(layer))
    values, product = (layer.weight, None) if is_plain else (None, _product(layer))
    parts = fused_rows([f"{name}.weight" for name in names], rows)
    found = [EngineTensor(f"{path}.weight", parts, values, product, _is_quantised(layer), *columns)]
    if layer.bias is not None:
        found.append(
            EngineTensor(
                f"{path}.bias", fused_rows([f"{name}.bias" for name in names], rows), layer.bias
            )
        )
    return found


def _vocabulary_tensors(path: str, layer: Any, model: Any) -> list[EngineTensor]:
    """An embedding or an lm_head, split by vocabulary over the ranks and padded at each rank's end. On the CPU each has
    a packed copy beside the plain one, which they may share: the embedding reads the plain, the lm_head the packed."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = getattr(
        model, "lm_head", None
    )  # where there is none, the embedding itself is (Gemma 2, Command R)
    is_head = isinstance(layer, ParallelLMHead) or layer is head or head is None
    name, rows = f"{path}.weight", layer.shard_indices
    first = rows.org_vocab_start_index
    parts = (TensorPart(name, layer.org_vocab_size, first, 0, rows.org_vocab_end_index - first),)
    is_quantised, found = _is_quantised(layer), []
    if (is_head and hasattr(layer, "cpu_linear")) or is_quantised:
        found.append(EngineTensor(name, parts, None, _product(layer), is_quantised))
    if not is_quantised:
        found.append(EngineTensor(name, parts, layer.weight))
    return found


def adapter_tensors(model: Any, rank: int) -> list[EngineTensor]:
    """A and B of each HF layer in vLLM's linear layers, fused and split over ranks as its weight is."""
    from vllm.model_executor.layers.linear import LinearBase

    found = []
    for path, wrapper in model.lora_manager.modules.items():
        if not isinstance(
            wrapper.base_layer, LinearBase
        ):  # older versions also wrap the embedding and the lm_head
            continue
        base = _linear_tensors(path, wrapper.base_layer, model)[0]
        columns = base.column_slice, base.num_column_slices
        slices = [base.parts] if wrapper.n_slices == 1 else [(part,) for part in base.parts]
        for parts, lora_a, lora_b in zip(
            slices, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True
        ):
            layer = parts[0].name.removesuffix(".weight")
            a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
            # [adapter, 1, largest rank, columns] and [adapter, 1, rows, largest rank]
            values_a, values_b = lora_a[0, 0, :rank], lora_b[0, 0, :, :rank]
            parts_b = tuple(
                replace(part, name=b, start=part.start - parts[0].start) for part in parts
            )
            found.append(
                EngineTensor(a, (TensorPart(a, rank, 0, 0, rank),), values_a, None, False, *columns)
            )
            found.append(EngineTensor(b, parts_b, values_b))
    return found


def fused_rows(names: Sequence[str], layout: Sequence[Rows]) -> tuple[TensorPart, ...]:
    """Which rows of HF's tensors `names` a fused parameter holds, one below the other. There is one name, and an entry
    of `layout`, for each part; a single name where the checkpoint is fused too (Phi-3)."""
    is_fused_on_disk, total = len(names) < len(layout), sum(num for _, num, _ in layout)
    parts, start, above = [], 0, 0
    for number, (size, num_hf_rows, block) in enumerate(layout):
        if is_fused_on_disk:
            parts.append(TensorPart(names[0], total, above + block * size, start, size))
        else:
            parts.append(TensorPart(names[number], num_hf_rows, block * size, start, size))
        start, above = start + size, above + num_hf_rows
    return tuple(parts)


def _is_quantised(layer: Any) -> bool:
    return not type(layer.quant_method).__name__.startswith("Unquantized")


def _product(layer: Any) -> Callable[[Tensor], Tensor]:
    """The layer's weight applied to one vector, without its bias and without the sum over ranks."""
    return lambda vector: layer.quant_method.apply(
        layer, vector.to(next(layer.parameters()).device)[None], None
    )[0]
