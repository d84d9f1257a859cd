"""Says which rows of HF's tensors lie where in vLLM's parameters, by the class of the layer.

vLLM fuses several HF tensors into one parameter (q, k and v), and splits them over the ranks of an
engine. A part is a run of rows of one HF tensor in such a parameter. A parameter of a layer whose
class is not known is taken to be the whole HF tensor of its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_spmd.model.families.build import SavedLayout

# Multiplies the weight of an engine's layer with a vector, by the layer's own kernel: a packed
# weight cannot be read in any other way.
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorPart:
    """Describes consecutive rows of one HF tensor in an engine parameter."""

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
    """Describes which HF rows one parameter of this rank's engine holds, and how to read them."""

    engine_name: str
    parts: tuple[TensorPart, ...]
    """The HF rows in the parameter, top to bottom."""
    values: Tensor | None
    """The parameter [rows, columns]. None if vLLM has packed it (stored its values in the order in
    which a kernel reads them)."""
    product: Product | None = None
    """Returns the product of a packed weight with a vector, [columns] -> [rows]. None if the
    parameter is not packed."""
    column_slice: int = 0
    """Index of the slice of the HF tensor's columns, of `num_column_slices` equal ones."""
    num_column_slices: int = 1
    layer: Any = None
    """The layer that owns the parameter. None for an adapter."""
    gate_up: TensorPart | None = None
    """For packed experts: the rows of the tensor that the experts apply before that of `parts`.
    Then `product` is what each of them computes of a vector."""

    @property
    def all_parts(self) -> tuple[TensorPart, ...]:
        """All HF rows that the comparison of this parameter covers."""
        return self.parts if self.gate_up is None else (*self.parts, self.gate_up)

    @property
    def num_rows(self) -> int:
        """Number of HF rows in the parameter, without padding."""
        return sum(tensor_part.num_rows for tensor_part in self.parts)


class _Rows(NamedTuple):
    """Describes the rows of one HF tensor in a linear layer of this rank."""

    num_rows: int
    num_hf_rows: int
    block: int
    """Index of the block of `num_rows` rows in the HF tensor."""


def engine_tensors(
    model: nn.Module, hf_names: Collection[str], saved: SavedLayout
) -> list[EngineTensor]:
    """Returns a description of each parameter of this rank's engine: which HF rows it holds.

    All ranks return equally many. `hf_names` are the names of the policy's parameters; `saved` has
    those that checkpoints store under other names. Some of vLLM's model classes rename parameters,
    or split a tensor that is fused in HF (GLM4)."""
    renamed = _hf_names_by_engine_name(model, hf_names, saved)
    experts = _experts_by_layer(hf_names)
    tensors: list[EngineTensor] = []
    # A tied lm_head may share its parameter with the embedding.
    seen: set[int] = set()
    for path, layer in model.named_modules():
        if hasattr(layer, "w13_weight"):
            tensors += _experts_tensors(path, layer, experts[_layer_number(path)])
            continue
        # vLLM wraps a layer that can take an adapter.
        for tensor in _layer_tensors(path.removesuffix(".base_layer"), layer, model):
            if tensor.values is None or id(tensor.values) not in seen:
                renamed_parts = _rename_parts(tensor.engine_name, tensor.parts, renamed)
                tensors.append(replace(tensor, parts=renamed_parts, layer=layer))
            seen.add(id(tensor.values))
    return tensors


def _hf_names_by_engine_name(
    model: Any, hf_names: Collection[str], saved: SavedLayout
) -> dict[str, str]:
    """Returns the HF name of each parameter, by the name that vLLM's model has for it."""
    # In Granite-MoE's class the decoder inside has the mapper, not the causal LM.
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        mapper = getattr(getattr(model, "model", None), "hf_to_vllm_mapper", None)
    # vLLM has get_rename_mapper from 0.30 on, get_unstacked_mapper in 0.28; before, no mapper
    # stacks tensors.
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        mapper = getattr(mapper, name)() if hasattr(mapper, name) else mapper
    # vLLM's models are written for the names in checkpoints.
    on_disk = {name: saved[name][0].name if name in saved else name for name in hf_names}
    return {
        renamed: name
        for name, stored in on_disk.items()
        for renamed in (mapper.apply_list([stored]) if mapper else [stored])
    }


