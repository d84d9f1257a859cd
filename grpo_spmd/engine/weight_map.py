"""Where the rows of HF's tensors lie in vLLM's parameters, by the class of the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class HeldRows:
    """Consecutive rows of one HF tensor within an engine parameter."""

    name: str  # in the HF checkpoint
    num_hf_rows: int  # of the whole tensor there
    hf_start: int  # their first row there
    start: int  # and in the engine's parameter
    num_rows: int


@dataclass(frozen=True)
class HeldTensor:
    """What one parameter of this rank's engine holds of the HF checkpoint, and how to look at it."""

    engine_name: str
    parts: tuple[HeldRows, ...]
    values: Tensor | None  # [rows, columns], where the layout is plain
    product: Callable[[Tensor], Tensor] | None = None  # [columns] -> [rows], where the weights are packed or quantised
    quantised: bool = False
    column_slice: int = 0  # it holds this one of so many equal slices of the HF tensor's columns
    num_column_slices: int = 1


def held_by_linear(path: str, module: Any, fused: dict[str, list[str]]) -> list[HeldTensor]:
    """The weight and the bias of a vLLM linear layer, which may be a fusion of several of HF's and one rank's slice of
    it."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    leaf = path.rpartition(".")[2]
    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]
    rank, ranks = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):  # with fewer KV heads than ranks, neighbours hold the same head
        value_size, kv_rank = getattr(module, "v_head_size", module.head_size), rank // module.num_kv_head_replicas
        layout = [
            (module.num_heads * module.head_size, module.total_num_heads * module.head_size, rank),
            (module.num_kv_heads * module.head_size, module.total_num_kv_heads * module.head_size, kv_rank),
            (module.num_kv_heads * value_size, module.total_num_kv_heads * value_size, kv_rank),
        ]
    elif isinstance(module, MergedColumnParallelLinear):
        layout = [(size // ranks, size, rank) for size in module.output_sizes]
    elif isinstance(module, ColumnParallelLinear):
        layout = [(module.output_size // ranks, module.output_size, rank)]
    else:
        layout = [(module.output_size, module.output_size, 0)]
    parts = fused_rows(names, layout)
    columns = (rank, ranks) if isinstance(module, RowParallelLinear) else (0, 1)
    packed, quantised = hasattr(module, "cpu_linear"), not type(module.quant_method).__name__.startswith("Unquantized")
    values = None if packed or quantised else module.weight
    product = None if values is not None else _product(module)
    held = [HeldTensor(f"{path}.weight", _suffixed(parts, "weight"), values, product, quantised, *columns)]
    if module.bias is not None:
        held.append(HeldTensor(f"{path}.bias", _suffixed(parts, "bias"), module.bias))
    return held


def held_by_adapters(path: str, wrapper: Any, fused: dict[str, list[str]], rank: int) -> list[HeldTensor]:
    """A and B of each HF layer in a vLLM linear layer; they are fused, and split over ranks, as its weight is."""
    base = held_by_linear(path, wrapper.base_layer, fused)[0]
    parts = [base.parts] if wrapper.n_slices == 1 else [(part,) for part in base.parts]
    held = []
    for rows, lora_a, lora_b in zip(parts, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True):
        layer = rows[0].name.removesuffix(".weight")
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        # [adapter, 1, largest rank, columns] and [adapter, 1, rows, largest rank]
        values_a, values_b = lora_a[0, 0, :rank], lora_b[0, 0, :, :rank]
        held.append(
            HeldTensor(
                a, (HeldRows(a, rank, 0, 0, rank),), values_a, None, False, base.column_slice, base.num_column_slices
            )
        )
        held.append(
            HeldTensor(b, tuple(replace(part, name=b, start=part.start - rows[0].start) for part in rows), values_b)
        )
    return held


def held_by_vocabulary(path: str, module: Any, is_head: bool, seen: set[int]) -> list[HeldTensor]:
    """An embedding or an lm_head, split by vocabulary over the ranks and padded at each rank's end.

    On the CPU both have a packed copy, also where they share the plain one: the embedding reads the plain, the lm_head
    the packed.
    """
    rows = module.shard_indices
    first = rows.org_vocab_start_index
    parts = (HeldRows(f"{path}.weight", module.org_vocab_size, first, 0, rows.org_vocab_end_index - first),)
    quantised = not type(module.quant_method).__name__.startswith("Unquantized")
    held = []
    if (is_head and hasattr(module, "cpu_linear")) or quantised:
        held.append(HeldTensor(f"{path}.weight", parts, None, _product(module), quantised))
    if not quantised and id(module.weight) not in seen:
        held.append(HeldTensor(f"{path}.weight", parts, module.weight))
        seen.add(id(module.weight))
    return held


def fused_rows(names: Sequence[str], layout: Sequence[tuple[int, int, int]]) -> tuple[HeldRows, ...]:
    """Which rows of HF's tensors `names` a fused parameter holds, one below the other.

    Args:
        names: one for each part of the fusion; a single one where the checkpoint is fused too (Phi-3).
        layout: for each part (rows held here, rows in all, which block of that many rows is held here).
    """
    fused_on_disk = len(names) < len(layout)
    rows = []
    start = above = 0
    for number, (size, total, block) in enumerate(layout):
        if fused_on_disk:
            rows.append(HeldRows(names[0], sum(total for _, total, _ in layout), above + block * size, start, size))
        else:
            rows.append(HeldRows(names[number], total, block * size, start, size))
        start, above = start + size, above + total
    return tuple(rows)


def _suffixed(parts: tuple[HeldRows, ...], leaf: str) -> tuple[HeldRows, ...]:
    return tuple(replace(part, name=f"{part.name}.{leaf}") for part in parts)


def _product(module: Any) -> Callable[[Tensor], Tensor]:
    """What the layer multiplies by, applied to one vector: without its bias, and without the sum over ranks."""

    def product(vector: Tensor) -> Tensor:
        on_device = vector.to(next(module.parameters()).device)
        out: Tensor = module.quant_method.apply(module, on_device[None], None)
        return out[0]

    return product