def _rename_parts(
    engine_name: str, tensor_parts: tuple[TensorPart, ...], hf_names: Mapping[str, str]
) -> tuple[TensorPart, ...]:
    """Returns the parts of an engine parameter with their names replaced by HF's.

    `hf_names` has HF's name by vLLM's. If HF has one fused tensor for the whole parameter (such as
    gate_up_proj), the parts become rows of that tensor."""
    fused = hf_names.get(engine_name)
    if fused is None or any(tensor_part.name in hf_names for tensor_part in tensor_parts):
        return tuple(
            replace(tensor_part, name=hf_names.get(tensor_part.name, tensor_part.name))
            for tensor_part in tensor_parts
        )
    return _parts_of_one(fused, tensor_parts)


def _parts_of_one(name: str, tensor_parts: Sequence[TensorPart]) -> tuple[TensorPart, ...]:
    """Returns the same parts as rows of the single HF tensor `name`.

    This tensor has the HF tensors of the parts one below the other, in this order."""
    tops = list(accumulate((part.num_hf_rows for part in tensor_parts), initial=0))
    return tuple(
        replace(tensor_part, name=name, num_hf_rows=tops[-1], hf_start=top + tensor_part.hf_start)
        for top, tensor_part in zip(tops, tensor_parts, strict=False)
    )


def _layer_tensors(path: str, layer: nn.Module, model: Any) -> list[EngineTensor]:
    """Returns a description of each parameter of the layer itself, without those of its
    submodules. `path` is the layer's name in vLLM's `model`."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(layer, LinearBase):
        return _linear_tensors(path, layer, model)
    if isinstance(layer, VocabParallelEmbedding):
        return _vocabulary_tensors(path, layer, model)
    # A gated delta net (a recurrent layer) has parameters with one number for each head, which are
    # split over the ranks. A layer without tp_rank has its parameters whole on each rank.
    rank, num_ranks = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    return [
        EngineTensor(name, fused_rows([name], [(len(rows), len(rows) * num_ranks, rank)]), rows)
        for name, rows in layer.named_parameters(path, recurse=False)
    ]


def _linear_rows(layer: Any) -> list[_Rows]:
    """Returns which rows of HF's linear layers this rank holds in vLLM's `layer`, top to bottom:
    one entry for each HF layer that is fused in it."""
    from vllm.model_executor.layers import linear

    if isinstance(layer, linear.QKVParallelLinear):
        # With fewer KV heads than ranks, neighbours share one.
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        size = layer.head_size
        value_size = getattr(layer, "v_head_size", size)
        return [
            _Rows(layer.num_heads * size, layer.total_num_heads * size, layer.tp_rank),
            _Rows(layer.num_kv_heads * size, layer.total_num_kv_heads * size, kv_rank),
            _Rows(layer.num_kv_heads * value_size, layer.total_num_kv_heads * value_size, kv_rank),
        ]
    if not isinstance(layer, linear.ColumnParallelLinear):
        return [_Rows(layer.output_size, layer.output_size, 0)]
    # The projections of an MLP may be fused.
    sizes = getattr(layer, "output_sizes", [layer.output_size])
    return [_Rows(size // layer.tp_size, size, layer.tp_rank) for size in sizes]


def _convolution_rows(layer: Any, parent: Any) -> list[_Rows]:
    """Returns which channels of a convolution this rank holds: keys, queries and values of a gated
    delta net, each split over the ranks."""
    if not hasattr(parent, "key_dim"):
        return _linear_rows(layer)
    sizes = (parent.key_dim, parent.key_dim, parent.value_dim)
    return [_Rows(size // layer.tp_size, size, layer.tp_rank) for size in sizes]


def _linear_tensors(path: str, layer: Any, model: Any) -> list[EngineTensor]:
    """Returns descriptions of the weight and, if there is one, the bias of a linear layer, with the
    rows of HF's layers that this rank holds."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    parent_path, _, leaf = path.rpartition(".")
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]
    rows = _linear_rows(layer)
    if leaf == "conv1d":
        rows = _convolution_rows(layer, model.get_submodule(parent_path))
    # vLLM's row-parallel layers split the input dimension, which is the weight's columns.
    is_split_by_column = isinstance(layer, RowParallelLinear)
    # On a CPU vLLM packs weights for its own matrix product, and calls that product cpu_linear.
    is_packed = hasattr(layer, "cpu_linear")
    product = _product(layer) if is_packed else None
    # It packs a convolution for another product (bfloat16, width 4).
    if hasattr(layer, "_cpu_unpacked_conv_weight"):
        product = _convolution_product(layer)
    weight = EngineTensor(
        f"{path}.weight",
        fused_rows([f"{name}.weight" for name in names], rows),
        values=layer.weight if product is None else None,
        product=product,
        column_slice=layer.tp_rank if is_split_by_column else 0,
        num_column_slices=layer.tp_size if is_split_by_column else 1,
    )
    if layer.bias is None:
        return [weight]
    # A bias is never split by column. Row-parallel layers hold the whole of it on each rank.
    bias_parts = fused_rows([f"{name}.bias" for name in names], rows)
    return [weight, EngineTensor(f"{path}.bias", bias_parts, layer.bias)]


def _vocabulary_tensors(path: str, layer: Any, model: Any) -> list[EngineTensor]:
    """Returns the one or two tensors of an embedding or an lm_head.

    The vocabulary is split over the ranks, and padded at each rank's end. On the CPU each layer has
    a plain weight and a packed copy of it: an embedding reads the plain one, an lm_head the packed
    one. A tied lm_head may share both with the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    # A model without lm_head uses the embedding itself as head (Gemma 2, Command R).
    head = getattr(model, "lm_head", None)
    is_head = isinstance(layer, ParallelLMHead) or layer is head or head is None
    name = f"{path}.weight"
    rows = layer.shard_indices
    start = rows.org_vocab_start_index
    num_rows = rows.org_vocab_end_index - start
    tensor_parts = (TensorPart(name, layer.org_vocab_size, start, 0, num_rows),)
    tensors = [EngineTensor(name, tensor_parts, layer.weight)]
    if is_head and hasattr(layer, "cpu_linear"):
        tensors.insert(0, EngineTensor(name, tensor_parts, None, _product(layer)))
    return tensors


def _layer_number(name: str) -> int | None:
    """Returns the number of the decoder layer to which a module or parameter belongs."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _experts_by_layer(hf_names: Iterable[str]) -> dict[int | None, dict[str, str]]:
    """Returns the HF names of `gate_up_proj` and `down_proj` of the experts of each layer."""
    names: dict[int | None, dict[str, str]] = {}
    for name in hf_names:
        leaf = name.rpartition(".experts.")[2]
        if leaf in ("gate_up_proj", "down_proj"):
            names.setdefault(_layer_number(name), {})[leaf] = name
    return names


def _experts_tensors(path: str, layer: Any, names: Mapping[str, str]) -> list[EngineTensor]:
    """Returns the two parameters of vLLM's experts of a layer.

    `w13_weight` [experts, gate rows above up rows, hidden] and `w2_weight` [experts, hidden,
    intermediate] are HF's with the intermediate dimension split over the ranks. On a CPU vLLM packs
    both, and on some GPUs it shuffles them; Triton's kernels take them as they are
    (`UnquantizedMoeBackend`, 0.26 to 0.33)."""
    config = layer.moe_config
    rank, num_ranks = config.moe_parallel_config.tp_rank, config.moe_parallel_config.tp_size
    num_experts, hidden = config.num_experts, layer.w13_weight.shape[-1]
    # 0.26 has no padding, and no name for the width without it.
    width = getattr(config, "intermediate_size_per_partition_unpadded", layer.w2_weight.shape[-1])
    gate_up_rows, down_rows = 2 * num_experts * num_ranks * width, num_experts * hidden
    down = EngineTensor(
        f"{path}.w2_weight",
        (TensorPart(names["down_proj"], down_rows, 0, 0, down_rows),),
        layer.w2_weight,
        column_slice=rank,
        num_column_slices=num_ranks,
        layer=layer,
    )
    backend = layer.quant_method.unquantized_backend.name
    if backend == "CPU":
        gate_up = TensorPart(names["gate_up_proj"], gate_up_rows, 0, 0, gate_up_rows)
        return [replace(down, values=None, product=_experts_product(layer), gate_up=gate_up)]
    if backend != "TRITON":  # another order, which only its own kernel knows
        names = {"gate_up_proj": f"{path}.w13_weight", "down_proj": f"{path}.w2_weight"}
        down = replace(down, parts=(replace(down.parts[0], name=names["down_proj"]),))
    # Of the gate's rows and the up projection's of each expert a rank has one block. A rank alone
    # has all rows: one part, which one copy brings.
    num_blocks = 2 * num_experts if num_ranks > 1 else 1
    height = gate_up_rows // (num_blocks * num_ranks)
    blocks = tuple(
        TensorPart(
            names["gate_up_proj"],
            gate_up_rows,
            hf_start=(block * num_ranks + rank) * height,
            start=block * height,
            num_rows=height,
        )
        for block in range(num_blocks)
    )
    return [EngineTensor(f"{path}.w13_weight", blocks, layer.w13_weight, layer=layer), down]


def _experts_product(layer: Any) -> Product:
    """Returns a function that gives one vector to each expert of the layer, and returns their
    outputs one after the other, [hidden] -> [experts * hidden]."""

    def product(vector: Tensor) -> Tensor:
        """Runs vLLM's kernel for experts on a batch with one token for each expert."""
        num_experts = layer.moe_config.num_experts
        # Each row of the input goes to one expert, with the weight 1.
        experts = torch.arange(num_experts, dtype=torch.int32, device=layer.w2_weight.device)
        outputs: Tensor = layer.quant_method.apply(
            layer=layer,
            x=vector.to(layer.w2_weight.device).expand(num_experts, -1).contiguous(),
            topk_weights=torch.ones(num_experts, 1, device=layer.w2_weight.device),
            topk_ids=experts[:, None],
            shared_experts=None,
            shared_experts_input=None,
        )
        return outputs.flatten()

    return product


def adapter_tensors(model: Any, rank: int, layers: Collection[str]) -> list[EngineTensor]:
    """Returns descriptions of the LoRA matrices A and B of the HF `layers` in vLLM's layers, which
    split them over the ranks as they split the weights.

    `rank` is the rank of the adapters, which may be less than the room that vLLM keeps."""
    from vllm.model_executor.layers.linear import LinearBase

    tensors = []
    for path, wrapper in model.lora_manager.modules.items():
        # Older versions also wrap the embedding and the lm_head.
        if not isinstance(wrapper.base_layer, LinearBase):
            continue
        base = _linear_tensors(path, wrapper.base_layer, model)[0]
        slices = (
            [base.parts]
            if wrapper.n_slices == 1
            else [(tensor_part,) for tensor_part in base.parts]
        )
        for tensor_parts, lora_a, lora_b in zip(
            slices, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True
        ):
            layer = tensor_parts[0].name.removesuffix(".weight")
            if layer not in layers:
                continue
            name_a = f"{layer}.lora_A.weight"
            name_b = f"{layer}.lora_B.weight"
            parts_b = tuple(
                replace(tensor_part, name=name_b, start=tensor_part.start - tensor_parts[0].start)
                for tensor_part in tensor_parts
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
    """Returns which rows of a fused parameter, such as qkv_proj, are which rows of HF tensors.

    A fused parameter has its parts (q, k, v) one below the other. `layout` has an entry for each
    part: its rows on this rank, the rows of the whole HF tensor, and which block of them this rank
    has. `names` has the HF tensor of each part. A checkpoint that fuses parts too (Phi-3, Qwen3.5)
    has one tensor for several of them: then there are fewer names than parts, and the first name
    stands for all parts that the others leave."""
    starts = accumulate((num_rows for num_rows, *_ in layout), initial=0)
    num_fused = max(1, len(layout) - len(names) + 1)
    tensor_parts = tuple(
        TensorPart(name, num_hf_rows, block * num_rows, start, num_rows)
        for name, start, (num_rows, num_hf_rows, block) in zip(
            [names[0]] * num_fused + list(names[1:]), starts, layout, strict=False
        )
    )
    return _parts_of_one(names[0], tensor_parts[:num_fused]) + tensor_parts[num_fused:]


def _convolution_product(layer: Any) -> Product:
    """Returns the Product of a packed depthwise convolution: each channel's weights times the
    vector, [width] -> [channels]."""

    def product(vector: Tensor) -> Tensor:
        """Runs vLLM's kernel on one sequence, and returns the output at its last token."""
        from vllm._custom_ops import causal_conv1d_fwd_cpu

        channels, width = layer._cpu_unpacked_conv_weight.shape
        # A sequence of so many tokens, whose last one sees all of the vector.
        outputs: Tensor = causal_conv1d_fwd_cpu(
            x=vector[:, None].repeat(1, channels).t(),
            weight=layer.weight,
            bias=None,
            conv_states=vector.new_zeros(1, width - 1, channels).transpose(1, 2),
            query_start_loc=torch.tensor([0, width], dtype=torch.int32),
            cache_indices=torch.tensor([0], dtype=torch.int32),
            has_initial_state=torch.tensor([False]),
            silu_activation=False,
            is_weight_packed=True,
        )
        return outputs[:, -1]

    return product


def _product(layer: Any) -> Product:
    """Returns a function that multiplies the layer's weight with a vector by the layer's own
    kernel, without the bias and without a sum over the ranks of the engine."""
    # GLM4-MoE's routers are float32 in a bfloat16 engine too.
    return lambda vector: layer.quant_method.apply(
        layer, vector.to(next(layer.parameters()))[None], None
    )[0]
